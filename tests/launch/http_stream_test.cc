// Responses that take their time: pieces, clients that go, slow readers, the server's end, load.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <atomic>
#include <ctime>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "launch/http/http_server.h"
#include "tests/launch/http_client.h"

namespace lockstep {
namespace {

TEST(HttpStreamTest, PiecesComeAtOnce) {
  TestServer server;
  TestClient client = server.Connect();
  ASSERT_TRUE(client.Send(Get("/held")));
  std::shared_ptr<HttpExchange> exchange = server.Next();
  exchange->Begin(200, {{"Content-Type", "text/event-stream"}});
  ASSERT_TRUE(client.WaitFor("\r\n\r\n"));
  for (int i = 0; i < 50; ++i) {
    const std::string piece = "data: " + std::to_string(i) + "\n\n";
    exchange->Write(piece);
    ASSERT_TRUE(client.WaitFor(piece + "\r\n"));
  }
  exchange->Write("");  // would end the body
  exchange->Write("last");
  exchange->End();
  exchange->Write("behind the end");
  exchange->End();
  exchange->Respond(500, {}, "too late");
  const TestResponse response = client.ReadResponse();
  EXPECT_TRUE(response.complete);
  EXPECT_EQ(response.num_chunks, 51);
  EXPECT_EQ(response.body.substr(response.body.size() - 4), "last");
  EXPECT_EQ(client.Ask(Get("/echo")).status, 200);
}

TEST(HttpStreamTest, PiecesWrittenTogetherGoTogether) {
  TestServer server({}, {{"/stream", [](const std::shared_ptr<HttpExchange>& exchange) {
                            exchange->Begin(200, {});
                            for (const char* piece : {"a", "b", "c"}) exchange->Write(piece);
                            exchange->End();
                          }}});
  TestClient client = server.Connect();
  const TestResponse response = client.Ask(Get("/stream"));
  EXPECT_EQ(response.body, "abc");
  EXPECT_EQ(response.num_chunks, 1);
}

TEST(HttpStreamTest, OldClientsGetUnframedPieces) {
  TestServer server;
  TestClient client = server.Connect();
  ASSERT_TRUE(client.Send("GET /held HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"));
  std::shared_ptr<HttpExchange> exchange = server.Next();
  exchange->Begin(200, {});
  exchange->Write("one ");
  exchange->Write("two");
  exchange->End();
  const TestResponse response = client.ReadResponse();
  EXPECT_EQ(response.Header("Connection"), "close");
  EXPECT_EQ(response.Header("Transfer-Encoding"), "");
  EXPECT_EQ(response.body, "one two");
}

TEST(HttpStreamTest, LargeResponses) {
  TestServer server;
  TestClient client = server.Connect();
  std::string large(20 << 20, 'x');
  for (size_t i = 0; i < large.size(); i += 997) large[i] = static_cast<char>('a' + i % 26);
  ASSERT_TRUE(client.Send(Get("/held") + Get("/held") + Get("/echo")));
  server.Next()->Respond(200, {}, large);
  EXPECT_EQ(client.ReadResponse().body, large);
  std::shared_ptr<HttpExchange> exchange = server.Next();
  exchange->Begin(200, {});
  exchange->Write(large);  // one piece may be longer than what is kept
  std::thread writer([exchange] { exchange->End(); });
  EXPECT_EQ(client.ReadResponse().body, large);
  writer.join();
  EXPECT_EQ(client.ReadResponse().status, 200);
}

// How a client goes, and what it has got by then.
struct Going {
  const char* name;
  bool begun;
  bool reset;
  const char* version;
};

class HttpGoneTest : public testing::TestWithParam<Going> {};

TEST_P(HttpGoneTest, IsSeenWithoutAnythingSent) {
  const Going& going = GetParam();
  TestServer server;
  TestClient client = server.Connect();
  ASSERT_TRUE(client.Send(std::string("GET /held HTTP/") + going.version + "\r\nHost: a\r\n\r\n"));
  std::shared_ptr<HttpExchange> exchange = server.Next();
  std::atomic<int> calls = 0;
  exchange->OnGone([&calls] { ++calls; });
  if (going.begun) {
    exchange->Begin(200, {});
    exchange->Write("piece");
    ASSERT_TRUE(client.WaitFor("piece"));
  }
  EXPECT_FALSE(exchange->gone());
  if (going.reset) {
    client.Reset();
  } else {
    client.Close();
  }
  EXPECT_TRUE(Eventually([&] { return calls == 1; }, 1));
  EXPECT_TRUE(exchange->gone());
  EXPECT_TRUE(Eventually([&] { return server.server().num_connections() == 0; }));
  // Nothing of this does harm.
  exchange->Begin(200, {});
  exchange->Write("piece");
  exchange->End();
  EXPECT_EQ(calls, 1);
}

INSTANTIATE_TEST_SUITE_P(All, HttpGoneTest,
                         testing::Values(Going{"PendingClosed", false, false, "1.1"},
                                         Going{"PendingReset", false, true, "1.1"},
                                         Going{"StreamingClosed", true, false, "1.1"},
                                         Going{"StreamingReset", true, true, "1.1"},
                                         Going{"OldPendingClosed", false, false, "1.0"},
                                         Going{"OldStreamingReset", true, true, "1.0"}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(HttpStreamTest, OnGoneRunsAtOnceWhenTheClientHasGone) {
  TestServer server;
  TestClient client = server.Connect();
  ASSERT_TRUE(client.Send(Get("/held")));
  std::shared_ptr<HttpExchange> exchange = server.Next();
  client.Close();
  ASSERT_TRUE(Eventually([&] { return exchange->gone(); }));
  std::thread::id ran;
  exchange->OnGone([&ran] { ran = std::this_thread::get_id(); });
  EXPECT_EQ(ran, std::this_thread::get_id());
}

TEST(HttpStreamTest, OnGoneDoesNotRunBehindTheEnd) {
  TestServer server;
  TestClient client = server.Connect();
  ASSERT_TRUE(client.Send(Get("/held")));
  std::shared_ptr<HttpExchange> exchange = server.Next();
  auto owned = std::make_shared<int>(0);
  const std::weak_ptr<int> watched = owned;
  exchange->OnGone([owned] { ADD_FAILURE() << "called"; });
  owned.reset();
  exchange->Respond(200, {}, "");
  EXPECT_TRUE(watched.expired());  // what the callback held is free
  EXPECT_EQ(client.ReadResponse().status, 200);
  client.Close();
  EXPECT_TRUE(Eventually([&] { return server.server().num_connections() == 0; }));
  exchange->OnGone([] { ADD_FAILURE() << "called"; });
}

// As nc does, and long enough for several bytes to be sent ahead.
TEST(HttpStreamTest, ClientsThatOnlyStopSendingAreAnswered) {
  TestServer server;
  TestClient whole = server.Connect(), pieces = server.Connect(), old = server.Connect();
  TestClient stream = server.Connect();
  ASSERT_TRUE(whole.Send(Get("/held") + Get("/echo")));
  whole.EndSending();
  std::shared_ptr<HttpExchange> for_whole = server.Next();
  ASSERT_TRUE(pieces.Send(Get("/held")));
  pieces.EndSending();
  std::shared_ptr<HttpExchange> for_pieces = server.Next();
  ASSERT_TRUE(old.Send("GET /held HTTP/1.0\r\n\r\n"));
  old.EndSending();
  std::shared_ptr<HttpExchange> for_old = server.Next();
  ASSERT_TRUE(stream.Send(Get("/held")));
  std::shared_ptr<HttpExchange> for_stream = server.Next();
  for_stream->Begin(200, {});
  for_stream->Write("one ");
  ASSERT_TRUE(stream.WaitFor("one "));
  stream.EndSending();
  for (const auto& exchange : {for_whole, for_pieces, for_old, for_stream}) {
    exchange->OnGone([] { ADD_FAILURE() << "called"; });
  }

  Sleep(2.5);
  for_whole->Respond(200, {}, "whole");
  EXPECT_EQ(whole.ReadResponse().body, "whole");
  EXPECT_EQ(whole.ReadResponse().body, "GET /echo? ");
  EXPECT_TRUE(whole.ReadsEnd());

  for_pieces->Begin(200, {});
  for_pieces->Write("in pieces");
  Sleep(1.3);
  for_pieces->End();
  const TestResponse in_pieces = pieces.ReadResponse();
  EXPECT_TRUE(in_pieces.complete);
  EXPECT_EQ(in_pieces.body, "in pieces");
  EXPECT_TRUE(pieces.ReadsEnd());

  for_old->Respond(200, {}, "old");
  EXPECT_EQ(old.ReadResponse().body, "old");

  for_stream->Write("two");
  for_stream->End();
  EXPECT_EQ(stream.ReadResponse().body, "one two");
}

TEST(HttpStreamTest, AHalfClosedClientThatGoesLaterIsSeen) {
  TestServer server;
  TestClient client = server.Connect();
  ASSERT_TRUE(client.Send(Get("/held")));
  client.EndSending();
  std::shared_ptr<HttpExchange> exchange = server.Next();
  ASSERT_TRUE(client.WaitFor("H"));
  EXPECT_FALSE(exchange->gone());
  client.Close();
  EXPECT_TRUE(Eventually([&] { return exchange->gone(); }, 5));
}

TEST(HttpStreamTest, SlowReadersAreCutOffAndOthersAreNot) {
  HttpServerOptions options;
  options.max_unsent_bytes = 1 << 20;
  TestServer server(options);
  TestClient slow = server.Connect(), quick = server.Connect();
  slow.ShrinkReceiveBuffer();
  ASSERT_TRUE(slow.Send(Get("/held")));
  std::shared_ptr<HttpExchange> to_slow = server.Next();
  ASSERT_TRUE(quick.Send(Get("/held")));
  std::shared_ptr<HttpExchange> to_quick = server.Next();
  std::atomic<int> calls = 0;
  to_slow->OnGone([&calls] { ++calls; });
  to_slow->Begin(200, {});
  to_quick->Begin(200, {});
  const std::string piece(10000, 'p');
  int64_t written = 0;
  while (!to_slow->gone() && written < (100 << 20)) {
    to_slow->Write(piece);
    written += static_cast<int64_t>(piece.size());
    const std::string mark = std::to_string(written) + ";";
    to_quick->Write(mark);
    ASSERT_TRUE(quick.WaitFor(mark));
  }
  EXPECT_TRUE(to_slow->gone());
  EXPECT_GE(written, options.max_unsent_bytes);
  EXPECT_LT(written, 16 << 20);  // what is kept here and in the kernel
  EXPECT_TRUE(Eventually([&] { return calls == 1; }));
  EXPECT_FALSE(to_quick->gone());
  to_quick->End();
  EXPECT_TRUE(quick.ReadResponse().complete);
  EXPECT_FALSE(slow.ReadResponse().complete);
}

TEST(HttpStreamTest, ClientsThatTakeNothingAreCutOffInTime) {
  HttpServerOptions options;
  options.idle_seconds = 0.5;
  TestServer server(options);
  TestClient client = server.Connect();
  client.ShrinkReceiveBuffer();
  ASSERT_TRUE(client.Send(Get("/held")));
  server.Next()->Respond(200, {}, std::string(32 << 20, 'x'));
  EXPECT_TRUE(Eventually([&] { return server.server().num_connections() == 0; }));
}

TEST(HttpStreamTest, RunningResponsesGoOnWhenNoMoreIsAccepted) {
  TestServer server;
  TestClient streaming = server.Connect(), idle = server.Connect(), fresh = server.Connect();
  EXPECT_EQ(idle.Ask(Get("/echo")).status, 200);
  ASSERT_TRUE(streaming.Send(Get("/held")));
  std::shared_ptr<HttpExchange> exchange = server.Next();
  exchange->Begin(200, {});
  exchange->Write("one ");
  ASSERT_TRUE(streaming.WaitFor("one "));
  server.server().StopAccepting();
  EXPECT_TRUE(idle.ReadsEnd());
  EXPECT_FALSE(server.Connect().connected());
  // It had connected before; its request is on the way.
  EXPECT_EQ(fresh.Ask(Get("/echo")).Header("Connection"), "close");
  EXPECT_TRUE(fresh.ReadsEnd());
  idle.Close();
  fresh.Close();
  server.server().Drain(0.05);  // not longer
  EXPECT_EQ(server.server().num_connections(), 1);
  std::thread ending([&] {
    Sleep(0.1);
    exchange->Write("two");
    exchange->End();
    EXPECT_EQ(streaming.ReadResponse().body, "one two");
    EXPECT_TRUE(streaming.ReadsEnd());
    streaming.Close();
  });
  server.server().Drain(20);
  EXPECT_EQ(server.server().num_connections(), 0);
  ending.join();
}

TEST(HttpStreamTest, DrainSendsWhatWasWritten) {
  TestServer server;
  TestClient client = server.Connect();
  ASSERT_TRUE(client.Send(Get("/held")));
  std::shared_ptr<HttpExchange> exchange = server.Next();
  const std::string large(8 << 20, 'x');
  exchange->Begin(200, {});
  exchange->Write(large);
  exchange->End();
  std::thread reader([&] {
    EXPECT_EQ(client.ReadResponse().body, large);
    client.Close();
  });
  server.server().Drain(20);
  server.Stop();
  reader.join();
}

TEST(HttpStreamTest, ExchangesMayOutliveTheServer) {
  TestServer server;
  TestClient pending = server.Connect(), streaming = server.Connect();
  ASSERT_TRUE(pending.Send(Get("/held")));
  std::shared_ptr<HttpExchange> first = server.Next();
  ASSERT_TRUE(streaming.Send(Get("/held")));
  std::shared_ptr<HttpExchange> second = server.Next();
  second->Begin(200, {});
  second->Write("one");
  ASSERT_TRUE(streaming.WaitFor("one"));
  std::atomic<int> calls = 0;
  first->OnGone([&calls] { ++calls; });
  second->OnGone([&calls] { ++calls; });
  std::atomic<bool> stop = false;
  std::thread writer([&] {
    while (!stop) second->Write("more");
  });
  server.Stop();
  EXPECT_EQ(calls, 2);
  EXPECT_TRUE(first->gone());
  stop = true;
  writer.join();
  first->Respond(200, {}, "");
  second->End();
  EXPECT_FALSE(streaming.ReadResponse().complete);
  EXPECT_TRUE(pending.ReadToEnd().empty());
}

TEST(HttpStreamTest, ManyThreadsMayAnswerOneExchange) {
  TestServer server;
  TestClient client = server.Connect();
  for (int round = 0; round < 50; ++round) {
    ASSERT_TRUE(client.Send(Get("/held")));
    std::shared_ptr<HttpExchange> exchange = server.Next();
    const bool whole = round % 2 == 0;
    if (!whole) exchange->Begin(200, {});
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([exchange, whole] {
        if (whole) return exchange->Respond(200, {}, "answer");
        for (int k = 0; k < 100; ++k) exchange->Write("x");
      });
    }
    for (std::thread& thread : threads) thread.join();
    if (!whole) exchange->End();
    EXPECT_EQ(client.ReadResponse().body, whole ? "answer" : std::string(400, 'x'));
  }
}

// Clients come and go while another thread writes to all.
TEST(HttpStreamTest, DisconnectsUnderLoad) {
  std::mutex mutex;
  std::vector<std::shared_ptr<HttpExchange>> running;
  std::atomic<int> asked = 0, over = 0;  // each that asked ends or goes, once
  TestServer server({}, {{"/stream", [&](const std::shared_ptr<HttpExchange>& exchange) {
                            ++asked;
                            exchange->OnGone([&over] { ++over; });
                            exchange->Begin(200, {});
                            const std::lock_guard lock(mutex);
                            running.push_back(exchange);
                          }}});
  std::atomic<bool> stop = false;
  std::thread writer([&] {
    for (int step = 0; !stop; ++step) {
      const std::lock_guard lock(mutex);
      for (const auto& exchange : running) exchange->Write("piece");
      std::erase_if(running, [](const auto& exchange) { return exchange->gone(); });
      if (running.empty() || step % 50 != 0) continue;
      running.front()->End();
      if (!running.front()->gone()) ++over;
      running.erase(running.begin());
    }
  });
  int complete = 0;
  for (int round = 0; round < 400; ++round) {
    TestClient client = server.Connect();
    ASSERT_TRUE(client.Send(Get("/stream")));
    if (round % 4 == 0) client.WaitFor("piece");
    if (round % 4 == 1) client.Reset();
    if (round % 40 == 3) complete += client.ReadResponse().complete ? 1 : 0;
  }
  EXPECT_EQ(complete, 10);
  EXPECT_TRUE(Eventually([&] { return server.server().num_connections() == 0; }));
  stop = true;
  writer.join();
  EXPECT_LE(over, asked);
  EXPECT_GE(over + static_cast<int>(running.size()), asked);
}

TEST(HttpLoadTest, AThousandConnectionsAndABurst) {
  TestServer server;
  std::vector<TestClient> open;
  for (int i = 0; i < 1000; ++i) {
    open.push_back(server.Connect());
    ASSERT_TRUE(open.back().connected()) << i;
  }
  ASSERT_TRUE(Eventually([&] { return server.server().num_connections() == 1000; }));
  for (TestClient& client : open) ASSERT_TRUE(client.Send(Get("/echo")));
  for (TestClient& client : open) ASSERT_EQ(client.ReadResponse().status, 200);
  // 600 at once beside them, each by its own connection, before the first is looked at.
  std::vector<TestClient> burst;
  for (int i = 0; i < 600; ++i) burst.push_back(server.Connect());
  for (TestClient& client : burst) ASSERT_TRUE(client.Send(Post("/held", "b")));
  std::vector<std::shared_ptr<HttpExchange>> held;
  for (int i = 0; i < 600; ++i) held.push_back(server.Next());
  for (const auto& exchange : held) exchange->Begin(200, {});
  for (int piece = 0; piece < 5; ++piece) {
    for (const auto& exchange : held) exchange->Write("p");
  }
  for (const auto& exchange : held) exchange->End();
  for (TestClient& client : burst) ASSERT_EQ(client.ReadResponse().body, "ppppp");
  for (TestClient& client : open) ASSERT_EQ(client.Ask(Get("/echo")).status, 200);
  open.clear();
  burst.clear();
  EXPECT_TRUE(Eventually([&] { return server.server().num_connections() == 0; }));
}

// What one client sends ahead is left in the kernel while other connections have their turn.
TEST(HttpLoadTest, RequestsAreNotReadAheadWithoutBound) {
  constexpr int64_t kCount = 64000;
  constexpr int64_t kKernelBytes = 24 << 20;  // more than two sockets hold
  std::atomic<int64_t> answered = 0;
  TestServer server({}, {{"/count", [&answered](const std::shared_ptr<HttpExchange>& exchange) {
                            ++answered;
                            exchange->Respond(200, {}, "");
                          }}});
  TestClient client = server.Connect();
  const std::string request = Post("/count", std::string(1000, 'b'));
  const auto bytes = static_cast<int64_t>(request.size());
  int64_t answered_when_sent = 0;
  std::thread sender([&] {
    std::string requests;
    for (int i = 0; i < 100; ++i) requests += request;
    for (int64_t i = 0; i < kCount; i += 100) EXPECT_TRUE(client.Send(requests));
    answered_when_sent = answered;
    client.EndSending();
  });
  while (client.ReadMore()) client.Discard();
  sender.join();
  EXPECT_EQ(answered, kCount);
  EXPECT_GT(answered_when_sent * bytes, kCount * bytes - kKernelBytes);
}

int NumOpenFiles() {
  int count = 0;
  for (int fd = 0; fd < 4096; ++fd) count += fcntl(fd, F_GETFD) >= 0 ? 1 : 0;
  return count;
}

TEST(HttpLoadTest, WithoutFileDescriptorsClientsWait) {
  TestServer server;
  TestClient before = server.Connect();
  EXPECT_EQ(before.Ask(Get("/echo")).status, 200);
  rlimit saved = {};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &saved), 0);
  // This side's sockets, while they can be made: each of the server's then needs one more.
  constexpr int kClients = 40, kServedAtOnce = 20;
  std::vector<int> sockets;
  for (int i = 0; i < kClients; ++i) sockets.push_back(socket(AF_INET, SOCK_STREAM, 0));
  rlimit low = saved;
  low.rlim_cur = static_cast<rlim_t>(NumOpenFiles()) + kServedAtOnce;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
  std::vector<TestClient> clients;
  for (const int fd : sockets) clients.emplace_back(fd, server.server().port(), AF_INET);
  std::timespec start, end;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &start);
  Sleep(0.5);
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &end);
  const double cpu = static_cast<double>(end.tv_sec - start.tv_sec) +
                     1e-9 * static_cast<double>(end.tv_nsec - start.tv_nsec);
  EXPECT_LT(cpu, 0.25);                             // it does not spin
  EXPECT_EQ(before.Ask(Get("/echo")).status, 200);  // and serves those it has
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &saved), 0);
  for (TestClient& client : clients) {
    ASSERT_TRUE(client.connected());
    EXPECT_EQ(client.Ask(Get("/echo")).status, 200);
  }
}

}  // namespace
}  // namespace lockstep

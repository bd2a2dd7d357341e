// The HTTP server as a client on a socket sees it: messages, limits, refusals.
#include "launch/http/http_server.h"

#include <gtest/gtest.h>
#include <netdb.h>
#include <unistd.h>

#include <future>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/launch/http_client.h"

namespace lockstep {
namespace {

TEST(HttpServerTest, AResponseHasWhatClientsExpect) {
  TestServer server;
  TestClient client = server.Connect();
  const TestResponse response = client.Ask(Get("/echo?a=b%20c"));
  EXPECT_EQ(response.status, 200);
  EXPECT_EQ(response.head.substr(0, 17), "HTTP/1.1 200 OK\r\n");
  EXPECT_EQ(response.body, "GET /echo?a=b%20c ");
  EXPECT_EQ(response.Header("Content-Type"), "text/plain");
  EXPECT_EQ(response.Header("Server"), "lockstep");
  EXPECT_EQ(response.Header("Date").size(), 29u);
  EXPECT_EQ(response.Header("Date").substr(25), " GMT");
  EXPECT_EQ(response.Header("x-request-id").size(), 32u);
  EXPECT_EQ(response.Header("Connection"), "");
}

TEST(HttpServerTest, RequestIdsAreTheClientsWhereSane) {
  TestServer server;
  TestClient client = server.Connect();
  EXPECT_EQ(client.Ask(Get("/echo", "X-Request-ID: a-1:b\r\n")).Header("x-request-id"), "a-1:b");
  std::set<std::string> made;
  for (const std::string& bad : {std::string("a b"), std::string(129, 'a'), std::string("\"")}) {
    const std::string id =
        client.Ask(Get("/echo", "x-request-id: " + bad + "\r\n")).Header("x-request-id");
    EXPECT_EQ(id.size(), 32u);
    made.insert(id);
  }
  EXPECT_EQ(made.size(), 3u);
}

TEST(HttpServerTest, HeadersCannotSplitTheResponse) {
  TestServer server;
  TestClient client = server.Connect();
  ASSERT_TRUE(client.Send(Get("/held")));
  server.Next()->Respond(200,
                         {{"X-A", "1\r\nX-B: 2"},
                          {"Content-Length", "1000"},
                          {"Transfer-Encoding", "chunked"},
                          {"x-request-id", "other"}},
                         "body");
  const TestResponse response = client.ReadResponse();
  EXPECT_EQ(response.Header("X-A"), "1  X-B: 2");
  EXPECT_EQ(response.Header("X-B"), "");
  EXPECT_EQ(response.Header("Transfer-Encoding"), "");
  EXPECT_EQ(response.body, "body");
  EXPECT_NE(response.Header("x-request-id"), "other");
  EXPECT_EQ(client.Ask(Get("/echo")).status, 200);
}

TEST(HttpServerTest, CommonHeadersAreOnEveryResponse) {
  HttpServerOptions options;
  options.common_headers = {{"Access-Control-Allow-Origin", "*"}};
  TestServer server(options);
  TestClient client = server.Connect();
  EXPECT_EQ(client.Ask(Get("/echo")).Header("Access-Control-Allow-Origin"), "*");
  EXPECT_EQ(client.Ask("nonsense\r\n\r\n").Header("Access-Control-Allow-Origin"), "*");
}

TEST(HttpServerTest, ConnectionsAreKeptAsTheClientAsks) {
  TestServer server;
  TestClient client = server.Connect();
  for (int i = 0; i < 100; ++i) {
    const std::string body(static_cast<size_t>(i) * 1000, 'x');
    ASSERT_EQ(client.Ask(Post("/echo", body)).body, "POST /echo? " + body);
  }
  const TestResponse last = client.Ask(Get("/echo", "Connection: close\r\n"));
  EXPECT_EQ(last.Header("Connection"), "close");
  EXPECT_TRUE(client.ReadsEnd());

  TestClient old = server.Connect();
  const TestResponse kept = old.Ask("GET /echo HTTP/1.0\r\nConnection: keep-alive\r\n\r\n");
  EXPECT_EQ(kept.Header("Connection"), "keep-alive");
  EXPECT_EQ(old.Ask("GET /echo HTTP/1.0\r\n\r\n").Header("Connection"), "close");
  EXPECT_TRUE(old.ReadsEnd());

  TestClient told = server.Connect();  // by who answers
  ASSERT_TRUE(told.Send(Get("/held")));
  server.Next()->Respond(200, {{"Connection", "close"}}, "");
  EXPECT_EQ(told.ReadResponse().Header("Connection"), "close");
  EXPECT_TRUE(told.ReadsEnd());
}

TEST(HttpServerTest, PipelinedRequestsAreAnsweredInOrder) {
  TestServer server;
  TestClient client = server.Connect();
  std::string requests = Get("/held");
  for (int i = 0; i < 100; ++i) requests += Post("/echo", std::to_string(i));
  requests += Get("/held");
  ASSERT_TRUE(client.Send(requests));
  std::shared_ptr<HttpExchange> first = server.Next();
  EXPECT_FALSE(client.ReadMore(0.05));  // the others wait
  first->Respond(200, {}, "first");
  EXPECT_EQ(client.ReadResponse().body, "first");
  for (int i = 0; i < 100; ++i) {
    ASSERT_EQ(client.ReadResponse().body, "POST /echo? " + std::to_string(i));
  }
  server.Next()->Respond(200, {}, "last");
  EXPECT_EQ(client.ReadResponse().body, "last");
}

// More than is read ahead while a response is pending.
TEST(HttpServerTest, PipelinedRequestsOfAnyAmount) {
  TestServer server;
  TestClient client = server.Connect();
  constexpr int kCount = 3000;
  std::thread sender([&client] {
    std::string requests = Get("/held");
    for (int i = 0; i < kCount; ++i) requests += Post("/echo", std::string(200, 'b'));
    client.Send(requests);
  });
  std::shared_ptr<HttpExchange> first = server.Next();
  Sleep(0.05);
  first->Respond(200, {}, "first");
  EXPECT_EQ(client.ReadResponse().body, "first");
  for (int i = 0; i < kCount; ++i) {
    ASSERT_EQ(client.ReadResponse().body, "POST /echo? " + std::string(200, 'b'));
  }
  sender.join();
}

TEST(HttpServerTest, ChunkedBodies) {
  TestServer server;
  TestClient client = server.Connect();
  const std::string head = "POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: Chunked\r\n\r\n";
  EXPECT_EQ(client.Ask(head + "5\r\nhello\r\nA;x=\"1;2\"\r\n, chunked!\r\n0\r\n\r\n").body,
            "POST /echo? hello, chunked!");
  EXPECT_EQ(client.Ask(head + "0\r\n\r\n").body, "POST /echo? ");
  // Trailers are no headers.
  ASSERT_TRUE(
      client.Send("POST /held HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
                  "003\r\nabc\r\n0\r\nAuthorization: x\r\n\r\n"));
  std::shared_ptr<HttpExchange> exchange = server.Next();
  EXPECT_EQ(exchange->request().body, "abc");
  EXPECT_EQ(exchange->request().Header("Authorization"), nullptr);
  exchange->Respond(204, {}, "dropped");
  EXPECT_EQ(client.ReadResponse(true).status, 204);
  EXPECT_EQ(client.Ask(Get("/echo")).status, 200);
}

TEST(HttpServerTest, RequestsMayComeByteByByte) {
  TestServer server;
  TestClient client = server.Connect();
  const std::string request =
      "\r\nPOST /echo?q HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
      "5\r\nhello\r\n0\r\nX: y\r\n\r\n" +
      Post("/echo", "second");
  for (const char byte : request) {
    ASSERT_TRUE(client.Send(std::string(1, byte)));
    Sleep(0.0002);
  }
  EXPECT_EQ(client.ReadResponse().body, "POST /echo?q hello");
  EXPECT_EQ(client.ReadResponse().body, "POST /echo? second");
}

TEST(HttpServerTest, ContinueIsSentWhereItIsWaitedFor) {
  HttpServerOptions options;
  options.max_body_bytes = 100;
  TestServer server(options);
  TestClient client = server.Connect();
  const auto head = [](int length) {
    return "POST /echo HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: " +
           std::to_string(length) + "\r\n\r\n";
  };
  ASSERT_TRUE(client.Send(head(4)));
  EXPECT_EQ(client.ReadResponse().status, 100);
  EXPECT_EQ(client.Ask("body").body, "POST /echo? body");
  // Not where the body is there already, or there is none.
  EXPECT_EQ(client.Ask(head(0)).status, 200);
  ASSERT_TRUE(client.Send(head(200)));
  EXPECT_EQ(client.ReadResponse().status, 413);
  EXPECT_TRUE(client.ReadsEnd());
}

TEST(HttpServerTest, HeadIsAnsweredWithoutBody) {
  TestServer server;
  TestClient client = server.Connect();
  ASSERT_TRUE(client.Send("HEAD /echo HTTP/1.1\r\nHost: a\r\n\r\n" + Get("/echo")));
  const TestResponse head = client.ReadResponse(true);
  EXPECT_EQ(head.Header("Content-Length"), std::to_string(sizeof("HEAD /echo? ") - 1));
  EXPECT_EQ(client.ReadResponse().body, "GET /echo? ");

  ASSERT_TRUE(client.Send("HEAD /held HTTP/1.1\r\nHost: a\r\n\r\n" + Get("/echo")));
  std::shared_ptr<HttpExchange> exchange = server.Next();
  exchange->Begin(200, {});
  exchange->Write("dropped");
  exchange->End();
  EXPECT_EQ(client.ReadResponse(true).status, 200);
  EXPECT_EQ(client.ReadResponse().body, "GET /echo? ");
}

TEST(HttpServerTest, TargetsAreDecoded) {
  TestServer server;
  TestClient client = server.Connect();
  EXPECT_EQ(client.Ask(Get("/%65cho")).body, "GET /echo? ");
  EXPECT_EQ(client.Ask(Get("http://host:80/echo?x")).body, "GET /echo?x ");
  EXPECT_EQ(client.Ask("GET /echo?x? HTTP/1.1\r\nhost:\r\n\r\n").body, "GET /echo?x? ");
}

struct Refused {
  const char* name;
  std::string request;
  int status;
};

class HttpRefusalTest : public testing::TestWithParam<Refused> {};

TEST_P(HttpRefusalTest, IsAnsweredAndTheConnectionClosed) {
  HttpServerOptions options;
  options.max_body_bytes = 1000;
  options.max_header_bytes = 2000;
  TestServer server(options);
  TestClient client = server.Connect();
  client.Send(GetParam().request);  // the server may close before all was sent
  const TestResponse response = client.ReadResponse();
  EXPECT_EQ(response.status, GetParam().status) << response.head << response.body;
  EXPECT_TRUE(response.complete);
  EXPECT_EQ(response.Header("Content-Type"), "application/json");
  EXPECT_EQ(response.Header("Connection"), "close");
  EXPECT_EQ(response.body.find("{\"error\":\"" + std::to_string(GetParam().status)), 0u);
  EXPECT_TRUE(client.ReadsEnd());
  client.Close();
  EXPECT_EQ(server.Connect().Ask(Get("/echo")).status, 200);
  EXPECT_TRUE(Eventually([&] { return server.server().num_connections() == 0; }));
}

std::vector<Refused> Refusals() {
  const std::string chunked =
      "POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n";
  std::string many_headers = "GET /echo HTTP/1.1\r\nHost: a\r\n";
  for (int i = 0; i < 500; ++i) many_headers += "a: b\r\n";
  const auto post = [](const std::string& headers, const std::string& body) {
    return "POST /echo HTTP/1.1\r\nHost: a\r\n" + headers + "\r\n" + body;
  };
  return {
      {"NotHttp", "hello\r\n\r\n", 400},
      {"Tls", std::string("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 11), 400},
      {"Http2", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505},
      {"Http12", "GET / HTTP/1.2\r\nHost: a\r\n\r\n", 505},
      {"Http09", "GET /\r\n\r\n", 400},
      {"BadVersion", "GET / HTTQ/1.1\r\nHost: a\r\n\r\n", 400},
      {"BareLineFeeds", "GET /echo HTTP/1.1\nHost: a\n\n", 400},
      {"NulInHeader", std::string("GET /echo HTTP/1.1\r\nHost: a\0b\r\n\r\n", 33), 400},
      {"SpaceBeforeColon", "GET /echo HTTP/1.1\r\nHost : a\r\n\r\n", 400},
      {"NoColon", "GET /echo HTTP/1.1\r\nHost a\r\n\r\n", 400},
      {"NoHost", "GET /echo HTTP/1.1\r\n\r\n", 400},
      {"TwoHosts", "GET /echo HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", 400},
      {"RelativeTarget", "GET echo HTTP/1.1\r\nHost: a\r\n\r\n", 400},
      {"BadPercent", Get("/%zz"), 400},
      {"CutPercent", Get("/%4"), 400},
      {"Connect", "CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n", 400},
      {"LengthNoNumber", post("Content-Length: ten\r\n", ""), 400},
      {"LengthNegative", post("Content-Length: -1\r\n", ""), 400},
      {"LengthOverflow", post("Content-Length: 99999999999999999999\r\n", ""), 400},
      {"LengthsDiffer", post("Content-Length: 1\r\nContent-Length: 2\r\n", "ab"), 400},
      {"LengthAndChunked", post("Content-Length: 5\r\nTransfer-Encoding: chunked\r\n", ""), 400},
      {"ChunkedAndLength", post("Transfer-Encoding: chunked\r\nContent-Length: 5\r\n", ""), 400},
      {"ChunkedTwice", post("Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n", ""),
       400},
      {"OtherEncoding", post("Transfer-Encoding: gzip\r\n", ""), 501},
      {"TwoEncodings", post("Transfer-Encoding: gzip, chunked\r\n", ""), 501},
      {"OldChunked", "POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400},
      {"BadChunkSize", chunked + "xyz\r\n", 400},
      {"ChunkSizeOverflow", chunked + "ffffffffffffffffff\r\n", 400},
      {"NoLineAfterChunk", chunked + "3\r\nabcd\r\n0\r\n\r\n", 400},
      {"Expectation", post("Expect: miracles\r\nContent-Length: 1\r\n", ""), 417},
      {"LongBody", post("Content-Length: 1001\r\n", ""), 413},
      {"LongBodySent", post("Content-Length: 500000\r\n", std::string(500000, 'x')), 413},
      {"LongChunk", chunked + "3e9\r\n", 413},
      {"LongChunks", chunked + "3e8\r\n" + std::string(1000, 'x') + "\r\n1\r\n", 413},
      {"LongChunkLine", chunked + "1;" + std::string(5000, 'x'), 431},
      {"LongTrailers", chunked + "0\r\n" + std::string(5000, 'x'), 431},
      {"LongTarget", Get("/" + std::string(3000, 'x')), 431},
      {"EndlessTarget", "GET /" + std::string(3000, 'x'), 431},
      {"LongHeader", Get("/echo", "X: " + std::string(3000, 'x') + "\r\n"), 431},
      {"ManyHeaders", many_headers, 431},
  };
}

INSTANTIATE_TEST_SUITE_P(All, HttpRefusalTest, testing::ValuesIn(Refusals()),
                         [](const auto& info) { return std::string(info.param.name); });

// Headers that come line by line count together.
TEST(HttpServerTest, ManyHeadersThatComeOneByOne) {
  HttpServerOptions options;
  options.max_header_bytes = 2000;
  TestServer server(options);
  TestClient client = server.Connect();
  ASSERT_TRUE(client.Send("GET /echo HTTP/1.1\r\nHost: a\r\n"));
  int sent = 0;
  while (sent < 1000 && client.Send("abcdefgh: ijkl\r\n") && !client.ReadMore(0.002)) ++sent;
  EXPECT_EQ(client.ReadResponse().status, 431);
  EXPECT_LT(sent, 150);
}

TEST(HttpServerTest, MalformedBehindPipelinedOnesIsAnsweredInTurn) {
  TestServer server;
  TestClient client = server.Connect();
  ASSERT_TRUE(client.Send(Get("/held") + "nonsense\r\n\r\n" + Get("/echo")));
  server.Next()->Respond(200, {}, "first");
  EXPECT_EQ(client.ReadResponse().body, "first");
  EXPECT_EQ(client.ReadResponse().status, 400);
  EXPECT_TRUE(client.ReadsEnd());
}

TEST(HttpServerTest, RequestsThatStopEarlyAreRefused) {
  TestServer server;
  for (const std::string& part :
       {std::string("GET /ec"), std::string("GET /echo HTTP/1.1\r\nHost: a\r\n"),
        std::string("POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nabc")}) {
    TestClient client = server.Connect();
    ASSERT_TRUE(client.Send(part));
    client.EndSending();
    EXPECT_EQ(client.ReadResponse().status, 400);
    EXPECT_TRUE(client.ReadsEnd());
  }
}

TEST(HttpServerTest, TooManyConnections) {
  HttpServerOptions options;
  options.max_connections = 2;
  TestServer server(options);
  TestClient first = server.Connect(), second = server.Connect();
  EXPECT_EQ(first.Ask(Get("/echo")).status, 200);
  EXPECT_EQ(second.Ask(Get("/echo")).status, 200);
  TestClient third = server.Connect();
  third.Send(Get("/echo"));
  const TestResponse refused = third.ReadResponse();
  EXPECT_EQ(refused.status, 503);
  EXPECT_EQ(refused.Header("Retry-After"), "1");
  EXPECT_TRUE(third.ReadsEnd());
  third.Close();
  first.Close();
  ASSERT_TRUE(Eventually([&] { return server.server().num_connections() == 1; }));
  EXPECT_EQ(server.Connect().Ask(Get("/echo")).status, 200);
}

TEST(HttpServerTest, BodiesHeldForAllConnectionsAreBounded) {
  HttpServerOptions options;
  options.max_buffered_bytes = 100000;
  TestServer server(options);
  TestClient first = server.Connect(), second = server.Connect();
  ASSERT_TRUE(first.Send(Post("/held", std::string(60000, 'x'))));
  std::shared_ptr<HttpExchange> held = server.Next();
  second.Send(Post("/echo", std::string(60000, 'x')));
  EXPECT_EQ(second.ReadResponse().status, 503);
  held->Respond(200, {}, "ok");
  held.reset();
  EXPECT_EQ(first.ReadResponse().body, "ok");
  EXPECT_EQ(server.Connect().Ask(Post("/echo", std::string(60000, 'x'))).status, 200);
}

TEST(HttpServerTest, RequestsMustComeInTime) {
  HttpServerOptions options;
  options.idle_seconds = 0.3;
  TestServer server(options);
  TestClient silent = server.Connect(), slow = server.Connect(), slow_body = server.Connect();
  TestClient idle = server.Connect();
  EXPECT_EQ(idle.Ask(Get("/echo")).status, 200);
  ASSERT_TRUE(slow_body.Send("POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n"));
  ASSERT_TRUE(slow.Send("GET /echo HTTP/1.1\r\nHost: a\r\n"));
  // Each byte is progress, and does not count.
  for (int i = 0; i < 1000 && !slow.ReadMore(0.01); ++i) {
    slow.Send("x: y\r\n");
    slow_body.Send("z");
  }
  EXPECT_EQ(slow.ReadResponse().status, 408);
  EXPECT_EQ(slow_body.ReadResponse().status, 408);
  EXPECT_TRUE(silent.ReadsEnd());
  EXPECT_TRUE(idle.ReadsEnd());
  // An answer may take its time.
  TestClient patient = server.Connect();
  ASSERT_TRUE(patient.Send(Get("/held")));
  std::shared_ptr<HttpExchange> exchange = server.Next();
  Sleep(0.8);
  exchange->Respond(200, {}, "late");
  EXPECT_EQ(patient.ReadResponse().body, "late");
}

TEST(HttpServerTest, HandlersThatFailAreAnsweredWith500) {
  TestServer server({}, {{"/throw",
                          [](const std::shared_ptr<HttpExchange>&) {
                            throw std::runtime_error("handler's own words");
                          }},
                         {"/drop", [](const std::shared_ptr<HttpExchange>&) {}},
                         {"/begin", [](const std::shared_ptr<HttpExchange>& exchange) {
                            exchange->Begin(200, {});
                            exchange->Write("some");
                          }}});
  TestClient client = server.Connect();
  const TestResponse thrown = client.Ask(Get("/throw"));
  EXPECT_EQ(thrown.status, 500);
  EXPECT_EQ(thrown.body.find("own words"), std::string::npos);
  EXPECT_EQ(client.Ask(Get("/drop")).status, 500);
  EXPECT_FALSE(client.Ask(Get("/begin")).complete);
  EXPECT_EQ(server.Connect().Ask(Get("/echo")).status, 200);
}

HttpServerOptions At(const std::string& host, int port) {
  HttpServerOptions options;
  options.host = host;
  options.port = port;
  return options;
}

absl::Status Try(const HttpServerOptions& options) {
  return HttpServer::Create(
             options, [](const std::shared_ptr<HttpExchange>&) {}, nullptr)
      .status();
}

TEST(HttpServerTest, WhatCannotBeListenedOnIsNamed) {
  TestServer server;
  const int port = server.server().port();
  const absl::Status in_use = Try(At("127.0.0.1", port));
  EXPECT_EQ(in_use.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(in_use.message(), absl::StrFormat("cannot listen on host 127.0.0.1, port %d: the port "
                                              "is in use by another program",
                                              port));
  EXPECT_EQ(Try(At("localhost", port)).code(), absl::StatusCode::kFailedPrecondition);
  const absl::Status foreign = Try(At("192.0.2.1", 0));
  EXPECT_NE(foreign.message().find("192.0.2.1"), absl::string_view::npos);
  EXPECT_NE(foreign.message().find("no address of this machine"), absl::string_view::npos);
  for (const std::string& bad :
       {std::string("no-such-host.invalid"), std::string(""), std::string("300.1.1.1"),
        std::string("a b"), std::string("127.0.0.1\0x", 11)}) {
    EXPECT_EQ(Try(At(bad, 0)).code(), absl::StatusCode::kInvalidArgument) << bad;
  }
  EXPECT_EQ(Try(At("127.0.0.1", 65536)).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Try(At("127.0.0.1", -1)).code(), absl::StatusCode::kInvalidArgument);
}

TEST(HttpServerTest, PrivilegedPort) {
  if (geteuid() == 0) GTEST_SKIP() << "root may use every port";
  const absl::Status status = Try(At("127.0.0.1", 80));
  EXPECT_NE(status.message().find("below 1024"), absl::string_view::npos) << status;
}

TEST(HttpServerTest, APortIsFreeAgainAtOnce) {
  TestServer server;
  const int port = server.server().port();
  TestClient client = server.Connect();
  EXPECT_EQ(client.Ask(Get("/echo")).status, 200);
  server.Stop();  // closes first: the port lingers in TIME_WAIT
  EXPECT_TRUE(Try(At("127.0.0.1", port)).ok());
}

TEST(HttpServerTest, AServerThatStopsAcceptingLeavesCopiesOfItsSocketToOthers) {
  absl::StatusOr<HttpListeners> own = ListenOn("127.0.0.1", 0);
  ASSERT_TRUE(own.ok()) << own.status();
  const int port = own->port;
  HttpListeners copy;
  copy.port = port;
  copy.sockets.emplace_back(dup(own->sockets.at(0).get()));
  std::promise<std::shared_ptr<HttpExchange>> held;
  const auto serve = [](HttpListeners listeners, HttpHandler handler) {
    auto server = HttpServer::Create(std::move(listeners), {}, std::move(handler), nullptr);
    EXPECT_TRUE(server.ok()) << server.status();
    return *std::move(server);
  };
  const auto first = serve(std::move(copy), [&held](const std::shared_ptr<HttpExchange>& e) {
    if (e->request().path == "/held") return held.set_value(e);
    e->Respond(200, {}, "");
  });
  TestClient busy(port);
  ASSERT_TRUE(busy.Send(Get("/held")));
  const std::shared_ptr<HttpExchange> exchange = held.get_future().get();
  TestClient idle(port);
  EXPECT_EQ(idle.Ask(Get("/")).status, 200);
  first->StopAccepting();
  EXPECT_TRUE(idle.ReadsEnd());
  // The first server still runs, for one client, and must not touch the next.
  TestClient next(port);
  ASSERT_TRUE(next.Send(Get("/")));
  EXPECT_FALSE(next.ReadMore(0.2));
  const auto second = serve(*std::move(own), [](const std::shared_ptr<HttpExchange>& e) {
    e->Respond(200, {}, "second");
  });
  EXPECT_EQ(next.ReadResponse().body, "second");
  exchange->Respond(200, {}, "first");
  EXPECT_EQ(busy.ReadResponse().body, "first");
}

// Whether this machine's "localhost" is ::1, too.
bool LocalhostIsV6() {
  addrinfo hints = {};
  hints.ai_family = AF_INET6;
  addrinfo* found = nullptr;
  if (getaddrinfo("localhost", nullptr, &hints, &found) != 0) return false;
  freeaddrinfo(found);
  return true;
}

TEST(HttpServerTest, LocalhostAndAllAddresses) {
  const bool has_v6 = Try(At("::1", 0)).ok();
  for (const std::string& host :
       {std::string("localhost"), std::string("::"), std::string("[::]"), std::string("0.0.0.0")}) {
    if (host.find(':') != std::string::npos && !has_v6) continue;
    HttpServerOptions options;
    options.host = host;
    TestServer server(options);
    EXPECT_EQ(server.Connect().Ask(Get("/echo")).status, 200) << host;
    if (!has_v6 || host == "0.0.0.0" || (host == "localhost" && !LocalhostIsV6())) continue;
    TestClient v6(server.server().port(), AF_INET6);
    ASSERT_TRUE(v6.connected()) << host;
    ASSERT_TRUE(v6.Send(Get("/held")));
    std::shared_ptr<HttpExchange> exchange = server.Next();
    EXPECT_EQ(exchange->request().peer.substr(0, 6), "[::1]:");
    exchange->Respond(200, {}, "");
    EXPECT_EQ(v6.ReadResponse().status, 200) << host;
  }
}

}  // namespace
}  // namespace lockstep

// Clients that go, load, deadlines and the end of the server.
#include <gtest/gtest.h>

#include "tests/launch/openai/api_harness.h"

namespace lockstep {
namespace {

constexpr int32_t kStart = kFirstPiece - 1;

// Every step takes a millisecond, so that an answer can be met while it is made.
HarnessOptions Slow(int64_t max_num_seqs = 8) {
  HarnessOptions options;
  options.pieces = {"one", "two"};
  options.step_seconds = 0.001;
  options.max_num_seqs = max_num_seqs;
  return options;
}

Json Endless(bool stream, int64_t max_tokens = 4000) {
  return {{"prompt", {kStart}},
          {"temperature", 0},
          {"max_tokens", max_tokens},
          {"ignore_eos", true},
          {"stream", stream}};
}

// B29.
TEST(OpenAiLifetimeTest, WhoGoesFreesHisPlace) {
  HarnessOptions options = Slow(/*max_num_seqs=*/3);
  ApiHarness harness(std::move(options));
  const auto running = [&] { return harness.engine().stats().scheduler.num_running; };
  const auto waiting = [&] { return harness.engine().stats().scheduler.num_waiting; };
  const auto streaming = harness.Send("/v1/completions", Endless(true));
  const auto whole = harness.Send("/v1/completions", Endless(false));
  const auto survivor = harness.Send("/v1/completions", Endless(true, 300));
  streaming->WaitForEvents(10);
  survivor->WaitForEvents(1);
  ASSERT_TRUE(ApiHarness::Within(10, [&] { return running() == 3; }));
  const auto queued = harness.Send("/v1/completions", Endless(true));
  ASSERT_TRUE(ApiHarness::Within(10, [&] { return waiting() == 1; }));
  streaming->Disconnect();
  whole->Disconnect();
  queued->Disconnect();
  EXPECT_TRUE(ApiHarness::Within(1, [&] { return running() <= 1 && waiting() == 0; }));
  survivor->Wait();
  EXPECT_EQ(JoinCompletion(survivor->Events()).finish, "length");
  EXPECT_EQ(queued->body(), "") << "it never ran";
  harness.ExpectAllFree();
  EXPECT_EQ(harness.observer().finished, 4);
  EXPECT_EQ(harness.observer().cancelled, 3);
  EXPECT_EQ(harness.observer().first_tokens, 3);
  const auto again = harness.Completion(Endless(false, 5));
  EXPECT_EQ(again->status(), 200);
}

TEST(OpenAiLifetimeTest, WhoGoesBeforeHisRequestIsReadIsForgotten) {
  ApiHarness harness(Slow());
  for (int i = 0; i < 50; ++i) {
    Json body = Endless(i % 2 == 0);
    body["prompt"] = std::string(20000, 'a');
    harness.Send("/v1/completions", body)->Disconnect();
    body["prompt"] = {kStart};
    harness.Send("/v1/completions", body)->Disconnect();
  }
  harness.ExpectAllFree();
}

TEST(OpenAiLifetimeTest, AStopStringEndsTheEnginesWork) {
  ApiHarness harness(Slow());
  Json body = Endless(false);
  body["stop"] = "two";
  const Json answer = harness.Completion(body)->json();
  EXPECT_EQ(answer.at("choices")[0].at("text"), "one");
  EXPECT_TRUE(
      ApiHarness::Within(1, [&] { return harness.engine().stats().scheduler.num_running == 0; }));
  // Of two choices one stops: the other goes on.
  body["n"] = 2;
  body["max_tokens"] = 50;
  body["temperature"] = 100;
  body["min_tokens"] = 0;
  body["logit_bias"] = {{"300", 100}};
  EXPECT_EQ(harness.Completion(body)->status(), 200);
  harness.ExpectAllFree();
}

TEST(OpenAiLifetimeTest, MoreThanTheQueueHoldsIsTurnedAway) {
  HarnessOptions options = Slow(/*max_num_seqs=*/2);
  options.api.max_queue = 1;
  ApiHarness harness(std::move(options));
  std::vector<ApiHarness::Client> clients;
  for (int i = 0; i < 3; ++i) clients.push_back(harness.Send("/v1/completions", Endless(true)));
  ASSERT_TRUE(
      ApiHarness::Within(10, [&] { return harness.engine().stats().scheduler.num_waiting == 1; }));
  const auto refused = harness.Completion(Endless(false));
  EXPECT_EQ(refused->status(), 429);
  EXPECT_EQ(refused->Header("Retry-After"), "1");
  EXPECT_EQ(refused->json().at("error").at("code"), "queue_full");
  EXPECT_EQ(harness.observer().last_refusal, 429);
  clients[0]->Disconnect();
  ASSERT_TRUE(ApiHarness::Within(10, [&] { return harness.api().num_open() == 2; }));
  // Two choices are one too many, one is not.
  Json two = Endless(false, 5);
  two["n"] = 2;
  EXPECT_EQ(harness.Completion(two)->status(), 429);
  const auto taken = harness.Send("/v1/completions", Endless(false, 5));
  clients[1]->Disconnect();
  taken->Wait();
  EXPECT_EQ(taken->status(), 200);
  clients[2]->Disconnect();
  harness.ExpectAllFree();
  // Nobody else is there: what is more than the queue holds may run all the same.
  two["n"] = 8;
  EXPECT_EQ(harness.Completion(two)->status(), 200);
}

TEST(OpenAiLifetimeTest, TheLongestOfTooManyLongAnswersIsGivenUp) {
  HarnessOptions options = Slow();
  options.api.max_held_bytes = 20000;
  ApiHarness harness(std::move(options));
  const auto streaming = harness.Send("/v1/completions", Endless(true));
  for (int i = 0; i < 3; ++i) {  // what was given up counts no more
    Json body = Endless(false);
    body["logprobs"] = 5;
    const auto longest = harness.Send("/v1/completions", body);
    const auto shorter = harness.Send("/v1/completions", Endless(false, 300));
    longest->Wait();
    EXPECT_EQ(longest->status(), 503);
    EXPECT_NE(longest->Header("Retry-After"), "");
    const std::string message = longest->json().at("error").at("message");
    EXPECT_NE(message.find("20000 bytes"), std::string::npos) << message;
    shorter->Wait();
    EXPECT_EQ(shorter->status(), 200) << shorter->body();
  }
  EXPECT_FALSE(streaming->WaitForEnd(0));
  streaming->Disconnect();
  harness.ExpectAllFree();
}

TEST(OpenAiLifetimeTest, TimeRunsOut) {
  HarnessOptions options = Slow(/*max_num_seqs=*/2);
  options.step_seconds = 0.02;
  options.api.request_timeout_seconds = 0.4;
  ApiHarness harness(std::move(options));
  const auto streaming = harness.Send("/v1/completions", Endless(true));
  const auto whole = harness.Send("/v1/completions", Endless(false));
  streaming->WaitForEvents(1);
  const auto queued = harness.Send("/v1/completions", Endless(false));
  streaming->Wait();
  whole->Wait();
  EXPECT_EQ(whole->status(), 504);
  EXPECT_EQ(whole->json().at("error").at("code"), "request_timeout");
  EXPECT_EQ(whole->Header("x-should-retry"), "false");
  const std::vector<Json> events = streaming->Events();
  EXPECT_EQ(events[events.size() - 2].at("error").at("type"), "timeout_error");
  queued->Wait();
  EXPECT_NE(queued->status(), 200);
  harness.ExpectAllFree();
}

TEST(OpenAiLifetimeTest, ARequestThatWaitedItsTimeIsTold) {
  HarnessOptions options = Slow(/*max_num_seqs=*/1);
  options.step_seconds = 0.01;
  options.api.request_timeout_seconds = 0.3;
  ApiHarness harness(std::move(options));
  // The first holds the only place until its own time is over; the second came a little later.
  const auto first = harness.Send("/v1/completions", Endless(true));
  first->WaitForEvents(1);
  const auto second = harness.Send("/v1/completions", Endless(false));
  second->Wait();
  EXPECT_TRUE(second->status() == 503 || second->status() == 504) << second->status();
  harness.ExpectAllFree();
}

TEST(OpenAiLifetimeTest, DrainingLetsWhatRunsFinish) {
  ApiHarness harness(Slow());
  const auto running = harness.Send("/v1/completions", Endless(true, 200));
  running->WaitForEvents(1);
  harness.api().StartDrain();
  const auto refused = harness.Completion(Endless(false));
  EXPECT_EQ(refused->status(), 503);
  EXPECT_NE(refused->Header("Retry-After"), "");
  EXPECT_EQ(harness.Send("GET", "/v1/models", "")->status(), 200);
  EXPECT_FALSE(harness.api().WaitIdle(0));
  EXPECT_TRUE(harness.api().WaitIdle(30));
  ASSERT_TRUE(running->WaitForEnd(0));
  EXPECT_EQ(JoinCompletion(running->Events()).finish, "length");
  EXPECT_EQ(harness.api().num_open(), 0);
}

TEST(OpenAiLifetimeTest, EndAllTellsEveryone) {
  ApiHarness harness(Slow(/*max_num_seqs=*/2));
  const auto streaming = harness.Send("/v1/completions", Endless(true));
  const auto whole = harness.Send("/v1/completions", Endless(false));
  streaming->WaitForEvents(2);
  const auto queued = harness.Send("/v1/completions", Endless(true));
  ASSERT_TRUE(
      ApiHarness::Within(10, [&] { return harness.engine().stats().scheduler.num_waiting == 1; }));
  harness.api().EndAll("closing time");
  for (const auto& client : {streaming, whole, queued}) ASSERT_TRUE(client->WaitForEnd(0));
  EXPECT_EQ(whole->status(), 503);
  EXPECT_EQ(queued->status(), 503);
  const std::vector<Json> events = streaming->Events();
  EXPECT_EQ(events.back(), "[DONE]");
  EXPECT_EQ(events[events.size() - 2].at("error").at("message"), "closing time");
  EXPECT_EQ(harness.Completion(Endless(false))->status(), 503);
  harness.ExpectAllFree();
}

TEST(OpenAiLifetimeTest, AnEngineThatIsStoppedEndsItsRequests) {
  ApiHarness harness(Slow());
  const auto whole = harness.Send("/v1/completions", Endless(false));
  ASSERT_TRUE(
      ApiHarness::Within(10, [&] { return harness.engine().stats().scheduler.num_running == 1; }));
  EXPECT_TRUE(harness.StopEngine().ok());
  whole->Wait();
  EXPECT_EQ(whole->status(), 503);
  EXPECT_EQ(harness.Completion(Endless(false))->status(), 503);
}

TEST(OpenAiLifetimeTest, TheApiMayGoWhileTheEngineRuns) {
  ApiHarness harness(Slow());
  std::vector<ApiHarness::Client> clients;
  for (int i = 0; i < 20; ++i) {
    clients.push_back(harness.Send("/v1/completions", Endless(i % 2 == 0)));
  }
  harness.DropApi();
  for (const auto& client : clients) EXPECT_TRUE(client->WaitForEnd(0));
  for (const auto& client : clients) client->Disconnect();  // of no consequence
  EXPECT_TRUE(
      ApiHarness::Within(5, [&] { return harness.engine().stats().scheduler.num_running == 0; }));
}

// A long text does not keep a short one waiting.
TEST(OpenAiLifetimeTest, LongBodiesAreReadAside) {
  HarnessOptions options = Slow();
  options.step_seconds = 0;
  options.max_model_len = 1024;
  ApiHarness harness(std::move(options));
  std::vector<ApiHarness::Client> large;
  const Json body = {{"prompt", std::string(8 << 20, 'x')}};
  for (int i = 0; i < 3; ++i) large.push_back(harness.Send("/v1/completions", body));
  const auto small = harness.Completion(Endless(false, 5));
  EXPECT_EQ(small->status(), 200);
  EXPECT_FALSE(large.back()->WaitForEnd(0)) << "the long ones were too quick to show anything";
  for (const auto& client : large) {
    client->Wait();
    EXPECT_EQ(client->status(), 400);
  }
}

}  // namespace
}  // namespace lockstep

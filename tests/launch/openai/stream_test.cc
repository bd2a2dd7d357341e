// Streams: their events, usage, and failures inside them.
#include <gtest/gtest.h>

#include "tests/launch/openai/api_harness.h"

namespace lockstep {
namespace {

constexpr int32_t kStart = kFirstPiece - 1;
constexpr char kTemplate[] = "{% for m in messages %}{{ m.content }}{% endfor %}";

const Json kMessages = Json::array({{{"role", "user"}, {"content", "Hey"}}});

HarnessOptions Options() {
  HarnessOptions options;
  options.pieces = {"Hey", "you", ", there", "!"};
  options.chat_template = kTemplate;
  return options;
}

Json Stream(const Json& more) {
  Json body = {{"stream", true}, {"temperature", 0}};
  body.update(more);
  return body;
}

TEST(OpenAiStreamTest, ACompletionComesTokenByToken) {
  ApiHarness harness(Options());
  const auto client = harness.Completion(Stream({{"prompt", {kStart}}}));
  EXPECT_EQ(client->status(), 200) << client->body();
  EXPECT_EQ(client->Header("Content-Type"), "text/event-stream; charset=utf-8");
  EXPECT_EQ(client->Header("Cache-Control"), "no-cache");
  const std::vector<Json> events = client->Events();
  ASSERT_EQ(events.size(), 6);
  const char* const kTexts[] = {"Hey", "you", ", there", "!", ""};
  for (size_t i = 0; i < 5; ++i) {
    EXPECT_EQ(events[i].at("object"), "text_completion");
    EXPECT_EQ(events[i].at("model"), "tiny");
    EXPECT_FALSE(events[i].contains("usage"));
    const Json expected = {{{"index", 0},
                            {"text", kTexts[i]},
                            {"logprobs", nullptr},
                            {"finish_reason", i == 4 ? Json("stop") : Json()}}};
    EXPECT_EQ(events[i].at("choices"), expected);
  }
  EXPECT_EQ(events[5], "[DONE]");
}

TEST(OpenAiStreamTest, AChatBeginsWithTheRole) {
  ApiHarness harness(Options());
  const Json body = Stream({{"messages", kMessages}});
  const std::vector<Json> events = harness.Chat(body)->Events();
  ASSERT_EQ(events.size(), 6);
  EXPECT_EQ(events[0].at("object"), "chat.completion.chunk");
  EXPECT_EQ(events[0].at("id").get<std::string>().substr(0, 9), "chatcmpl-");
  EXPECT_EQ(events[0].at("choices")[0].at("delta"), (Json{{"role", "assistant"}, {"content", ""}}));
  EXPECT_EQ(events[1].at("choices")[0].at("delta"), (Json{{"content", "you"}}));
  EXPECT_EQ(events[4].at("choices")[0].at("delta"), Json::object());
  EXPECT_EQ(events[4].at("choices")[0].at("finish_reason"), "stop");
  EXPECT_EQ(JoinChat(events).text, "you, there!");
}

// B27.
TEST(OpenAiStreamTest, UsageComesInAnEventOfItsOwnWhereAsked) {
  ApiHarness harness(Options());
  for (const Json& options :
       {Json(), Json::object(), Json{{"include_usage", false}}, Json{{"include_usage", true}}}) {
    for (const int n : {1, 3}) {
      for (const bool chat : {false, true}) {
        Json body = Stream({{"n", n}, {"stream_options", options}});
        if (chat) {
          body["messages"] = kMessages;
        } else {
          body["prompt"] = {kStart, kFirstPiece};
        }
        std::vector<Json> events = (chat ? harness.Chat(body) : harness.Completion(body))->Events();
        const bool wanted = options.is_object() && options.value("include_usage", false);
        for (int i = 0; i < n; ++i) {
          const StreamedChoice choice = chat ? JoinChat(events, i) : JoinCompletion(events, i);
          EXPECT_EQ(choice.text, "you, there!");
          EXPECT_EQ(choice.finish, "stop");
        }
        events.pop_back();
        if (wanted) {
          const Json last = events.back();
          events.pop_back();
          EXPECT_EQ(last.at("choices"), Json::array());
          EXPECT_EQ(last.at("usage").at("completion_tokens"), 4 * n);
          const int64_t prompt_tokens = last.at("usage").at("prompt_tokens");
          if (!chat) {
            EXPECT_EQ(prompt_tokens, 2) << "counted once";
          }
          EXPECT_EQ(last.at("usage").at("total_tokens"), prompt_tokens + 4 * n);
        }
        for (const Json& event : events) {
          EXPECT_EQ(event.at("choices").size(), 1);
          EXPECT_EQ(event.contains("usage"), wanted);
          if (wanted) {
            EXPECT_TRUE(event.at("usage").is_null());
          }
        }
      }
    }
  }
}

TEST(OpenAiStreamTest, ContinuousUsageCountsUp) {
  ApiHarness harness(Options());
  std::vector<Json> events =
      harness
          .Completion(Stream(
              {{"prompt", {kStart}}, {"stream_options", {{"continuous_usage_stats", true}}}}))
          ->Events();
  events.pop_back();
  for (size_t i = 0; i < events.size(); ++i) {
    EXPECT_EQ(events[i].at("usage").at("completion_tokens"), i + 1);
  }
}

TEST(OpenAiStreamTest, StreamOptionsNeedAStream) {
  ApiHarness harness(Options());
  for (const Json& options : {Json::object(), Json{{"include_usage", true}}}) {
    const auto client = harness.Completion({{"prompt", {kStart}}, {"stream_options", options}});
    EXPECT_EQ(client->status(), 400);
    EXPECT_EQ(client->json().at("error").at("param"), "stream_options");
  }
  EXPECT_EQ(harness.Completion(Stream({{"prompt", {kStart}}, {"stream_options", 1}}))->status(),
            400);
  EXPECT_EQ(harness
                .Completion(
                    Stream({{"prompt", {kStart}}, {"stream_options", {{"include_usage", "yes"}}}}))
                ->status(),
            400);
}

TEST(OpenAiStreamTest, ARefusalIsNoStream) {
  ApiHarness harness(Options());
  const auto client = harness.Completion(Stream({{"prompt", {-1}}}));
  EXPECT_EQ(client->status(), 400);
  EXPECT_EQ(client->Header("Content-Type"), "application/json");
  EXPECT_EQ(client->json().at("error").at("type"), "invalid_request_error");
}

TEST(OpenAiStreamTest, AFailureInsideIsAnErrorEvent) {
  HarnessOptions options = Options();
  options.fail_at_step = 40;
  options.step_seconds = 0.002;
  ApiHarness harness(std::move(options));
  const Json endless = {
      {"prompt", {kStart}}, {"temperature", 0}, {"max_tokens", 1000}, {"ignore_eos", true}};
  const auto client = harness.Send("/v1/completions", Stream(endless));
  client->WaitForEvents(2);
  const auto whole = harness.Send("/v1/completions", endless);
  const absl::Status failed = harness.WaitForFailure();
  EXPECT_FALSE(failed.ok());
  harness.api().Fail(failed);
  // Both are answered when Fail returns.
  ASSERT_TRUE(client->WaitForEnd(0));
  ASSERT_TRUE(whole->WaitForEnd(0));
  const std::vector<Json> events = client->Events();
  ASSERT_GE(events.size(), 4);
  EXPECT_EQ(events.back(), "[DONE]");
  const Json error = events[events.size() - 2].at("error");
  EXPECT_EQ(error.at("type"), "server_error");
  EXPECT_NE(error.at("message").get<std::string>().find("the device is gone"), std::string::npos);
  EXPECT_EQ(whole->status(), 500);
  const auto late = harness.Completion({{"prompt", {kStart}}});
  EXPECT_EQ(late->status(), 500);
  EXPECT_EQ(harness.api().num_open(), 0);
}

}  // namespace
}  // namespace lockstep

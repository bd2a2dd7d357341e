#include "launch/bench/token_stream.h"

#include <gtest/gtest.h>

namespace lockstep {
namespace {

std::string Text(const std::string& text, const std::string& finish = "null") {
  return R"(data: {"choices":[{"index":0,"text":")" + text + R"(","finish_reason":)" + finish +
         "}]}\n\n";
}
std::string Delta(const std::string& delta, const std::string& finish = "null") {
  return R"(data: {"choices":[{"index":0,"delta":)" + delta + R"(,"finish_reason":)" + finish +
         "}]}\n\n";
}
constexpr char kUsage[] =
    "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":3}}\n\n";
constexpr char kDone[] = "data: [DONE]\n\n";

TEST(TokenStream, CountsTokensAndReadsTheUsage) {
  TokenStream stream(BenchEndpoint::kCompletions, /*keeps_text=*/true);
  stream.Feed(Text("a"), 1);
  stream.Feed(Text("b") + Text("c", "\"length\""), 2);
  EXPECT_TRUE(stream.finished());
  EXPECT_FALSE(stream.done());
  stream.Feed(std::string(kUsage) + kDone, 3);
  EXPECT_TRUE(stream.done());
  EXPECT_EQ(stream.arrivals(), (std::vector<double>{1, 2, 2}));
  EXPECT_EQ(stream.last_event(), 2);
  EXPECT_EQ(stream.prompt_tokens(), 7);
  EXPECT_EQ(stream.completion_tokens(), 3);
  EXPECT_EQ(stream.text(), "abc");
  EXPECT_EQ(stream.error(), "");
}

TEST(TokenStream, CountsThatCannotBeAreNone) {
  const auto usage = [](const std::string& count) {
    return R"(data: {"choices":[],"usage":{"completion_tokens":)" + count + "}}\n\n";
  };
  TokenStream stream(BenchEndpoint::kCompletions);
  for (const char* count : {"-4", "9223372036854775807", "18446744073709551615", "0", "2.5"}) {
    stream.Feed(usage(count), 1);
    EXPECT_FALSE(stream.completion_tokens().has_value()) << count;
  }
  stream.Feed(usage("3") + "data: {\"choices\":[],\"usage\":{}}\n\n", 2);
  EXPECT_EQ(stream.completion_tokens(), 3);
}

TEST(TokenStream, AnEventHasAnEnd) {
  TokenStream stream(BenchEndpoint::kCompletions);
  const std::string piece(1 << 20, 'x');
  for (int i = 0; i < 8 && stream.error().empty(); ++i) stream.Feed(piece, 1);
  EXPECT_EQ(stream.error(), "an event of more than 4 MiB");
}

TEST(TokenStream, BytesMayBeCutAnywhere) {
  const std::string whole =
      ": a comment\r\n\r\nevent: x\r\nid: 1\r\n" + Text("a") +
      "data:{\"choices\":[{\"text\":\"b\",\r\ndata:\"finish_reason\":null}]}\r\n\r\n" + kUsage +
      kDone;
  for (size_t cut = 0; cut <= whole.size(); ++cut) {
    TokenStream stream(BenchEndpoint::kCompletions, true);
    stream.Feed(whole.substr(0, cut), 1);
    stream.Feed(whole.substr(cut), 2);
    EXPECT_EQ(stream.text(), "ab") << cut;
    EXPECT_EQ(stream.arrivals().size(), 2u);
    EXPECT_TRUE(stream.done());
    EXPECT_EQ(stream.error(), "");
  }
}

TEST(TokenStream, ALastLineWithoutItsEndCounts) {
  TokenStream stream(BenchEndpoint::kCompletions);
  stream.Feed("data: [DONE]", 1);
  EXPECT_FALSE(stream.done());
  stream.FeedEnd(1);
  EXPECT_TRUE(stream.done());
}

TEST(TokenStream, TheRoleAndTheEndOfAChatAreNoTokens) {
  TokenStream stream(BenchEndpoint::kChat, true);
  stream.Feed(Delta(R"({"role":"assistant","content":""})"), 1);
  EXPECT_TRUE(stream.arrivals().empty());
  stream.Feed(Delta(R"({"reasoning_content":"hm"})"), 2);
  stream.Feed(Delta(R"({"content":"a"})"), 3);
  stream.Feed(Delta("{}", "\"stop\""), 4);
  EXPECT_EQ(stream.arrivals(), (std::vector<double>{2, 3}));
  EXPECT_EQ(stream.last_event(), 4);
  EXPECT_EQ(stream.text(), "hma");
}

TEST(TokenStream, TokensWithoutTextCount) {
  TokenStream stream(BenchEndpoint::kCompletions);
  stream.Feed(Text("") + Text("") + Text("", "\"length\""), 1);
  EXPECT_EQ(stream.arrivals().size(), 3u);
  TokenStream calls(BenchEndpoint::kChat);
  calls.Feed(Delta(R"({"role":"assistant","tool_calls":[{"index":0}]})"), 1);
  EXPECT_EQ(calls.arrivals().size(), 1u);
}

TEST(TokenStream, ErrorsAreTold) {
  TokenStream error(BenchEndpoint::kCompletions);
  error.Feed(Text("a") + "data: {\"error\":{\"message\":\"no room\",\"code\":500}}\n\n" + kDone, 1);
  EXPECT_EQ(error.error(), "an event says: no room");
  EXPECT_EQ(error.arrivals().size(), 1u);
  TokenStream text(BenchEndpoint::kCompletions);
  text.Feed("data: {\"error\":\"out\"}\n\n", 1);
  EXPECT_EQ(text.error(), "an event says: \"out\"");
  TokenStream no_json(BenchEndpoint::kCompletions);
  no_json.Feed("data: {\"choices\":[\n\n", 1);
  EXPECT_EQ(no_json.error(), "an event is no JSON: {\"choices\":[");
}

TEST(TokenStream, OddEventsDoNoHarm) {
  TokenStream stream(BenchEndpoint::kChat);
  for (const char* odd : {"1", "[]", "null", "\"x\"", "{\"choices\":{}}", "{\"choices\":[]}",
                          "{\"usage\":3}", "{\"usage\":{\"prompt_tokens\":\"7\"}}"}) {
    stream.Feed(std::string("data: ") + odd + "\n\n", 1);
  }
  EXPECT_EQ(stream.error(), "");
  EXPECT_TRUE(stream.arrivals().empty());
  EXPECT_FALSE(stream.prompt_tokens().has_value());
  stream.Feed("data: {\"choices\":[3]}\n\ndata: {\"choices\":[{\"delta\":7}]}\n\n", 2);
  EXPECT_EQ(stream.error(), "");
}

}  // namespace
}  // namespace lockstep

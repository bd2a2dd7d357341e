// Chats: messages, templates, tools.
#include <gtest/gtest.h>

#include "tests/launch/openai/api_harness.h"

namespace lockstep {
namespace {

constexpr int32_t kStart = kFirstPiece - 1;
// Prints what it sees, so that /tokenize shows what the template was given.
constexpr char kTemplate[] =
    "{% if tools %}[TOOLS {{ tools | tojson }}]{% endif %}"
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function.name }}:"
    "{{ c.function.arguments | tojson }}{% endfor %}{% endif %}"
    "{% if m.role == 'tool' %}{{ m.tool_call_id }}={% endif %}{{ m.content }}{% endfor %}"
    "{% if bad is defined %}{{ raise_exception('no bad: ' + bad) }}{% endif %}"
    "{% if style is defined %}{{ style }}{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}";

HarnessOptions Options(std::vector<std::string> pieces = {"Hi", " there"}) {
  HarnessOptions options;
  options.pieces = std::move(pieces);
  // Whatever is asked, the answer begins with the first piece: '>' ends the prompt.
  options.next = {};
  for (int32_t id = 3; id < kStart; ++id) options.next[id] = kFirstPiece;
  options.chat_template = kTemplate;
  return options;
}

// A list, also of one object: braces alone would copy it.
Json List(const std::vector<Json>& items) { return items; }

Json User(const Json& content) { return {{"role", "user"}, {"content", content}}; }

Json Ask(const Json& messages, const Json& more = Json::object()) {
  Json body = {{"model", "tiny"}, {"messages", messages}, {"temperature", 0}};
  body.update(more);
  return body;
}

std::string Rendered(ApiHarness& harness, const Json& body) {
  const auto client = harness.Post("/tokenize", body);
  EXPECT_EQ(client->status(), 200) << client->body();
  const std::vector<int32_t> ids = client->json().at("tokens");
  return *harness.tokenizer().Decode(ids, false);
}

TEST(OpenAiChatTest, AnswersWithAMessage) {
  ApiHarness harness(Options());
  const auto client = harness.Chat(Ask(List({User("hello")})));
  EXPECT_EQ(client->status(), 200) << client->body();
  const Json answer = client->json();
  EXPECT_EQ(answer.at("object"), "chat.completion");
  EXPECT_EQ(answer.at("id").get<std::string>().substr(0, 9), "chatcmpl-");
  const Json expected = {
      {{"index", 0},
       {"message", {{"role", "assistant"}, {"content", "Hi there"}, {"refusal", nullptr}}},
       {"logprobs", nullptr},
       {"finish_reason", "stop"}}};
  EXPECT_EQ(answer.at("choices"), expected);
  EXPECT_EQ(answer.at("usage").at("completion_tokens"), 3) << "with the end token";
}

TEST(OpenAiChatTest, MessagesReachTheTemplate) {
  ApiHarness harness(Options());
  EXPECT_EQ(
      Rendered(harness,
               {{"messages", List({{{"role", "developer"}, {"content", "be good"}}, User("a")})}}),
      "<system>be good<user>a<assistant>");
  const Json parts = {{{"type", "text"}, {"text", "one"}}, {{"type", "text"}, {"text", "two"}}};
  EXPECT_EQ(Rendered(harness, {{"messages", List({User(parts)})}}), "<user>one\ntwo<assistant>");
  const Json call = {{"id", "call_1"},
                     {"type", "function"},
                     {"function", {{"name", "f"}, {"arguments", "{\"z\": 1, \"a\": [2]}"}}}};
  const Json messages = {
      User("a"),
      {{"role", "assistant"}, {"content", nullptr}, {"tool_calls", List({call})}},
      {{"role", "tool"}, {"tool_call_id", "call_1"}, {"content", "42"}}};
  EXPECT_EQ(Rendered(harness, {{"messages", messages}}),
            "<user>a<assistant>f:{\"z\": 1, \"a\": [2]}<tool>call_1=42<assistant>");
  EXPECT_EQ(Rendered(harness, {{"messages", List({User("a")})},
                               {"add_generation_prompt", false},
                               {"chat_template_kwargs", {{"style", "!"}}}}),
            "<user>a!");
}

TEST(OpenAiChatTest, ToolsKeepTheirOrderOfKeys) {
  ApiHarness harness(Options());
  const std::string tools =
      R"([{"type": "function", "function": {"name": "f", "description": "d", "a": {"z": 1, "b": 2}}}])";
  const auto client =
      harness.Send("POST", "/tokenize",
                   R"({"messages": [{"role": "user", "content": "a"}], "tools": )" + tools + "}");
  client->Wait();
  const std::vector<int32_t> ids = client->json().at("tokens");
  EXPECT_EQ(*harness.tokenizer().Decode(ids, false), "[TOOLS " + tools + "]<user>a<assistant>");
}

TEST(OpenAiChatTest, TheAnswerMayBeAsLongAsTheModelAllows) {
  HarnessOptions options = Options();
  options.max_model_len = 64;
  ApiHarness harness(std::move(options));
  Json answer = harness.Chat(Ask(List({User("a")}), {{"ignore_eos", true}}))->json();
  EXPECT_EQ(answer.at("usage").at("total_tokens"), 64);
  EXPECT_EQ(answer.at("choices")[0].at("finish_reason"), "length");
  for (const char* name : {"max_tokens", "max_completion_tokens"}) {
    answer = harness.Chat(Ask(List({User("a")}), {{name, 1}}))->json();
    EXPECT_EQ(answer.at("usage").at("completion_tokens"), 1);
  }
  EXPECT_EQ(harness.Chat(Ask(List({User("a")}), {{"max_tokens", 1}, {"max_completion_tokens", 2}}))
                ->status(),
            400);
}

TEST(OpenAiChatTest, LogprobsAreAListOfTokens) {
  ApiHarness harness(Options());
  const Json body = Ask(List({User("a")}), {{"logprobs", true}, {"top_logprobs", 2}});
  const Json whole = harness.Chat(body)->json().at("choices")[0].at("logprobs");
  ASSERT_EQ(whole.at("content").size(), 2);
  const Json& first = whole.at("content")[0];
  EXPECT_EQ(first.at("token"), "Hi");
  EXPECT_EQ(first.at("bytes"), (Json{72, 105}));
  EXPECT_EQ(first.at("top_logprobs").size(), 2);
  EXPECT_EQ(first.at("top_logprobs")[0].at("token"), "Hi");
  EXPECT_EQ(first.at("top_logprobs")[0].at("logprob"), first.at("logprob"));
  EXPECT_TRUE(whole.at("refusal").is_null());
  Json streaming = body;
  streaming["stream"] = true;
  Json joined = Json::array();
  for (const Json& part : JoinChat(harness.Chat(streaming)->Events()).logprobs) {
    joined.insert(joined.end(), part.at("content").begin(), part.at("content").end());
  }
  EXPECT_EQ(joined, whole.at("content"));
  const Json plain = harness.Chat(Ask(List({User("a")}), {{"logprobs", true}}))->json();
  EXPECT_EQ(plain.at("choices")[0].at("logprobs").at("content")[0].at("top_logprobs"),
            Json::array());
}

TEST(OpenAiChatTest, SayWhatIsWrongWithMessages) {
  ApiHarness harness(Options());
  const std::pair<const char*, const char*> cases[] = {
      {"null", "messages"},
      {"\"hi\"", "messages"},
      {"[]", "messages"},
      {"[\"hi\"]", "messages[0]"},
      {R"([{"content": "a"}])", "messages[0].role"},
      {R"([{"role": "king", "content": "a"}])", "messages[0].role"},
      {R"([{"role": "user"}])", "messages[0].content"},
      {R"([{"role": "user", "content": 1}])", "messages[0].content"},
      {R"([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}])",
       "messages[0].content[0].type"},
      {R"([{"role": "user", "content": [{"type": "text"}]}])", "messages[0].content[0].text"},
      {R"([{"role": "assistant", "tool_calls": [1]}])", "messages[0].tool_calls[0]"},
      {R"([{"role": "assistant",
            "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}])",
       "messages[0].tool_calls[0].function.arguments"},
  };
  for (const auto& [messages, param] : cases) {
    const auto client = harness.Chat(Ask(Json::parse(messages)));
    EXPECT_EQ(client->status(), 400) << messages;
    EXPECT_EQ(client->json().at("error").at("param"), param) << client->body();
  }
  const auto refused =
      harness.Chat(Ask(List({User("a")}), {{"chat_template_kwargs", {{"bad", "x"}}}}));
  EXPECT_EQ(refused->status(), 400);
  EXPECT_EQ(refused->json().at("error").at("message"), "no bad: x");
}

TEST(OpenAiChatTest, AModelWithoutATemplateSaysSo) {
  HarnessOptions options;
  options.pieces = {"x"};
  ApiHarness harness(std::move(options));
  const auto client = harness.Chat(Ask(List({User("a")})));
  EXPECT_EQ(client->status(), 400);
  EXPECT_NE(client->body().find("chat template"), std::string::npos) << client->body();
}

const Json kTools =
    Json::parse(R"([{"type": "function", "function": {"name": "weather", "parameters": {}}}])");

TEST(OpenAiChatTest, ToolCallsAreParsed) {
  const std::vector<std::string> pieces = {"Let me",
                                           " see.",
                                           "\n",
                                           "<tool",
                                           "_call>",
                                           "\n{\"name\": \"wea",
                                           "ther\", \"arguments\": ",
                                           "{\"city\": \"Pa",
                                           "ris\"}}",
                                           "\n</tool_",
                                           "call>",
                                           "\n<tool_call>",
                                           "{\"name\": \"weather\"}",
                                           "</tool_call>",
                                           "\n"};
  ApiHarness harness(Options(pieces));
  const Json body = Ask(List({User("a")}), {{"tools", kTools}});
  const Json choice = harness.Chat(body)->json().at("choices")[0];
  EXPECT_EQ(choice.at("finish_reason"), "tool_calls");
  EXPECT_EQ(choice.at("message").at("content"), "Let me see.");
  const Json& calls = choice.at("message").at("tool_calls");
  ASSERT_EQ(calls.size(), 2);
  EXPECT_EQ(calls[0].at("type"), "function");
  EXPECT_EQ(calls[0].at("id").get<std::string>().substr(0, 5), "call_");
  EXPECT_NE(calls[0].at("id"), calls[1].at("id"));
  EXPECT_EQ(calls[0].at("function"),
            (Json{{"name", "weather"}, {"arguments", "{\"city\":\"Paris\"}"}}));
  EXPECT_EQ(calls[1].at("function"), (Json{{"name", "weather"}, {"arguments", "{}"}}));

  Json streaming = body;
  streaming["stream"] = true;
  const std::vector<Json> events = harness.Chat(streaming)->Events();
  const StreamedChoice joined = JoinChat(events);
  EXPECT_EQ(joined.text, "Let me see.");
  EXPECT_EQ(joined.finish, "tool_calls");
  Json streamed = Json::array();
  for (size_t i = 0; i + 1 < events.size(); ++i) {
    const Json& delta = events[i].at("choices")[0].at("delta");
    if (!delta.contains("tool_calls")) continue;
    for (const Json& call : delta.at("tool_calls")) {
      EXPECT_EQ(call.at("index"), streamed.size());
      streamed.push_back(call.at("function"));
    }
  }
  EXPECT_EQ(streamed, List({calls[0].at("function"), calls[1].at("function")}));

  Json single = body;
  single["parallel_tool_calls"] = false;
  const Json one = harness.Chat(single)->json().at("choices")[0];
  EXPECT_EQ(one.at("message").at("tool_calls").size(), 1);
  EXPECT_EQ(one.at("finish_reason"), "tool_calls");
  harness.ExpectAllFree();
}

TEST(OpenAiChatTest, ToolCallsAreTextWithoutToolsOrWithToolChoiceNone) {
  const std::string text = "<tool_call>{\"name\": \"weather\"}</tool_call>";
  ApiHarness harness(Options({text}));
  for (const Json& more : {Json::object(), Json{{"tools", kTools}, {"tool_choice", "none"}},
                           Json{{"tools", Json::array()}}}) {
    const Json choice = harness.Chat(Ask(List({User("a")}), more))->json().at("choices")[0];
    EXPECT_EQ(choice.at("message").at("content"), text);
    EXPECT_FALSE(choice.at("message").contains("tool_calls"));
    EXPECT_EQ(choice.at("finish_reason"), "stop");
  }
  const Json cut =
      harness.Chat(Ask(List({User("a")}), {{"tools", kTools}, {"max_tokens", 1}}))->json();
  EXPECT_EQ(cut.at("choices")[0].at("finish_reason"), "length") << "the limit was met";
  EXPECT_EQ(cut.at("choices")[0].at("message").at("tool_calls").size(), 1);
}

TEST(OpenAiChatTest, ToolsThatTheTemplateWouldDropAreRefused) {
  HarnessOptions options = Options();
  options.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}>";
  ApiHarness harness(std::move(options));
  const auto client = harness.Chat(Ask(List({User("a")}), {{"tools", kTools}}));
  EXPECT_EQ(client->status(), 400);
  EXPECT_EQ(client->json().at("error").at("param"), "tools") << client->body();
  EXPECT_EQ(
      harness.Chat(Ask(List({User("a")}), {{"tools", kTools}, {"tool_choice", "none"}}))->status(),
      200);
}

TEST(OpenAiChatTest, SayWhatIsWrongWithTools) {
  ApiHarness harness(Options());
  const std::pair<const char*, const char*> cases[] = {
      {R"({"tools": 1})", "tools"},
      {R"({"tools": [1]})", "tools[0]"},
      {R"({"tools": [{"type": "retrieval"}]})", "tools[0].type"},
      {R"({"tools": [{"type": "function"}]})", "tools[0].function"},
      {R"({"tools": [{"type": "function", "function": {"name": 1}}]})", "tools[0].function.name"},
      {R"({"tool_choice": "required"})", "tool_choice"},
      {R"({"tool_choice": {"type": "function", "function": {"name": "weather"}}})", "tool_choice"},
      {R"({"parallel_tool_calls": 1})", "parallel_tool_calls"},
  };
  for (const auto& [more, param] : cases) {
    Json body = Ask(List({User("a")}), {{"tools", kTools}});
    body.update(Json::parse(more));
    const auto client = harness.Chat(body);
    EXPECT_EQ(client->status(), 400) << more;
    EXPECT_EQ(client->json().at("error").at("param"), param) << client->body();
  }
}

}  // namespace
}  // namespace lockstep

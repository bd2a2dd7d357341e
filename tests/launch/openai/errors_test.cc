// What a client may send wrongly (B30), and what is refused by name.
#include <gtest/gtest.h>

#include "tests/launch/openai/api_harness.h"

namespace lockstep {
namespace {

constexpr int32_t kStart = kFirstPiece - 1;

HarnessOptions Options() {
  HarnessOptions options;
  options.pieces = {"one", "two"};
  options.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}";
  return options;
}

// OpenAI's error object, with all its keys.
Json ErrorIn(const ApiHarness::Client& client) {
  EXPECT_EQ(client->Header("Content-Type"), "application/json");
  const Json body = client->json();
  EXPECT_TRUE(body.contains("error")) << body;
  const Json error = body.value("error", Json::object());
  for (const char* key : {"message", "type", "param", "code"}) {
    EXPECT_TRUE(error.contains(key)) << body;
  }
  EXPECT_FALSE(error.value("message", "").empty());
  return error;
}

void ExpectStillServes(ApiHarness& harness) {
  const auto client = harness.Completion({{"prompt", {kStart}}, {"temperature", 0}});
  EXPECT_EQ(client->status(), 200) << client->body();
  EXPECT_EQ(client->json().at("choices")[0].at("text"), "onetwo");
}

TEST(OpenAiErrorsTest, BodiesThatAreNoRequest) {
  ApiHarness harness(Options());
  const std::string utf16 = {'\xFF', '\xFE', '{', '\0', '}', '\0'};
  const std::vector<std::string> bodies = {
      "",
      "{",
      "[]",
      "\"text\"",
      "7",
      "null",
      "{\"prompt\": }",
      "prompt=hello",
      "{\"prompt\": \"a\xFF\"}",
      "{\"prompt\": \"\\ud800\"}",
      "{\"prompt\": NaN}",
      "{\"prompt\": \"a\", \"temperature\": 1e999}",
      utf16,
      std::string("{\"prompt\": \"a\"}\0", 16),
      std::string(10000, '['),
      std::string(2000000, '['),
      "{\"prompt\": " + std::string(10000, '[') + std::string(10000, ']') + "}",
      "{\"a\":" + std::string(300, '{'),
      std::string(1000000, '"'),
  };
  for (const char* path : {"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"}) {
    for (const std::string& body : bodies) {
      const auto client = harness.Send("POST", path, body);
      client->Wait();
      EXPECT_EQ(client->status(), 400) << path << " " << body.substr(0, 80);
      EXPECT_LT(ErrorIn(client).at("message").get<std::string>().size(), 3000);
    }
  }
  ExpectStillServes(harness);
}

TEST(OpenAiErrorsTest, FieldsOfAWrongTypeOrOutOfRange) {
  ApiHarness harness(Options());
  // Field and value as JSON; the message names the field.
  const std::pair<const char*, const char*> cases[] = {
      {"n", "0"},
      {"n", "5000000"},
      {"n", "1025"},
      {"n", "-1"},
      {"n", "1.5"},
      {"n", "\"1\""},
      {"n", "99999999999999999999999999"},
      {"max_tokens", "-1"},
      {"max_tokens", "0"},
      {"max_tokens", "\"5\""},
      {"max_tokens", "1e300"},
      {"max_completion_tokens", "[]"},
      {"min_tokens", "-1"},
      {"min_tokens", "17"},
      {"temperature", "-0.1"},
      {"temperature", "\"hot\""},
      {"temperature", "true"},
      {"top_p", "-1"},
      {"top_p", "0"},
      {"top_p", "1.1"},
      {"top_k", "-2"},
      {"min_p", "2"},
      {"repetition_penalty", "0"},
      {"repetition_penalty", "-1"},
      {"frequency_penalty", "3"},
      {"presence_penalty", "-3"},
      {"seed", "18446744073709551616"},
      {"seed", "1.5"},
      {"seed", "\"x\""},
      {"logit_bias", "[]"},
      {"logit_bias", "{\"x\": 1}"},
      {"logit_bias", "{\"5\": 101}"},
      {"logit_bias", "{\"5\": 1, \"05\": 1}"},
      {"logit_bias", "{\"100000\": 1}"},
      {"stop", "\"\""},
      {"stop", "[1]"},
      {"stop", "{}"},
      {"stop_token_ids", "[\"a\"]"},
      {"stop_token_ids", "[100000]"},
      {"logprobs", "21"},
      {"logprobs", "-1"},
      {"logprobs", "true"},
      {"prompt_logprobs", "21"},
      {"stream", "\"yes\""},
      {"stream", "1"},
      {"echo", "1"},
      {"ignore_eos", "\"no\""},
      {"priority", "\"high\""},
      {"priority", "4294967296"},
      {"cache_salt", "5"},
      {"model", "7"},
      {"skip_special_tokens", "0"},
      {"prompt", "null"},
      {"prompt", "7"},
      {"prompt", "{}"},
      {"prompt", "[]"},
      {"prompt", "[[]]"},
      {"prompt", "[-1]"},
      {"prompt", "[40000]"},
      {"prompt", "[4294967296]"},
      {"prompt", "[1.5]"},
      {"prompt", "[1, \"a\"]"},
      {"prompt", "[\"a\", 1]"},
      {"prompt", "[[1], [2, null]]"},
      {"prompt", "[[1], \"a\"]"},
      {"prompt", "[null]"},
  };
  for (const auto& [field, value] : cases) {
    std::string body = absl::StrFormat("{\"%s\": %s", field, value);
    if (std::string(field) != "prompt") body += absl::StrFormat(", \"prompt\": [%d]", kStart);
    const auto client = harness.Send("POST", "/v1/completions", body + "}");
    client->Wait();
    EXPECT_EQ(client->status(), 400) << field << " " << value;
    const Json error = ErrorIn(client);
    EXPECT_EQ(error.at("type"), "invalid_request_error");
    EXPECT_NE(error.at("message").get<std::string>().find(field), std::string::npos)
        << value << ": " << error;
  }
  EXPECT_EQ(harness.observer().submitted, 0);
  ExpectStillServes(harness);
}

TEST(OpenAiErrorsTest, NamesTheFieldInParam) {
  ApiHarness harness(Options());
  const auto param = [&](const Json& more) {
    Json body = {{"prompt", {kStart}}};
    body.update(more);
    return ErrorIn(harness.Completion(body)).at("param");
  };
  EXPECT_EQ(param({{"temperature", -1}}), "temperature");
  EXPECT_EQ(param({{"n", 0}}), "n");
  EXPECT_EQ(param({{"stop", ""}}), "stop");
  EXPECT_EQ(param({{"stop", std::string(2000, 'a')}}), "stop");
  EXPECT_EQ(param({{"stop_token_ids", {100000}}}), "stop_token_ids");
  EXPECT_EQ(ErrorIn(harness.Post("/tokenize", {{"prompt", 5}})).at("param"), "prompt");
  EXPECT_EQ(ErrorIn(harness.Post("/detokenize", {{"model", 5}})).at("param"), "model");
  EXPECT_EQ(param({{"max_tokens", "x"}}), "max_tokens");
  EXPECT_EQ(param({{"prompt", {{1}, {-5}}}}), "prompt[1][0]");
  EXPECT_EQ(param({{"response_format", {{"type", "json_object"}}}}), "response_format");
}

TEST(OpenAiErrorsTest, ChatLogprobs) {
  ApiHarness harness(Options());
  for (const auto& [logprobs, top] : {std::pair<Json, Json>{1, nullptr},
                                      {nullptr, 1},
                                      {false, 2},
                                      {true, 21},
                                      {true, -1},
                                      {true, 1.5},
                                      {true, "1"}}) {
    const auto client =
        harness.Chat({{"messages", Json::array({{{"role", "user"}, {"content", "a"}}})},
                      {"logprobs", logprobs},
                      {"top_logprobs", top}});
    EXPECT_EQ(client->status(), 400) << logprobs << top;
    EXPECT_NE(ErrorIn(client).at("message").get<std::string>().find("logprobs"), std::string::npos);
  }
}

TEST(OpenAiErrorsTest, UnsupportedFieldsAreRefusedByName) {
  ApiHarness harness(Options());
  const Json messages = Json::array({{{"role", "user"}, {"content", "a"}}});
  const auto refused = [&](const char* path, Json body, const std::string& field) {
    const auto client = harness.Post(path, body);
    EXPECT_EQ(client->status(), 400) << body;
    EXPECT_EQ(ErrorIn(client).at("message").get<std::string>().find(field), 0) << client->body();
  };
  const std::pair<const char*, Json> both[] = {
      {"response_format", {{"type", "json_object"}}},
      {"response_format", {{"type", "json_schema"}, {"json_schema", Json::object()}}},
      {"response_format", "json"},
      {"guided_json", {{"type", "object"}}},
      {"guided_regex", "a+"},
      {"guided_choice", {"a", "b"}},
      {"guided_grammar", "root ::= x"},
      {"structured_outputs", {{"regex", "a"}}},
      {"use_beam_search", true},
      {"bad_words", {"x"}},
      {"allowed_token_ids", {1}},
      {"truncate_prompt_tokens", 5},
      {"include_stop_str_in_output", true},
      {"best_of", 2},
  };
  for (const auto& [field, value] : both) {
    refused("/v1/completions", {{"prompt", "a"}, {field, value}}, field);
    refused("/v1/chat/completions", {{"messages", messages}, {field, value}}, field);
  }
  refused("/v1/completions", {{"prompt", "a"}, {"suffix", "b"}}, "suffix");
  const std::pair<const char*, Json> chat[] = {{"functions", {{{"name", "f"}}}},
                                               {"function_call", "auto"},
                                               {"audio", {{"voice", "x"}}},
                                               {"modalities", {"text", "audio"}},
                                               {"chat_template", "{{ 1 }}"},
                                               {"continue_final_message", true},
                                               {"echo", true}};
  for (const auto& [field, value] : chat) {
    refused("/v1/chat/completions", {{"messages", messages}, {field, value}}, field);
  }
}

TEST(OpenAiErrorsTest, WhatClientsSendHarmlesslyIsTaken) {
  ApiHarness harness(Options());
  const Json extras = {{"user", "u"},
                       {"store", false},
                       {"metadata", {{"a", "b"}}},
                       {"service_tier", "auto"},
                       {"best_of", 1},
                       {"suffix", nullptr},
                       {"response_format", {{"type", "text"}}},
                       {"modalities", {"text"}},
                       {"guided_json", nullptr},
                       {"bad_words", Json::array()},
                       {"logit_bias", Json::object()},
                       {"stop", nullptr},
                       {"seed", nullptr},
                       {"top_k", -1},
                       {"presence_penalty", 0},
                       {"no_such_field", 5},
                       {"use_beam_search", false}};
  Json body = extras;
  body["prompt"] = {kStart};
  EXPECT_EQ(harness.Completion(body)->status(), 200);
  body.erase("prompt");
  body["messages"] = Json::array({{{"role", "user"}, {"content", "a"}, {"name", "bob"}}});
  const auto client = harness.Chat(body);
  EXPECT_EQ(client->status(), 200) << client->body();
}

TEST(OpenAiErrorsTest, HugeListsAreRefusedOrJudgedByTheirTokens) {
  HarnessOptions options = Options();
  options.max_model_len = 1000;
  ApiHarness harness(std::move(options));
  const auto message = [&](const Json& body) {
    const auto client = harness.Completion(body);
    EXPECT_EQ(client->status(), 400);
    return ErrorIn(client).at("message").get<std::string>();
  };
  const std::string words(2 << 20, 'a');
  EXPECT_NE(message({{"prompt", words}}).find("more than 4000 tokens, which leaves no room"),
            std::string::npos);
  EXPECT_NE(message({{"prompt", std::string(2000, '#')}}).find("the prompt has 20"),
            std::string::npos);
  EXPECT_NE(message({{"prompt", std::vector<int32_t>(1000000, 5)}}).find("1000000 tokens"),
            std::string::npos);
  EXPECT_NE(message({{"prompt", std::vector<int32_t>(2000001, 5)}}).find("2000000 values"),
            std::string::npos);
  EXPECT_NE(message({{"prompt", std::vector<std::string>(1025, "a")}}).find("1025"),
            std::string::npos);
  EXPECT_NE(message({{"prompt", std::vector<std::string>(600, "a")}, {"n", 2}}).find("600"),
            std::string::npos);
  EXPECT_NE(message({{"prompt", "a"}, {"stop", std::vector<std::string>(65, "x")}}).find("65"),
            std::string::npos);
  EXPECT_NE(message({{"prompt", "a"}, {"stop", std::string(2000, 'x')}}).find("2000"),
            std::string::npos);
  EXPECT_NE(
      message({{"prompt", "a"}, {"stop_token_ids", std::vector<int32_t>(300, 5)}}).find("300"),
      std::string::npos);
  Json bias;
  for (int i = 0; i < 1100; ++i) bias[std::to_string(i)] = 1;
  EXPECT_NE(message({{"prompt", "a"}, {"logit_bias", bias}}).find("1024 keys"), std::string::npos);
  ExpectStillServes(harness);
}

TEST(OpenAiErrorsTest, PathsAndMethods) {
  ApiHarness harness(Options());
  for (const char* path :
       {"/", "/v1", "/v1/embeddings", "/v1/modelsx", "/v1/completions/", "/x\xFF"}) {
    const auto client = harness.Send("POST", path, "{}");
    EXPECT_EQ(client->status(), 404) << path;
    EXPECT_EQ(ErrorIn(client).at("type"), "not_found_error");
  }
  for (const auto& [method, path] :
       {std::pair("GET", "/v1/completions"), std::pair("PUT", "/v1/chat/completions"),
        std::pair("POST", "/v1/models"), std::pair("DELETE", "/v1/models/tiny"),
        std::pair("GET", "/tokenize"), std::pair("HEAD", "/detokenize")}) {
    const auto client = harness.Send(method, path, "");
    EXPECT_EQ(client->status(), 405) << method << path;
    EXPECT_NE(client->Header("Allow"), "");
    ErrorIn(client);
  }
  EXPECT_EQ(harness.Send("HEAD", "/v1/models", "")->status(), 200);
  const auto client = harness.Completion({{"model", "gpt-4"}, {"prompt", {kStart}}});
  EXPECT_EQ(client->status(), 404);
  EXPECT_EQ(ErrorIn(client).at("code"), "model_not_found");
  EXPECT_EQ(ErrorIn(client).at("param"), "model");
}

TEST(OpenAiErrorsTest, Keys) {
  HarnessOptions options = Options();
  options.api.api_keys = {"first", "second-key"};
  ApiHarness harness(std::move(options));
  const auto status = [&](const HttpHeaders& headers) {
    const auto client = harness.Send("GET", "/v1/models", "", headers);
    return client->status();
  };
  EXPECT_EQ(status({}), 401);
  for (const char* bad : {"first", "Bearer", "Bearer ", "Bearer firs", "Bearer firstx",
                          "Bearer second-kez", "Basic first", "Bearer \xFF"}) {
    EXPECT_EQ(status({{"Authorization", bad}}), 401) << bad;
  }
  EXPECT_EQ(status({{"authorization", "Bearer first"}}), 200);
  EXPECT_EQ(status({{"Authorization", "Bearer second-key"}}), 200);
  EXPECT_EQ(status({{"Authorization", "bearer first"}}), 200);
  const auto client = harness.Send("POST", "/v1/completions", "{}");
  EXPECT_EQ(client->status(), 401);
  EXPECT_EQ(ErrorIn(client).at("code"), "invalid_api_key");
  EXPECT_EQ(client->Header("WWW-Authenticate"), "Bearer");
}

TEST(OpenAiErrorsTest, OptionsThatMakeNoSense) {
  HarnessOptions options = Options();
  ApiHarness harness(std::move(options));
  const ModelConfig config;
  const GenerationConfig generation;
  const ServedModel model{.config = &config, .generation = &generation};
  const auto creates = [&](const std::function<void(OpenAiOptions&)>& change) {
    OpenAiOptions changed;
    changed.served_model_names = {"a"};
    change(changed);
    return OpenAiApi::Create(harness.engine(), model, changed, nullptr).ok();
  };
  EXPECT_TRUE(creates([](OpenAiOptions&) {}));
  EXPECT_FALSE(creates([](OpenAiOptions& o) { o.served_model_names.clear(); }));
  EXPECT_FALSE(creates([](OpenAiOptions& o) { o.served_model_names = {""}; }));
  EXPECT_FALSE(creates([](OpenAiOptions& o) { o.api_keys = {""}; }));
  EXPECT_FALSE(creates([](OpenAiOptions& o) { o.max_queue = -1; }));
  EXPECT_FALSE(creates([](OpenAiOptions& o) { o.max_held_bytes = -1; }));
  EXPECT_FALSE(creates([](OpenAiOptions& o) { o.request_timeout_seconds = -1; }));
  EXPECT_FALSE(creates([](OpenAiOptions& o) { o.num_workers = 1; }));
}

TEST(OpenAiErrorsTest, TheServersOwnErrorsHaveTheSameForm) {
  const Json body = Json::parse(OpenAiErrorBody(413, "the body is too large"));
  EXPECT_EQ(body.at("error").at("message"), "the body is too large");
  EXPECT_EQ(body.at("error").at("type"), "invalid_request_error");
}

}  // namespace
}  // namespace lockstep

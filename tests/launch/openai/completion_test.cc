// Completions that are no stream, and what streams must agree with.
#include <gtest/gtest.h>

#include "tests/launch/openai/api_harness.h"

namespace lockstep {
namespace {

const std::vector<std::string> kPieces = {"ABC", "DEF", "G", "HI", "J KL", " end"};
constexpr int32_t kStart = kFirstPiece - 1;

Json Ask(const Json& more = Json::object()) {
  Json body = {{"model", "tiny"}, {"prompt", {kStart}}, {"temperature", 0}, {"max_tokens", 20}};
  body.update(more);
  return body;
}

HarnessOptions Pieces() {
  HarnessOptions options;
  options.pieces = kPieces;
  return options;
}

TEST(OpenAiCompletionTest, AnswersWithTextUsageAndIds) {
  ApiHarness harness(Pieces());
  const auto client = harness.Completion(Ask());
  EXPECT_EQ(client->status(), 200) << client->body();
  EXPECT_EQ(client->Header("Content-Type"), "application/json");
  const Json answer = client->json();
  EXPECT_EQ(answer.at("object"), "text_completion");
  EXPECT_EQ(answer.at("model"), "tiny");
  EXPECT_EQ(answer.at("id").get<std::string>().substr(0, 5), "cmpl-");
  EXPECT_GT(answer.at("created").get<int64_t>(), 1600000000);
  EXPECT_TRUE(answer.at("system_fingerprint").is_null());
  const Json expected = {{{"index", 0},
                          {"text", "ABCDEFGHIJ KL end"},
                          {"logprobs", nullptr},
                          {"finish_reason", "stop"}}};
  EXPECT_EQ(answer.at("choices"), expected);
  EXPECT_EQ(answer.at("usage"),
            (Json{{"prompt_tokens", 1}, {"completion_tokens", 7}, {"total_tokens", 8}}))
      << "the end token counts";
  harness.ExpectAllFree();
  EXPECT_EQ(harness.observer().submitted, 1);
  EXPECT_EQ(harness.observer().admitted, 1);
  EXPECT_EQ(harness.observer().first_tokens, 1);
  EXPECT_EQ(harness.observer().next_tokens, 6);
  EXPECT_EQ(harness.observer().finished, 1);
  EXPECT_EQ(harness.observer().generated, 7);
  EXPECT_EQ(harness.observer().refused, 0);
}

TEST(OpenAiCompletionTest, TheFingerprintAndAnyOfTheNamesAreGivenBack) {
  HarnessOptions options = Pieces();
  options.api.system_fingerprint = "fp_\"1\"";
  ApiHarness harness(std::move(options));
  const Json answer = harness.Completion(Ask({{"model", "alias/of tiny"}}))->json();
  EXPECT_EQ(answer.at("model"), "alias/of tiny");
  EXPECT_EQ(answer.at("system_fingerprint"), "fp_\"1\"");
  EXPECT_NE(answer.at("id"), harness.Completion(Ask())->json().at("id"));
}

TEST(OpenAiCompletionTest, StopsAtMaxTokens) {
  ApiHarness harness(Pieces());
  const Json answer = harness.Completion(Ask({{"max_tokens", 2}}))->json();
  EXPECT_EQ(answer.at("choices")[0].at("text"), "ABCDEF");
  EXPECT_EQ(answer.at("choices")[0].at("finish_reason"), "length");
  // OpenAI's 16 where nothing is said.
  Json body = Ask();
  body.erase("max_tokens");
  body["ignore_eos"] = true;
  EXPECT_EQ(harness.Completion(body)->json().at("usage").at("completion_tokens"), 16);
}

TEST(OpenAiCompletionTest, TakesPromptsInEveryForm) {
  ApiHarness harness(Pieces());
  const auto texts = [&](const Json& prompt) {
    const auto client = harness.Completion(Ask({{"prompt", prompt}, {"max_tokens", 1}}));
    EXPECT_EQ(client->status(), 200) << client->body();
    std::vector<std::string> texts;
    const Json answer = client->json();
    for (const Json& choice : answer.at("choices")) {
      EXPECT_EQ(choice.at("index"), texts.size());
      texts.push_back(choice.at("text"));
    }
    return texts;
  };
  using Texts = std::vector<std::string>;
  EXPECT_EQ(texts("say ABC"), (Texts{"DEF"}));
  EXPECT_EQ(texts({"ABC", "DEF"}), (Texts{"DEF", "G"}));
  EXPECT_EQ(texts(Json::array({7, kStart})), (Texts{"ABC"}));
  EXPECT_EQ(texts({{kStart}, {kStart + 1, kStart + 2}, {kStart + 1}}), (Texts{"ABC", "G", "DEF"}));
}

TEST(OpenAiCompletionTest, ChoicesOfSeveralPromptsAreNumberedThrough) {
  ApiHarness harness(Pieces());
  const Json answer =
      harness.Completion(Ask({{"prompt", {"ABC", "DEF"}}, {"n", 3}, {"max_tokens", 2}}))->json();
  ASSERT_EQ(answer.at("choices").size(), 6);
  for (size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(answer.at("choices")[i].at("index"), i);
    EXPECT_EQ(answer.at("choices")[i].at("text"), i < 3 ? "DEFG" : "GHI");
  }
  // <s> and the piece, each prompt counted once.
  const int64_t prompt_tokens = 2 * std::ssize(*harness.tokenizer().Encode("ABC", true));
  EXPECT_EQ(answer.at("usage").at("prompt_tokens"), prompt_tokens);
  EXPECT_EQ(answer.at("usage").at("completion_tokens"), 12);
  EXPECT_EQ(harness.observer().finished, 6);
}

// B26, streaming and not.
std::pair<std::string, std::string> Generate(ApiHarness& harness, Json body, bool streams) {
  body["stream"] = streams;
  const auto client = harness.Completion(body);
  EXPECT_EQ(client->status(), 200) << client->body();
  if (streams) {
    const StreamedChoice choice = JoinCompletion(client->Events());
    return {choice.text, choice.finish};
  }
  const Json choice = client->json().at("choices")[0];
  return {choice.at("text"), choice.at("finish_reason")};
}

TEST(OpenAiCompletionTest, StopStringsCutTheTextWhereverTokensMeet) {
  for (const bool streams : {false, true}) {
    ApiHarness harness(Pieces());
    const auto with = [&](const Json& stop, int64_t max_tokens = 20) {
      return Generate(harness, Ask({{"stop", stop}, {"max_tokens", max_tokens}}), streams);
    };
    using Pair = std::pair<std::string, std::string>;
    EXPECT_EQ(with("DEFGHIJ"), Pair("ABC", "stop"));
    EXPECT_EQ(with("DEFGHX"), Pair("ABCDEFGHIJ KL end", "stop")) << "a false start";
    EXPECT_EQ(with("BC"), Pair("A", "stop")) << "inside one token";
    EXPECT_EQ(with({"HIJ", "EFG"}), Pair("ABCD", "stop")) << "the earlier one wins";
    EXPECT_EQ(with("DEFGHIJ", 3), Pair("ABCDEFG", "length")) << "held text comes out";
    EXPECT_EQ(with("K"), Pair("ABCDEFGHIJ ", "stop"));
    harness.ExpectAllFree();
  }
}

TEST(OpenAiCompletionTest, AStopStringOfSeveralBytesACharacter) {
  for (const bool streams : {false, true}) {
    HarnessOptions options;
    // The bytes of 🦙 one by one, then "x".
    options.pieces = {"é", "x"};
    options.next = {{kStart, 243}, {243, 162}, {162, 169}, {169, 156}, {156, kFirstPiece}};
    ApiHarness harness(std::move(options));
    EXPECT_EQ(Generate(harness, Ask({{"stop", "é"}}), streams),
              (std::pair<std::string, std::string>("🦙", "stop")));
    EXPECT_EQ(Generate(harness, Ask({{"stop", "🦙é"}}), streams),
              (std::pair<std::string, std::string>("", "stop")));
  }
}

// B20: an unfinished character waits, and becomes U+FFFD at a forced end.
TEST(OpenAiCompletionTest, CharactersAreNeverCut) {
  HarnessOptions options;
  options.pieces = {"x"};
  options.next = {{kStart, 243}, {243, 162}, {162, 169}, {169, 156}, {156, kFirstPiece}};
  ApiHarness harness(std::move(options));
  for (int64_t max_tokens = 1; max_tokens <= 6; ++max_tokens) {
    std::vector<int32_t> ids = {243, 162, 169, 156, kFirstPiece};
    ids.resize(std::min<size_t>(ids.size(), static_cast<size_t>(max_tokens)));
    const std::string expected = *harness.tokenizer().Decode(ids, true);
    for (const bool streams : {false, true}) {
      const auto [text, finish] = Generate(harness, Ask({{"max_tokens", max_tokens}}), streams);
      EXPECT_EQ(text, expected) << max_tokens;
      EXPECT_EQ(finish, max_tokens < 6 ? "length" : "stop");
    }
  }
}

TEST(OpenAiCompletionTest, ACharacterOutsideTheVocabularyIsEncodedAsItsBytes) {
  ApiHarness harness(Pieces());
  const Json answer =
      harness.Post("/tokenize", {{"prompt", "🦙"}, {"add_special_tokens", false}})->json();
  const Json tokens = answer.at("tokens");
  ASSERT_GE(tokens.size(), 4);
  EXPECT_EQ(Json(std::vector<int32_t>(tokens.end() - 4, tokens.end())), (Json{243, 162, 169, 156}));
  const auto client = harness.Completion(Ask({{"prompt", "🦙"}}));
  EXPECT_EQ(client->status(), 200);
  EXPECT_EQ(client->json().at("usage").at("prompt_tokens"), tokens.size() + 1);
}

TEST(OpenAiCompletionTest, LogprobsHaveATokenEachAndItsPlace) {
  ApiHarness harness(Pieces());
  const Json choice =
      harness.Completion(Ask({{"logprobs", 2}, {"max_tokens", 3}}))->json().at("choices")[0];
  const Json& logprobs = choice.at("logprobs");
  EXPECT_EQ(logprobs.at("tokens"), (Json{"ABC", "DEF", "G"}));
  EXPECT_EQ(logprobs.at("text_offset"), (Json{0, 3, 6}));
  ASSERT_EQ(logprobs.at("token_logprobs").size(), 3);
  ASSERT_EQ(logprobs.at("top_logprobs").size(), 3);
  EXPECT_EQ(logprobs.at("top_logprobs")[0].size(), 2);
  EXPECT_NEAR(logprobs.at("token_logprobs")[0].get<double>(), 0, 1e-4);
  EXPECT_EQ(logprobs.at("top_logprobs")[1].at("DEF"), logprobs.at("token_logprobs")[1]);
  EXPECT_NEAR(logprobs.at("top_logprobs")[0].at("DEF").get<double>(), -20, 0.1);
  // 0: that of the token alone.
  const Json none = harness.Completion(Ask({{"logprobs", 0}, {"max_tokens", 1}}))->json();
  EXPECT_EQ(none.at("choices")[0].at("logprobs").at("top_logprobs")[0].size(), 1);
}

TEST(OpenAiCompletionTest, StreamedLogprobsAreTheSame) {
  for (const Json& stop : {Json(), Json("DEFGHIJ"), Json("HIJ")}) {
    ApiHarness harness(Pieces());
    const Json body = Ask({{"logprobs", 1}, {"stop", stop}});
    const Json whole = harness.Completion(body)->json().at("choices")[0].at("logprobs");
    Json streaming = body;
    streaming["stream"] = true;
    Json joined = {{"tokens", Json::array()},
                   {"token_logprobs", Json::array()},
                   {"top_logprobs", Json::array()},
                   {"text_offset", Json::array()}};
    for (const Json& part : JoinCompletion(harness.Completion(streaming)->Events()).logprobs) {
      for (auto& [key, list] : joined.items()) {
        list.insert(list.end(), part.at(key).begin(), part.at(key).end());
      }
    }
    EXPECT_EQ(joined, whole) << stop;
  }
}

TEST(OpenAiCompletionTest, TokensThatAreNoCharactersAreNamedByTheirBytes) {
  HarnessOptions options;
  options.pieces = {"x"};
  options.next = {{kStart, 243}};
  ApiHarness harness(std::move(options));
  const Json choice =
      harness.Completion(Ask({{"logprobs", 0}, {"max_tokens", 1}}))->json().at("choices")[0];
  EXPECT_EQ(choice.at("logprobs").at("tokens"), Json({"bytes:\\xf0"}));
  EXPECT_EQ(choice.at("text"), "\xEF\xBF\xBD");
}

TEST(OpenAiCompletionTest, AnEchoPutsThePromptInFront) {
  ApiHarness harness(Pieces());
  for (const bool streams : {false, true}) {
    const auto echo = [&](const Json& more) {
      Json body = Ask(more);
      body["echo"] = true;
      return Generate(harness, body, streams);
    };
    using Pair = std::pair<std::string, std::string>;
    EXPECT_EQ(echo({{"prompt", "say ABC"}, {"max_tokens", 1}}), Pair("say ABCDEF", "length"));
    EXPECT_EQ(echo({{"prompt", {300, 301}}, {"max_tokens", 1}}), Pair("ABCDEFG", "length"));
    EXPECT_EQ(echo({{"prompt", "say ABC"}, {"max_tokens", 0}}), Pair("say ABC", "length"));
  }
  const Json answer =
      harness.Completion(Ask({{"prompt", "ABC"}, {"max_tokens", 0}, {"echo", true}}))->json();
  EXPECT_EQ(answer.at("usage").at("completion_tokens"), 0);
}

TEST(OpenAiCompletionTest, AnEchoWithLogprobsHasThoseOfThePrompt) {
  ApiHarness harness(Pieces());
  for (const int n : {1, 2}) {
    for (const int max_tokens : {0, 1}) {
      const Json body = Ask({{"prompt", {300, 301, 305}},
                             {"echo", true},
                             {"logprobs", 1},
                             {"max_tokens", max_tokens},
                             {"n", n}});
      const Json answer = harness.Completion(body)->json();
      ASSERT_EQ(answer.at("choices").size(), n);
      for (const Json& choice : answer.at("choices")) {
        const Json& logprobs = choice.at("logprobs");
        Json tokens = {"ABC", "DEF", " end"};
        if (max_tokens == 1) tokens.push_back("</s>");  // see below
        EXPECT_EQ(logprobs.at("tokens").size(), 3) << "the end token ends, and is no token";
        EXPECT_TRUE(logprobs.at("token_logprobs")[0].is_null());
        EXPECT_TRUE(logprobs.at("top_logprobs")[0].is_null());
        EXPECT_NEAR(logprobs.at("token_logprobs")[1].get<double>(), 0, 1e-4);
        EXPECT_LT(logprobs.at("token_logprobs")[2].get<double>(), -10);
        EXPECT_EQ(logprobs.at("text_offset"), (Json{0, 3, 6}));
        EXPECT_EQ(logprobs.at("top_logprobs")[2].size(), 2) << "the best and the one there";
      }
    }
  }
}

TEST(OpenAiCompletionTest, GivesPromptLogprobsAndTokenIdsWhereAsked) {
  ApiHarness harness(Pieces());
  const Json choice = harness
                          .Completion(Ask({{"prompt", {300, 301}},
                                           {"max_tokens", 1},
                                           {"prompt_logprobs", 1},
                                           {"return_token_ids", true}}))
                          ->json()
                          .at("choices")[0];
  ASSERT_EQ(choice.at("prompt_logprobs").size(), 2);
  EXPECT_TRUE(choice.at("prompt_logprobs")[0].is_null());
  EXPECT_EQ(choice.at("prompt_logprobs")[1].at("301").at("decoded_token"), "DEF");
  EXPECT_EQ(choice.at("token_ids"), Json({302}));
  EXPECT_EQ(choice.at("prompt_token_ids"), (Json{300, 301}));
  EXPECT_TRUE(choice.at("logprobs").is_null());
}

// A token that ends the answer was generated like the others, but it is no text.
TEST(OpenAiCompletionTest, AnEndTokenCounts) {
  ApiHarness harness(Pieces());
  const auto check = [&](const Json& more, const std::string& text, const std::string& reason,
                         const std::vector<int32_t>& ids, size_t num_logprobs) {
    Json body = Ask({{"return_token_ids", true}, {"logprobs", 0}});
    body.update(more);
    const Json answer = harness.Completion(body)->json();
    const Json& choice = answer.at("choices")[0];
    EXPECT_EQ(choice.at("text"), text);
    EXPECT_EQ(choice.at("finish_reason"), reason);
    EXPECT_EQ(choice.at("token_ids"), Json(ids));
    EXPECT_EQ(choice.at("logprobs").at("tokens").size(), num_logprobs);
    EXPECT_EQ(answer.at("usage").at("completion_tokens"), ids.size());
    body["stream"] = true;
    body["stream_options"] = {{"include_usage", true}};
    std::vector<int32_t> streamed;
    std::vector<Json> events = harness.Completion(body)->Events();
    events.pop_back();
    EXPECT_EQ(events.back().at("usage").at("completion_tokens"), ids.size());
    events.pop_back();
    for (const Json& event : events) {
      for (const int32_t id : event.at("choices")[0].at("token_ids")) streamed.push_back(id);
    }
    EXPECT_EQ(streamed, ids);
  };
  check({{"prompt", {304}}}, "end", "stop", {305, kEndToken}, 1);
  check({{"prompt", {304}}, {"max_tokens", 1}}, "end", "length", {305}, 1);
  check({{"prompt", {304}}, {"max_tokens", 2}}, "end", "stop", {305, kEndToken}, 1);
  check({{"prompt", {302}}, {"stop_token_ids", {304}}}, "HI", "stop", {303, 304}, 1);
  check({{"prompt", {302}}, {"stop", "I"}}, "H", "stop", {303}, 1);
}

TEST(OpenAiCompletionTest, SamplingParametersReachTheEngine) {
  ApiHarness harness(Pieces());
  const auto text = [&](const Json& more) {
    const auto client = harness.Completion(Ask(more));
    EXPECT_EQ(client->status(), 200) << client->body();
    return client->json().at("choices")[0].at("text").get<std::string>();
  };
  EXPECT_EQ(text({{"logit_bias", {{"300", -100}}}, {"max_tokens", 1}}), "DEF");
  EXPECT_EQ(text({{"stop_token_ids", {303}}}), "ABCDEFG");
  EXPECT_EQ(text({{"min_tokens", 6}, {"stop", "DEF"}}), "ABCDEFGHIJ KL end");
  EXPECT_EQ(text({{"top_k", 1}, {"temperature", 5}, {"max_tokens", 2}}), "ABCDEF");
  EXPECT_EQ(text({{"min_p", 1}, {"temperature", 5}, {"max_tokens", 2}}), "ABCDEF");
  // At a temperature that makes all tokens alike, the seed decides.
  const auto ids = [&](const Json& seed) {
    const Json body = Ask({{"temperature", 1000}, {"seed", seed}, {"return_token_ids", true}});
    return harness.Completion(body)->json().at("choices")[0].at("token_ids");
  };
  EXPECT_EQ(ids(-7), ids(-7));
  EXPECT_NE(ids(-7), ids(7));
  EXPECT_NE(ids(nullptr), ids(nullptr));
}

// B21: refused at once with both numbers, and the others go on.
TEST(OpenAiCompletionTest, LengthsAreJudgedByTokens) {
  HarnessOptions options = Pieces();
  options.max_model_len = 784;
  ApiHarness harness(std::move(options));
  const auto with_prompt = [&](int64_t length, int64_t max_tokens) {
    return harness.Completion(Ask({{"prompt", std::vector<int32_t>(length, kStart)},
                                   {"max_tokens", max_tokens},
                                   {"ignore_eos", true}}));
  };
  for (const int64_t length : {784, 1000}) {
    const auto client = with_prompt(length, 16);
    EXPECT_EQ(client->status(), 400);
    const Json error = client->json().at("error");
    const std::string message = error.at("message");
    EXPECT_NE(message.find(std::to_string(length) + " tokens"), std::string::npos) << message;
    EXPECT_NE(message.find("784"), std::string::npos) << message;
    EXPECT_EQ(error.at("code"), "context_length_exceeded");
  }
  EXPECT_EQ(with_prompt(5, 16)->status(), 200);
  const Json fits = with_prompt(783, 16)->json();
  EXPECT_EQ(fits.at("usage").at("completion_tokens"), 1);
  EXPECT_EQ(fits.at("choices")[0].at("finish_reason"), "length");
  const Json ends = with_prompt(700, 200)->json();
  EXPECT_EQ(ends.at("usage").at("completion_tokens"), 84);
  EXPECT_EQ(ends.at("choices")[0].at("finish_reason"), "length");
  const auto models = harness.Send("GET", "/v1/models", "");
  EXPECT_EQ(models->json().at("data")[0].at("max_model_len"), 784);
  EXPECT_EQ(harness.engine().max_model_len(), 784);
}

TEST(OpenAiCompletionTest, ListsItsModels) {
  ApiHarness harness(Pieces());
  const Json list = harness.Send("GET", "/v1/models", "")->json();
  EXPECT_EQ(list.at("object"), "list");
  ASSERT_EQ(list.at("data").size(), 2);
  EXPECT_EQ(list.at("data")[0].at("id"), "tiny");
  EXPECT_EQ(list.at("data")[0].at("object"), "model");
  EXPECT_EQ(list.at("data")[1].at("root"), "tiny");
  EXPECT_EQ(harness.Send("GET", "/v1/models/alias/of tiny", "")->json().at("id"), "alias/of tiny");
  const auto unknown = harness.Send("GET", "/v1/models/gpt-4", "");
  EXPECT_EQ(unknown->status(), 404);
  EXPECT_EQ(unknown->json().at("error").at("code"), "model_not_found");
}

TEST(OpenAiCompletionTest, TokenisesAndBack) {
  ApiHarness harness(Pieces());
  const auto client =
      harness.Post("/tokenize", {{"prompt", "ABC Hello"}, {"return_token_strs", true}});
  EXPECT_EQ(client->status(), 200) << client->body();
  const Json answer = client->json();
  const std::vector<int32_t> ids = *harness.tokenizer().Encode("ABC Hello", true);
  EXPECT_EQ(answer.at("tokens"), Json(ids));
  EXPECT_EQ(answer.at("count"), ids.size());
  EXPECT_EQ(answer.at("max_model_len"), 4096);
  EXPECT_EQ(answer.at("token_strs").size(), ids.size());
  EXPECT_EQ(answer.at("token_strs")[0], "<s>");
  const auto back = harness.Post("/detokenize", {{"tokens", {300, 303}}});
  EXPECT_EQ(back->json().at("prompt"), "ABCHI");
  for (const Json& bad : {Json{{"tokens", {-1}}}, Json{{"tokens", {299}}}, Json{{"tokens", "x"}},
                          Json::object(), Json{{"tokens", {1.5}}}}) {
    EXPECT_EQ(harness.Post("/detokenize", bad)->status(), 400) << bad;
  }
  EXPECT_EQ(harness.Post("/tokenize", Json::object())->status(), 400);
  EXPECT_EQ(harness.Post("/tokenize", {{"prompt", {1, 2}}})->status(), 400);
  EXPECT_EQ(harness.Post("/tokenize", {{"prompt", "a"}, {"model", "other"}})->status(), 404);
}

}  // namespace
}  // namespace lockstep

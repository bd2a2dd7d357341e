#include "launch/prompt_lines.h"

#include <gtest/gtest.h>

#include <fstream>

namespace lockstep {
namespace {

using Ids = std::vector<int32_t>;

PromptLine Parse(const std::string& text) {
  absl::StatusOr<PromptLine> line = ParsePromptLine(text, "f line 3");
  EXPECT_TRUE(line.ok()) << line.status();
  return line.ok() ? *std::move(line) : PromptLine();
}

std::string Fault(const std::string& text) {
  const absl::StatusOr<PromptLine> line = ParsePromptLine(text, "f line 3");
  return line.ok() ? "accepted" : std::string(line.status().message());
}

TEST(PromptLines, ThreeKindsOfPrompts) {
  EXPECT_EQ(Parse(R"({"prompt": "a\n\u00e9"})").text, "a\n\u00e9");
  EXPECT_EQ(Parse(R"({"prompt": [1, 2, 3]})").ids, Ids({1, 2, 3}));
  EXPECT_EQ(Parse(R"({"prompt": []})").ids, Ids());
  const PromptLine chat = Parse(R"({"messages": [{"role": "user", "content": "x", "a": 1}]})");
  ASSERT_TRUE(chat.messages.has_value());
  EXPECT_EQ(DumpJson(*chat.messages), R"([{"role":"user","content":"x","a":1}])")
      << "keys in order";
  EXPECT_FALSE(chat.text.has_value() || chat.ids.has_value());
}

TEST(PromptLines, EveryKey) {
  const PromptLine line = Parse(
      R"({"prompt": "x", "max_tokens": 5, "min_tokens": 2, "temperature": 0, "top_p": 0.5,
          "top_k": -1, "min_p": 0.1, "seed": 18446744073709551615, "n": 4, "stop": "end",
          "stop_token_ids": [7, 8], "ignore_eos": true, "presence_penalty": 0.5,
          "frequency_penalty": -1, "repetition_penalty": 1.25, "logit_bias": {"9": -100},
          "logprobs": 0, "prompt_logprobs": 3, "priority": -2, "cache_salt": "s"})");
  const SamplingFlags& got = line.sampling;
  EXPECT_EQ(got.max_tokens, 5);
  EXPECT_EQ(got.min_tokens, 2);
  EXPECT_EQ(got.temperature, 0.0);
  EXPECT_EQ(got.top_p, 0.5);
  EXPECT_EQ(got.top_k, 0);
  EXPECT_EQ(got.min_p, 0.1);
  EXPECT_EQ(got.seed, UINT64_MAX);
  EXPECT_EQ(got.n, 4);
  EXPECT_EQ(got.stop, std::vector<std::string>{"end"});
  EXPECT_EQ(got.stop_token_ids, Ids({7, 8}));
  EXPECT_EQ(got.ignore_eos, true);
  EXPECT_EQ(got.presence_penalty, 0.5);
  EXPECT_EQ(got.frequency_penalty, -1.0);
  EXPECT_EQ(got.repetition_penalty, 1.25);
  ASSERT_TRUE(got.logit_bias.has_value());
  EXPECT_EQ(*got.logit_bias, (std::vector<std::pair<int32_t, double>>{{9, -100.0}}));
  EXPECT_EQ(got.num_logprobs, 0);
  EXPECT_EQ(got.num_prompt_logprobs, 3);
  EXPECT_EQ(line.priority, -2);
  EXPECT_EQ(line.cache_salt, "s");
  EXPECT_EQ(Parse(R"({"prompt": "x", "stop": ["a", "b"]})").sampling.stop,
            (std::vector<std::string>{"a", "b"}));
}

TEST(PromptLines, NullAndAbsentSayNothing) {
  const SamplingFlags got =
      Parse(R"({"prompt": "x", "seed": null, "stop": null, "n": null, "logit_bias": null,
               "stop_token_ids": null, "priority": null, "messages": null})")
          .sampling;
  EXPECT_FALSE(got.seed || got.stop || got.n || got.logit_bias || got.stop_token_ids ||
               got.temperature || got.max_tokens || got.ignore_eos || got.num_logprobs);
}

TEST(PromptLines, FaultsNameLineAndKey) {
  EXPECT_EQ(Fault(R"({"prompt": "x", "max_new_tokens": 3})"),
            "f line 3: unknown key 'max_new_tokens'");
  EXPECT_EQ(Fault(R"({"max_tokens": 3})"), "f line 3: prompt is missing");
  EXPECT_EQ(Fault(R"({"prompt": "x", "messages": []})"),
            "f line 3: prompt and messages exclude each other");
  EXPECT_EQ(Fault(R"({"prompt": ""})"), "f line 3: the prompt is an empty string");
  EXPECT_EQ(Fault(R"({"prompt": 3})"), "f line 3: prompt must be a string or a list of token ids");
  EXPECT_EQ(Fault(R"({"messages": {}})"), "f line 3: messages must be a list");
  EXPECT_EQ(Fault("{\"prompt\": \"a\xff\"}"), "f line 3: invalid UTF-8 at byte 13 of the line");
  EXPECT_EQ(Fault(R"({"prompt": "x", "stop": ["a", ""]})"),
            "f line 3: stop has an empty string: it would stop every text at once");
  EXPECT_EQ(Fault(R"({"prompt": "x", "n": 1, "n": 2})"), "f line 3: the key n is there twice");
  const std::pair<const char*, const char*> wrong[] = {
      {"[1]", "object"},
      {"{\"prompt\": \"x\"", "not valid JSON"},
      {R"({"prompt": ["x"]})", "prompt"},
      {R"({"prompt": [-1]})", "prompt"},
      {R"({"prompt": [1.5]})", "prompt"},
      {R"({"prompt": "x", "max_tokens": "3"})", "max_tokens"},
      {R"({"prompt": "x", "max_tokens": 1e30})", "max_tokens"},
      {R"({"prompt": "x", "temperature": true})", "temperature"},
      {R"({"prompt": "x", "seed": -1})", "seed"},
      {R"({"prompt": "x", "seed": 1.5})", "seed"},
      {R"({"prompt": "x", "ignore_eos": 1})", "ignore_eos"},
      {R"({"prompt": "x", "stop": [1]})", "stop"},
      {R"({"prompt": "x", "logit_bias": {"a": 1}})", "logit_bias"},
      {R"({"prompt": "x", "logit_bias": {"1": 101}})", "logit_bias"},
      {R"({"prompt": "x", "logprobs": true})", "logprobs"},
      {R"({"prompt": "x", "priority": 3000000000})", "priority"},
      {R"({"prompt": "x", "cache_salt": 1})", "cache_salt"}};
  for (const auto& [text, piece] : wrong) {
    const std::string fault = Fault(text);
    EXPECT_EQ(fault.find("f line 3: "), 0u) << text << ": " << fault;
    EXPECT_NE(fault.find(piece), std::string::npos) << text << ": " << fault;
  }
}

class PromptFileTest : public testing::Test {
 protected:
  std::string Write(const std::string& content) {
    const std::string path = testing::TempDir() + "/prompt_lines_test.jsonl";
    std::ofstream(path, std::ios::binary) << content;
    return path;
  }
  // "TEXT@WHERE ..." of the lines, or the fault.
  std::string Read(const std::string& path) {
    std::string seen;
    const absl::Status status =
        ReadPromptLines(path, [&](const PromptLine& line, const std::string& where) {
          seen += *line.text + "@" + where.substr(where.find(" line ") + 1) + " ";
          return *line.text == "refused" ? absl::InvalidArgumentError("refused") : absl::OkStatus();
        });
    return status.ok() ? seen : std::string(status.message());
  }
};

TEST_F(PromptFileTest, ByteOrderMarkCrlfAndBlankLines) {
  const std::string path = Write(
      "\xEF\xBB\xBF{\"prompt\": \"a\"}\r\n\r\n  \t\n{\"prompt\": \"b\"}\n\n{\"prompt\": \"c\"}");
  EXPECT_EQ(Read(path), "a@line 1 b@line 4 c@line 6 ");
}

TEST_F(PromptFileTest, Faults) {
  const std::string path = Write("{\"prompt\": \"a\"}\n{\"promt\": \"b\"}\n");
  EXPECT_EQ(Read(path), path + " line 2: unknown key 'promt'");
  EXPECT_EQ(Read(Write("{\"prompt\": \"refused\"}\n{\"prompt\": \"b\"}\n")), "refused");
  EXPECT_EQ(Read(Write("\n \r\n")), "--prompts " + path + ": it holds no prompt");
  EXPECT_EQ(Read(Write("")), "--prompts " + path + ": it holds no prompt");
  EXPECT_EQ(Read(path + ".none"), "--prompts " + path + ".none: No such file or directory");
  EXPECT_NE(Read(testing::TempDir()).find("Is a directory"), std::string::npos);
}

}  // namespace
}  // namespace lockstep

#include "launch/tokenize_command.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "absl/strings/str_format.h"
#include "gtest/gtest.h"

namespace lockstep {
namespace {

// Byte-level BPE over a handful of letters: "ab" is one token, "<s>" leads a prompt.
constexpr const char* kTokenizerJson = R"({
  "added_tokens": [{"id": 0, "content": "<s>", "special": true, "single_word": false, "lstrip": false,
                    "rstrip": false, "normalized": false}],
  "normalizer": null,
  "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
  "post_processor": {"type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}}},
  "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
  "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
    "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
    "vocab": {"a": 1, "b": 2, "ab": 3, "c": 4}, "merges": ["a b"]}})";

class TokenizeCommandTest : public testing::Test {
 protected:
  TokenizeCommandTest()
      : dir_(std::filesystem::temp_directory_path() /
             absl::StrFormat("lockstep_tokenize_%d_%s", ::getpid(),
                             testing::UnitTest::GetInstance()->current_test_info()->name())) {
    std::filesystem::create_directories(dir_);
    options_.model = dir_.string();
  }
  ~TokenizeCommandTest() override { std::filesystem::remove_all(dir_); }

  void Write(const std::string& name, const std::string& text) {
    std::ofstream(dir_ / name, std::ios::binary) << text;
  }
  int Run(const std::string& input) {
    std::istringstream in(input);
    std::ostringstream out;
    std::ostringstream err;
    const int exit_status = RunTokenizeCommand(options_, in, out, err);
    out_ = out.str();
    err_ = err.str();
    return exit_status;
  }

  std::filesystem::path dir_;
  TokenizeOptions options_;
  std::string out_, err_;
};

TEST_F(TokenizeCommandTest, EncodesALineAtATime) {
  Write("tokenizer.json", kTokenizerJson);
  EXPECT_EQ(Run("\"abc\"\n\"\"\n\"a<s>b\""), 0) << err_;
  EXPECT_EQ(out_, "[3,4]\n[]\n[1,0,2]\n");
  options_.add_special_tokens = true;
  EXPECT_EQ(Run("\"ab\"\n"), 0) << err_;
  EXPECT_EQ(out_, "[0,3]\n");
}

TEST_F(TokenizeCommandTest, Decodes) {
  Write("tokenizer.json", kTokenizerJson);
  options_.decode = true;
  EXPECT_EQ(Run("[0, 3, 4]\n[]\n"), 0) << err_;
  EXPECT_EQ(out_, "\"<s>abc\"\n\"\"\n");
  options_.skip_special_tokens = true;
  EXPECT_EQ(Run("[0, 3, 4]\n"), 0) << err_;
  EXPECT_EQ(out_, "\"abc\"\n");
}

TEST_F(TokenizeCommandTest, RenderNeedsTheTemplateAlone) {
  Write("tokenizer_config.json", R"({"chat_template": "{{ messages[0].content }}\n"})");
  options_.chat = options_.render = true;
  EXPECT_EQ(Run("{\"messages\": [{\"role\": \"user\", \"content\": \"é\\n\"}]}\n"), 0) << err_;
  EXPECT_EQ(out_, "\"é\\n\"\n");
}

TEST_F(TokenizeCommandTest, ChatAddsNoSpecialTokensOfItsOwn) {
  Write("tokenizer.json", kTokenizerJson);
  Write("chat_template.jinja", "<s>{{ messages[0].content }}");
  options_.chat = true;
  EXPECT_EQ(Run(R"({"messages": [{"role": "user", "content": "ab"}]})"), 0) << err_;
  EXPECT_EQ(out_, "[0,3]\n");
}

TEST_F(TokenizeCommandTest, TemplateThatRaisesEndsWithItsMessage) {
  Write("chat_template.jinja", "{{ raise_exception('no turns') if not messages else 'ok' }}");
  options_.chat = options_.render = true;
  EXPECT_EQ(Run("{\"messages\": [1]}\n{\"messages\": []}\n{\"messages\": [1]}\n"), 1);
  EXPECT_EQ(out_, "\"ok\"\n");
  EXPECT_EQ(err_, "lockstep error: line 2 of the input: no turns\n");
}

TEST_F(TokenizeCommandTest, BadLineIsNamedAfterTheResultsBeforeIt) {
  Write("tokenizer.json", kTokenizerJson);
  for (const char* bad : {"{", "5", "[1]", "", "\"a\" \"b\""}) {
    EXPECT_EQ(Run(std::string("\"a\"\n") + bad + "\n\"b\"\n"), 1) << bad;
    EXPECT_EQ(out_, "[1]\n") << bad;
    EXPECT_NE(err_.find("line 2 of the input"), std::string::npos) << err_;
  }
  options_.decode = true;
  for (const char* bad : {"\"a\"", "[1.5]", "[99999999999]", "[-1]", "[5]", "[\"a\"]"}) {
    EXPECT_EQ(Run(std::string(bad) + "\n"), 1) << bad;
    EXPECT_NE(err_.find("line 1 of the input"), std::string::npos) << err_;
  }
}

TEST_F(TokenizeCommandTest, ModelThatCannotServeIsRefusedBeforeReading) {
  const auto refused = [this](const std::string& part) {
    EXPECT_EQ(Run("\"a\"\n"), 2);
    EXPECT_EQ(out_, "");
    EXPECT_NE(err_.find(part), std::string::npos) << err_;
  };
  refused("tokenizer.json");
  Write("tokenizer.json", "{}");
  refused("tokenizer.json");
  options_.chat = options_.render = true;
  refused("no chat template in");
  Write("chat_template.jinja", "{% if x %}");
  refused("line 1");
  options_.model += "/nowhere";
  refused("no such file or folder");
  options_.model = dir_.string() + "/chat_template.jinja";  // a file, and no GGUF
  refused("chat_template.jinja");
}

}  // namespace
}  // namespace lockstep

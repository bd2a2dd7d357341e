// Published tokenizers against the answers of the reference library, where a checkout of them lies
// at LOCKSTEP_SHARED.

#include <filesystem>

#include "model/tokenizer/gguf_vocab.h"
#include "tests/tokenizer/tokenizer_fixtures.h"

namespace lockstep {
namespace {

std::string SharedTokenizers() {
  const char* shared = std::getenv("LOCKSTEP_SHARED");
  const std::string root =
      shared != nullptr ? shared : std::string(LOCKSTEP_SOURCE_DIR) + "/../shared";
  return root + "/tokenizers";
}

Json ReadJson(const std::string& path) {
  const auto text = ReadFile(path);
  EXPECT_TRUE(text.ok()) << text.status();
  return *ParseJson(*text, path);
}

class ReferenceTest : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    folder_ = SharedTokenizers() + "/" + GetParam();
    if (!std::filesystem::exists(folder_))
      GTEST_SKIP() << "no " << folder_ << " (set LOCKSTEP_SHARED)";
  }
  std::string folder_;
};

TEST_P(ReferenceTest, IdsAndTextsAreEqual) {
  auto tokenizer = Tokenizer::Load(folder_ + "/tokenizer.json");
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  const Json expected = ReadJson(folder_ + "/expected.json");
  for (size_t i = 0; i < expected["strings"].size(); ++i) {
    const std::string text = expected["strings"][i];
    SCOPED_TRACE(text);
    const Ids ids = expected["ids"][i];
    EXPECT_EQ(Encode(**tokenizer, text, false), ids);
    EXPECT_EQ(Encode(**tokenizer, text, true), expected["ids_special"][i].get<Ids>());
    for (const bool skip : {false, true}) {
      const std::string want = expected[skip ? "decoded_skip" : "decoded"][i];
      EXPECT_EQ(Decode(**tokenizer, ids, skip), want);
      StreamDecoder stream(tokenizer->get(), skip);
      std::string streamed;
      for (const int32_t id : ids) streamed += stream.Push(id);
      EXPECT_EQ(streamed + stream.Finish(), want);
    }
  }
}

TEST_P(ReferenceTest, LongRunsEndInTime) {
  const auto tokenizer = Tokenizer::Load(folder_ + "/tokenizer.json");
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  for (const std::string& text :
       {std::string(1000000, 'a'), std::string(200000, ' '), std::string(200000, '\n')}) {
    const Ids ids = Encode(**tokenizer, text);
    EXPECT_EQ(Decode(**tokenizer, ids), text);
  }
}

INSTANTIATE_TEST_SUITE_P(Published, ReferenceTest,
                         testing::Values("gpt35turbo", "qwen3", "spm-bpe-32k"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

// The same vocabulary as a GGUF file has it: scores instead of merges, here from the place of the
// first merge that makes a token.
TEST(ReferenceGgufTest, ScoresGiveTheSameIdsAsTheMergesOfTheFile) {
  const std::string folder = SharedTokenizers() + "/spm-bpe-32k";
  if (!std::filesystem::exists(folder)) GTEST_SKIP() << "no " << folder << " (set LOCKSTEP_SHARED)";
  const Json document = ReadJson(folder + "/tokenizer.json");
  GgufVocab vocab;
  vocab.model = "llama";
  vocab.tokens.resize(document["model"]["vocab"].size());
  for (const auto& [token, id] : document["model"]["vocab"].items()) vocab.tokens[id] = token;
  for (size_t id = 0; id < vocab.tokens.size(); ++id) {
    vocab.token_types.push_back(id == 0 ? 2 : id < 3 ? 3 : id < 259 ? 6 : 1);
  }
  vocab.scores.assign(vocab.tokens.size(), 0);
  float place = -1;
  for (const Json& merge : document["model"]["merges"]) {
    std::string token = merge;
    token.erase(token.find(' '), 1);
    float& score = vocab.scores[document["model"]["vocab"][token].get<size_t>()];
    if (score == 0) score = place--;
  }
  vocab.bos_token_id = 1;
  vocab.unk_token_id = 0;
  const auto tokenizer = TokenizerFromGguf(vocab, "model.gguf");
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  const Json expected = ReadJson(folder + "/expected.json");
  for (size_t i = 0; i < expected["strings"].size(); ++i) {
    const std::string text = expected["strings"][i];
    EXPECT_EQ(Encode(**tokenizer, text, true), expected["ids_special"][i].get<Ids>()) << text;
  }
}

}  // namespace
}  // namespace lockstep

#include "model/tokenizer/gguf_vocab.h"

#include "tests/tokenizer/tokenizer_fixtures.h"

namespace lockstep {
namespace {

// tokens[id] of a fixture; ids nobody has get a name of their own.
GgufVocab FromFixture(const char* name, const char* model, const char* pre) {
  const Json document = Fixture(name);
  GgufVocab vocab;
  vocab.model = model;
  vocab.pre = pre;
  vocab.bos_token_id = 1;
  int32_t size = 0;
  for (const auto& [token, id] : document["model"]["vocab"].items())
    size = std::max(size, id.get<int32_t>() + 1);
  for (const Json& token : document["added_tokens"])
    size = std::max(size, token["id"].get<int32_t>() + 1);
  for (int32_t id = 0; id < size; ++id) vocab.tokens.push_back(absl::StrFormat("[UNUSED%d]", id));
  vocab.token_types.assign(size, 5);
  vocab.scores.assign(size, 0);
  for (const auto& [token, id] : document["model"]["vocab"].items()) {
    vocab.tokens[id] = token;
    vocab.token_types[id] = token.size() == 6 && token.rfind("<0x", 0) == 0 ? 6 : 1;
  }
  for (const Json& token : document["added_tokens"]) {
    vocab.tokens[token["id"]] = token["content"];
    vocab.token_types[token["id"]] = token["content"] == "<unk>" ? 2 : 3;
  }
  const Json& merges = document["model"]["merges"];
  float score = -1;
  for (const Json& merge : merges) {
    std::string text = merge.get<std::string>();
    vocab.merges.push_back(text);
    text.erase(text.find(' '), 1);
    const auto it = std::find(vocab.tokens.begin(), vocab.tokens.end(), text);
    vocab.scores[it - vocab.tokens.begin()] = score--;
  }
  return vocab;
}

std::unique_ptr<Tokenizer> MakeGguf(const GgufVocab& vocab) {
  auto tokenizer = TokenizerFromGguf(vocab, "model.gguf");
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  return tokenizer.ok() ? *std::move(tokenizer) : nullptr;
}

std::string GgufError(const GgufVocab& vocab) {
  const auto tokenizer = TokenizerFromGguf(vocab, "model.gguf");
  EXPECT_EQ(tokenizer.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(tokenizer.status().message().find("model.gguf"), 0u);
  return std::string(tokenizer.status().message());
}

TEST(GgufVocabTest, ThePreTokenizerIsChosenByName) {
  const auto ids = [](const char* pre, const char* text) {
    return Encode(*MakeGguf(FromFixture("byte_level.json", "gpt2", pre)), text);
  };
  EXPECT_EQ(ids("gpt-2", "Hello  World12345"), (Ids{15496, 220, 2159, 10163, 2231}));
  EXPECT_EQ(ids("qwen2", "12345"), (Ids{16, 17, 18, 19, 20}));
  EXPECT_EQ(ids("smollm", "Hello  World 12"), (Ids{15496, 220, 2159, 220, 16, 17}));
  EXPECT_EQ(ids("smollm", "<|endoftext|>"), (Ids{50256}));
  EXPECT_EQ(ids("llama-bpe", "12345"), (Ids{10163, 2231}));
  EXPECT_EQ(ids("falcon", "a12345"), (Ids{64, 10163, 2231}));
  const std::string error = GgufError(FromFixture("byte_level.json", "gpt2", "my-own"));
  EXPECT_NE(error.find("tokenizer.ggml.pre \"my-own\""), std::string::npos);
}

TEST(GgufVocabTest, Qwen2TextIsComposed) {
  const auto tokenizer = MakeGguf(FromFixture("byte_level.json", "gpt2", "qwen2"));
  EXPECT_EQ(Encode(*tokenizer, "e\u0301"), Encode(*tokenizer, "é"));
}

TEST(GgufVocabTest, BeginAndEndTokens) {
  GgufVocab vocab = FromFixture("byte_level.json", "gpt2", "gpt-2");
  vocab.bos_token_id = 50256;
  vocab.eos_token_id = 50256;
  EXPECT_EQ(Encode(*MakeGguf(vocab), "Hello", true), (Ids{15496}));
  vocab.add_bos_token = true;
  vocab.add_eos_token = true;
  EXPECT_EQ(Encode(*MakeGguf(vocab), "Hello", true), (Ids{50256, 15496, 50256}));
  vocab.bos_token_id.reset();
  EXPECT_NE(GgufError(vocab).find("bos_token_id is missing"), std::string::npos);
  vocab.bos_token_id = 99999999;
  EXPECT_NE(GgufError(vocab).find("99999999"), std::string::npos);
}

TEST(GgufVocabTest, ScoresEqualTheMergesTheyCameFrom) {
  GgufVocab vocab = FromFixture("byte_fallback.json", "llama", "default");
  vocab.bos_token_id = 1;
  vocab.unk_token_id = 0;
  const auto by_score = MakeGguf(vocab);
  const auto by_merges = Make(Fixture("byte_fallback.json"));
  for (const char* text :
       {"Hello  world", "the cats\n", "cated the", "<s>Hello</s>", "🦙 the", "", "   "}) {
    const Ids ids = Encode(*by_merges, text, true);
    EXPECT_EQ(Encode(*by_score, text, true), ids) << text;
    EXPECT_EQ(Decode(*by_score, ids, true), Decode(*by_merges, ids, true));
  }
  vocab.add_space_prefix = false;
  EXPECT_EQ(Encode(*MakeGguf(vocab), "Hello the"), (Ids{271, 262}));
  EXPECT_EQ(Decode(*MakeGguf(vocab), {262}), " the");
}

TEST(GgufVocabTest, EqualScoresMergeFromTheLeft) {
  GgufVocab vocab;
  vocab.model = "llama";
  vocab.tokens = {"<unk>", "<s>", "a", "b", "ab", "ba", "aba", "+"};
  vocab.scores = {0, 0, 0, 0, -1, -1, -2, 0};
  vocab.token_types = {2, 3, 1, 1, 1, 1, 1, 4};
  vocab.add_space_prefix = false;
  vocab.add_bos_token = false;
  vocab.unk_token_id = 0;
  const auto tokenizer = MakeGguf(vocab);
  EXPECT_EQ(Encode(*tokenizer, "bab"), (Ids{5, 3}));
  EXPECT_EQ(Encode(*tokenizer, "abab"), (Ids{4, 4}));
  EXPECT_EQ(Encode(*tokenizer, "aba"), (Ids{6}));
  EXPECT_EQ(Encode(*tokenizer, "a+c"), (Ids{2, 7, 0}));
  EXPECT_FALSE(tokenizer->IsSpecial(7));
  EXPECT_TRUE(tokenizer->IsSpecial(1));
}

TEST(GgufVocabTest, FaultsAreNamed) {
  GgufVocab vocab = FromFixture("byte_level.json", "gpt2", "gpt-2");
  vocab.merges[1] = "Hello zz";
  EXPECT_NE(GgufError(vocab).find("merges[1]"), std::string::npos);
  vocab.merges.clear();
  EXPECT_NE(GgufError(vocab).find("tokenizer.ggml.merges"), std::string::npos);
  vocab.model = "t5";
  EXPECT_NE(GgufError(vocab).find("\"t5\""), std::string::npos);
  vocab.scores.pop_back();
  EXPECT_NE(GgufError(vocab).find("tokenizer.ggml.scores"), std::string::npos);
  vocab = {};
  vocab.model = "llama";
  vocab.tokens = {"a", "a"};
  vocab.scores = {0, 0};
  EXPECT_NE(GgufError(vocab).find("\"a\" stands at the ids 0 and 1"), std::string::npos);
  vocab.tokens = {"a", "\xFF"};
  EXPECT_NE(GgufError(vocab).find("tokens[1]"), std::string::npos);
}

}  // namespace
}  // namespace lockstep

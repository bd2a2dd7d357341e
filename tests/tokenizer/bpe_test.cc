#include "model/tokenizer/bpe.h"

#include <map>
#include <random>

#include "model/tokenizer/byte_level.h"
#include "tests/tokenizer/tokenizer_fixtures.h"

namespace lockstep {
namespace {

// The definition: merge the leftmost pair of the lowest rank until there is none.
Ids NaiveMerge(Ids ids, const std::vector<Merge>& merges) {
  std::map<std::pair<int32_t, int32_t>, Merge> table;
  for (const Merge& merge : merges) table[{merge.left, merge.right}] = merge;
  while (true) {
    const Merge* best = nullptr;
    size_t at = 0;
    for (size_t i = 0; i + 1 < ids.size(); ++i) {
      const auto it = table.find({ids[i], ids[i + 1]});
      if (it == table.end() || (best != nullptr && it->second.rank >= best->rank)) continue;
      best = &it->second;
      at = i;
    }
    if (best == nullptr) return ids;
    ids[at] = best->result;
    ids.erase(ids.begin() + at + 1);
  }
}

struct RandomModel {
  Vocabulary vocabulary;
  std::vector<Merge> merges;
};

// Characters a to f and random merges; `shared_ranks`: several merges may share a rank, as scores
// of SentencePiece do.
RandomModel MakeRandomModel(std::mt19937* rng, bool shared_ranks) {
  std::vector<std::string> tokens = {"a", "b", "c", "d", "e", "f"};
  std::vector<std::pair<std::string, std::string>> pairs;
  for (int i = 0; i < 40; ++i) {
    const std::string left = tokens[(*rng)() % tokens.size()];
    const std::string right = tokens[(*rng)() % tokens.size()];
    if (std::find(pairs.begin(), pairs.end(), std::pair(left, right)) != pairs.end()) continue;
    pairs.emplace_back(left, right);
    if (std::find(tokens.begin(), tokens.end(), left + right) == tokens.end())
      tokens.push_back(left + right);
  }
  RandomModel model;
  model.vocabulary = *Vocabulary::FromList(tokens, "test");
  for (uint32_t i = 0; i < pairs.size(); ++i) {
    const auto& [left, right] = pairs[i];
    const int32_t result = model.vocabulary.Find(left + right);
    // A rank shared by equal results, as a score is the token's.
    const uint32_t rank = shared_ranks ? static_cast<uint32_t>(result % 7) : i;
    model.merges.push_back(
        {model.vocabulary.Find(left), model.vocabulary.Find(right), result, rank});
  }
  return model;
}

// Scanning (short), the heap (long), the cache (again) and the cuts at uncrossed borders all equal
// the definition.
TEST(BpeTest, EqualsTheDefinitionOnRandomModels) {
  std::mt19937 rng(7);
  for (int round = 0; round < 60; ++round) {
    const RandomModel random = MakeRandomModel(&rng, round % 2 == 1);
    for (const bool ignore_merges : {false, true}) {
      BpeOptions options;
      options.ignore_merges = ignore_merges;
      const auto model = BpeModel::Create(&random.vocabulary, random.merges, options, "test");
      ASSERT_TRUE(model.ok());
      BpeScratch scratch;
      for (int text_round = 0; text_round < 60; ++text_round) {
        const size_t length = 1 + rng() % (text_round % 3 == 0 ? 300 : 30);
        std::string text;
        Ids characters;
        for (size_t i = 0; i < length; ++i) {
          characters.push_back(static_cast<int32_t>(rng() % 6));
          text += static_cast<char>('a' + characters.back());
        }
        Ids want = NaiveMerge(characters, random.merges);
        if (ignore_merges && random.vocabulary.Find(text) >= 0)
          want = {random.vocabulary.Find(text)};
        for (int again = 0; again < 2; ++again) {
          Ids ids;
          model->Encode(text, &scratch, &ids);
          ASSERT_EQ(ids, want) << text;
        }
      }
    }
  }
}

TEST(BpeTest, FewestTokensOfAPieceFollowFromItsBytes) {
  BpeOptions bytes, falls_back;
  bytes.pieces_are_bytes = true;
  falls_back.byte_fallback = true;
  std::vector<std::string> tokens;
  for (int byte = 0; byte < 256; ++byte) tokens.push_back(ByteLevelCharacter(byte));
  // Two characters of two bytes each, which stand for two bytes of a piece.
  tokens.push_back(ByteLevelCharacter(0) + ByteLevelCharacter(1));
  tokens.push_back("abcd");
  const auto min_tokens = [](const std::vector<std::string>& of, const BpeOptions& options) {
    const Vocabulary vocabulary = *Vocabulary::FromList(of, "test");
    return BpeModel::Create(&vocabulary, {}, options, "test")->MinTokens(1000);
  };
  EXPECT_EQ(min_tokens(tokens, bytes), 250);
  EXPECT_EQ(min_tokens(tokens, BpeOptions()), 0);  // what has no token is left out
  tokens[7] = "none of a byte";
  EXPECT_EQ(min_tokens(tokens, bytes), 0);

  std::vector<std::string> fallback;
  for (int byte = 0; byte < 256; ++byte) fallback.push_back(absl::StrFormat("<0x%02X>", byte));
  EXPECT_EQ(min_tokens(fallback, falls_back), 1000 / 6);
  fallback.pop_back();
  EXPECT_EQ(min_tokens(fallback, falls_back), 0);
}

TEST(WordCacheTest, WordsOfEveryLengthAreKeptApart) {
  WordCache cache;
  const std::string letters = "abcdefghijklmnopqrstuvwxyz";
  for (size_t size = 1; size <= WordCache::kMaxWordBytes; ++size) {
    const std::string word = letters.substr(0, size);
    const int32_t id = static_cast<int32_t>(size);
    cache.Insert(WordCache::MakeKey(word), {&id, 1});
    const auto found = cache.Find(WordCache::MakeKey(word));
    ASSERT_EQ(found.size(), 1u);
    EXPECT_EQ(found[0], id);
    for (size_t i = 0; i < size; ++i) {  // every byte counts
      std::string other = word;
      other[i] = '!';
      EXPECT_TRUE(cache.Find(WordCache::MakeKey(other)).empty()) << other;
    }
  }
}

}  // namespace
}  // namespace lockstep

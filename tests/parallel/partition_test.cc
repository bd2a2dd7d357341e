#include "parallel/partition.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <tuple>

#include "gtest/gtest.h"
#include "runtime/core/file.h"
#include "runtime/core/json.h"

namespace lockstep {
namespace {

std::vector<RankPartition> Partition(int64_t hq, int64_t hkv, int n, int64_t f = 4096,
                                     int64_t v = 32000) {
  const auto parts = PartitionModel({hq, hkv, f, v}, n);
  EXPECT_TRUE(parts.ok()) << parts.status();
  return parts.ok() ? *parts : std::vector<RankPartition>();
}

std::vector<int64_t> Sizes(const std::vector<RankPartition>& parts, Range RankPartition::*field) {
  std::vector<int64_t> sizes;
  for (const RankPartition& part : parts) sizes.push_back((part.*field).size());
  return sizes;
}

std::vector<int64_t> HeadCounts(int64_t hq, int64_t hkv, int n) {
  return Sizes(Partition(hq, hkv, n), &RankPartition::query_heads);
}

using Counts = std::vector<int64_t>;

TEST(PartitionTest, WorkedExamples) {
  EXPECT_EQ(HeadCounts(9, 3, 2), (Counts{5, 4}));
  EXPECT_EQ(HeadCounts(9, 3, 3), (Counts{3, 3, 3}));
  EXPECT_EQ(HeadCounts(9, 3, 4), (Counts{3, 3, 2, 1}));  // each rank reads one KV head
  EXPECT_EQ(HeadCounts(28, 4, 8), (Counts{4, 3, 4, 3, 4, 3, 4, 3}));
  for (const RankPartition& part : Partition(28, 4, 8)) EXPECT_EQ(part.kv_heads.size(), 1);
}

TEST(PartitionTest, SharedBorderHead) {
  const auto parts = Partition(6, 3, 2);
  EXPECT_EQ(parts[0].query_heads, (Range{0, 3}));
  EXPECT_EQ(parts[0].kv_heads, (Range{0, 2}));
  EXPECT_EQ(parts[0].kv_groups, (std::vector<Range>{{0, 2}, {2, 3}}));
  EXPECT_EQ(parts[1].query_heads, (Range{3, 6}));
  EXPECT_EQ(parts[1].kv_heads, (Range{1, 3}));
  EXPECT_EQ(parts[1].kv_groups, (std::vector<Range>{{0, 1}, {1, 3}}));
}

TEST(PartitionTest, ReplicatesKvHeadsWhenRanksOutnumberThem) {
  for (const int n : {2, 4, 8}) {
    const auto parts = Partition(8, 2, n);
    for (int r = 0; r < n; ++r) {
      EXPECT_EQ(parts[r].query_heads, (Range{r * 8 / n, (r + 1) * 8 / n}));
      EXPECT_EQ(parts[r].kv_heads, (Range{r * 2 / n, r * 2 / n + 1}));
    }
  }
}

// Every rule of RankPartition that holds for any model.
void CheckCover(const PartitionDims& dims, const std::vector<RankPartition>& parts) {
  const int64_t group = dims.num_query_heads / dims.num_kv_heads;
  int64_t head = 0, row = 0, token = 0;
  for (const RankPartition& part : parts) {
    ASSERT_EQ(part.query_heads.begin, head);
    ASSERT_EQ(part.intermediate.begin, row);
    ASSERT_EQ(part.vocab.begin, token);
    ASSERT_GT(part.query_heads.size(), 0);
    ASSERT_GT(part.intermediate.size(), 0);
    ASSERT_GT(part.vocab.size(), 0);
    head = part.query_heads.end;
    row = part.intermediate.end;
    token = part.vocab.end;
    ASSERT_EQ(part.kv_heads.begin, part.query_heads.begin / group);
    ASSERT_EQ(part.kv_heads.end, (part.query_heads.end - 1) / group + 1);
    ASSERT_EQ(static_cast<int64_t>(part.kv_groups.size()), part.kv_heads.size());
    int64_t local = 0;
    for (int64_t g = 0; g < part.kv_heads.size(); ++g) {
      ASSERT_EQ(part.kv_groups[g].begin, local);
      ASSERT_GT(part.kv_groups[g].size(), 0);
      for (; local < part.kv_groups[g].end; ++local) {
        ASSERT_EQ((part.query_heads.begin + local) / group, part.kv_heads.begin + g);
      }
    }
    ASSERT_EQ(local, part.query_heads.size());
  }
  ASSERT_EQ(head, dims.num_query_heads);
  ASSERT_EQ(row, dims.intermediate_size);
  ASSERT_EQ(token, dims.vocab_size);
}

// The best split by trying them all: smallest (longest range, most KV heads on a rank), then the
// lexicographically largest sequence of lengths.
class BruteForce {
 public:
  BruteForce(int64_t hq, int64_t hkv, int n) : hq_(hq), group_(hq / hkv), n_(n) { Extend(0); }
  const Counts& best() const { return best_; }

 private:
  void Extend(int64_t begin) {
    if (static_cast<int>(sizes_.size()) == n_) {
      if (begin == hq_) Judge();
      return;
    }
    for (int64_t size = 1; begin + size <= hq_; ++size) {
      sizes_.push_back(size);
      Extend(begin + size);
      sizes_.pop_back();
    }
  }
  void Judge() {
    int64_t begin = 0, longest = 0, most_kv = 0;
    for (const int64_t size : sizes_) {
      longest = std::max(longest, size);
      most_kv = std::max(most_kv, (begin + size - 1) / group_ - begin / group_ + 1);
      begin += size;
    }
    const std::pair<int64_t, int64_t> cost = {longest, most_kv};
    if (best_.empty() || cost < cost_ || (cost == cost_ && sizes_ > best_)) {
      cost_ = cost;
      best_ = sizes_;
    }
  }
  const int64_t hq_, group_;
  const int n_;
  Counts sizes_, best_;
  std::pair<int64_t, int64_t> cost_;
};

TEST(PartitionTest, HeadsEqualBruteForce) {
  int shapes = 0;
  for (int64_t hq = 1; hq <= 15; ++hq) {
    for (int64_t hkv = 1; hkv <= hq; ++hkv) {
      if (hq % hkv != 0) continue;
      for (int n = 1; n <= hq; ++n, ++shapes) {
        ASSERT_EQ(HeadCounts(hq, hkv, n), BruteForce(hq, hkv, n).best())
            << hq << " / " << hkv << " on " << n;
      }
    }
  }
  EXPECT_GT(shapes, 300);
}

TEST(PartitionTest, CoversLargeShapesOnce) {
  for (const int64_t hq : {32, 40, 48, 56, 64, 71, 96, 112, 128}) {
    for (int64_t hkv = 1; hkv <= hq; ++hkv) {
      if (hq % hkv != 0) continue;
      for (int n = 1; n <= hq; ++n) {
        const PartitionDims dims = {hq, hkv, 11008 + hq, 50257};
        const auto parts = PartitionModel(dims, n);
        ASSERT_TRUE(parts.ok()) << parts.status();
        ASSERT_NO_FATAL_FAILURE(CheckCover(dims, *parts)) << hq << " / " << hkv << " on " << n;
        const Counts sizes = Sizes(*parts, &RankPartition::query_heads);
        ASSERT_EQ(*std::max_element(sizes.begin(), sizes.end()), (hq + n - 1) / n);
      }
    }
  }
}

TEST(PartitionTest, RowsAreEqualWhereRanksDivideThem) {
  EXPECT_EQ(Sizes(Partition(8, 2, 8, 4864), &RankPartition::intermediate), Counts(8, 608));
  EXPECT_EQ(Sizes(Partition(8, 2, 4, 36, 40), &RankPartition::intermediate), Counts(4, 9));
  EXPECT_EQ(Sizes(Partition(8, 2, 4, 36, 40), &RankPartition::vocab), Counts(4, 10));
}

TEST(PartitionTest, UnevenRowsSplitOnTheLargestMultiple) {
  // 1536 = 24 * 64 on 7 ranks: 4, 4, 4, 3, 3, 3, 3 units.
  EXPECT_EQ(Sizes(Partition(9, 3, 7, 1536), &RankPartition::intermediate),
            (Counts{256, 256, 256, 192, 192, 192, 192}));
  // 50257 = 785 * 64 + 17: the last rank's last unit is cut off.
  EXPECT_EQ(Sizes(Partition(4, 4, 2, 64, 50257), &RankPartition::vocab), (Counts{25152, 25105}));
  // Units of 64 or 32 would leave a rank of 5 empty; 16 does not.
  EXPECT_EQ(Sizes(Partition(8, 8, 5, 72, 72), &RankPartition::intermediate),
            (Counts{16, 16, 16, 16, 8}));
  EXPECT_EQ(Sizes(Partition(8, 8, 7, 8, 9), &RankPartition::intermediate),
            (Counts{2, 1, 1, 1, 1, 1, 1}));
}

TEST(PartitionTest, SmallRowCountsLeaveNoRankEmpty) {
  for (int64_t rows = 1; rows <= 300; ++rows) {
    for (int n = 1; n <= std::min<int64_t>(rows, 40); ++n) {
      const PartitionDims dims = {40, 40, rows, rows};
      const auto parts = PartitionModel(dims, n);
      ASSERT_TRUE(parts.ok()) << parts.status();
      ASSERT_NO_FATAL_FAILURE(CheckCover(dims, *parts)) << rows << " rows on " << n;
      const Counts sizes = Sizes(*parts, &RankPartition::intermediate);
      ASSERT_TRUE(std::is_sorted(sizes.rbegin(), sizes.rend()));
    }
  }
}

void ExpectRefused(const PartitionDims& dims, int n, const std::vector<std::string>& words) {
  const auto parts = PartitionModel(dims, n);
  ASSERT_EQ(parts.status().code(), absl::StatusCode::kInvalidArgument);
  for (const std::string& word : words) {
    EXPECT_NE(std::string(parts.status().message()).find(word), std::string::npos)
        << parts.status() << " lacks " << word;
  }
}

TEST(PartitionTest, RefusalsNameBothNumbers) {
  ExpectRefused({9, 3, 1536, 49152}, 10, {"10 ranks", "9 query heads", "at most 9"});
  ExpectRefused({64, 8, 16, 49152}, 32, {"32 ranks", "16 rows", "intermediate_size"});
  ExpectRefused({64, 8, 4096, 20}, 32, {"32 ranks", "20 rows", "vocab_size"});
  ExpectRefused({9, 3, 1536, 49152}, 0, {"at least 1", "0"});
  ExpectRefused({9, 3, 1536, 49152}, -2, {"-2"});
  ExpectRefused({9, 2, 1536, 49152}, 1, {"9 query heads", "2 KV heads"});
  ExpectRefused({9, 0, 1536, 49152}, 1, {"9 query heads", "0 KV heads"});
}

TEST(PartitionTest, PublishedShapes) {
  const char* env = std::getenv("LOCKSTEP_SHARED");
  const std::filesystem::path shared = env != nullptr ? env : LOCKSTEP_SOURCE_DIR "/../shared";
  if (!std::filesystem::is_directory(shared / "configs")) {
    GTEST_SKIP() << "no published configs at " << shared / "configs";
  }
  int models = 0;
  for (const auto& entry : std::filesystem::directory_iterator(shared / "configs")) {
    const std::filesystem::path path = entry.path() / "config.json";
    if (!std::filesystem::exists(path)) continue;
    const auto text = ReadFile(path.string());
    ASSERT_TRUE(text.ok()) << text.status();
    const auto json = ParseJson(*text, path.string());
    ASSERT_TRUE(json.ok()) << json.status();
    const PartitionDims dims = {json->at("num_attention_heads"), json->at("num_key_value_heads"),
                                json->at("intermediate_size"), json->at("vocab_size")};
    for (int n = 1; n <= dims.num_query_heads; ++n) {
      const auto parts = PartitionModel(dims, n);
      ASSERT_TRUE(parts.ok()) << parts.status();
      ASSERT_NO_FATAL_FAILURE(CheckCover(dims, *parts)) << path << " on " << n;
    }
    ++models;
  }
  EXPECT_GE(models, 1);
}

TEST(PartitionTest, AnEmulatedRankHoldsWhatItHoldsAmongOthers) {
  const PartitionDims dims = {28, 4, 4096, 32000};
  for (int rank = 0; rank < 8; ++rank) {
    const auto alone = PartitionJob(dims, 1, {8, rank});
    ASSERT_TRUE(alone.ok()) << alone.status();
    ASSERT_EQ(alone->size(), 1);
    EXPECT_EQ((*alone)[0], Partition(28, 4, 8)[static_cast<size_t>(rank)]);
  }
  EXPECT_EQ(*PartitionJob(dims, 2, {}), Partition(28, 4, 2));
  const auto refusal = [&](int num_ranks, EmulatedRank emulated) {
    return std::string(PartitionJob(dims, num_ranks, emulated).status().message());
  };
  EXPECT_NE(refusal(2, {8, 0}).find("2 were started"), std::string::npos) << refusal(2, {8, 0});
  EXPECT_NE(refusal(1, {8, 8}).find("--rank 8"), std::string::npos) << refusal(1, {8, 8});
  EXPECT_NE(refusal(1, {29, 0}).find("29"), std::string::npos) << refusal(1, {29, 0});
}

}  // namespace
}  // namespace lockstep

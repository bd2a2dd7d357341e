// What every backend must do, run on each of them (and on the CPU backend once for each instruction
// set of this machine).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "attention/cpu_backend.h"
#include "attention/reference_backend.h"
#include "runtime/core/file.h"
#include "runtime/core/json.h"
#include "tests/attention/attention_scenario.h"

namespace lockstep {
namespace {

// "reference", or "cpu_" and the name of the instruction set.
std::vector<std::string> BackendNames() {
  std::vector<std::string> names = {"reference"};
  const CpuKernelList usable = UsableCpuKernels();
  for (int64_t i = 0; i < usable.size; ++i) {
    names.push_back(std::string("cpu_") + usable.begin[i]->name);
  }
  return names;
}

std::unique_ptr<AttentionBackend> MakeBackend(const std::string& name, ThreadPool& pool) {
  const CpuKernelList usable = UsableCpuKernels();
  for (int64_t i = 0; i < usable.size; ++i) {
    if (name == std::string("cpu_") + usable.begin[i]->name) {
      return CpuBackend::Create(pool, usable.begin[i]);
    }
  }
  return std::make_unique<ReferenceBackend>();
}

class PagedAttentionTest : public testing::TestWithParam<std::string> {
 protected:
  ThreadPool pool_{1};
  ThreadPool three_threads_{3};
  std::unique_ptr<AttentionBackend> backend_ = MakeBackend(GetParam(), pool_);
};

std::vector<float> Floats(const Json& json) {
  if (!json.is_array()) return {json.get<float>()};
  std::vector<float> all;
  for (const Json& item : json) {
    const std::vector<float> floats = Floats(item);
    all.insert(all.end(), floats.begin(), floats.end());
  }
  return all;
}

TEST_P(PagedAttentionTest, WorkedExample) {
  const std::string path = LOCKSTEP_SOURCE_DIR "/tests/data/attention/worked_example.json";
  const auto text = ReadFile(path);
  ASSERT_TRUE(text.ok()) << text.status();
  const auto json = ParseJson(*text, path);
  ASSERT_TRUE(json.ok()) << json.status();
  const Json& example = *json;
  auto pool = KvPool::Create(
      {.num_layers = 1, .num_kv_heads = 1, .head_dim = 4, .block_size = 4, .dtype = DType::kF32},
      4);
  ASSERT_TRUE(pool.ok());
  for (int64_t block = 0; block < 4; ++block) LOCKSTEP_CHECK(pool->Poison(block).ok());

  std::vector<float> keys = Floats(example["keys"]);
  std::vector<float> values = Floats(example["values"]);
  std::vector<float> query = Floats(example["query"]);
  std::vector<float> out(4, NAN);
  const std::vector<int64_t> slots = {12, 13, 14, 15, 4, 5};
  const MatrixView key_view = {.data = keys.data(), .rows = 6, .cols = 4, .stride = 4};
  const MatrixView value_view = {.data = values.data(), .rows = 6, .cols = 4, .stride = 4};
  backend_->WriteKv(key_view, value_view, slots, pool->Layer(0));

  const std::vector<int32_t> query_start_loc = {0, 1};
  const std::vector<int32_t> seq_lens = {6};
  const std::vector<int32_t> table = example["block_table"].get<std::vector<int32_t>>();
  const std::vector<int64_t> step_slots = {5};
  const auto metadata = backend_->BuildMetadata({.query_start_loc = query_start_loc,
                                                 .seq_lens = seq_lens,
                                                 .block_tables = table,
                                                 .max_blocks = 2,
                                                 .slot_mapping = step_slots},
                                                4);
  ASSERT_TRUE(metadata.ok()) << metadata.status();
  const AttentionGeometry geometry = {.num_query_heads = 1,
                                      .num_kv_heads = 1,
                                      .head_dim = 4,
                                      .kv_groups = {{0, 1}},
                                      .scale = example["scale"].get<float>()};
  backend_->Forward(geometry, **metadata, {.data = query.data(), .rows = 1, .cols = 4, .stride = 4},
                    pool->Layer(0), {.data = out.data(), .rows = 1, .cols = 4, .stride = 4});
  const std::vector<float> expected = Floats(example["output"]);
  for (int d = 0; d < 4; ++d) EXPECT_NEAR(out[d], expected[d], 1e-6) << d;
}

ScenarioShape RandomShape(uint32_t seed) {
  std::mt19937 rng(seed);
  const auto pick = [&rng](std::initializer_list<int64_t> values) {
    return *(values.begin() + rng() % values.size());
  };
  ScenarioShape shape;
  shape.seed = seed;
  shape.head_dim = pick({8, 16, 64, 80, 96, 128, 256, 20, 7});
  shape.block_size = pick({1, 4, 16, 32});
  shape.sliding_window = pick({0, 0, 1, 5, 64, 100, 300});
  shape.logit_softcap = static_cast<float>(pick({0, 0, 2, 30}));
  shape.kv_dtype = static_cast<DType>(pick({0, 1, 2}));
  shape.padding_rows = pick({0, 1, 3});
  shape.group_sizes.clear();
  for (int64_t i = pick({1, 2, 3}); i > 0; --i) shape.group_sizes.push_back(pick({1, 2, 3, 5, 7}));
  for (int64_t i = pick({1, 2, 4}); i > 0; --i) {
    const int64_t seq_len = 1 + static_cast<int64_t>(rng() % pick({4, 40, 300, 700}));
    const int64_t query_len = std::min(seq_len, pick({1, 1, 2, 17, seq_len > 100 ? 50 : seq_len}));
    shape.requests.push_back({.query_len = query_len, .seq_len = seq_len});
  }
  return shape;
}

TEST_P(PagedAttentionTest, EqualsDenseAttention) {
  for (uint32_t seed = 1; seed <= 60; ++seed) {
    const ScenarioShape shape = RandomShape(seed);
    Scenario scenario(shape);
    const std::vector<double> expected = scenario.Expected();
    EXPECT_LT(LargestDifference(scenario.RunStep(*backend_), expected), 5e-6) << Describe(shape);
  }
}

TEST_P(PagedAttentionTest, WholePrefillEqualsDenseAttention) {
  for (const int64_t window : {0, 70}) {
    const ScenarioShape shape = {.requests = {{.query_len = 330, .seq_len = 330}},
                                 .group_sizes = {3, 2},
                                 .head_dim = 16,
                                 .sliding_window = window};
    Scenario scenario(shape);
    EXPECT_LT(LargestDifference(scenario.RunStep(*backend_), scenario.Expected()), 5e-6)
        << Describe(shape);
  }
}

TEST_P(PagedAttentionTest, LargestHeadDim) {
  const ScenarioShape shape = {
      .requests = {{.query_len = 3, .seq_len = 20}}, .group_sizes = {2}, .head_dim = 512};
  Scenario scenario(shape);
  EXPECT_LT(LargestDifference(scenario.RunStep(*backend_), scenario.Expected()), 5e-6);
}

TEST_P(PagedAttentionTest, LargeLogitsDoNotOverflow) {
  Scenario scenario({.requests = {{.query_len = 2, .seq_len = 300}}, .head_dim = 16});
  for (float& q : scenario.data()[0].queries) q *= 1000;
  for (float& k : scenario.data()[0].keys) k *= 1000;
  for (float x : scenario.RunStep(*backend_)) EXPECT_TRUE(std::isfinite(x));
}

// A row may not depend on what it does not see, even on a value another row of the step does see.
TEST_P(PagedAttentionTest, InvisibleInfinityDoesNotLeak) {
  const ScenarioShape shape = {.requests = {{.query_len = 40, .seq_len = 40}},
                               .group_sizes = {2},
                               .head_dim = 16,
                               .sliding_window = 9};
  Scenario scenario(shape);
  const std::vector<float> clean = scenario.RunStep(*backend_);
  scenario.data()[0].values[20 * 16] = INFINITY;
  scenario.data()[0].keys[20 * 16 + 3] = NAN;
  const std::vector<float> spoilt = scenario.RunStep(*backend_);
  const int64_t width = scenario.query_width();
  for (int64_t row = 0; row < 40; ++row) {
    const bool sees = row >= 20 && row < 29;
    const bool same =
        std::memcmp(&clean[row * width], &spoilt[row * width], width * sizeof(float)) == 0;
    EXPECT_EQ(same, !sees) << row;
    EXPECT_EQ(std::isnan(spoilt[row * width]), sees) << row;
  }
}

TEST_P(PagedAttentionTest, ChunkedEqualsWholeBitForBit) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t window : {0, 90}) {
      for (const int64_t chunk : {1, 3, 16, 100, 257}) {
        const ScenarioShape shape = {.requests = {{.query_len = 600, .seq_len = 600}},
                                     .group_sizes = {3, 2},
                                     .head_dim = 24,
                                     .sliding_window = window,
                                     .kv_dtype = dtype};
        Scenario scenario(shape);
        const std::vector<float> whole = scenario.RunStep(*backend_);
        scenario.PoisonAll();
        std::vector<float> chunked;
        for (int64_t done = 0; done < 600; done += chunk) {
          const int64_t end = std::min<int64_t>(600, done + chunk);
          const std::vector<float> part = scenario.RunChunk(*backend_, 0, end - done, end);
          chunked.insert(chunked.end(), part.begin(), part.end());
        }
        EXPECT_TRUE(SameBits(whole, chunked)) << Describe(shape) << " chunk=" << chunk;
      }
    }
  }
}

TEST_P(PagedAttentionTest, BatchEqualsAloneBitForBit) {
  const auto three = MakeBackend(GetParam(), three_threads_);
  for (uint32_t seed = 100; seed < 130; ++seed) {
    const ScenarioShape shape = RandomShape(seed);
    Scenario scenario(shape);
    const std::vector<float> batch = scenario.RunStep(*backend_);
    std::vector<float> alone;
    for (size_t i = 0; i < shape.requests.size(); ++i) {
      const std::vector<float> part =
          scenario.RunChunk(i % 2 == 0 ? *backend_ : *three, static_cast<int64_t>(i),
                            shape.requests[i].query_len, shape.requests[i].seq_len);
      alone.insert(alone.end(), part.begin(), part.end());
    }
    alone.resize(batch.size(), 0.0f);
    EXPECT_TRUE(SameBits(batch, alone)) << Describe(shape);
  }
}

TEST_P(PagedAttentionTest, ThreadsDoNotChangeBits) {
  const auto three = MakeBackend(GetParam(), three_threads_);
  for (uint32_t seed = 200; seed < 220; ++seed) {
    const ScenarioShape shape = RandomShape(seed);
    Scenario scenario(shape);
    const std::vector<float> expected = scenario.RunStep(*backend_);
    EXPECT_TRUE(SameBits(expected, scenario.RunStep(*three))) << Describe(shape);
  }
}

// One row and one KV head: three threads can only share its keys.
TEST_P(PagedAttentionTest, SharedKeysDoNotChangeBits) {
  const auto three = MakeBackend(GetParam(), three_threads_);
  for (const int64_t seq_len : {257, 700, 1500, 4000}) {
    Scenario scenario(
        {.requests = {{.query_len = 1, .seq_len = seq_len}}, .group_sizes = {5}, .head_dim = 32});
    const std::vector<float> expected = scenario.RunStep(*backend_);
    EXPECT_TRUE(SameBits(expected, scenario.RunStep(*three))) << seq_len;
    EXPECT_LT(LargestDifference(expected, scenario.Expected()), 5e-6) << seq_len;
  }
}

TEST_P(PagedAttentionTest, PaddingRowsAreZeroAndARequestMayHaveNoRows) {
  const ScenarioShape shape = {
      .requests = {{.query_len = 2, .seq_len = 5}, {.query_len = 0, .seq_len = 7}},
      .group_sizes = {2},
      .padding_rows = 4};
  Scenario scenario(shape);
  const std::vector<float> out = scenario.RunStep(*backend_);
  EXPECT_LT(LargestDifference(out, scenario.Expected()), 5e-6);
  for (size_t i = 2 * 16; i < out.size(); ++i) EXPECT_EQ(out[i], 0.0f);
}

TEST_P(PagedAttentionTest, AnEmptyBatchIsAllPadding) {
  Scenario scenario({.requests = {}, .padding_rows = 3});
  EXPECT_EQ(scenario.RunStep(*backend_), std::vector<float>(3 * 8, 0.0f));
}

TEST_P(PagedAttentionTest, StridedViews) {
  Scenario scenario({.requests = {{.query_len = 3, .seq_len = 3}}, .head_dim = 8});
  const std::vector<float> expected = scenario.RunStep(*backend_);
  const std::vector<int32_t> query_start_loc = {0, 3};
  const std::vector<int32_t> seq_lens = {3};
  const std::vector<int64_t> slots = {16, 17, 18};
  const std::vector<int32_t> table = {1};
  // A fused [query | key | value] row of 24, and an output row of 11.
  std::vector<float> fused(3 * 24);
  const RequestData& data = scenario.data()[0];
  for (int64_t t = 0; t < 3; ++t) {
    std::copy_n(&data.queries[t * 8], 8, &fused[t * 24]);
    std::copy_n(&data.keys[t * 8], 8, &fused[t * 24 + 8]);
    std::copy_n(&data.values[t * 8], 8, &fused[t * 24 + 16]);
  }
  std::vector<float> out(3 * 11, NAN);
  const auto view = [](float* data, int64_t stride) {
    return MatrixView{.data = data, .rows = 3, .cols = 8, .stride = stride};
  };
  backend_->WriteKv(view(&fused[8], 24), view(&fused[16], 24), slots, scenario.cache());
  const auto metadata = backend_->BuildMetadata({.query_start_loc = query_start_loc,
                                                 .seq_lens = seq_lens,
                                                 .block_tables = table,
                                                 .max_blocks = 1,
                                                 .slot_mapping = slots},
                                                16);
  ASSERT_TRUE(metadata.ok());
  backend_->Forward(scenario.geometry(), **metadata, view(&fused[0], 24), scenario.cache(),
                    view(out.data(), 11));
  for (int64_t t = 0; t < 3; ++t) {
    for (int64_t i = 0; i < 11; ++i) {
      if (i < 8) {
        EXPECT_EQ(out[t * 11 + i], expected[t * 8 + i]);
      } else {
        EXPECT_TRUE(std::isnan(out[t * 11 + i]));
      }
    }
  }
}

TEST_P(PagedAttentionTest, WriteKvTouchesItsSlotsOnlyAndRoundsToNearestEven) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    constexpr int64_t kHeads = 2, kDim = 5, kBlockSize = 4, kBlocks = 3;
    auto pool = KvPool::Create({.num_layers = 1,
                                .num_kv_heads = kHeads,
                                .head_dim = kDim,
                                .block_size = kBlockSize,
                                .dtype = dtype},
                               kBlocks);
    ASSERT_TRUE(pool.ok());
    const KvCacheView cache = pool->Layer(0);
    const int64_t bytes = pool->shape().BytesPerBlock() * kBlocks;
    std::memset(cache.keys, 0x5a, bytes);
    std::vector<char> expected(bytes, 0x5a);
    std::vector<float> keys(4 * kHeads * kDim), values(4 * kHeads * kDim);
    for (size_t i = 0; i < keys.size(); ++i) {
      // Ties of bfloat16 (bit 15 set alone) and of binary16 (bit 12), both ways, and others.
      const float one_step = 1.0f + static_cast<float>(i % 7) * 0x1p-8f;
      keys[i] = i % 2 == 0 ? one_step : -1.0f - static_cast<float>(i) * 0x1p-11f;
      values[i] = static_cast<float>(i) * 0.3f;
    }
    const std::vector<int64_t> slots = {9, kNoSlot, 2, kNoSlot};
    const auto view = [&](std::vector<float>& data) {
      return MatrixView{
          .data = data.data(), .rows = 4, .cols = kHeads * kDim, .stride = kHeads * kDim};
    };
    backend_->WriteKv(view(keys), view(values), slots, cache);
    for (int64_t t = 0; t < 4; ++t) {
      if (slots[t] == kNoSlot) continue;
      for (int64_t head = 0; head < kHeads; ++head) {
        const int64_t offset =
            SizeOf(dtype) * cache.Offset(slots[t] / kBlockSize, head, slots[t] % kBlockSize);
        for (int half = 0; half < 2; ++half) {
          const std::vector<float>& from = half == 0 ? keys : values;
          for (int64_t d = 0; d < kDim; ++d) {
            const float x = from[(t * kHeads + head) * kDim + d];
            char* to = &expected[half * bytes / 2 + offset + d * SizeOf(dtype)];
            const BF16 bf16 = ToBF16(x);
            const F16 f16 = ToF16(x);
            if (dtype == DType::kF32) std::memcpy(to, &x, 4);
            if (dtype == DType::kBF16) std::memcpy(to, &bf16, 2);
            if (dtype == DType::kF16) std::memcpy(to, &f16, 2);
          }
        }
      }
    }
    EXPECT_EQ(std::memcmp(cache.keys, expected.data(), bytes), 0) << Name(dtype);
  }
}

// Of the host's backends, the reference alone reads an fp8 cache.
TEST(ReferenceBackendTest, Fp8CacheEqualsDenseAttentionOverWhatItHolds) {
  for (const auto& [k_scale, v_scale] : {std::pair{1.0f, 1.0f}, {0.01f, 3.0f}, {0.003f, 0.002f}}) {
    Scenario scenario({.requests = {{.query_len = 3, .seq_len = 40}, {.seq_len = 9}},
                       .group_sizes = {2, 3},
                       .kv_dtype = DType::kF8E4M3,
                       .k_scale = k_scale,
                       .v_scale = v_scale,
                       .padding_rows = 1});
    EXPECT_LT(LargestDifference(scenario.RunStep(ReferenceBackend()), scenario.Expected()), 1e-6);
  }
}

TEST(ReferenceBackendTest, Fp8WritesAreDividedRoundedAndSaturated) {
  auto pool = KvPool::Create(
      {.num_layers = 1, .num_kv_heads = 1, .head_dim = 3, .block_size = 2, .dtype = DType::kF8E4M3},
      1);
  ASSERT_TRUE(pool.ok());
  pool->SetScales(0, 0.5f, 4);
  const KvCacheView cache = pool->Layer(0);
  float keys[] = {1, -300, NAN};
  float values[] = {1792, 1e9f, 4};
  const auto view = [](float* data) {
    return MatrixView{.data = data, .rows = 1, .cols = 3, .stride = 3};
  };
  ReferenceBackend().WriteKv(view(keys), view(values), std::vector<int64_t>{1}, cache);
  const auto stored = [](const void* data, int64_t i) {
    return ToFloat(static_cast<const F8E4M3*>(data)[3 + i]);
  };
  EXPECT_EQ(stored(cache.keys, 0), 2);
  EXPECT_EQ(stored(cache.keys, 1), -448);
  EXPECT_TRUE(std::isnan(stored(cache.keys, 2)));
  EXPECT_EQ(stored(cache.values, 0), 448);
  EXPECT_EQ(stored(cache.values, 1), 448);
  EXPECT_EQ(stored(cache.values, 2), 1);
}

INSTANTIATE_TEST_SUITE_P(Backends, PagedAttentionTest, testing::ValuesIn(BackendNames()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace lockstep

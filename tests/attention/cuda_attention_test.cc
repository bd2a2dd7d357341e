// The CUDA backend against dense attention in double, by dtype. Skipped where there is no device.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "attention/kv_convert.h"
#include "attention/selector.h"
#include "tests/attention/cuda_attention_kinds.h"

namespace lockstep {
namespace {

TEST_P(CudaAttentionTest, EqualsDenseAttention) {
  for (uint32_t seed = 1; seed <= 80; ++seed) ExpectDense(RandomShape(seed));
}

// Every head_dim of its own kernel, with the shapes that matter most.
TEST_P(CudaAttentionTest, HeadDims) {
  uint32_t seed = 300;
  for (const int64_t head_dim : {64, 80, 96, 128, 256}) {
    for (const int64_t block_size : {16, 32}) {
      ExpectDense({.requests = {{.query_len = 1, .seq_len = 600},
                                {.query_len = 200, .seq_len = 333},
                                {.query_len = 1, .seq_len = 1},
                                {.query_len = 70, .seq_len = 70}},
                   .group_sizes = {7, 7},
                   .head_dim = head_dim,
                   .block_size = block_size,
                   .padding_rows = 2,
                   .seed = ++seed});
    }
  }
}

// Blocks that tiles of keys are multiples of, that are multiples of tiles, or neither; rows of
// whole and of broken 128 bytes.
TEST_P(CudaAttentionTest, BlockSizes) {
  uint32_t seed = 400;
  for (const int64_t head_dim : {64, 72, 96, 128, 192, 200, 256}) {
    for (const int64_t block_size : {4, 8, 40, 48, 64, 256}) {
      ExpectDense({.requests = {{.query_len = 90, .seq_len = 333},
                                {.query_len = 1, .seq_len = 100},
                                {.query_len = 40, .seq_len = 40}},
                   .group_sizes = {3},
                   .head_dim = head_dim,
                   .block_size = block_size,
                   .sliding_window = seed % 2 == 0 ? 0 : 100,
                   .seed = seed});
      ++seed;
    }
  }
}

// Around the borders of decode's parts, and beyond what max_splits parts of the least size hold.
TEST_P(CudaAttentionTest, LongDecode) {
  for (const int64_t window : {0, 1000}) {
    ScenarioShape shape = {.requests = {},
                           .group_sizes = {7, 3},
                           .head_dim = 128,
                           .sliding_window = window,
                           .seed = 17};
    for (const int64_t seq_len : {127, 128, 129, 256, 257, 1023, 3000, 4096, 4097, 9001}) {
      shape.requests.push_back({.query_len = 1, .seq_len = seq_len});
    }
    ExpectDense(shape);
  }
}

// More parts than a warp has lanes, and every number of parts that the merge loads together.
TEST_P(CudaAttentionTest, ManyParts) {
  ScenarioShape shape = {
      .requests = {{.query_len = 1, .seq_len = 12800}, {.query_len = 1, .seq_len = 11000}},
      .group_sizes = {7},
      .head_dim = 128,
      .seed = 19};
  for (int64_t parts = 2; parts <= 9; ++parts) {
    shape.requests.push_back({.query_len = 1, .seq_len = parts * 64 - 3});
  }
  Scenario scenario(WithCache(shape));
  RoundData(scenario, dtype());
  CudaBackend::Options options = OptionsFor(shape);
  options.sizes.min_split_keys = 64;
  options.sizes.max_splits = 64;
  options.prefill = GetParam().prefill;
  const HostFacedCuda backend(options, dtype(), false);
  EXPECT_LT(RelativeError(scenario.RunStep(backend), scenario.Expected()), Tolerance());
}

// Pages of any number of rows, of which a box of the copies holds a divisor of 16; heads of one to
// four panels, the last of them cut; parts that begin and end anywhere in a page.
TEST_P(CudaAttentionTest, DecodeFromPagesOfAnySize) {
  uint32_t seed = 500;
  for (const int64_t block_size : {1, 2, 3, 8, 12, 16, 40, 48, 64, 256}) {
    for (const int64_t head_dim : {64, 80, 128, 192, 256}) {
      ScenarioShape shape = {.requests = {},
                             .group_sizes = {++seed % 2 == 0 ? 7 : 16, 1},
                             .head_dim = head_dim,
                             .block_size = block_size,
                             .sliding_window = seed % 3 == 0 ? 37 : 0,
                             .seed = seed};
      for (const int64_t seq_len : {1, 15, 16, 17, 63, 64, 65, 130, 500}) {
        shape.requests.push_back({.query_len = 1, .seq_len = seq_len});
      }
      ExpectDense(shape);
    }
  }
}

TEST_P(CudaAttentionTest, LongPrefill) {
  for (const int64_t window : {0, 70, 500}) {
    ExpectDense({.requests = {{.query_len = 900, .seq_len = 900},
                              {.query_len = 200, .seq_len = 1900},
                              {.query_len = 2, .seq_len = 1500}},
                 .group_sizes = {3, 2},
                 .head_dim = 64,
                 .sliding_window = window,
                 .seed = 18});
  }
}

// Row tiles for every multiprocessor, several times.
TEST_P(CudaAttentionTest, ManyRowTiles) {
  ScenarioShape shape = {.requests = {}, .group_sizes = {16, 3}, .head_dim = 16, .seed = 21};
  for (const int64_t seq_len : {700, 31, 320, 64, 129, 128, 900}) {
    shape.requests.push_back({.query_len = seq_len, .seq_len = seq_len});
    shape.requests.push_back({.query_len = 1, .seq_len = seq_len});
  }
  ExpectDense(shape);
}

TEST_P(CudaAttentionTest, LogitSoftcap) {
  for (const float softcap : {0.5f, 5.0f, 50.0f}) {
    ScenarioShape shape = {
        .requests = {{.query_len = 1, .seq_len = 200}, {.query_len = 60, .seq_len = 90}},
        .group_sizes = {4},
        .head_dim = 96,
        .logit_softcap = softcap,
        .seed = 5};
    Scenario scenario(WithCache(shape));
    for (float& q : scenario.data()[0].queries) q *= 8;  // logits far beyond the cap
    RoundData(scenario, dtype());
    const auto backend = MakeBackend(shape);
    // A capped logit near the largest adds many like weights: nothing cancels.
    EXPECT_LT(RelativeError(scenario.RunStep(*backend), scenario.Expected()), 2 * Tolerance())
        << softcap;
  }
}

TEST_P(CudaAttentionTest, LargeLogitsDoNotOverflow) {
  const ScenarioShape shape = {
      .requests = {{.query_len = 2, .seq_len = 300}, {.query_len = 1, .seq_len = 300}},
      .head_dim = 16};
  Scenario scenario(WithCache(shape));
  for (RequestData& data : scenario.data()) {
    for (float& q : data.queries) q *= 1000;
    for (float& k : data.keys) k *= 1000;
  }
  for (float x : scenario.RunStep(*MakeBackend(shape))) EXPECT_TRUE(std::isfinite(x));
}

// Queries that float16 could not hold, beside keys so small that logits are of size 1.
TEST_P(CudaAttentionTest, QueriesOfAnySize) {
  for (const float size : {1e-6f, 3e-4f, 1e4f, 3e5f, 1e20f}) {
    if (size > 1e4f && dtype() == DType::kF16) continue;
    ScenarioShape shape =
        WithCache({.requests = {{.query_len = 1, .seq_len = 300}, {.query_len = 90, .seq_len = 90}},
                   .group_sizes = {3},
                   .head_dim = 64,
                   .seed = 29});
    if (is_fp8()) shape.k_scale = kKeyScale / size;
    Scenario scenario(shape);
    for (RequestData& data : scenario.data()) {
      for (float& q : data.queries) q *= size;
      for (float& k : data.keys) k /= size;
    }
    RoundData(scenario, dtype());
    // float16 has few bits left of what is below 2^-14; its keys are no smaller than it can hold.
    if (dtype() == DType::kF16 && (size < 1e-3f || !is_fp8())) continue;
    EXPECT_LT(RelativeError(scenario.RunStep(*MakeBackend(shape)), scenario.Expected()),
              Tolerance())
        << size;
  }
}

TEST_P(CudaAttentionTest, PaddingRowsAreZeroAndARequestMayHaveNoRows) {
  for (const int64_t query_len : {1, 2}) {
    const ScenarioShape shape = {
        .requests = {{.query_len = query_len, .seq_len = 5}, {.query_len = 0, .seq_len = 7}},
        .group_sizes = {2},
        .padding_rows = 4};
    Scenario scenario(WithCache(shape));
    RoundData(scenario, dtype());
    const std::vector<float> out = scenario.RunStep(*MakeBackend(shape));
    EXPECT_LT(RelativeError(out, scenario.Expected()), Tolerance());
    for (size_t i = query_len * 16; i < out.size(); ++i) EXPECT_EQ(out[i], 0.0f);
  }
}

TEST_P(CudaAttentionTest, AnEmptyBatchIsAllPadding) {
  const ScenarioShape shape = {.requests = {}, .padding_rows = 3};
  Scenario scenario(WithCache(shape));
  EXPECT_EQ(scenario.RunStep(*MakeBackend(shape)), std::vector<float>(3 * 8, 0.0f));
}

// A NaN that one request sees is not seen by another, nor by its own rows whose window has passed.
TEST_P(CudaAttentionTest, InvisibleNanDoesNotLeak) {
  const ScenarioShape shape = {
      .requests = {{.query_len = 1, .seq_len = 400}, {.query_len = 400, .seq_len = 400}},
      .group_sizes = {2},
      .head_dim = 64,
      .sliding_window = 70};
  Scenario scenario(WithCache(shape));
  const auto backend = MakeBackend(shape);
  const std::vector<float> clean = scenario.RunStep(*backend);
  for (RequestData& data : scenario.data()) {
    data.values[20 * 64] = NAN;
    data.keys[20 * 64 + 3] = NAN;
  }
  const std::vector<float> spoilt = scenario.RunStep(*backend);
  const int64_t width = scenario.query_width();
  for (int64_t row = 0; row < 401; ++row) {
    const int64_t position = row == 0 ? 399 : row - 1;
    if (position >= 20 && position < 90) {
      EXPECT_TRUE(std::isnan(spoilt[row * width])) << row;
    } else if (position >= 20 + 70 + 128 || dtype() == DType::kF32) {
      // Rows nearer to it may share a tile with rows that see it.
      EXPECT_EQ(std::memcmp(&clean[row * width], &spoilt[row * width], width * 4), 0) << row;
    }
  }
}

TEST_P(CudaAttentionTest, WriteKvTouchesItsSlotsOnlyAndRoundsToNearestEven) {
  constexpr int64_t kHeads = 2, kBlockSize = 4, kBlocks = 3;
  for (const bool write_float32 : {true, false}) {
    for (const int64_t dim : {5, 16}) {
      const int64_t count = kBlocks * kHeads * kBlockSize * dim;
      const int64_t bytes = count * SizeOf(kv_dtype());
      std::vector<char> cache_keys(bytes, 0x5a), cache_values(bytes, 0x5a);
      std::vector<char> expected_keys(bytes, 0x5a), expected_values(bytes, 0x5a);
      const KvCacheView cache = {.keys = cache_keys.data(),
                                 .values = cache_values.data(),
                                 .dtype = kv_dtype(),
                                 .num_blocks = kBlocks,
                                 .num_kv_heads = kHeads,
                                 .block_size = kBlockSize,
                                 .head_dim = dim,
                                 .k_scale = is_fp8() ? 0.25f : 1,
                                 .v_scale = is_fp8() ? 0.003f : 1};
      std::vector<float> keys(4 * kHeads * dim), values(4 * kHeads * dim);
      for (size_t i = 0; i < keys.size(); ++i) {
        // Ties of bfloat16 (bit 15 set alone) and of binary16 (bit 12), both ways, and others.
        const float one_step = 1.0f + static_cast<float>(i % 7) * 0x1p-8f;
        keys[i] = i % 2 == 0 ? one_step : -1.0f - static_cast<float>(i) * 0x1p-11f;
        values[i] = static_cast<float>(i) * 0.3f;
      }
      const std::vector<int64_t> slots = {9, kNoSlot, 2, kNoSlot};
      CudaBackend::Options options = {.sizes = {.max_num_requests = 1,
                                                .max_num_tokens = 4,
                                                .max_model_len = 1,
                                                .num_query_heads = 1,
                                                .num_kv_heads = 1,
                                                .head_dim = dim}};
      const HostFacedCuda backend(options, dtype(), write_float32);
      const auto view = [&](std::vector<float>& data) {
        return MatrixView{
            .data = data.data(), .rows = 4, .cols = kHeads * dim, .stride = kHeads * dim};
      };
      backend.WriteKv(view(keys), view(values), slots, cache);
      // As they arrive on the device.
      const std::vector<float> device_keys = write_float32 ? keys : RoundedTo(keys, dtype());
      const std::vector<float> device_values = write_float32 ? values : RoundedTo(values, dtype());
      for (int64_t t = 0; t < 4; ++t) {
        if (slots[t] == kNoSlot) continue;
        for (int64_t head = 0; head < kHeads; ++head) {
          const int64_t offset =
              SizeOf(kv_dtype()) * cache.Offset(slots[t] / kBlockSize, head, slots[t] % kBlockSize);
          const int64_t from = (t * kHeads + head) * dim;
          ToCache(&device_keys[from], cache.k_scale, kv_dtype(), &expected_keys[offset], dim);
          ToCache(&device_values[from], cache.v_scale, kv_dtype(), &expected_values[offset], dim);
        }
      }
      EXPECT_EQ(cache_keys, expected_keys) << Name(kv_dtype()) << dim;
      EXPECT_EQ(cache_values, expected_values) << Name(kv_dtype()) << dim;
    }
  }
}

// What fp8 costs: prints the errors against keys and values as they were written, of outputs whose
// size is about 1 / sqrt(keys that matter). A number of E4M3 has 4 significant bits: rounding is
// off by 1.8% of it on average, 6.25% at most.
TEST_P(CudaAttentionTest, AccuracyAgainstWhatWasWritten) {
  ScenarioShape shape = WithCache({.requests = {{.query_len = 1, .seq_len = 1000},
                                                {.query_len = 200, .seq_len = 200},
                                                {.query_len = 1, .seq_len = 60}},
                                   .group_sizes = {7},
                                   .head_dim = 128,
                                   .seed = 23});
  Scenario scenario(shape);
  RoundData(scenario, dtype());
  ScenarioShape unrounded = shape;
  unrounded.kv_dtype = DType::kF32;
  unrounded.k_scale = unrounded.v_scale = 1;
  Scenario exact(unrounded);  // the same data: of the same seed
  RoundData(exact, dtype());
  const std::vector<double> expected = exact.Expected();
  const std::vector<float> out = scenario.RunStep(*MakeBackend(shape));
  double largest = 0, sum = 0, size = 0;
  for (size_t i = 0; i < out.size(); ++i) {
    const double error = std::abs(out[i] - expected[i]);
    largest = std::max(largest, error);
    sum += error;
    size += std::abs(expected[i]);
  }
  const double relative = RelativeError(out, expected);
  std::printf("%s, cache %s: largest error %.3g, mean %.3g of a mean size of %.3g; rms %.3g%%\n",
              std::string(Name(dtype())).c_str(), std::string(Name(kv_dtype())).c_str(), largest,
              sum / static_cast<double>(out.size()), size / static_cast<double>(out.size()),
              100 * relative);
  EXPECT_LT(relative, is_fp8() ? 0.08 : 2 * RelativeErrorTolerance(dtype()));
}

constexpr CudaPrefill kMma = CudaPrefill::kMma, kWarpgroup = CudaPrefill::kWarpgroup;

INSTANTIATE_TEST_SUITE_P(Kinds, CudaAttentionTest,
                         testing::Values(CudaAttentionKind{DType::kF32, DType::kF32, kMma},
                                         CudaAttentionKind{DType::kF16, DType::kF16, kMma},
                                         CudaAttentionKind{DType::kBF16, DType::kBF16, kMma},
                                         CudaAttentionKind{DType::kF16, DType::kF16, kWarpgroup},
                                         CudaAttentionKind{DType::kBF16, DType::kBF16, kWarpgroup},
                                         CudaAttentionKind{DType::kF32, DType::kF8E4M3, kMma},
                                         CudaAttentionKind{DType::kF16, DType::kF8E4M3, kMma},
                                         CudaAttentionKind{DType::kBF16, DType::kF8E4M3, kMma}),
                         [](const auto& info) {
                           const bool is_fp8 = info.param.kv_dtype == DType::kF8E4M3;
                           return std::string(Name(info.param.dtype)) + (is_fp8 ? "_fp8" : "") +
                                  (info.param.prefill == kWarpgroup ? "_warpgroup" : "");
                         });

TEST(CudaSelectorTest, ChoosesCudaForItsDevice) {
  const AttentionRequirements requirements = {.device = "cuda",
                                              .activation_dtype = DType::kBF16,
                                              .kv_dtype = DType::kBF16,
                                              .head_dim = 128,
                                              .block_size = 16,
                                              .sliding_window = true,
                                              .logit_softcap = true,
                                              .deterministic = true};
  const auto report = ChooseBackend(requirements, "");
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->chosen, "cuda");
  AttentionRequirements fp8 = requirements;
  fp8.kv_dtype = DType::kF8E4M3;
  EXPECT_TRUE(ChooseBackend(fp8, "").ok());
  AttentionRequirements mixed = requirements;
  mixed.activation_dtype = DType::kF32;
  EXPECT_EQ(ChooseBackend(mixed, "").status().code(), absl::StatusCode::kUnimplemented);
  ThreadPool pool(1);
  EXPECT_EQ(SelectBackend(requirements, "", pool).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace lockstep

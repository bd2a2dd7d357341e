// The kinds of CUDA attention that every test of it runs for: cuda_attention_test.cc has those
// against dense attention, cuda_attention_bits_test.cc those of what may not change a bit.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>

#include "tests/attention/cuda_test_device.h"

namespace lockstep {

// "float32", "float16", "bfloat16", each over an fp8 cache, too, and the latter two with prefill by
// warpgroup products.
struct CudaAttentionKind {
  DType dtype;     // of queries and outputs
  DType kv_dtype;  // of the cache
  CudaPrefill prefill;
};

// Scales that bring normal numbers into fp8's range, some of them beyond it.
inline constexpr float kKeyScale = 0.0117f, kValueScale = 0.0083f;

class CudaAttentionTest : public testing::TestWithParam<CudaAttentionKind> {
 protected:
  void SetUp() override {
    if (NumCudaDevices() == 0) GTEST_SKIP() << "no CUDA device";
    const auto device = SelectCudaDevice(0);
    ASSERT_TRUE(device.ok()) << device.status();
    if (GetParam().prefill == CudaPrefill::kWarpgroup && !HasWarpgroupPrefill()) {
      GTEST_SKIP() << "no warpgroup products";
    }
  }

  static DType dtype() { return GetParam().dtype; }
  static DType kv_dtype() { return GetParam().kv_dtype; }
  static bool is_fp8() { return kv_dtype() == DType::kF8E4M3; }
  // The shape over the cache of this kind.
  static ScenarioShape WithCache(ScenarioShape shape) {
    shape.kv_dtype = kv_dtype();
    if (is_fp8()) {
      shape.k_scale = kKeyScale;
      shape.v_scale = kValueScale;
    }
    return shape;
  }
  static double Tolerance() { return RelativeErrorTolerance(dtype()); }
  static std::unique_ptr<AttentionBackend> MakeBackend(const ScenarioShape& shape) {
    return MakeHostFacedCuda(shape, dtype(), GetParam().prefill);
  }

  void ExpectDense(ScenarioShape shape) {
    shape = WithCache(shape);
    Scenario scenario(WithCache(shape));
    RoundData(scenario, dtype());
    const auto backend = MakeBackend(shape);
    EXPECT_LT(RelativeError(scenario.RunStep(*backend), scenario.Expected()), Tolerance())
        << Describe(shape);
  }

  ScenarioShape RandomShape(uint32_t seed) {
    std::mt19937 rng(seed);
    const auto pick = [&rng](std::initializer_list<int64_t> values) {
      return *(values.begin() + rng() % values.size());
    };
    ScenarioShape shape;
    shape.seed = seed;
    shape.head_dim = pick({64, 80, 96, 128, 128, 256, 8, 24, 72, 112, 160, 7, 20, 320, 512});
    shape.block_size = pick({16, 32, 16, 1, 8, 24});
    shape.sliding_window = pick({0, 0, 0, 1, 5, 64, 100, 300});
    shape.logit_softcap = static_cast<float>(pick({0, 0, 2, 30}));
    shape.padding_rows = pick({0, 1, 3});
    shape.group_sizes.clear();
    for (int64_t i = pick({1, 2, 3}); i > 0; --i) {
      shape.group_sizes.push_back(pick({1, 2, 3, 5, 7, 8, 16, 17, 33}));
    }
    for (int64_t i = pick({1, 2, 4, 9}); i > 0; --i) {
      const int64_t seq_len = 1 + static_cast<int64_t>(rng() % pick({4, 40, 300, 700}));
      const int64_t query_len =
          std::min(seq_len, pick({1, 1, 1, 2, 17, seq_len > 100 ? 50 : seq_len}));
      shape.requests.push_back({.query_len = query_len, .seq_len = seq_len});
    }
    return WithCache(shape);
  }
};

}  // namespace lockstep

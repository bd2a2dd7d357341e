// What the bits of a row do not depend on: other requests, chunks, which block does which part, and
// when.
#include "tests/attention/cuda_attention_kinds.h"

namespace lockstep {
namespace {

// Whether a block does all parts of a row, some or one is no matter: it depends on how many blocks
// there are.
TEST_P(CudaAttentionTest, RunsDoNotChangeBits) {
  uint32_t seed = 700;
  for (const int64_t window : {0, 777}) {
    for (const int64_t head_dim : {64, 128}) {
      ScenarioShape shape = {.requests = {},
                             .group_sizes = {7, ++seed % 2 == 0 ? 3 : 12},
                             .head_dim = head_dim,
                             .block_size = seed % 3 == 0 ? 24 : 16,
                             .sliding_window = window,
                             .padding_rows = 1,
                             .seed = seed};
      for (const int64_t seq_len :
           {1, 1025, 64, 65, 2049, 383, 384, 385, 700, 16, 1024, 1100, 5000, 300}) {
        shape.requests.push_back({.query_len = 1, .seq_len = seq_len});
      }
      Scenario scenario(WithCache(shape));
      RoundData(scenario, dtype());
      std::vector<float> first;
      for (const int64_t multiprocessors : {1, 3, 7, 12, 20, 132}) {
        CudaBackend::Options options = OptionsFor(shape);
        options.sizes.multiprocessors = multiprocessors;
        options.prefill = GetParam().prefill;
        const HostFacedCuda backend(options, dtype(), false);
        const std::vector<float> out = scenario.RunStep(backend);
        if (first.empty()) {
          first = out;
          EXPECT_LT(RelativeError(out, scenario.Expected()), Tolerance()) << Describe(shape);
        }
        EXPECT_TRUE(SameBits(out, first)) << Describe(shape) << " of " << multiprocessors;
      }
    }
  }
}

// So many parts that one block has several of a request, or all of them. Alone each is a block's.
TEST_P(CudaAttentionTest, ManyRequestsEqualEachAloneBitForBit) {
  for (const int64_t head_dim : {64, 128}) {
    for (const int64_t requests : {12, 40}) {
      ScenarioShape shape = {.requests = {},
                             .group_sizes = {7, 3},
                             .head_dim = head_dim,
                             .padding_rows = 1,
                             .seed = static_cast<uint32_t>(head_dim + requests)};
      for (int64_t i = 0; i < requests; ++i) {
        shape.requests.push_back({.query_len = 1, .seq_len = 1 + i * 7919 % (i % 2 ? 2000 : 300)});
      }
      Scenario scenario(WithCache(shape));
      RoundData(scenario, dtype());
      CudaBackend::Options options = OptionsFor(shape);
      options.sizes.min_split_keys = 64;
      options.prefill = GetParam().prefill;
      const HostFacedCuda backend(options, dtype(), false);
      const std::vector<float> batch = scenario.RunStep(backend);
      EXPECT_LT(RelativeError(batch, scenario.Expected()), Tolerance()) << Describe(shape);
      std::vector<float> alone;
      for (int64_t i = 0; i < requests; ++i) {
        const std::vector<float> part = scenario.RunChunk(backend, i, 1, shape.requests[i].seq_len);
        alone.insert(alone.end(), part.begin(), part.end());
      }
      alone.resize(batch.size(), 0.0f);
      EXPECT_TRUE(SameBits(batch, alone)) << Describe(shape);
    }
  }
}

TEST_P(CudaAttentionTest, BatchEqualsAloneBitForBit) {
  for (uint32_t seed = 100; seed < 140; ++seed) {
    const ScenarioShape shape = RandomShape(seed);
    Scenario scenario(WithCache(shape));
    const auto backend = MakeBackend(shape);
    const std::vector<float> batch = scenario.RunStep(*backend);
    std::vector<float> alone;
    for (size_t i = 0; i < shape.requests.size(); ++i) {
      const std::vector<float> part =
          scenario.RunChunk(*backend, static_cast<int64_t>(i), shape.requests[i].query_len,
                            shape.requests[i].seq_len);
      alone.insert(alone.end(), part.begin(), part.end());
    }
    alone.resize(batch.size(), 0.0f);
    EXPECT_TRUE(SameBits(batch, alone)) << Describe(shape);
  }
}

TEST_P(CudaAttentionTest, ChunkedEqualsWholeBitForBit) {
  for (const int64_t window : {0, 90}) {
    for (const int64_t chunk : {2, 16, 100, 254}) {
      const ScenarioShape shape = {.requests = {{.query_len = 600, .seq_len = 600}},
                                   .group_sizes = {3, 2},
                                   .head_dim = 64,
                                   .sliding_window = window};
      Scenario scenario(WithCache(shape));
      const auto backend = MakeBackend(shape);
      const std::vector<float> whole = scenario.RunStep(*backend);
      scenario.PoisonAll();
      std::vector<float> chunked;
      for (int64_t done = 0; done < 600; done += chunk) {
        const int64_t end = std::min<int64_t>(600, done + chunk);
        const std::vector<float> part = scenario.RunChunk(*backend, 0, end - done, end);
        chunked.insert(chunked.end(), part.begin(), part.end());
      }
      EXPECT_TRUE(SameBits(whole, chunked)) << Describe(shape) << " chunk=" << chunk;
    }
  }
}

// Parts of a request arrive in any order; which block merges them must not show.
TEST_P(CudaAttentionTest, RepeatedRunsAreEqualBitForBit) {
  const ScenarioShape shape = {.requests = {{.query_len = 1, .seq_len = 3000},
                                            {.query_len = 1, .seq_len = 700},
                                            {.query_len = 40, .seq_len = 500}},
                               .group_sizes = {7, 20},
                               .head_dim = 128};
  Scenario scenario(WithCache(shape));
  const auto backend = MakeBackend(shape);
  const std::vector<float> first = scenario.RunStep(*backend);
  for (int i = 0; i < 20; ++i) EXPECT_TRUE(SameBits(first, scenario.RunStep(*backend))) << i;
}

}  // namespace
}  // namespace lockstep

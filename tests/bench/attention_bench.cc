// CPU attention: decode as GB/s of K and V read, prefill as GFLOP/s of the products.
//
//   bytes = 2 * Hkv * D * sizeof(kv dtype) * sum of seq_lens
//   flop  = 4 * Hq * D * (query, key) pairs under the causal mask: T * (T + 1) / 2 of a whole
//   prompt
//
// KV is larger than the caches for the long decodes: each repetition reads another copy of it.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "attention/cpu_backend.h"
#include "cache/block_table.h"
#include "cache/kv_pool.h"

namespace lockstep {
namespace {

constexpr int64_t kBlockSize = 16;

struct Setup {
  AttentionGeometry geometry;
  KvPool pool;
  std::vector<int32_t> query_start_loc = {0};
  std::vector<int32_t> seq_lens;
  std::vector<int32_t> tables;
  std::vector<int64_t> slots;
  std::vector<float> query;
  std::vector<float> out;
  int64_t max_blocks = 0;
};

void FillRandom(const KvCacheView& cache, int64_t num_blocks, std::mt19937& rng) {
  std::normal_distribution<float> normal;
  std::vector<float> floats(cache.num_kv_heads * cache.block_size * cache.head_dim);
  for (float& x : floats) x = normal(rng);
  const int64_t count = static_cast<int64_t>(floats.size());
  for (int64_t block = 0; block < num_blocks; ++block) {
    const int64_t offset = SizeOf(cache.dtype) * cache.Offset(block, 0, 0);
    Convert(DType::kF32, floats.data(), cache.dtype, static_cast<char*>(cache.keys) + offset,
            count);
    Convert(DType::kF32, floats.data(), cache.dtype, static_cast<char*>(cache.values) + offset,
            count);
  }
}

Setup MakeSetup(int64_t requests, int64_t query_len, int64_t seq_len, int64_t query_heads,
                int64_t kv_heads, int64_t head_dim, DType dtype, int64_t layers) {
  std::mt19937 rng(1);
  Setup s;
  s.geometry = {.num_query_heads = query_heads,
                .num_kv_heads = kv_heads,
                .head_dim = head_dim,
                .kv_groups = {},
                .scale = 0.125f};
  for (int64_t h = 0; h < kv_heads; ++h) {
    s.geometry.kv_groups.push_back({h * query_heads / kv_heads, (h + 1) * query_heads / kv_heads});
  }
  s.max_blocks = BlocksForTokens(seq_len, kBlockSize);
  const int64_t num_blocks = requests * s.max_blocks;
  s.pool = *KvPool::Create({.num_layers = layers,
                            .num_kv_heads = kv_heads,
                            .head_dim = head_dim,
                            .block_size = kBlockSize,
                            .dtype = dtype},
                           num_blocks);
  for (int64_t layer = 0; layer < layers; ++layer) FillRandom(s.pool.Layer(layer), num_blocks, rng);
  s.tables.resize(num_blocks);
  std::iota(s.tables.begin(), s.tables.end(), 0);
  std::shuffle(s.tables.begin(), s.tables.end(), rng);
  for (int64_t b = 0; b < requests; ++b) {
    s.seq_lens.push_back(static_cast<int32_t>(seq_len));
    s.query_start_loc.push_back(static_cast<int32_t>((b + 1) * query_len));
  }
  s.slots.assign(requests * query_len, kNoSlot);
  s.query.assign(requests * query_len * query_heads * head_dim, 0.1f);
  s.out.resize(s.query.size());
  return s;
}

void RunForward(benchmark::State& state, Setup& s, int64_t threads) {
  ThreadPool pool(static_cast<int>(threads));
  const auto backend = CpuBackend::Create(pool);
  const AttentionBatch batch = {.query_start_loc = s.query_start_loc,
                                .seq_lens = s.seq_lens,
                                .block_tables = s.tables,
                                .max_blocks = s.max_blocks,
                                .slot_mapping = s.slots};
  const auto metadata = backend->BuildMetadata(batch, kBlockSize);
  if (!metadata.ok()) return state.SkipWithError("BuildMetadata failed");
  const int64_t width = s.geometry.num_query_heads * s.geometry.head_dim;
  const int64_t rows = batch.num_tokens();
  const MatrixView query = {.data = s.query.data(), .rows = rows, .cols = width, .stride = width};
  const MatrixView out = {.data = s.out.data(), .rows = rows, .cols = width, .stride = width};
  int64_t layer = 0;
  for (auto _ : state) {
    backend->Forward(s.geometry, **metadata, query, s.pool.Layer(layer), out);
    layer = (layer + 1) % s.pool.shape().num_layers;
    benchmark::ClobberMemory();
  }
}

// The ceiling of decode: reading 512 MiB in order. Argument: threads.
void BM_Read(benchmark::State& state) {
  const int64_t count = (int64_t{512} << 20) / static_cast<int64_t>(sizeof(uint64_t));
  const std::vector<uint64_t> words(count, 1);
  ThreadPool pool(static_cast<int>(state.range(0)));
  for (auto _ : state) {
    pool.ParallelFor(count, 64, [&](int64_t begin, int64_t end) {
      uint64_t sum = 0;
      for (int64_t i = begin; i < end; ++i) sum += words[i];
      benchmark::DoNotOptimize(sum);
    });
  }
  state.counters["GB/s"] = benchmark::Counter(
      static_cast<double>(count) * 8e-9 * static_cast<double>(state.iterations()),
      benchmark::Counter::kIsRate);
}
BENCHMARK(BM_Read)->ArgName("threads")->Arg(1)->Arg(2)->UseRealTime()->Unit(
    benchmark::kMicrosecond);

// Arguments: threads, requests, context, query heads, KV heads, D, KV dtype.
void BM_Decode(benchmark::State& state) {
  const int64_t requests = state.range(1), context = state.range(2);
  const int64_t kv_heads = state.range(4), head_dim = state.range(5);
  const DType dtype = static_cast<DType>(state.range(6));
  const int64_t bytes = 2 * kv_heads * head_dim * SizeOf(dtype) * requests * context;
  // 512 MiB in turn: more than the last-level cache.
  const int64_t layers = std::max<int64_t>(1, (int64_t{512} << 20) / bytes);
  Setup s = MakeSetup(requests, 1, context, state.range(3), kv_heads, head_dim, dtype, layers);
  RunForward(state, s, state.range(0));
  state.counters["GB/s"] = benchmark::Counter(
      static_cast<double>(bytes) * 1e-9 * static_cast<double>(state.iterations()),
      benchmark::Counter::kIsRate);
}
BENCHMARK(BM_Decode)
    ->ArgNames({"threads", "B", "context", "Hq", "Hkv", "D", "kv_dtype"})
    ->ArgsProduct({{1, 2}, {1}, {2048}, {9}, {3}, {64}, {0, 2}})
    ->ArgsProduct({{1, 2}, {1}, {8192}, {28}, {4}, {128}, {2}})
    ->ArgsProduct({{1, 2}, {16}, {1024}, {32}, {8}, {128}, {2}})
    ->ArgsProduct({{1, 2}, {1}, {4096}, {8}, {8}, {64}, {2}})
    ->UseRealTime()
    ->Unit(benchmark::kMicrosecond);

// Arguments: threads, tokens, query heads, KV heads, D, KV dtype.
void BM_Prefill(benchmark::State& state) {
  const int64_t tokens = state.range(1), query_heads = state.range(2), head_dim = state.range(4);
  Setup s = MakeSetup(1, tokens, tokens, query_heads, state.range(3), head_dim,
                      static_cast<DType>(state.range(5)), 1);
  RunForward(state, s, state.range(0));
  const double pairs = static_cast<double>(tokens) * static_cast<double>(tokens + 1) / 2;
  state.counters["GFLOP/s"] =
      benchmark::Counter(4e-9 * static_cast<double>(query_heads * head_dim) * pairs *
                             static_cast<double>(state.iterations()),
                         benchmark::Counter::kIsRate);
}
BENCHMARK(BM_Prefill)
    ->ArgNames({"threads", "T", "Hq", "Hkv", "D", "kv_dtype"})
    ->ArgsProduct({{1, 2}, {512}, {9}, {3}, {64}, {0, 2}})
    ->ArgsProduct({{1, 2}, {2048}, {28}, {4}, {128}, {2}})
    ->UseRealTime()
    ->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace lockstep

BENCHMARK_MAIN();

// Sampler: microseconds a row, 256 rows a step, on one rank with one thread.
//
// GB/s counts each row's logits once, as if they were read a single time; reading them is the
// floor. Rows: peaked has a few likely ids (standard deviation 3, the largest far above the others,
// as language models give them), flat has V nearly equal ones, equal has V equal ones.
#include <benchmark/benchmark.h>

#include <cmath>
#include <random>
#include <vector>

#include "parallel/local_communicator.h"
#include "runtime/sampler.h"

namespace lockstep {
namespace {

constexpr int64_t kRows = 256;

enum class Shape { kPeaked, kWide, kFlat, kEqual };

std::vector<float> MakeLogits(Shape shape, int64_t vocab_size) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> logits(static_cast<size_t>(kRows * vocab_size));
  const float spread = shape == Shape::kPeaked || shape == Shape::kWide ? 3.0f
                       : shape == Shape::kFlat                          ? 0.01f
                                                                        : 0.0f;
  // One row's worth of random numbers, shifted from row to row, is random enough and fast to make.
  std::vector<float> noise(static_cast<size_t>(vocab_size));
  for (float& x : noise) x = normal(random) * spread;
  for (int64_t row = 0; row < kRows; ++row) {
    float* x = logits.data() + row * vocab_size;
    const int64_t shift = static_cast<int64_t>(random() % static_cast<uint32_t>(vocab_size));
    for (int64_t i = 0; i < vocab_size; ++i) x[i] = noise[(i + shift) % vocab_size];
    if (shape != Shape::kPeaked) continue;
    for (int j = 0; j < 30; ++j) {
      x[random() % static_cast<uint32_t>(vocab_size)] = 20 - 0.3f * static_cast<float>(j);
    }
  }
  return logits;
}

void Run(benchmark::State& state, Shape shape, const SampleRow& setting, bool adjusts = false) {
  const int64_t vocab_size = state.range(0);
  std::vector<float> logits = MakeLogits(shape, vocab_size);
  const auto communicators = CreateLocalCommunicators(1);
  ThreadPool threads(1);
  Sampler sampler({{0, vocab_size}}, *communicators[0], threads);
  std::vector<int32_t> history;  // 1000 tokens of prompt and answer
  for (int32_t i = 0; i < 1000; ++i) {
    history.push_back(i * 37 % static_cast<int32_t>(vocab_size));
  }
  // So small that the logits, which are changed in place, stay about what they are.
  LogitAdjuster adjuster(
      {0, vocab_size},
      {.repetition_penalty = 1 + 1e-9, .frequency_penalty = 1e-9, .bias = {}, .banned_ids = {}},
      history, 500);
  std::vector<SampleRow> rows;
  for (int32_t i = 0; i < kRows; ++i) {
    rows.push_back(setting);
    rows.back().logits_row = i;
    rows.back().seed = static_cast<uint64_t>(i);
    if (adjusts) rows.back().adjuster = &adjuster;
  }
  SampleOutput output;
  int32_t position = 0;
  for (auto _ : state) {
    for (SampleRow& row : rows) row.position = position;
    ++position;
    const absl::Status status = sampler.Sample({.data = logits.data(),
                                                .dtype = DType::kF32,
                                                .rows = kRows,
                                                .cols = vocab_size,
                                                .stride = vocab_size},
                                               rows, 0, output);
    if (!status.ok() || output.tokens[0] < 0) state.SkipWithError("no token");
  }
  const auto num_rows = static_cast<double>(state.iterations() * kRows);
  state.counters["us/row"] = benchmark::Counter(
      num_rows * 1e-6, benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
  state.counters["GB/s"] = benchmark::Counter(num_rows * static_cast<double>(vocab_size) * 4e-9,
                                              benchmark::Counter::kIsRate);
}

#define SAMPLER_BENCHMARK(name, ...) \
  BENCHMARK_CAPTURE(Run, name, __VA_ARGS__)->Arg(49152)->Arg(152064)->Unit(benchmark::kMillisecond)

SAMPLER_BENCHMARK(greedy, Shape::kPeaked, {});
SAMPLER_BENCHMARK(greedy_penalties, Shape::kPeaked, {}, true);
SAMPLER_BENCHMARK(greedy_logprobs5, Shape::kPeaked, {.num_logprobs = 5});
SAMPLER_BENCHMARK(temperature_peaked, Shape::kPeaked, {.temperature = 0.7});
SAMPLER_BENCHMARK(temperature_wide, Shape::kWide, {.temperature = 1});
SAMPLER_BENCHMARK(temperature_flat, Shape::kFlat, {.temperature = 1});
SAMPLER_BENCHMARK(top_k50_peaked, Shape::kPeaked, {.temperature = 0.7, .top_p = 0.9, .top_k = 50});
SAMPLER_BENCHMARK(top_k50_flat, Shape::kFlat, {.temperature = 0.7, .top_p = 0.9, .top_k = 50});
SAMPLER_BENCHMARK(top_k1000_wide, Shape::kWide, {.temperature = 0.7, .top_p = 0.9, .top_k = 1000});
SAMPLER_BENCHMARK(top_p_peaked, Shape::kPeaked, {.temperature = 0.7, .top_p = 0.95});
SAMPLER_BENCHMARK(top_p_wide, Shape::kWide, {.temperature = 1, .top_p = 0.95});
SAMPLER_BENCHMARK(top_p_flat, Shape::kFlat, {.temperature = 1, .top_p = 0.95});
SAMPLER_BENCHMARK(top_p_equal, Shape::kEqual, {.temperature = 1, .top_p = 0.95});
SAMPLER_BENCHMARK(min_p_peaked, Shape::kPeaked, {.temperature = 0.7, .min_p = 0.05});
SAMPLER_BENCHMARK(min_p_flat, Shape::kFlat, {.temperature = 1, .min_p = 0.05});
SAMPLER_BENCHMARK(min_p_top_p_flat, Shape::kFlat, {.temperature = 1, .top_p = 0.9, .min_p = 0.05});

}  // namespace
}  // namespace lockstep

BENCHMARK_MAIN();

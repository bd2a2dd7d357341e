// Linear (model/ops.h) beside what the cores can do, measured in the same run.
//
//   linear_bench [--isa=NAME] [flags of Google Benchmark]
//
// NAME: portable, avx2, avx512, avx512_bf16; the best of this CPU without it. Each product takes
// the next of many weight matrices, together larger than the last-level cache, so that a decode
// step's reads from memory are what is timed.
//
// GB/s = bytes of the weights / median time of a product; GFLOP/s = 2 * T * N * K / median time.
// read_% and peak_%: share of the ceilings, medians too, which are measured between the products.
#include <benchmark/benchmark.h>

#include <cstring>

#include "model/ops.h"
#include "tests/bench/ceilings.h"

namespace lockstep {
namespace {

CpuIsa& Isa() {
  static CpuIsa isa = BestCpuIsa();
  return isa;
}

const Buffer& Weights() {
  static const Buffer weights = Buffer::Create(int64_t{256} << 20, "weights").value();
  return weights;
}

Buffer Memory(int64_t bytes) { return Buffer::Create(std::max<int64_t>(1, bytes), "x").value(); }

// Arguments: threads, dtype (0: float32, 2: bfloat16), N, K, T.
void BM_Linear(benchmark::State& state) {
  ThreadPool threads(static_cast<int>(state.range(0)));
  const DType dtype = static_cast<DType>(state.range(1));
  const int64_t n = state.range(2), k = state.range(3), tokens = state.range(4);
  const int64_t bytes = PackedBytes(n, k, dtype);
  const int64_t copies = Weights().size_bytes() / bytes;
  FillUniform(dtype, Weights());
  const Buffer x = Memory(tokens * k * 4), y = Memory(tokens * n * 4);
  const Buffer workspace = Memory(LinearWorkspaceBytes(tokens, k, dtype, Isa()));
  FillUniform(DType::kF32, x);
  const OpContext context = {threads, workspace, Isa()};
  const MatrixView x_view = {x.data(), DType::kF32, tokens, k, k};
  const MatrixView y_view = {y.data(), DType::kF32, tokens, n, n};
  // As many products a round as take about a millisecond or more.
  const int64_t inner = std::max<int64_t>(1, (int64_t{1} << 26) / (bytes * tokens));
  std::vector<double> times, reads, peaks;
  int64_t copy = 0;
  for (auto _ : state) {
    if (times.size() % 8 == 0) {  // a read takes as long as some products
      reads.push_back(ReadBytesPerSecond(Weights(), threads));
      peaks.push_back(PeakFlopsPerSecond(dtype, threads));
    }
    const double start = NowSeconds();
    for (int64_t i = 0; i < inner; ++i) {
      char* const data = Weights().as<char>() + copy * bytes;
      Linear(x_view, PackedMatrix{data, dtype, n, k}, nullptr, y_view, context);
      copy = (copy + 1) % copies;
    }
    times.push_back((NowSeconds() - start) / static_cast<double>(inner));
    state.SetIterationTime(times.back() * static_cast<double>(inner));
  }
  const double time = Median(times);
  const double rate = static_cast<double>(bytes) / time;
  const double flops = 2.0 * static_cast<double>(tokens * n * k) / time;
  state.counters["us"] = time * 1e6;
  state.counters["GB/s"] = rate * 1e-9;
  state.counters["read_%"] = 100 * rate / Median(reads);
  state.counters["GFLOP/s"] = flops * 1e-9;
  state.counters["peak_%"] = 100 * flops / Median(peaks);
}
BENCHMARK(BM_Linear)
    ->ArgNames({"threads", "dtype", "N", "K", "T"})
    ->ArgsProduct({{1, 2}, {0, 2}, {2048}, {2048}, {1, 8, 64, 512}})
    // SmolLM2-135M: QKV, attention's output, gate and up, down.
    ->ArgsProduct({{1, 2}, {2}, {960, 576, 3072}, {576}, {1, 8, 512}})
    ->ArgsProduct({{1, 2}, {2}, {576}, {1536}, {1, 8, 512}})
    ->UseManualTime()
    ->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  constexpr char kIsaFlag[] = "--isa=";
  for (int i = 1; i < argc; ++i) {
    bool known = false;
    for (const lockstep::CpuIsa isa : lockstep::SupportedCpuIsas()) {
      if (std::strncmp(argv[i], kIsaFlag, sizeof(kIsaFlag) - 1) == 0 &&
          lockstep::Name(isa) == argv[i] + sizeof(kIsaFlag) - 1) {
        lockstep::Isa() = isa;
        known = true;
      }
    }
    if (!known) {
      std::fprintf(stderr, "linear_bench: %s is no known argument, or not of this CPU\n", argv[i]);
      return 2;
    }
  }
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}

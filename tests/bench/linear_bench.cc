// Linear (model/ops.h) beside the machine's read bandwidth, measured in the same run.
//
//   linear_bench [N = K, default 2048] [repeats, default 9] [instruction set, default the best]
//
// Each product takes the next of many weight matrices, together larger than the last-level cache,
// so that a decode step's reads from memory are what is timed. Medians over the repeats. GB/s = N *
// K * bytes of an element / time, GFLOP/s = 2 * T * N * K / time.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#include "model/ops.h"
#include "runtime/core/status.h"

namespace lockstep {
namespace {

constexpr int64_t kWeightBytes = int64_t{600} << 20;

double Seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double MedianSeconds(int repeats, const std::function<void(int)>& fn) {
  std::vector<double> times;
  for (int i = -1; i < repeats; ++i) {  // one to warm up
    const double start = Seconds();
    fn(i + 1);
    if (i >= 0) times.push_back(Seconds() - start);
  }
  std::nth_element(times.begin(), times.begin() + repeats / 2, times.end());
  return times[repeats / 2];
}

// GB/s of summing 64-bit words over all of `memory`.
double ReadBandwidth(const Buffer& memory, ThreadPool& threads, int repeats) {
  using Words = uint64_t __attribute__((vector_size(64)));
  const Words* words = memory.as<const Words>();
  const int64_t count = memory.size_bytes() / static_cast<int64_t>(sizeof(Words));
  const double time = MedianSeconds(repeats, [&](int) {
    threads.ParallelFor(count, 4096, [&](int64_t begin, int64_t end) {
      Words sums[4] = {};
      for (int64_t i = begin; i + 4 <= end; i += 4) {
        for (int j = 0; j < 4; ++j) sums[j] ^= words[i + j];
      }
      const Words all = sums[0] ^ sums[1] ^ sums[2] ^ sums[3];
      volatile uint64_t sink = all[0];
      (void)sink;
    });
  });
  return static_cast<double>(memory.size_bytes()) / time * 1e-9;
}

void FillRandom(float* data, int64_t count) {
  uint32_t state = 1;
  for (int64_t i = 0; i < count; ++i) {
    state = state * 1664525u + 1013904223u;
    data[i] = static_cast<float>(static_cast<int32_t>(state)) * 0x1p-31f;
  }
}

// Values of one size: denormals, for example, would cost extra.
void FillWeights(DType dtype, const Buffer& weights) {
  std::vector<float> values(1 << 20);
  FillRandom(values.data(), 1 << 20);
  const int64_t step = (int64_t{1} << 20) * SizeOf(dtype);
  for (int64_t at = 0; at + step <= weights.size_bytes(); at += step) {
    Convert(DType::kF32, values.data(), dtype, weights.as<char>() + at, 1 << 20);
  }
}

void BenchDType(DType dtype, int64_t n, CpuIsa isa, const Buffer& weights, ThreadPool& threads,
                double limit, int repeats) {
  const int64_t bytes = n * n * SizeOf(dtype);
  const int64_t copies = std::max<int64_t>(1, weights.size_bytes() / bytes);
  for (int64_t tokens : {1, 8, 64, 512}) {
    const auto x = Buffer::Create(tokens * n * 4, "x").value();
    const auto y = Buffer::Create(tokens * n * 4, "y").value();
    const auto workspace =
        Buffer::Create(std::max<int64_t>(1, LinearWorkspaceBytes(tokens, n, dtype, isa)),
                       "workspace")
            .value();
    FillRandom(x.as<float>(), tokens * n);
    const OpContext context = {threads, workspace, isa};
    const MatrixView x_view = {x.data(), DType::kF32, tokens, n, n};
    const MatrixView y_view = {y.data(), DType::kF32, tokens, n, n};
    const int64_t inner = tokens <= 8 ? copies : std::max<int64_t>(1, 256 / tokens);
    const double time =
        MedianSeconds(repeats,
                      [&](int repeat) {
                        for (int64_t i = 0; i < inner; ++i) {
                          char* weight =
                              weights.as<char>() + ((repeat * inner + i) % copies) * bytes;
                          Linear(x_view, {weight, dtype, n, n, n}, nullptr, y_view, context);
                        }
                      }) /
        static_cast<double>(inner);
    const double gbps = static_cast<double>(bytes) / time * 1e-9;
    std::printf("%-9s %2d threads  T=%-4ld %9.1f us %7.1f GB/s (%3.0f%% of read) %8.1f GFLOP/s\n",
                std::string(Name(dtype)).c_str(), threads.num_threads(), tokens, time * 1e6, gbps,
                100 * gbps / limit, 2e-9 * static_cast<double>(tokens * n * n) / time);
  }
}

int Main(int argc, char** argv) {
  const int64_t n = argc > 1 ? std::atoll(argv[1]) : 2048;
  const int repeats = argc > 2 ? std::atoi(argv[2]) : 9;
  CpuIsa isa = BestCpuIsa();
  for (CpuIsa supported : SupportedCpuIsas()) {
    if (argc > 3 && Name(supported) == argv[3]) isa = supported;
  }
  const auto weights = Buffer::Create(kWeightBytes, "weights").value();
  std::printf("n = k = %ld, %s, weights of %ld MiB in turn\n", n, std::string(Name(isa)).c_str(),
              kWeightBytes >> 20);
  for (int num_threads : {1, 2}) {
    ThreadPool threads(num_threads);
    const double limit = ReadBandwidth(weights, threads, repeats);
    std::printf("read bandwidth, %d threads: %.1f GB/s\n", num_threads, limit);
    for (DType dtype : {DType::kF32, DType::kBF16}) {
      FillWeights(dtype, weights);
      BenchDType(dtype, n, isa, weights, threads, limit, repeats);
    }
  }
  return 0;
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) { return lockstep::Main(argc, argv); }

// The sampler on one GPU, a step after another with two in flight: us a step, and for greedy rows
// the rate at which logits (float32, 152064 ids) are read.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "runtime/cuda_sampler.h"

namespace lockstep {
namespace {

constexpr int64_t kVocabSize = 152064;
constexpr int kSteps = 50;

void Must(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  std::exit(1);
}
template <typename T>
T Must(absl::StatusOr<T> value) {
  Must(value.status());
  return *std::move(value);
}

struct Kind {
  const char* name;
  SampleRow row;
};

// The median of several runs of kSteps steps.
double MicrosecondsAStep(CudaSampler& sampler, const MatrixView& logits, const SampleRow& row,
                         int32_t* last_tokens) {
  std::vector<SampleRow> rows(static_cast<size_t>(logits.rows), row);
  std::vector<int32_t> slots(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    rows[i].logits_row = slots[i] = static_cast<int32_t>(i);
    rows[i].seed = i;
  }
  SampleOutput output;
  std::vector<double> times;
  for (int run = 0; run < 12; ++run) {
    const auto begin = std::chrono::steady_clock::now();
    for (int step = 0; step < kSteps; ++step) {
      for (SampleRow& each : rows) each.position = step;
      Must(sampler.Launch(logits, rows, slots, 1, last_tokens));
      if (step > 0) Must(sampler.Wait(output));
    }
    Must(sampler.Wait(output));
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    if (run >= 2) times.push_back(took.count() * 1e6 / kSteps);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

void Run() {
  Must(SelectCudaDevice(0).status());
  const OwnedCudaStream stream = Must(OwnedCudaStream::Create());
  constexpr int64_t kMaxRows = 256;
  const auto sampler = Must(CudaSampler::Create({.vocab_ranges = {{0, kVocabSize}},
                                                 .rank = 0,
                                                 .max_rows = kMaxRows,
                                                 .steps_in_flight = 2,
                                                 .stream = stream.get(),
                                                 .nccl = nullptr}));
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 3);
  std::vector<float> host(static_cast<size_t>(kVocabSize * kMaxRows));
  for (float& x : host) x = normal(random);
  const auto bytes = static_cast<int64_t>(host.size() * sizeof(float));
  const DeviceBuffer logits = Must(DeviceBuffer::Create(bytes, "logits"));
  Must(CopyAsync(logits.data(), host.data(), bytes, stream.get()));
  const DeviceBuffer last_tokens = Must(DeviceBuffer::Create(kMaxRows * 4, "last tokens"));
  Must(Synchronize(stream.get()));
  std::vector<Kind> kinds(6);
  kinds[0].name = "greedy";
  kinds[1].name = "temperature 0.7";
  kinds[2].name = "top_k 20, top_p 0.8";
  kinds[3].name = "top_k 160";
  kinds[4].name = "top_p 0.95";
  kinds[5].name = "greedy, 20 logprobs";
  for (size_t i = 1; i < 5; ++i) kinds[i].row.temperature = 0.7;
  kinds[2].row.top_k = 20;
  kinds[2].row.top_p = 0.8;
  kinds[3].row.top_k = 160;
  kinds[4].row.top_p = 0.95;
  kinds[5].row.num_logprobs = 20;
  for (const Kind& kind : kinds) {
    for (const int64_t rows : {1, 8, 64, 256}) {
      const MatrixView view{logits.data(), DType::kF32, rows, kVocabSize, kVocabSize};
      const double us = MicrosecondsAStep(*sampler, view, kind.row, last_tokens.as<int32_t>());
      std::printf("%-22s %4lld rows %8.1f us a step", kind.name, static_cast<long long>(rows), us);
      if (kind.row.greedy() && kind.row.num_logprobs < 0) {
        std::printf(" %8.1f GB/s", static_cast<double>(rows * kVocabSize * 4) / us * 1e-3);
      }
      std::printf("\n");
    }
  }
}

}  // namespace
}  // namespace lockstep

int main() { lockstep::Run(); }

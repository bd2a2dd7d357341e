// A steady step allocates nothing: operator new is counted here, of this whole test binary.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>
#include <random>
#include <vector>

#include "runtime/logprobs.h"
#include "runtime/sampler.h"

namespace {
std::atomic<int64_t> num_allocations{0};
}  // namespace

void* operator new(size_t size) {
  num_allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
// What std::stable_sort takes; it gives it back to the operator delete below.
void* operator new(size_t size, const std::nothrow_t&) noexcept {
  num_allocations.fetch_add(1, std::memory_order_relaxed);
  return std::malloc(size);
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace lockstep {
namespace {

// One rank, without memory of its own.
class LoneCommunicator : public Communicator {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  std::string host() const override { return ""; }
  int ranks_on_host() const override { return 1; }
  int first_rank_on_host() const override { return rank(); }
  absl::Status AllReduceSum(float*, int64_t) override { return absl::OkStatus(); }
  absl::Status AllGather(const void* send, int64_t bytes, void* recv) override {
    std::memcpy(recv, send, static_cast<size_t>(bytes));
    return absl::OkStatus();
  }
  absl::Status AllGatherV(const void* send, std::span<const int64_t> bytes, void* recv) override {
    return AllGather(send, bytes[0], recv);
  }
  absl::Status GatherV(const void* send, std::span<const int64_t> bytes, void* recv, int) override {
    return AllGather(send, bytes[0], recv);
  }
  absl::Status Broadcast(void*, int64_t, int) override { return absl::OkStatus(); }
  absl::Status Barrier() override { return absl::OkStatus(); }
};

constexpr int64_t kVocab = 6000;
const std::vector<Range> kRanges = {{0, kVocab}};

std::vector<float> RandomLogits(int64_t rows) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 2);
  std::vector<float> logits(static_cast<size_t>(rows * kVocab));
  for (float& x : logits) x = normal(random);
  return logits;
}
MatrixView View(std::vector<float>& logits) {
  return {.data = logits.data(),
          .dtype = DType::kF32,
          .rows = static_cast<int64_t>(logits.size()) / kVocab,
          .cols = kVocab,
          .stride = kVocab};
}

TEST(SamplerAllocationTest, SteadySteps) {
  LoneCommunicator communicator;
  ThreadPool threads(1);  // of several, each grows scratch memory when chance gives it a row
  Sampler sampler(kRanges, communicator, threads);
  std::vector<int32_t> history(100, 5);
  LogitAdjuster adjuster({0, kVocab}, {.repetition_penalty = 1.0001, .bias = {}, .banned_ids = {}},
                         history, 1);
  std::vector<SampleRow> rows;
  for (int32_t i = 0; i < 24; ++i) {
    SampleRow row{.logits_row = i, .seed = static_cast<uint64_t>(i), .temperature = 1};
    switch (i % 6) {
      case 0:
        row.temperature = 0;
        break;
      case 1:
        row.top_p = 0.9;
        break;
      case 2:
        row.top_k = 50;
        break;
      case 3:
        row.min_p = 0.05;
        break;
      case 4:
        row.top_k = 1000;
        row.top_p = 0.8;
        break;
    }
    if (i % 4 == 1) row.adjuster = &adjuster;
    if (i % 2 == 0) row.num_logprobs = 5;
    rows.push_back(row);
  }
  std::vector<float> logits = RandomLogits(static_cast<int64_t>(rows.size()));
  SampleOutput output;
  int64_t before = 0;
  for (int step = 0; step < 12; ++step) {
    if (step == 6) before = num_allocations;
    ASSERT_TRUE(sampler.Sample(View(logits), rows, 0, output).ok());
  }
  EXPECT_GT(before, 0);
  EXPECT_EQ(num_allocations, before);
}

TEST(SamplerAllocationTest, SteadyLogprobs) {
  LoneCommunicator communicator;
  ThreadPool threads(1);  // of several, each grows scratch memory when chance gives it a row
  LogprobComputer computer(kRanges, communicator, threads);
  std::vector<LogprobRow> rows;
  for (int32_t i = 0; i < 9; ++i) rows.push_back({.logits_row = i, .token = i, .num_top = i});
  std::vector<float> logits = RandomLogits(static_cast<int64_t>(rows.size()));
  std::vector<PositionLogprobs> results(rows.size());
  int64_t before = 0;
  for (int step = 0; step < 6; ++step) {
    if (step == 3) before = num_allocations;
    ASSERT_TRUE(computer.Compute(View(logits), rows, results).ok());
  }
  EXPECT_GT(before, 0);
  EXPECT_EQ(num_allocations, before);
}

}  // namespace
}  // namespace lockstep

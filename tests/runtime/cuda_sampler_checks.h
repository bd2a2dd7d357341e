// CudaSampler against Sampler: equal logits must give equal tokens, in every mix of rows.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "parallel/nccl_communicator.h"
#include "runtime/cuda_sampler.h"
#include "tests/runtime/sampler_test_util.h"

namespace lockstep {

inline constexpr float kTestNan = std::numeric_limits<float>::quiet_NaN();

// One rank's GPU.
struct TestRank {
  Communicator& communicator;
  NcclCommunicator* nccl = nullptr;
  CudaStream stream = nullptr;
};

// A step to sample: rows point into `logits` by logits_row.
struct TestStep {
  Rows logits;
  std::vector<SampleRow> rows;
  std::vector<Adjustments> adjustments;  // empty, or one a row; without effect: no adjuster
};

inline std::vector<Range> TestRanges(int64_t vocab_size, int num_ranks) {
  std::vector<Range> ranges;
  for (int64_t r = 0; r < num_ranks; ++r) {  // uneven on purpose
    const int64_t begin = r == 0 ? 0 : ranges.back().end;
    const int64_t end =
        r + 1 == num_ranks ? vocab_size : vocab_size * (2 * r + 2) / (2 * num_ranks + 1);
    ranges.push_back({begin, end});
  }
  return ranges;
}

#define CHECKED(call)                                   \
  do {                                                  \
    const absl::Status checked_status = (call);         \
    ASSERT_TRUE(checked_status.ok()) << checked_status; \
  } while (false)

// Both samplers over one vocabulary.
class SamplerPair {
 public:
  static constexpr int kStepsInFlight = 2;

  // `padding`: columns of NaN behind each row; with an odd stride, rows are aligned in every way.
  SamplerPair(TestRank rank, int64_t vocab_size, int64_t max_rows, int64_t padding)
      : rank_(rank),
        ranges_(TestRanges(vocab_size, rank.communicator.size())),
        mine_(ranges_[static_cast<size_t>(rank.communicator.rank())]),
        stride_(mine_.size() + padding),
        max_rows_(max_rows),
        threads_(1),
        host_(ranges_, rank.communicator, threads_) {
    auto device = CudaSampler::Create({.vocab_ranges = ranges_,
                                       .rank = rank.communicator.rank(),
                                       .max_rows = max_rows,
                                       .steps_in_flight = kStepsInFlight,
                                       .stream = rank.stream,
                                       .nccl = rank.nccl});
    EXPECT_TRUE(device.ok()) << device.status();
    if (device.ok()) device_ = *std::move(device);
    auto tokens = DeviceBuffer::Create(2 * max_rows * 4, "last tokens");
    EXPECT_TRUE(tokens.ok()) << tokens.status();
    if (tokens.ok()) last_tokens_ = *std::move(tokens);
  }

  CudaSampler& device() { return *device_; }

  // COLLECTIVE. Steps that are in flight at once: at most kStepsInFlight.
  void Check(const std::vector<TestStep>& steps, const std::string& what) {
    SCOPED_TRACE(what);
    std::vector<DeviceBuffer> logits(steps.size());
    std::vector<std::vector<LogitAdjuster>> adjusters(steps.size());
    std::vector<std::vector<SampleRow>> rows(steps.size());
    for (size_t s = 0; s < steps.size(); ++s) {
      Upload(steps[s], logits[s]);
      rows[s] = WithAdjusters(steps[s], adjusters[s]);
      ASSERT_TRUE(device_->Supports(rows[s]));
    }
    CHECKED(FillBytesAsync(last_tokens_.data(), 0xee, last_tokens_.size_bytes(), rank_.stream));
    for (size_t s = 0; s < steps.size(); ++s) {
      const MatrixView view{logits[s].data(), DType::kF32, std::ssize(steps[s].logits),
                            mine_.size(), stride_};
      CHECKED(
          device_->Launch(view, rows[s], Slots(steps[s]), Digest(s), last_tokens_.as<int32_t>()));
    }
    for (size_t s = 0; s < steps.size(); ++s) {
      SampleOutput got;
      got.tokens.assign(3, 99);
      CHECKED(device_->Wait(got));
      std::vector<float> local = Local(steps[s]);
      const MatrixView view{local.data(), DType::kF32, std::ssize(steps[s].logits), mine_.size(),
                            stride_};
      SampleOutput expected;
      CHECKED(host_.Sample(view, rows[s], Digest(s), expected));
      Compare(steps[s], got, expected);
      if (s + 1 == steps.size()) CompareLastTokens(steps[s], expected);
    }
  }
  void Check(const TestStep& step, const std::string& what) {
    Check(std::vector<TestStep>{step}, what);
  }

 private:
  uint64_t Digest(size_t step) const {
    return 1000 * (step + 1) + static_cast<uint64_t>(rank_.communicator.rank());
  }
  // Slots are not rows.
  std::vector<int32_t> Slots(const TestStep& step) const {
    std::vector<int32_t> slots;
    for (size_t i = 0; i < step.rows.size(); ++i) {
      slots.push_back(static_cast<int32_t>(2 * max_rows_ - 1 - 2 * static_cast<int64_t>(i)));
    }
    return slots;
  }
  std::vector<float> Local(const TestStep& step) const {
    std::vector<float> local(step.logits.size() * static_cast<size_t>(stride_), kTestNan);
    for (size_t r = 0; r < step.logits.size(); ++r) {
      std::copy_n(step.logits[r].begin() + mine_.begin, mine_.size(),
                  local.begin() + static_cast<int64_t>(r) * stride_);
    }
    return local;
  }
  void Upload(const TestStep& step, DeviceBuffer& to) const {
    const std::vector<float> local = Local(step);
    const auto bytes = static_cast<int64_t>(local.size() * sizeof(float));
    auto buffer = DeviceBuffer::Create(bytes, "logits");
    ASSERT_TRUE(buffer.ok()) << buffer.status();
    to = *std::move(buffer);
    CHECKED(CopyAsync(to.data(), local.data(), bytes, rank_.stream));
    CHECKED(Synchronize(rank_.stream));
  }
  std::vector<SampleRow> WithAdjusters(const TestStep& step,
                                       std::vector<LogitAdjuster>& adjusters) const {
    std::vector<SampleRow> rows = step.rows;
    adjusters.reserve(step.adjustments.size());
    for (size_t i = 0; i < step.adjustments.size(); ++i) {
      const Adjustments& a = step.adjustments[i];
      const bool none = a.repetition == 1 && a.frequency == 0 && a.presence == 0 &&
                        a.bias.empty() && a.banned.empty();
      if (none) continue;
      adjusters.emplace_back(mine_,
                             LogitAdjustments{.repetition_penalty = a.repetition,
                                              .frequency_penalty = a.frequency,
                                              .presence_penalty = a.presence,
                                              .bias = a.bias,
                                              .banned_ids = a.banned,
                                              .banned_below = a.banned_below},
                             a.history, a.prompt_length);
      rows[i].adjuster = &adjusters.back();
    }
    return rows;
  }

  static void Compare(const TestStep& step, const SampleOutput& got, const SampleOutput& expected) {
    EXPECT_EQ(got.digests, expected.digests);
    ASSERT_EQ(got.tokens.size(), expected.tokens.size());
    ASSERT_EQ(got.logprobs.size(), expected.logprobs.size());
    for (size_t i = 0; i < got.tokens.size(); ++i) {
      const SampleRow& row = step.rows[i];
      ASSERT_EQ(got.tokens[i], expected.tokens[i])
          << "row " << i << ": temperature " << row.temperature << ", top_k " << row.top_k
          << ", top_p " << row.top_p << ", min_p " << row.min_p << ", logprobs "
          << row.num_logprobs;
      if (got.logprobs.empty()) continue;
      ExpectNear(got.logprobs[i], expected.logprobs[i], i);
    }
  }
  static void ExpectNear(const PositionLogprobs& got, const PositionLogprobs& expected, size_t i) {
    EXPECT_EQ(got.token.id, expected.token.id) << "row " << i;
    const auto near = [&](float a, float b) {
      return (std::isnan(a) && std::isnan(b)) || a == b ||
             std::abs(a - b) <= 1e-6f * std::max(1.0f, std::abs(b));
    };
    EXPECT_TRUE(near(got.token.logprob, expected.token.logprob))
        << "row " << i << ": " << got.token.logprob << " for " << expected.token.logprob;
    ASSERT_EQ(got.top.size(), expected.top.size()) << "row " << i;
    for (size_t k = 0; k < got.top.size(); ++k) {
      ASSERT_EQ(got.top[k].id, expected.top[k].id) << "row " << i << ", place " << k;
      ASSERT_TRUE(near(got.top[k].logprob, expected.top[k].logprob))
          << "row " << i << ", place " << k << ": " << got.top[k].logprob << " for "
          << expected.top[k].logprob;
    }
  }
  void CompareLastTokens(const TestStep& step, const SampleOutput& expected) const {
    std::vector<int32_t> last(static_cast<size_t>(2 * max_rows_));
    CHECKED(CopyAsync(last.data(), last_tokens_.data(), std::ssize(last) * 4, rank_.stream));
    CHECKED(Synchronize(rank_.stream));
    const std::vector<int32_t> slots = Slots(step);
    for (size_t i = 0; i < slots.size(); ++i) {
      ASSERT_EQ(last[static_cast<size_t>(slots[i])], std::max(expected.tokens[i], 0)) << i;
    }
    for (size_t slot = 0; slot < last.size(); slot += 2) {
      ASSERT_EQ(last[slot], static_cast<int32_t>(0xeeeeeeee)) << "slot " << slot;
    }
  }

  const TestRank rank_;
  const std::vector<Range> ranges_;
  const Range mine_;
  const int64_t stride_;
  const int64_t max_rows_;
  ThreadPool threads_;
  Sampler host_;
  std::unique_ptr<CudaSampler> device_;
  DeviceBuffer last_tokens_;
};

// Rows of all kinds over logits of all kinds, the same on all ranks.
class StepMaker {
 public:
  StepMaker(int64_t vocab_size, uint32_t seed) : vocab_size_(vocab_size), random_(seed) {}

  int64_t Int(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random_);
  }
  template <typename T>
  T Pick(std::initializer_list<T> values) {
    return *(values.begin() + Int(0, std::ssize(values) - 1));
  }

  std::vector<float> Logits() {
    const float minus_infinity = -std::numeric_limits<float>::infinity();
    std::vector<float> logits = RandomLogits(vocab_size_, static_cast<uint32_t>(random_()),
                                             Pick({0.01f, 1.0f, 3.0f, 30.0f, 1e6f}));
    const auto some = [&](float value, int64_t count) {
      for (int64_t i = 0; i < count; ++i) {
        logits[static_cast<size_t>(Int(0, vocab_size_ - 1))] = value;
      }
    };
    switch (Int(0, 11)) {
      case 0:  // ties everywhere
        for (float& x : logits) x = std::round(x);
        break;
      case 1:  // few values, both zeros among them
        for (float& x : logits) x = x > 0 ? 0.0f : -0.0f;
        break;
      case 2:
        some(minus_infinity, vocab_size_);
        break;
      case 3:
        std::fill(logits.begin(), logits.end(), minus_infinity);
        if (Int(0, 1) == 0) some(-7.5f, 1);
        break;
      case 4:
        some(Pick({kTestNan, -minus_infinity}), Int(1, 3));
        break;
      case 5:  // all alike
        std::fill(logits.begin(), logits.end(), Pick({0.0f, -3.0f, 1e30f, -3.4e38f}));
        break;
      default:
        break;
    }
    return logits;
  }

  SampleRow Row(int64_t logits_row) {
    SampleRow row;
    row.logits_row = static_cast<int32_t>(logits_row);
    row.position = static_cast<int32_t>(Int(1, 2000));
    row.seed = random_();
    row.temperature = Pick({0.0, 0.0, 1e-7, 1e-5, 0.02, 0.7, 1.0, 2.0, 100.0});
    row.top_k = Pick<int64_t>({0, 0, 0, 1, 5, 20, 160, 161, 900, vocab_size_, vocab_size_ - 1});
    row.top_p = Pick({1.0, 1.0, 0.999, 0.8, 0.3, 1e-9});
    row.min_p = Pick({0.0, 0.0, 1e-4, 0.1, 1.0});
    row.num_logprobs = Pick({-1, -1, 0, 1, 5, 128});
    return row;
  }

  // Half of the rows have none.
  Adjustments Changes(int32_t position) {
    Adjustments changes;
    if (Int(0, 1) == 0) return changes;
    const auto id = [&] { return static_cast<int32_t>(Int(0, vocab_size_ - 1)); };
    if (Int(0, 1) == 0) {
      changes.repetition = Pick({1.0, 1.3, 0.7});
      changes.frequency = Pick({0.0, 0.5, -1.5});
      changes.presence = Pick({0.0, 1.0, -2.0});
      const int64_t length = Int(0, 3) == 0 ? Int(0, 3000) : Int(0, 30);
      for (int64_t i = 0; i < length; ++i) changes.history.push_back(id());
      changes.prompt_length = Int(0, length);
    }
    for (int64_t i = Int(-3, 3); i > 0; --i) {
      const int32_t biased = id();
      const auto same = [&](const LogitBias& other) { return other.id == biased; };
      if (std::none_of(changes.bias.begin(), changes.bias.end(), same)) {
        changes.bias.push_back({.bias = Pick({-100.0, 3.25, 100.0}), .id = biased});
      }
    }
    for (int64_t i = Int(-3, 3); i > 0; --i) changes.banned.push_back(id());
    changes.banned_below = position + Int(0, 1);
    return changes;
  }

  TestStep Step(int64_t num_rows) {
    TestStep step;
    std::vector<int64_t> order;
    for (int64_t r = 0; r < num_rows; ++r) {
      step.logits.push_back(Logits());
      order.push_back(r);
    }
    std::shuffle(order.begin(), order.end(), random_);
    for (const int64_t r : order) {
      step.rows.push_back(Row(r));
      step.adjustments.push_back(Changes(step.rows.back().position));
      // Positions are at least the length of the history.
      step.rows.back().position += 3000;
      step.adjustments.back().banned_below += 3000;
    }
    return step;
  }

 private:
  const int64_t vocab_size_;
  std::mt19937_64 random_;
};

// COLLECTIVE. Vocabularies of all kinds, batches of all sizes, two steps in flight.
inline void CheckMixes(TestRank rank) {
  uint32_t seed = 0;
  for (const auto& [vocab_size, max_rows, padding] :
       {std::tuple<int64_t, int64_t, int64_t>{3, 40, 0},
        {101, 100, 0},
        {1000, 64, 4},
        {4099, 64, 1},
        {32000, 48, 0},
        {49152, 16, 3},
        {152064, 12, 0}}) {
    SamplerPair pair(rank, vocab_size, max_rows, padding);
    for (int round = 0; round < 6; ++round) {
      StepMaker maker(vocab_size, ++seed);
      const std::vector<TestStep> steps = {maker.Step(maker.Int(1, max_rows)),
                                           maker.Step(round == 0 ? max_rows : 1)};
      pair.Check(steps, absl::StrFormat("vocabulary %d, seed %d", vocab_size, seed));
      if (testing::Test::HasFailure()) return;
    }
  }
}

}  // namespace lockstep

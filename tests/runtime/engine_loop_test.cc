#include "runtime/engine_loop.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <ctime>
#include <limits>
#include <thread>

#include "parallel/local_communicator.h"
#include "tests/parallel/forwarding_communicator.h"
#include "tests/runtime/engine_test_util.h"

namespace lockstep {
namespace {

constexpr int64_t kVocabSize = 20;

// Gives token (last token + 1) mod V the largest logit; faults on request. A batch of one token 13
// has a NaN in the last rank's columns.
class FakeDecoder : public Decoder {
 public:
  FakeDecoder(Range vocab, int64_t fail_at_step) : vocab_(vocab), fail_at_step_(fail_at_step) {}

  absl::Status Forward(const ForwardBatch& batch, const KvPool&,
                       const MatrixView& logits) override {
    if (++step_ == fail_at_step_) return absl::InternalError("the device is gone");
    EXPECT_EQ(logits.rows, static_cast<int64_t>(batch.logits_rows.size()));
    EXPECT_EQ(logits.cols, vocab_.size());
    for (int64_t r = 0; r < logits.rows; ++r) {
      const int32_t token = batch.token_ids[batch.logits_rows[r]];
      for (int64_t id = vocab_.begin; id < vocab_.end; ++id) {
        logits.row<float>(r)[id - vocab_.begin] = id == (token + 1) % kVocabSize ? 5.0f : 1.0f;
      }
      if (token == 13 && vocab_.end == kVocabSize) {
        logits.row<float>(r)[vocab_.size() - 1] = std::numeric_limits<float>::quiet_NaN();
      }
    }
    return absl::OkStatus();
  }
  const AttentionGeometry& Geometry(int64_t) const override { return geometry_; }
  int64_t weight_bytes() const override { return 0; }

 private:
  const Range vocab_;
  const int64_t fail_at_step_;
  int64_t step_ = 0;
  AttentionGeometry geometry_;
};

absl::StatusOr<std::unique_ptr<EngineLoop>> MakeEngine(Communicator& communicator,
                                                       int64_t fail_at_step = 0,
                                                       const EngineLoopOptions& options = {}) {
  std::vector<Range> ranges;
  for (int64_t r = 0; r < communicator.size(); ++r) {
    ranges.push_back(
        {kVocabSize * r / communicator.size(), kVocabSize * (r + 1) / communicator.size()});
  }
  EngineParts parts;
  parts.threads = std::make_unique<ThreadPool>(1);
  parts.decoder = std::make_unique<FakeDecoder>(ranges[communicator.rank()], fail_at_step);
  LOCKSTEP_ASSIGN_OR_RETURN(parts.pool, KvPool::Create({1, 1, 1, 4, DType::kF32}, 30));
  const PlanLimits limits{.max_num_batched_tokens = 32,
                          .max_num_seqs = 4,
                          .max_model_len = 100,
                          .block_size = 4,
                          .num_blocks = 30,
                          .vocab_size = kVocabSize,
                          .max_logits_rows = 0};
  return EngineLoop::Create(limits, options, ranges, std::move(parts), communicator);
}

SamplingParams Greedy(int64_t max_tokens) {
  SamplingParams sampling;
  sampling.temperature = 0;
  sampling.max_tokens = max_tokens;
  return sampling;
}

TEST(EngineLoopTest, NanFailsItsRequestAndNoOther) {
  for (int num_ranks = 1; num_ranks <= 3; ++num_ranks) {
    Result bad, good, scored;
    ExpectOk(RunLocalRanks(num_ranks, [&](Communicator& communicator) -> absl::Status {
      LOCKSTEP_ASSIGN_OR_RETURN(auto engine, MakeEngine(communicator));
      if (communicator.rank() != 0) return engine->Follow();
      LOCKSTEP_RETURN_IF_ERROR(engine->Submit(Recorded({5, 11}, Greedy(9), &bad)).status());
      LOCKSTEP_RETURN_IF_ERROR(engine->Submit(Recorded({1}, Greedy(9), &good)).status());
      LOCKSTEP_RETURN_IF_ERROR(engine->Submit(Scored({1, 2, 13, 4}, kVocabSize, &scored)).status());
      LOCKSTEP_RETURN_IF_ERROR(engine->RunUntilIdle());
      return engine->Stop();
    }));
    EXPECT_EQ(bad.tokens, (std::vector<int32_t>{12, 13}));
    EXPECT_EQ(bad.finish, FinishReason::kError);
    EXPECT_EQ(bad.error, "the logits of position 3 hold NaN or infinity");
    EXPECT_EQ(good.tokens, (std::vector<int32_t>{2, 3, 4, 5, 6, 7, 8, 9, 10}));
    EXPECT_EQ(good.finish, FinishReason::kLength);
    EXPECT_EQ(scored.finish, FinishReason::kError);
    EXPECT_EQ(scored.error, "the logits of position 2 hold NaN or infinity");
  }
}

double CpuSeconds() {
  timespec now;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Requests that come from other threads while the engine sleeps, and the end of the sleep.
TEST(EngineLoopTest, AnIdleEngineSleepsHeartbeatsAndWakes) {
  EngineLoopOptions options;
  options.heartbeat_seconds = 0.02;
  ExpectOk(RunLocalRanks(2, [&](Communicator& communicator) -> absl::Status {
    LOCKSTEP_ASSIGN_OR_RETURN(auto engine, MakeEngine(communicator, 0, options));
    if (communicator.rank() != 0) return engine->Follow();
    Result first, second, cancelled;
    std::thread client([&] {
      EXPECT_TRUE(engine->Submit(Recorded({1}, Greedy(2), &first)).ok());
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      const double before = CpuSeconds();
      std::this_thread::sleep_for(std::chrono::milliseconds(500));
      // Both ranks together, with a heartbeat every 20 ms: far below a core.
      EXPECT_LT(CpuSeconds() - before, 0.25) << "an idle engine burns a core";
      EXPECT_TRUE(engine->Submit(Recorded({4}, Greedy(2), &second)).ok());
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      Request endless = Recorded({1}, Greedy(90), &cancelled);
      endless.on_event = [&, record = endless.on_event](const RequestEvent& event) {
        if (event.finish == FinishReason::kNone) engine->RequestStop();
        return record(event);
      };
      EXPECT_TRUE(engine->Submit(std::move(endless)).ok());
    });
    const absl::Status status = engine->Run();
    client.join();
    LOCKSTEP_RETURN_IF_ERROR(status);
    EXPECT_EQ(first.tokens, (std::vector<int32_t>{2, 3}));
    EXPECT_EQ(second.tokens, (std::vector<int32_t>{5, 6}));
    EXPECT_EQ(cancelled.tokens, std::vector<int32_t>{2});
    EXPECT_EQ(cancelled.finish, FinishReason::kCancelled);
    EXPECT_FALSE(engine->Submit(Recorded({1}, Greedy(2), &first)).ok()) << "it is being stopped";
    return engine->Stop();
  }));
}

// With two steps in flight a rank learns late what became of a step: with an idle rank 0, not
// never.
TEST(EngineLoopTest, ARankLandsItsLastStepAtAHeartbeat) {
  EngineLoopOptions options;
  options.heartbeat_seconds = 0.02;
  options.steps_in_flight = 2;
  std::atomic<const Engine*> follower = nullptr;
  ExpectOk(RunLocalRanks(2, [&](Communicator& communicator) -> absl::Status {
    LOCKSTEP_ASSIGN_OR_RETURN(auto engine, MakeEngine(communicator, 0, options));
    if (communicator.rank() != 0) {
      follower = engine.get();
      return engine->Follow();
    }
    const auto wait_until = [](const auto& holds) {
      for (int i = 0; i < 1000 && !holds(); ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
      return holds();
    };
    Result result;
    std::thread client([&] {
      EXPECT_TRUE(engine->Submit(Recorded({1}, Greedy(2), &result)).ok());
      EXPECT_TRUE(wait_until([&] { return engine->stats().steps == 2; }));
      EXPECT_TRUE(wait_until([&] { return follower.load()->stats().steps == 2; }));
      engine->RequestStop();
    });
    const absl::Status status = engine->Run();
    client.join();
    LOCKSTEP_RETURN_IF_ERROR(status);
    return engine->Stop();
  }));
}

TEST(EngineLoopTest, CancelFromACallbackAndFromAnotherThread) {
  for (const int steps_in_flight : {1, 2}) {
    EngineLoopOptions options;
    options.steps_in_flight = steps_in_flight;
    Result a, b, unaffected;
    ExpectOk(RunLocalRanks(2, [&](Communicator& communicator) -> absl::Status {
      LOCKSTEP_ASSIGN_OR_RETURN(auto engine, MakeEngine(communicator, 0, options));
      if (communicator.rank() != 0) return engine->Follow();
      Request first = Recorded({0}, Greedy(50), &a);
      RequestId second_id = 0;
      first.on_event = [&, record = first.on_event](const RequestEvent& event) {
        if (event.token == 3) engine->Cancel(second_id);
        if (event.token == 5) std::thread([&] { engine->Cancel(event.id); }).join();
        return record(event);
      };
      LOCKSTEP_RETURN_IF_ERROR(engine->Submit(std::move(first)).status());
      LOCKSTEP_ASSIGN_OR_RETURN(second_id, engine->Submit(Recorded({0}, Greedy(50), &b)));
      LOCKSTEP_RETURN_IF_ERROR(engine->Submit(Recorded({0}, Greedy(9), &unaffected)).status());
      LOCKSTEP_RETURN_IF_ERROR(engine->RunUntilIdle());
      const SchedulerStats stats = engine->stats().scheduler;
      EXPECT_EQ(stats.num_free_blocks, 30);
      EXPECT_EQ(stats.num_running + stats.num_waiting, 0);
      return engine->Stop();
    }));
    EXPECT_EQ(a.finish, FinishReason::kCancelled);
    EXPECT_EQ(b.finish, FinishReason::kCancelled);
    EXPECT_GE(a.tokens.size(), 5u);
    EXPECT_LE(a.tokens.size(), 6u);
    EXPECT_LE(b.tokens.size(), 4u);
    EXPECT_EQ(unaffected.tokens, (std::vector<int32_t>{1, 2, 3, 4, 5, 6, 7, 8, 9}));
  }
}

// What was accepted before the wish to stop gets its last event, be it the callback of a cancelled
// request that submits it.
TEST(EngineLoopTest, WhatIsAcceptedBeforeTheStopIsCancelled) {
  Result first, second;
  ExpectOk(RunLocalRanks(1, [&](Communicator& communicator) -> absl::Status {
    LOCKSTEP_ASSIGN_OR_RETURN(auto engine, MakeEngine(communicator));
    Request request = Recorded({1}, Greedy(90), &first);
    request.on_event = [&, record = request.on_event](const RequestEvent& event) {
      if (event.finish == FinishReason::kNone) {
        engine->Cancel(event.id);
      } else {
        EXPECT_TRUE(engine->Submit(Recorded({5}, Greedy(3), &second)).ok());
        engine->RequestStop();
      }
      return record(event);
    };
    LOCKSTEP_RETURN_IF_ERROR(engine->Submit(std::move(request)).status());
    LOCKSTEP_RETURN_IF_ERROR(engine->Run());
    return engine->Stop();
  }));
  EXPECT_EQ(first.finish, FinishReason::kCancelled);
  EXPECT_EQ(second.finish, FinishReason::kCancelled);
}

// A communicator that garbles one bit of a plan that rank 1 receives: of the seed or the bias of a
// new request, which every check of the plan lets pass.
constexpr uint64_t kMarkedSeed = 0x5eed5eed5eed5eed;
constexpr double kMarkedBias = 99.123456789;

class GarblingCommunicator : public ForwardingCommunicator {
 public:
  using ForwardingCommunicator::ForwardingCommunicator;
  absl::Status Broadcast(void* data, int64_t bytes, int root) override {
    LOCKSTEP_RETURN_IF_ERROR(ForwardingCommunicator::Broadcast(data, bytes, root));
    if (rank() != 1) return absl::OkStatus();
    for (const uint64_t marker : {kMarkedSeed, std::bit_cast<uint64_t>(kMarkedBias)}) {
      char* const begin = static_cast<char*>(data);
      char* const found = std::search(begin, begin + bytes, reinterpret_cast<const char*>(&marker),
                                      reinterpret_cast<const char*>(&marker) + sizeof(marker));
      if (found != begin + bytes) *found ^= 1;
    }
    return absl::OkStatus();
  }
};

class PartingTest : public testing::TestWithParam<bool> {};

TEST_P(PartingTest, ARankThatPartsIsNamedByAll) {
  const auto statuses = RunLocalRanks(3, [&](Communicator& inner) -> absl::Status {
    GarblingCommunicator communicator(inner);
    LOCKSTEP_ASSIGN_OR_RETURN(auto engine, MakeEngine(communicator));
    if (communicator.rank() != 0) return engine->Follow();
    Result result;
    SamplingParams sampling = Greedy(9);
    LOCKSTEP_RETURN_IF_ERROR(engine->Submit(Recorded({1}, sampling, &result)).status());
    LOCKSTEP_RETURN_IF_ERROR(engine->RunUntilIdle());
    if (GetParam()) sampling.seed = kMarkedSeed;
    if (!GetParam()) sampling.logit_bias = {{15, kMarkedBias}};
    LOCKSTEP_RETURN_IF_ERROR(engine->Submit(Recorded({1}, sampling, &result)).status());
    return engine->RunUntilIdle();
  });
  for (const absl::Status& status : statuses) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
    EXPECT_NE(std::string(status.message()).find("step 10: rank 1 has parted"), std::string::npos)
        << status;
  }
}

INSTANTIATE_TEST_SUITE_P(SeedAndBias, PartingTest, testing::Bool());

// A fault inside a step: the rank that met it says so, and nobody hangs.
TEST(EngineLoopTest, FaultInAStepEndsAllRanks) {
  for (const int failing : {0, 1, 2}) {
    const auto statuses = RunLocalRanks(3, [&](Communicator& communicator) -> absl::Status {
      LOCKSTEP_ASSIGN_OR_RETURN(auto engine,
                                MakeEngine(communicator, communicator.rank() == failing ? 3 : 0));
      if (communicator.rank() != 0) return engine->Follow();
      Result result;
      LOCKSTEP_RETURN_IF_ERROR(engine->Submit(Recorded({1}, Greedy(9), &result)).status());
      const absl::Status status = engine->RunUntilIdle();
      EXPECT_FALSE(status.ok());
      EXPECT_EQ(engine->Stop(), status) << "a broken engine sends nothing more";
      EXPECT_EQ(engine->Submit(Recorded({1}, Greedy(9), &result)).status(), status);
      return status;
    });
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_FALSE(statuses[rank].ok());
      EXPECT_EQ(rank == failing, statuses[rank].message() == "the device is gone");
    }
  }
}

TEST(EngineLoopTest, CallbacksMaySubmit) {
  Result second;
  ExpectOk(RunLocalRanks(2, [&](Communicator& communicator) -> absl::Status {
    LOCKSTEP_ASSIGN_OR_RETURN(auto engine, MakeEngine(communicator));
    if (communicator.rank() != 0) return engine->Follow();
    Request first;
    first.prompt = {1};
    first.sampling = Greedy(1);
    first.on_event = [&](const RequestEvent&) {
      EXPECT_TRUE(engine->Submit(Recorded({7}, Greedy(2), &second)).ok());
      return true;
    };
    LOCKSTEP_RETURN_IF_ERROR(engine->Submit(std::move(first)).status());
    LOCKSTEP_RETURN_IF_ERROR(engine->RunUntilIdle());
    return engine->Stop();
  }));
  EXPECT_EQ(second.tokens, (std::vector<int32_t>{8, 9}));
}

}  // namespace
}  // namespace lockstep

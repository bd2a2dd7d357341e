#include "runtime/engine_loop.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "parallel/local_communicator.h"
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
                                                       int64_t fail_at_step = 0) {
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
  return EngineLoop::Create(limits, ranges, std::move(parts), communicator);
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

TEST(EngineLoopTest, HeartbeatsDoNothing) {
  ExpectOk(RunLocalRanks(2, [&](Communicator& communicator) -> absl::Status {
    LOCKSTEP_ASSIGN_OR_RETURN(auto engine, MakeEngine(communicator));
    if (communicator.rank() != 0) return engine->Follow();
    StepPlan heartbeat;
    heartbeat.kind = StepKind::kHeartbeat;
    PlanBuffer buffer;
    for (int i = 0; i < 3; ++i) {
      LOCKSTEP_RETURN_IF_ERROR(BroadcastPlan(communicator, heartbeat, buffer));
    }
    Result result;
    LOCKSTEP_RETURN_IF_ERROR(engine->Submit(Recorded({1}, Greedy(2), &result)).status());
    LOCKSTEP_RETURN_IF_ERROR(engine->RunUntilIdle());
    EXPECT_EQ(result.tokens.size(), 2u);
    return engine->Stop();
  }));
}

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

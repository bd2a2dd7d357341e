#include "runtime/step_plan.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "parallel/local_communicator.h"
#include "runtime/batch_state.h"
#include "tests/parallel/forwarding_communicator.h"

namespace lockstep {
namespace {

PlanLimits TestLimits() {
  return {.max_num_batched_tokens = 512,
          .max_num_seqs = 8,
          .max_model_len = 1000,
          .block_size = 4,
          .num_blocks = 600,
          .vocab_size = 97,
          .max_logits_rows = 64};
}

// Three requests: a prefill of 6 tokens in slot 3 (blocks 3, 1), sampled, 2 tokens at positions 4
// and 5 of slot 0, scored, and 3 tokens in slot 5, whose first 2 are known, with prompt logprobs.
StepPlan TestPlan() {
  StepPlan plan;
  plan.step = 7;
  plan.freed_slots = {3, 5};
  plan.new_requests = {{.seed = 99,
                        .temperature = 0.5,
                        .top_p = 0.9,
                        .top_k = 40,
                        .slot = 3,
                        .prompt_length = 6,
                        .num_bias = 1},
                       {.repetition_penalty = 1.5,
                        .slot = 5,
                        .prompt_length = 5,
                        .num_computed = 2,
                        .banned_below = 9,
                        .num_logprobs = 2,
                        .num_prompt_logprobs = 3,
                        .num_history = 5,
                        .num_banned = 2}};
  plan.history = {20, 21, 22, 23, 24};
  plan.logit_bias = {{.bias = 1.5, .id = 96}};
  plan.banned_ids = {0, 96};
  plan.block_runs = {{.slot = 3, .first_index = 0, .count = 2},
                     {.slot = 0, .first_index = 1, .count = 1},
                     {.slot = 5, .first_index = 0, .count = 2}};
  plan.blocks = {3, 1, 17, 30, 31};
  plan.poisoned_blocks = {1, 599};
  plan.block_copies = {{.source = 17, .target = 30}};
  plan.token_ids = {5, 6, 7, 8, 9, 10, 1, 96, 22, 23, 24};
  plan.positions = {0, 1, 2, 3, 4, 5, 4, 5, 2, 3, 4};
  plan.slot_mapping = {12, 13, 14, 15, 4, 5, 68, 69, 122, 123, 124};
  plan.request_slots = {3, 0, 5};
  plan.outputs = {StepOutput::kSample, StepOutput::kScore, StepOutput::kPromptLogprobsAndSample};
  plan.seq_lens = {6, 6, 5};
  plan.query_start_loc = {0, 6, 8, 11};
  plan.logits_rows = {5, 6, 7, 8, 9, 10};
  plan.logprob_targets = {23, 24, -1};
  return plan;
}

std::span<const std::byte> Encode(const StepPlan& plan, PlanBuffer& buffer) {
  const int64_t bytes = EncodePlan(plan, buffer);
  EXPECT_EQ(bytes, EncodedBytes(plan));
  return {buffer.data(), static_cast<size_t>(bytes)};
}

template <typename A, typename B>
void ExpectSame(const A& a, const B& b, const char* name) {
  ASSERT_EQ(a.size(), b.size()) << name;
  if (!a.empty()) {
    EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(a[0])), 0) << name;
  }
}

void ExpectSamePlan(const StepPlan& plan, const StepPlanView& view) {
  EXPECT_EQ(plan.step, view.step);
  EXPECT_EQ(plan.kind, view.kind);
  ExpectSame(plan.freed_slots, view.freed_slots, "freed_slots");
  ExpectSame(plan.new_requests, view.new_requests, "new_requests");
  ExpectSame(plan.history, view.history, "history");
  ExpectSame(plan.logit_bias, view.logit_bias, "logit_bias");
  ExpectSame(plan.banned_ids, view.banned_ids, "banned_ids");
  ExpectSame(plan.block_runs, view.block_runs, "block_runs");
  ExpectSame(plan.blocks, view.blocks, "blocks");
  ExpectSame(plan.poisoned_blocks, view.poisoned_blocks, "poisoned_blocks");
  ExpectSame(plan.block_copies, view.block_copies, "block_copies");
  ExpectSame(plan.slot_mapping, view.slot_mapping, "slot_mapping");
  ExpectSame(plan.token_ids, view.token_ids, "token_ids");
  ExpectSame(plan.positions, view.positions, "positions");
  ExpectSame(plan.request_slots, view.request_slots, "request_slots");
  ExpectSame(plan.outputs, view.outputs, "outputs");
  ExpectSame(plan.seq_lens, view.seq_lens, "seq_lens");
  ExpectSame(plan.query_start_loc, view.query_start_loc, "query_start_loc");
  ExpectSame(plan.logits_rows, view.logits_rows, "logits_rows");
  ExpectSame(plan.logprob_targets, view.logprob_targets, "logprob_targets");
}

TEST(StepPlanTest, RoundTrip) {
  const StepPlan plan = TestPlan();
  PlanBuffer buffer;
  const auto view = DecodePlan(Encode(plan, buffer), TestLimits());
  ASSERT_TRUE(view.ok()) << view.status();
  ExpectSamePlan(plan, *view);
  ExpectSamePlan(plan, View(plan));
}

TEST(StepPlanTest, ClearedPlanIsEmpty) {
  StepPlan plan = TestPlan();
  plan.Clear();
  EXPECT_EQ(plan.num_tokens(), 0);
  EXPECT_EQ(EncodedBytes(plan), EncodedBytes(StepPlan()));
}

// A change to the valid plan and what the message must name.
struct BadCase {
  const char* expected;
  void (*change)(StepPlan&);
};

TEST(StepPlanTest, ContradictionsAreRefusedByName) {
  const BadCase cases[] = {
      {"token_ids[7]", [](StepPlan& p) { p.token_ids[7] = 97; }},
      {"token_ids[0]", [](StepPlan& p) { p.token_ids[0] = -2; }},
      {"positions[2]", [](StepPlan& p) { p.positions[2] = 3; }},
      {"slot_mapping[1]", [](StepPlan& p) { p.slot_mapping[1] = 2400; }},
      {"slot_mapping[1]", [](StepPlan& p) { p.slot_mapping[1] = -1; }},
      {"request_slots[1]", [](StepPlan& p) { p.request_slots[1] = 8; }},
      {"names slot 3 twice", [](StepPlan& p) { p.request_slots[1] = 3; }},
      {"names slot 5 twice", [](StepPlan& p) { p.freed_slots[0] = 5; }},
      {"outputs[0]", [](StepPlan& p) { p.outputs[0] = static_cast<StepOutput>(5); }},
      {"seq_len", [](StepPlan& p) { p.seq_lens[0] = 1001; }},
      {"seq_len", [](StepPlan& p) { p.seq_lens[0] = 5; }},
      {"query_start_loc", [](StepPlan& p) { p.query_start_loc[0] = 1; }},
      {"request 0 has rows", [](StepPlan& p) { p.query_start_loc[1] = 0; }},
      {"request 0 has rows", [](StepPlan& p) { p.query_start_loc[1] = 2000000000; }},
      {"logits_rows", [](StepPlan& p) { p.logits_rows[1] = 5; }},
      {"logits_rows", [](StepPlan& p) { p.logits_rows.push_back(7); }},
      {"logits_rows", [](StepPlan& p) { p.logits_rows.pop_back(); }},
      {"logits_rows", [](StepPlan& p) { p.logits_rows.assign(65, 0); }},
      {"counts", [](StepPlan& p) { p.positions.pop_back(); }},
      {"counts", [](StepPlan& p) { p.query_start_loc.pop_back(); }},
      {"history[1]", [](StepPlan& p) { p.history[1] = 97; }},
      {"history", [](StepPlan& p) { p.history.pop_back(); }},
      {"logit_bias[0]", [](StepPlan& p) { p.logit_bias[0].id = -1; }},
      {"logit_bias[0]", [](StepPlan& p) { p.logit_bias[0].bias = 1.0 / 0.0; }},
      {"banned_ids[1]", [](StepPlan& p) { p.banned_ids[1] = 97; }},
      {"banned_ids", [](StepPlan& p) { p.banned_ids.push_back(1); }},
      {"poisoned_blocks[0]", [](StepPlan& p) { p.poisoned_blocks[0] = -1; }},
      {"block_copies[0]", [](StepPlan& p) { p.block_copies[0].target = 600; }},
      {"block_copies[0]", [](StepPlan& p) { p.block_copies[0].target = 17; }},
      {"logprob_targets[2]", [](StepPlan& p) { p.logprob_targets[2] = 97; }},
      {"logprob_targets", [](StepPlan& p) { p.logprob_targets.pop_back(); }},
      {"blocks[2]", [](StepPlan& p) { p.blocks[2] = 600; }},
      {"block_runs name", [](StepPlan& p) { p.blocks.pop_back(); }},
      {"block_runs[1]", [](StepPlan& p) { p.block_runs[1].first_index = 250; }},
      {"block_runs[1]", [](StepPlan& p) { p.block_runs[1].count = 0; }},
      {"new_requests[0]", [](StepPlan& p) { p.new_requests[0].top_p = 0; }},
      {"new_requests[0]", [](StepPlan& p) { p.new_requests[0].temperature = 0.0 / 0.0; }},
      {"new_requests[0]", [](StepPlan& p) { p.new_requests[0].slot = -1; }},
      {"new_requests[0]", [](StepPlan& p) { p.new_requests[0].min_p = 1.5; }},
      {"new_requests[0]", [](StepPlan& p) { p.new_requests[0].repetition_penalty = 0; }},
      {"new_requests[0]", [](StepPlan& p) { p.new_requests[0].presence_penalty = 0.0 / 0.0; }},
      {"new_requests[1]", [](StepPlan& p) { p.new_requests[1].num_computed = 1000; }},
      {"new_requests[1]", [](StepPlan& p) { p.new_requests[1].num_history = -1; }},
      {"new_requests[1]", [](StepPlan& p) { p.new_requests[1].num_logprobs = 129; }},
      {"new_requests[0]", [](StepPlan& p) { p.new_requests[0].prompt_length = 0; }},
      {"entries in token_ids", [](StepPlan& p) { p.token_ids.assign(513, 1); }},
      {"stop or heartbeat", [](StepPlan& p) { p.kind = StepKind::kStop; }},
      {"kind", [](StepPlan& p) { p.kind = static_cast<StepKind>(9); }},
      {"without tokens", [](StepPlan& p) { p.Clear(); }},
  };
  for (const BadCase& bad : cases) {
    StepPlan plan = TestPlan();
    bad.change(plan);
    PlanBuffer buffer;
    const auto view = DecodePlan(Encode(plan, buffer), TestLimits());
    ASSERT_FALSE(view.ok()) << bad.expected;
    EXPECT_NE(std::string(view.status().message()).find(bad.expected), std::string::npos)
        << view.status() << " should name " << bad.expected;
  }
}

TEST(StepPlanTest, EveryTruncationIsRefused) {
  PlanBuffer buffer;
  const auto bytes = Encode(TestPlan(), buffer);
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_FALSE(DecodePlan(bytes.first(size), TestLimits()).ok()) << size;
  }
}

// Reads all that a view spans, so that the address sanitizer sees a span that leaves the buffer.
uint64_t Touch(const StepPlanView& view) {
  uint64_t sum = 0;
  const auto add = [&](const auto& field) {
    for (const std::byte b : std::as_bytes(field)) sum += static_cast<uint64_t>(b);
  };
  add(view.freed_slots);
  add(view.new_requests);
  add(view.history);
  add(view.logit_bias);
  add(view.banned_ids);
  add(view.block_runs);
  add(view.blocks);
  add(view.poisoned_blocks);
  add(view.block_copies);
  add(view.slot_mapping);
  add(view.token_ids);
  add(view.positions);
  add(view.request_slots);
  add(view.outputs);
  add(view.seq_lens);
  add(view.query_start_loc);
  add(view.logits_rows);
  add(view.logprob_targets);
  return sum;
}

// Decodes a copy of exactly this size, and applies what is accepted to a batch state: nothing may
// crash, and an accepted plan must stay within the limits.
bool DecodeAndApply(const std::vector<uint8_t>& bytes) {
  std::vector<uint64_t> words((bytes.size() + 7) / 8);
  std::copy(bytes.begin(), bytes.end(), reinterpret_cast<uint8_t*>(words.data()));
  const auto view =
      DecodePlan({reinterpret_cast<const std::byte*>(words.data()), bytes.size()}, TestLimits());
  if (!view.ok()) return false;
  Touch(*view);
  if (view->kind == StepKind::kRun) {
    BatchState state(TestLimits(), {0, 97});
    const absl::Status applied = state.Apply(*view);  // an error or not, but no crash
    if (applied.ok()) state.Accept(std::vector<int32_t>(state.sample_rows().size(), 1));
  }
  return true;
}

TEST(StepPlanTest, RandomBytesNeverCrash) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 20000; ++round) {
    std::vector<uint8_t> bytes(random() % 400);
    for (uint8_t& b : bytes) b = static_cast<uint8_t>(random());
    EXPECT_FALSE(DecodeAndApply(bytes));
  }
}

TEST(StepPlanTest, MutatedPlansNeverCrash) {
  std::mt19937_64 random(2);
  PlanBuffer buffer;
  const auto valid = Encode(TestPlan(), buffer);
  int accepted = 0;
  for (int round = 0; round < 200000; ++round) {
    std::vector<uint8_t> bytes(valid.size());
    std::memcpy(bytes.data(), valid.data(), valid.size());
    for (uint64_t mutation = random() % 3 + 1; mutation-- > 0;) {
      const size_t at = random() % bytes.size();
      if (random() % 2 == 0) {
        bytes[at] = static_cast<uint8_t>(random());
      } else {  // a whole 32-bit field, often at an extreme
        const uint32_t values[] = {0,          1,          0x7fffffff,
                                   0x80000000, 0xffffffff, static_cast<uint32_t>(random())};
        std::memcpy(bytes.data() + at / 4 * 4, &values[random() % 6], 4);
      }
    }
    if (DecodeAndApply(bytes)) ++accepted;
  }
  // Changes of values alone (a seed, a token) stay valid; most others do not.
  EXPECT_GT(accepted, 1000);
  EXPECT_LT(accepted, 150000);
}

// Counts the collectives that a plan takes.
class CountingCommunicator : public ForwardingCommunicator {
 public:
  using ForwardingCommunicator::ForwardingCommunicator;
  absl::Status Broadcast(void* data, int64_t bytes, int root) override {
    ++num_broadcasts;
    return ForwardingCommunicator::Broadcast(data, bytes, root);
  }

  int num_broadcasts = 0;
};

TEST(StepPlanTest, TravelsInOneBroadcastOrTwo) {
  StepPlan small = TestPlan();
  StepPlan large = TestPlan();  // one request of 500 tokens
  large.Clear();
  large.step = 8;
  large.new_requests = {{.slot = 1, .prompt_length = 500}};
  large.block_runs = {{.slot = 1, .first_index = 0, .count = 125}};
  for (int32_t i = 0; i < 125; ++i) large.blocks.push_back(i);
  for (int32_t i = 0; i < 500; ++i) {
    large.token_ids.push_back(i % 97);
    large.positions.push_back(i);
    large.slot_mapping.push_back(i);
  }
  large.request_slots = {1};
  large.outputs = {StepOutput::kSample};
  large.seq_lens = {500};
  large.query_start_loc = {0, 500};
  large.logits_rows = {499};
  ASSERT_GT(EncodedBytes(large), kPlanFirstPartBytes);

  const auto statuses = RunLocalRanks(3, [&](Communicator& inner) -> absl::Status {
    CountingCommunicator communicator(inner);
    PlanBuffer buffer;
    for (const auto& [plan, broadcasts] : {std::pair(&small, 1), std::pair(&large, 2)}) {
      communicator.num_broadcasts = 0;
      if (communicator.rank() == 0) {
        LOCKSTEP_RETURN_IF_ERROR(BroadcastPlan(communicator, *plan, buffer));
      } else {
        LOCKSTEP_ASSIGN_OR_RETURN(const StepPlanView view,
                                  ReceivePlan(communicator, TestLimits(), buffer));
        ExpectSamePlan(*plan, view);
      }
      EXPECT_EQ(communicator.num_broadcasts, broadcasts);
    }
    return absl::OkStatus();
  });
  for (const absl::Status& status : statuses) EXPECT_TRUE(status.ok()) << status;
}

TEST(BatchStateTest, PlanOutOfOrderIsAnError) {
  BatchState state(TestLimits(), {0, 97});
  StepPlan plan = TestPlan();
  EXPECT_EQ(state.Apply(View(plan)).code(), absl::StatusCode::kInternal) << "slot 3 was free";

  // A request of 6 tokens is known after this.
  plan = TestPlan();
  plan.step = 8;
  plan.freed_slots.clear();
  plan.new_requests.resize(1);
  plan.history.clear();
  plan.banned_ids.clear();
  plan.block_copies.clear();
  plan.logprob_targets.clear();
  plan.block_runs = {{.slot = 3, .first_index = 0, .count = 2}};
  plan.blocks = {3, 1};
  for (auto* field : {&plan.token_ids, &plan.positions}) field->resize(6);
  plan.slot_mapping.resize(6);
  plan.request_slots = {3};
  plan.outputs = {StepOutput::kSample};
  plan.seq_lens = {6};
  plan.query_start_loc = {0, 6};
  plan.logits_rows = {5};
  ASSERT_TRUE(state.Apply(View(plan)).ok()) << state.Apply(View(plan));
  const ForwardBatch& batch = state.forward_batch();
  EXPECT_EQ(batch.attention.BlockTable(0)[0], 3);
  EXPECT_EQ(batch.attention.BlockTable(0)[1], 1);
  EXPECT_EQ(std::vector<int32_t>(batch.rope_lengths.begin(), batch.rope_lengths.end()),
            std::vector<int32_t>(6, 6));
  ASSERT_EQ(state.sample_rows().size(), 1u);
  EXPECT_EQ(state.sample_rows()[0].position, 6);
  EXPECT_EQ(state.sample_rows()[0].top_k, 40);
  EXPECT_NE(state.sample_rows()[0].adjuster, nullptr) << "it has a bias";

  EXPECT_FALSE(state.Apply(View(plan)).ok()) << "the same step twice";
  StepPlan next;
  next.step = 9;
  next.token_ids = {1};
  next.positions = {6};
  next.slot_mapping = {6};
  next.request_slots = {3};
  next.outputs = {StepOutput::kSample};
  next.seq_lens = {7};
  next.query_start_loc = {0, 1};
  next.logits_rows = {0};
  StepPlan skipped = next;  // position 7 without 6
  skipped.positions = {7};
  skipped.seq_lens = {8};
  skipped.slot_mapping = {7};
  EXPECT_FALSE(BatchState(state).Apply(View(skipped)).ok());
  StepPlan elsewhere = next;  // the write map disagrees with the block table
  elsewhere.slot_mapping = {7};
  EXPECT_FALSE(BatchState(state).Apply(View(elsewhere)).ok());
  StepPlan unknown = next;  // nothing has been sampled yet
  unknown.token_ids = {kLastSampledToken};
  EXPECT_FALSE(BatchState(state).Apply(View(unknown)).ok());

  // The token that was sampled meanwhile takes the place of the one that the plan cannot name.
  state.Accept(std::vector<int32_t>{42});
  EXPECT_TRUE(state.Apply(View(unknown)).ok());
  EXPECT_EQ(state.forward_batch().token_ids[0], 42);
  EXPECT_EQ(state.forward_batch().rope_lengths[0], 7);
}

// A step of one token of the request in slot 3, which `first` filled.
StepPlan NextToken(uint64_t step, int32_t position) {
  StepPlan plan;
  plan.step = step;
  plan.token_ids = {kLastSampledToken};
  plan.positions = {position};
  plan.slot_mapping = {position};
  plan.request_slots = {3};
  plan.outputs = {StepOutput::kSample};
  plan.seq_lens = {position + 1};
  plan.query_start_loc = {0, 1};
  plan.logits_rows = {0};
  return plan;
}
StepPlan FirstTokens(uint64_t step) {
  StepPlan plan = NextToken(step, 0);
  plan.token_ids = {5};
  plan.new_requests = {{.slot = 3, .prompt_length = 1}};
  plan.block_runs = {{.slot = 3, .first_index = 0, .count = 2}};
  plan.blocks = {0, 1};
  return plan;
}
std::vector<int32_t> Token(int32_t id) { return {id}; }

// Two steps in flight: whether a rank lands a step early or late, it tells the same digest, which
// covers the tokens of all steps but the last two.
TEST(BatchStateTest, DigestsDoNotDependOnWhenStepsLand) {
  BatchState early(TestLimits(), {0, 97}, LastTokens::kOnDevice, 2);
  BatchState late = early;
  BatchState wrong = early;
  for (BatchState* state : {&early, &late, &wrong}) {
    ASSERT_TRUE(state->Apply(View(FirstTokens(1))).ok());
  }
  for (int32_t step = 2; step < 8; ++step) {
    const StepPlan plan = NextToken(static_cast<uint64_t>(step), step - 1);
    early.Accept(Token(10 + step));
    if (step > 2) late.Accept(Token(10 + step - 1));
    if (step > 2) wrong.Accept(Token(10 + step - (step == 4 ? 2 : 1)));  // of step 3
    for (BatchState* state : {&early, &late, &wrong}) {
      ASSERT_TRUE(state->Apply(View(plan)).ok());
      EXPECT_EQ(state->forward_batch().token_ids[0], -1 - 3) << "found on the device";
    }
    EXPECT_EQ(early.digest(), late.digest()) << step;
    EXPECT_EQ(early.digest() == wrong.digest(), step < 4) << step;
  }
}

// A token of a step in flight does not go to who has its slot by then.
TEST(BatchStateTest, TokensThatLandLateGoToTheirOwnRequest) {
  BatchState state(TestLimits(), {0, 97}, LastTokens::kOnDevice, 2);
  ASSERT_TRUE(state.Apply(View(FirstTokens(1))).ok());
  StepPlan next = FirstTokens(2);
  next.freed_slots = {3};
  next.new_requests[0].presence_penalty = 1;
  ASSERT_TRUE(state.Apply(View(next)).ok());
  state.Accept(Token(42));
  std::vector<float> logits(97, 2.0f);
  ASSERT_NE(state.sample_rows()[0].adjuster, nullptr);
  state.sample_rows()[0].adjuster->Apply(1, logits.data());
  EXPECT_EQ(logits[42], 2.0f);
  state.Accept(Token(43));
  ASSERT_TRUE(state.Apply(View(NextToken(3, 1))).ok());
  state.sample_rows()[0].adjuster->Apply(2, logits.data());
  EXPECT_EQ(logits[42], 2.0f);
  EXPECT_EQ(logits[43], 1.0f);
}

}  // namespace
}  // namespace lockstep

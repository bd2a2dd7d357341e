#include "runtime/scheduler.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "cache/block_table.h"
#include "runtime/sampler.h"

namespace lockstep {

struct Scheduler::Entry {
  RequestId id = 0;
  Request request;
  std::vector<int32_t> tokens;  // prompt (moved out of the request), then generated
  int64_t prompt_length = 0;
  int64_t max_length = 0;    // prompt + generated tokens at most
  int64_t num_computed = 0;  // tokens whose K and V are in the pool (after the planned step)
  int32_t slot = -1;
  std::vector<BlockId> blocks;  // reserved for max_length
  int64_t num_blocks_sent = 0;  // entries the other ranks know
  bool finished = false;
  std::string score_error;  // why a scored prompt failed

  int64_t num_left() const { return static_cast<int64_t>(tokens.size()) - num_computed; }
  bool scores() const { return request.on_prompt_logits != nullptr; }
};

namespace {

absl::Status CheckSampling(const SamplingParams& sampling, int64_t vocab_size) {
  if (!(sampling.temperature >= 0) || !std::isfinite(sampling.temperature)) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "temperature is %g: it must be a finite number of at least 0", sampling.temperature));
  }
  if (!(sampling.top_p > 0) || !(sampling.top_p <= 1)) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "top_p is %g: it must be above 0 and at most 1 (1 turns it off)", sampling.top_p));
  }
  if (sampling.top_k < 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("top_k is %d: it must be at least 0 (0 turns it off)", sampling.top_k));
  }
  if (sampling.max_tokens < 1) {
    return absl::InvalidArgumentError(
        absl::StrFormat("max_tokens is %d: it must be at least 1", sampling.max_tokens));
  }
  for (const int32_t id : sampling.stop_token_ids) {
    if (id < 0 || id >= vocab_size) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "stop token id %d is outside the vocabulary of %d tokens", id, vocab_size));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckPrompt(const std::vector<int32_t>& prompt, int64_t vocab_size) {
  if (prompt.empty()) {
    return absl::InvalidArgumentError("the prompt is empty: it must hold at least one token");
  }
  for (size_t i = 0; i < prompt.size(); ++i) {
    if (prompt[i] < 0 || prompt[i] >= vocab_size) {
      return absl::InvalidArgumentError(
          absl::StrFormat("token %d of the prompt is %d, outside the vocabulary of %d tokens", i,
                          prompt[i], vocab_size));
    }
  }
  return absl::OkStatus();
}

}  // namespace

Scheduler::Scheduler(const PlanLimits& limits, int64_t max_score_rows)
    : limits_(limits), max_score_rows_(max_score_rows), blocks_(limits.num_blocks) {
  LOCKSTEP_CHECK(max_score_rows >= 1);
  LOCKSTEP_CHECK(limits.max_logits_rows >=
                 std::min(limits.max_num_batched_tokens, limits.max_num_seqs + max_score_rows));
  for (int64_t slot = limits.max_num_seqs; slot-- > 0;) {
    free_slots_.push_back(static_cast<int32_t>(slot));
  }
}

Scheduler::~Scheduler() = default;

absl::StatusOr<RequestId> Scheduler::Submit(Request request) {
  LOCKSTEP_RETURN_IF_ERROR(CheckPrompt(request.prompt, limits_.vocab_size));
  LOCKSTEP_RETURN_IF_ERROR(CheckSampling(request.sampling, limits_.vocab_size));
  auto entry = std::make_unique<Entry>();
  const int64_t prompt_length = static_cast<int64_t>(request.prompt.size());
  const bool scores = request.on_prompt_logits != nullptr;
  if (scores && prompt_length > limits_.max_model_len) {
    return absl::InvalidArgumentError(
        absl::StrFormat("the prompt has %d tokens, more than the maximum length of %d",
                        prompt_length, limits_.max_model_len));
  }
  if (!scores && prompt_length >= limits_.max_model_len) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "the prompt has %d tokens, which leaves no room for a new one in the maximum length of %d",
        prompt_length, limits_.max_model_len));
  }
  entry->max_length = prompt_length;
  if (!scores) {
    entry->max_length +=
        std::min(request.sampling.max_tokens, limits_.max_model_len - prompt_length);
  }
  const int64_t blocks_needed = BlocksForTokens(entry->max_length, limits_.block_size);
  if (blocks_needed > limits_.num_blocks) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "the request may grow to %d tokens, the KV cache holds %d (%d blocks of %d)",
        entry->max_length, limits_.num_blocks * limits_.block_size, limits_.num_blocks,
        limits_.block_size));
  }
  entry->id = next_id_++;
  entry->prompt_length = prompt_length;
  entry->tokens = std::move(request.prompt);
  entry->request = std::move(request);
  waiting_.push_back(std::move(entry));
  return waiting_.back()->id;
}

bool Scheduler::Schedule(StepPlan& plan) {
  plan.Clear();
  if (idle()) return false;
  plan.step = next_step_++;
  plan.freed_slots.assign(freed_slots_.begin(), freed_slots_.end());
  free_slots_.insert(free_slots_.end(), freed_slots_.begin(), freed_slots_.end());
  freed_slots_.clear();
  scheduled_.clear();
  tokens_left_ = limits_.max_num_batched_tokens;
  score_rows_left_ = max_score_rows_;
  planned_prompt_tokens_ = 0;
  plan.query_start_loc.push_back(0);
  for (const auto& entry : running_) Plan(*entry, plan);
  while (tokens_left_ > 0 && Admit(plan)) {
  }
  LOCKSTEP_CHECK(!scheduled_.empty());
  return true;
}

// Moves the head of the queue into the batch; false when it has to wait. Others do not overtake it.
bool Scheduler::Admit(StepPlan& plan) {
  if (waiting_.empty() || free_slots_.empty()) return false;
  Entry& entry = *waiting_.front();
  if (entry.scores() && score_rows_left_ == 0) return false;
  auto blocks = blocks_.Allocate(BlocksForTokens(entry.max_length, limits_.block_size));
  if (!blocks.ok()) return false;
  entry.blocks = *std::move(blocks);
  entry.tokens.reserve(static_cast<size_t>(entry.max_length));
  entry.slot = free_slots_.back();
  free_slots_.pop_back();
  const SamplingParams& sampling = entry.request.sampling;
  plan.new_requests.push_back({.seed = sampling.seed,
                               .temperature = sampling.temperature,
                               .top_p = sampling.top_p,
                               .top_k = sampling.top_k,
                               .slot = entry.slot,
                               .prompt_length = static_cast<int32_t>(entry.prompt_length)});
  running_.push_back(std::move(waiting_.front()));
  waiting_.pop_front();
  Plan(entry, plan);
  return true;
}

// Gives the request as many of its tokens as the budget allows; false when that is none.
bool Scheduler::Plan(Entry& entry, StepPlan& plan) {
  int64_t count = std::min(entry.num_left(), tokens_left_);
  if (entry.scores()) count = std::min(count, score_rows_left_);
  if (count == 0) return false;
  AddRows(entry, count, plan);
  tokens_left_ -= count;
  if (entry.scores()) score_rows_left_ -= count;
  planned_prompt_tokens_ +=
      std::max<int64_t>(0, std::min(count, entry.prompt_length - entry.num_computed));
  entry.num_computed += count;
  scheduled_.push_back(&entry);
  return true;
}

void Scheduler::AddRows(Entry& entry, int64_t count, StepPlan& plan) {
  const int64_t first = entry.num_computed;
  const int64_t end = first + count;
  const size_t first_row = plan.token_ids.size();
  AddBlocks(entry, end, plan);
  plan.token_ids.insert(plan.token_ids.end(), entry.tokens.begin() + first,
                        entry.tokens.begin() + end);
  for (int64_t position = first; position < end; ++position) {
    plan.positions.push_back(static_cast<int32_t>(position));
  }
  plan.slot_mapping.resize(first_row + static_cast<size_t>(count));
  FillSlotMapping(entry.blocks, limits_.block_size, first, count,
                  plan.slot_mapping.data() + first_row);
  plan.request_slots.push_back(entry.slot);
  plan.seq_lens.push_back(static_cast<int32_t>(end));
  const int32_t end_row = static_cast<int32_t>(plan.token_ids.size());
  plan.query_start_loc.push_back(end_row);
  if (entry.scores()) {
    plan.outputs.push_back(StepOutput::kScore);
    for (int32_t row = static_cast<int32_t>(first_row); row < end_row; ++row) {
      plan.logits_rows.push_back(row);
    }
  } else if (count == entry.num_left()) {
    plan.outputs.push_back(StepOutput::kSample);
    plan.logits_rows.push_back(end_row - 1);
  } else {
    plan.outputs.push_back(StepOutput::kNone);
  }
}

// Tells the entries of the block table that the first `num_tokens` tokens need, as they are needed:
// a decode step then carries one entry every block_size steps.
void Scheduler::AddBlocks(Entry& entry, int64_t num_tokens, StepPlan& plan) {
  const int64_t needed = BlocksForTokens(num_tokens, limits_.block_size);
  if (needed <= entry.num_blocks_sent) return;
  plan.block_runs.push_back({.slot = entry.slot,
                             .first_index = static_cast<int32_t>(entry.num_blocks_sent),
                             .count = static_cast<int32_t>(needed - entry.num_blocks_sent)});
  plan.blocks.insert(plan.blocks.end(), entry.blocks.begin() + entry.num_blocks_sent,
                     entry.blocks.begin() + needed);
  entry.num_blocks_sent = needed;
}

void Scheduler::DeliverPromptLogits(int64_t b, int64_t first_position, int64_t rows,
                                    const float* logits) {
  Entry& entry = *scheduled_[static_cast<size_t>(b)];
  const int64_t vocab_size = limits_.vocab_size;
  for (int64_t row = 0; row < rows && entry.score_error.empty(); ++row) {
    const float* values = logits + row * vocab_size;
    if (std::all_of(values, values + vocab_size, [](float x) { return std::isfinite(x); })) {
      continue;
    }
    entry.score_error =
        absl::StrFormat("the logits of position %d hold NaN or infinity", first_position + row);
  }
  if (entry.score_error.empty()) entry.request.on_prompt_logits(first_position, rows, logits);
}

void Scheduler::Update(std::span<const int32_t> sampled) {
  size_t next_sample = 0;
  for (Entry* entry : scheduled_) {
    if (!entry->score_error.empty()) {
      Finish(*entry, {.finish = FinishReason::kError, .error = entry->score_error});
    } else if (entry->num_left() > 0) {
      continue;  // a chunk of the prompt
    } else if (entry->scores()) {
      Finish(*entry, {.finish = FinishReason::kLength});
    } else {
      LOCKSTEP_CHECK(next_sample < sampled.size());
      Accept(*entry, sampled[next_sample++]);
    }
  }
  LOCKSTEP_CHECK(next_sample == sampled.size());
  FreeFinished();
}

// The request's next token.
void Scheduler::Accept(Entry& entry, int32_t token) {
  RequestEvent event;
  const std::vector<int32_t>& stops = entry.request.sampling.stop_token_ids;
  if (token == kFailedToken) {
    event.finish = FinishReason::kError;
    event.error =
        absl::StrFormat("the logits of position %d hold NaN or infinity", entry.tokens.size() - 1);
  } else if (std::find(stops.begin(), stops.end(), token) != stops.end()) {
    event.finish = FinishReason::kStop;
    event.stop_token = token;
  } else {
    entry.tokens.push_back(token);
    event.token = token;
    if (static_cast<int64_t>(entry.tokens.size()) == entry.max_length) {
      event.finish = FinishReason::kLength;
    }
  }
  if (event.finish != FinishReason::kNone) {
    Finish(entry, std::move(event));
    return;
  }
  event.id = entry.id;
  if (entry.request.on_event && !entry.request.on_event(event)) entry.finished = true;
}

void Scheduler::Finish(Entry& entry, RequestEvent event) {
  entry.finished = true;
  event.id = entry.id;
  if (entry.request.on_event) entry.request.on_event(event);
}

// The step is done, so its blocks can be reused by the next; the slots are told in the next plan.
void Scheduler::FreeFinished() {
  for (const auto& entry : running_) {
    if (!entry->finished) continue;
    blocks_.Release(entry->blocks);
    freed_slots_.push_back(entry->slot);
  }
  std::erase_if(running_, [](const auto& entry) { return entry->finished; });
  scheduled_.clear();
}

}  // namespace lockstep

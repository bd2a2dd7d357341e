// The scheduler's other half: what becomes of a step's results, and how requests end.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "cache/block_table.h"
#include "runtime/scheduler.h"
#include "runtime/scheduler_choice.h"

namespace lockstep {

namespace {

bool ChangesLogits(const SamplingParams& sampling) {
  return sampling.repetition_penalty != 1 || sampling.frequency_penalty != 0 ||
         sampling.presence_penalty != 0 || !sampling.logit_bias.empty() || sampling.min_tokens > 0;
}

}  // namespace

void Scheduler::DeliverPromptLogits(int64_t b, int64_t first_position, int64_t rows,
                                    const float* logits) {
  Choice& choice = *in_flight_.back()[static_cast<size_t>(b)].choice;
  if (choice.ended) return;
  const int64_t vocab_size = limits_.vocab_size;
  // A preempted prompt is computed again from its beginning.
  const int64_t skipped =
      std::clamp<int64_t>(choice.num_prompt_rows_delivered - first_position, 0, rows);
  for (int64_t row = skipped; row < rows && choice.score_error.empty(); ++row) {
    const float* values = logits + row * vocab_size;
    if (std::all_of(values, values + vocab_size, [](float x) { return std::isfinite(x); })) {
      continue;
    }
    choice.score_error =
        absl::StrFormat("the logits of position %d hold NaN or infinity", first_position + row);
  }
  if (!choice.score_error.empty() || skipped == rows) return;
  choice.num_prompt_rows_delivered = first_position + rows;
  choice.request->on_prompt_logits(first_position + skipped, rows - skipped,
                                   logits + skipped * vocab_size);
}

void Scheduler::Update(const StepResult& result) {
  LOCKSTEP_CHECK(!in_flight_.empty());
  PlannedStep step = std::move(in_flight_.front());
  in_flight_.pop_front();
  size_t next_sample = 0;
  size_t next_logprob = 0;
  for (const PlannedChoice& planned : step) {
    const size_t num_targets = static_cast<size_t>(planned.num_logprob_targets);
    DeliverPromptLogprobs(planned,
                          std::span(result.prompt_logprobs).subspan(next_logprob, num_targets));
    next_logprob += num_targets;
    int32_t token = 0;
    PositionLogprobs logprobs;
    if (Samples(planned.output)) {
      token = result.sampled.tokens[next_sample];
      if (!result.sampled.logprobs.empty()) logprobs = result.sampled.logprobs[next_sample];
      ++next_sample;
    }
    Land(planned, token, std::move(logprobs));
  }
  LOCKSTEP_CHECK(next_sample == result.sampled.tokens.size());
  LOCKSTEP_CHECK(next_logprob == result.prompt_logprobs.size());
  step.clear();
  spare_.push_back(std::move(step));
  std::erase_if(running_, [](const ChoicePtr& choice) { return choice->ended; });
}

void Scheduler::Land(const PlannedChoice& planned, int32_t token, PositionLogprobs logprobs) {
  Choice& choice = *planned.choice;
  if (Samples(planned.output)) --choice.num_in_flight;
  --choice.num_steps_in_flight;
  if (choice.ended) return;
  if (!choice.score_error.empty()) {
    choice.failed = true;
    Finish(choice, {.finish = FinishReason::kError, .error = choice.score_error});
  } else if (Samples(planned.output)) {
    Accept(choice, token, std::move(logprobs));
  } else if (choice.scores() && planned.first_position + planned.count == choice.prompt_length) {
    Finish(choice, {.finish = FinishReason::kLength});
  }
  if (choice.landing && choice.num_steps_in_flight == 0 && !choice.ended) {
    choice.landing = false;
    landing_.erase(choice.order());
    waiting_.emplace(choice.order(), planned.choice);
  }
}

void Scheduler::DeliverPromptLogprobs(const PlannedChoice& planned,
                                      std::span<const PositionLogprobs> logprobs) {
  Choice& choice = *planned.choice;
  if (choice.ended || logprobs.empty()) return;
  const auto bad = std::find_if(logprobs.begin(), logprobs.end(), [](const PositionLogprobs& p) {
    return std::isnan(p.token.logprob);
  });
  const int64_t first = std::max(planned.first_position, choice.num_prompt_rows_delivered);
  if (bad != logprobs.end()) {
    choice.score_error = absl::StrFormat("the logits of position %d hold NaN or infinity",
                                         first + (bad - logprobs.begin()));
    return;
  }
  choice.num_prompt_rows_delivered = first + std::ssize(logprobs);
  // Row p holds the logits of the token at p + 1.
  if (choice.request->on_prompt_logprobs) {
    choice.request->on_prompt_logprobs(first + 1, logprobs);
  }
}

bool Scheduler::IsEndToken(const Choice& choice, int32_t token) const {
  const auto holds = [token](const std::vector<int32_t>& ids) {
    return std::find(ids.begin(), ids.end(), token) != ids.end();
  };
  return holds(choice.sampling().stop_token_ids) ||
         (!choice.sampling().ignore_eos && holds(options_.end_token_ids));
}

// The choice's next token.
void Scheduler::Accept(Choice& choice, int32_t token, PositionLogprobs logprobs) {
  RequestEvent event;
  if (token == kFailedToken) {
    choice.failed = true;
    event.finish = FinishReason::kError;
    event.error =
        absl::StrFormat("the logits of position %d hold NaN or infinity", choice.tokens.size() - 1);
    if (ChangesLogits(choice.sampling())) {
      event.error += ", or what the request bans and adds leaves none that is finite";
    }
  } else if (IsEndToken(choice, token)) {
    event.finish = FinishReason::kStop;
    event.stop_token = token;
  } else {
    choice.tokens.push_back(token);
    event.token = token;
    if (choice.sampling().num_logprobs.has_value()) event.logprobs = std::move(logprobs);
    if (std::ssize(choice.tokens) == choice.max_length) event.finish = FinishReason::kLength;
  }
  if (event.finish != FinishReason::kNone) {
    Finish(choice, std::move(event));
    return;
  }
  event.id = choice.id;
  event.choice = choice.index;
  if (choice.request->on_event && !choice.request->on_event(event)) End(choice);
}

void Scheduler::Finish(Choice& choice, RequestEvent event) {
  const std::shared_ptr<const Request> request = choice.request;
  event.id = choice.id;
  event.choice = choice.index;
  End(choice);
  if (request->on_event) request->on_event(event);
}

// Wherever the choice is, it leaves; running_ forgets it at the end of the call that ends it.
void Scheduler::End(Choice& choice) {
  choice.ended = true;
  choice.landing = false;
  landing_.erase(choice.order());
  if (choice.in_batch()) LeaveBatch(choice);
  waiting_.erase(choice.order());
  ++stats_.num_finished;
  const auto found = choices_.find(choice.id);
  LOCKSTEP_CHECK(found != choices_.end());
  std::vector<ChoicePtr>& left = found->second;
  // Whoever calls holds the choice, as do planned steps with rows of it.
  const auto own = std::find_if(left.begin(), left.end(),
                                [&](const ChoicePtr& other) { return other.get() == &choice; });
  LOCKSTEP_CHECK(own != left.end());
  left.erase(own);
  if (left.empty()) choices_.erase(found);
}

void Scheduler::Cancel(RequestId id) {
  const auto found = choices_.find(id);
  if (found == choices_.end()) return;
  for (const ChoicePtr& choice : std::vector<ChoicePtr>(found->second)) {
    Finish(*choice, {.finish = FinishReason::kCancelled});
  }
  std::erase_if(running_, [](const ChoicePtr& choice) { return choice->ended; });
}

void Scheduler::CancelAll() {
  std::vector<RequestId> ids;
  for (const auto& [id, choices] : choices_) ids.push_back(id);
  std::sort(ids.begin(), ids.end());
  for (const RequestId id : ids) Cancel(id);
}

std::vector<ScheduledRows> Scheduler::OldestRows() const {
  std::vector<ScheduledRows> rows;
  if (in_flight_.empty()) return rows;
  for (const PlannedChoice& planned : in_flight_.front()) {
    const Choice& choice = *planned.choice;
    rows.push_back({.id = choice.id,
                    .choice = choice.index,
                    .first_position = planned.first_position,
                    .count = planned.count,
                    .prompt_tokens = std::clamp<int64_t>(
                        choice.prompt_length - planned.first_position, 0, planned.count)});
  }
  return rows;
}

SchedulerStats Scheduler::stats() const {
  SchedulerStats stats = stats_;
  stats.num_waiting = std::ssize(waiting_);
  stats.num_running = std::ssize(running_);
  stats.num_blocks = blocks_.num_blocks();
  stats.num_free_blocks = blocks_.num_free();
  stats.num_cached_blocks = prefixes_.num_blocks();
  return stats;
}

absl::Status Scheduler::CheckInvariants() const {
  LOCKSTEP_RETURN_IF_ERROR(blocks_.CheckInvariants());
  LOCKSTEP_RETURN_IF_ERROR(prefixes_.CheckInvariants());
  std::vector<int32_t> owners(static_cast<size_t>(blocks_.num_blocks()), 0);
  std::vector<bool> slots(static_cast<size_t>(limits_.max_num_seqs), false);
  for (size_t i = 0; i < running_.size(); ++i) {
    const Choice& choice = *running_[i];
    const auto broken = [&](const char* what) {
      return absl::InternalError(
          absl::StrFormat("request %d choice %d: %s", choice.id, choice.index, what));
    };
    if (choice.ended || !choice.in_batch()) return broken("is running and not in the batch");
    if (i > 0 && !(running_[i - 1]->order() < choice.order())) return broken("runs out of order");
    if (slots[choice.slot]) return broken("shares its slot");
    slots[choice.slot] = true;
    if (std::ssize(choice.blocks) < BlocksForTokens(choice.num_planned, limits_.block_size) ||
        std::ssize(choice.blocks) < choice.num_blocks_sent) {
      return broken("has fewer blocks than tokens or told entries need");
    }
    if (choice.num_planned > choice.length()) return broken("is planned beyond its tokens");
    for (const BlockId block : choice.blocks) ++owners[block];
  }
  for (const auto& [order, choice] : waiting_) {
    if (choice->ended || choice->in_batch() || !choice->blocks.empty() ||
        order != choice->order()) {
      return absl::InternalError(absl::StrFormat(
          "request %d choice %d waits with blocks or out of its place", choice->id, choice->index));
    }
  }
  for (int64_t block = 0; block < blocks_.num_blocks(); ++block) {
    if (owners[block] == blocks_.RefCount(static_cast<BlockId>(block))) continue;
    return absl::InternalError(absl::StrFormat("block %d is in %d tables and has %d owners", block,
                                               owners[block],
                                               blocks_.RefCount(static_cast<BlockId>(block))));
  }
  for (const int32_t slot : free_slots_) {
    if (slots[slot]) return absl::InternalError(absl::StrFormat("slot %d is taken and free", slot));
  }
  return absl::OkStatus();
}

}  // namespace lockstep

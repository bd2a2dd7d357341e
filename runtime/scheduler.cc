#include "runtime/scheduler.h"

#include <algorithm>
#include <utility>

#include "cache/block_table.h"
#include "runtime/request_check.h"
#include "runtime/scheduler_choice.h"

namespace lockstep {

Scheduler::Scheduler(const PlanLimits& limits, SchedulerOptions options)
    : limits_(limits),
      options_(std::move(options)),
      blocks_(limits.num_blocks),
      prefixes_(limits.block_size, blocks_) {
  LOCKSTEP_CHECK(options_.max_score_rows >= 1);
  LOCKSTEP_CHECK(limits.max_logits_rows >= std::min(limits.max_num_batched_tokens,
                                                    limits.max_num_seqs + options_.max_score_rows));
  // So that one request can always have all the blocks it may need.
  LOCKSTEP_CHECK(limits.num_blocks >= limits.max_blocks_per_request());
  for (int64_t slot = limits.max_num_seqs; slot-- > 0;) {
    free_slots_.push_back(static_cast<int32_t>(slot));
  }
  if (options_.poison_freed_blocks) {
    blocks_.set_on_lost([this](BlockId block) { lost_blocks_.push_back(block); });
  }
}

Scheduler::~Scheduler() = default;

absl::Status Scheduler::Check(const Request& request) const {
  return CheckRequest(request, limits_);
}

void Scheduler::Submit(RequestId id, Request request) {
  std::vector<int32_t> prompt = std::move(request.prompt);
  const auto shared = std::make_shared<const Request>(std::move(request));
  const int64_t prompt_length = static_cast<int64_t>(prompt.size());
  std::vector<ChoicePtr>& choices = choices_[id];
  LOCKSTEP_CHECK(choices.empty());
  for (int32_t i = 0; i < shared->sampling.n; ++i) {
    const ChoicePtr& choice = choices.emplace_back(std::make_shared<Choice>());
    choice->id = id;
    choice->index = i;
    choice->request = shared;
    choice->prompt_length = prompt_length;
    choice->max_length = prompt_length;
    if (!choice->scores()) {
      choice->max_length +=
          std::min(shared->sampling.max_tokens, limits_.max_model_len - prompt_length);
    }
    choice->tokens = i + 1 < shared->sampling.n ? prompt : std::move(prompt);
    if (i > 0) choice->source = choices[0];
    waiting_.emplace(choice->order(), choice);
  }
}

bool Scheduler::Schedule(StepPlan& plan) {
  plan.Clear();
  if (choices_.empty()) return false;
  BeginStep(plan);
  PlanRunning(plan);
  TellFreedSlots(plan);
  while (tokens_left_ > 0 && Admit(plan)) {
  }
  PlannedStep& step = in_flight_.back();
  if (step.empty()) {  // everything waits for the tokens of a step in flight
    LOCKSTEP_CHECK(in_flight_.size() > 1);
    UntellFreedSlots(plan);
    spare_.push_back(std::move(step));
    in_flight_.pop_back();
    plan.Clear();
    return false;
  }
  plan.step = next_step_++;
  EndStep(plan);
  return true;
}

void Scheduler::BeginStep(StepPlan& plan) {
  tokens_left_ = limits_.max_num_batched_tokens;
  score_rows_left_ = options_.max_score_rows;
  planned_prompt_tokens_ = 0;
  plan.step = next_step_;
  plan.query_start_loc.push_back(0);
  if (spare_.empty()) spare_.emplace_back();
  in_flight_.push_back(std::move(spare_.back()));
  spare_.pop_back();
}

// In order; who finds no block takes those of the last in order, who may be itself.
void Scheduler::PlanRunning(StepPlan& plan) {
  for (size_t i = 0; i < running_.size() && tokens_left_ > 0; ++i) {
    const ChoicePtr choice = running_[i];
    if (choice->num_left() == 0) continue;
    const int64_t end = choice->num_planned + std::min(choice->num_left(), tokens_left_);
    const int64_t wanted = BlocksForTokens(end, limits_.block_size) - std::ssize(choice->blocks);
    while (wanted > 0 && choice->in_batch() && !blocks_.Allocate(wanted, choice->blocks)) {
      Preempt(*running_.back());
    }
    if (choice->in_batch()) Plan(choice, plan);
  }
}

// A slot that is freed by a plan may be filled by the same plan.
void Scheduler::TellFreedSlots(StepPlan& plan) {
  plan.freed_slots.assign(freed_slots_.begin(), freed_slots_.end());
  free_slots_.insert(free_slots_.end(), freed_slots_.begin(), freed_slots_.end());
  freed_slots_.clear();
}

// No plan goes out after all. Nothing was admitted, so the slots are still the last ones.
void Scheduler::UntellFreedSlots(const StepPlan& plan) {
  freed_slots_.assign(plan.freed_slots.begin(), plan.freed_slots.end());
  free_slots_.resize(free_slots_.size() - freed_slots_.size());
}

// The last in order of the batch loses its place and its blocks. What it has computed may stay in
// the prefix cache for a while.
void Scheduler::Preempt(Choice& choice) {
  LOCKSTEP_CHECK(running_.back().get() == &choice);
  ChoicePtr owner = std::move(running_.back());
  running_.pop_back();
  LeaveBatch(choice);
  ++stats_.num_preemptions;
  choice.landing = choice.num_steps_in_flight > 0;
  if (choice.landing) {
    landing_.insert(choice.order());
  } else {
    waiting_.emplace(choice.order(), std::move(owner));
  }
}

// Moves the head of the queue into the batch; false when it has to wait. Others do not overtake it.
bool Scheduler::Admit(StepPlan& plan) {
  if (waiting_.empty() || free_slots_.empty()) return false;
  const ChoicePtr choice = waiting_.begin()->second;
  // One that was preempted comes back soon, and its place is before this one's.
  if (!landing_.empty() && *landing_.begin() < choice->order()) return false;
  if (choice->wants_prompt_rows() && score_rows_left_ == 0) return false;
  if (!TakeBlocks(*choice, plan)) return false;
  waiting_.erase(waiting_.begin());
  choice->source = nullptr;
  choice->slot = free_slots_.back();
  free_slots_.pop_back();
  TellNewRequest(*choice, plan);
  const auto place = std::upper_bound(
      running_.begin(), running_.end(), choice,
      [](const ChoicePtr& a, const ChoicePtr& b) { return a->order() < b->order(); });
  running_.insert(place, choice);
  if (!choice->admitted && choice->index == 0 && choice->request->on_admitted) {
    choice->request->on_admitted();
  }
  choice->admitted = true;
  return Plan(choice, plan);
}

// It did not fit before, and nothing has changed that could make it fit now.
bool Scheduler::IsBlocked(const Choice& choice) const {
  return blocked_.order == choice.order() && blocked_.num_releases == blocks_.num_releases() &&
         blocked_.num_running == running_.size() &&
         !(UsesPrefixes(choice) &&
           prefixes_.Continues(choice.request->cache_salt, choice.tokens, blocked_.chain));
}

// Blocks for all known tokens: shared ones as far as they are there, new ones for the rest.
bool Scheduler::TakeBlocks(Choice& choice, StepPlan& plan) {
  if (IsBlocked(choice)) return false;
  const int64_t block_size = limits_.block_size;
  const int64_t num_tokens = std::ssize(choice.tokens);
  int64_t num_computed = 0;
  BlockId copied = -1;
  if (choice.source != nullptr && choice.source->in_batch() && num_tokens == choice.prompt_length) {
    // One of several choices: all of the prompt but its last token is there.
    if (!CanFork(choice)) return false;
    num_computed = choice.prompt_length - 1;
    const std::vector<BlockId>& blocks = choice.source->blocks;
    const int64_t num_full = num_computed / block_size;
    choice.blocks.assign(blocks.begin(), blocks.begin() + num_full);
    for (const BlockId block : choice.blocks) blocks_.Retain(block);
    if (num_computed % block_size != 0) copied = blocks[num_full];
    const PrefixIndex::Chain& chain = choice.source->chain;
    if (chain.num_blocks <= num_full) choice.chain = chain;
  } else if (UsesPrefixes(choice) && !choice.wants_prompt_rows()) {
    // At least one token has to be computed, to have something to sample from.
    const int64_t max_tokens = std::min(num_tokens - 1, options_.max_shared_tokens);
    choice.chain = prefixes_.Acquire(choice.request->cache_salt, choice.tokens,
                                     max_tokens / block_size, choice.blocks);
    num_computed = choice.chain.num_blocks * block_size;
  }
  if (!Reserve(BlocksForTokens(num_tokens, block_size) - std::ssize(choice.blocks), choice)) {
    return false;
  }
  if (copied >= 0) {
    plan.block_copies.push_back(
        {.source = copied, .target = choice.blocks[num_computed / block_size]});
  }
  if (UsesPrefixes(choice)) {
    stats_.prefix_cache_query_tokens += num_tokens;
    stats_.prefix_cache_hit_tokens += num_computed;
  }
  choice.num_planned = num_computed;
  return true;
}

// The source's prompt, all but the last token, is computed by the time this step runs.
bool Scheduler::CanFork(const Choice& choice) const {
  const Choice& source = *choice.source;
  const int64_t before =
      source.last_planned_step == next_step_ ? source.num_planned_before : source.num_planned;
  return before >= choice.prompt_length - 1;
}

// Leaves a block for each running request, or a new one would be preempted as soon as it is here.
// On failure the choice has no blocks.
bool Scheduler::Reserve(int64_t num_blocks, Choice& choice) {
  const int64_t headroom = std::ssize(running_);
  if (num_blocks + headroom <= blocks_.num_free() && blocks_.Allocate(num_blocks, choice.blocks)) {
    return true;
  }
  blocks_.Release(choice.blocks);
  choice.blocks.clear();
  blocked_ = {choice.order(), choice.chain, blocks_.num_releases(), running_.size()};
  choice.chain = {};
  return false;
}

void Scheduler::TellNewRequest(const Choice& choice, StepPlan& plan) const {
  const SamplingParams& sampling = choice.sampling();
  PlanNewRequest told{.seed = sampling.seed + static_cast<uint64_t>(choice.index),
                      .temperature = sampling.temperature,
                      .top_p = sampling.top_p,
                      .min_p = sampling.min_p,
                      .repetition_penalty = sampling.repetition_penalty,
                      .frequency_penalty = sampling.frequency_penalty,
                      .presence_penalty = sampling.presence_penalty,
                      .top_k = sampling.top_k,
                      .slot = choice.slot,
                      .prompt_length = static_cast<int32_t>(choice.prompt_length),
                      .num_computed = static_cast<int32_t>(choice.num_planned),
                      .num_logprobs = sampling.num_logprobs.value_or(-1),
                      .num_prompt_logprobs = sampling.num_prompt_logprobs.value_or(-1)};
  const bool counts_generated = sampling.frequency_penalty != 0 || sampling.presence_penalty != 0;
  const bool has_generated = std::ssize(choice.tokens) > choice.prompt_length;
  if (sampling.repetition_penalty != 1 || (counts_generated && has_generated)) {
    plan.history.insert(plan.history.end(), choice.tokens.begin(), choice.tokens.end());
    told.num_history = static_cast<int32_t>(choice.tokens.size());
  }
  for (const auto& [id, bias] : sampling.logit_bias) {
    plan.logit_bias.push_back({.bias = bias, .id = id});
  }
  told.num_bias = static_cast<int32_t>(sampling.logit_bias.size());
  if (sampling.min_tokens > 0) {
    std::vector<int32_t>& banned = plan.banned_ids;
    const size_t before = banned.size();
    const std::vector<int32_t>& stops = sampling.stop_token_ids;
    const std::vector<int32_t>& ends = options_.end_token_ids;
    banned.insert(banned.end(), stops.begin(), stops.end());
    if (!sampling.ignore_eos) banned.insert(banned.end(), ends.begin(), ends.end());
    told.num_banned = static_cast<int32_t>(banned.size() - before);
    told.banned_below = static_cast<int32_t>(
        choice.prompt_length +
        std::min(sampling.min_tokens, choice.max_length - choice.prompt_length));
  }
  plan.new_requests.push_back(told);
}

// Gives the choice as many of its tokens as the budget allows; false when that is none.
bool Scheduler::Plan(const ChoicePtr& choice, StepPlan& plan) {
  int64_t count = std::min(choice->num_left(), tokens_left_);
  const int64_t prompt_rows = std::max<int64_t>(0, choice->prompt_length - choice->num_planned);
  const bool wants_prompt_rows = prompt_rows > 0 && choice->wants_prompt_rows();
  if (wants_prompt_rows) count = std::min(count, score_rows_left_);
  if (count == 0) return false;
  PlannedChoice& planned = in_flight_.back().emplace_back();
  planned.choice = choice;
  planned.output = OutputOf(*choice, count);
  planned.first_position = choice->num_planned;
  planned.count = count;
  AddBlocks(*choice, choice->num_planned + count, plan);
  AddRows(planned, plan);
  if (WantsPromptLogprobs(planned.output)) {
    planned.num_logprob_targets = AddLogprobTargets(planned, plan);
  }
  tokens_left_ -= count;
  if (WantsAllLogits(planned.output)) score_rows_left_ -= count;
  planned_prompt_tokens_ += std::min(count, prompt_rows);
  choice->last_planned_step = next_step_;
  choice->num_planned_before = choice->num_planned;
  choice->num_planned += count;
  if (Samples(planned.output)) ++choice->num_in_flight;
  ++choice->num_steps_in_flight;
  return true;
}

StepOutput Scheduler::OutputOf(const Choice& choice, int64_t count) const {
  if (choice.scores()) return StepOutput::kScore;
  const bool samples = choice.num_planned + count == choice.length();
  if (choice.num_planned < choice.prompt_length && choice.wants_prompt_rows()) {
    return samples ? StepOutput::kPromptLogprobsAndSample : StepOutput::kPromptLogprobs;
  }
  return samples ? StepOutput::kSample : StepOutput::kNone;
}

void Scheduler::AddRows(const PlannedChoice& planned, StepPlan& plan) {
  const Choice& choice = *planned.choice;
  const int64_t first = planned.first_position;
  const int64_t end = first + planned.count;
  const size_t first_row = plan.token_ids.size();
  const int64_t known_end = std::min(end, std::ssize(choice.tokens));
  plan.token_ids.insert(plan.token_ids.end(), choice.tokens.begin() + std::min(first, known_end),
                        choice.tokens.begin() + known_end);
  plan.token_ids.resize(first_row + static_cast<size_t>(planned.count), kLastSampledToken);
  for (int64_t position = first; position < end; ++position) {
    plan.positions.push_back(static_cast<int32_t>(position));
  }
  plan.slot_mapping.resize(plan.token_ids.size());
  FillSlotMapping(choice.blocks, limits_.block_size, first, planned.count,
                  plan.slot_mapping.data() + first_row);
  plan.request_slots.push_back(choice.slot);
  plan.seq_lens.push_back(static_cast<int32_t>(end));
  plan.outputs.push_back(planned.output);
  const int32_t end_row = static_cast<int32_t>(plan.token_ids.size());
  plan.query_start_loc.push_back(end_row);
  int32_t first_logits_row = end_row;
  if (Samples(planned.output)) first_logits_row = end_row - 1;
  if (WantsAllLogits(planned.output)) first_logits_row = static_cast<int32_t>(first_row);
  for (int32_t row = first_logits_row; row < end_row; ++row) plan.logits_rows.push_back(row);
}

// For each row the prompt's next token, unless its logprob was delivered before a preemption.
int64_t Scheduler::AddLogprobTargets(const PlannedChoice& planned, StepPlan& plan) const {
  const Choice& choice = *planned.choice;
  int64_t num_targets = 0;
  for (int64_t i = 0; i < planned.count; ++i) {
    const int64_t position = planned.first_position + i;
    const bool wanted =
        position >= choice.num_prompt_rows_delivered && position + 1 < choice.prompt_length;
    plan.logprob_targets.push_back(wanted ? choice.tokens[position + 1] : -1);
    num_targets += wanted ? 1 : 0;
  }
  return num_targets;
}

// Tells the entries of the block table that the first `num_tokens` tokens need, as they are needed:
// a decode step then carries one entry every block_size steps.
void Scheduler::AddBlocks(Choice& choice, int64_t num_tokens, StepPlan& plan) {
  const int64_t needed = BlocksForTokens(num_tokens, limits_.block_size);
  if (needed <= choice.num_blocks_sent) return;
  plan.block_runs.push_back({.slot = choice.slot,
                             .first_index = static_cast<int32_t>(choice.num_blocks_sent),
                             .count = static_cast<int32_t>(needed - choice.num_blocks_sent)});
  plan.blocks.insert(plan.blocks.end(), choice.blocks.begin() + choice.num_blocks_sent,
                     choice.blocks.begin() + needed);
  choice.num_blocks_sent = needed;
}

void Scheduler::EndStep(StepPlan& plan) {
  // The plan goes out next: what it writes may be found by the steps that follow.
  for (const PlannedChoice& planned : in_flight_.back()) IndexBlocks(*planned.choice);
  if (lost_blocks_.empty()) return;
  std::sort(lost_blocks_.begin(), lost_blocks_.end());
  lost_blocks_.erase(std::unique(lost_blocks_.begin(), lost_blocks_.end()), lost_blocks_.end());
  plan.poisoned_blocks.assign(lost_blocks_.begin(), lost_blocks_.end());
  lost_blocks_.clear();
}

bool Scheduler::UsesPrefixes(const Choice& choice) const {
  return options_.enable_prefix_caching && choice.prompt_length <= options_.max_shared_tokens;
}

// Enters the choice's full blocks whose tokens are known and planned. An end token is never among
// the tokens.
void Scheduler::IndexBlocks(Choice& choice) {
  if (!UsesPrefixes(choice)) return;
  const int64_t num_tokens =
      std::min({choice.num_planned, std::ssize(choice.tokens), options_.max_shared_tokens});
  const std::span<const int32_t> tokens(choice.tokens);
  const size_t block_size = static_cast<size_t>(limits_.block_size);
  while (!choice.chain.broken && (choice.chain.num_blocks + 1) * limits_.block_size <= num_tokens) {
    const size_t index = static_cast<size_t>(choice.chain.num_blocks);
    prefixes_.Insert(choice.request->cache_salt, choice.chain,
                     tokens.subspan(index * block_size, block_size), choice.blocks[index]);
  }
}

// Gives back slot and blocks. They may be handed out by the next plan, which every rank executes
// after those that still use them.
void Scheduler::LeaveBatch(Choice& choice) {
  if (choice.failed) {
    for (const BlockId block : choice.blocks) prefixes_.Erase(block);
  } else {
    IndexBlocks(choice);
  }
  blocks_.Release(choice.blocks);
  choice.blocks.clear();
  choice.chain = {};
  choice.num_planned = 0;
  choice.num_blocks_sent = 0;
  freed_slots_.push_back(choice.slot);
  choice.slot = -1;
}

}  // namespace lockstep

#include "runtime/step_runner.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "runtime/core/log.h"

namespace lockstep {

namespace {
constexpr int64_t kMaxScoreBytes = 64 << 20;
// A piece is held twice on rank 0 (as received, and in rows).
constexpr int64_t kMaxGatherBytes = kMaxScoreBytes / 2;

int64_t RowsWithin(int64_t bytes, int64_t vocab_size) {
  return std::max<int64_t>(1, bytes / (vocab_size * static_cast<int64_t>(sizeof(float))));
}
}  // namespace

int64_t MaxScoreRows(int64_t vocab_size) { return RowsWithin(kMaxScoreBytes, vocab_size); }

int64_t MaxLogitsRows(int64_t max_num_batched_tokens, int64_t max_num_seqs, int64_t vocab_size) {
  return std::min(max_num_batched_tokens, max_num_seqs + MaxScoreRows(vocab_size));
}

absl::StatusOr<std::unique_ptr<StepRunner>> StepRunner::Create(
    const PlanLimits& limits, const StepRunnerOptions& options,
    const std::vector<Range>& vocab_ranges, Decoder& decoder, KvPool& pool,
    Communicator& communicator, ThreadPool& threads) {
  std::unique_ptr<StepRunner> runner(
      new StepRunner(limits, options, vocab_ranges, decoder, pool, communicator, threads));
  const int64_t local_vocab = vocab_ranges[static_cast<size_t>(communicator.rank())].size();
  const int64_t rows = limits.max_logits_rows;
  const int64_t bytes = rows * local_vocab * static_cast<int64_t>(sizeof(float));
  void* data = nullptr;
  if (runner->device_ != nullptr) {
    LOCKSTEP_ASSIGN_OR_RETURN(runner->pinned_logits_storage_,
                              PinnedBuffer::Create(bytes, "logits"));
    data = runner->pinned_logits_storage_.data();
    const CudaSamplerOptions sampling{.vocab_ranges = vocab_ranges,
                                      .rank = communicator.rank(),
                                      .max_rows = limits.max_num_seqs,
                                      .steps_in_flight = options.steps_in_flight,
                                      .stream = options.stream,
                                      .nccl = options.nccl,
                                      .stopped = &options.watched->links.stopped()};
    LOCKSTEP_ASSIGN_OR_RETURN(runner->device_sampler_, CudaSampler::Create(sampling));
  } else {
    LOCKSTEP_ASSIGN_OR_RETURN(runner->logits_storage_, Buffer::Create(bytes, "logits"));
    data = runner->logits_storage_.data();
  }
  runner->logits_ = {
      .data = data, .dtype = DType::kF32, .rows = rows, .cols = local_vocab, .stride = local_vocab};
  return runner;
}

StepRunner::StepRunner(const PlanLimits& limits, const StepRunnerOptions& options,
                       const std::vector<Range>& vocab_ranges, Decoder& decoder, KvPool& pool,
                       Communicator& communicator, ThreadPool& threads)
    : limits_(limits),
      vocab_ranges_(vocab_ranges),
      decoder_(decoder),
      pool_(pool),
      communicator_(communicator),
      device_(decoder.device()),
      stream_(options.stream),
      watched_(*options.watched),
      state_(limits, vocab_ranges[static_cast<size_t>(communicator.rank())],
             device_ != nullptr ? LastTokens::kOnDevice : LastTokens::kOnHost,
             options.steps_in_flight),
      steps_(static_cast<size_t>(options.steps_in_flight)),
      sampler_(vocab_ranges, communicator, threads),
      logprobs_(vocab_ranges, communicator, threads) {}

absl::Status StepRunner::Launch(const StepPlanView& plan, const PromptLogitsSink& sink) {
  LOCKSTEP_CHECK(num_in_flight() < std::ssize(steps_));
  // More tokens than requests: some of them are a prompt's.
  watched_.progress.BeginStep(plan.step, plan.num_tokens() > plan.num_requests()
                                             ? RankPhase::kPrefill
                                             : RankPhase::kDecode);
  LOCKSTEP_RETURN_IF_ERROR(state_.Apply(plan));
  LOCKSTEP_RETURN_IF_ERROR(ChangePool(plan));
  if (tp_checker_ != nullptr) decoder_.set_observer(tp_checker_->observer());
  Step& step = StepAt(num_launched_++);
  step.number = plan.step;
  step.result.prompt_logprobs.clear();
  return device_ != nullptr ? LaunchOnDevice(plan, sink, step) : LaunchOnHost(plan, sink, step);
}

absl::StatusOr<const StepResult*> StepRunner::Land() {
  LOCKSTEP_CHECK(num_in_flight() > 0);
  LOCKSTEP_RETURN_IF_ERROR(SettleUpTo(num_landed_ + 1));
  watched_.progress.LandStep();
  return &StepAt(num_landed_++).result;
}

absl::Status StepRunner::LaunchOnHost(const StepPlanView& plan, const PromptLogitsSink& sink,
                                      Step& step) {
  MatrixView logits = logits_;
  logits.rows = static_cast<int64_t>(plan.logits_rows.size());
  LOCKSTEP_RETURN_IF_ERROR(decoder_.Forward(state_.forward_batch(), pool_, logits));
  LOCKSTEP_RETURN_IF_ERROR(RunChecks());
  // Before sampling, which may change rows in place.
  LOCKSTEP_RETURN_IF_ERROR(ReadLogits(plan, sink, logits, step));
  return SampleOnHost(logits, step);
}

absl::Status StepRunner::LaunchOnDevice(const StepPlanView& plan, const PromptLogitsSink& sink,
                                        Step& step) {
  LOCKSTEP_ASSIGN_OR_RETURN(const MatrixView logits,
                            device_->Enqueue(state_.forward_batch(), pool_));
  LOCKSTEP_RETURN_IF_ERROR(RunChecks());
  const bool on_device = device_sampler_->Supports(state_.sample_rows());
  const bool host_reads = std::any_of(plan.outputs.begin(), plan.outputs.end(), WantsAllLogits);
  if (on_device && !host_reads) return SampleOnDevice(logits);
  MatrixView copied = logits_;
  copied.rows = logits.rows;
  LOCKSTEP_RETURN_IF_ERROR(CopyAsync(copied.data, logits.data,
                                     logits.rows * logits.cols * SizeOf(DType::kF32), stream_));
  LOCKSTEP_RETURN_IF_ERROR(SettleUpTo(num_launched_ - 1));
  LOCKSTEP_RETURN_IF_ERROR(Synchronize(stream_, &watched_.links.stopped()));
  LOCKSTEP_RETURN_IF_ERROR(ReadLogits(plan, sink, copied, step));
  if (on_device) return SampleOnDevice(logits);
  LOCKSTEP_RETURN_IF_ERROR(SampleOnHost(copied, step));
  return device_sampler_->PutTokens(state_.sample_slots(), step.result.sampled.tokens,
                                    device_->last_tokens());
}

absl::Status StepRunner::SampleOnDevice(const MatrixView& logits) {
  const std::span<const SampleRow> rows = state_.sample_rows();
  const bool needs_tokens = std::any_of(rows.begin(), rows.end(), [](const SampleRow& row) {
    return row.adjuster != nullptr && row.adjuster->needs_tokens();
  });
  if (needs_tokens) LOCKSTEP_RETURN_IF_ERROR(SettleUpTo(num_launched_ - 1));
  return device_sampler_->Launch(logits, rows, state_.sample_slots(), state_.digest(),
                                 device_->last_tokens());
}

// Every step before this one is settled.
absl::Status StepRunner::SampleOnHost(const MatrixView& logits, Step& step) {
  LOCKSTEP_RETURN_IF_ERROR(
      sampler_.Sample(logits, state_.sample_rows(), state_.digest(), step.result.sampled));
  return Accept(step);
}

// What the host takes from whole rows of logits, in host memory.
absl::Status StepRunner::ReadLogits(const StepPlanView& plan, const PromptLogitsSink& sink,
                                    const MatrixView& logits, Step& step) {
  LOCKSTEP_RETURN_IF_ERROR(GatherScores(plan, sink));
  const std::span<const LogprobRow> rows = state_.logprob_rows();
  step.result.prompt_logprobs.resize(rows.size());
  return logprobs_.Compute(logits, rows, step.result.prompt_logprobs);
}

// Takes the results of the first `num_steps` steps, as far as they are not here.
absl::Status StepRunner::SettleUpTo(uint64_t num_steps) {
  while (num_settled_ < num_steps) {
    Step& step = StepAt(num_settled_);
    LOCKSTEP_RETURN_IF_ERROR(device_sampler_->Wait(step.result.sampled));
    LOCKSTEP_RETURN_IF_ERROR(Accept(step));
  }
  return absl::OkStatus();
}

absl::Status StepRunner::Accept(const Step& step) {
  ++num_settled_;
  state_.Accept(step.result.sampled.tokens);
  return CompareDigests(step.number, step.result.sampled.digests);
}

// A freed block may be the target of a copy in the same plan, so NaN goes first.
absl::Status StepRunner::ChangePool(const StepPlanView& plan) {
  for (const int32_t block : plan.poisoned_blocks) {
    LOCKSTEP_RETURN_IF_ERROR(pool_.Poison(block));
  }
  for (const PlanBlockCopy& copy : plan.block_copies) {
    LOCKSTEP_RETURN_IF_ERROR(pool_.Copy(copy.source, copy.target));
  }
  if (tp_checker_ == nullptr) return absl::OkStatus();
  return tp_checker_->ChangePool(plan.poisoned_blocks, plan.block_copies);
}

absl::Status StepRunner::RunChecks() {
  if (checked_attention_ != nullptr) {
    LOCKSTEP_RETURN_IF_ERROR(Agree(communicator_, checked_attention_->status()));
  }
  if (tp_checker_ == nullptr || !tp_checker_->active()) return absl::OkStatus();
  return tp_checker_->Check(state_.forward_batch(), device_);
}

absl::Status StepRunner::LogChecks() {
  const bool leads = communicator_.rank() == 0;
  if (tp_checker_ != nullptr && leads) LogInfo(tp_checker_->Summary());
  // On all ranks or on none: what is checked is the same.
  const std::string mine =
      checked_attention_ != nullptr ? checked_attention_->Summary() : decoder_.CheckSummary();
  if (mine.empty()) return absl::OkStatus();
  const int64_t size = std::ssize(mine);
  std::vector<int64_t> sizes(static_cast<size_t>(communicator_.size()));
  LOCKSTEP_RETURN_IF_ERROR(communicator_.AllGather(&size, sizeof(size), sizes.data()));
  std::string all(static_cast<size_t>(std::accumulate(sizes.begin(), sizes.end(), int64_t{0})),
                  '\0');
  LOCKSTEP_RETURN_IF_ERROR(communicator_.GatherV(mine.data(), sizes, all.data(), 0));
  size_t begin = 0;
  for (size_t rank = 0; leads && rank < sizes.size(); ++rank) {
    LogInfo(absl::StrCat("--check-attention: rank ", rank, ": ", all.substr(begin, sizes[rank])));
    begin += static_cast<size_t>(sizes[rank]);
  }
  return absl::OkStatus();
}

// All ranks see the same digests, so all of them return the same status.
absl::Status StepRunner::CompareDigests(uint64_t step, std::span<const uint64_t> digests) const {
  for (size_t rank = 1; rank < digests.size(); ++rank) {
    if (digests[rank] == digests[0]) continue;
    return absl::InternalError(absl::StrFormat(
        "step %d: rank %d has parted from rank 0 (digest of what was applied and sampled so far: "
        "%016x, rank 0 has %016x)",
        step, rank, digests[rank], digests[0]));
  }
  return absl::OkStatus();
}

absl::Status StepRunner::GatherScores(const StepPlanView& plan, const PromptLogitsSink& sink) {
  const int64_t piece_rows = RowsWithin(kMaxGatherBytes, limits_.vocab_size);
  for (int64_t b = 0; b < plan.num_requests(); ++b) {
    if (plan.outputs[b] != StepOutput::kScore) continue;
    const int64_t count = plan.query_start_loc[b + 1] - plan.query_start_loc[b];
    const int64_t first_position = plan.seq_lens[b] - count;
    const int64_t first_logits_row = state_.first_logits_rows()[b];
    if (communicator_.size() == 1) {  // the rows are whole already
      sink(b, first_position, count, logits_.row<float>(first_logits_row));
      continue;
    }
    for (int64_t done = 0; done < count; done += piece_rows) {
      const int64_t rows = std::min(piece_rows, count - done);
      LOCKSTEP_RETURN_IF_ERROR(GatherPiece(first_logits_row + done, rows));
      if (communicator_.rank() == 0) sink(b, first_position + done, rows, rows_.data());
    }
  }
  return absl::OkStatus();
}

// Columns of all ranks side by side into rows_ [rows, V], on rank 0.
absl::Status StepRunner::GatherPiece(int64_t first_logits_row, int64_t rows) {
  bytes_per_rank_.clear();
  for (const Range& range : vocab_ranges_) {
    bytes_per_rank_.push_back(rows * range.size() * static_cast<int64_t>(sizeof(float)));
  }
  const bool root = communicator_.rank() == 0;
  const size_t size = static_cast<size_t>(rows * limits_.vocab_size);
  if (root && received_.size() < size) {
    received_.resize(size);
    rows_.resize(size);
  }
  LOCKSTEP_RETURN_IF_ERROR(communicator_.GatherV(logits_.row<float>(first_logits_row),
                                                 bytes_per_rank_, received_.data(), 0));
  if (!root) return absl::OkStatus();
  const float* source = received_.data();
  for (const Range& range : vocab_ranges_) {
    for (int64_t row = 0; row < rows; ++row) {
      std::copy_n(source, range.size(), rows_.data() + row * limits_.vocab_size + range.begin);
      source += range.size();
    }
  }
  return absl::OkStatus();
}

}  // namespace lockstep

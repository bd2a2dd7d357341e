#include "launch/batch_command.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_join.h"
#include "launch/batch/batch_run.h"
#include "launch/batch/job_record.h"
#include "launch/engine_session.h"
#include "launch/job_watch.h"
#include "launch/openai/served_text.h"
#include "launch/output_file.h"
#include "launch/serve/signal_watch.h"
#include "runtime/core/file.h"
#include "runtime/core/hash.h"
#include "runtime/core/log.h"

namespace lockstep {

namespace {

// The window bounds what the API has to take: it is never busy.
constexpr int64_t kApiQueue = int64_t{1} << 20;

// mpirun ends the ranks also because one of them is gone: the watchdog may be about to say so.
constexpr std::chrono::milliseconds kCauseDelay(300);

bool LauncherEnds(const StopSignal& signal) {
  return signal.number == SIGTERM && signal.from_parent && LaunchedByMpirun();
}

// Rank 0's part. The main thread prepares, runs the engine and closes; the thread of WatchSignals
// says when to stop before the end; that of the watchdog calls Fail.
class BatchJob : public EngineJob {
 public:
  BatchJob(const BatchOptions& options, SignalWatch signals);
  ~BatchJob() override;

  absl::Status Prepare(const ModelSource& source) override;
  std::optional<int> FinishEarly() override;
  absl::Status Submit(Engine& engine, const SessionInfo& session) override;
  absl::Status Run(Engine& engine) override { return engine.Run(); }
  void Fail(const absl::Status& status) override;
  absl::Status Finish(const Engine& engine, const SessionInfo& session) override;
  int exit_status() const override { return exit_status_; }

 private:
  absl::Status CheckPaths() const;
  absl::Status OpenInput();
  // What is in the output already, and whether this job may go on with it.
  absl::Status Resume(const ModelSource& source);
  absl::Status CheckSameJob(const std::optional<JobRecord>& old_record,
                            const JobRecord& new_record) const;
  absl::Status CheckOrder(const std::optional<InputScan>& scan) const;
  absl::StatusOr<JobRecord> MakeRecord(const ModelSource& source,
                                       const std::optional<InputScan>& scan) const;
  void LogStart(const std::optional<InputScan>& scan) const;

  void WatchSignals();
  void OnSignal(const StopSignal& signal);  // under mutex_

  const BatchOptions& options_;
  SignalWatch signals_;
  std::thread watcher_;

  GenerationConfig generation_;  // the model's, and the command line's above it
  ServedText text_;
  int input_fd_ = -1;
  bool input_is_file_ = false;
  std::unique_ptr<BatchOutput> output_;
  FinishedLines finished_;
  std::optional<int64_t> num_lines_;
  std::optional<int64_t> num_pending_;  // of them, without a result
  int exit_status_ = 0;

  std::mutex mutex_;
  bool closed_ = false;    // the watcher is to leave
  bool stopping_ = false;  // a signal has come
  bool finished_run_ = false;
  bool failed_ = false;  // what called Fail ends the process
  TokenCounter tokens_;
  std::unique_ptr<BatchRun> run_;   // uses api_, which answers into it
  std::unique_ptr<OpenAiApi> api_;  // goes first
};

BatchJob::BatchJob(const BatchOptions& options, SignalWatch signals)
    : options_(options), signals_(std::move(signals)) {
  watcher_ = std::thread([this] { WatchSignals(); });
}

BatchJob::~BatchJob() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  signals_.Wake();
  watcher_.join();
  if (input_fd_ > 0) close(input_fd_);
}

absl::Status BatchJob::CheckPaths() const {
  std::vector<std::string> inputs = {options_.chat_template};
  if (options_.input != "-") inputs.push_back(options_.input);
  const std::string& model = options_.engine.model;
  if (options_.output != "-") {
    LOCKSTEP_RETURN_IF_ERROR(CheckOutputIsNoInput("--output", options_.output, model, inputs));
    LOCKSTEP_RETURN_IF_ERROR(
        CheckOutputIsNoInput("--output's record", JobRecordPath(options_.output), model, inputs));
    inputs.push_back(options_.output);
  }
  return CheckOutputIsNoInput("--step-log", options_.engine.engine.step_log, model, inputs);
}

absl::Status BatchJob::OpenInput() {
  const bool is_stdin = options_.input == "-";
  input_fd_ = is_stdin ? 0 : ::open(options_.input.c_str(), O_RDONLY | O_CLOEXEC);
  struct stat info;
  const bool stats = input_fd_ >= 0 && fstat(input_fd_, &info) == 0;
  if (stats && S_ISDIR(info.st_mode)) errno = EISDIR;
  if (!stats || S_ISDIR(info.st_mode)) {
    return absl::FailedPreconditionError(
        absl::StrFormat("--input %s: %s", options_.input, std::strerror(errno)));
  }
  input_is_file_ = !is_stdin && S_ISREG(info.st_mode);
  return absl::OkStatus();
}

void Override(const SamplingFlags& flags, GenerationConfig* generation) {
  if (flags.temperature.has_value()) {
    generation->temperature = flags.temperature;
    generation->do_sample.reset();
  }
  if (flags.top_p.has_value()) generation->top_p = flags.top_p;
  if (flags.top_k.has_value()) generation->top_k = flags.top_k;
  if (flags.min_p.has_value()) generation->min_p = flags.min_p;
  if (flags.repetition_penalty.has_value()) {
    generation->repetition_penalty = flags.repetition_penalty;
  }
}

absl::Status BatchJob::Prepare(const ModelSource& source) {
  LOCKSTEP_RETURN_IF_ERROR(CheckPaths());
  generation_ = source.generation;
  Override(options_.sampling, &generation_);
  text_.model.config = &source.config;
  text_.model.generation = &generation_;
  LOCKSTEP_RETURN_IF_ERROR(OpenInput());
  LOCKSTEP_RETURN_IF_ERROR(LoadServedText(options_.engine.model, options_.chat_template, &text_));
  LOCKSTEP_ASSIGN_OR_RETURN(output_, BatchOutput::Open(options_.output, options_.lock_seconds));
  return Resume(source);
}

template <typename T>
Json OrNull(const std::optional<T>& value) {
  return value.has_value() ? Json(*value) : Json();
}

absl::StatusOr<JobRecord> BatchJob::MakeRecord(const ModelSource& source,
                                               const std::optional<InputScan>& scan) const {
  const EngineFlags& engine = options_.engine;
  JobRecord record;
  LOCKSTEP_ASSIGN_OR_RETURN(const std::string model_digest, ModelDigest(engine.model));
  const DType dtype = engine.dtype.value_or(source.config.dtype);
  const auto& kv_dtype = engine.engine.kv_cache_dtype;
  record.model = {
      {"path", engine.model},
      {"digest", model_digest},
      {"dtype", std::string(Name(dtype))},
      {"kv_cache_dtype", kv_dtype.has_value() ? Json(std::string(Name(*kv_dtype))) : Json()},
      {"weights", engine.load_format == LoadFormat::kAuto    ? "checkpoint"
                  : engine.load_format == LoadFormat::kDummy ? "dummy"
                                                             : "null"},
      {"chat_template", Json()}};
  if (!options_.chat_template.empty()) {
    LOCKSTEP_ASSIGN_OR_RETURN(const std::string text, ReadFile(options_.chat_template));
    record.model["chat_template"] =
        absl::StrFormat("%016x", HashBytes(text.data(), text.size(), 0));
  }
  record.input = {{"path", options_.input},
                  {"digest", scan.has_value() ? Json(scan->digest) : Json()},
                  {"lines", scan.has_value() ? Json(scan->num_lines) : Json()}};
  record.sampling = {{"temperature", OrNull(generation_.temperature)},
                     {"top_p", OrNull(generation_.top_p)},
                     {"top_k", OrNull(generation_.top_k)},
                     {"min_p", OrNull(generation_.min_p)},
                     {"repetition_penalty", OrNull(generation_.repetition_penalty)},
                     {"do_sample", OrNull(generation_.do_sample)},
                     {"eos_token_ids", generation_.eos_token_ids},
                     {"max_tokens", OrNull(options_.sampling.max_tokens)},
                     {"seed", OrNull(options_.sampling.seed)}};
  return record;
}

absl::Status BatchJob::CheckSameJob(const std::optional<JobRecord>& old_record,
                                    const JobRecord& new_record) const {
  if (output_->empty() || options_.force) return absl::OkStatus();
  if (!old_record.has_value()) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "--output %s: it is not empty, and there is no %s that says which job wrote it; name "
        "another file, or --force to add to it",
        options_.output, JobRecordPath(options_.output)));
  }
  const std::vector<std::string> differences = Differences(*old_record, new_record);
  if (differences.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "--output %s: it was begun with something else than now: %s; name another file, or --force "
      "to go on nevertheless",
      options_.output, absl::StrJoin(differences, ", ")));
}

absl::Status BatchJob::CheckOrder(const std::optional<InputScan>& scan) const {
  if (!options_.ordered || output_->empty()) return absl::OkStatus();
  if (finished_.in_order && scan.has_value() && !scan->has_gap) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "--ordered: what %s holds already cannot be continued in the order of the input",
      options_.output));
}

absl::Status BatchJob::Resume(const ModelSource& source) {
  const bool resumes = output_->is_file() && !output_->empty();
  std::optional<JobRecord> old_record;
  if (resumes) {
    LOCKSTEP_ASSIGN_OR_RETURN(old_record, ReadJobRecord(options_.output));
    if (!old_record.has_value()) LOCKSTEP_RETURN_IF_ERROR(CheckSameJob(old_record, {}));
    LOCKSTEP_ASSIGN_OR_RETURN(finished_, output_->Read(options_.retry_failed));
  }
  std::optional<InputScan> scan;
  if (input_is_file_) {
    LOCKSTEP_ASSIGN_OR_RETURN(
        scan, ScanInput(input_fd_, options_.input, kMaxBatchLineBytes, finished_.done));
    num_lines_ = scan->num_lines;
    num_pending_ = scan->num_pending;
  }
  if (output_->is_file()) {
    LOCKSTEP_ASSIGN_OR_RETURN(const JobRecord record, MakeRecord(source, scan));
    if (resumes) LOCKSTEP_RETURN_IF_ERROR(CheckSameJob(old_record, record));
    if (resumes) LOCKSTEP_RETURN_IF_ERROR(CheckOrder(scan));
    LOCKSTEP_RETURN_IF_ERROR(WriteJobRecord(options_.output, record));
    if (resumes) LOCKSTEP_RETURN_IF_ERROR(output_->Trim(finished_.num_retried > 0));
  }
  LogStart(scan);
  return absl::OkStatus();
}

void BatchJob::LogStart(const std::optional<InputScan>& scan) const {
  std::string text = "batch: ";
  if (scan.has_value()) {
    absl::StrAppend(&text, scan->num_pending, " of ", scan->num_lines, " lines to be answered");
  } else {
    absl::StrAppend(&text, "lines as they come from ",
                    options_.input == "-" ? "stdin" : options_.input);
  }
  if (const int64_t before = finished_.num_ok + finished_.num_failed; before > 0) {
    absl::StrAppend(&text, "; ", before, " are there already, ", finished_.num_failed,
                    " of them failed");
  }
  LogInfo(text);
}

// Of a job that has come to its end.
int CompleteStatus(const BatchCounts& counts) {
  if (counts.num_failed == 0) return 0;
  return counts.num_ok == 0 ? 2 : 1;
}

std::optional<int> BatchJob::FinishEarly() {
  if (num_pending_ != 0) return std::nullopt;
  const std::lock_guard lock(mutex_);
  finished_run_ = true;
  const BatchCounts counts{.num_ok = finished_.num_ok,
                           .num_failed = finished_.num_failed,
                           .before = finished_.num_ok + finished_.num_failed,
                           .num_lines = num_lines_};
  LogInfo(BatchSummaryText(counts));
  return CompleteStatus(counts);
}

absl::Status BatchJob::Submit(Engine& engine, const SessionInfo& session) {
  OpenAiOptions api;
  api.served_model_names = options_.served_model_names;
  if (api.served_model_names.empty()) api.served_model_names = {options_.engine.model};
  api.system_fingerprint = SystemFingerprint(session);
  api.max_num_seqs = options_.engine.engine.max_num_seqs;
  api.max_queue = kApiQueue;
  // A line that was given up for others would be one not answered. Each is bounded by itself.
  api.max_held_bytes = std::numeric_limits<int64_t>::max();
  api.logs_requests = false;  // the output says it all
  BatchRunOptions run;
  // Twice what runs: when answers end, others wait tokenised.
  run.window.max_choices = 2 * api.max_num_seqs;
  run.window.max_unwritten = std::max(run.window.max_unwritten, 4 * api.max_num_seqs);
  run.writer = {.ordered = options_.ordered,
                .fsync = options_.fsync,
                .progress = ResolveProgress(options_.progress)};
  run.defaults = {.max_tokens = options_.sampling.max_tokens, .seed = options_.sampling.seed};
  run.input_fd = input_fd_;
  run.input_name = "--input " + options_.input;
  const std::lock_guard lock(mutex_);
  LOCKSTEP_ASSIGN_OR_RETURN(api_, OpenAiApi::Create(engine, text_.model, api, &tokens_));
  run_ = std::make_unique<BatchRun>(run, finished_, num_lines_, *output_, *api_, tokens_,
                                    [&engine] { engine.RequestStop(); });
  return absl::OkStatus();
}

// Another rank may be gone, and mpirun about to end this one; the main thread may be anywhere. What
// was answered is kept; what was not has no record, and is answered when the job is run again.
void BatchJob::Fail(const absl::Status&) {
  const std::lock_guard lock(mutex_);
  failed_ = true;
  if (run_ == nullptr) return;
  run_->Abandon();
  run_->Flush().IgnoreError();
  LogInfo(BatchSummaryText(run_->counts()));
}

absl::Status BatchJob::Finish(const Engine&, const SessionInfo&) {
  const std::lock_guard lock(mutex_);
  const absl::Status flushed = run_->Flush();
  const bool complete = run_->complete();
  const BatchCounts counts = run_->counts();
  api_.reset();
  run_.reset();
  finished_run_ = true;
  exit_status_ = complete ? CompleteStatus(counts) : 1;
  if (!complete) {
    LogWarning(absl::StrCat("stopped before the end of the input",
                            output_->is_file() ? "; the same command goes on from here" : ""));
  }
  LogInfo(BatchSummaryText(counts));
  return flushed;
}

void BatchJob::WatchSignals() {
  while (true) {
    const std::optional<StopSignal> signal = signals_.Wait(-1);
    if (signal.has_value() && LauncherEnds(*signal)) {
      JobWatch::LauncherEnds();
      std::this_thread::sleep_for(kCauseDelay);
    }
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    if (signal.has_value()) OnSignal(*signal);
  }
}

void BatchJob::OnSignal(const StopSignal& signal) {
  // All is written, and the job is about to leave with a status that says how it went.
  if (finished_run_ || failed_) return;
  const std::string name = absl::StrCat("SIG", sigabbrev_np(signal.number));
  if (run_ == nullptr) {
    LogWarning(name + " while no line is being answered: ending");
    SignalWatch::EndBy(signal.number);
  }
  if (std::exchange(stopping_, true) || LauncherEnds(signal)) {
    LogWarning(name + ": ending at once");
    run_->Abandon();
    return;
  }
  LogInfo(name + ": no further lines are read; those that were are answered first");
  run_->StopReading();
}

}  // namespace

int RunBatch(const BatchOptions& options) {
  if (LaunchedRank() != 0) {
    // Rank 0 decides when to stop, and tells the others.
    SignalWatch::Ignore();
    return FollowEngineJob(options.engine);
  }
  absl::StatusOr<SignalWatch> signals = SignalWatch::Create();
  if (!signals.ok()) {
    Log(LogLevel::kError, std::string(signals.status().message()));
    return LeaveRefused(signals.status());
  }
  BatchJob job(options, *std::move(signals));
  return RunEngineJob(options.engine, job);
}

}  // namespace lockstep

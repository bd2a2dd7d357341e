#include "launch/serve_command.h"

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "launch/engine_session.h"
#include "launch/job_watch.h"
#include "launch/openai/served_text.h"
#include "launch/output_file.h"
#include "launch/serve/front_desk.h"
#include "launch/serve/signal_watch.h"
#include "runtime/core/log.h"

namespace lockstep {

namespace {

using Clock = std::chrono::steady_clock;

constexpr char kShuttingDown[] = "the server is shutting down";
// For what was answered to reach the clients. mpirun leaves a second in all when it ends the job.
constexpr double kCloseSeconds = 2;
constexpr double kHurriedCloseSeconds = 0.3;
constexpr double kDrainTickSeconds = 0.02;
// mpirun ends the ranks also because one of them is gone: the watchdog may be about to say so.
constexpr std::chrono::milliseconds kCauseDelay(300);
// Who signals a whole process group, or all processes of a service, reaches rank 0 twice: directly
// and through mpirun.
constexpr std::chrono::milliseconds kOneSignal(250);

// Rank 0's part. The main thread prepares, runs the engine and closes; the thread of WatchSignals
// says when to stop; that of the watchdog calls Fail.
class ServeJob : public EngineJob {
 public:
  ServeJob(const ServeOptions& options, SignalWatch signals);
  ~ServeJob() override;

  absl::Status Prepare(const ModelSource& source) override;
  absl::Status Submit(Engine& engine, const SessionInfo& session) override;
  absl::Status Run(Engine& engine) override { return engine.Run(); }
  void Fail(const absl::Status& status) override;
  absl::Status Finish(const Engine& engine, const SessionInfo& session) override;

 private:
  enum class Phase { kStarting, kServing, kDraining, kEnding, kFailed };

  MetricLabels Info(const Engine& engine, const SessionInfo& session) const;

  void WatchSignals();
  // Under mutex_.
  void OnSignal(const StopSignal& signal);
  void StartDrain(const std::string& why);
  void GoOnDraining();
  void EndNow();
  absl::Status CheckNotFailed() const;
  void CloseDesk(double seconds);

  const ServeOptions& options_;
  const std::vector<std::string> names_;
  SignalWatch signals_;
  std::thread watcher_;

  ServedText text_;

  std::mutex mutex_;
  std::unique_ptr<FrontDesk> desk_;  // from Prepare on
  bool closed_ = false;              // the watcher is to leave
  Phase phase_ = Phase::kStarting;
  bool hurried_ = false;  // mpirun ends the job
  bool desk_is_closed_ = false;
  Clock::time_point drain_since_;
  Engine* engine_ = nullptr;
  std::unique_ptr<OpenAiApi> api_;  // uses engine_
};

bool LauncherEnds(const StopSignal& signal) {
  return signal.number == SIGTERM && signal.from_parent && LaunchedByMpirun();
}

std::vector<std::string> NamesOf(const ServeOptions& options) {
  if (!options.served_model_names.empty()) return options.served_model_names;
  return {options.engine.model};
}

ServeJob::ServeJob(const ServeOptions& options, SignalWatch signals)
    : options_(options), names_(NamesOf(options)), signals_(std::move(signals)) {
  watcher_ = std::thread([this] { WatchSignals(); });
}

ServeJob::~ServeJob() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  signals_.Wake();
  watcher_.join();
}

// The port first: who started it wants to know soon, and /health may be asked from then on.
absl::Status ServeJob::Prepare(const ModelSource& source) {
  LOCKSTEP_RETURN_IF_ERROR(CheckOutputIsNoInput("--step-log", options_.engine.engine.step_log,
                                                options_.engine.model, {options_.chat_template}));
  HttpServerOptions http;
  http.host = options_.host;
  http.port = static_cast<int>(options_.port);
  {
    const std::lock_guard lock(mutex_);
    LOCKSTEP_RETURN_IF_ERROR(CheckNotFailed());
    LOCKSTEP_ASSIGN_OR_RETURN(desk_, FrontDesk::Create(http, names_[0], LOCKSTEP_VERSION));
  }
  text_.model.config = &source.config;
  text_.model.generation = &source.generation;
  return LoadServedText(options_.engine.model, options_.chat_template, &text_);
}

absl::Status ServeJob::Submit(Engine& engine, const SessionInfo& session) {
  OpenAiOptions api;
  api.served_model_names = names_;
  api.api_keys = options_.api_keys;
  if (const char* key = std::getenv("LOCKSTEP_API_KEY"); key != nullptr && *key != '\0') {
    api.api_keys.push_back(key);
  }
  api.system_fingerprint = SystemFingerprint(session);
  api.max_num_seqs = options_.engine.engine.max_num_seqs;
  api.max_queue = options_.max_queue;
  api.request_timeout_seconds = options_.request_timeout_seconds;
  const std::lock_guard lock(mutex_);
  LOCKSTEP_RETURN_IF_ERROR(CheckNotFailed());
  LOCKSTEP_ASSIGN_OR_RETURN(api_, OpenAiApi::Create(engine, text_.model, api, &desk_->metrics()));
  engine_ = &engine;
  desk_->Open(engine, *api_, Info(engine, session));
  phase_ = Phase::kServing;
  const bool bare_ipv6 = options_.host.find(':') != std::string::npos;
  LogInfo(absl::StrFormat("serving %s on http://%s:%d%s", names_[0],
                          bare_ipv6 ? "[" + options_.host + "]" : options_.host, desk_->port(),
                          api.api_keys.empty() ? "" : ", with an API key"));
  return absl::OkStatus();
}

MetricLabels ServeJob::Info(const Engine& engine, const SessionInfo& session) const {
  const EngineOptions& options = options_.engine.engine;
  const LoadFormat format = options_.engine.load_format;
  return {{"version", LOCKSTEP_VERSION},
          {"model", options_.engine.model},
          {"weights", format == LoadFormat::kAuto    ? "checkpoint"
                      : format == LoadFormat::kDummy ? "dummy"
                                                     : "null"},
          {"ranks", absl::StrCat(session.num_ranks)},
          {"threads", absl::StrCat(session.num_threads)},
          {"device", session.device == DeviceKind::kCuda ? "cuda" : "cpu"},
          {"dtype", std::string(Name(session.dtype))},
          {"max_model_len", absl::StrCat(engine.max_model_len())},
          {"max_num_seqs", absl::StrCat(options.max_num_seqs)},
          {"max_num_batched_tokens", absl::StrCat(options.max_num_batched_tokens)},
          {"block_size", absl::StrCat(options.block_size)},
          {"prefix_caching", options.enable_prefix_caching ? "yes" : "no"},
          {"chat", text_.model.chat != nullptr ? "yes" : "no"},
          {"load_seconds", absl::StrFormat("%.2f", session.load_seconds)}};
}

// Another rank may be gone, and mpirun about to end this one: soon. The main thread may be
// anywhere.
void ServeJob::Fail(const absl::Status& status) {
  const std::lock_guard lock(mutex_);
  phase_ = Phase::kFailed;
  if (desk_ == nullptr) return;
  desk_->SetState(ServerState::kFailed);
  if (api_ != nullptr) api_->Fail(status);
  CloseDesk(kHurriedCloseSeconds);
}

absl::Status ServeJob::CheckNotFailed() const {
  if (phase_ != Phase::kFailed) return absl::OkStatus();
  return absl::CancelledError("the job is ending");
}

void ServeJob::CloseDesk(double seconds) {
  if (!std::exchange(desk_is_closed_, true)) desk_->Close(seconds);
}

absl::Status ServeJob::Finish(const Engine&, const SessionInfo&) {
  const std::lock_guard lock(mutex_);
  CloseDesk(hurried_ ? kHurriedCloseSeconds : kCloseSeconds);
  api_.reset();
  engine_ = nullptr;
  LogInfo("the server has ended");
  return absl::OkStatus();
}

void ServeJob::WatchSignals() {
  while (true) {
    bool draining;
    {
      const std::lock_guard lock(mutex_);
      if (closed_) return;
      draining = phase_ == Phase::kDraining;
    }
    const std::optional<StopSignal> signal = signals_.Wait(draining ? kDrainTickSeconds : -1);
    if (signal.has_value() && LauncherEnds(*signal)) {
      JobWatch::LauncherEnds();
      std::this_thread::sleep_for(kCauseDelay);
    }
    const std::lock_guard lock(mutex_);
    if (signal.has_value()) {
      OnSignal(*signal);
    } else if (phase_ == Phase::kDraining) {
      GoOnDraining();
    }
  }
}

void ServeJob::OnSignal(const StopSignal& signal) {
  const std::string name = absl::StrCat("SIG", sigabbrev_np(signal.number));
  const bool launcher_ends = LauncherEnds(signal);
  switch (phase_) {
    case Phase::kStarting:
      LogWarning(name + " before the server was ready: ending");
      SignalWatch::EndBy(signal.number);
    case Phase::kServing:
      if (launcher_ends) {
        hurried_ = true;
        LogWarning(name + " from mpirun: ending at once");
        return EndNow();
      }
      return StartDrain(name);
    case Phase::kDraining:
      if (!launcher_ends && Clock::now() - drain_since_ < kOneSignal) return;
      hurried_ = launcher_ends;
      LogWarning(name + ": ending at once");
      return EndNow();
    case Phase::kFailed:
      return;  // what called Fail ends the process
    case Phase::kEnding:
      // The engine may wait for a rank that is gone.
      LogWarning(name + " while ending: no longer waiting for the engine");
      SignalWatch::EndBy(signal.number);
  }
}

void ServeJob::StartDrain(const std::string& why) {
  LogInfo(absl::StrFormat("%s: no new requests; %d open ones have %g s to finish", why,
                          api_->num_open(), options_.drain_seconds));
  phase_ = Phase::kDraining;
  drain_since_ = Clock::now();
  desk_->SetState(ServerState::kDraining);
  api_->StartDrain();
}

void ServeJob::GoOnDraining() {
  if (api_->WaitIdle(0)) return EndNow();
  const std::chrono::duration<double> drained = Clock::now() - drain_since_;
  if (drained.count() < options_.drain_seconds) return;
  LogWarning(absl::StrFormat("%d requests have not finished within %g s", api_->num_open(),
                             options_.drain_seconds));
  EndNow();
}

// The main thread leaves Run and closes.
void ServeJob::EndNow() {
  phase_ = Phase::kEnding;
  desk_->SetState(ServerState::kDraining);
  api_->EndAll(kShuttingDown);
  engine_->RequestStop();
}

}  // namespace

int RunServe(const ServeOptions& options) {
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
  ServeJob job(options, *std::move(signals));
  return RunEngineJob(options.engine, job);
}

}  // namespace lockstep

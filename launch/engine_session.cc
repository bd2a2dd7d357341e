#include "launch/engine_session.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <future>
#include <memory>
#include <thread>

#include "launch/job_watch.h"
#include "launch/launch_check.h"
#include "launch/start_watch.h"
#include "model/checkpoint/counted_checkpoint.h"
#include "parallel/mpi_communicator.h"
#include "parallel/partition.h"
#include "parallel/watched_communicator.h"
#include "runtime/core/cuda_device.h"
#include "runtime/core/phase_times.h"
#include "runtime/engine_device.h"

namespace lockstep {

namespace {

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

absl::Status Unexpected(const std::exception& e) {  // out of memory, or a bug
  return absl::InternalError(absl::StrFormat("unexpected exception: %s", e.what()));
}

absl::Status CheckTpSize(const EngineFlags& flags, const Communicator& communicator) {
  if (flags.tp.value_or(communicator.size()) == communicator.size()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "--tp %d, but %d rank%s started; start it with mpirun -np %d", *flags.tp, communicator.size(),
      communicator.size() == 1 ? " was" : "s were", *flags.tp));
}

absl::Status OpenOnThisRank(const EngineFlags& flags, const Communicator& communicator,
                            ModelSource* source) {
  LOCKSTEP_ASSIGN_OR_RETURN(*source,
                            OpenModel(flags.model, flags.load_format, flags.use_generation_config));
  return PartitionJob(source->config.Dims(), communicator.size(), flags.engine.emulated).status();
}

// COLLECTIVE. Each rank opens the model by itself; rank 0 also prepares its job. Whatever ranks
// must have alike is compared as soon as it is known: what follows from it would mislead.
absl::Status Open(const EngineFlags& flags, Communicator& communicator, JobWatch& watch,
                  EngineJob& job, ModelSource* source) {
  const std::string opening = "opening " + flags.model;
  // The first collective: ranks that were refused earlier are in it, too (LeaveRefused).
  LOCKSTEP_RETURN_IF_ERROR(Agree(communicator, CheckTpSize(flags, communicator)));
  LOCKSTEP_RETURN_IF_ERROR(CheckSameLaunch(flags, communicator));
  RankProgress& progress = watch.watched().progress;
  progress.SetPhase(RankPhase::kLoad);  // before others first hear of this rank
  LOCKSTEP_RETURN_IF_ERROR(watch.Start(communicator, flags.watchdog_seconds));
  LOCKSTEP_RETURN_IF_ERROR(Agree(communicator, CatchExhaustion(opening, [&] {
                                   return OpenOnThisRank(flags, communicator, source);
                                 })));
  source->checkpoint = CountReadBytes(std::move(source->checkpoint),
                                      [&progress](int64_t bytes) { progress.Mark(bytes); });
  LOCKSTEP_RETURN_IF_ERROR(CheckSameModel(*source, communicator));
  return Agree(communicator, CatchExhaustion(opening, [&] {
                 if (communicator.rank() != 0) return absl::OkStatus();
                 const ProgressPause pause(progress);  // reads files of any size, or stdin
                 return job.Prepare(*source);
               }));
}

// Cores that the launcher, taskset or a container leaves to this process: mpirun binds each of one
// or two ranks to a single core unless told otherwise.
int CoresOfThisProcess() {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return 1 << 10;  // over 1024 cores
  return CPU_COUNT(&allowed);
}

EngineOptions ResolveEngineOptions(const EngineFlags& flags, const ModelConfig& config,
                                   DeviceKind device, const Communicator& communicator,
                                   WatchedRank& watched) {
  EngineOptions options = flags.engine;
  options.dtype = flags.dtype.value_or(config.dtype);
  options.device = device;
  options.null_model = flags.load_format == LoadFormat::kNull;
  options.null_step_seconds = flags.null_step_ms / 1000;
  options.watched = &watched;
  // The ranks of an idle engine pass a collective well within the watchdog's time.
  if (flags.watchdog_seconds > 0) {
    options.heartbeat_seconds = std::min(options.heartbeat_seconds, flags.watchdog_seconds / 4);
  }
  // There is no float16 arithmetic on CPUs.
  if (options.dtype == DType::kF16 && device == DeviceKind::kCpu) options.dtype = DType::kF32;
  if (options.num_threads == 0) {
    const int cores = static_cast<int>(std::thread::hardware_concurrency());
    options.num_threads =
        std::clamp(cores / communicator.ranks_on_host(), 1, std::max(1, CoresOfThisProcess()));
  }
  return options;
}

// Rank 0's part between a standing engine and its end. The job's exit status.
int Lead(Communicator& communicator, JobWatch& watch, Engine& engine, EngineJob& job,
         const SessionInfo& session) {
  RankProgress& progress = watch.watched().progress;
  const auto alone = [&progress](auto call) {  // the job's own affairs may take any time
    const ProgressPause pause(progress);
    return call();
  };
  if (absl::Status status = alone([&] { return job.Submit(engine, session); }); !status.ok()) {
    if (absl::IsCancelled(status)) watch.Fail(communicator, status);  // Fail of the job came before
    Log(LogLevel::kError, std::string(status.message()));
    return 2;
  }
  if (absl::Status status = job.Run(engine); !status.ok()) watch.Fail(communicator, status);
  if (absl::Status status = alone([&] { return job.Finish(engine, session); }); !status.ok()) {
    Log(LogLevel::kError, std::string(status.message()));
    return 1;
  }
  return job.exit_status();
}

int LeadOrFollow(Communicator& communicator, JobWatch& watch, Engine& engine, EngineJob& job,
                 const SessionInfo& session) {
  // An exception does not leave the engine: its end would wait for the other ranks.
  try {
    int exit_status = 0;
    absl::Status status;
    if (communicator.rank() == 0) {
      exit_status = Lead(communicator, watch, engine, job, session);
      status = engine.Stop();
    } else {
      status = engine.Follow();
    }
    if (status.ok()) status = communicator.Broadcast(&exit_status, sizeof(exit_status), 0);
    if (!status.ok()) watch.Fail(communicator, status);
    return exit_status;
  } catch (const std::exception& e) {
    watch.Fail(communicator, Unexpected(e));
  }
}

// Everything once the ranks can talk. A refusal is the same status on all ranks.
absl::StatusOr<int> RunOnRanks(const EngineFlags& flags, Communicator& communicator,
                               JobWatch& watch, PhaseTimes& times, EngineJob& job) {
  const Clock::time_point start = Clock::now();
  ModelSource source;
  const bool null_model = flags.load_format == LoadFormat::kNull;
  const DeviceKind wanted = null_model && flags.engine.device == DeviceKind::kAuto
                                ? DeviceKind::kCpu
                                : flags.engine.device;
  // The first question starts the driver: tenths of a second, in which files are read.
  std::future<int> driver;
  if (BuiltWithCuda() && wanted != DeviceKind::kCpu) {
    driver = std::async(std::launch::async, NumCudaDevices);
  }
  LOCKSTEP_RETURN_IF_ERROR(Open(flags, communicator, watch, job, &source));
  times.End("opening");
  if (driver.valid()) driver.wait();
  constexpr int kGoOn = -1;
  int early = kGoOn;
  if (communicator.rank() == 0) early = job.FinishEarly().value_or(kGoOn);
  LOCKSTEP_RETURN_IF_ERROR(communicator.Broadcast(&early, sizeof(early), 0));
  if (early != kGoOn) return early;
  LOCKSTEP_ASSIGN_OR_RETURN(const DeviceKind device, ResolveDevice(wanted, communicator));
  const EngineOptions options =
      ResolveEngineOptions(flags, source.config, device, communicator, watch.watched());
  LOCKSTEP_ASSIGN_OR_RETURN(const std::unique_ptr<Engine> engine,
                            Engine::Create(source, options, communicator, &times));
  LogInfo(absl::StrFormat("ready in %.2f s: %s", times.total_seconds(), times.ToString()));
  const SessionInfo session{communicator.size(), options.num_threads, device, options.dtype,
                            SecondsSince(start)};
  return LeadOrFollow(communicator, watch, *engine, job, session);
}

const char* LauncherVariable(std::initializer_list<const char*> names) {
  for (const char* name : names) {
    if (const char* value = std::getenv(name)) return value;
  }
  return nullptr;
}

int NumberIn(std::initializer_list<const char*> names) {
  const char* number = LauncherVariable(names);
  return number == nullptr ? 0 : std::atoi(number);
}

// Also of processes that do not know of each other: they are refused, and one of them shall say so.
int NumberAmongProcesses() {
  return NumberIn({"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID"});
}

}  // namespace

int RunEngineJob(const EngineFlags& flags, EngineJob& job) {
  PhaseTimes times;
  SetLogLevel(flags.log_level);
  if (NumberAmongProcesses() != 0) SilenceLog();
  StartWatch start_watch(LaunchedRank(), StartedByLauncher() ? flags.watchdog_seconds : 0);
  absl::StatusOr<std::unique_ptr<Communicator>> created = CreateMpiCommunicator();
  if (!created.ok()) {
    Log(LogLevel::kError, std::string(created.status().message()));
    return 2;
  }
  std::unique_ptr<Communicator> ranks = *std::move(created);
  const bool leads = ranks->rank() == 0;
  if (!leads) SilenceLog();
  times.End("MPI");
  // Until the ranks have parted: a rank that is gone before others have come to the end is found.
  JobWatch watch(start_watch, leads ? [&job](const absl::Status& status) { job.Fail(status); }
                                    : std::function<void(const absl::Status&)>());
  WatchedCommunicator communicator(*ranks, watch.watched().progress);
  watch.watched().fail = [&](const absl::Status& status) { watch.Fail(communicator, status); };
  try {
    absl::StatusOr<int> exit_status = RunOnRanks(flags, communicator, watch, times, job);
    if (!exit_status.ok()) {
      const absl::Status& status = exit_status.status();
      // No refusal: the ranks can no longer agree on one, or Fail of the job came before.
      if (communicator.failed() || absl::IsCancelled(status)) watch.Fail(communicator, status);
      Log(LogLevel::kError, std::string(status.message()));
      // Nobody leaves with 2, upon which mpirun kills the others, before the message is out.
      communicator.Barrier().IgnoreError();
      watch.Stop();  // all is said: that mpirun ends the later ones is no news
      // Not what was asked for is at fault but the machine (a GPU, NCCL), and a thread in a library
      // may wait for ever.
      if (absl::IsInternal(status) || absl::IsDeadlineExceeded(status)) AbortJob(1);
    }
    watch.watched().progress.SetPhase(RankPhase::kEnd);
    watch.watched().progress.Enter(CollectiveKind::kFinalize, 0);
    ranks.reset();
    return exit_status.ok() ? *exit_status : 2;
  } catch (const std::exception& e) {
    watch.Fail(communicator, Unexpected(e));
  }
}

int FollowEngineJob(const EngineFlags& flags) {
  class Follower : public EngineJob {
    absl::Status Prepare(const ModelSource&) override { return absl::OkStatus(); }
    absl::Status Submit(Engine&, const SessionInfo&) override { return absl::OkStatus(); }
    absl::Status Finish(const Engine&, const SessionInfo&) override { return absl::OkStatus(); }
  } follower;
  return RunEngineJob(flags, follower);
}

std::string SystemFingerprint(const SessionInfo& session) {
  return absl::StrFormat("lockstep-%s-tp%d-%s", LOCKSTEP_VERSION, session.num_ranks,
                         std::string(Name(session.dtype)));
}

int LaunchedRank() { return NumberIn({"OMPI_COMM_WORLD_RANK", "PMIX_RANK"}); }

bool LaunchedByMpirun() { return LauncherVariable({"OMPI_COMM_WORLD_SIZE"}) != nullptr; }

bool LaunchedAsOneOfSeveral() {
  const char* size = LauncherVariable({"OMPI_COMM_WORLD_SIZE"});
  return size != nullptr && std::atoi(size) > 1;
}

int LeaveRefused(const absl::Status& status) {
  if (!LaunchedAsOneOfSeveral()) return 2;
  if (auto communicator = CreateMpiCommunicator(); communicator.ok()) {
    Agree(**communicator, status).IgnoreError();
    (*communicator)->Barrier().IgnoreError();
  }
  return 2;
}

}  // namespace lockstep

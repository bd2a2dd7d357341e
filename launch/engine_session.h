// The life of an engine command on all ranks: start-up, work on rank 0, end, exit status.
//
//   every rank   compare program and options with rank 0's (launch_check.h); start the watchdog
//   every rank   open the model      -> Agree: a refusal ends all ranks with 2; compare it, too
//   rank 0       EngineJob::Prepare  -> Agree; FinishEarly: all ranks end with its status
//   every rank   make the engine     -> refusals end all ranks with 2
//   rank 0       EngineJob::Submit, Run, Finish; the others follow
//   every rank   learn rank 0's exit status
//
// Rank 0 alone prints. A fault after the start, when other ranks may be inside a collective, ends
// the whole job with 1 and one line that names the rank (job_watch.h): also that a rank is gone, or
// hangs.
#pragma once

#include <optional>
#include <string>

#include "launch/engine_flags.h"
#include "runtime/engine.h"

namespace lockstep {

// What is known once the engine stands.
struct SessionInfo {
  int num_ranks = 1;
  int num_threads = 1;  // of each rank
  DeviceKind device = DeviceKind::kCpu;
  DType dtype = DType::kF32;
  double load_seconds = 0;  // from the start of the command until the engine stands
};

// What decides about the bits of an answer, besides model and request.
std::string SystemFingerprint(const SessionInfo& session);

// What rank 0 does. Not used on other ranks.
class EngineJob {
 public:
  virtual ~EngineJob() = default;

  // Reads inputs, checks that outputs can be written. A failure means exit status 2, but for
  // Cancelled of this and Submit: Fail was called before. `source` outlives the job's use.
  virtual absl::Status Prepare(const ModelSource& source) = 0;
  // After Prepare: the exit status where nothing is left to compute. The weights are not loaded
  // then, and neither Submit nor Run nor Finish is called.
  virtual std::optional<int> FinishEarly() { return std::nullopt; }
  // Submits every request, or makes ready who will. A failure means exit status 2.
  virtual absl::Status Submit(Engine& engine, const SessionInfo& session) = 0;
  // Runs the engine: until everything that was submitted has ended, or as long as the job wants.
  virtual absl::Status Run(Engine& engine) { return engine.RunUntilIdle(); }
  // The job is about to be aborted. Called at most once, at any time after construction, by the
  // watchdog's thread: the main thread may be in one of the other methods or hang in the engine,
  // and comes no further than the end of that method. Returns soon.
  virtual void Fail(const absl::Status&) {}
  // After Run: prints what remains, and lets go of the engine. A failure means exit status 1.
  virtual absl::Status Finish(const Engine& engine, const SessionInfo& session) = 0;
  // Of the command, once Finish was OK.
  virtual int exit_status() const { return 0; }
};

// COLLECTIVE over all processes of the job. Returns the exit status, the same on all ranks.
int RunEngineJob(const EngineFlags& flags, EngineJob& job);
// The same for a rank that is not 0, and has no job of its own.
int FollowEngineJob(const EngineFlags& flags);

// The rank number that the launcher put into the environment; 0 without one. Needs no MPI.
int LaunchedRank();
// True when mpirun started this process, be it as the only rank.
bool LaunchedByMpirun();
// True when a launcher started this process as one of several ranks.
bool LaunchedAsOneOfSeveral();

// Ends a command that was refused with `status` before MPI was started. Under a launcher all ranks
// meet first, as RunEngineJob does: a refusal on this rank alone is then told by rank 0, and
// mpirun, which kills the others when one has failed, does not cut rank 0 short. Returns 2.
int LeaveRefused(const absl::Status& status);

}  // namespace lockstep

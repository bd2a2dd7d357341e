// The thread that appends records to the output as they come, and shows how far the job is.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "launch/batch/batch_output.h"
#include "launch/batch/batch_progress.h"

namespace lockstep {

// When what was appended is forced onto the disk. A killed process loses nothing in either case; a
// machine that loses its power does.
enum class FsyncPolicy { kNever, kEnd, kEverySecond, kAlways };

class BatchWriter {
 public:
  struct Options {
    bool ordered = false;  // records are appended in the order of their numbers
    FsyncPolicy fsync = FsyncPolicy::kEverySecond;
    ProgressKind progress = ProgressKind::kNone;
  };
  // Called on the writer's thread, none of them under a lock of its own.
  struct Callbacks {
    // So many records of so many bytes are in the file, and were counted.
    std::function<void(int64_t records, int64_t bytes)> written;
    std::function<void()> failed;  // nothing more will be written; once
    std::function<void(BatchCounts*)> add_tokens;
  };

  // `counts`: of what is there already. `output` outlives the writer.
  BatchWriter(BatchOutput& output, const Options& options, const BatchCounts& counts,
              Callbacks callbacks);
  ~BatchWriter();  // Close

  // Any thread. `number`: 0, 1, 2, ... of the records of this run.
  void Add(int64_t number, bool ok, std::string record);
  // Appends what is left (of ordered records those without a gap before them), syncs, and ends the
  // thread. Why not everything could be written, if so. Idempotent; one thread at a time.
  absl::Status Close();
  // So far: what is counted is in the file.
  BatchCounts counts() const;

 private:
  struct Pending {
    bool ok = false;
    std::string text;
  };
  using Clock = std::chrono::steady_clock;

  void Run();
  // Moves out what may be written now. Under mutex_.
  std::vector<Pending> TakeReady();
  void Write(const std::vector<Pending>& ready);
  void SyncWhenDue(bool at_end);
  bool Sync();  // false when it failed
  void Fail(const absl::Status& status);

  BatchOutput& output_;
  const Options options_;
  const Callbacks callbacks_;
  const Clock::time_point start_ = Clock::now();

  // The thread's own.
  BatchProgress progress_;
  Clock::time_point last_sync_ = start_;
  bool unsynced_ = false;

  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::map<int64_t, Pending> pending_;
  int64_t next_ = 0;  // with ordered
  bool closing_ = false;
  absl::Status status_;
  BatchCounts counts_;

  std::thread thread_;  // the last: it uses the others
};

}  // namespace lockstep

// What a batch job shows of its progress on stderr.
#pragma once

#include <string>

#include "launch/batch/batch_counts.h"

namespace lockstep {

enum class ProgressKind {
  kAuto,   // kBar where stderr is a terminal, be it mpirun's, else kPlain
  kBar,    // a line that is written over itself
  kPlain,  // a message now and then
  kNone,
};

// Under mpirun stderr is a pipe, whatever mpirun's own is: launch/run.sh looks, and sets
// LOCKSTEP_STDERR_IS_TERMINAL=1.
ProgressKind ResolveProgress(ProgressKind kind);

// "1200 of 10000 lines (12%), 3 failed, 85.3 lines/s, 1200 tokens/s, 1m43s left"
std::string BatchProgressText(const BatchCounts& counts);
// "ok 9997, failed 3; in this run 8800 lines in 103.2 s, ..."
std::string BatchSummaryText(const BatchCounts& counts);

// Thread rule: one thread.
class BatchProgress {
 public:
  // Not kAuto.
  explicit BatchProgress(ProgressKind kind) : kind_(kind) {}
  ~BatchProgress();  // wipes the bar

  // How often Show is to be called, in seconds.
  double tick_seconds() const { return kind_ == ProgressKind::kBar ? 0.1 : 1; }
  void Show(const BatchCounts& counts);

 private:
  const ProgressKind kind_;
  double next_seconds_ = 1;  // when the next message is due
  bool shown_ = false;
};

}  // namespace lockstep

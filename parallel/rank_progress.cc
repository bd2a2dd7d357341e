#include "parallel/rank_progress.h"

#include "runtime/core/status.h"

namespace lockstep {

namespace {

const char* NameOf(CollectiveKind kind) {
  switch (kind) {
    case CollectiveKind::kNone:
      return "none";
    case CollectiveKind::kAllReduce:
      return "sum";
    case CollectiveKind::kAllGather:
      return "gather to all ranks";
    case CollectiveKind::kGather:
      return "gather to one rank";
    case CollectiveKind::kBroadcast:
      return "broadcast";
    case CollectiveKind::kBarrier:
      return "barrier";
    case CollectiveKind::kFinalize:
      return "MPI_Finalize";
  }
  return "unknown";
}

}  // namespace

std::string PhaseText(const ProgressRecord& record) {
  switch (record.phase) {
    case RankPhase::kStart:
      return "at the start";
    case RankPhase::kLoad:
      return "while loading, before step 1";
    case RankPhase::kPrefill:
      return absl::StrFormat("in step %d (prefill)", record.step);
    case RankPhase::kDecode:
      return absl::StrFormat("in step %d (decode)", record.step);
    case RankPhase::kIdle:
      return record.step == 0 ? "idle before step 1"
                              : absl::StrFormat("idle after step %d", record.step);
    case RankPhase::kEnd:
      return absl::StrFormat("at the end, after step %d", record.step);
  }
  return "in an unknown phase";
}

std::string CollectiveText(const ProgressRecord& record) {
  if (record.kind == CollectiveKind::kFinalize) return NameOf(record.kind);
  const bool in_step = record.phase == RankPhase::kPrefill || record.phase == RankPhase::kDecode;
  std::string text = in_step ? absl::StrFormat("collective %d of the step", record.entered_in_step)
                             : absl::StrFormat("collective %d of the job", record.entered);
  absl::StrAppend(&text, " (", NameOf(record.kind));
  if (record.kind != CollectiveKind::kBarrier) {
    absl::StrAppend(&text, " of ", record.bytes, record.bytes == 1 ? " byte" : " bytes");
  }
  return text + ")";
}

ProgressRecord RankProgress::Read() const {
  ProgressRecord record;
  record.step = Load(step_);
  record.phase = Load(phase_);
  record.paused = Load(paused_);
  // In this order `passed` is never the larger.
  record.passed = passed_.load(std::memory_order_acquire);
  record.entered = Load(entered_);
  record.entered_in_step = record.entered - Load(step_begin_);
  record.kind = Load(kind_);
  record.bytes = Load(bytes_);
  record.landed = Load(landed_);
  record.marks = Load(marks_);
  return record;
}

}  // namespace lockstep

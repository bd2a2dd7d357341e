#include "runtime/step_log.h"

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace lockstep {

namespace {

// By hand: as a document of objects a large batch's line takes longer than its step's planning.
std::string LineOf(const StepRecord& record) {
  int64_t tokens = 0;
  int64_t prompt_tokens = 0;
  std::string requests;
  for (const ScheduledRows& row : record.rows) {
    tokens += row.count;
    prompt_tokens += row.prompt_tokens;
    absl::StrAppend(&requests, requests.empty() ? "" : ",", "{\"id\":", row.id,
                    ",\"choice\":", row.choice, ",\"position\":", row.first_position,
                    ",\"tokens\":", row.count);
    absl::StrAppend(&requests, ",\"prompt_tokens\":", row.prompt_tokens, "}");
  }
  const SchedulerStats& stats = record.stats;
  const std::chrono::duration<double> time = record.landed_at.time_since_epoch();
  std::string line = absl::StrFormat("{\"step\":%d,\"time\":%.6f,\"seconds\":%.9f", record.step,
                                     time.count(), record.seconds);
  absl::StrAppend(&line, ",\"tokens\":", tokens, ",\"prompt_tokens\":", prompt_tokens);
  absl::StrAppend(&line, ",\"requests\":[", requests, "]");
  absl::StrAppend(&line, ",\"waiting\":", stats.num_waiting, ",\"running\":", stats.num_running);
  absl::StrAppend(&line, ",\"free_blocks\":", stats.num_free_blocks,
                  ",\"cached_blocks\":", stats.num_cached_blocks);
  absl::StrAppend(&line, ",\"preemptions\":", stats.num_preemptions,
                  ",\"finished\":", stats.num_finished, "}\n");
  return line;
}

}  // namespace

absl::StatusOr<std::unique_ptr<StepLog>> StepLog::Create(const std::string& path) {
  std::unique_ptr<StepLog> log(new StepLog(path));
  log->file_.reset(std::fopen(path.c_str(), "w"));
  if (log->file_ == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrFormat("step log %s: %s", path, std::strerror(errno)));
  }
  return log;
}

absl::Status StepLog::Write(const StepRecord& record) {
  const std::string text = LineOf(record);
  if (std::fwrite(text.data(), 1, text.size(), file_.get()) == text.size() &&
      std::fflush(file_.get()) == 0) {
    return absl::OkStatus();
  }
  return absl::InternalError(absl::StrFormat("step log %s: %s", path_, std::strerror(errno)));
}

}  // namespace lockstep

#include "runtime/step_log.h"

#include <cerrno>
#include <cstring>

#include "runtime/core/json.h"

namespace lockstep {

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
  const SchedulerStats& stats = record.stats;
  OrderedJson line;
  line["step"] = record.step;
  line["time"] = std::chrono::duration<double>(record.landed_at.time_since_epoch()).count();
  line["seconds"] = record.seconds;
  int64_t tokens = 0;
  int64_t prompt_tokens = 0;
  OrderedJson requests = OrderedJson::array();
  for (const ScheduledRows& row : record.rows) {
    tokens += row.count;
    prompt_tokens += row.prompt_tokens;
    requests.push_back({{"id", row.id},
                        {"choice", row.choice},
                        {"position", row.first_position},
                        {"tokens", row.count},
                        {"prompt_tokens", row.prompt_tokens}});
  }
  line["tokens"] = tokens;
  line["prompt_tokens"] = prompt_tokens;
  line["requests"] = std::move(requests);
  line["waiting"] = stats.num_waiting;
  line["running"] = stats.num_running;
  line["free_blocks"] = stats.num_free_blocks;
  line["cached_blocks"] = stats.num_cached_blocks;
  line["preemptions"] = stats.num_preemptions;
  line["finished"] = stats.num_finished;
  const std::string text = DumpJson(line) + "\n";
  if (std::fwrite(text.data(), 1, text.size(), file_.get()) == text.size() &&
      std::fflush(file_.get()) == 0) {
    return absl::OkStatus();
  }
  return absl::InternalError(absl::StrFormat("step log %s: %s", path_, std::strerror(errno)));
}

}  // namespace lockstep

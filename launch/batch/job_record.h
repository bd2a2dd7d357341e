// What a batch job's answers depend on besides the lines themselves, kept beside its output as
// OUTPUT.job: so that a resumed job is the same job.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "launch/batch/batch_output.h"
#include "runtime/core/json.h"
#include "runtime/core/status.h"

namespace lockstep {

// Of one pass over the input.
struct InputScan {
  std::string digest;       // of the text of every line
  int64_t num_lines = 0;    // that are not blank
  int64_t num_pending = 0;  // and not done
  // A line that is pending stands before one that is done: what a resumed job adds would not be in
  // the order of the input.
  bool has_gap = false;
};
// `fd` is read from its beginning and left at it. Longer lines than `max_line_bytes` count with
// beginning and length.
absl::StatusOr<InputScan> ScanInput(int fd, const std::string& name, int64_t max_line_bytes,
                                    const LineSet& done);

// Of MODEL, a file or a folder: names and sizes of configuration, tokenizer, template and weights,
// with all bytes of small files and samples of large ones.
absl::StatusOr<std::string> ModelDigest(const std::string& model);

struct JobRecord {
  Json model;     // {"path", "digest", "dtype", ...}
  Json input;     // {"path", "digest", "lines"}; digest null: stdin
  Json sampling;  // defaults of what lines leave out
};

std::string JobRecordPath(const std::string& output);
// None when there is no such file. InvalidArgument when it is no record of a job.
absl::StatusOr<std::optional<JobRecord>> ReadJobRecord(const std::string& output);
absl::Status WriteJobRecord(const std::string& output, const JobRecord& record);
// What has changed, for a message; empty: nothing. Paths may change. An input without a digest is
// never the same.
std::vector<std::string> Differences(const JobRecord& old_record, const JobRecord& new_record);

}  // namespace lockstep

// The file that a batch job's results are appended to: locked against other writers, and readable
// by the job that goes on after a kill.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "launch/batch/batch_record.h"
#include "runtime/core/status.h"

namespace lockstep {

// What lies in the file already.
struct FinishedLines {
  LineSet done;             // of these records
  int64_t num_ok = 0;       // answered
  int64_t num_failed = 0;   // records of failures
  int64_t num_retried = 0;  // further ones, which do not count as done
  bool in_order = true;     // the records stand in the order of the input
};

// Not thread-safe.
class BatchOutput {
 public:
  // "-" is stdout; FIFOs and devices are written to without lock and resume, too. Of a regular
  // file, which is made where there is none, this is the only writer until the end of the process:
  // waits at most `lock_seconds` for another one. FailedPrecondition when that does not end, or the
  // file cannot be used.
  static absl::StatusOr<std::unique_ptr<BatchOutput>> Open(const std::string& path,
                                                           double lock_seconds);
  ~BatchOutput();
  BatchOutput(const BatchOutput&) = delete;
  BatchOutput& operator=(const BatchOutput&) = delete;

  bool is_file() const { return is_file_; }
  bool empty() const { return end_ == 0; }

  // Reads the records; the file stays as it is. A last line without an end, which a kill has torn,
  // is no record. With `retry_failed` records of failures do not count as done. InvalidArgument
  // for any other line that is no record.
  absl::StatusOr<FinishedLines> Read(bool retry_failed);
  // Takes off a torn last line, and with `drop_failed` the records of failures. After Read.
  absl::Status Trim(bool drop_failed);

  // All of `records`, whole lines; on an error none of them is in the file. FailedPrecondition with
  // the system's reason; Cancelled when nobody reads a pipe any more.
  absl::Status Append(std::string_view records);
  // Returns when what was appended is on the disk. Does nothing to what is no regular file.
  absl::Status Sync();

 private:
  BatchOutput(std::string path, int fd, bool is_file)
      : path_(std::move(path)), fd_(fd), is_file_(is_file) {}

  static absl::StatusOr<std::unique_ptr<BatchOutput>> OpenStream(const std::string& path);
  absl::Status DropFailed();
  absl::Status Error(const char* doing) const;

  const std::string path_;
  int fd_;
  const bool is_file_;
  int64_t end_ = 0;  // of the last whole record
};

}  // namespace lockstep

// The lines of a batch job's output, in the form of OpenAI's batch files:
//
//   {"id":"batch_req_N","custom_id":"...","response":{"status_code":200,"request_id":"...",
//    "body":{...}},"error":null}
//
// N is the number of the input's line. Where the line could not be answered, `body` is OpenAI's
// error object and `error` is {"code","message","line"}, which OpenAI leaves null for answers of
// its API: who looks at either finds the failure.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "launch/openai/api_error.h"
#include "runtime/core/status.h"

namespace lockstep {

struct BatchRecord {
  int64_t line = 0;
  std::optional<std::string> custom_id;
  int status_code = 0;
  std::string request_id;
  std::string body;  // one JSON object, without line breaks

  bool ok() const { return status_code == 200; }
};

// The record of a line that never became a request.
BatchRecord RecordOfBadLine(int64_t line, const std::optional<std::string>& custom_id,
                            const ApiError& error);

// With a line feed at the end.
std::string FormatRecord(const BatchRecord& record);

// What a resumed job asks of a record.
struct RecordHead {
  int64_t line = 0;
  bool ok = false;
};
// `text`: one line, without its end. InvalidArgument when it is no such record.
absl::StatusOr<RecordHead> ReadRecordHead(std::string_view text);

// Numbers of lines. Takes a bit for every line up to the largest.
class LineSet {
 public:
  static constexpr int64_t kMaxLine = int64_t{1} << 34;  // 2 GiB of bits

  // 1 to kMaxLine.
  void Insert(int64_t line);
  bool Contains(int64_t line) const;
  int64_t largest() const { return largest_; }  // 0: it is empty

 private:
  std::vector<uint64_t> words_;
  int64_t largest_ = 0;
};

}  // namespace lockstep

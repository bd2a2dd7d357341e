// A batch job between a standing engine and its end: lines in, records out, with a bounded window
// between.
//
//   feeder thread   reads and parses lines while there is room; hands requests to the API
//   the API's       parse bodies, tokenise, generate, answer (launch/openai)
//   writer thread   appends records (batch_writer.h)
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "launch/batch/batch_line.h"
#include "launch/batch/batch_writer.h"
#include "launch/batch/line_reader.h"
#include "launch/openai/api_server.h"
#include "launch/openai/serving_observer.h"

namespace lockstep {

// Longest line of an input; the rest of a longer one is passed over.
inline constexpr int64_t kMaxBatchLineBytes = 32 << 20;

// What is being worked on is bounded by all of these; one line always has room.
struct BatchWindow {
  int64_t max_choices = 512;     // that run or wait in the engine
  int64_t max_unwritten = 4096;  // lines that were read and whose records are not in the file
  int64_t max_bytes = int64_t{256} << 20;  // of those lines, then of their records
};

// Counts the tokens of a run. Any thread.
class TokenCounter : public ServingObserver {
 public:
  void OnSubmitted(int64_t prompt_tokens) override { prompt_ += prompt_tokens; }
  void OnAdmitted(double) override {}
  void OnRefused(int) override {}
  void OnFirstToken(double) override { ++generated_; }
  void OnNextToken(double) override { ++generated_; }
  void OnFinished(const FinishedChoice&) override {}
  void AddTo(BatchCounts* counts) const {
    counts->prompt_tokens += prompt_;
    counts->generated_tokens += generated_;
  }

 private:
  std::atomic<int64_t> prompt_ = 0;
  std::atomic<int64_t> generated_ = 0;
};

struct BatchRunOptions {
  BatchWindow window;
  BatchWriter::Options writer;
  LineDefaults defaults;
  int input_fd = -1;
  std::string input_name;
};

// Any thread may call the methods, but for the destructor.
class BatchRun {
 public:
  // `finished`: of lines that are passed over. `tokens` is the API's observer. `on_end` is called
  // once, on the feeder's thread, when nothing more will come. All outlive the run; the run
  // outlives the API.
  BatchRun(const BatchRunOptions& options, const FinishedLines& finished,
           std::optional<int64_t> num_lines, BatchOutput& output, OpenAiApi& api,
           const TokenCounter& tokens, std::function<void()> on_end);
  ~BatchRun();  // Abandon, then waits for the end

  // Reads no further line; what was read is answered and written.
  void StopReading();
  // Ends as soon as may be: what is answered from now on is not written.
  void Abandon();
  // After on_end, or within it: whether every line was read and answered.
  bool complete() const;
  // Appends what came before Abandon and waits until it is there. Why the output or the input
  // failed, if one did.
  absl::Status Flush();
  BatchCounts counts() const { return writer_.counts(); }

 private:
  void Feed();
  absl::Status ReadLines();
  bool WaitForRoom();
  void Take(const InputLine& line);
  void Send(int64_t number, int64_t line, BatchLine request);
  void Answered(int64_t number, int64_t choices, int64_t line_bytes, BatchRecord record);
  void AddRecord(int64_t number, const BatchRecord& record);
  bool HasRoom() const;

  const BatchRunOptions options_;
  const FinishedLines& finished_;
  OpenAiApi& api_;
  const std::function<void()> on_end_;
  int wake_fd_ = -1;  // ends a read of a pipe

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  int64_t next_number_ = 0;
  int64_t open_choices_ = 0;
  int64_t open_requests_ = 0;
  int64_t unwritten_ = 0;
  int64_t bytes_ = 0;
  bool stopped_ = false;
  bool abandoned_ = false;
  bool read_all_ = false;
  bool unanswered_ = false;  // a line that was read has no record
  absl::Status read_status_;

  BatchWriter writer_;
  std::thread feeder_;  // the last: it uses the others
};

}  // namespace lockstep

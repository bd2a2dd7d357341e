#include "launch/batch/batch_run.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <memory>
#include <utility>

#include "launch/batch/batch_exchange.h"

namespace lockstep {

namespace {

BatchCounts StartCounts(const FinishedLines& finished, std::optional<int64_t> num_lines) {
  BatchCounts counts;
  counts.num_ok = finished.num_ok;
  counts.num_failed = finished.num_failed;
  counts.before = counts.num_records();
  counts.num_lines = num_lines;
  return counts;
}

ApiError TooLong() {
  return {.http_status = 413,
          .message = absl::StrFormat("the line is longer than %d bytes", kMaxBatchLineBytes),
          .code = "invalid_line"};
}

// The engine or the API ends, and the answer says so: the line was not answered.
bool IsNoAnswer(int status) { return status == 503 || status == 429; }

}  // namespace

BatchRun::BatchRun(const BatchRunOptions& options, const FinishedLines& finished,
                   std::optional<int64_t> num_lines, BatchOutput& output, OpenAiApi& api,
                   const TokenCounter& tokens, std::function<void()> on_end)
    : options_(options),
      finished_(finished),
      api_(api),
      on_end_(std::move(on_end)),
      wake_fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      writer_(output, options.writer, StartCounts(finished, num_lines),
              {.written =
                   [this](int64_t records, int64_t bytes) {
                     const std::lock_guard lock(mutex_);
                     unwritten_ -= records;
                     bytes_ -= bytes;
                     changed_.notify_all();
                   },
               .failed = [this] { Abandon(); },
               .add_tokens = [&tokens](BatchCounts* counts) { tokens.AddTo(counts); }}),
      feeder_([this] { Feed(); }) {}

BatchRun::~BatchRun() {
  Abandon();
  feeder_.join();
  writer_.Close().IgnoreError();
  if (wake_fd_ >= 0) close(wake_fd_);
}

void BatchRun::StopReading() {
  const std::lock_guard lock(mutex_);
  stopped_ = true;
  eventfd_write(wake_fd_, 1);
  changed_.notify_all();
}

void BatchRun::Abandon() {
  const std::lock_guard lock(mutex_);
  stopped_ = true;
  abandoned_ = true;
  eventfd_write(wake_fd_, 1);
  changed_.notify_all();
}

bool BatchRun::complete() const {
  const std::lock_guard lock(mutex_);
  return read_all_ && !unanswered_ && !abandoned_;
}

absl::Status BatchRun::Flush() {
  const absl::Status written = writer_.Close();
  const std::lock_guard lock(mutex_);
  return written.ok() ? read_status_ : written;
}

void BatchRun::Feed() {
  const absl::Status status = ReadLines();
  std::unique_lock lock(mutex_);
  read_status_ = status;
  changed_.wait(lock, [this] { return open_requests_ == 0 || abandoned_; });
  if (abandoned_) {
    lock.unlock();
    api_.EndAll("the batch job is ending");  // answers what is open
    lock.lock();
    changed_.wait(lock, [this] { return open_requests_ == 0; });
  }
  lock.unlock();
  on_end_();
}

absl::Status BatchRun::ReadLines() {
  LineReader reader(options_.input_fd, options_.input_name, kMaxBatchLineBytes, wake_fd_);
  InputLine line;
  while (WaitForRoom()) {
    LOCKSTEP_ASSIGN_OR_RETURN(const bool more, reader.Next(&line));
    {
      const std::lock_guard lock(mutex_);
      // A line that the wake-up has cut short is none.
      if (stopped_ && (!more || !line.has_end)) return absl::OkStatus();
      read_all_ = !more;
    }
    if (!more) return absl::OkStatus();
    const bool blank = !line.too_long && IsBlankLine(line.text);
    if (!blank && !finished_.done.Contains(line.number)) Take(line);
  }
  return absl::OkStatus();
}

bool BatchRun::HasRoom() const {
  if (unwritten_ == 0) return true;
  const BatchWindow& window = options_.window;
  return open_choices_ < window.max_choices && unwritten_ < window.max_unwritten &&
         bytes_ < window.max_bytes;
}

// False when no further line is to be read.
bool BatchRun::WaitForRoom() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return stopped_ || HasRoom(); });
  return !stopped_;
}

void BatchRun::Take(const InputLine& line) {
  BatchLine request;
  if (line.too_long) {
    request.error = TooLong();
  } else {
    request = ParseBatchLine(line.text, line.number, options_.defaults);
  }
  const bool bad = request.error.has_value();
  int64_t number;
  {
    const std::lock_guard lock(mutex_);
    number = next_number_++;
    ++unwritten_;
    if (!bad) {
      bytes_ += std::ssize(request.body);
      open_choices_ += request.num_choices;
      ++open_requests_;
    }
  }
  if (bad) {
    AddRecord(number, RecordOfBadLine(line.number, request.custom_id, *request.error));
  } else {
    Send(number, line.number, std::move(request));
  }
}

void BatchRun::Send(int64_t number, int64_t line, BatchLine request) {
  const int64_t choices = request.num_choices, bytes = std::ssize(request.body);
  auto answer = [this, number, line, choices, bytes, custom_id = std::move(request.custom_id)](
                    int status, const std::string& request_id, std::string body) {
    Answered(number, choices, bytes,
             {.line = line,
              .custom_id = custom_id,
              .status_code = status,
              .request_id = request_id,
              .body = std::move(body)});
  };
  api_.Handle(std::make_shared<BatchExchange>(std::move(request.path), std::move(request.body),
                                              std::move(answer)));
}

void BatchRun::Answered(int64_t number, int64_t choices, int64_t line_bytes, BatchRecord record) {
  const bool answered = !IsNoAnswer(record.status_code);
  bool drop;
  {
    const std::lock_guard lock(mutex_);
    drop = abandoned_ || !answered;
    unanswered_ = unanswered_ || drop;
    if (drop) --unwritten_;
    bytes_ -= line_bytes;
  }
  if (!drop) AddRecord(number, record);
  const std::lock_guard lock(mutex_);
  open_choices_ -= choices;
  --open_requests_;
  changed_.notify_all();
}

void BatchRun::AddRecord(int64_t number, const BatchRecord& record) {
  std::string text = FormatRecord(record);
  {
    const std::lock_guard lock(mutex_);
    bytes_ += std::ssize(text);
  }
  writer_.Add(number, record.ok(), std::move(text));
}

}  // namespace lockstep

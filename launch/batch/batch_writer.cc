#include "launch/batch/batch_writer.h"

#include <chrono>
#include <utility>

namespace lockstep {

namespace {

constexpr std::chrono::seconds kSyncEvery(1);

}  // namespace

BatchWriter::BatchWriter(BatchOutput& output, const Options& options, const BatchCounts& counts,
                         Callbacks callbacks)
    : output_(output),
      options_(options),
      callbacks_(std::move(callbacks)),
      progress_(options.progress),
      counts_(counts),
      thread_([this] { Run(); }) {}

BatchWriter::~BatchWriter() { Close().IgnoreError(); }

void BatchWriter::Add(int64_t number, bool ok, std::string record) {
  const std::lock_guard lock(mutex_);
  pending_.emplace(number, Pending{ok, std::move(record)});
  if (!options_.ordered || number == next_) wake_.notify_one();
}

absl::Status BatchWriter::Close() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  wake_.notify_one();
  if (thread_.joinable()) thread_.join();
  const std::lock_guard lock(mutex_);
  return status_;
}

BatchCounts BatchWriter::counts() const {
  BatchCounts counts;
  {
    const std::lock_guard lock(mutex_);
    counts = counts_;
  }
  counts.seconds = std::chrono::duration<double>(Clock::now() - start_).count();
  if (callbacks_.add_tokens) callbacks_.add_tokens(&counts);
  return counts;
}

std::vector<BatchWriter::Pending> BatchWriter::TakeReady() {
  std::vector<Pending> ready;
  while (!pending_.empty() && (!options_.ordered || pending_.begin()->first == next_)) {
    ready.push_back(std::move(pending_.begin()->second));
    pending_.erase(pending_.begin());
    ++next_;
  }
  return ready;
}

void BatchWriter::Run() {
  const std::chrono::duration<double> tick(progress_.tick_seconds());
  std::unique_lock lock(mutex_);
  while (true) {
    const auto has_ready = [this] {
      return closing_ ||
             (!pending_.empty() && (!options_.ordered || pending_.begin()->first == next_));
    };
    wake_.wait_for(lock, tick, has_ready);
    const std::vector<Pending> ready = TakeReady();
    const bool at_end = closing_ && ready.empty();
    const bool works = status_.ok();
    lock.unlock();
    if (works && !ready.empty()) Write(ready);
    if (works) SyncWhenDue(at_end);
    progress_.Show(counts());
    lock.lock();
    if (at_end) return;
  }
}

void BatchWriter::Write(const std::vector<Pending>& ready) {
  std::string text;
  for (const Pending& record : ready) text += record.text;
  if (const absl::Status status = output_.Append(text); !status.ok()) return Fail(status);
  unsynced_ = true;
  if (options_.fsync == FsyncPolicy::kAlways && !Sync()) return;
  {
    const std::lock_guard lock(mutex_);
    for (const Pending& record : ready) ++(record.ok ? counts_.num_ok : counts_.num_failed);
  }
  callbacks_.written(std::ssize(ready), std::ssize(text));
}

void BatchWriter::SyncWhenDue(bool at_end) {
  if (!unsynced_ || options_.fsync == FsyncPolicy::kNever) return;
  const bool due =
      options_.fsync == FsyncPolicy::kEverySecond && Clock::now() - last_sync_ >= kSyncEvery;
  if (due || at_end) Sync();
}

bool BatchWriter::Sync() {
  const absl::Status status = output_.Sync();
  unsynced_ = false;
  last_sync_ = Clock::now();
  if (!status.ok()) Fail(status);
  return status.ok();
}

void BatchWriter::Fail(const absl::Status& status) {
  {
    const std::lock_guard lock(mutex_);
    if (!status_.ok()) return;
    status_ = status;
  }
  callbacks_.failed();
}

}  // namespace lockstep

#include "launch/batch/batch_output.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <thread>
#include <utility>

#include "launch/batch/line_reader.h"
#include "runtime/core/log.h"

namespace lockstep {

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kLockTick(50);
constexpr int64_t kMaxRecordBytes = int64_t{4} << 30;  // far more than an answer may be

absl::Status FileError(const std::string& path, const char* doing) {
  return absl::FailedPreconditionError(
      absl::StrFormat("--output %s: %s%s", path, doing, std::strerror(errno)));
}

// Of this open file, not of the process: another open of the same process is kept out, too. Over
// NFS the server keeps it. It goes with the descriptor, however the process ends.
bool TryLock(int fd) {
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  return fcntl(fd, F_OFD_SETLK, &lock) == 0;
}

// Whether `path` still leads to the file that is open: another writer may have put a new one in its
// place while this one waited.
bool IsFileAt(int fd, const std::string& path) {
  struct stat own, there;
  return fstat(fd, &own) == 0 && stat(path.c_str(), &there) == 0 && own.st_dev == there.st_dev &&
         own.st_ino == there.st_ino;
}

bool WriteAll(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(fd, bytes.data(), bytes.size());
    if (written < 0 && errno != EINTR) return false;
    if (written > 0) bytes.remove_prefix(static_cast<size_t>(written));
  }
  return true;
}

// A new name is on the disk when its folder is.
void SyncFolderOf(const std::string& path) {
  const std::filesystem::path file = path;
  const std::string folder = file.has_parent_path() ? file.parent_path().string() : ".";
  const int fd = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return;
  fsync(fd);  // not every file system can; there is nothing else to do
  close(fd);
}

}  // namespace

absl::StatusOr<std::unique_ptr<BatchOutput>> BatchOutput::OpenStream(const std::string& path) {
  const int fd = path == "-" ? dup(1) : ::open(path.c_str(), O_WRONLY | O_CLOEXEC);
  if (fd < 0) return FileError(path, "");
  return std::unique_ptr<BatchOutput>(new BatchOutput(path, fd, false));
}

absl::StatusOr<std::unique_ptr<BatchOutput>> BatchOutput::Open(const std::string& path,
                                                               double lock_seconds) {
  struct stat there;
  if (path == "-") return OpenStream(path);
  if (stat(path.c_str(), &there) == 0 && !S_ISREG(there.st_mode)) {
    if (S_ISDIR(there.st_mode)) errno = EISDIR;
    return S_ISDIR(there.st_mode) ? FileError(path, "") : OpenStream(path);
  }
  const Clock::time_point end = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                                   std::chrono::duration<double>(lock_seconds));
  for (bool told = false;;) {
    const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (fd < 0) return FileError(path, "");
    const bool locked = TryLock(fd);
    if (locked && IsFileAt(fd, path)) {
      std::unique_ptr<BatchOutput> output(new BatchOutput(path, fd, true));
      output->end_ = lseek(fd, 0, SEEK_END);
      return output;
    }
    const bool busy = locked || errno == EAGAIN || errno == EACCES;
    const absl::Status error = FileError(path, "it cannot be locked: ");
    close(fd);
    if (!busy) return error;
    if (Clock::now() >= end) {
      return absl::FailedPreconditionError(
          absl::StrFormat("--output %s: another job writes to it, and has not ended within %g s",
                          path, lock_seconds));
    }
    if (!std::exchange(told, true)) {
      LogInfo(absl::StrFormat("--output %s: another job writes to it; waiting up to %g s", path,
                              lock_seconds));
    }
    std::this_thread::sleep_for(kLockTick);
  }
}

BatchOutput::~BatchOutput() { close(fd_); }

absl::Status BatchOutput::Error(const char* doing) const { return FileError(path_, doing); }

absl::StatusOr<FinishedLines> BatchOutput::Read(bool retry_failed) {
  FinishedLines finished;
  if (lseek(fd_, 0, SEEK_SET) < 0) return Error("");
  LineReader reader(fd_, path_, kMaxRecordBytes);
  InputLine line;
  int64_t position = 0;
  while (true) {
    LOCKSTEP_ASSIGN_OR_RETURN(const bool more, reader.Next(&line));
    if (!more || !line.has_end) break;
    const absl::StatusOr<RecordHead> head = ReadRecordHead(line.text);
    if (!head.ok()) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "--output %s line %d: %s", path_, line.number, std::string(head.status().message())));
    }
    position += line.num_bytes;
    if (!head->ok && retry_failed) {
      ++finished.num_retried;
      continue;
    }
    if (finished.done.Contains(head->line)) {
      return absl::InvalidArgumentError(
          absl::StrFormat("--output %s line %d: a second record of the input's line %d", path_,
                          line.number, head->line));
    }
    finished.in_order = finished.in_order && head->line > finished.done.largest();
    finished.done.Insert(head->line);
    ++(head->ok ? finished.num_ok : finished.num_failed);
  }
  end_ = position;
  return finished;
}

absl::Status BatchOutput::Trim(bool drop_failed) {
  struct stat own;
  if (fstat(fd_, &own) != 0) return Error("");
  if (own.st_size != end_) {
    LogInfo(absl::StrFormat("--output %s: dropped a torn last line of %d bytes", path_,
                            static_cast<int64_t>(own.st_size) - end_));
    if (ftruncate(fd_, end_) != 0) return Error("");
  }
  return drop_failed ? DropFailed() : absl::OkStatus();
}

// By a new file that takes the old one's place: whatever happens, one of the two is there.
absl::Status BatchOutput::DropFailed() {
  const std::string next_path = path_ + ".next";
  const int next =
      ::open(next_path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0666);
  if (next < 0) return Error("a new file beside it: ");
  const auto fail = [&] {
    const absl::Status error = Error("a new file beside it: ");
    close(next);
    unlink(next_path.c_str());
    return error;
  };
  if (!TryLock(next) || lseek(fd_, 0, SEEK_SET) < 0) return fail();
  LineReader reader(fd_, path_, kMaxRecordBytes);
  InputLine line;
  std::string kept;
  int64_t size = 0;
  while (true) {
    const absl::StatusOr<bool> more = reader.Next(&line);
    if (!more.ok()) return fail();
    if (*more && ReadRecordHead(line.text).value_or(RecordHead()).ok) kept += line.text + "\n";
    if (std::ssize(kept) > (1 << 20) || !*more) {
      if (!WriteAll(next, kept)) return fail();
      size += std::ssize(kept);
      kept.clear();
    }
    if (!*more) break;
  }
  struct stat own;
  if (fstat(fd_, &own) == 0 && fchmod(next, own.st_mode & 07777) != 0) return fail();
  if (fsync(next) != 0 || rename(next_path.c_str(), path_.c_str()) != 0) return fail();
  SyncFolderOf(path_);
  close(std::exchange(fd_, next));
  end_ = size;
  return absl::OkStatus();
}

absl::Status BatchOutput::Append(std::string_view records) {
  if (WriteAll(fd_, records)) {
    end_ += std::ssize(records);
    return absl::OkStatus();
  }
  const bool gone = errno == EPIPE;
  const absl::Status error = Error("");
  // What went in of these lines goes out again: there is no half record.
  if (is_file_ && ftruncate(fd_, end_) != 0) return Annotate(error, "and the last line is torn");
  return gone ? absl::CancelledError(error.message()) : error;
}

absl::Status BatchOutput::Sync() {
  if (!is_file_ || fdatasync(fd_) == 0) return absl::OkStatus();
  return Error("");
}

}  // namespace lockstep

#include "parallel/shared_mapping.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <random>
#include <utility>

namespace lockstep {
namespace {

constexpr int64_t kPreambleBytes = 64;  // holds the token, keeps the rest aligned

absl::Status Failed(const std::string& what, int error) {
  return absl::FailedPreconditionError(absl::StrFormat("%s: %s", what, std::strerror(error)));
}

absl::StatusOr<void*> Map(int fd, int64_t size_bytes) {
  void* base =
      mmap(nullptr, kPreambleBytes + size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) return Failed("mapping shared memory", errno);
  return base;
}

}  // namespace

absl::StatusOr<SharedMapping> SharedMapping::Create(int64_t size_bytes) {
  const int fd = memfd_create("lockstep-ranks", MFD_CLOEXEC);
  if (fd < 0) return Failed("creating shared memory", errno);
  SharedMappingHandle handle = {.pid = getpid(), .fd = fd, .size_bytes = size_bytes};
  if (const int error = posix_fallocate(fd, 0, kPreambleBytes + size_bytes); error != 0) {
    close(fd);
    return absl::ResourceExhaustedError(absl::StrFormat("reserving %d bytes of shared memory: %s",
                                                        size_bytes, std::strerror(error)));
  }
  absl::StatusOr<void*> base = Map(fd, size_bytes);
  if (!base.ok()) {
    close(fd);
    return base.status();
  }
  std::random_device random;
  handle.token = (static_cast<uint64_t>(random()) << 32) | random();
  std::memcpy(*base, &handle.token, sizeof(handle.token));
  return SharedMapping(*base, handle);
}

absl::StatusOr<SharedMapping> SharedMapping::Attach(const SharedMappingHandle& handle) {
  const std::string path = absl::StrFormat("/proc/%d/fd/%d", handle.pid, handle.fd);
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return Failed("opening " + path, errno);
  struct stat info = {};
  absl::StatusOr<void*> base = absl::FailedPreconditionError(path + " is other memory");
  if (fstat(fd, &info) == 0 && info.st_size == kPreambleBytes + handle.size_bytes) {
    base = Map(fd, handle.size_bytes);
  }
  close(fd);
  if (!base.ok()) return base.status();
  SharedMapping mapping(*base, handle);
  mapping.handle_.fd = -1;  // the creator's
  if (std::memcmp(*base, &handle.token, sizeof(handle.token)) != 0) {
    return absl::FailedPreconditionError(path + " is other memory");
  }
  return mapping;
}

SharedMapping::SharedMapping(SharedMapping&& other) noexcept
    : base_(std::exchange(other.base_, nullptr)), handle_(std::exchange(other.handle_, {})) {}

SharedMapping& SharedMapping::operator=(SharedMapping&& other) noexcept {
  std::swap(base_, other.base_);
  std::swap(handle_, other.handle_);
  return *this;
}

SharedMapping::~SharedMapping() {
  if (base_ != nullptr) munmap(base_, kPreambleBytes + handle_.size_bytes);
  if (handle_.fd >= 0) close(static_cast<int>(handle_.fd));
}

void* SharedMapping::data() const { return static_cast<uint8_t*>(base_) + kPreambleBytes; }

}  // namespace lockstep

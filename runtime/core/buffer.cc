#include "runtime/core/buffer.h"

#include <sys/mman.h>

#include <cstdlib>

namespace lockstep {

namespace {
constexpr int64_t kAlignment = 64;
constexpr int64_t kHugePage = int64_t{2} << 20;
}  // namespace

absl::StatusOr<Buffer> Buffer::Create(int64_t size_bytes, const std::string& what) {
  LOCKSTEP_CHECK(size_bytes >= 0);
  Buffer buffer;
  if (size_bytes == 0) return buffer;
  const bool large =
      size_bytes >= kHugePage;  // huge pages save TLB misses when weights are streamed
  const int64_t alignment = large ? kHugePage : kAlignment;
  const int64_t rounded = (size_bytes + alignment - 1) / alignment * alignment;
  buffer.data_ = std::aligned_alloc(static_cast<size_t>(alignment), static_cast<size_t>(rounded));
  if (buffer.data_ == nullptr) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "%s: cannot allocate %.1f MiB of host memory", what, size_bytes / 1048576.0));
  }
  if (large)
    madvise(buffer.data_, static_cast<size_t>(rounded),
            MADV_HUGEPAGE);  // advice only: failure is harmless
  buffer.size_bytes_ = size_bytes;
  return buffer;
}

Buffer::~Buffer() { std::free(data_); }

}  // namespace lockstep

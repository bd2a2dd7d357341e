// Memory that the processes of one host share, without a name in the file system: nothing is left
// behind by a killed job, and neither /dev/shm nor its size matters.
#pragma once

#include <cstdint>

#include "runtime/core/status.h"

namespace lockstep {

// What another process needs to map the same memory.
struct SharedMappingHandle {
  int64_t pid = 0;  // of the creator, as its own namespace counts
  int64_t fd = -1;  // -1: creation failed
  int64_t size_bytes = 0;
  uint64_t token = 0;  // is found in the memory itself, so that a wrong process is noticed
};

// Movable, not copyable; unmaps on destruction.
class SharedMapping {
 public:
  // Zeroed memory, reserved now rather than when touched: ResourceExhausted instead of SIGBUS.
  static absl::StatusOr<SharedMapping> Create(int64_t size_bytes);
  // The creator must still hold its mapping. FailedPrecondition, saying why, when the memory cannot
  // be reached (another container or user).
  static absl::StatusOr<SharedMapping> Attach(const SharedMappingHandle& handle);

  SharedMapping() = default;
  SharedMapping(SharedMapping&& other) noexcept;
  SharedMapping& operator=(SharedMapping&& other) noexcept;
  ~SharedMapping();

  // Aligned to a cache line.
  void* data() const;
  const SharedMappingHandle& handle() const { return handle_; }

 private:
  SharedMapping(void* base, const SharedMappingHandle& handle) : base_(base), handle_(handle) {}

  void* base_ = nullptr;
  SharedMappingHandle handle_;
};

}  // namespace lockstep

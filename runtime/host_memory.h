// How much memory of this host a process may still take.
#pragma once

#include <cstdint>
#include <string>

namespace lockstep {

// Bytes that can be had without swapping: the kernel's estimate (MemAvailable), or what is left of
// the memory limit of the process's control group (v1 or v2, page cache counted as free) where that
// is less. The roots are parameters for tests.
int64_t AvailableHostMemoryBytes(const std::string& proc_root = "/proc",
                                 const std::string& cgroup_root = "/sys/fs/cgroup");

}  // namespace lockstep

#pragma once

#include <string>

#include "runtime/core/status.h"

namespace lockstep {

// kRegular refuses what is no plain file: a FIFO in a model's folder would block for ever. kAny
// also takes FIFOs and devices, such as the shell's <(command).
enum class FileKind { kRegular, kAny };

inline constexpr int64_t kMaxReadFileBytes = int64_t{1} << 30;

// The whole file. NotFound when it is not there; FailedPrecondition when it cannot be read, is of
// another kind or larger than kMaxReadFileBytes. The message names the path.
absl::StatusOr<std::string> ReadFile(const std::string& path, FileKind kind = FileKind::kRegular);

}  // namespace lockstep

#include "runtime/core/status.h"

#include <cstdio>
#include <cstdlib>

namespace lockstep {

absl::Status Annotate(const absl::Status& status, const std::string& context) {
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat(context, ": ", std::string(status.message())));
}

void CheckFailed(const char* file, int line, const char* condition) {
  std::fprintf(stderr, "lockstep: bug: %s:%d: %s does not hold\n", file, line, condition);
  std::abort();
}

}  // namespace lockstep

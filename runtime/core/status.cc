#include "runtime/core/status.h"

#include <cstdio>
#include <cstdlib>
#include <new>
#include <system_error>

namespace lockstep {

absl::Status Annotate(const absl::Status& status, const std::string& context) {
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat(context, ": ", std::string(status.message())));
}

absl::Status CatchExhaustion(const std::string& what, const std::function<absl::Status()>& phase) {
  try {
    return phase();
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError(what + ": out of memory");
  } catch (const std::system_error& e) {  // std::thread
    return absl::ResourceExhaustedError(
        absl::StrFormat("%s: cannot start a thread: %s", what, e.what()));
  }
}

void CheckFailed(const char* file, int line, const char* condition) {
  std::fprintf(stderr, "lockstep: bug: %s:%d: %s does not hold\n", file, line, condition);
  std::abort();
}

}  // namespace lockstep

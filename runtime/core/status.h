// Errors: absl::Status and absl::StatusOr everywhere, no exception crosses a folder's border.
//
// The message of a Status is shown to a person as it is: what is wrong, where (file, tensor,
// option), what to do. Messages are made with absl::StrFormat or absl::StrCat. Debian's Abseil has
// its own string_view: StrFormat's %s takes a std::string_view, StrCat does not.
//
// LOCKSTEP_CHECK is for bugs only, never for input.
#pragma once

#include <functional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace lockstep {

// Puts `context` and ": " in front of the message; an OK status stays OK.
absl::Status Annotate(const absl::Status& status, const std::string& context);

// Runs one phase that may fail on this rank alone. An exception that the standard library throws
// out of it (no memory, no more threads) becomes ResourceExhausted, `what` in front, so that the
// phase can be closed with all other ranks.
absl::Status CatchExhaustion(const std::string& what, const std::function<absl::Status()>& phase);

[[noreturn]] void CheckFailed(const char* file, int line, const char* condition);

}  // namespace lockstep

#define LOCKSTEP_CONCAT_INNER(a, b) a##b
#define LOCKSTEP_CONCAT(a, b) LOCKSTEP_CONCAT_INNER(a, b)

#define LOCKSTEP_RETURN_IF_ERROR(expr)          \
  do {                                          \
    if (::absl::Status s_ = (expr); !s_.ok()) { \
      return s_;                                \
    }                                           \
  } while (false)

#define LOCKSTEP_ASSIGN_OR_RETURN(lhs, expr) \
  LOCKSTEP_ASSIGN_OR_RETURN_IMPL(LOCKSTEP_CONCAT(status_or_, __LINE__), lhs, expr)
#define LOCKSTEP_ASSIGN_OR_RETURN_IMPL(tmp, lhs, expr) \
  auto tmp = (expr);                                   \
  if (!tmp.ok()) return tmp.status();                  \
  lhs = std::move(tmp).value()

#define LOCKSTEP_CHECK(condition)                                              \
  do {                                                                         \
    if (!(condition)) ::lockstep::CheckFailed(__FILE__, __LINE__, #condition); \
  } while (false)

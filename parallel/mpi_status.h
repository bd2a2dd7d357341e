// MPI error codes as Status. Communicators must have MPI_ERRORS_RETURN for this to be reached.
#pragma once

#include <mpi.h>

#include "runtime/core/status.h"

namespace lockstep {

inline absl::Status MpiStatus(int code, const char* call) {
  if (code == MPI_SUCCESS) return absl::OkStatus();
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  if (MPI_Error_string(code, text, &length) != MPI_SUCCESS) length = 0;
  return absl::InternalError(
      absl::StrFormat("%s failed: %s (code %d)", call, std::string(text, length), code));
}

}  // namespace lockstep

// LOCKSTEP_RETURN_IF_MPI_ERROR(MPI_Barrier(comm));
#define LOCKSTEP_RETURN_IF_MPI_ERROR(call) \
  LOCKSTEP_RETURN_IF_ERROR(::lockstep::MpiStatus(call, #call))

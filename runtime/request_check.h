// Refuses requests that can never run, before any work.
#pragma once

#include "runtime/core/status.h"
#include "runtime/request.h"
#include "runtime/step_plan.h"

namespace lockstep {

// InvalidArgument, naming the parameter, its value and its range.
absl::Status CheckSampling(const SamplingParams& sampling, int64_t vocab_size);

// CheckSampling, and the prompt: its ids, its length against the maximum length and the KV cache.
absl::Status CheckRequest(const Request& request, const PlanLimits& limits);

}  // namespace lockstep

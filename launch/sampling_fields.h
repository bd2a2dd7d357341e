// Sampling parameters written as JSON, by the names that OpenAI's API and vLLM use.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "launch/sampling_defaults.h"
#include "model/json_fields.h"

namespace lockstep {

// The keys that ReadSamplingFields knows.
std::span<const char* const> SamplingFieldNames();

// Faults of type are left in fields.status(); ranges are CheckSampling's. A key that is null says
// nothing. `stop` is a string or a list of strings; top_k -1 is "off", as 0 is.
SamplingFlags ReadSamplingFields(const Json& object, JsonFields& fields);

// {"ID": BIAS, ...}: ids in [0, 2^31), values in [-100, 100].
absl::StatusOr<std::vector<std::pair<int32_t, double>>> ParseLogitBias(const Json& object);

}  // namespace lockstep

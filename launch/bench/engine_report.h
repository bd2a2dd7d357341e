// What the benchmarks that run an engine have in common: what was run on.
#pragma once

#include <string>

#include "launch/engine_session.h"
#include "runtime/core/json.h"
#include "runtime/engine.h"

namespace lockstep {

// kind, model, weights, num_ranks, emulated (null, or tp_size and rank), num_threads, device,
// dtype, max_model_len, load_seconds.
OrderedJson EngineJson(const std::string& kind, const EngineFlags& flags,
                       const SessionInfo& session, int64_t max_model_len);
// The same in a line.
std::string EngineText(const EngineFlags& flags, const SessionInfo& session);

// The length that requests may have, as far as it is known before the model is loaded.
absl::StatusOr<int64_t> ExpectedModelLen(const EngineFlags& flags, const ModelSource& source);

}  // namespace lockstep

// A tiny model with made-up weights, and engines over threads as ranks.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "model/checkpoint/checkpoint.h"
#include "parallel/communicator.h"
#include "runtime/engine.h"

namespace lockstep {

// 6 query heads over 3 KV heads, 2 layers, 101 tokens: splits unevenly over 2 ranks, evenly over 3.
ModelConfig TinyConfig();
ModelSource TinySource(const ModelConfig& config);

struct Result {
  std::vector<int32_t> tokens;
  FinishReason finish = FinishReason::kNone;
  std::optional<int32_t> stop_token;
  std::string error;
  int num_final_events = 0;
  std::vector<float> logits;                      // of a scored prompt, [prompt, V]
  std::vector<PositionLogprobs> logprobs;         // of tokens, when asked for
  std::vector<PositionLogprobs> prompt_logprobs;  // from position 1 on

  bool operator==(const Result&) const = default;
};

// Records what happens to the request in `result`, which must outlive it.
Request Recorded(std::vector<int32_t> prompt, SamplingParams sampling, Result* result);
// Records every choice: results[i] is choice i's, with sampling.n of them.
Request RecordedChoices(std::vector<int32_t> prompt, SamplingParams sampling, Result* results);
Request Scored(std::vector<int32_t> prompt, int64_t vocab_size, Result* result);

// Makes an engine on each rank; rank 0 runs `lead` and stops, the others follow. Returns all
// statuses, in rank order.
std::vector<absl::Status> RunEngine(const ModelConfig& config, const EngineOptions& options,
                                    int num_ranks,
                                    const std::function<absl::Status(Engine&)>& lead);
// Expects them all to be OK.
void ExpectOk(const std::vector<absl::Status>& statuses);

}  // namespace lockstep

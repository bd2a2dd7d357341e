// What a caller asks of the engine, and what it gets back. Rank 0 only.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace lockstep {

using RequestId = int64_t;

struct SamplingParams {
  double temperature = 0.7;  // 0: argmax, lowest id on ties, whatever top_p and top_k say
  double top_p = 1.0;        // (0, 1]
  int64_t top_k = 0;         // 0: off
  uint64_t seed = 0;         // random numbers come from (seed, position, vocabulary id)
  int64_t max_tokens = 128;  // >= 1
  std::vector<int32_t> stop_token_ids;  // the model's end ids, unless the caller ignores them
};

// kError: this request failed, others go on (RequestEvent::error says why).
enum class FinishReason { kNone, kStop, kLength, kError };

// One event of a request. `finish` is set on the last event. A stop token's id is not among the
// tokens: it ends the request in an event of its own.
struct RequestEvent {
  RequestId id = 0;
  std::optional<int32_t> token = std::nullopt;
  FinishReason finish = FinishReason::kNone;
  std::optional<int32_t> stop_token =
      std::nullopt;        // with kStop, when a stop token id ended the request
  std::string error = {};  // with kError
};

struct Request {
  std::vector<int32_t> prompt;  // not empty; ids in [0, V)
  SamplingParams sampling;
  // Called on rank 0's engine thread, in order; may submit further requests. Return false to end
  // the request (a stop string was found): finish is then kStop and no further event comes.
  std::function<bool(const RequestEvent&)> on_event;
  // When set, the prompt is scored: called on rank 0 for consecutive pieces of prompt positions
  // with the full logits of each, float32 [rows, V] row-major; nothing is generated and on_event
  // gets one final event (kLength).
  std::function<void(int64_t first_position, int64_t rows, const float* logits)> on_prompt_logits;
};

}  // namespace lockstep

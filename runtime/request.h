// What a caller asks of the engine, and what it gets back. Rank 0 only.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {

using RequestId = int64_t;

// How tokens are picked. Everything here is a function of the request alone: the same parameters
// give the same ids alone, in a crowd, after a preemption and (float32) on any number of ranks.
//
// Order: the raw logits give the logprobs; then logit_bias, the ban of end tokens below min_tokens,
// repetition, frequency and presence penalty; temperature 0 takes the largest; else temperature,
// min_p, top_k, top_p, and a draw.
struct SamplingParams {
  double temperature = 0.7;  // 0: argmax, lowest id on ties, whatever the filters below say
  double top_p = 1.0;        // (0, 1]; 1: off
  int64_t top_k = 0;         // 0: off
  double min_p = 0;          // [0, 1], of the largest probability; 0: off

  // Of ids generated before (Keskar et al., CTRL, arXiv:1909.05858, for repetition, which counts
  // the prompt's ids too: a positive logit is divided by it, a negative one multiplied). The other
  // two are subtracted: presence once, frequency for each occurrence.
  double repetition_penalty = 1;  // > 0; 1: off
  double frequency_penalty = 0;   // [-2, 2]
  double presence_penalty = 0;    // [-2, 2]
  // Added to the logits of these ids, each id once, values in [-100, 100].
  std::vector<std::pair<int32_t, double>> logit_bias;

  uint64_t seed = 0;         // random numbers come from (seed, position, vocabulary id)
  int64_t max_tokens = 128;  // >= 1
  int64_t min_tokens = 0;    // before so many, no end token and no stop_token_id is picked
  bool ignore_eos = false;   // the model's end tokens are tokens like others
  std::vector<int32_t> stop_token_ids;  // end the request besides the model's end tokens

  // Log probabilities (natural, of the raw logits) of each token and of the k most probable ids at
  // its place; absent: none are computed. At most kMaxLogprobs.
  std::optional<int32_t> num_logprobs;
  // The same for the tokens of the prompt but the first. The prompt is then computed whole, without
  // the prefix cache.
  std::optional<int32_t> num_prompt_logprobs;

  // Independent answers to the prompt, >= 1. Choice i draws with seed + i; the prompt is computed
  // once.
  int32_t n = 1;
};

inline constexpr int32_t kMaxLogprobs = 128;
inline constexpr int32_t kMaxChoices = 1024;

// kError: this choice failed, others go on (RequestEvent::error says why). kCancelled: by
// Engine::Cancel.
enum class FinishReason { kNone, kStop, kLength, kError, kCancelled };

struct TokenLogprob {
  int32_t id = 0;
  float logprob = 0;

  bool operator==(const TokenLogprob&) const = default;
};

// Of one place in a sequence.
struct PositionLogprobs {
  TokenLogprob token;             // the token that stands there
  std::vector<TokenLogprob> top;  // most probable first, lowest id on ties

  bool operator==(const PositionLogprobs&) const = default;
};

// One event of a choice of a request. `finish` is set on the choice's last event. A stop token's id
// is not among the tokens: it ends the choice in an event of its own.
struct RequestEvent {
  RequestId id = 0;
  int32_t choice = 0;  // [0, n)
  std::optional<int32_t> token = std::nullopt;
  std::optional<PositionLogprobs> logprobs = std::nullopt;  // of `token`, when asked for
  FinishReason finish = FinishReason::kNone;
  std::optional<int32_t> stop_token =
      std::nullopt;        // with kStop, when a stop token id ended the choice
  std::string error = {};  // with kError
};

struct Request {
  std::vector<int32_t> prompt;  // not empty; ids in [0, V)
  SamplingParams sampling;
  // Lower runs first; among equals, first come, first served.
  int32_t priority = 0;
  // Prefixes are shared between requests of equal salt only.
  std::string cache_salt;

  // Called on rank 0's engine thread, in order; may submit and cancel requests. Return false to end
  // the choice (a stop string was found, nobody listens): no further event of it comes.
  std::function<bool(const RequestEvent&)> on_event;
  // Called once there, when the request first leaves the queue. Never when it ends before.
  std::function<void()> on_admitted;
  // With num_prompt_logprobs: pieces of the prompt's logprobs, in order, from position 1 on.
  std::function<void(int64_t first_position, std::span<const PositionLogprobs>)> on_prompt_logprobs;
  // When set, the prompt is scored: called on rank 0 for consecutive pieces of prompt positions
  // with the full logits of each, float32 [rows, V] row-major; nothing is generated and on_event
  // gets one final event (kLength).
  std::function<void(int64_t first_position, int64_t rows, const float* logits)> on_prompt_logits;
};

}  // namespace lockstep

// The fields of POST /v1/completions and /v1/chat/completions that say how to generate and what to
// send back; prompts and messages are prompt_fields.h's.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/model_config.h"
#include "runtime/core/json.h"
#include "runtime/core/status.h"
#include "runtime/request.h"

namespace lockstep {

enum class ApiKind { kCompletion, kChat };

// As OpenAI has it; the engine could give more.
inline constexpr int32_t kMaxTopLogprobs = 20;
// What costs time for every token of everybody.
inline constexpr int64_t kMaxStopStrings = 64;
inline constexpr int64_t kMaxStopBytes = 1024;  // of each
inline constexpr int64_t kMaxStopTokenIds = 256;

struct GenerationFields {
  ApiKind kind = ApiKind::kCompletion;
  std::string model;  // as the client calls it; empty: it does not say
  SamplingParams sampling;
  bool has_seed = false;  // else it is to be given one
  std::vector<std::string> stop;
  int32_t priority = 0;
  std::string cache_salt;

  bool stream = false;
  bool include_usage = false;     // in an event of its own, at the end of a stream
  bool continuous_usage = false;  // in every event
  bool echo = false;              // completions: the prompt stands before each answer
  bool echo_only = false;         // max_tokens 0: and nothing behind it
  bool prompt_logprobs = false;   // as a list of its own
  bool skip_special_tokens = true;
  bool add_special_tokens = true;
  bool return_token_ids = false;

  int64_t num_top_logprobs() const { return sampling.num_logprobs.value_or(-1); }
};

// `body` is changed. `max_model_len` bounds the answer of a chat that names no limit.
// InvalidArgument, beginning with the field's name, for a wrong type or value and for what is not
// supported and would change the meaning; other unknown fields are ignored. Ranges of sampling
// parameters are checked too, ids against `config`.
absl::StatusOr<GenerationFields> ReadGenerationFields(Json& body, ApiKind kind,
                                                      const GenerationConfig& generation,
                                                      const ModelConfig& config,
                                                      int64_t max_model_len);

// Unsupported fields alone (unsupported_fields.cc).
absl::Status CheckUnsupportedFields(const Json& body, ApiKind kind);

}  // namespace lockstep

// All prompts of `lockstep generate`, checked and ready to be submitted.
#pragma once

#include <string>
#include <vector>

#include "launch/generate_command.h"
#include "launch/prompt_encoder.h"
#include "model/checkpoint/checkpoint.h"
#include "runtime/request.h"

namespace lockstep {

struct GeneratePrompt {
  Request request;  // without callbacks
  std::vector<std::string> stop;
  std::string where;      // for messages: "FILE line 3"; empty: from the command line
  bool has_seed = false;  // else each answer is to get its own
};

struct GeneratePrompts {
  std::vector<GeneratePrompt> prompts;  // in order, never empty
  std::string summary;                  // of the sampling parameters, for the log
};

// How messages call a prompt; empty for the only one.
std::string PromptName(const std::vector<GeneratePrompt>& prompts, size_t index);

// Reads, encodes and checks everything that can be told before the model is loaded. InvalidArgument
// names the prompt: by its option, file and line, or number.
absl::StatusOr<GeneratePrompts> PreparePrompts(const GenerateOptions& options,
                                               const ModelSource& source,
                                               const PromptEncoder& encoder);

// Once more, against the length that the engine allows.
absl::Status CheckPromptLengths(const std::vector<GeneratePrompt>& prompts, int64_t vocab_size,
                                int64_t max_model_len);

}  // namespace lockstep

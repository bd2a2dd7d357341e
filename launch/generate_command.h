// `lockstep generate`: prompts in, text out as it is generated.
#pragma once

#include <string>
#include <vector>

#include "launch/engine_flags.h"
#include "launch/sampling_defaults.h"

namespace lockstep {

// One prompt as given on the command line.
struct PromptInput {
  enum class Kind { kText, kFile, kIds };
  Kind kind = Kind::kText;
  std::string text;          // kText: the prompt; kFile: the path
  std::vector<int32_t> ids;  // kIds
};

struct GenerateOptions {
  EngineFlags engine;
  std::vector<PromptInput> prompts;  // in the order given
  bool chat = false;                 // each text prompt is one user message
  SamplingFlags sampling;
  std::vector<std::string> stop;  // stop strings, none empty
  bool json = false;
};

// Exit status. All ranks of the job call it alike; see launch/engine_session.h.
int RunGenerate(const GenerateOptions& options);

}  // namespace lockstep

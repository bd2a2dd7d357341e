// `lockstep generate`: prompts in, text out as it is generated.
#pragma once

#include <string>
#include <vector>

#include "launch/engine_flags.h"
#include "launch/sampling_defaults.h"

namespace lockstep {

// One prompt as given on the command line, or with kLines a file of them.
struct PromptInput {
  enum class Kind { kText, kFile, kIds, kLines };
  Kind kind = Kind::kText;
  std::string text;          // kText: the prompt; kFile, kLines: the path, "-" is stdin for kLines
  std::vector<int32_t> ids;  // kIds
};

struct GenerateOptions {
  EngineFlags engine;
  std::vector<PromptInput> prompts;  // in the order given
  bool chat = false;                 // each text prompt is one user message
  SamplingFlags sampling;            // for prompts that do not say otherwise
  bool json = false;
};

// Exit status. All ranks of the job call it alike; see launch/engine_session.h.
int RunGenerate(const GenerateOptions& options);

}  // namespace lockstep

// `lockstep score`: how likely the model finds a text, token by token.
#pragma once

#include <string>
#include <vector>

#include "launch/engine_flags.h"

namespace lockstep {

struct ScoreOptions {
  EngineFlags engine;
  std::vector<int32_t> ids;  // these, or
  std::string text_file;     // the file's text, encoded with special tokens
  std::string logits_out;    // empty: none
  bool json = false;         // says nothing: the output is JSON in any case
};

// Exit status. All ranks of the job call it alike; see launch/engine_session.h.
int RunScore(const ScoreOptions& options);

}  // namespace lockstep

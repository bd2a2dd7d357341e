// `lockstep serve`: OpenAI's API over HTTP, until somebody asks it to stop.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "launch/engine_flags.h"

namespace lockstep {

struct ServeOptions {
  EngineFlags engine;
  std::string host = "127.0.0.1";
  int64_t port = 8000;                          // 0: any free one
  std::vector<std::string> served_model_names;  // empty: MODEL as given
  std::vector<std::string> api_keys;            // any of them opens; empty: none is asked for
  std::string chat_template;                    // path; empty: the model's own
  int64_t max_queue = 1024;                     // choices that may wait
  double request_timeout_seconds = 0;           // 0: none
  double drain_seconds = 30;
};

// Exit status. All ranks of the job call it alike; see launch/engine_session.h. Rank 0 serves.
int RunServe(const ServeOptions& options);

}  // namespace lockstep

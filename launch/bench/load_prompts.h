// What a load on a server asks: random prompts or those of a file, as bodies of requests.
#pragma once

#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "launch/bench/serve_bench.h"
#include "runtime/core/json.h"

namespace lockstep {

struct LoadPrompt {
  OrderedJson fields;             // prompt or messages, max_tokens, and what a line says
  std::optional<int64_t> input;   // tokens, where they are known
  std::optional<int64_t> output;  // most tokens
  std::string where;              // "FILE line 3"; empty: a random one
};

// The prompts of options.prompts. InvalidArgument names file and line of what cannot be asked.
absl::StatusOr<std::vector<LoadPrompt>> ReadLoadPrompts(const ServeBenchOptions& options);

// A random one of these lengths: with `as_ids`, which completions alone can take, token ids, else
// as many short words.
LoadPrompt MakeRandomPrompt(const PromptLengths& lengths, const ServeBenchOptions& options,
                            bool as_ids, std::mt19937_64& random);

// The whole body: model, stream, temperature 0 unless the prompt says otherwise.
std::string RequestBody(const LoadPrompt& prompt, const std::string& model, bool ignore_eos);

}  // namespace lockstep

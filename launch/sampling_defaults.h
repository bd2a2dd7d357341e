// Which sampling parameters are in force: the request's, else generation_config.json's, else built
// in.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "model/model_config.h"
#include "runtime/request.h"

namespace lockstep {

// What the command line, or one line of a prompts file, says; absent means it does not say.
struct SamplingFlags {
  std::optional<double> temperature;
  std::optional<double> top_p;
  std::optional<int64_t> top_k;
  std::optional<double> min_p;
  std::optional<double> repetition_penalty;
  std::optional<double> frequency_penalty;
  std::optional<double> presence_penalty;
  std::optional<std::vector<std::pair<int32_t, double>>> logit_bias;
  std::optional<uint64_t> seed;
  std::optional<int64_t> max_tokens;
  std::optional<int64_t> min_tokens;
  std::optional<bool> ignore_eos;
  std::optional<std::vector<int32_t>> stop_token_ids;
  std::optional<std::vector<std::string>> stop;  // stop strings, none empty
  std::optional<int32_t> num_logprobs;
  std::optional<int32_t> num_prompt_logprobs;
  std::optional<int32_t> n;
};

// What `over` says, and where it says nothing, what `base` says.
SamplingFlags Overridden(const SamplingFlags& base, const SamplingFlags& over);

struct EffectiveSampling {
  SamplingParams params;          // seed stays 0 unless the flags give one
  std::vector<std::string> stop;  // stop strings
  std::string summary;            // one line for the log: the values and where they come from
};

// `file` says nothing where generation_config.json is absent or not to be used; it can set
// temperature, top_p, top_k, min_p and repetition_penalty. do_sample false in the file means
// temperature 0, whatever temperature it gives. The engine itself ends at the end ids of `file` and
// `config`, which are named in the summary. InvalidArgument naming a value of the file that is out
// of range and not overridden; the flags' own values are not checked.
absl::StatusOr<EffectiveSampling> ResolveSampling(const SamplingFlags& flags,
                                                  const GenerationConfig& file,
                                                  const ModelConfig& config);

}  // namespace lockstep

// Which sampling parameters are in force: the request's, else generation_config.json's, else built
// in.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "model/model_config.h"
#include "runtime/request.h"

namespace lockstep {

// What the command line says; absent means it does not say.
struct SamplingFlags {
  std::optional<double> temperature;
  std::optional<double> top_p;
  std::optional<int64_t> top_k;
  std::optional<uint64_t> seed;
  int64_t max_tokens = SamplingParams().max_tokens;
  bool ignore_eos = false;
};

struct EffectiveSampling {
  SamplingParams params;              // seed stays 0 unless the flags give one
  std::string summary;                // one line for the log: every value and where it comes from
  std::vector<std::string> warnings;  // values of the file that are not applied, by name
};

// `file` says nothing where generation_config.json is absent or not to be used. The stop set is the
// union of the end ids of `file` and `config`, empty under ignore_eos. do_sample false in the file
// means temperature 0, whatever temperature it gives. InvalidArgument naming a value of the file
// that is out of range and not overridden.
absl::StatusOr<EffectiveSampling> ResolveSampling(const SamplingFlags& flags,
                                                  const GenerationConfig& file,
                                                  const ModelConfig& config);

}  // namespace lockstep

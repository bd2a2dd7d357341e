#include "launch/sampling_defaults.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_join.h"

namespace lockstep {

namespace {

constexpr char kFile[] = "generation_config.json";

// The value in force and where it comes from.
template <typename T>
struct Chosen {
  T value;
  const char* source;
};

template <typename T>
Chosen<T> Choose(const std::optional<T>& flag, const std::optional<T>& file, T built_in) {
  const char* const source = flag.has_value()   ? "command line"
                             : file.has_value() ? kFile
                                                : "built in";
  return {flag.value_or(file.value_or(built_in)), source};
}

absl::Status CheckFileValue(bool ok, const char* name, double value, const char* limits) {
  if (ok) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("%s: %s is %g, it must be %s; pass the option, or --generation-config none",
                      kFile, name, value, limits));
}

std::vector<std::string> UnappliedValues(const GenerationConfig& file) {
  std::vector<std::string> warnings;
  const auto add = [&](const char* name, double value) {
    warnings.push_back(absl::StrFormat(
        "%s asks for %s %g, which is not supported yet and is not applied", kFile, name, value));
  };
  const double repetition_penalty = file.repetition_penalty.value_or(1.0);
  const double min_p = file.min_p.value_or(0.0);
  if (repetition_penalty != 1.0) add("repetition_penalty", repetition_penalty);
  if (min_p != 0.0) add("min_p", min_p);
  return warnings;
}

std::vector<int32_t> UnionOf(std::vector<int32_t> a, const std::vector<int32_t>& b) {
  a.insert(a.end(), b.begin(), b.end());
  std::sort(a.begin(), a.end());
  a.erase(std::unique(a.begin(), a.end()), a.end());
  return a;
}

}  // namespace

absl::StatusOr<EffectiveSampling> ResolveSampling(const SamplingFlags& flags,
                                                  const GenerationConfig& file,
                                                  const ModelConfig& config) {
  GenerationConfig from_file = file;
  if (from_file.do_sample == false) from_file.temperature = 0.0;
  if (from_file.top_k.has_value()) {
    from_file.top_k = std::max<int64_t>(*from_file.top_k, 0);  // -1 is "off" as well
  }
  const SamplingParams built_in;
  const auto temperature = Choose(flags.temperature, from_file.temperature, built_in.temperature);
  const auto top_p = Choose(flags.top_p, from_file.top_p, built_in.top_p);
  const auto top_k = Choose(flags.top_k, from_file.top_k, built_in.top_k);
  LOCKSTEP_RETURN_IF_ERROR(
      CheckFileValue(std::isfinite(temperature.value) && temperature.value >= 0, "temperature",
                     temperature.value, "a finite number of 0 or more"));
  LOCKSTEP_RETURN_IF_ERROR(CheckFileValue(top_p.value > 0 && top_p.value <= 1, "top_p", top_p.value,
                                          "above 0 and at most 1"));

  EffectiveSampling result;
  result.params.temperature = temperature.value;
  result.params.top_p = top_p.value;
  result.params.top_k = top_k.value;
  result.params.seed = flags.seed.value_or(0);
  result.params.max_tokens = flags.max_tokens;
  if (!flags.ignore_eos) {
    result.params.stop_token_ids = UnionOf(from_file.eos_token_ids, config.eos_token_ids);
  }
  result.summary = absl::StrFormat(
      "sampling: temperature %g (%s), top_p %g (%s), top_k %d (%s), max_tokens %d, end ids %s",
      temperature.value, temperature.source, top_p.value, top_p.source, top_k.value, top_k.source,
      flags.max_tokens,
      flags.ignore_eos ? "ignored" : "[" + absl::StrJoin(result.params.stop_token_ids, ", ") + "]");
  result.warnings = UnappliedValues(from_file);
  return result;
}

}  // namespace lockstep

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

// Flags are checked where they are read.
absl::Status CheckFileValue(const char* name, const Chosen<double>& chosen, bool (*legal)(double),
                            const char* limits) {
  if (chosen.source != kFile || legal(chosen.value)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("%s: %s is %g, it must be %s; pass the option, or --generation-config none",
                      kFile, name, chosen.value, limits));
}

std::vector<int32_t> UnionOf(std::vector<int32_t> a, const std::vector<int32_t>& b) {
  a.insert(a.end(), b.begin(), b.end());
  std::sort(a.begin(), a.end());
  a.erase(std::unique(a.begin(), a.end()), a.end());
  return a;
}

std::string EndIds(const SamplingParams& params, const GenerationConfig& file,
                   const ModelConfig& config) {
  if (params.ignore_eos) return "ignored";
  return "[" + absl::StrJoin(UnionOf(file.eos_token_ids, config.eos_token_ids), ", ") + "]";
}

// Values that no file sets, where they are not the usual ones.
std::string Extras(const SamplingParams& params) {
  const SamplingParams usual;
  std::string text;
  const auto add = [&](const char* name, double value, double usual_value) {
    if (value != usual_value) absl::StrAppend(&text, ", ", name, " ", value);
  };
  add("frequency_penalty", params.frequency_penalty, usual.frequency_penalty);
  add("presence_penalty", params.presence_penalty, usual.presence_penalty);
  if (!params.logit_bias.empty()) {
    absl::StrAppend(&text, ", logit_bias of ", params.logit_bias.size(),
                    params.logit_bias.size() == 1 ? " id" : " ids");
  }
  if (params.min_tokens != 0) absl::StrAppend(&text, ", min_tokens ", params.min_tokens);
  if (params.n != 1) absl::StrAppend(&text, ", n ", params.n);
  if (!params.stop_token_ids.empty()) {
    absl::StrAppend(&text, ", stop_token_ids [", absl::StrJoin(params.stop_token_ids, ", "), "]");
  }
  return text;
}

}  // namespace

SamplingFlags Overridden(const SamplingFlags& base, const SamplingFlags& over) {
  SamplingFlags result = base;
  const auto take = [&](auto member) {
    if ((over.*member).has_value()) result.*member = over.*member;
  };
  take(&SamplingFlags::temperature);
  take(&SamplingFlags::top_p);
  take(&SamplingFlags::top_k);
  take(&SamplingFlags::min_p);
  take(&SamplingFlags::repetition_penalty);
  take(&SamplingFlags::frequency_penalty);
  take(&SamplingFlags::presence_penalty);
  take(&SamplingFlags::logit_bias);
  take(&SamplingFlags::seed);
  take(&SamplingFlags::max_tokens);
  take(&SamplingFlags::min_tokens);
  take(&SamplingFlags::ignore_eos);
  take(&SamplingFlags::stop_token_ids);
  take(&SamplingFlags::stop);
  take(&SamplingFlags::num_logprobs);
  take(&SamplingFlags::num_prompt_logprobs);
  take(&SamplingFlags::n);
  return result;
}

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
  const auto min_p = Choose(flags.min_p, from_file.min_p, built_in.min_p);
  const auto repetition =
      Choose(flags.repetition_penalty, from_file.repetition_penalty, built_in.repetition_penalty);
  LOCKSTEP_RETURN_IF_ERROR(CheckFileValue(
      "temperature", temperature, [](double x) { return std::isfinite(x) && x >= 0; },
      "a finite number of 0 or more"));
  LOCKSTEP_RETURN_IF_ERROR(CheckFileValue(
      "top_p", top_p, [](double x) { return x > 0 && x <= 1; }, "above 0 and at most 1"));
  LOCKSTEP_RETURN_IF_ERROR(CheckFileValue(
      "min_p", min_p, [](double x) { return x >= 0 && x <= 1; }, "0 to 1"));
  LOCKSTEP_RETURN_IF_ERROR(CheckFileValue(
      "repetition_penalty", repetition, [](double x) { return std::isfinite(x) && x > 0; },
      "a finite number above 0"));

  EffectiveSampling result;
  SamplingParams& params = result.params;
  params.temperature = temperature.value;
  params.top_p = top_p.value;
  params.top_k = top_k.value;
  params.min_p = min_p.value;
  params.repetition_penalty = repetition.value;
  params.frequency_penalty = flags.frequency_penalty.value_or(built_in.frequency_penalty);
  params.presence_penalty = flags.presence_penalty.value_or(built_in.presence_penalty);
  params.logit_bias = flags.logit_bias.value_or(built_in.logit_bias);
  params.seed = flags.seed.value_or(0);
  params.max_tokens = flags.max_tokens.value_or(built_in.max_tokens);
  params.min_tokens = flags.min_tokens.value_or(built_in.min_tokens);
  params.ignore_eos = flags.ignore_eos.value_or(built_in.ignore_eos);
  params.stop_token_ids = flags.stop_token_ids.value_or(built_in.stop_token_ids);
  params.num_logprobs = flags.num_logprobs;
  params.num_prompt_logprobs = flags.num_prompt_logprobs;
  params.n = flags.n.value_or(built_in.n);
  result.stop = flags.stop.value_or(std::vector<std::string>());
  result.summary = absl::StrFormat(
      "sampling: temperature %g (%s), top_p %g (%s), top_k %d (%s), min_p %g (%s), "
      "repetition_penalty %g (%s), max_tokens %d%s, end ids %s",
      temperature.value, temperature.source, top_p.value, top_p.source, top_k.value, top_k.source,
      min_p.value, min_p.source, repetition.value, repetition.source, params.max_tokens,
      Extras(params), EndIds(params, file, config));
  return result;
}

}  // namespace lockstep

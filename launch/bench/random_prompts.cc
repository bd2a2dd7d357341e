#include "launch/bench/random_prompts.h"

#include "launch/option_setters.h"

namespace lockstep {

namespace {

constexpr int64_t kLongest = int64_t{1} << 24;

}  // namespace

std::vector<PromptLengths> DrawPromptLengths(const RandomPrompts& prompts,
                                             std::mt19937_64& random) {
  std::vector<PromptLengths> lengths(static_cast<size_t>(prompts.num_prompts));
  for (PromptLengths& one : lengths) {
    one.input = DrawLength(prompts.distribution, prompts.input_len, random);
    one.output = DrawLength(prompts.distribution, prompts.output_len, random);
  }
  return lengths;
}

absl::Status CheckFits(const PromptLengths& lengths, int64_t max_model_len,
                       const std::string& where) {
  if (lengths.sum() <= max_model_len) return absl::OkStatus();
  const absl::Status status = absl::InvalidArgumentError(absl::StrFormat(
      "%d tokens of the prompt and %d of the answer are %d, more than the maximum length of %d",
      lengths.input, lengths.output, lengths.sum(), max_model_len));
  return where.empty() ? status : Annotate(status, where);
}

absl::Status CheckAllFit(std::span<const PromptLengths> lengths, int64_t max_model_len) {
  for (size_t i = 0; i < lengths.size(); ++i) {
    const std::string where = lengths.size() == 1 ? "" : absl::StrFormat("prompt %d", i);
    LOCKSTEP_RETURN_IF_ERROR(CheckFits(lengths[i], max_model_len, where));
  }
  return absl::OkStatus();
}

std::vector<Option> LengthOptions(int64_t* input_len, int64_t* output_len) {
  return {{"--input-len", "TOKENS", "Tokens of each prompt, 1 or more.", absl::StrCat(*input_len),
           false, StoreInt(input_len, 1, kLongest)},
          {"--output-len", "TOKENS",
           "Tokens of each answer, 1 or more; the model's end tokens do not end it.",
           absl::StrCat(*output_len), false, StoreInt(output_len, 1, kLongest)}};
}

Option DistributionOption(LengthDistribution* distribution) {
  return {"--length-distribution",
          "KIND",
          "How lengths lie around --input-len and --output-len: fixed; uniform:R, from (1 - R) to "
          "(1 + R) times the length, 0 to 1; lognormal:SIGMA, whose mean is the length and SIGMA "
          "the deviation of the logarithm, up to 4.",
          "fixed",
          false,
          [distribution](const std::string& text) {
            LOCKSTEP_ASSIGN_OR_RETURN(*distribution, ParseLengthDistribution(text));
            return absl::OkStatus();
          }};
}

Option SeedOption(uint64_t* seed) {
  return {"--seed",
          "S",
          "Of all that is drawn at random, 0 to 2^64 - 1.",
          absl::StrCat(*seed),
          false,
          [seed](const std::string& text) {
            LOCKSTEP_ASSIGN_OR_RETURN(*seed, ParseUint64(text));
            return absl::OkStatus();
          }};
}

}  // namespace lockstep

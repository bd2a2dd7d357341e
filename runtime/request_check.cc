#include "runtime/request_check.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace lockstep {

namespace {

absl::Status CheckReal(const char* name, double value, double min, double max) {
  if (value >= min && value <= max) return absl::OkStatus();  // false for NaN
  if (std::isinf(max)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s is %g: it must be a finite number of at least %g", name, value, min));
  }
  return absl::InvalidArgumentError(
      absl::StrFormat("%s is %g: it must be %g to %g", name, value, min, max));
}

absl::Status CheckCount(const char* name, int64_t value, int64_t min, int64_t max) {
  if (value >= min && value <= max) return absl::OkStatus();
  if (max == INT64_MAX) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s is %d: it must be at least %d", name, value, min));
  }
  return absl::InvalidArgumentError(
      absl::StrFormat("%s is %d: it must be %d to %d", name, value, min, max));
}

absl::Status CheckId(const char* name, int32_t id, int64_t vocab_size) {
  if (id >= 0 && id < vocab_size) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("%s %d is outside the vocabulary of %d tokens", name, id, vocab_size));
}

absl::Status CheckDraw(const SamplingParams& sampling) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (std::isinf(sampling.temperature)) {
    return CheckReal("temperature", -sampling.temperature, 0, kInfinity);
  }
  LOCKSTEP_RETURN_IF_ERROR(CheckReal("temperature", sampling.temperature, 0, kInfinity));
  if (!(sampling.top_p > 0) || !(sampling.top_p <= 1)) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "top_p is %g: it must be above 0 and at most 1 (1 turns it off)", sampling.top_p));
  }
  if (sampling.top_k < 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("top_k is %d: it must be at least 0 (0 turns it off)", sampling.top_k));
  }
  return CheckReal("min_p", sampling.min_p, 0, 1);
}

absl::Status CheckPenalties(const SamplingParams& sampling, int64_t vocab_size) {
  // Beyond these a logit divided by it, or multiplied, leaves the range of float32.
  if (!(sampling.repetition_penalty >= 1e-6) || !(sampling.repetition_penalty <= 1e6)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("repetition_penalty is %g: it must be 1e-06 to 1e+06 (1 turns it off)",
                        sampling.repetition_penalty));
  }
  LOCKSTEP_RETURN_IF_ERROR(CheckReal("frequency_penalty", sampling.frequency_penalty, -2, 2));
  LOCKSTEP_RETURN_IF_ERROR(CheckReal("presence_penalty", sampling.presence_penalty, -2, 2));
  std::vector<int32_t> ids;
  for (const auto& [id, bias] : sampling.logit_bias) {
    LOCKSTEP_RETURN_IF_ERROR(CheckId("logit_bias: id", id, vocab_size));
    LOCKSTEP_RETURN_IF_ERROR(
        CheckReal(absl::StrFormat("logit_bias of id %d", id).c_str(), bias, -100, 100));
    ids.push_back(id);
  }
  std::sort(ids.begin(), ids.end());
  if (const auto twice = std::adjacent_find(ids.begin(), ids.end()); twice != ids.end()) {
    return absl::InvalidArgumentError(absl::StrFormat("logit_bias names id %d twice", *twice));
  }
  return absl::OkStatus();
}

absl::Status CheckLengths(const SamplingParams& sampling, int64_t vocab_size) {
  LOCKSTEP_RETURN_IF_ERROR(CheckCount("max_tokens", sampling.max_tokens, 1, INT64_MAX));
  LOCKSTEP_RETURN_IF_ERROR(CheckCount("min_tokens", sampling.min_tokens, 0, sampling.max_tokens));
  for (const int32_t id : sampling.stop_token_ids) {
    LOCKSTEP_RETURN_IF_ERROR(CheckId("stop_token_ids: id", id, vocab_size));
  }
  LOCKSTEP_RETURN_IF_ERROR(
      CheckCount("logprobs", sampling.num_logprobs.value_or(0), 0, kMaxLogprobs));
  LOCKSTEP_RETURN_IF_ERROR(
      CheckCount("prompt_logprobs", sampling.num_prompt_logprobs.value_or(0), 0, kMaxLogprobs));
  return CheckCount("n", sampling.n, 1, kMaxChoices);
}

absl::Status CheckPrompt(const std::vector<int32_t>& prompt, int64_t vocab_size) {
  if (prompt.empty()) {
    return absl::InvalidArgumentError("the prompt is empty: it must hold at least one token");
  }
  for (size_t i = 0; i < prompt.size(); ++i) {
    if (prompt[i] < 0 || prompt[i] >= vocab_size) {
      return absl::InvalidArgumentError(
          absl::StrFormat("token %d of the prompt is %d, outside the vocabulary of %d tokens", i,
                          prompt[i], vocab_size));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckScored(const Request& request, const PlanLimits& limits) {
  const int64_t prompt_length = static_cast<int64_t>(request.prompt.size());
  if (prompt_length > limits.max_model_len) {
    return absl::InvalidArgumentError(
        absl::StrFormat("the prompt has %d tokens, more than the maximum length of %d",
                        prompt_length, limits.max_model_len));
  }
  if (request.sampling.n != 1 || request.sampling.num_prompt_logprobs.has_value()) {
    return absl::InvalidArgumentError(
        "a scored prompt gives its full logits: n must be 1, prompt_logprobs absent");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckSampling(const SamplingParams& sampling, int64_t vocab_size) {
  LOCKSTEP_RETURN_IF_ERROR(CheckDraw(sampling));
  LOCKSTEP_RETURN_IF_ERROR(CheckPenalties(sampling, vocab_size));
  return CheckLengths(sampling, vocab_size);
}

absl::Status CheckRequest(const Request& request, const PlanLimits& limits) {
  LOCKSTEP_RETURN_IF_ERROR(CheckPrompt(request.prompt, limits.vocab_size));
  LOCKSTEP_RETURN_IF_ERROR(CheckSampling(request.sampling, limits.vocab_size));
  if (request.on_prompt_logits != nullptr) return CheckScored(request, limits);
  const int64_t prompt_length = static_cast<int64_t>(request.prompt.size());
  if (prompt_length >= limits.max_model_len) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "the prompt has %d tokens, which leaves no room for a new one in the maximum length of %d",
        prompt_length, limits.max_model_len));
  }
  return absl::OkStatus();
}

}  // namespace lockstep

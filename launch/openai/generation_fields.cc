#include "launch/openai/generation_fields.h"

#include <algorithm>
#include <limits>

#include "launch/openai/json_text.h"
#include "launch/openai/request_body.h"
#include "launch/sampling_fields.h"
#include "runtime/request_check.h"

namespace lockstep {

namespace {

constexpr int64_t kDefaultCompletionTokens = 16;  // OpenAI's

const Json* Find(const Json& object, const char* key) {
  const auto it = object.find(key);
  return it == object.end() || it->is_null() ? nullptr : &*it;
}

// Chats say logprobs: true and top_logprobs: K for what the engine and completions call logprobs.
absl::Status RenameChatLogprobs(Json& body) {
  const Json* const wanted = Find(body, "logprobs");
  if (wanted != nullptr && !wanted->is_boolean()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("logprobs must be true or false, found %s; top_logprobs is the number",
                        QuotedJson(*wanted)));
  }
  const Json* const top = Find(body, "top_logprobs");
  const bool wants = wanted != nullptr && wanted->get<bool>();
  if (top != nullptr && !wants && *top != Json(0)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("top_logprobs is %s, which needs logprobs: true", QuotedJson(*top)));
  }
  if (top != nullptr &&
      (!top->is_number_integer() || *top < Json(0) || *top > Json(kMaxTopLogprobs))) {
    return absl::InvalidArgumentError(
        absl::StrFormat("top_logprobs is %s: it must be an integer from 0 to %d", QuotedJson(*top),
                        kMaxTopLogprobs));
  }
  const Json count = top == nullptr ? Json(0) : *top;
  body.erase("logprobs");
  if (wants) body["logprobs"] = count;
  return absl::OkStatus();
}

// max_completion_tokens is the newer name.
absl::Status RenameMaxTokens(Json& body) {
  const Json* const newer = Find(body, "max_completion_tokens");
  if (newer == nullptr) return absl::OkStatus();
  const Json* const older = Find(body, "max_tokens");
  if (older != nullptr && *older != *newer) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "max_completion_tokens is %s and max_tokens is %s: they mean the same, send one",
        QuotedJson(*newer), QuotedJson(*older)));
  }
  if (!newer->is_number()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("max_completion_tokens must be an integer, found %s", QuotedJson(*newer)));
  }
  body["max_tokens"] = Json(*newer);
  return absl::OkStatus();
}

// OpenAI allows negative seeds: any 64 bits are one.
void MakeSeedUnsigned(Json& body) {
  const auto it = body.find("seed");
  if (it == body.end() || !it->is_number_integer() || it->is_number_unsigned()) return;
  *it = static_cast<uint64_t>(it->get<int64_t>());
}

absl::Status CheckList(const char* name, int64_t size, int64_t limit) {
  if (size <= limit) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("%s has %d entries, more than %d", name, size, limit));
}

absl::Status CheckCosts(const SamplingFlags& flags) {
  if (flags.stop.has_value()) {
    LOCKSTEP_RETURN_IF_ERROR(CheckList("stop", std::ssize(*flags.stop), kMaxStopStrings));
    for (const std::string& stop : *flags.stop) {
      if (std::ssize(stop) <= kMaxStopBytes) continue;
      return absl::InvalidArgumentError(absl::StrFormat(
          "stop has a string of %d bytes, more than %d", std::ssize(stop), kMaxStopBytes));
    }
  }
  if (flags.stop_token_ids.has_value()) {
    LOCKSTEP_RETURN_IF_ERROR(
        CheckList("stop_token_ids", std::ssize(*flags.stop_token_ids), kMaxStopTokenIds));
  }
  for (const auto& [name, count] : {std::pair("logprobs", flags.num_logprobs),
                                    std::pair("prompt_logprobs", flags.num_prompt_logprobs)}) {
    if (count.value_or(0) <= kMaxTopLogprobs) continue;
    return absl::InvalidArgumentError(
        absl::StrFormat("%s is %d: it must be at most %d", name, *count, kMaxTopLogprobs));
  }
  return absl::OkStatus();
}

void ReadStreamOptions(JsonFields& fields, GenerationFields& result) {
  const Json* const options = fields.Object("stream_options");
  if (options == nullptr) return;
  if (!result.stream) {
    fields.Fail("stream_options is allowed only with stream: true");
    return;
  }
  JsonFields own(*options, kRequestWhere + std::string(": stream_options"));
  result.include_usage = own.Bool("include_usage").value_or(false);
  result.continuous_usage = own.Bool("continuous_usage_stats").value_or(false);
  fields.Adopt(own.status());
}

// max_tokens 0 asks for the prompt's logprobs alone. The engine computes one token, at least, which
// is not sent.
void ReadEcho(JsonFields& fields, SamplingFlags& flags, GenerationFields& result) {
  result.echo = fields.Bool("echo").value_or(false);
  result.echo_only = result.echo && flags.max_tokens == 0;
  if (result.echo_only) {
    flags.max_tokens = 1;
    flags.min_tokens.reset();
  }
  if (result.echo && flags.num_logprobs.has_value() && !flags.num_prompt_logprobs.has_value()) {
    flags.num_prompt_logprobs = flags.num_logprobs;
  }
}

void ReadOthers(JsonFields& fields, GenerationFields& result) {
  constexpr int32_t kMin = std::numeric_limits<int32_t>::min();
  constexpr int32_t kMax = std::numeric_limits<int32_t>::max();
  result.model = fields.String("model").value_or("");
  result.priority = static_cast<int32_t>(fields.Int("priority", kMin, kMax).value_or(0));
  result.cache_salt = fields.String("cache_salt").value_or("");
  result.skip_special_tokens = fields.Bool("skip_special_tokens").value_or(true);
  // A chat template writes the special tokens itself.
  result.add_special_tokens =
      fields.Bool("add_special_tokens").value_or(result.kind == ApiKind::kCompletion);
  result.return_token_ids = fields.Bool("return_token_ids").value_or(false);
  if (result.prompt_logprobs && result.stream) {
    fields.Fail("prompt_logprobs is not sent in a stream: leave stream out");
  }
}

// OpenAI's where neither the request nor the model's file says anything.
void AddDefaults(ApiKind kind, const GenerationConfig& generation, int64_t max_model_len,
                 SamplingFlags& flags) {
  if (!flags.temperature.has_value() && !generation.temperature.has_value() &&
      generation.do_sample != false) {
    flags.temperature = 1;
  }
  if (!flags.max_tokens.has_value()) {
    flags.max_tokens = kind == ApiKind::kChat ? max_model_len : kDefaultCompletionTokens;
  }
}

}  // namespace

absl::StatusOr<GenerationFields> ReadGenerationFields(Json& body, ApiKind kind,
                                                      const GenerationConfig& generation,
                                                      const ModelConfig& config,
                                                      int64_t max_model_len) {
  LOCKSTEP_RETURN_IF_ERROR(CheckUnsupportedFields(body, kind));
  if (kind == ApiKind::kChat) LOCKSTEP_RETURN_IF_ERROR(RenameChatLogprobs(body));
  LOCKSTEP_RETURN_IF_ERROR(RenameMaxTokens(body));
  MakeSeedUnsigned(body);
  JsonFields fields(body, kRequestWhere);
  GenerationFields result;
  result.kind = kind;
  SamplingFlags flags = ReadSamplingFields(body, fields);
  result.has_seed = flags.seed.has_value();
  result.prompt_logprobs = flags.num_prompt_logprobs.has_value();
  result.stream = fields.Bool("stream").value_or(false);
  ReadStreamOptions(fields, result);
  if (kind == ApiKind::kCompletion) ReadEcho(fields, flags, result);
  ReadOthers(fields, result);
  if (!fields.status().ok()) return WithoutWhere(fields.status());
  LOCKSTEP_RETURN_IF_ERROR(CheckCosts(flags));
  AddDefaults(kind, generation, max_model_len, flags);
  LOCKSTEP_ASSIGN_OR_RETURN(EffectiveSampling effective,
                            ResolveSampling(flags, generation, config));
  result.sampling = std::move(effective.params);
  result.stop = std::move(effective.stop);
  LOCKSTEP_RETURN_IF_ERROR(CheckSampling(result.sampling, config.vocab_size));
  return result;
}

}  // namespace lockstep

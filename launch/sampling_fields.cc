#include "launch/sampling_fields.h"

#include <algorithm>
#include <limits>

#include "launch/option_values.h"

namespace lockstep {

namespace {

// Beyond it a JSON number that is read as a double may have lost digits.
constexpr int64_t kMaxExact = int64_t{1} << 53;
constexpr int32_t kMaxInt32 = std::numeric_limits<int32_t>::max();
constexpr double kMaxDouble = std::numeric_limits<double>::max();

constexpr const char* kNames[] = {"temperature",
                                  "top_p",
                                  "top_k",
                                  "min_p",
                                  "repetition_penalty",
                                  "frequency_penalty",
                                  "presence_penalty",
                                  "logit_bias",
                                  "seed",
                                  "max_tokens",
                                  "min_tokens",
                                  "ignore_eos",
                                  "stop_token_ids",
                                  "stop",
                                  "logprobs",
                                  "prompt_logprobs",
                                  "n"};

const Json* Find(const Json& object, const char* key) {
  const auto it = object.find(key);
  return it == object.end() || it->is_null() ? nullptr : &*it;
}

// Any 64-bit number: not by way of a double.
std::optional<uint64_t> ReadSeed(const Json& object, JsonFields& fields) {
  const Json* const seed = Find(object, "seed");
  if (seed == nullptr) return std::nullopt;
  if (seed->is_number_unsigned()) return seed->get<uint64_t>();
  fields.Fail("seed must be an integer between 0 and 2^64 - 1");
  return std::nullopt;
}

std::optional<std::vector<std::string>> ReadStop(const Json& object, JsonFields& fields) {
  const Json* const stop = Find(object, "stop");
  if (stop == nullptr) return std::nullopt;
  std::vector<std::string> strings;
  if (stop->is_string()) {
    strings = {stop->get<std::string>()};
  } else {
    strings = fields.Strings("stop");
  }
  if (std::find(strings.begin(), strings.end(), "") != strings.end()) {
    fields.Fail("stop has an empty string: it would stop every text at once");
  }
  return strings;
}

}  // namespace

std::span<const char* const> SamplingFieldNames() { return kNames; }

SamplingFlags ReadSamplingFields(const Json& object, JsonFields& fields) {
  const auto number = [&](const char* key) { return fields.Double(key, -kMaxDouble); };
  const auto integer = [&](const char* key) { return fields.Int(key, -kMaxExact, kMaxExact); };
  const auto count = [&](const char* key) -> std::optional<int32_t> {
    const std::optional<int64_t> value = fields.Int(key, -kMaxInt32, kMaxInt32);
    if (!value.has_value()) return std::nullopt;
    return static_cast<int32_t>(*value);
  };
  SamplingFlags flags;
  flags.temperature = number("temperature");
  flags.top_p = number("top_p");
  flags.top_k = integer("top_k");
  if (flags.top_k == -1) flags.top_k = 0;
  flags.min_p = number("min_p");
  flags.repetition_penalty = number("repetition_penalty");
  flags.frequency_penalty = number("frequency_penalty");
  flags.presence_penalty = number("presence_penalty");
  if (const Json* const bias = fields.Object("logit_bias"); bias != nullptr) {
    auto parsed = ParseLogitBias(*bias);
    if (parsed.ok()) {
      flags.logit_bias = *std::move(parsed);
    } else {
      fields.Fail("logit_bias: " + std::string(parsed.status().message()));
    }
  }
  flags.seed = ReadSeed(object, fields);
  flags.max_tokens = integer("max_tokens");
  flags.min_tokens = integer("min_tokens");
  flags.ignore_eos = fields.Bool("ignore_eos");
  if (fields.Has("stop_token_ids")) flags.stop_token_ids = fields.TokenIds("stop_token_ids");
  flags.stop = ReadStop(object, fields);
  flags.num_logprobs = count("logprobs");
  flags.num_prompt_logprobs = count("prompt_logprobs");
  flags.n = count("n");
  return flags;
}

absl::StatusOr<std::vector<std::pair<int32_t, double>>> ParseLogitBias(const Json& object) {
  if (!object.is_object()) {
    return absl::InvalidArgumentError("it must be a JSON object: {\"ID\": BIAS, ...}");
  }
  std::vector<std::pair<int32_t, double>> bias;
  for (const auto& [key, value] : object.items()) {
    const absl::StatusOr<int64_t> id = ParseInt(key, 0, kMaxInt32);
    if (!id.ok()) {
      return absl::InvalidArgumentError(
          absl::StrFormat("the key '%s' is no token id: an integer of 0 or more", key));
    }
    const double number = value.is_number() ? value.get<double>() : kMaxDouble;
    if (!(number >= -100 && number <= 100)) {
      return absl::InvalidArgumentError(
          absl::StrFormat("the bias of id %d is %s: it must be a number between -100 and 100", *id,
                          DumpJson(value)));
    }
    const int32_t parsed = static_cast<int32_t>(*id);
    if (std::any_of(bias.begin(), bias.end(), [&](const auto& b) { return b.first == parsed; })) {
      return absl::InvalidArgumentError(absl::StrFormat("id %d is there twice", *id));  // 7 and 07
    }
    bias.emplace_back(parsed, number);
  }
  return bias;
}

}  // namespace lockstep

#include "launch/bench/load_prompts.h"

#include <iterator>
#include <utility>

#include "launch/prompt_lines.h"

namespace lockstep {

namespace {

// Ids below are often those of special tokens.
constexpr int32_t kFirstId = 3;

// Most tokenizers have each, with the space before it, as one token.
constexpr const char* kWords[] = {
    "the",  "of",   "and",   "to",   "in",     "is",    "was",   "for",  "on",    "with",  "as",
    "by",   "at",   "from",  "that", "it",     "his",   "are",   "be",   "this",  "which", "or",
    "had",  "not",  "but",   "one",  "their",  "all",   "have",  "new",  "been",  "more",  "who",
    "time", "year", "first", "two",  "people", "after", "world", "over", "there", "when",  "can",
    "only", "work", "made",  "city", "part",   "under", "war",   "life", "day",   "name"};

std::string DrawWords(int64_t count, std::mt19937_64& random) {
  std::uniform_int_distribution<size_t> pick(0, std::size(kWords) - 1);
  std::string text;
  for (int64_t i = 0; i < count; ++i) {
    absl::StrAppend(&text, i == 0 ? "" : " ", kWords[pick(random)]);
  }
  return text;
}

OrderedJson UserMessage(std::string text) {
  return OrderedJson::array({{{"role", "user"}, {"content", std::move(text)}}});
}

template <typename T>
void Put(const char* name, const std::optional<T>& value, OrderedJson* fields) {
  if (value.has_value()) (*fields)[name] = *value;
}

// The line's own sampling parameters, by their names in the API.
absl::Status PutSampling(const SamplingFlags& flags, OrderedJson* fields) {
  if (flags.n.value_or(1) != 1 || flags.num_logprobs || flags.num_prompt_logprobs) {
    return absl::InvalidArgumentError("n, logprobs and prompt_logprobs are not measured here");
  }
  Put("temperature", flags.temperature, fields);
  Put("top_p", flags.top_p, fields);
  Put("top_k", flags.top_k, fields);
  Put("min_p", flags.min_p, fields);
  Put("repetition_penalty", flags.repetition_penalty, fields);
  Put("frequency_penalty", flags.frequency_penalty, fields);
  Put("presence_penalty", flags.presence_penalty, fields);
  Put("seed", flags.seed, fields);
  Put("min_tokens", flags.min_tokens, fields);
  Put("ignore_eos", flags.ignore_eos, fields);
  Put("stop_token_ids", flags.stop_token_ids, fields);
  Put("stop", flags.stop, fields);
  if (!flags.logit_bias.has_value()) return absl::OkStatus();
  OrderedJson biases = OrderedJson::object();
  for (const auto& [id, bias] : *flags.logit_bias) biases[absl::StrCat(id)] = bias;
  (*fields)["logit_bias"] = std::move(biases);
  return absl::OkStatus();
}

absl::StatusOr<LoadPrompt> FromLine(PromptLine line, const ServeBenchOptions& options) {
  LoadPrompt prompt;
  const bool chat = options.endpoint == BenchEndpoint::kChat;
  if (line.ids.has_value()) {
    if (chat) return absl::InvalidArgumentError("token ids cannot be asked in a chat");
    prompt.input = std::ssize(*line.ids);
    prompt.fields["prompt"] = *std::move(line.ids);
  } else if (line.text.has_value()) {
    if (chat) {
      prompt.fields["messages"] = UserMessage(*std::move(line.text));
    } else {
      prompt.fields["prompt"] = *std::move(line.text);
    }
  } else {
    if (!chat) return absl::InvalidArgumentError("messages need --endpoint chat");
    prompt.fields["messages"] = *std::move(line.messages);
  }
  prompt.output = line.sampling.max_tokens.value_or(options.random.output_len);
  prompt.fields["max_tokens"] = *prompt.output;
  LOCKSTEP_RETURN_IF_ERROR(PutSampling(line.sampling, &prompt.fields));
  if (line.priority != 0) prompt.fields["priority"] = line.priority;
  if (!line.cache_salt.empty()) prompt.fields["cache_salt"] = line.cache_salt;
  return prompt;
}

}  // namespace

absl::StatusOr<std::vector<LoadPrompt>> ReadLoadPrompts(const ServeBenchOptions& options) {
  std::vector<LoadPrompt> prompts;
  const auto add = [&](PromptLine line, const std::string& where) {
    absl::StatusOr<LoadPrompt> prompt = FromLine(std::move(line), options);
    if (!prompt.ok()) return Annotate(prompt.status(), where);
    prompt->where = where;
    prompts.push_back(*std::move(prompt));
    return absl::OkStatus();
  };
  LOCKSTEP_RETURN_IF_ERROR(ReadPromptLines(options.prompts, add));
  const auto wanted = static_cast<size_t>(options.num_prompts.value_or(std::ssize(prompts)));
  if (wanted > prompts.size()) {
    return absl::InvalidArgumentError(absl::StrFormat("--num-prompts %d, but %s holds %d", wanted,
                                                      options.prompts, prompts.size()));
  }
  prompts.resize(wanted);
  return prompts;
}

LoadPrompt MakeRandomPrompt(const PromptLengths& lengths, const ServeBenchOptions& options,
                            bool as_ids, std::mt19937_64& random) {
  LoadPrompt prompt;
  if (as_ids) {
    prompt.fields["prompt"] =
        DrawIds(lengths.input, kFirstId, static_cast<int32_t>(options.vocab_size), random);
  } else if (options.endpoint == BenchEndpoint::kCompletions) {
    prompt.fields["prompt"] = DrawWords(lengths.input, random);
  } else {
    prompt.fields["messages"] = UserMessage(DrawWords(lengths.input, random));
  }
  prompt.fields["max_tokens"] = lengths.output;
  prompt.input = lengths.input;
  prompt.output = lengths.output;
  return prompt;
}

std::string RequestBody(const LoadPrompt& prompt, const std::string& model, bool ignore_eos) {
  OrderedJson body;
  body["model"] = model;
  body["temperature"] = 0;
  if (ignore_eos) body["ignore_eos"] = true;
  for (const auto& [name, value] : prompt.fields.items()) body[name] = value;
  body["stream"] = true;
  body["stream_options"] = {{"include_usage", true}};
  return DumpJson(body);
}

}  // namespace lockstep

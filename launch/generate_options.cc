#include <algorithm>

#include "launch/command_specs.h"
#include "launch/option_setters.h"
#include "launch/sampling_fields.h"
#include "model/checkpoint/unique_json.h"

namespace lockstep {

namespace {

Option PromptOption(const char* name, const char* metavar, const char* help, PromptInput::Kind kind,
                    std::vector<PromptInput>* prompts) {
  return {name, metavar, help, "", true, [kind, prompts](const std::string& text) {
            PromptInput prompt{kind, "", {}};
            if (kind == PromptInput::Kind::kIds) {
              LOCKSTEP_ASSIGN_OR_RETURN(prompt.ids, ParseIdList(text));
            } else {
              if (text.empty()) return absl::InvalidArgumentError("it is an empty string");
              prompt.text = text;
            }
            prompts->push_back(std::move(prompt));
            return absl::OkStatus();
          }};
}

OptionGroup PromptGroup(GenerateOptions* options) {
  return {"Prompts (answered in the order given)",
          {
              PromptOption("--prompt", "TEXT", "A prompt.", PromptInput::Kind::kText,
                           &options->prompts),
              PromptOption("--prompt-file", "FILE", "One prompt: the whole file, byte by byte.",
                           PromptInput::Kind::kFile, &options->prompts),
              PromptOption("--ids", "ID,ID,...",
                           "One prompt as token ids, used as they are; needs no tokenizer.",
                           PromptInput::Kind::kIds, &options->prompts),
              PromptOption(
                  "--prompts", "FILE",
                  "A prompt a line, - for stdin: {\"prompt\": \"TEXT\" or [ID, ...], ...}, with "
                  "--chat also {\"messages\": [...], ...}. A line may override sampling options: "
                  "max_tokens, min_tokens, temperature, top_p, top_k, min_p, presence_penalty, "
                  "frequency_penalty, repetition_penalty, logit_bias, seed, stop (a string or a "
                  "list), stop_token_ids, ignore_eos, n, logprobs, prompt_logprobs; and give a "
                  "priority (lower runs first, 0 when absent) and a cache_salt (only lines of "
                  "equal salt share KV blocks). null says nothing; blank lines are skipped.",
                  PromptInput::Kind::kLines, &options->prompts),
              Flag("--chat",
                   "Each text prompt is a user's message: the model's chat template is put around "
                   "it, and no other special token is added.",
                   &options->chat),
          }};
}

OptionSet StoreLogitBias(SamplingFlags* sampling) {
  return [sampling](const std::string& text) -> absl::Status {
    LOCKSTEP_ASSIGN_OR_RETURN(const Json json, ParseUniqueJson(text, "the value"));
    LOCKSTEP_ASSIGN_OR_RETURN(sampling->logit_bias, ParseLogitBias(json));
    return absl::OkStatus();
  };
}

std::string FromFile(const absl::AlphaNum& built_in) {
  return absl::StrCat("generation_config.json's, else ", built_in);
}

OptionGroup FilterGroup(SamplingFlags* sampling) {
  const SamplingParams usual;
  return {
      "Sampling",
      {
          {"--temperature", "X", "0 or more; 0 takes the most likely token each time.",
           FromFile(usual.temperature), false,
           StoreNumber(
               &sampling->temperature, [](double x) { return x >= 0; }, "0 or more")},
          {"--top-p", "X", "Sample from the most likely tokens that hold this probability: (0, 1].",
           FromFile(usual.top_p), false,
           StoreNumber(
               &sampling->top_p, [](double x) { return x > 0 && x <= 1; },
               "above 0 and at most 1")},
          {"--top-k", "N", "Sample from this many most likely tokens; 0 or -1: all.",
           FromFile(usual.top_k), false,
           [sampling](const std::string& text) {
             LOCKSTEP_ASSIGN_OR_RETURN(const int64_t top_k, ParseInt(text, -1));
             sampling->top_k = std::max<int64_t>(top_k, 0);
             return absl::OkStatus();
           }},
          {"--min-p", "X",
           "Leave out tokens that are less likely than X times the most likely one: 0 to 1.",
           FromFile(usual.min_p), false,
           StoreNumber(
               &sampling->min_p, [](double x) { return x >= 0 && x <= 1; }, "between 0 and 1")},
          {"--seed", "S",
           "Random seed of every prompt, 0 to 2^64 - 1; answer i of --n draws with S + i.",
           "a random one, printed at the start", false,
           [sampling](const std::string& text) {
             LOCKSTEP_ASSIGN_OR_RETURN(sampling->seed, ParseUint64(text));
             return absl::OkStatus();
           }},
          {"--n", "N",
           absl::StrCat("Answers to each prompt, which is computed once: 1 to ", kMaxChoices, "."),
           "1", false, StoreInt(&sampling->n, 1, kMaxChoices)},
      }};
}

OptionGroup LogitGroup(SamplingFlags* sampling) {
  const auto penalty = [](double x) { return x >= -2 && x <= 2; };
  return {"Which tokens are preferred",
          {
              {"--repetition-penalty", "X",
               "1e-6 to 1e6: a positive logit of a token that the prompt or the answer holds is "
               "divided by "
               "X, a negative one multiplied.",
               FromFile(SamplingParams().repetition_penalty), false,
               StoreNumber(
                   &sampling->repetition_penalty, [](double x) { return x >= 1e-6 && x <= 1e6; },
                   "between 1e-6 and 1e6")},
              {"--frequency-penalty", "X",
               "Subtracted from a token's logit for each time that the answer holds it: -2 to 2.",
               "0", false, StoreNumber(&sampling->frequency_penalty, penalty, "between -2 and 2")},
              {"--presence-penalty", "X",
               "Subtracted once from the logit of a token that the answer holds: -2 to 2.", "0",
               false, StoreNumber(&sampling->presence_penalty, penalty, "between -2 and 2")},
              {"--logit-bias", "JSON",
               "{\"ID\": BIAS, ...}: added to the logits of these tokens, -100 to 100.", "", false,
               StoreLogitBias(sampling)},
          }};
}

OptionGroup EndGroup(GenerateOptions* options) {
  SamplingFlags* const sampling = &options->sampling;
  return {
      "End of an answer",
      {
          {"--max-tokens", "N", "Most tokens of an answer, 1 or more.",
           absl::StrCat(SamplingParams().max_tokens), false, StoreInt(&sampling->max_tokens, 1)},
          {"--min-tokens", "N",
           "Before so many tokens no end token and no --stop-token-ids is picked, and --stop is "
           "not "
           "looked for in their text.",
           "0", false, StoreInt(&sampling->min_tokens, 0)},
          {"--stop", "TEXT", "End the answer before this text.", "", true,
           [sampling](const std::string& text) {
             if (text.empty()) return absl::InvalidArgumentError("it is an empty string");
             if (!sampling->stop.has_value()) sampling->stop.emplace();
             sampling->stop->push_back(text);
             return absl::OkStatus();
           }},
          {"--stop-token-ids", "ID,ID,...", "End the answer before these tokens, too.", "", false,
           StoreIds(&sampling->stop_token_ids)},
          Flag("--ignore-eos", "Go on after the model's end-of-text tokens, up to --max-tokens.",
               &sampling->ignore_eos),
          {"--generation-config", "SOURCE",
           "auto takes sampling defaults and end ids from the model's generation_config.json; none "
           "leaves that file out.",
           "auto", false,
           StoreChoice(&options->engine.use_generation_config,
                       OptionChoices<bool>{{"auto", true}, {"none", false}})},
      }};
}

OptionGroup OutputGroup(GenerateOptions* options) {
  SamplingFlags* const sampling = &options->sampling;
  return {
      "Output",
      {
          Flag("--json",
               "One JSON object a line and answer: prompt_index, choice_index (with n above 1), "
               "prompt_token_ids, token_ids (without the end token, but with the tokens that form "
               "a --stop text), text (null without a tokenizer), finish_reason: stop, length, "
               "error (NaN or infinity in the logits; exit status 1) or cancelled.",
               &options->json),
          {"--logprobs", "K",
           absl::StrCat("With --json: logprobs, a list of {token_id, token (its text, with a "
                        "tokenizer), logprob, top: the K most likely tokens in the same form}, 0 "
                        "to ",
                        kMaxLogprobs,
                        ". Natural logarithms of the model's own probabilities, before any "
                        "sampling option; null stands for minus infinity."),
           "", false, StoreInt(&sampling->num_logprobs, 0, kMaxLogprobs)},
          {"--prompt-logprobs", "K",
           "With --json: prompt_logprobs in the same form for the tokens of the prompt, of which "
           "the first has null; on the first answer alone.",
           "", false, StoreInt(&sampling->num_prompt_logprobs, 0, kMaxLogprobs)},
      }};
}

}  // namespace

CommandSpec GenerateSpec(GenerateOptions* options) {
  CommandSpec spec = {
      "generate",
      "MODEL",
      "answer prompts, streaming the text",
      "Continues each prompt and streams the text to stdout. MODEL is a Hugging Face\n"
      "folder or a .gguf file. Progress and statistics go to stderr. Run it under mpirun\n"
      "to split the model over several processes (ranks).\n",
      {PromptGroup(options), FilterGroup(&options->sampling), LogitGroup(&options->sampling),
       EndGroup(options), OutputGroup(options), ModelGroup(&options->engine)},
      absl::StrCat(
          "An option given several times counts with its last value, where nothing else\n"
          "is said. Without a tokenizer in the folder the text output is token ids.\n"
          "\n"
          "Examples:\n"
          "  lockstep generate model.gguf --chat --prompt \"What is a tensor?\"\n"
          "  mpirun -np 2 lockstep generate ./Llama --prompt \"Once upon\" --temperature 0\n"
          "  mpirun -np 4 lockstep generate ./Llama --ids 1,15043 --max-tokens 8 --json\n"
          "  mpirun -np 2 lockstep generate ./Llama --prompts in.jsonl --json > out.jsonl\n\n",
          kExitStatuses),
      &options->engine.model};
  for (OptionGroup& group : EngineGroups(&options->engine)) {
    spec.groups.push_back(std::move(group));
  }
  return spec;
}

absl::Status CheckGenerateOptions(const GenerateOptions& options) {
  if (options.prompts.empty()) {
    return absl::InvalidArgumentError(
        "no prompt: give --prompt, --prompt-file, --ids or --prompts");
  }
  int num_stdin = 0;
  bool has_lines = false;
  for (const PromptInput& prompt : options.prompts) {
    if (options.chat && prompt.kind == PromptInput::Kind::kIds) {
      return absl::InvalidArgumentError(
          "--chat and --ids exclude each other: ids are used as they are");
    }
    const bool lines = prompt.kind == PromptInput::Kind::kLines;
    has_lines = has_lines || lines;
    num_stdin += lines && prompt.text == "-" ? 1 : 0;
  }
  if (num_stdin > 1) {
    return absl::InvalidArgumentError("--prompts - is there twice: stdin can be read once");
  }
  const SamplingFlags& sampling = options.sampling;
  const int64_t max_tokens = sampling.max_tokens.value_or(SamplingParams().max_tokens);
  if (!has_lines && sampling.min_tokens.value_or(0) > max_tokens) {  // a line may raise the limit
    return absl::InvalidArgumentError(absl::StrFormat(
        "--min-tokens %d is more than --max-tokens %d", *sampling.min_tokens, max_tokens));
  }
  if (options.json) return absl::OkStatus();
  for (const auto& [name, value] : {std::pair("--logprobs", sampling.num_logprobs),
                                    std::pair("--prompt-logprobs", sampling.num_prompt_logprobs)}) {
    if (value.has_value()) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s needs --json: plain text has no place for it", name));
    }
  }
  return absl::OkStatus();
}

}  // namespace lockstep

#include "launch/command_line.h"

#include <algorithm>
#include <array>
#include <bit>
#include <functional>

#include "launch/option_parser.h"
#include "launch/option_values.h"

namespace lockstep {

namespace {

constexpr char kExitStatuses[] =
    "Exit status: 0 done; 2 refused before any work (command line, configuration,\n"
    "checkpoint, launch); 1 started and then failed.\n";

using Set = std::function<absl::Status(const std::string&)>;

// `set` functions: parse, check, store.

Set StoreFlag(bool* target) {
  return [target](const std::string&) {
    *target = true;
    return absl::OkStatus();
  };
}

template <typename Integer>
Set StoreInt(Integer* target, int64_t min, int64_t max = kNoLimit) {
  return [target, min, max](const std::string& text) {
    LOCKSTEP_ASSIGN_OR_RETURN(*target, ParseInt(text, min, max));
    return absl::OkStatus();
  };
}

Set StoreOptionalNumber(std::optional<double>* target, const std::function<bool(double)>& legal,
                        const std::string& limits) {
  return [=](const std::string& text) {
    LOCKSTEP_ASSIGN_OR_RETURN(const double value, ParseNumber(text));
    if (!legal(value)) return absl::InvalidArgumentError("it must be " + limits);
    *target = value;
    return absl::OkStatus();
  };
}

Set StoreText(std::string* target) {
  return [target](const std::string& text) {
    if (text.empty()) return absl::InvalidArgumentError("it is an empty string");
    *target = text;
    return absl::OkStatus();
  };
}

template <typename Value>
using Choices = std::vector<std::pair<const char*, Value>>;

template <typename Target, typename Value>
Set StoreChoice(Target* target, const Choices<Value>& choices) {
  return [target, choices](const std::string& text) {
    std::string known;
    for (const auto& [name, value] : choices) {
      if (text == name) {
        *target = value;
        return absl::OkStatus();
      }
      absl::StrAppend(&known, known.empty() ? "" : ", ", name);
    }
    return absl::InvalidArgumentError("it must be one of: " + known);
  };
}

absl::Status SetBlockSize(const std::string& text, int64_t* block_size) {
  LOCKSTEP_ASSIGN_OR_RETURN(const int64_t value, ParseInt(text, 1, 256));
  if (!std::has_single_bit(static_cast<uint64_t>(value))) {
    return absl::InvalidArgumentError("it must be a power of two between 1 and 256");
  }
  *block_size = value;
  return absl::OkStatus();
}

absl::Status SetDevice(const std::string& text) {
  if (text == "auto" || text == "cpu") return absl::OkStatus();
  if (text == "cuda") return absl::InvalidArgumentError("this lockstep was built without CUDA");
  return absl::InvalidArgumentError("it must be one of: auto, cpu, cuda");
}

Option Flag(const char* name, const char* help, bool* target) {
  return {name, "", help, "", false, StoreFlag(target)};
}

OptionGroup ModelGroup(EngineFlags* flags) {
  return {
      "Model",
      {
          {"--dtype", "TYPE",
           "Weights and arithmetic: auto, float32 or bfloat16. auto takes what the checkpoint "
           "says; for float16 that is float32.",
           "auto", false,
           StoreChoice(&flags->dtype, Choices<std::optional<DType>>{{"auto", std::nullopt},
                                                                    {"float32", DType::kF32},
                                                                    {"bfloat16", DType::kBF16}})},
          {"--load-format", "FORMAT",
           "auto reads the checkpoint; dummy makes random weights, so that config.json is enough.",
           "auto", false,
           StoreChoice(&flags->load_format, Choices<LoadFormat>{{"auto", LoadFormat::kAuto},
                                                                {"dummy", LoadFormat::kDummy}})},
          {"--max-model-len", "TOKENS", "Longest prompt plus answer, 1 or more.",
           "the model's own limit, or what the KV memory holds", false,
           StoreInt(&flags->engine.max_model_len, 1)},
      }};
}

OptionGroup EngineGroup(EngineFlags* flags) {
  EngineOptions* const engine = &flags->engine;
  return {
      "Engine",
      {
          {"--tp", "N",
           "Number of ranks the command expects. It is refused when mpirun started another number.",
           "as many as mpirun started", false, StoreInt(&flags->tp, 1, 65536)},
          {"--threads", "T", "Compute threads of each rank, 1 to 1024.",
           "cores of the host / ranks on it", false, StoreInt(&engine->num_threads, 1, 1024)},
          {"--device", "DEVICE", "auto, cpu or cuda.", "auto", false, SetDevice},
          {"--attention-backend", "NAME",
           "Attention implementation; an unknown name is answered with the list.",
           "the first that fits", false, StoreText(&engine->attention_backend)},
          {"--max-num-batched-tokens", "TOKENS",
           "Most tokens in one step; a longer prompt is computed in chunks of this size.",
           absl::StrCat(engine->max_num_batched_tokens), false,
           StoreInt(&engine->max_num_batched_tokens, 1, int64_t{1} << 24)},
          {"--max-num-seqs", "N", "Most requests in one step, 1 to 65536.",
           absl::StrCat(engine->max_num_seqs), false, StoreInt(&engine->max_num_seqs, 1, 65536)},
          {"--block-size", "TOKENS", "Token slots in a KV block: a power of two, 1 to 256.",
           absl::StrCat(engine->block_size), false,
           [engine](const std::string& text) { return SetBlockSize(text, &engine->block_size); }},
          {"--kv-cache-memory", "BYTES",
           "Memory of each rank's KV blocks; K, M, G and T stand for powers of 1024.",
           "enough for one longest sequence, within a quarter of the free memory", false,
           [engine](const std::string& text) {
             LOCKSTEP_ASSIGN_OR_RETURN(engine->kv_cache_memory_bytes, ParseByteSize(text));
             return absl::OkStatus();
           }},
          {"--log-level", "LEVEL", "Messages on stderr: debug, info, warning or error.", "info",
           false,
           StoreChoice(&flags->log_level, Choices<LogLevel>{{"debug", LogLevel::kDebug},
                                                            {"info", LogLevel::kInfo},
                                                            {"warning", LogLevel::kWarning},
                                                            {"error", LogLevel::kError}})},
      }};
}

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
              Flag("--chat",
                   "Each --prompt and --prompt-file is a user's message: the model's chat template "
                   "is put around it, and no other special token is added.",
                   &options->chat),
          }};
}

OptionGroup SamplingGroup(GenerateOptions* options) {
  SamplingFlags* const sampling = &options->sampling;
  const char* const from_file = "generation_config.json's, else ";
  return {
      "Sampling",
      {
          {"--max-tokens", "N", "Most tokens to generate for a prompt, 1 or more.",
           absl::StrCat(sampling->max_tokens), false, StoreInt(&sampling->max_tokens, 1)},
          {"--temperature", "X", "0 or more; 0 takes the most likely token each time.",
           absl::StrCat(from_file, SamplingParams().temperature), false,
           StoreOptionalNumber(
               &sampling->temperature, [](double x) { return x >= 0; }, "0 or more")},
          {"--top-p", "X", "Sample from the most likely tokens that hold this probability: (0, 1].",
           absl::StrCat(from_file, SamplingParams().top_p), false,
           StoreOptionalNumber(
               &sampling->top_p, [](double x) { return x > 0 && x <= 1; },
               "above 0 and at most 1")},
          {"--top-k", "N", "Sample from this many most likely tokens; 0 or -1: all.",
           absl::StrCat(from_file, SamplingParams().top_k), false,
           [sampling](const std::string& text) {
             LOCKSTEP_ASSIGN_OR_RETURN(const int64_t top_k, ParseInt(text, -1));
             sampling->top_k = std::max<int64_t>(top_k, 0);
             return absl::OkStatus();
           }},
          {"--seed", "S", "Random seed of every prompt, 0 to 2^64 - 1.",
           "a random one, printed at the end", false,
           [sampling](const std::string& text) {
             LOCKSTEP_ASSIGN_OR_RETURN(sampling->seed, ParseUint64(text));
             return absl::OkStatus();
           }},
          {"--stop", "TEXT", "End the answer before this text.", "", true,
           [options](const std::string& text) {
             if (text.empty()) return absl::InvalidArgumentError("it is an empty string");
             options->stop.push_back(text);
             return absl::OkStatus();
           }},
          Flag("--ignore-eos", "Go on after an end-of-text token, up to --max-tokens.",
               &sampling->ignore_eos),
          {"--generation-config", "SOURCE",
           "auto takes sampling defaults and end ids from the model's generation_config.json; none "
           "leaves that file out.",
           "auto", false,
           StoreChoice(&options->engine.use_generation_config,
                       Choices<bool>{{"auto", true}, {"none", false}})},
      }};
}

CommandSpec GenerateSpec(GenerateOptions* options) {
  return {
      "generate",
      "MODEL",
      "answer prompts, streaming the text",
      "Continues each prompt and streams the text to stdout. MODEL is a Hugging Face\n"
      "folder or a .gguf file. Progress and statistics go to stderr. Run it under mpirun\n"
      "to split the model over several processes (ranks).\n",
      {PromptGroup(options),
       SamplingGroup(options),
       ModelGroup(&options->engine),
       EngineGroup(&options->engine),
       {"Output",
        {Flag(
            "--json",
            "One JSON object a line and prompt: prompt_index, prompt_token_ids, token_ids (without "
            "the end token, but with the tokens that form a --stop text), text (null without a "
            "tokenizer), finish_reason: stop, length or error (NaN or infinity in the logits; exit "
            "status 1).",
            &options->json)}}},
      absl::StrCat(
          "An option given several times counts with its last value, where nothing else\n"
          "is said. Without a tokenizer in the folder the text output is token ids.\n"
          "\n"
          "Examples:\n"
          "  lockstep generate model.gguf --chat --prompt \"What is a tensor?\"\n"
          "  mpirun -np 2 lockstep generate ./Llama --prompt \"Once upon\" --temperature 0\n"
          "  mpirun -np 4 lockstep generate ./Llama --ids 1,15043 --max-tokens 8 --json\n\n",
          kExitStatuses),
      &options->engine.model};
}

CommandSpec ScoreSpec(ScoreOptions* options, bool* json) {
  return {
      "score",
      "MODEL",
      "log-probability of every token of a text",
      "Prints one JSON object: num_tokens, token_logprobs (natural logarithm, null for\n"
      "the first token) and perplexity (null for one token).\n",
      {{"Input (one of them)",
        {{"--ids", "ID,ID,...", "Token ids, used as they are.", "", false,
          [options](const std::string& text) {
            LOCKSTEP_ASSIGN_OR_RETURN(options->ids, ParseIdList(text));
            return absl::OkStatus();
          }},
         {"--text-file", "FILE", "The file's text, encoded with the special tokens a prompt gets.",
          "", false, StoreText(&options->text_file)}}},
       {"Output",
        {{"--logits-out", "FILE",
          "Also write a safetensors file with `logits`, F32 [num_tokens, vocabulary]. A file "
          "that is there is replaced.",
          "", false, StoreText(&options->logits_out)},
         Flag("--json", "Output is JSON in any case; accepted for symmetry.", json)}},
       ModelGroup(&options->engine),
       EngineGroup(&options->engine)},
      absl::StrCat("Examples:\n"
                   "  lockstep score model.gguf --text-file article.txt\n"
                   "  mpirun -np 2 lockstep score ./Llama --ids 1,15043,3186 --dtype float32\n\n",
                   kExitStatuses),
      &options->engine.model};
}

CommandSpec TokenizeSpec(TokenizeOptions* options) {
  return {
      "tokenize",
      "MODEL",
      "text to token ids and back, chat templates",
      "Reads one JSON value a line from stdin and writes one a line to stdout: for a\n"
      "string its token ids. Needs the model's tokenizer files only, no weights, no MPI.\n",
      {{"Options",
        {Flag("--decode", "Input lines are lists of ids, output lines are strings.",
              &options->decode),
         Flag("--skip-special-tokens", "With --decode: leave special tokens out of the text.",
              &options->skip_special_tokens),
         Flag("--add-special-tokens",
              "Add what the tokenizer adds to a prompt, a leading <s> for instance.",
              &options->add_special_tokens),
         Flag("--chat",
              "Input lines are objects for the chat template: {\"messages\": [...], \"tools\": "
              "[...], \"add_generation_prompt\": true, ...}.",
              &options->chat),
         Flag("--render",
              "With --chat: output the template's text instead of ids; tokenizer_config.json or "
              "chat_template.jinja is enough for it.",
              &options->render)}}},
      absl::StrCat("Examples:\n"
                   "  echo '\"Hello  World\"' | lockstep tokenize ./Llama\n"
                   "  echo '[9906, 220, 4435]' | lockstep tokenize ./Llama --decode\n"
                   "  echo '{\"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}]}' |\n"
                   "      lockstep tokenize model.gguf --chat --render\n\n",
                   kExitStatuses),
      &options->model};
}

CommandSpec PlanSpec(PlanOptions* options) {
  return {
      "plan",
      "MODEL",
      "how a model is split over N ranks, without loading it",
      "Prints what each rank holds: query heads, KV heads, rows of the feed-forward layers\n"
      "and of the vocabulary, bytes of weights, KV bytes a token, and the tokens that fit.\n"
      "MODEL needs its configuration only. No MPI.\n",
      {{"Options",
        {{"--tp", "N", "Number of ranks, 1 up to the model's query heads.", "1", false,
          StoreInt(&options->tp_size, 1, 65536)},
         {"--memory-gib", "X", kPlanMemoryHelp, "", false,
          StoreOptionalNumber(
              &options->memory_gib, [](double x) { return x > 0; }, "above 0")},
         {"--block-size", "TOKENS", "Token slots in a KV block, P: a power of two, 1 to 256.",
          absl::StrCat(options->block_size), false,
          [options](const std::string& text) { return SetBlockSize(text, &options->block_size); }},
         {"--dtype", "TYPE", "auto, float32 or bfloat16, for weights and KV.", "auto", false,
          StoreChoice(&options->dtype, Choices<std::optional<DType>>{{"auto", std::nullopt},
                                                                     {"float32", DType::kF32},
                                                                     {"bfloat16", DType::kBF16}})},
         Flag("--json", kPlanJsonHelp, &options->json)}}},
      absl::StrCat("Examples:\n"
                   "  lockstep plan ./Llama-3.1-70B --tp 8 --memory-gib 80\n"
                   "  lockstep plan ./Qwen2.5-7B --tp 3 --json\n\n",
                   kExitStatuses),
      &options->model};
}

CommandSpec VersionSpec(VersionOptions* options) {
  return {"version",
          "",
          "version and what is built in",
          "Prints the version, what is built in, and the processor features in use.\n",
          {{"Options", {Flag("--json", "One JSON object.", &options->json)}}},
          "",
          nullptr};
}

// All commands, each with a place to put its options.
struct CommandTable {
  GenerateOptions generate;
  ScoreOptions score;
  bool score_json = false;
  TokenizeOptions tokenize;
  PlanOptions plan;
  VersionOptions version;
  std::string help_topic;

  std::vector<CommandSpec> Specs() {
    return {GenerateSpec(&generate),
            ScoreSpec(&score, &score_json),
            TokenizeSpec(&tokenize),
            PlanSpec(&plan),
            VersionSpec(&version),
            {"help",
             "[COMMAND]",
             "help on a command",
             "Prints help on a command.\n",
             {},
             "",
             &help_topic}};
  }
};

std::string GeneralHelp(const std::vector<CommandSpec>& specs) {
  std::string out =
      "Usage: [mpirun -np N] lockstep COMMAND ...\n\n"
      "Lockstep runs decoder-only transformers, split over N processes (ranks) by tensor\n"
      "parallelism.\n\nCommands:\n";
  for (const CommandSpec& spec : specs) {
    absl::StrAppend(&out, absl::StrFormat("  %-9s %s\n", spec.name, spec.summary));
  }
  absl::StrAppend(&out, "\n'lockstep help COMMAND' explains a command and its options.\n\n",
                  kExitStatuses);
  return out;
}

absl::Status WithHint(const absl::Status& status, const std::string& command) {
  return absl::Status(status.code(),
                      absl::StrFormat("%s\nTry 'lockstep help%s'.", std::string(status.message()),
                                      command.empty() ? "" : " " + command));
}

absl::StatusOr<const CommandSpec*> FindCommand(const std::vector<CommandSpec>& specs,
                                               const std::string& name) {
  std::vector<std::string> names;
  for (const CommandSpec& spec : specs) {
    if (spec.name == name) return &spec;
    names.push_back(spec.name);
  }
  const std::string nearest = NearestName(name, names);
  return absl::InvalidArgumentError(
      absl::StrFormat("there is no command '%s'%s\nTry 'lockstep help'.", name,
                      nearest.empty() ? "" : "; did you mean " + nearest + "?"));
}

// What no single option can tell: options that need, or exclude, each other.
absl::Status CheckTogether(const CommandTable& table, const std::string& command) {
  if (command == "generate") {
    if (table.generate.prompts.empty()) {
      return absl::InvalidArgumentError("no prompt: give --prompt, --prompt-file or --ids");
    }
    for (const PromptInput& prompt : table.generate.prompts) {
      if (table.generate.chat && prompt.kind == PromptInput::Kind::kIds) {
        return absl::InvalidArgumentError(
            "--chat and --ids exclude each other: ids are used as they are");
      }
    }
  } else if (command == "score") {
    if (table.score.ids.empty() == table.score.text_file.empty()) {
      return absl::InvalidArgumentError(table.score.ids.empty()
                                            ? "no input: give --ids or --text-file"
                                            : "--ids and --text-file exclude each other");
    }
  } else if (command == "tokenize") {
    const TokenizeOptions& options = table.tokenize;
    if (options.decode && (options.chat || options.add_special_tokens)) {
      return absl::InvalidArgumentError(
          "--decode goes neither with --chat nor with --add-special-tokens");
    }
    if (options.skip_special_tokens && !options.decode) {
      return absl::InvalidArgumentError("--skip-special-tokens needs --decode");
    }
    if (options.render && !options.chat) {
      return absl::InvalidArgumentError("--render needs --chat");
    }
    if (options.render && options.add_special_tokens) {
      return absl::InvalidArgumentError("--render prints text: --add-special-tokens adds nothing");
    }
  }
  return absl::OkStatus();
}

// "model/" and "model" are one folder, and messages name files as MODEL + "/" + name.
void StripTrailingSlashes(std::string* path) {
  while (path->size() > 1 && path->back() == '/') path->pop_back();
}

Command TakeOptions(CommandTable& table, const std::string& command) {
  if (command == "generate") return std::move(table.generate);
  if (command == "score") return std::move(table.score);
  if (command == "tokenize") return std::move(table.tokenize);
  if (command == "plan") return std::move(table.plan);
  return table.version;
}

}  // namespace

absl::StatusOr<Command> ParseCommandLine(std::span<const std::string> args) {
  CommandTable table;
  const std::vector<CommandSpec> specs = table.Specs();
  if (args.empty()) return WithHint(absl::InvalidArgumentError("no command given"), "");
  if (args[0] == "--help" || args[0] == "-h") return HelpOptions{GeneralHelp(specs)};
  if (args[0] == "--version") return VersionOptions();
  LOCKSTEP_ASSIGN_OR_RETURN(const CommandSpec* spec, FindCommand(specs, args[0]));
  bool help = false;
  if (absl::Status status = ParseOptions(*spec, args.subspan(1), &help); !status.ok()) {
    return WithHint(status, spec->name);
  }
  if (help) return HelpOptions{FormatHelp(*spec)};
  if (spec->name == "help") {
    if (table.help_topic.empty()) return HelpOptions{GeneralHelp(specs)};
    LOCKSTEP_ASSIGN_OR_RETURN(const CommandSpec* topic, FindCommand(specs, table.help_topic));
    return HelpOptions{FormatHelp(*topic)};
  }
  if (spec->operand == "MODEL") StripTrailingSlashes(spec->operand_value);
  if (absl::Status status = CheckTogether(table, spec->name); !status.ok()) {
    return WithHint(status, spec->name);
  }
  return TakeOptions(table, spec->name);
}

}  // namespace lockstep

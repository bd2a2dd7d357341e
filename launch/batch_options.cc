#include "launch/command_specs.h"
#include "launch/option_setters.h"

namespace lockstep {

namespace {

OptionGroup FileGroup(BatchOptions* options) {
  return {
      "Files",
      {
          {"--input", "FILE",
           "A request a line, - for stdin: {\"custom_id\": \"a\", \"method\": \"POST\", \"url\": "
           "\"/v1/completions\" or \"/v1/chat/completions\", \"body\": {...}} as in OpenAI's batch "
           "files, or the body alone: {\"prompt\": ...} or {\"messages\": [...]}. Blank lines are "
           "skipped.",
           "", false, StoreText(&options->input)},
          {"--output", "FILE",
           "A result a line, - for stdout: {id, custom_id, response, error}; the id ends with the "
           "number of the input's line. A file that is there is continued: lines that have a "
           "result are skipped, a torn last line is dropped. FILE.job beside it says which job it "
           "is.",
           "", false, StoreText(&options->output)},
          Flag("--ordered", "Results in the order of the input, not as they are done.",
               &options->ordered),
          Flag("--retry-failed", "Results of failures are taken out, and their lines tried again.",
               &options->retry_failed),
          Flag("--force",
               "Continue a file although model, input or sampling defaults have changed.",
               &options->force),
          {"--lock-seconds", "SECONDS",
           "How long to wait for another job that writes to the output; 0 to 1000000.",
           absl::StrCat(options->lock_seconds), false,
           StoreNumber(
               &options->lock_seconds, [](double x) { return x >= 0 && x <= 1e6; },
               "0 to 1000000")},
          {"--fsync", "WHEN",
           "Results are forced onto the disk: never, end, second (every second) or always (each "
           "before it counts as done). A killed job loses none in any case; a machine without "
           "power does.",
           "second", false,
           StoreChoice(&options->fsync,
                       OptionChoices<FsyncPolicy>{{"never", FsyncPolicy::kNever},
                                                  {"end", FsyncPolicy::kEnd},
                                                  {"second", FsyncPolicy::kEverySecond},
                                                  {"always", FsyncPolicy::kAlways}})},
          {"--progress", "KIND",
           "On stderr: bar, plain (a message now and then), none, or auto: a bar on a terminal.",
           "auto", false,
           StoreChoice(&options->progress,
                       OptionChoices<ProgressKind>{{"auto", ProgressKind::kAuto},
                                                   {"bar", ProgressKind::kBar},
                                                   {"plain", ProgressKind::kPlain},
                                                   {"none", ProgressKind::kNone}})},
      }};
}

OptionGroup DefaultsGroup(BatchOptions* options) {
  SamplingFlags* const sampling = &options->sampling;
  return {
      "Defaults of lines that do not say themselves",
      {
          {"--max-tokens", "N", "Most tokens of an answer, 1 or more.",
           "the API's: 16, for chats what the model's length leaves", false,
           StoreInt(&sampling->max_tokens, 1)},
          {"--temperature", "X", "0 or more; 0 takes the most likely token each time.",
           "generation_config.json's, else 1", false,
           StoreNumber(
               &sampling->temperature, [](double x) { return x >= 0; }, "0 or more")},
          {"--top-p", "X", "(0, 1].", "generation_config.json's, else 1", false,
           StoreNumber(
               &sampling->top_p, [](double x) { return x > 0 && x <= 1; },
               "above 0 and at most 1")},
          {"--top-k", "N", "0: all.", "generation_config.json's, else 0", false,
           StoreInt(&sampling->top_k, 0)},
          {"--min-p", "X", "0 to 1.", "generation_config.json's, else 0", false,
           StoreNumber(
               &sampling->min_p, [](double x) { return x >= 0 && x <= 1; }, "between 0 and 1")},
          {"--repetition-penalty", "X", "1e-6 to 1e6.", "generation_config.json's, else 1", false,
           StoreNumber(
               &sampling->repetition_penalty, [](double x) { return x >= 1e-6 && x <= 1e6; },
               "between 1e-6 and 1e6")},
          {"--seed", "S", "Line N gets the seed S + 1024 N, 0 to 2^64 - 1.", "a random one each",
           false,
           [sampling](const std::string& text) {
             LOCKSTEP_ASSIGN_OR_RETURN(sampling->seed, ParseUint64(text));
             return absl::OkStatus();
           }},
          {"--generation-config", "SOURCE",
           "auto takes sampling defaults and end ids from the model's generation_config.json; none "
           "leaves that file out.",
           "auto", false,
           StoreChoice(&options->engine.use_generation_config,
                       OptionChoices<bool>{{"auto", true}, {"none", false}})},
      }};
}

OptionGroup ModelNameGroup(BatchOptions* options) {
  return {
      "Requests",
      {
          {"--served-model-name", "NAME",
           "What a line's \"model\" may be; may be given several times.", "MODEL as given", true,
           [options](const std::string& text) {
             if (text.empty()) return absl::InvalidArgumentError("it is an empty string");
             options->served_model_names.push_back(text);
             return absl::OkStatus();
           }},
          {"--chat-template", "FILE", "A Jinja template in place of the model's own.", "", false,
           StoreText(&options->chat_template)},
      }};
}

}  // namespace

CommandSpec BatchSpec(BatchOptions* options) {
  CommandSpec spec = {
      "batch",
      "MODEL",
      "answers a file of requests, and can be resumed",
      "Answers each line of a file into another one. Run again after a kill, the same\n"
      "command continues: no line is lost, none is answered twice. A bad line becomes a\n"
      "result with an error, and never ends the job.\n",
      {FileGroup(options), DefaultsGroup(options), ModelNameGroup(options),
       ModelGroup(&options->engine)},
      absl::StrCat(
          "SIGTERM or SIGINT to rank 0, or SIGUSR1 or SIGUSR2 to mpirun, which passes them\n"
          "on: no further lines are read, those being answered are finished, exit status 1.\n"
          "A second one ends at once.\n"
          "\n"
          "Examples:\n"
          "  mpirun -np 2 lockstep batch ./Llama --input in.jsonl --output out.jsonl\n"
          "  lockstep batch model.gguf --input - --output - --max-tokens 64 < in.jsonl\n\n",
          "Exit status: 0 every line is answered; 1 some failed, or the job was stopped or\n"
          "failed before its end; 2 refused before any work (command line, configuration,\n"
          "checkpoint, launch, output in use), or no line could be answered.\n"),
      &options->engine.model};
  for (OptionGroup& group : EngineGroups(&options->engine)) {
    spec.groups.push_back(std::move(group));
  }
  return spec;
}

absl::Status CheckBatchOptions(const BatchOptions& options) {
  if (options.input.empty() || options.output.empty()) {
    return absl::InvalidArgumentError(options.input.empty() ? "--input is missing"
                                                            : "--output is missing");
  }
  if (options.output == "-" && (options.retry_failed || options.force)) {
    return absl::InvalidArgumentError("--retry-failed and --force are for files, not for stdout");
  }
  if (options.ordered && options.retry_failed) {
    return absl::InvalidArgumentError(
        "--ordered and --retry-failed exclude each other: what is tried again comes last");
  }
  return absl::OkStatus();
}

}  // namespace lockstep

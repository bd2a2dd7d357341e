#include "launch/command_specs.h"
#include "launch/option_setters.h"

namespace lockstep {

namespace {

Option TextList(const char* name, const char* metavar, const char* help,
                std::vector<std::string>* target, const char* default_value = "") {
  return {name, metavar, help, default_value, true, [target](const std::string& text) {
            if (text.empty()) return absl::InvalidArgumentError("it is an empty string");
            target->push_back(text);
            return absl::OkStatus();
          }};
}

OptionSet StoreSeconds(double* target) {
  return StoreNumber(
      target, [](double x) { return x >= 0 && x <= 1e6; }, "0 to 1000000");
}

// It belongs in front of mpirun: launch/run.sh takes it from the command line.
absl::Status RefuseRestarts(const std::string& text) {
  return absl::InvalidArgumentError(absl::StrFormat(
      "ranks cannot be started again from within: write bash launch/run.sh -n RANKS serve MODEL "
      "... --restarts %s, or lockstep supervise --restarts %s -- mpirun -np RANKS lockstep serve "
      "MODEL ...",
      text, text));
}

OptionGroup ServerGroup(ServeOptions* options) {
  return {
      "Server",
      {
          {"--host", "ADDRESS", "Where to listen: a name or an address; 0.0.0.0 or :: for all.",
           options->host, false, StoreText(&options->host)},
          {"--port", "PORT", "0 takes any free one, which a message names.",
           absl::StrCat(options->port), false, StoreInt(&options->port, 0, 65535)},
          TextList("--served-model-name", "NAME",
                   "What clients call the model; each name given is known, the first is listed.",
                   &options->served_model_names, "MODEL as given"),
          TextList("--api-key", "KEY",
                   "Requests to /v1, /tokenize and /detokenize must carry it (Authorization: "
                   "Bearer KEY); of several each one opens. Other users of the machine see "
                   "command lines: the environment variable LOCKSTEP_API_KEY adds a key unseen.",
                   &options->api_keys),
          {"--chat-template", "FILE", "A Jinja template in place of the model's own.", "", false,
           StoreText(&options->chat_template)},
          {"--max-queue", "N",
           "Answers that may wait for their turn; requests beyond it get status 429.",
           absl::StrCat(options->max_queue), false,
           StoreInt(&options->max_queue, 0, int64_t{1} << 20)},
          {"--request-timeout", "SECONDS",
           "Longest time from a request's arrival to its last token; 0: no limit.", "0", false,
           StoreSeconds(&options->request_timeout_seconds)},
          {"--drain-seconds", "SECONDS",
           "After SIGTERM to rank 0, or SIGUSR2 to mpirun: time that running requests have left to "
           "finish.",
           absl::StrCat(options->drain_seconds), false, StoreSeconds(&options->drain_seconds)},
          {"--restarts", "N",
           "To launch/run.sh, not to mpirun: starts ranks that have failed again, at most N times "
           "in "
           "a row; 'lockstep help supervise' says how.",
           "", false, RefuseRestarts},
          {"--generation-config", "SOURCE",
           "auto takes sampling defaults and end ids from the model's generation_config.json; none "
           "leaves that file out.",
           "auto", false,
           StoreChoice(&options->engine.use_generation_config,
                       OptionChoices<bool>{{"auto", true}, {"none", false}})},
      }};
}

}  // namespace

CommandSpec ServeSpec(ServeOptions* options) {
  CommandSpec spec = {
      "serve",
      "MODEL",
      "OpenAI's API over HTTP",
      "Serves /v1/completions, /v1/chat/completions, /v1/models, /tokenize, /detokenize,\n"
      "/health, /metrics (Prometheus), /version, and / for browsers. Rank 0 listens, as\n"
      "soon as the model is found; /health answers 503 until it is loaded.\n",
      {ServerGroup(options), ModelGroup(&options->engine)},
      absl::StrCat(
          "SIGTERM or SIGINT to rank 0, or SIGUSR1 or SIGUSR2 to mpirun, which passes them\n"
          "on: nothing new is admitted, what runs may finish, the exit status is 0. A\n"
          "second one ends at once. SIGTERM or SIGINT to mpirun itself leaves the ranks\n"
          "about a second: the clients are told, and the server ends within it.\n"
          "\n"
          "Examples:\n"
          "  mpirun -np 2 lockstep serve ./Llama --port 8000\n"
          "  lockstep serve model.gguf --served-model-name small --api-key SECRET\n\n",
          kExitStatuses),
      &options->engine.model};
  for (OptionGroup& group : EngineGroups(&options->engine)) {
    spec.groups.push_back(std::move(group));
  }
  return spec;
}

CommandSpec SuperviseSpec(SuperviseOptions* options) {
  CommandSpec spec = {
      "supervise",
      "COMMAND [ARG...]",
      "starts a server's ranks again when they have failed",
      "Runs COMMAND, which starts the ranks of `lockstep serve` (mpirun, srun), and runs it\n"
      "again when it has failed: any exit status but 0, and 2, a refusal. Rank 0 gets its\n"
      "port from here and has to run on this host; while there is none, requests get 503.\n"
      "The first wait before a restart is 1 s, each further one twice as long, at most 60 s.\n"
      "Both begin anew after a failure of a server that was ready for 10 minutes.\n",
      {{"Options",
        {{"--restarts", "N",
          "Restarts in a row; after the last one the failure's status is passed on.",
          absl::StrCat(options->max_restarts), false,
          StoreInt(&options->max_restarts, 0, 1000000)}}}},
      "SIGTERM, SIGINT, SIGUSR1 and SIGUSR2 reach COMMAND as SIGUSR2, upon which running\n"
      "requests may finish; there is no restart then. A second one ends at once, and so does\n"
      "the first where no server is ready: by that signal. Nothing of COMMAND stays behind,\n"
      "on this host, even if this process is killed.\n"
      "\n"
      "Examples:\n"
      "  lockstep supervise --restarts 5 -- mpirun -np 2 lockstep serve ./Llama\n"
      "  bash launch/run.sh -n 2 serve ./Llama --restarts 5          # the same\n\n"
      "Exit status: that of COMMAND's last run (128 + N: signal N ended a rank); 2 where\n"
      "COMMAND cannot be started.\n",
      nullptr};
  spec.operand_words = &options->command;
  return spec;
}

}  // namespace lockstep

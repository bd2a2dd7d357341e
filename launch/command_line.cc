#include "launch/command_line.h"

#include "launch/command_specs.h"
#include "launch/option_parser.h"

namespace lockstep {

namespace {

// All commands, each with a place to put its options.
struct CommandTable {
  GenerateOptions generate;
  ScoreOptions score;
  ServeOptions serve;
  SuperviseOptions supervise;
  BatchOptions batch;
  ReportOptions report;
  TokenizeOptions tokenize;
  PlanOptions plan;
  VersionOptions version;
  std::string help_topic;

  std::vector<CommandSpec> Specs() {
    return {GenerateSpec(&generate),
            ScoreSpec(&score),
            ServeSpec(&serve),
            SuperviseSpec(&supervise),
            BatchSpec(&batch),
            {"bench", "KIND ...", kBenchSummary, "", {}, "", nullptr},  // ParseBench has the rest
            ReportSpec(&report),
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

absl::Status CheckTogether(const CommandTable& table, const std::string& command) {
  if (command == "generate") return CheckGenerateOptions(table.generate);
  if (command == "batch") return CheckBatchOptions(table.batch);
  if (command == "score") return CheckScoreOptions(table.score);
  if (command == "tokenize") return CheckTokenizeOptions(table.tokenize);
  if (command == "plan") return CheckPlanOptions(table.plan);
  return absl::OkStatus();
}

// "model/" and "model" are one folder, and messages name files as MODEL + "/" + name.
void StripTrailingSlashes(std::string* path) {
  while (path->size() > 1 && path->back() == '/') path->pop_back();
}

Command TakeOptions(CommandTable& table, const std::string& command) {
  if (command == "generate") return std::move(table.generate);
  if (command == "score") return std::move(table.score);
  if (command == "serve") return std::move(table.serve);
  if (command == "supervise") return std::move(table.supervise);
  if (command == "batch") return std::move(table.batch);
  if (command == "report") return std::move(table.report);
  if (command == "tokenize") return std::move(table.tokenize);
  if (command == "plan") return std::move(table.plan);
  return table.version;
}

absl::StatusOr<Command> ParseBenchLine(std::span<const std::string> args) {
  std::string help;
  LOCKSTEP_ASSIGN_OR_RETURN(BenchOptions options, ParseBench(args, &help));
  if (!help.empty()) return HelpOptions{std::move(help)};
  return options;
}

}  // namespace

absl::StatusOr<Command> ParseCommandLine(std::span<const std::string> args) {
  CommandTable table;
  const std::vector<CommandSpec> specs = table.Specs();
  if (args.empty()) return WithHint(absl::InvalidArgumentError("no command given"), "");
  if (args[0] == "--help" || args[0] == "-h") return HelpOptions{GeneralHelp(specs)};
  if (args[0] == "--version") return VersionOptions();
  LOCKSTEP_ASSIGN_OR_RETURN(const CommandSpec* spec, FindCommand(specs, args[0]));
  if (spec->name == "bench") return ParseBenchLine(args.subspan(1));
  bool help = false;
  if (absl::Status status = ParseOptions(*spec, args.subspan(1), &help); !status.ok()) {
    return WithHint(status, spec->name);
  }
  if (help) return HelpOptions{FormatHelp(*spec)};
  if (spec->name == "help") {
    if (table.help_topic.empty()) return HelpOptions{GeneralHelp(specs)};
    LOCKSTEP_ASSIGN_OR_RETURN(const CommandSpec* topic, FindCommand(specs, table.help_topic));
    if (topic->name == "bench") return ParseBenchLine(std::vector<std::string>{"--help"});
    return HelpOptions{FormatHelp(*topic)};
  }
  if (spec->operand == "MODEL" || spec->operand == "DIR") StripTrailingSlashes(spec->operand_value);
  if (absl::Status status = CheckTogether(table, spec->name); !status.ok()) {
    return WithHint(status, spec->name);
  }
  Command command = TakeOptions(table, spec->name);
  std::visit(
      [spec](auto& options) {
        if constexpr (requires { options.engine.command; }) options.engine.command = spec->name;
      },
      command);
  return command;
}

}  // namespace lockstep

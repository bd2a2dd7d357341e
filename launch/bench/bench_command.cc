#include "launch/bench/bench_command.h"

#include <vector>

namespace lockstep {

namespace {

constexpr BenchKind kKinds[] = {
    {"latency", true, [](BenchOptions* options) { return LatencyBenchSpec(&options->latency); },
     [](const BenchOptions& options) { return CheckLatencyBench(options.latency); },
     [](const BenchOptions& options) { return RunLatencyBench(options.latency); }},
    {"throughput", true,
     [](BenchOptions* options) { return ThroughputBenchSpec(&options->throughput); },
     [](const BenchOptions& options) { return CheckThroughputBench(options.throughput); },
     [](const BenchOptions& options) { return RunThroughputBench(options.throughput); }},
    {"serve", false, [](BenchOptions* options) { return ServeBenchSpec(&options->serve); },
     [](const BenchOptions& options) { return CheckServeBench(options.serve); },
     [](const BenchOptions& options) { return RunServeBench(options.serve); }},
    {"collectives", true,
     [](BenchOptions* options) { return CollectivesBenchSpec(&options->collectives); },
     [](const BenchOptions&) { return absl::OkStatus(); },
     [](const BenchOptions& options) { return RunCollectivesBench(options.collectives); }},
};

std::string KindsHelp() {
  std::string text = "Usage: [mpirun -np N] lockstep bench KIND ...\n\nKinds:\n";
  for (const BenchKind& kind : kKinds) {
    BenchOptions options;
    absl::StrAppend(&text, absl::StrFormat("  %-12s %s\n", kind.name, kind.spec(&options).summary));
  }
  absl::StrAppend(&text, "\n'lockstep bench KIND --help' explains a kind and its options.\n");
  return text;
}

absl::StatusOr<const BenchKind*> FindKind(std::span<const std::string> args) {
  std::vector<std::string> names;
  std::string known;
  for (const BenchKind& kind : kKinds) {
    if (!args.empty() && args[0] == kind.name) return &kind;
    names.push_back(kind.name);
    absl::StrAppend(&known, known.empty() ? "" : ", ", kind.name);
  }
  if (args.empty()) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "no kind of benchmark given; known: %s\nTry 'lockstep help bench'.", known));
  }
  const std::string nearest = NearestName(args[0], names);
  return absl::InvalidArgumentError(
      absl::StrFormat("there is no benchmark '%s'%s; known: %s\nTry 'lockstep help bench'.",
                      args[0], nearest.empty() ? "" : ", did you mean " + nearest + "?", known));
}

// "--goodput A B C", as vLLM's command takes it, is one option with the value "A B C" here.
std::vector<std::string> JoinGoodput(std::span<const std::string> args) {
  std::vector<std::string> joined;
  for (size_t i = 0; i < args.size(); ++i) {
    joined.push_back(args[i]);
    if (args[i] != "--goodput" || i + 1 == args.size()) continue;
    std::string value = args[++i];
    while (i + 1 < args.size() && !args[i + 1].starts_with("-")) {
      absl::StrAppend(&value, " ", args[++i]);
    }
    joined.push_back(value);
  }
  return joined;
}

void StripTrailingSlashes(std::string* path) {
  while (path->size() > 1 && path->back() == '/') path->pop_back();
}

absl::Status ParseKind(const BenchKind& kind, std::span<const std::string> args,
                       BenchOptions* options, std::string* help) {
  const CommandSpec spec = kind.spec(options);
  bool wants_help = false;
  LOCKSTEP_RETURN_IF_ERROR(ParseOptions(spec, JoinGoodput(args), &wants_help));
  if (wants_help) {
    *help = FormatHelp(spec);
    return absl::OkStatus();
  }
  if (spec.operand == "MODEL") StripTrailingSlashes(spec.operand_value);
  return kind.check(*options);
}

}  // namespace

absl::StatusOr<BenchOptions> ParseBench(std::span<const std::string> args, std::string* help) {
  help->clear();
  if (!args.empty() && (args[0] == "--help" || args[0] == "-h")) {
    *help = KindsHelp();
    return BenchOptions();
  }
  LOCKSTEP_ASSIGN_OR_RETURN(const BenchKind* const kind, FindKind(args));
  BenchOptions options;
  options.kind = kind;
  const std::string command = absl::StrCat("bench ", kind->name);
  for (EngineFlags* flags :
       {&options.latency.engine, &options.throughput.engine, &options.collectives.engine}) {
    flags->command = command;
  }
  const absl::Status status = ParseKind(*kind, args.subspan(1), &options, help);
  if (status.ok()) return options;
  return absl::Status(status.code(), absl::StrFormat("%s\nTry 'lockstep %s --help'.",
                                                     std::string(status.message()), command));
}

}  // namespace lockstep

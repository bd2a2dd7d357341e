#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <string>
#include <variant>
#include <vector>

#include "launch/command_line.h"
#include "launch/engine_session.h"
#include "launch/result_writer.h"

namespace lockstep {

namespace {

// Without this, the first file a program opens after `>&-` becomes its stdout and results are
// written into it. A closed stream is opened so that using it fails.
void OccupyStandardStreams() {
  for (int fd = 0; fd <= 2; ++fd) {
    if (::fcntl(fd, F_GETFD) == -1 && errno == EBADF) {
      // The lowest free number is `fd`, as all below it are taken.
      if (::open("/dev/null", fd == 0 ? O_WRONLY : O_RDONLY) != fd) ::_exit(2);
    }
  }
}

struct RunCommand {
  int operator()(const HelpOptions& options) const { return PrintResult(options.text); }
  int operator()(const GenerateOptions& options) const { return RunGenerate(options); }
  int operator()(const ScoreOptions& options) const { return RunScore(options); }
  int operator()(const ServeOptions& options) const { return RunServe(options); }
  int operator()(const SuperviseOptions& options) const { return RunSupervise(options); }
  int operator()(const BatchOptions& options) const { return RunBatch(options); }
  int operator()(const BenchOptions& options) const { return options.kind->run(options); }
  int operator()(const ReportOptions& options) const { return RunReport(options); }
  int operator()(const TokenizeOptions& options) const { return RunTokenize(options); }
  int operator()(const PlanOptions& options) const { return RunPlan(options); }
  int operator()(const VersionOptions& options) const { return RunVersion(options); }
};

bool TakesRanks(const Command& command) {
  if (const auto* bench = std::get_if<BenchOptions>(&command)) return bench->kind->takes_ranks;
  return std::holds_alternative<GenerateOptions>(command) ||
         std::holds_alternative<ScoreOptions>(command) ||
         std::holds_alternative<ServeOptions>(command) ||
         std::holds_alternative<BatchOptions>(command);
}

int Main(int argc, char** argv) {
  OccupyStandardStreams();
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);  // a file over its limit is a failed write, told by name
  const std::vector<std::string> args(argv + std::min(argc, 1), argv + argc);
  const absl::StatusOr<Command> command = ParseCommandLine(args);
  if (command.ok()) {
    // Commands that need one process print once under mpirun, too.
    return TakesRanks(*command) || LaunchedRank() == 0 ? std::visit(RunCommand(), *command) : 0;
  }
  if (LaunchedRank() == 0) Log(LogLevel::kError, std::string(command.status().message()));
  return LeaveRefused(command.status());
}

}  // namespace

}  // namespace lockstep

int main(int argc, char** argv) { return lockstep::Main(argc, argv); }

// The command line of `lockstep`: which command, with which options.
#pragma once

#include <span>
#include <string>
#include <variant>
#include <vector>

#include "launch/batch_command.h"
#include "launch/bench/bench_command.h"
#include "launch/generate_command.h"
#include "launch/plan_command.h"
#include "launch/report/report_command.h"
#include "launch/score_command.h"
#include "launch/serve_command.h"
#include "launch/supervise_command.h"
#include "launch/tokenize_command.h"
#include "launch/version_command.h"

namespace lockstep {

// Print `text` on stdout: `lockstep help`, `lockstep CMD --help`.
struct HelpOptions {
  std::string text;
};

using Command = std::variant<HelpOptions, GenerateOptions, ScoreOptions, ServeOptions,
                             SuperviseOptions, BatchOptions, BenchOptions, ReportOptions,
                             TokenizeOptions, PlanOptions, VersionOptions>;

// `args` without the program's name. InvalidArgument when they are no valid command line; the
// message ends with the help command to try. Pure: reads no file and no environment.
absl::StatusOr<Command> ParseCommandLine(std::span<const std::string> args);

}  // namespace lockstep

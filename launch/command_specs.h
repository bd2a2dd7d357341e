// The options of each command. A spec stores into the options it is given, which must outlive it;
// Check... tells what no single option can: options that need, or exclude, each other.
#pragma once

#include <vector>

#include "launch/batch_command.h"
#include "launch/generate_command.h"
#include "launch/option_parser.h"
#include "launch/plan_command.h"
#include "launch/report/report_command.h"
#include "launch/score_command.h"
#include "launch/serve_command.h"
#include "launch/supervise_command.h"
#include "launch/tokenize_command.h"
#include "launch/version_command.h"

namespace lockstep {

inline constexpr char kExitStatuses[] =
    "Exit status: 0 done; 2 refused before any work (command line, configuration,\n"
    "checkpoint, launch); 1 started and then failed.\n";

CommandSpec GenerateSpec(GenerateOptions* options);
absl::Status CheckGenerateOptions(const GenerateOptions& options);

CommandSpec ScoreSpec(ScoreOptions* options);
absl::Status CheckScoreOptions(const ScoreOptions& options);

CommandSpec ServeSpec(ServeOptions* options);
CommandSpec SuperviseSpec(SuperviseOptions* options);

CommandSpec BatchSpec(BatchOptions* options);
absl::Status CheckBatchOptions(const BatchOptions& options);

CommandSpec TokenizeSpec(TokenizeOptions* options);
absl::Status CheckTokenizeOptions(const TokenizeOptions& options);

CommandSpec PlanSpec(PlanOptions* options);
CommandSpec ReportSpec(ReportOptions* options);
CommandSpec VersionSpec(VersionOptions* options);

// Groups of the commands that run an engine (engine_flags.cc).
OptionGroup ModelGroup(EngineFlags* flags);
std::vector<OptionGroup> EngineGroups(EngineFlags* flags);
// Of a command that runs ranks without an engine, and a group of its own whose options every rank
// must be given alike.
OptionGroup JobGroup(EngineFlags* flags);
OptionGroup KeptGroup(OptionGroup group, EngineFlags* flags);
// Of those that measure one.
OptionGroup EmulationGroup(EngineFlags* flags);
// Of what was given together; what it says of the job, the engine checks.
absl::Status CheckEmulation(const EngineFlags& flags);

}  // namespace lockstep

// Options that the commands which run an engine share: what model, and how the engine runs it.
#pragma once

#include <map>
#include <optional>
#include <string>

#include "model/checkpoint/checkpoint.h"
#include "runtime/core/log.h"
#include "runtime/engine.h"

namespace lockstep {

struct EngineFlags {
  std::string command;  // "generate"
  // The options given, of those below, which every rank must be given alike: name to value.
  std::map<std::string, std::string> given;
  std::string model;
  LoadFormat load_format = LoadFormat::kAuto;
  double null_step_ms = 0;            // with LoadFormat::kNull
  bool use_generation_config = true;  // false: generation_config.json is not looked at
  std::optional<DType> dtype;         // none: auto
  std::optional<int> tp;              // must be the number of ranks when given
  LogLevel log_level = LogLevel::kInfo;
  // After so long without an answer or progress of a rank the job ends; 0: it waits for ever.
  double watchdog_seconds = 60;
  // As given on the command line. dtype is filled in once the model is open; num_threads 0 means
  // the host's cores shared out among its ranks.
  EngineOptions engine = [] {
    EngineOptions options;
    options.num_threads = 0;
    options.device = DeviceKind::kAuto;
    return options;
  }();
};

}  // namespace lockstep

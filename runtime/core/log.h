// Messages to stderr. stdout carries results only.
#pragma once

#include <string>

namespace lockstep {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

// Messages below `level` are dropped. Call once at start, before other threads run. Default:
// kWarning.
void SetLogLevel(LogLevel level);
// Every rank but the printing one keeps quiet; errors of start-up reach rank 0 through Agree
// (parallel/communicator.h).
void SilenceLog();

// Whether a message of this level would be written.
bool LogIsOn(LogLevel level);

// Thread-safe; one line a call: control characters are written as \xNN, further lines indented,
// and what goes beyond 8 KB is cut.
void Log(LogLevel level, const std::string& message);
inline void LogInfo(const std::string& message) { Log(LogLevel::kInfo, message); }
inline void LogWarning(const std::string& message) { Log(LogLevel::kWarning, message); }

}  // namespace lockstep

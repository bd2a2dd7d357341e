#include "runtime/core/log.h"

// The only translation unit that sees spdlog: its headers are slow to compile.
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

namespace lockstep {

namespace {

spdlog::logger& Logger() {
  static auto* logger = [] {
    auto* made = new spdlog::logger("lockstep", std::make_shared<spdlog::sinks::stderr_sink_mt>());
    made->set_pattern("lockstep %l: %v");
    made->set_level(spdlog::level::warn);
    made->flush_on(spdlog::level::trace);
    return made;
  }();
  return *logger;
}

spdlog::level::level_enum ToSpdlog(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarning:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
  }
  return spdlog::level::err;
}

constexpr size_t kMaxMessageBytes = 8192;

// No message may look like two, or move the cursor of a terminal.
std::string Printable(const std::string& message) {
  std::string out;
  for (const char c : message) {
    if (out.size() >= kMaxMessageBytes) return out + " [cut]";
    const auto byte = static_cast<unsigned char>(c);
    if (c == '\n') {
      out += "\n  ";  // indented: a second line of this message, not another message
    } else if ((byte < 0x20 && c != '\t') || byte == 0x7f) {
      out += fmt::format("\\x{:02x}", byte);
    } else {
      out += c;
    }
  }
  return out;
}

}  // namespace

void SetLogLevel(LogLevel level) { Logger().set_level(ToSpdlog(level)); }
void SilenceLog() { Logger().set_level(spdlog::level::off); }
bool LogIsOn(LogLevel level) { return Logger().should_log(ToSpdlog(level)); }
void Log(LogLevel level, const std::string& message) {
  Logger().log(ToSpdlog(level), "{}", Printable(message));
}

}  // namespace lockstep

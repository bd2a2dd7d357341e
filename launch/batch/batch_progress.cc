#include "launch/batch/batch_progress.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "runtime/core/log.h"

namespace lockstep {

namespace {

constexpr double kPlainSeconds = 10;
constexpr int kBarWidth = 24;

std::string Duration(double seconds) {
  const auto s = static_cast<int64_t>(std::ceil(seconds));
  if (s < 60) return absl::StrFormat("%ds", s);
  if (s < 3600) return absl::StrFormat("%dm%02ds", s / 60, s % 60);
  return absl::StrFormat("%dh%02dm", s / 3600, s / 60 % 60);
}

double Share(const BatchCounts& counts) {
  const int64_t lines = counts.num_lines.value_or(0);
  return lines == 0 ? 0
                    : std::min(1.0, static_cast<double>(counts.num_records()) /
                                        static_cast<double>(lines));
}

std::string Bar(const BatchCounts& counts) {
  if (!counts.num_lines.has_value()) return "";
  const auto full = static_cast<size_t>(Share(counts) * kBarWidth);
  return "[" + std::string(full, '#') + std::string(kBarWidth - full, '.') + "] ";
}

double PerSecond(int64_t count, double seconds) {
  return seconds > 0 ? static_cast<double>(count) / seconds : 0;
}

}  // namespace

ProgressKind ResolveProgress(ProgressKind kind) {
  if (kind != ProgressKind::kAuto) return kind;
  const char* const launcher = std::getenv("LOCKSTEP_STDERR_IS_TERMINAL");
  const bool terminal =
      isatty(STDERR_FILENO) != 0 || (launcher != nullptr && std::string_view(launcher) == "1");
  return terminal ? ProgressKind::kBar : ProgressKind::kPlain;
}

std::string BatchProgressText(const BatchCounts& counts) {
  const double rate = PerSecond(counts.num_records() - counts.before, counts.seconds);
  std::string text = absl::StrCat(counts.num_records());
  if (counts.num_lines.has_value()) {
    absl::StrAppend(&text, " of ", *counts.num_lines,
                    absl::StrFormat(" lines (%.0f%%)", 100 * Share(counts)));
  } else {
    text += " lines";
  }
  if (counts.num_failed > 0) absl::StrAppend(&text, ", ", counts.num_failed, " failed");
  absl::StrAppendFormat(&text, ", %.1f lines/s, %.0f tokens/s", rate,
                        PerSecond(counts.generated_tokens, counts.seconds));
  if (counts.num_lines.has_value() && rate > 0) {
    const auto left = static_cast<double>(*counts.num_lines - counts.num_records());
    absl::StrAppend(&text, ", ", Duration(std::max(0.0, left) / rate), " left");
  }
  return text;
}

std::string BatchSummaryText(const BatchCounts& counts) {
  return absl::StrFormat(
      "ok %d, failed %d; this run: %d lines in %.1f s, %d prompt tokens, %d generated, %.1f "
      "tokens/s",
      counts.num_ok, counts.num_failed, counts.num_records() - counts.before, counts.seconds,
      counts.prompt_tokens, counts.generated_tokens,
      PerSecond(counts.generated_tokens, counts.seconds));
}

BatchProgress::~BatchProgress() {
  if (shown_) std::fputs("\r\033[K", stderr);
}

void BatchProgress::Show(const BatchCounts& counts) {
  if (kind_ == ProgressKind::kNone || !LogIsOn(LogLevel::kInfo)) return;
  if (kind_ == ProgressKind::kBar) {
    shown_ = true;
    std::fprintf(stderr, "\r%s%s\033[K", Bar(counts).c_str(), BatchProgressText(counts).c_str());
    std::fflush(stderr);
    return;
  }
  if (counts.seconds < next_seconds_) return;
  next_seconds_ = counts.seconds + std::min(counts.seconds, kPlainSeconds);
  LogInfo("progress: " + BatchProgressText(counts));
}

}  // namespace lockstep

#include "runtime/core/phase_times.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace lockstep {

void PhaseTimes::End(std::string phase) {
  const Clock::time_point now = Clock::now();
  phases_.emplace_back(std::move(phase), std::chrono::duration<double>(now - last_).count());
  last_ = now;
}

double PhaseTimes::total_seconds() const {
  return std::chrono::duration<double>(last_ - start_).count();
}

std::string PhaseTimes::ToString() const {
  constexpr double kShortest = 0.005;
  std::string text;
  for (const auto& [phase, seconds] : phases_) {
    if (seconds < kShortest) continue;
    absl::StrAppend(&text, text.empty() ? "" : ", ", absl::StrFormat("%s %.2f s", phase, seconds));
  }
  return text.empty() ? "nothing took long" : text;
}

}  // namespace lockstep

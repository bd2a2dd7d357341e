#include "runtime/text_output.h"

#include <algorithm>
#include <utility>

namespace lockstep {

absl::StatusOr<StopMatcher> StopMatcher::Create(std::vector<std::string> stops) {
  if (std::any_of(stops.begin(), stops.end(), [](const auto& stop) { return stop.empty(); })) {
    return absl::InvalidArgumentError("a stop string is empty: it would stop every text at once");
  }
  return StopMatcher(std::move(stops));
}

std::string StopMatcher::Push(std::string_view piece) {
  if (stopped_) return "";
  held_ += piece;
  return Release(/*ended=*/false);
}

std::string StopMatcher::Finish() {
  if (stopped_) return "";
  return Release(/*ended=*/true);
}

std::string StopMatcher::Release(bool ended) {
  const std::string_view text = held_;
  size_t end = 0;
  bool held = false;
  for (; end < text.size(); ++end) {
    const std::string_view rest = text.substr(end);
    for (const std::string& stop : stops_) {
      if (rest.size() >= stop.size()) {
        stopped_ = stopped_ || rest.substr(0, stop.size()) == stop;
      } else {
        held = held || (!ended && std::string_view(stop).substr(0, rest.size()) == rest);
      }
    }
    if (stopped_ || held) break;
  }
  std::string released(text.substr(0, end));
  held_ = stopped_ ? "" : held_.substr(end);
  return released;
}

}  // namespace lockstep

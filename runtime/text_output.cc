#include "runtime/text_output.h"

#include <algorithm>
#include <utility>

#include "model/tokenizer/utf8.h"

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

std::string TextOutput::Push(int32_t id) {
  std::string text = decoder_.Push(id);
  if (exempt_tokens_ == 0) return Match(text);
  if (--exempt_tokens_ == 0) {
    exempt_text_ = StreamDecoder(decoder_).Finish();
    exempt_text_.resize(std::min(exempt_text_.find(kReplacementCharacter), exempt_text_.size()));
  }
  return text;
}

std::string TextOutput::Finish() {
  const std::string text = decoder_.Finish();
  if (exempt_tokens_ > 0) return text;
  const std::string before = Match(text);
  return before + matcher_.Finish();
}

std::string TextOutput::Match(const std::string& text) {
  if (exempt_text_.empty() || text.empty()) return matcher_.Push(text);
  // The decoder judges a run of byte tokens as a whole: later ones may have turned what was held
  // into something else, which is then text like any other.
  std::string exempt = std::exchange(exempt_text_, {});
  if (!text.starts_with(exempt)) return matcher_.Push(text);
  return exempt + matcher_.Push(std::string_view(text).substr(exempt.size()));
}

}  // namespace lockstep

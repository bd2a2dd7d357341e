// Text of one request as it may be shown: detokenised, and cut at the first stop string.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "model/tokenizer/stream_decoder.h"
#include "runtime/core/status.h"

namespace lockstep {

// Finds stop strings in a text that comes in pieces, and lets pass only what no stop string can
// still claim. The match that starts first in the text wins; what passes does not depend on how the
// text was cut into pieces. Holds at most the longest stop string less one byte, and only while the
// held text is the beginning of a stop string. Rank 0 only; not thread-safe.
class StopMatcher {
 public:
  // InvalidArgument for an empty stop string, which every text contains.
  static absl::StatusOr<StopMatcher> Create(std::vector<std::string> stops);

  // The text that is final now. Once stopped() the rest is dropped.
  std::string Push(std::string_view piece);
  // The text has ended: what is held, up to a stop string in it. The matcher is stopped() then if
  // there was one.
  std::string Finish();
  bool stopped() const { return stopped_; }
  int64_t held_bytes() const { return static_cast<int64_t>(held_.size()); }

 private:
  explicit StopMatcher(std::vector<std::string> stops) : stops_(std::move(stops)) {}

  // Releases from held_ what comes before the first place where a stop string stands, or, unless
  // the text `ended`, may stand.
  std::string Release(bool ended);

  std::vector<std::string> stops_;
  std::string held_;
  bool stopped_ = false;
};

// Token ids of one choice in, final text out: what is shown is the same streamed or not.
class TextOutput {
 public:
  // The decoder's tokenizer must outlive this. A stop string counts where it begins after the text
  // of the first `min_tokens` tokens; a character that they leave unfinished is not theirs.
  TextOutput(StreamDecoder decoder, StopMatcher matcher, int64_t min_tokens = 0)
      : decoder_(std::move(decoder)), matcher_(std::move(matcher)), exempt_tokens_(min_tokens) {}

  // Returns the text that `id` made final. When stopped() afterwards, a stop string was found: the
  // request should end (Request::on_event returns false).
  std::string Push(int32_t id);
  // The last text, at any end of the request but a stop string.
  std::string Finish();
  bool stopped() const { return matcher_.stopped(); }

 private:
  std::string Match(const std::string& text);

  StreamDecoder decoder_;
  StopMatcher matcher_;
  int64_t exempt_tokens_;    // so many more are not searched
  std::string exempt_text_;  // theirs, which the decoder had not let go with the last of them
};

}  // namespace lockstep

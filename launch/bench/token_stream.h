// A streamed answer of OpenAI's API, as it arrives: when its tokens came, and how it ended.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

enum class BenchEndpoint { kCompletions, kChat };

// Reads server-sent events. An event of the first choice brings tokens, of which it counts as one
// arrival, unless it only opens a chat (the role, no text) or only ends an answer that had text
// before (a finish_reason, no text).
class TokenStream {
 public:
  explicit TokenStream(BenchEndpoint endpoint, bool keeps_text = false)
      : endpoint_(endpoint), keeps_text_(keeps_text) {}

  // Bytes of the body that arrived at `now`, in seconds.
  void Feed(std::string_view bytes, double now);
  // The body has ended: a last line without its end counts.
  void FeedEnd(double now);

  // Arrivals of tokens, ascending.
  const std::vector<double>& arrivals() const { return arrivals_; }
  // Of the last event of the choice.
  double last_event() const { return last_event_; }
  bool done() const { return done_; }                   // [DONE] came
  bool finished() const { return done_ || finished_; }  // that, or a finish_reason
  // What the server says it has read and made; with stream_options.include_usage at the end.
  std::optional<int64_t> prompt_tokens() const { return prompt_tokens_; }
  std::optional<int64_t> completion_tokens() const { return completion_tokens_; }
  // An event that is an error or no JSON; empty: none.
  const std::string& error() const { return error_; }
  const std::string& text() const { return text_; }

 private:
  void OnLine(std::string_view line, double now);
  void OnEvent(const std::string& data, double now);

  const BenchEndpoint endpoint_;
  const bool keeps_text_;
  std::string line_;  // has not ended
  std::string data_;  // of the event that has not ended
  bool has_data_ = false;
  std::vector<double> arrivals_;
  double last_event_ = 0;
  bool had_text_ = false;
  bool done_ = false;
  bool finished_ = false;
  std::optional<int64_t> prompt_tokens_;
  std::optional<int64_t> completion_tokens_;
  std::string error_;
  std::string text_;
};

}  // namespace lockstep

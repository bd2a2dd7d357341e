// The decoder section of a tokenizer.json: the steps that turn a sequence of token spellings into
// text.
//
// Every step works on a stream of fragments, so that one implementation serves both a whole decode
// and streaming, and a step keeps only what it cannot decide yet (an unfinished character, a run of
// byte tokens, a possible trailing space).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/core/json.h"
#include "runtime/core/status.h"

namespace lockstep {

// What one running decode holds; made by TokenDecoder::NewState. Copyable.
struct TokenDecoderState {
  struct Step {
    std::string held;  // bytes not yet passed on
    int64_t count =
        0;  // Strip: characters cut at the token's start; Metaspace, JoinWithSpace: tokens seen
    bool in_token = false;     // Strip: past the start of the token
    int64_t held_content = 0;  // Strip: trailing strip characters held back
  };
  std::vector<Step> steps;
};

// Immutable; thread-safe.
class TokenDecoder {
 public:
  // `decoder_json` may be null: then the tokens are joined with spaces, as the reference does.
  static absl::StatusOr<TokenDecoder> Create(const Json& decoder_json, const std::string& where);

  TokenDecoderState NewState() const;
  // Feeds one whole token; appends to `out` the text that is final.
  void Push(std::string_view token, TokenDecoderState* state, std::string* out) const;
  // Ends the sequence: appends what was held and resets the state.
  void Finish(TokenDecoderState* state, std::string* out) const;

  // The bytes that `token` stands for inside a text, not at its start: they need not be whole
  // characters.
  std::string TokenBytes(std::string_view token) const;

 private:
  enum class Kind {
    kByteLevel,
    kByteFallback,
    kFuse,
    kStrip,
    kReplace,
    kMetaspace,
    kJoinWithSpace
  };
  struct Step {
    Kind kind;
    std::string
        pattern{};  // Replace: text to find; Strip: the character; Metaspace: the replacement
    std::string content{};        // Replace: text to put
    int64_t start = 0, stop = 0;  // Strip: at most so many characters at each end
    bool drop_first = false;      // Metaspace: the first token's replacements vanish
  };

  absl::Status Append(const Json& json, const std::string& where);
  absl::Status AppendReplace(const Json& json, const std::string& where);
  void Feed(size_t index, std::string_view text, bool token_end, TokenDecoderState* state,
            std::string* out) const;
  void FeedBytes(size_t index, bool final, TokenDecoderState* state, std::string* out) const;
  void FeedReplace(size_t index, std::string_view text, bool token_end, TokenDecoderState* state,
                   std::string* out) const;
  void FeedStrip(size_t index, std::string_view text, bool token_end, TokenDecoderState* state,
                 std::string* out) const;
  void FeedMetaspace(size_t index, std::string_view text, bool token_end, TokenDecoderState* state,
                     std::string* out) const;
  void FlushByteRun(size_t index, TokenDecoderState* state, std::string* out) const;
  void FinishStep(size_t index, TokenDecoderState* state, std::string* out) const;

  std::vector<Step> steps_;
};

}  // namespace lockstep

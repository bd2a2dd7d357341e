// The pre_tokenizer section of a tokenizer.json: cuts text into the pieces that BPE merges never
// cross.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "model/tokenizer/regex.h"
#include "runtime/core/json.h"
#include "runtime/core/status.h"

namespace lockstep {

// Sequence, Split, ByteLevel, Digits, Punctuation, Whitespace, WhitespaceSplit, Metaspace.
// Immutable; thread-safe.
class PreTokenizer {
 public:
  // `json` may be null: then the text is one piece.
  static absl::StatusOr<PreTokenizer> Create(const Json& json, const std::string& where);

  // True when the last step is ByteLevel. Its mapping to characters is left out then: pieces are
  // the raw bytes, and the model looks each byte up directly.
  bool pieces_are_bytes() const { return pieces_are_bytes_; }

  // Cuts `text` (valid UTF-8) and calls sink(piece) for each piece, from left to right; none is
  // empty. `at_start`: the text begins the input. A piece lives until the sink returns.
  absl::Status Split(std::string_view text, bool at_start,
                     const std::function<void(std::string_view)>& sink) const;

 private:
  enum class Kind { kSplit, kAddPrefixSpace, kMapBytes, kMetaspace };
  enum class Behavior { kRemoved, kIsolated, kMergedWithPrevious, kMergedWithNext, kContiguous };
  enum class PrependScheme { kAlways, kFirst, kNever };
  struct Step {
    Kind kind;
    std::shared_ptr<const Regex> regex{};  // kSplit
    Behavior behavior = Behavior::kIsolated;
    bool invert = false;
    std::string replacement{};  // kMetaspace
    PrependScheme prepend_scheme = PrependScheme::kAlways;
  };

  absl::Status Append(const Json& json, const std::string& where);
  absl::Status AppendSplit(std::string_view pattern, Behavior behavior, bool invert,
                           const std::string& where);
  absl::Status AppendByteLevel(const Json& json, const std::string& where);
  absl::Status AppendMetaspace(const Json& json, const std::string& where);
  static absl::StatusOr<Behavior> ParseBehavior(const Json& json,
                                                std::optional<std::string> fallback,
                                                const std::string& where);

  using Sink = std::function<void(std::string_view)>;
  struct Piece {
    std::string_view text;
    bool at_start = false;  // begins where the input begins
  };
  absl::Status RunFrom(size_t index, const Piece& piece, const Sink& sink) const;
  absl::Status RunSplit(size_t index, const Piece& piece, const Sink& sink) const;
  static std::string Rewrite(const Step& step, const Piece& piece);

  std::vector<Step> steps_;
  bool pieces_are_bytes_ = false;
};

}  // namespace lockstep

// Text to token ids and back, as the `tokenizers` library of Hugging Face defines it for a
// tokenizer.json.
//
// Supported: the BPE model (byte-level or with byte fallback) and the normalizers, pre-tokenizers,
// post-processors and decoders that published decoder-only models use. Anything else is refused by
// name when the tokenizer is made: there is no fallback. `truncation` and `padding` sections are
// ignored: a prompt is never cut silently.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/core/json.h"
#include "runtime/core/status.h"

namespace lockstep {

class TokenDecoder;
struct TokenizerParts;  // tokenizer_parts.h: what a tokenizer is made of

// Immutable once made; every const method may be called from several threads at once.
class Tokenizer {
 public:
  // Reads a tokenizer.json. NotFound / FailedPrecondition for the file, InvalidArgument for its
  // content (naming the component, and for a merge its entry number).
  static absl::StatusOr<std::unique_ptr<Tokenizer>> Load(const std::string& path);

  // The same from a parsed document; `where` (a path) goes into messages.
  static absl::StatusOr<std::unique_ptr<Tokenizer>> FromJson(const Json& tokenizer_json,
                                                             const std::string& where);

  // From parts made elsewhere (gguf_vocab.h).
  static absl::StatusOr<std::unique_ptr<Tokenizer>> FromParts(TokenizerParts parts,
                                                              const std::string& where);

  ~Tokenizer();
  Tokenizer(const Tokenizer&) = delete;
  Tokenizer& operator=(const Tokenizer&) = delete;

  // The ids of `utf8`. Added tokens (special ones too) that occur in the text become their ids.
  // `add_special_tokens` also applies the post-processor's template (a leading <s>, say).
  // A character that has no token and no unk_token or byte token to stand for it is left out, as in
  // the reference. InvalidArgument with the byte offset for invalid UTF-8. OutOfRange for more than
  // `max_tokens` ids: then the rest of the text costs next to nothing, nor does a text that must be
  // too long by its bytes, however it is spelled.
  absl::StatusOr<std::vector<int32_t>> Encode(std::string_view utf8, bool add_special_tokens,
                                              int64_t max_tokens = kNoLimit) const;
  static constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

  // The text of `ids`, always valid UTF-8 (bytes that form no character become U+FFFD).
  // `skip_special_tokens` leaves out special tokens. InvalidArgument naming the id when no token
  // has it.
  absl::StatusOr<std::string> Decode(std::span<const int32_t> ids, bool skip_special_tokens) const;

  // One more than the largest id that a token has. Ids below it may be unused.
  int32_t vocab_size() const;

  // A token's own spelling, as the vocabulary or the added tokens have it ("Ġworld", "<|im_end|>").
  std::optional<int32_t> TokenToId(std::string_view token) const;
  // Empty for an id that no token has. The view lives as long as the tokenizer.
  std::string_view IdToToken(int32_t id) const;
  bool HasToken(int32_t id) const;
  // The bytes that the token stands for inside a text, where they need not be whole characters
  // (" world", "\xF0\x9F"). Empty for an id that no token has.
  std::string TokenBytes(int32_t id) const;
  // True for added tokens marked special; false for any other number.
  bool IsSpecial(int32_t id) const;

 private:
  friend class StreamDecoder;
  const TokenDecoder& decoder() const;

  struct State;
  explicit Tokenizer(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace lockstep

// A tokenizer from the vocabulary that a GGUF file carries in its metadata (tokenizer.ggml.*).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "model/tokenizer/tokenizer.h"
#include "runtime/core/status.h"

namespace lockstep {

// The keys of the same names under tokenizer.ggml. in a GGUF file.
struct GgufVocab {
  std::string
      model;        // tokenizer.ggml.model: "gpt2" (byte-level BPE) or "llama" (SentencePiece BPE)
  std::string pre;  // tokenizer.ggml.pre: name of gpt2's pre-tokenizer; empty = "default"
  std::vector<std::string> tokens;   // by id
  std::vector<float> scores;         // "llama": a score a token; else may be empty
  std::vector<int32_t> token_types;  // 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6
                                     // byte; may be empty
  std::vector<std::string> merges;   // "gpt2": "left right", best first
  std::optional<int32_t> bos_token_id;
  std::optional<int32_t> eos_token_id;
  std::optional<int32_t> unk_token_id;
  std::optional<int32_t> pad_token_id;
  std::optional<bool> add_bos_token;     // absent: true for "llama" and for the pre-tokenizers of
                                         // Llama-3 and Tekken, else false
  std::optional<bool> add_eos_token;     // absent: false
  std::optional<bool> add_space_prefix;  // "llama" only; absent: true
};

// InvalidArgument, naming `where` (the file) and the key, for an unknown model or pre-tokenizer
// name, lists of unequal length, ids out of range, and merges that name no token.
absl::StatusOr<std::unique_ptr<Tokenizer>> TokenizerFromGguf(const GgufVocab& vocab,
                                                             const std::string& where);

}  // namespace lockstep

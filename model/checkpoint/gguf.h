// Models in GGUF files, architectures llama and qwen2: config, weights, vocabulary, chat template.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "model/checkpoint/checkpoint.h"
#include "model/tokenizer/gguf_vocab.h"
#include "runtime/core/json.h"

namespace lockstep {

struct GgufModel {
  ModelConfig config;
  Json metadata;  // without the tokenizer's keys
  // Under Hugging Face's names and row order: Q and K of architecture llama are un-permuted.
  std::unique_ptr<Checkpoint> checkpoint;
};

// InvalidArgument, naming file and key or tensor, for a damaged file and for what is not supported:
// other architectures, experts, rope scaling types. Types of tensors are not judged here: see
// TensorInfo::readable.
absl::StatusOr<GgufModel> OpenGguf(const std::string& path);

// What tokenising and chatting needs; weights are not touched.
struct GgufText {
  GgufVocab vocab;
  std::optional<std::string> chat_template;  // Jinja
  std::string bos_token;                     // text of bos_token_id and eos_token_id, else empty
  std::string eos_token;
};
absl::StatusOr<GgufText> ReadGgufText(const std::string& path);

}  // namespace lockstep

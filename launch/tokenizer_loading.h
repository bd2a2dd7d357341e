// The text side of MODEL: its tokenizer and its chat template, from a Hugging Face folder or a GGUF
// file. Weights are not touched.
#pragma once

#include <memory>
#include <string>

#include "model/chat/chat_config.h"
#include "model/tokenizer/tokenizer.h"

namespace lockstep {

// A folder's tokenizer.json, or the vocabulary in a GGUF file's metadata. NotFound when MODEL is
// not there or has no tokenizer; else errors as Tokenizer::Load and TokenizerFromGguf.
absl::StatusOr<std::unique_ptr<Tokenizer>> LoadTokenizer(const std::string& model);

// A folder's chat_template.jinja or tokenizer_config.json, or a GGUF file's metadata. NotFound when
// there is no template. `template_file`, unless empty, is read in its place.
absl::StatusOr<std::unique_ptr<ChatFormat>> LoadChatFormat(const std::string& model,
                                                           const std::string& template_file = "");

}  // namespace lockstep

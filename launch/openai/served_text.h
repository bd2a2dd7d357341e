// The text side of a model that the API answers for.
#pragma once

#include <memory>
#include <string>

#include "launch/openai/api_server.h"

namespace lockstep {

struct ServedText {
  std::unique_ptr<Tokenizer> tokenizer;
  std::unique_ptr<ChatFormat> chat;
  ServedModel model;  // points to the two; config and generation are left alone
};

// `chat_template`: a file in place of the model's own template; empty: none. A model without
// tokenizer or template is no error, unless `chat_template` is given: what it cannot do is logged,
// and refused request by request.
absl::Status LoadServedText(const std::string& model, const std::string& chat_template,
                            ServedText* text);

}  // namespace lockstep

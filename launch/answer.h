// One answer of `lockstep generate` on its way from tokens to what is printed.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "model/tokenizer/tokenizer.h"
#include "runtime/request.h"
#include "runtime/text_output.h"

namespace lockstep {

const char* Name(FinishReason reason);

// Of a prompt's answers, what each JSON line repeats.
struct AnswerContext {
  size_t prompt_index = 0;
  int32_t num_choices = 1;
  std::span<const int32_t> prompt_ids = {};
  bool wants_logprobs = false;
  bool wants_prompt_logprobs = false;                      // on the line of choice 0
  std::span<const PositionLogprobs> prompt_logprobs = {};  // from the second token on
};

class Answer {
 public:
  // `text_output`: none when the model has no tokenizer. With `json` the answer is printed whole
  // when it has ended, else as it comes.
  Answer(int32_t choice, bool json, std::optional<TextOutput> text_output);

  // A token, if there is one. When stopped() afterwards, a stop string was found.
  void Add(const RequestEvent& event);
  bool stopped() const { return text_output_.has_value() && text_output_->stopped(); }
  // The last call.
  void End(FinishReason finish, const AnswerContext& context, const Tokenizer* tokenizer);
  bool ended() const { return finish_ != FinishReason::kNone; }

  // What can be printed now and was not taken yet.
  std::string TakeUnprinted() { return std::exchange(unprinted_, {}); }
  void PrintFirst(const std::string& text) { unprinted_ = text; }

 private:
  std::string JsonLine(const AnswerContext& context, const Tokenizer* tokenizer) const;

  int32_t choice_;
  bool json_;
  std::optional<TextOutput> text_output_;
  int64_t num_tokens_ = 0;
  std::string unprinted_;
  FinishReason finish_ = FinishReason::kNone;
  // With json.
  std::vector<int32_t> token_ids_;
  std::vector<PositionLogprobs> logprobs_;
  std::string text_;
};

}  // namespace lockstep

#include "launch/answer.h"

#include <charconv>
#include <cmath>

#include "runtime/core/json.h"

namespace lockstep {

namespace {

// Logprobs are written by hand: as a JSON tree those of a long prompt would take gigabytes.
class LogprobWriter {
 public:
  LogprobWriter(const Tokenizer* tokenizer, std::string* out) : tokenizer_(tokenizer), out_(out) {}

  void Write(const PositionLogprobs& position) {
    WriteToken(position.token);
    *out_ += ",\"top\":[";
    for (size_t i = 0; i < position.top.size(); ++i) {
      if (i > 0) *out_ += ',';
      WriteToken(position.top[i]);
      *out_ += '}';
    }
    *out_ += "]}";
  }

 private:
  // Leaves the object open.
  void WriteToken(const TokenLogprob& token) {
    absl::StrAppend(out_, "{\"token_id\":", token.id);
    if (tokenizer_ != nullptr) {
      // An id that no token has, of a padded vocabulary, has no text.
      const absl::StatusOr<std::string> text =
          tokenizer_->Decode({&token.id, 1}, /*skip_special_tokens=*/false);
      absl::StrAppend(out_, ",\"token\":", text.ok() ? DumpJson(OrderedJson(*text)) : "null");
    }
    *out_ += ",\"logprob\":";
    if (!std::isfinite(token.logprob)) {
      *out_ += "null";
      return;
    }
    char digits[32];
    const auto [end, error] = std::to_chars(digits, digits + sizeof(digits), token.logprob);
    LOCKSTEP_CHECK(error == std::errc());
    out_->append(digits, end);
  }

  const Tokenizer* tokenizer_;
  std::string* out_;
};

}  // namespace

const char* Name(FinishReason reason) {
  switch (reason) {
    case FinishReason::kStop:
      return "stop";
    case FinishReason::kLength:
      return "length";
    case FinishReason::kError:
      return "error";
    case FinishReason::kCancelled:
      return "cancelled";
    case FinishReason::kNone:
      break;
  }
  LOCKSTEP_CHECK(false);
}

Answer::Answer(int32_t choice, bool json, std::optional<TextOutput> text_output)
    : choice_(choice), json_(json), text_output_(std::move(text_output)) {}

void Answer::Add(const RequestEvent& event) {
  if (!event.token.has_value()) return;
  ++num_tokens_;
  if (json_) token_ids_.push_back(*event.token);
  if (event.logprobs.has_value()) logprobs_.push_back(*event.logprobs);
  if (text_output_.has_value()) {
    (json_ ? text_ : unprinted_) += text_output_->Push(*event.token);
  } else if (!json_) {
    absl::StrAppend(&unprinted_, num_tokens_ > 1 ? "," : "", *event.token);
  }
}

void Answer::End(FinishReason finish, const AnswerContext& context, const Tokenizer* tokenizer) {
  finish_ = finish;
  if (text_output_.has_value() && !text_output_->stopped()) {
    (json_ ? text_ : unprinted_) += text_output_->Finish();
    if (text_output_->stopped()) finish_ = FinishReason::kStop;
  }
  unprinted_ += json_ ? JsonLine(context, tokenizer) : "\n";
  // What waits for earlier answers to be printed is the text alone.
  token_ids_ = {};
  logprobs_ = {};
  text_ = {};
}

std::string Answer::JsonLine(const AnswerContext& context, const Tokenizer* tokenizer) const {
  OrderedJson line;
  line["prompt_index"] = context.prompt_index;
  if (context.num_choices > 1) line["choice_index"] = choice_;
  line["prompt_token_ids"] = context.prompt_ids;
  line["token_ids"] = token_ids_;
  line["text"] = text_output_.has_value() ? OrderedJson(text_) : OrderedJson();
  line["finish_reason"] = Name(finish_);
  std::string out = DumpJson(line);
  out.pop_back();  // the closing brace
  LogprobWriter writer(tokenizer, &out);
  if (context.wants_logprobs) {
    out += ",\"logprobs\":[";
    for (size_t i = 0; i < logprobs_.size(); ++i) {
      if (i > 0) out += ',';
      writer.Write(logprobs_[i]);
    }
    out += ']';
  }
  if (context.wants_prompt_logprobs && choice_ == 0) {
    out += ",\"prompt_logprobs\":[null";
    for (const PositionLogprobs& position : context.prompt_logprobs) {
      out += ',';
      writer.Write(position);
    }
    out += ']';
  }
  return out + "}\n";
}

}  // namespace lockstep

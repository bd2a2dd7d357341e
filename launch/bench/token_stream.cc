#include "launch/bench/token_stream.h"

#include "runtime/core/json.h"

namespace lockstep {

namespace {

constexpr size_t kQuotedBytes = 200;
// Of a line and of an event: what a server sends is not to fill this process's memory.
constexpr size_t kMaxEventBytes = size_t{4} << 20;
// A count beyond it is none.
constexpr int64_t kMaxCount = int64_t{1} << 31;

const Json* Find(const Json& object, const char* key) {
  if (!object.is_object()) return nullptr;
  const auto it = object.find(key);
  return it == object.end() || it->is_null() ? nullptr : &*it;
}

std::optional<int64_t> FindCount(const Json& object, const char* key) {
  const Json* const value = Find(object, key);
  if (value == nullptr || !value->is_number_integer()) return std::nullopt;
  const int64_t count = value->get<int64_t>();  // above 2^63 it comes out negative
  if (count < 1 || count > kMaxCount) return std::nullopt;
  return count;
}

std::string ErrorText(const Json& error) {
  const Json* const message = Find(error, "message");
  return message != nullptr && message->is_string() ? message->get<std::string>() : DumpJson(error);
}

// What an event adds to the answer.
struct Addition {
  std::string text;
  bool opens = false;     // the role of a chat
  bool has_more = false;  // tokens that are no text: a call of a tool
};

Addition ReadChoice(const Json& choice, BenchEndpoint endpoint) {
  Addition addition;
  const auto add = [&addition](const Json* text) {
    if (text != nullptr && text->is_string()) addition.text += text->get_ref<const std::string&>();
  };
  if (endpoint == BenchEndpoint::kCompletions) {
    add(Find(choice, "text"));
    return addition;
  }
  const Json* const delta = Find(choice, "delta");
  if (delta == nullptr) return addition;
  for (const char* key : {"reasoning_content", "reasoning", "content"}) add(Find(*delta, key));
  addition.opens = Find(*delta, "role") != nullptr;
  addition.has_more = Find(*delta, "tool_calls") != nullptr;
  return addition;
}

}  // namespace

void TokenStream::Feed(std::string_view bytes, double now) {
  while (!bytes.empty()) {
    const size_t end = bytes.find('\n');
    line_.append(bytes.substr(0, end));
    if (line_.size() + data_.size() > kMaxEventBytes) {
      if (error_.empty()) error_ = "an event of more than 4 MiB";
      line_.clear();
      data_.clear();
      return;
    }
    if (end == std::string_view::npos) return;
    bytes.remove_prefix(end + 1);
    if (line_.ends_with('\r')) line_.pop_back();
    OnLine(line_, now);
    line_.clear();
  }
}

void TokenStream::FeedEnd(double now) { Feed("\n\n", now); }

// Of the fields of an event only its data matters.
void TokenStream::OnLine(std::string_view line, double now) {
  constexpr std::string_view kData = "data:";
  if (line.empty()) {
    if (has_data_) OnEvent(data_, now);
    data_.clear();
    has_data_ = false;
    return;
  }
  if (!line.starts_with(kData)) return;
  line.remove_prefix(kData.size());
  if (line.starts_with(' ')) line.remove_prefix(1);
  if (has_data_) data_.push_back('\n');
  data_.append(line);
  has_data_ = true;
}

void TokenStream::OnEvent(const std::string& data, double now) {
  if (done_ || !error_.empty()) return;
  if (data == "[DONE]") {
    done_ = true;
    return;
  }
  const absl::StatusOr<Json> event = ParseJson(data, "an event of the stream");
  if (!event.ok()) {
    error_ = absl::StrFormat("an event is no JSON: %s", data.substr(0, kQuotedBytes));
    return;
  }
  if (const Json* const error = Find(*event, "error"); error != nullptr) {
    error_ = "an event says: " + ErrorText(*error);
    return;
  }
  if (const Json* const usage = Find(*event, "usage"); usage != nullptr) {
    // Some servers count in each event, and say nothing in the last one.
    if (const auto count = FindCount(*usage, "prompt_tokens")) prompt_tokens_ = count;
    if (const auto count = FindCount(*usage, "completion_tokens")) completion_tokens_ = count;
  }
  const Json* const choices = Find(*event, "choices");
  if (choices == nullptr || !choices->is_array() || choices->empty()) return;
  const Json& choice = choices->front();
  const Addition addition = ReadChoice(choice, endpoint_);
  const bool ends = Find(choice, "finish_reason") != nullptr;
  finished_ = finished_ || ends;
  last_event_ = now;
  const bool adds = !addition.text.empty() || addition.has_more;
  const bool only_opens = !adds && addition.opens && !ends;
  const bool only_ends = !adds && ends && had_text_;
  if (!only_opens && !only_ends) arrivals_.push_back(now);
  had_text_ = had_text_ || adds;
  if (keeps_text_) text_ += addition.text;
}

}  // namespace lockstep

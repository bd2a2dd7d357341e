#include "launch/batch/batch_record.h"

#include <charconv>

#include "launch/http/http_message.h"
#include "launch/openai/json_text.h"
#include "runtime/core/json.h"

namespace lockstep {

namespace {

constexpr std::string_view kIdPrefix = "batch_req_";

// {"code", "message", "line"} from the error object of an answer.
void AppendError(const BatchRecord& record, std::string* out) {
  std::string code, message;
  if (const absl::StatusOr<Json> body = ParseJson(record.body, "the answer"); body.ok()) {
    const Json error = body->is_object() ? body->value("error", Json()) : Json();
    const auto text = [&](const char* key) {
      const auto found = error.find(key);
      return found != error.end() && found->is_string() ? found->get<std::string>() : "";
    };
    if (error.is_object()) {
      code = text("code").empty() ? text("type") : text("code");
      message = text("message");
    }
  }
  *out += "{\"code\":";
  AppendJsonString(code.empty() ? absl::StrCat(record.status_code) : code, out);
  *out += ",\"message\":";
  AppendJsonString(message, out);
  absl::StrAppend(out, ",\"line\":", record.line, "}");
}

// Takes `expected` from the front of `text`.
bool Take(std::string_view expected, std::string_view* text) {
  if (!text->starts_with(expected)) return false;
  text->remove_prefix(expected.size());
  return true;
}

template <typename Int>
bool TakeInt(Int* value, std::string_view* text) {
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), *value);
  if (error != std::errc()) return false;
  text->remove_prefix(static_cast<size_t>(end - text->data()));
  return true;
}

// null or a string, whose escapes are passed over.
bool TakeCustomId(std::string_view* text) {
  if (Take("null", text)) return true;
  if (!Take("\"", text)) return false;
  for (size_t i = 0; i < text->size(); ++i) {
    if ((*text)[i] == '\\') {
      ++i;
    } else if ((*text)[i] == '"') {
      text->remove_prefix(i + 1);
      return true;
    }
  }
  return false;
}

// As FormatRecord writes it, without building a tree: outputs may be large.
bool ReadOwnHead(std::string_view text, RecordHead* head) {
  int status = 0;
  if (!text.ends_with('}') || !Take("{\"id\":\"", &text) || !Take(kIdPrefix, &text) ||
      !TakeInt(&head->line, &text) || !Take("\",\"custom_id\":", &text) || !TakeCustomId(&text) ||
      !Take(",\"response\":{\"status_code\":", &text) || !TakeInt(&status, &text) ||
      !Take(",", &text)) {
    return false;
  }
  head->ok = status == 200;
  return true;
}

// As another program may have written it again.
bool ReadAnyHead(std::string_view text, RecordHead* head) {
  const absl::StatusOr<Json> json = ParseJson(text, "a record");
  if (!json.ok() || !json->is_object()) return false;
  const auto id = json->find("id");
  const auto response = json->find("response");
  if (id == json->end() || !id->is_string() || response == json->end() || !response->is_object()) {
    return false;
  }
  std::string_view rest = id->get_ref<const std::string&>();
  if (!Take(kIdPrefix, &rest) || !TakeInt(&head->line, &rest) || !rest.empty()) return false;
  const auto status = response->find("status_code");
  if (status == response->end() || !status->is_number_integer()) return false;
  head->ok = *status == 200;
  return true;
}

}  // namespace

BatchRecord RecordOfBadLine(int64_t line, const std::optional<std::string>& custom_id,
                            const ApiError& error) {
  return {.line = line,
          .custom_id = custom_id,
          .status_code = error.http_status,
          .request_id = ChooseRequestId(nullptr),
          .body = ErrorJson(error)};
}

std::string FormatRecord(const BatchRecord& record) {
  std::string text = absl::StrFormat("{\"id\":\"%s%d\",\"custom_id\":", kIdPrefix, record.line);
  if (record.custom_id.has_value()) {
    AppendJsonString(*record.custom_id, &text);
  } else {
    text += "null";
  }
  absl::StrAppend(&text, ",\"response\":{\"status_code\":", record.status_code,
                  ",\"request_id\":\"", record.request_id, "\",\"body\":", record.body,
                  "},\"error\":");
  if (record.ok()) {
    text += "null";
  } else {
    AppendError(record, &text);
  }
  return text + "}\n";
}

absl::StatusOr<RecordHead> ReadRecordHead(std::string_view text) {
  RecordHead head;
  if (ReadOwnHead(text, &head) || ReadAnyHead(text, &head)) {
    if (head.line >= 1 && head.line <= LineSet::kMaxLine) return head;
  }
  return absl::InvalidArgumentError("it is no record of a batch job");
}

void LineSet::Insert(int64_t line) {
  const auto bit = static_cast<uint64_t>(line - 1);
  if (bit / 64 >= words_.size()) words_.resize(bit / 64 + 1);
  words_[bit / 64] |= uint64_t{1} << (bit % 64);
  largest_ = std::max(largest_, line);
}

bool LineSet::Contains(int64_t line) const {
  const auto bit = static_cast<uint64_t>(line - 1);
  return bit / 64 < words_.size() && (words_[bit / 64] >> (bit % 64) & 1) != 0;
}

}  // namespace lockstep

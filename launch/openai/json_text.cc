#include "launch/openai/json_text.h"

#include <charconv>
#include <cmath>

#include "runtime/core/status.h"

namespace lockstep {

namespace {

constexpr size_t kMaxQuoted = 60;

bool NeedsEscape(char c) { return static_cast<unsigned char>(c) < 0x20 || c == '"' || c == '\\'; }

void AppendEscaped(char c, std::string* out) {
  switch (c) {
    case '"':
      *out += "\\\"";
      return;
    case '\\':
      *out += "\\\\";
      return;
    case '\n':
      *out += "\\n";
      return;
    case '\r':
      *out += "\\r";
      return;
    case '\t':
      *out += "\\t";
      return;
    default: {
      constexpr char kHex[] = "0123456789abcdef";
      const auto value = static_cast<unsigned char>(c);
      *out += "\\u00";
      out->push_back(kHex[value >> 4]);
      out->push_back(kHex[value & 15]);
    }
  }
}

template <typename AnyJson>
std::string QuotedAnyJson(const AnyJson& value) {
  // A long text or list is not written out to be cut.
  if (value.is_array() && value.size() > kMaxQuoted) {
    return absl::StrFormat("a list of %d", value.size());
  }
  if (value.is_string()) return QuotedText(value.template get_ref<const std::string&>());
  if (value.is_object() && value.size() > kMaxQuoted) {
    return absl::StrFormat("an object of %d keys", value.size());
  }
  std::string text = value.dump(-1, ' ', /*ensure_ascii=*/true, AnyJson::error_handler_t::replace);
  if (text.size() > kMaxQuoted) text = text.substr(0, kMaxQuoted - 3) + "...";
  return text;
}

}  // namespace

void AppendJsonString(std::string_view utf8, std::string* out) {
  out->push_back('"');
  size_t begin = 0;
  for (size_t i = 0; i < utf8.size(); ++i) {
    if (!NeedsEscape(utf8[i])) continue;
    out->append(utf8, begin, i - begin);
    AppendEscaped(utf8[i], out);
    begin = i + 1;
  }
  out->append(utf8, begin);
  out->push_back('"');
}

void AppendLogprob(float logprob, std::string* out) {
  if (!std::isfinite(logprob)) {
    *out += "-9999.0";
    return;
  }
  char digits[32];
  const auto [end, error] = std::to_chars(digits, digits + sizeof(digits), logprob);
  LOCKSTEP_CHECK(error == std::errc());
  out->append(digits, end);
}

std::string QuotedJson(const Json& value) { return QuotedAnyJson(value); }
std::string QuotedJson(const OrderedJson& value) { return QuotedAnyJson(value); }

std::string QuotedText(std::string_view text) {
  const bool cut = text.size() > kMaxQuoted;
  const Json head = std::string(text.substr(0, kMaxQuoted));
  std::string quoted = head.dump(-1, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace);
  if (cut) quoted += "...";
  return quoted;
}

}  // namespace lockstep

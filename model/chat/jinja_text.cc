// str(), repr() and json.dumps.
#include <algorithm>
#include <charconv>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "model/chat/jinja_ast.h"
#include "model/chat/jinja_ops.h"
#include "model/chat/python_text.h"

namespace lockstep {
namespace {

void AppendRepr(JinjaRuntime& rt, const JinjaValue& value, std::string* out);

void AppendReprItems(JinjaRuntime& rt, const std::vector<JinjaValue>& items, std::string* out) {
  for (size_t i = 0; i < items.size(); ++i) {
    if (i > 0) *out += ", ";
    AppendRepr(rt, items[i], out);
  }
}

void AppendReprDict(JinjaRuntime& rt, const JinjaDict& dict, std::string* out) {
  *out += '{';
  for (size_t i = 0; i < dict.items.size(); ++i) {
    if (i > 0) *out += ", ";
    AppendRepr(rt, dict.items[i].first, out);
    *out += ": ";
    AppendRepr(rt, dict.items[i].second, out);
  }
  *out += '}';
}

void AppendReprRange(const JinjaSequence& range, std::string* out) {
  *out += "range(" + PythonIntRepr(range.start) + ", " + PythonIntRepr(range.stop);
  if (range.step != 1) *out += ", " + PythonIntRepr(range.step);
  *out += ')';
}

void AppendRepr(JinjaRuntime& rt, const JinjaValue& value, std::string* out) {
  const size_t before = out->size();
  rt.Step();
  switch (value.kind()) {
    case JinjaKind::kUndefined:
      *out += "Undefined";
      break;
    case JinjaKind::kNone:
      *out += "None";
      break;
    case JinjaKind::kBool:
      *out += value.bool_value() ? "True" : "False";
      break;
    case JinjaKind::kInt:
      *out += PythonIntRepr(value.int_value());
      break;
    case JinjaKind::kFloat:
      *out += PythonFloatRepr(value.float_value());
      break;
    case JinjaKind::kString:
      *out +=
          value.markup() ? "Markup(" + PythonRepr(value.text()) + ")" : PythonRepr(value.text());
      break;
    case JinjaKind::kList:
      *out += '[';
      AppendReprItems(rt, value.items(), out);
      *out += ']';
      break;
    case JinjaKind::kTuple:
      *out += '(';
      AppendReprItems(rt, value.items(), out);
      *out += value.items().size() == 1 ? ",)" : ")";
      break;
    case JinjaKind::kKeys:
    case JinjaKind::kValues:
    case JinjaKind::kItems:
      *out += value.TypeName() + "([";
      AppendReprItems(rt, value.items(), out);
      *out += "])";
      break;
    case JinjaKind::kRange:
      AppendReprRange(value.sequence(), out);
      break;
    case JinjaKind::kDict:
      AppendReprDict(rt, value.dict(), out);
      break;
    case JinjaKind::kMacro:
      *out += "<Macro " + PythonRepr(value.macro().body->name) + ">";
      break;
    case JinjaKind::kLoop:
      *out +=
          absl::StrFormat("<LoopContext %d/%d>", value.loop().index0 + 1, value.loop().Length());
      break;
    default:
      // Python would print an address here.
      FailJinja(absl::StrFormat("a %s cannot be printed (is a call or a |list missing?)",
                                value.TypeName()));
  }
  if (out->size() > before + 64) rt.Step(static_cast<int64_t>((out->size() - before) / 64));
}

class JsonWriter {
 public:
  JsonWriter(JinjaRuntime& rt, const JsonStyle& style) : rt_(rt), style_(style) {}

  void Write(const JinjaValue& value, int level);
  std::string Take() { return std::move(out_); }

 private:
  void WriteText(std::string_view text);
  void WriteKey(const JinjaValue& key);
  void WriteDict(const JinjaDict& dict, int level);
  void Separate(bool first, int level);
  void NewLine(int level);

  JinjaRuntime& rt_;
  const JsonStyle& style_;
  std::string out_;
};

std::string JsonFloat(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  return PythonFloatRepr(value);
}

void AppendEscape(char32_t c, std::string* out) {
  if (c >= 0x10000) {
    AppendEscape(0xD800 + ((c - 0x10000) >> 10), out);
    c = 0xDC00 + ((c - 0x10000) & 0x3FF);
  }
  *out += absl::StrFormat("\\u%04x", static_cast<unsigned>(c));
}

void JsonWriter::WriteText(std::string_view text) {
  rt_.ScanText(text);
  out_ += '"';
  for (size_t p = 0; p < text.size();) {
    const char32_t c = NextCodePoint(text, &p);
    switch (c) {
      case '"':
        out_ += "\\\"";
        break;
      case '\\':
        out_ += "\\\\";
        break;
      case '\n':
        out_ += "\\n";
        break;
      case '\r':
        out_ += "\\r";
        break;
      case '\t':
        out_ += "\\t";
        break;
      case '\f':
        out_ += "\\f";
        break;
      case '\b':
        out_ += "\\b";
        break;
      default:
        if (c < 0x20 || (c >= 0x7F && style_.ensure_ascii && c != 0x7F)) {
          AppendEscape(c, &out_);
        } else {
          AppendCodePoint(c, &out_);
        }
    }
  }
  out_ += '"';
}

void JsonWriter::NewLine(int level) {
  if (!style_.indented) return;
  out_ += '\n';
  for (int i = 0; i < level; ++i) out_ += style_.indent;
  rt_.Allocate(style_.indent.size() * static_cast<size_t>(level));
}

void JsonWriter::Separate(bool first, int level) {
  if (!first) out_ += style_.item_separator;
  NewLine(level);
}

void JsonWriter::WriteKey(const JinjaValue& key) {
  switch (key.kind()) {
    case JinjaKind::kString:
      return WriteText(key.text());
    case JinjaKind::kNone:
      return WriteText("null");
    case JinjaKind::kBool:
      return WriteText(key.bool_value() ? "true" : "false");
    case JinjaKind::kInt:
      return WriteText(PythonIntRepr(key.int_value()));
    case JinjaKind::kFloat:
      return WriteText(JsonFloat(key.float_value()));
    default:
      FailJinja(absl::StrFormat("tojson: keys must be str, int, float, bool or None, not '%s'",
                                key.TypeName()));
  }
}

void JsonWriter::WriteDict(const JinjaDict& dict, int level) {
  std::vector<const JinjaPair*> items;
  for (const JinjaPair& item : dict.items) items.push_back(&item);
  if (style_.sort_keys) {
    std::stable_sort(items.begin(), items.end(), [this](const JinjaPair* a, const JinjaPair* b) {
      return Less(rt_, a->first, b->first);
    });
  }
  out_ += '{';
  for (size_t i = 0; i < items.size(); ++i) {
    Separate(i == 0, level + 1);
    WriteKey(items[i]->first);
    out_ += style_.key_separator;
    Write(items[i]->second, level + 1);
  }
  if (!items.empty()) NewLine(level);
  out_ += '}';
}

void JsonWriter::Write(const JinjaValue& value, int level) {
  rt_.Step();
  switch (value.kind()) {
    case JinjaKind::kNone:
      out_ += "null";
      return;
    case JinjaKind::kBool:
      out_ += value.bool_value() ? "true" : "false";
      return;
    case JinjaKind::kInt:
      out_ += PythonIntRepr(value.int_value());
      return;
    case JinjaKind::kFloat:
      out_ += JsonFloat(value.float_value());
      return;
    case JinjaKind::kString:
      WriteText(value.text());
      return;
    case JinjaKind::kDict:
      WriteDict(value.dict(), level);
      return;
    case JinjaKind::kList:
    case JinjaKind::kTuple: {
      out_ += '[';
      bool first = true;
      for (const JinjaValue& item : value.items()) {
        Separate(first, level + 1);
        first = false;
        Write(item, level + 1);
      }
      if (!first) NewLine(level);
      out_ += ']';
      return;
    }
    default:
      FailJinja(absl::StrFormat(
          "tojson: an object of type %s is not JSON serializable%s", value.TypeName(),
          value.is_undefined() ? " (" + value.undefined_message() + ")" : ""));
  }
}

}  // namespace

std::string PythonIntRepr(JinjaInt value) {
  if (value == 0) return "0";
  // The magnitude as unsigned: the lowest number has no positive counterpart.
  unsigned __int128 rest =
      value < 0 ? -static_cast<unsigned __int128>(value) : static_cast<unsigned __int128>(value);
  std::string digits;
  for (; rest != 0; rest /= 10) digits += static_cast<char>('0' + static_cast<int>(rest % 10));
  if (value < 0) digits += '-';
  std::reverse(digits.begin(), digits.end());
  return digits;
}

// repr(float): the shortest digits that read back to the same number, with an exponent below 1e-4
// and from 1e16 on.
std::string PythonFloatRepr(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  char buffer[64];
  const auto end =
      std::to_chars(buffer, buffer + sizeof(buffer), value, std::chars_format::scientific);
  std::string_view text(buffer, static_cast<size_t>(end.ptr - buffer));
  const bool negative = text.front() == '-';
  if (negative) text.remove_prefix(1);
  const size_t e = text.find('e');
  int exponent = std::atoi(std::string(text.substr(e + 1)).c_str());
  std::string digits;
  for (const char c : text.substr(0, e)) {
    if (c != '.') digits += c;
  }
  const char* sign = negative ? "-" : "";
  if (exponent < -4 || exponent >= 16) {
    const std::string fraction = digits.size() > 1 ? absl::StrCat(".", digits.substr(1)) : "";
    return absl::StrFormat("%s%c%se%c%02d", sign, digits[0], fraction, exponent < 0 ? '-' : '+',
                           std::abs(exponent));
  }
  if (exponent < 0) {
    return absl::StrCat(sign, "0.", std::string(static_cast<size_t>(-exponent - 1), '0'), digits);
  }
  const auto whole = static_cast<size_t>(exponent) + 1;
  if (digits.size() <= whole) digits.append(whole + 1 - digits.size(), '0');
  return absl::StrCat(sign, digits.substr(0, whole), ".", digits.substr(whole));
}

std::string PythonStr(JinjaRuntime& rt, const JinjaValue& value) {
  if (value.is_string()) {
    rt.ScanText(value.text());
    return std::string(value.text());
  }
  return value.is_undefined() ? "" : PythonRepr(rt, value);
}

std::string PythonRepr(JinjaRuntime& rt, const JinjaValue& value) {
  std::string out;
  AppendRepr(rt, value, &out);
  rt.Allocate(out.size());
  return out;
}

std::string DumpPythonJson(JinjaRuntime& rt, const JinjaValue& value, const JsonStyle& style) {
  JsonWriter writer(rt, style);
  writer.Write(value, 0);
  return writer.Take();
}

}  // namespace lockstep

// The filters behind `|`, but for those over sequences (jinja_sequence_filters.cc).
#include "model/chat/jinja_filters.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "absl/strings/str_format.h"
#include "model/chat/python_text.h"

namespace lockstep {
namespace {

using Rt = JinjaRuntime&;
using V = const JinjaValue&;
using Args = const JinjaArgs&;

// The value as text, as filters of text take it; what was marked safe stays so.
JinjaValue AsText(Rt rt, V v) { return v.is_string() ? v : rt.String(PythonStr(rt, v)); }

JinjaValue CallTextMethod(Rt rt, V v, const char* method, Args args) {
  return CallMethod(rt, JinjaMethod{AsText(rt, v), method}, args);
}

JinjaValue Default(Rt, V v, Args args) {
  const BoundArgs bound("default", args, {"default_value", "boolean"});
  if (!v.is_undefined() && !(bound.Bool(1, false) && !v.Truthy())) return v;
  return bound[0] == nullptr ? JinjaValue::String("") : *bound[0];
}

JinjaValue ToJson(Rt rt, V v, Args args) {
  const BoundArgs bound("tojson", args, {"ensure_ascii", "indent", "separators", "sort_keys"});
  // The parameters and their order are those of transformers' filter, not of jinja2's.
  JsonStyle style;
  style.ensure_ascii = bound.Bool(0, false);
  if (bound[1] != nullptr && !bound[1]->is_none()) {
    style.indented = true;
    style.item_separator.assign(1, ',');
    style.indent =
        bound[1]->is_string()
            ? std::string(bound[1]->text())
            : std::string(static_cast<size_t>(std::clamp<JinjaInt>(bound.Int(1, 0), 0, 1000)), ' ');
  }
  if (bound[2] != nullptr && !bound[2]->is_none()) {
    const std::vector<JinjaValue> separators = ToVector(rt, *bound[2]);
    if (separators.size() != 2 || !separators[0].is_string() || !separators[1].is_string()) {
      FailJinja("tojson(): 'separators' must be two strings");
    }
    style.item_separator = std::string(separators[0].text());
    style.key_separator = std::string(separators[1].text());
  }
  style.sort_keys = bound.Bool(3, false);
  return rt.String(DumpPythonJson(rt, v, style));
}

JinjaValue ToInt(Rt rt, V v, Args args) {
  const BoundArgs bound("int", args, {"default", "base"});
  const JinjaValue fallback = bound[0] == nullptr ? JinjaValue::Int(0) : *bound[0];
  if (v.is_int()) return JinjaValue::Int(v.int_value());
  double number = 0;
  if (v.is_number()) {
    number = v.float_value();
  } else if (v.is_string()) {
    JinjaInt parsed = 0;
    if (ParsePythonInt(v.text(), static_cast<int>(bound.Int(1, 10)), &parsed)) {
      return JinjaValue::Int(parsed);
    }
    if (!ParsePythonFloat(v.text(), &number)) return fallback;
  } else {
    RequireDefined(v);
    return fallback;
  }
  if (std::isnan(number)) return fallback;
  if (std::isinf(number)) FailJinja("cannot convert float infinity to integer");
  if (std::abs(number) >= 1e38) FailUnsupported("integers of more than 127 bits are not supported");
  rt.Step();
  return JinjaValue::Int(static_cast<JinjaInt>(std::trunc(number)));
}

JinjaValue ToFloat(Rt, V v, Args args) {
  const BoundArgs bound("float", args, {"default"});
  if (v.is_number()) return JinjaValue::Float(v.float_value());
  RequireDefined(v);
  double number = 0;
  if (v.is_string() && ParsePythonFloat(v.text(), &number)) return JinjaValue::Float(number);
  return bound[0] == nullptr ? JinjaValue::Float(0) : *bound[0];
}

JinjaValue Abs(Rt, V v, Args args) {
  BoundArgs("abs", args, {});
  RequireDefined(v);
  if (!v.is_number()) FailJinja(absl::StrFormat("bad operand type for abs(): '%s'", v.TypeName()));
  if (!v.is_int()) return JinjaValue::Float(std::abs(v.float_value()));
  return JinjaValue::Int(v.int_value() < 0 ? -v.int_value() : v.int_value());
}

// Rounds the exact value of the number in decimal, halves to even, as Python does.
double RoundDecimal(double value, JinjaInt precision) {
  if (!std::isfinite(value) || precision > 300) return value;
  if (precision >= 0) {
    return std::strtod(absl::StrFormat("%.*f", static_cast<int>(precision), value).c_str(),
                       nullptr);
  }
  const double scale = std::pow(10.0, static_cast<double>(-precision));
  return std::nearbyint(value / scale) * scale;
}

// An int to a multiple of 10^digits, halves to the even multiple, as Python does: a double would
// lose digits.
JinjaInt RoundInt(JinjaInt value, JinjaInt digits) {
  if (digits > 38) return 0;  // 10^39 is more than twice any value
  JinjaInt unit = 1;
  for (JinjaInt i = 0; i < digits; ++i) unit *= 10;
  const JinjaInt rest = value % unit;  // of the value's sign
  const JinjaInt size = rest < 0 ? -rest : rest;
  const JinjaInt half = unit / 2;
  JinjaInt quotient = value / unit;
  if (size > half || (size == half && quotient % 2 != 0)) quotient += value < 0 ? -1 : 1;
  JinjaInt rounded = 0;
  if (__builtin_mul_overflow(quotient, unit, &rounded)) FailJinja("round(): the int is too wide");
  return rounded;
}

JinjaValue Round(Rt, V v, Args args) {
  const BoundArgs bound("round", args, {"precision", "method"});
  const JinjaInt precision = std::clamp<JinjaInt>(bound.Int(0, 0), -400, 400);
  const std::string_view method = bound.Text(1, "common");
  RequireDefined(v);
  if (!v.is_number()) FailJinja(absl::StrFormat("'%s' cannot be rounded", v.TypeName()));
  if (method == "common") {
    if (!v.is_int()) return JinjaValue::Float(RoundDecimal(v.float_value(), precision));
    return JinjaValue::Int(precision >= 0 ? v.int_value() : RoundInt(v.int_value(), -precision));
  }
  if (method != "ceil" && method != "floor")
    FailJinja("round(): method must be common, ceil or floor");
  const double scale = std::pow(10.0, static_cast<double>(precision));
  const double scaled = v.float_value() * scale;
  return JinjaValue::Float((method == "ceil" ? std::ceil(scaled) : std::floor(scaled)) / scale);
}

JinjaValue Replace(Rt rt, V v, Args args) {
  const BoundArgs bound("replace", args, {"old", "new", "count"}, 2);
  JinjaArgs method_args;
  method_args.positional = {rt.String(PythonStr(rt, *bound[0])),
                            rt.String(PythonStr(rt, *bound[1]))};
  if (bound[2] != nullptr && !bound[2]->is_none()) method_args.positional.push_back(*bound[2]);
  return CallMethod(rt, JinjaMethod{rt.String(PythonStr(rt, v)), "replace"}, method_args);
}

// Jinja's own title: a word begins behind white space, a hyphen or an opening bracket.
JinjaValue Title(Rt rt, V v, Args args) {
  BoundArgs("title", args, {});
  const std::string text = PythonStr(rt, v);
  std::string out;
  std::string word;
  const auto flush = [&out, &word] {
    if (word.empty()) return;
    size_t first = 0;
    NextCodePoint(word, &first);
    out += PythonUpper(std::string_view(word).substr(0, first));
    out += PythonLower(std::string_view(word).substr(first));
    word.clear();
  };
  for (size_t p = 0; p < text.size();) {
    const char32_t c = NextCodePoint(text, &p);
    if (IsPythonSpace(c) || c == '-' || c == '(' || c == '{' || c == '[' || c == '<') {
      flush();
      AppendCodePoint(c, &out);
    } else {
      AppendCodePoint(c, &word);
    }
  }
  flush();
  return rt.String(std::move(out), v.markup());
}

JinjaValue Indent(Rt rt, V v, Args args) {
  const BoundArgs bound("indent", args, {"width", "first", "blank"});
  RequireDefined(v);
  if (!v.is_string())
    FailJinja(absl::StrFormat("indent(): a str is needed, not '%s'", v.TypeName()));
  std::string indention(4, ' ');
  if (bound[0] != nullptr && bound[0]->is_string()) {
    indention = std::string(bound[0]->text());
  } else if (bound[0] != nullptr) {
    indention =
        std::string(static_cast<size_t>(std::clamp<JinjaInt>(bound.Int(0, 4), 0, 10000)), ' ');
  }
  const JinjaValue text = rt.String(std::string(v.text()) + "\n");
  const JinjaValue lines = CallMethod(rt, JinjaMethod{text, "splitlines"}, {});
  rt.Allocate(indention.size() * lines.items().size());
  std::string out = bound.Bool(1, false) ? indention : "";
  for (size_t i = 0; i < lines.items().size(); ++i) {
    const std::string_view line = lines.items()[i].text();
    if (i > 0) out += '\n';
    if (i > 0 && (bound.Bool(2, false) || !line.empty())) out += indention;
    out += line;
  }
  return rt.String(std::move(out), v.markup());
}

JinjaValue Truncate(Rt rt, V v, Args args) {
  const BoundArgs bound("truncate", args, {"length", "killwords", "end", "leeway"});
  RequireDefined(v);
  const std::string_view end = bound.Text(2, "...");
  const JinjaInt length = bound.Int(0, 255);
  const JinjaInt leeway = bound[3] == nullptr || bound[3]->is_none() ? 5 : bound.Int(3, 5);
  const auto end_length = static_cast<JinjaInt>(CountCodePoints(end));
  if (length < end_length || leeway < 0) FailJinja("truncate(): length or leeway is too small");
  if (Length(rt, v) <= length + leeway) return v;
  if (!v.is_string())
    FailJinja(absl::StrFormat("truncate(): a str is needed, not '%s'", v.TypeName()));
  std::string_view cut =
      v.text().substr(0, ByteOffset(v.text(), static_cast<size_t>(length - end_length)));
  if (!bound.Bool(1, false)) cut = cut.substr(0, cut.rfind(' '));
  return rt.String(std::string(cut) + std::string(end), v.markup());
}

JinjaValue Format(Rt rt, V v, Args args) {
  if (!args.positional.empty() && !args.named.empty()) {
    FailJinja("format(): positional and named arguments at the same time");
  }
  JinjaValue values = rt.Tuple(args.positional);
  if (!args.named.empty()) {
    std::vector<JinjaPair> pairs;
    for (const auto& [name, value] : args.named) pairs.emplace_back(rt.String(name), value);
    values = rt.Dict(std::move(pairs));
  }
  return rt.String(PercentFormat(rt, PythonStr(rt, v), values));
}

JinjaValue Escape(Rt rt, V v, Args args) {
  BoundArgs("escape", args, {});
  return v.markup() ? v : rt.String(EscapeHtml(PythonStr(rt, v)), true);
}

JinjaValue LengthOf(Rt rt, V v, Args args) {
  BoundArgs("length", args, {});
  return JinjaValue::Int(Length(rt, v));
}

struct NamedFilter {
  std::string_view name;
  JinjaFilter filter;
};

const NamedFilter kFilters[] = {
    {"abs", Abs},
    {"capitalize", [](Rt rt, V v, Args a) { return CallTextMethod(rt, v, "capitalize", a); }},
    {"center",
     [](Rt rt, V v, Args a) {
       const BoundArgs bound("center", a, {"width"});
       return CallTextMethod(rt, v, "center", {{JinjaValue::Int(bound.Int(0, 80))}, {}});
     }},
    {"count", LengthOf},
    {"d", Default},
    {"default", Default},
    {"e", Escape},
    {"escape", Escape},
    {"float", ToFloat},
    {"format", Format},
    {"indent", Indent},
    {"int", ToInt},
    {"length", LengthOf},
    {"lower", [](Rt rt, V v, Args a) { return CallTextMethod(rt, v, "lower", a); }},
    {"replace", Replace},
    {"round", Round},
    {"safe", [](Rt rt, V v, Args) { return rt.String(PythonStr(rt, v), true); }},
    {"string", [](Rt rt, V v, Args) { return AsText(rt, v); }},
    {"title", Title},
    {"tojson", ToJson},
    {"trim", [](Rt rt, V v, Args a) { return CallTextMethod(rt, v, "strip", a); }},
    {"truncate", Truncate},
    {"upper", [](Rt rt, V v, Args a) { return CallTextMethod(rt, v, "upper", a); }},
};

}  // namespace

bool ParsePythonInt(std::string_view text, int base, JinjaInt* value) {
  text = PythonStripRight(PythonStripLeft(text, nullptr), nullptr);
  const bool negative = !text.empty() && text[0] == '-';
  if (!text.empty() && (text[0] == '-' || text[0] == '+')) text.remove_prefix(1);
  if (text.size() > 2 && text[0] == '0') {
    const char kind = static_cast<char>(text[1] | 0x20);
    const int prefix_base = kind == 'x' ? 16 : kind == 'o' ? 8 : kind == 'b' ? 2 : 0;
    if (prefix_base == base && base != 10) text.remove_prefix(2);
  }
  JinjaInt result = 0;
  bool digit_before = false;
  for (const char c : text) {
    if (c == '_' && digit_before) {
      digit_before = false;
      continue;
    }
    const char lower = static_cast<char>(c | 0x20);
    const int digit = c >= '0' && c <= '9'           ? c - '0'
                      : lower >= 'a' && lower <= 'z' ? lower - 'a' + 10
                                                     : 99;
    if (digit >= base) return false;
    if (__builtin_mul_overflow(result, static_cast<JinjaInt>(base), &result) ||
        __builtin_add_overflow(result, static_cast<JinjaInt>(digit), &result)) {
      FailUnsupported("integers of more than 127 bits are not supported");
    }
    digit_before = true;
  }
  *value = negative ? -result : result;
  return digit_before;
}

bool ParsePythonFloat(std::string_view text, double* value) {
  text = PythonStripRight(PythonStripLeft(text, nullptr), nullptr);
  std::string digits;
  for (size_t i = 0; i < text.size(); ++i) {
    const bool between = i > 0 && i + 1 < text.size() &&
                         std::isdigit(static_cast<unsigned char>(text[i - 1])) &&
                         std::isdigit(static_cast<unsigned char>(text[i + 1]));
    if (text[i] == '_' && between) continue;
    if (text[i] == 'x' || text[i] == 'X' || text[i] == '(')
      return false;  // strtod takes more than Python
    digits += text[i];
  }
  if (digits.empty()) return false;
  char* end = nullptr;
  *value = std::strtod(digits.c_str(), &end);
  return *end == '\0' && end == digits.c_str() + digits.size();
}

JinjaFilter FindJinjaFilter(std::string_view name) {
  for (const NamedFilter& f : kFilters) {
    if (f.name == name) return f.filter;
  }
  return FindJinjaSequenceFilter(name);
}

}  // namespace lockstep

// printf-style and brace-style formatting of strings.
#include <algorithm>
#include <cmath>
#include <optional>

#include "absl/strings/str_format.h"
#include "model/chat/jinja_ops.h"
#include "model/chat/python_text.h"

namespace lockstep {
namespace {

// A template has no use for wider fields; a hostile one has.
constexpr int kMaxFieldWidth = 10000;

struct FieldSpec {
  std::string_view fill = " ";  // one character
  char align = '\0';  // '<', '>', '^', '=' (between sign and digits); '\0' = the type's own
  char sign = '-';
  bool alternate = false;
  int width = 0;
  int precision = -1;
  char type = '\0';
};

std::string Pad(const std::string& body, const FieldSpec& spec, char default_align) {
  const auto length = static_cast<int>(CountCodePoints(body));
  if (length >= spec.width) return body;
  const int missing = spec.width - length;
  const auto fill = [&spec](int n) {
    std::string out;
    for (int i = 0; i < n; ++i) out += spec.fill;
    return out;
  };
  switch (spec.align == '\0' ? default_align : spec.align) {
    case '<':
      return body + fill(missing);
    case '^':
      return fill(missing / 2) + body + fill(missing - missing / 2);
    case '=': {
      const size_t sign =
          body.empty() || (body[0] != '-' && body[0] != '+' && body[0] != ' ') ? 0 : 1;
      return body.substr(0, sign) + fill(missing) + body.substr(sign);
    }
    default:
      return fill(missing) + body;
  }
}

std::string WithSign(std::string digits, bool negative, const FieldSpec& spec) {
  if (negative) return "-" + digits;
  return spec.sign == '-' ? digits : spec.sign + digits;
}

std::string FormatIntAs(JinjaInt value, const FieldSpec& spec) {
  const bool negative = value < 0;
  std::string digits;
  const int base = spec.type == 'x' || spec.type == 'X' ? 16
                   : spec.type == 'o'                   ? 8
                   : spec.type == 'b'                   ? 2
                                                        : 10;
  if (base == 10) {
    digits = PythonIntRepr(value);
    if (negative) digits.erase(0, 1);
  } else {
    unsigned __int128 rest =
        negative ? -static_cast<unsigned __int128>(value) : static_cast<unsigned __int128>(value);
    const std::string_view symbols = spec.type == 'X' ? "0123456789ABCDEF" : "0123456789abcdef";
    do {
      digits += symbols[static_cast<size_t>(rest % static_cast<unsigned>(base))];
      rest /= static_cast<unsigned>(base);
    } while (rest != 0);
    std::reverse(digits.begin(), digits.end());
    if (spec.alternate) digits = std::string("0") + spec.type + digits;
  }
  if (spec.precision > 0 && static_cast<int>(digits.size()) < spec.precision) {
    digits.insert(0, static_cast<size_t>(spec.precision) - digits.size(), '0');
  }
  return WithSign(std::move(digits), negative, spec);
}

std::string FormatFloatAs(double value, const FieldSpec& spec) {
  const int precision = spec.precision < 0 ? 6 : spec.precision;
  const double magnitude = std::abs(value);
  std::string digits;
  switch (spec.type) {
    case 'e':
      digits = absl::StrFormat("%.*e", precision, magnitude);
      break;
    case 'E':
      digits = absl::StrFormat("%.*E", precision, magnitude);
      break;
    case 'g':
      digits = absl::StrFormat("%.*g", precision, magnitude);
      break;
    case 'G':
      digits = absl::StrFormat("%.*G", precision, magnitude);
      break;
    case '%':
      digits = absl::StrFormat("%.*f%%", precision, magnitude * 100);
      break;
    default:
      digits = absl::StrFormat("%.*f", precision, magnitude);
  }
  return WithSign(std::move(digits), std::signbit(value), spec);
}

std::string CutText(std::string text, int precision) {
  if (precision >= 0) text.resize(ByteOffset(text, static_cast<size_t>(precision)));
  return text;
}

int ParseNumber(std::string_view text, size_t* i) {
  int value = 0;
  while (*i < text.size() && text[*i] >= '0' && text[*i] <= '9') {
    value = value * 10 + (text[(*i)++] - '0');
    if (value > kMaxFieldWidth) FailUnsupported("a field wider than 10000 characters");
  }
  return value;
}

std::string PercentField(JinjaRuntime& rt, const JinjaValue& value, const FieldSpec& spec) {
  switch (spec.type) {
    case 's':
      return Pad(CutText(PythonStr(rt, value), spec.precision), spec, '>');
    case 'r':
      return Pad(CutText(PythonRepr(rt, value), spec.precision), spec, '>');
    case 'd':
    case 'i':
    case 'u':
    case 'x':
    case 'X':
    case 'o': {
      RequireDefined(value);
      const bool needs_int = spec.type == 'x' || spec.type == 'X' || spec.type == 'o';
      if (!value.is_number() || (needs_int && !value.is_int())) {
        FailJinja(absl::StrFormat("%%%c format: a number is required, not '%s'", spec.type,
                                  value.TypeName()));
      }
      const JinjaInt number = value.is_int()
                                  ? value.int_value()
                                  : static_cast<JinjaInt>(std::trunc(value.float_value()));
      return Pad(FormatIntAs(number, spec), spec, '>');
    }
    case 'f':
    case 'F':
    case 'e':
    case 'E':
    case 'g':
    case 'G':
      RequireDefined(value);
      if (!value.is_number()) {
        FailJinja(absl::StrFormat("%%%c format: must be a real number, not '%s'", spec.type,
                                  value.TypeName()));
      }
      return Pad(FormatFloatAs(value.float_value(), spec), spec, '>');
    default:
      FailUnsupported(absl::StrFormat("the conversion %%%c is not supported", spec.type));
  }
}

// Behind '%' (and a key in parentheses): flags, width, precision, length modifier, type.
FieldSpec ParsePercentSpec(std::string_view format, size_t* i) {
  FieldSpec spec;
  for (; *i < format.size(); ++*i) {
    const char c = format[*i];
    if (c == '-') {
      spec.align = '<';
    } else if (c == '0') {
      if (spec.align != '<') spec.align = '=';
      spec.fill = "0";
    } else if (c == '+' || (c == ' ' && spec.sign == '-')) {
      spec.sign = c;
    } else if (c == '#') {
      spec.alternate = true;
    } else if (c != ' ') {
      break;
    }
  }
  if (spec.align == '<') spec.fill = " ";
  spec.width = ParseNumber(format, i);
  if (*i < format.size() && format[*i] == '.') {
    ++*i;
    spec.precision = ParseNumber(format, i);
  }
  while (*i < format.size() && (format[*i] == 'l' || format[*i] == 'h' || format[*i] == 'L')) ++*i;
  if (*i >= format.size()) FailJinja("incomplete format");
  spec.type = format[(*i)++];
  if (spec.type == 's' || spec.type == 'r') {
    spec.fill = " ";
    if (spec.align == '=') spec.align = '>';
  }
  return spec;
}

// Behind ':' of a replacement field: [[fill]align][sign][#][0][width][.precision][type].
FieldSpec ParseBraceSpec(std::string_view text) {
  FieldSpec spec;
  size_t i = 0;
  const auto is_align = [&text](size_t p) {
    return p < text.size() &&
           (text[p] == '<' || text[p] == '>' || text[p] == '^' || text[p] == '=');
  };
  if (!text.empty()) {
    size_t next = 0;
    NextCodePoint(text, &next);
    if (is_align(next)) {
      spec.fill = text.substr(0, next);
      spec.align = text[next];
      i = next + 1;
    } else if (is_align(0)) {
      spec.align = text[0];
      i = 1;
    }
  }
  if (i < text.size() && (text[i] == '+' || text[i] == '-' || text[i] == ' '))
    spec.sign = text[i++];
  if (i < text.size() && text[i] == '#') {
    spec.alternate = true;
    ++i;
  }
  if (i < text.size() && text[i] == '0') {
    if (spec.align == '\0') {
      spec.align = '=';
      spec.fill = "0";
    }
    ++i;
  }
  spec.width = ParseNumber(text, &i);
  if (i < text.size() && text[i] == '.') {
    ++i;
    spec.precision = ParseNumber(text, &i);
  }
  if (i < text.size()) spec.type = text[i++];
  static constexpr std::string_view kTypes = "sdxXobfFeEgG%";
  if (i < text.size() || (spec.type != '\0' && kTypes.find(spec.type) == std::string_view::npos)) {
    FailUnsupported(absl::StrFormat("the format specification '%s' is not supported", text));
  }
  return spec;
}

std::string BraceField(JinjaRuntime& rt, const JinjaValue& value, std::string_view text) {
  if (text.empty()) return PythonStr(rt, value);
  const FieldSpec spec = ParseBraceSpec(text);
  const bool wants_int = std::string_view("dxXob").find(spec.type) != std::string_view::npos;
  if (value.is_string() && (spec.type == 's' || spec.type == '\0')) {
    return Pad(CutText(std::string(value.text()), spec.precision), spec, '<');
  }
  if (value.is_int() &&
      ((wants_int && spec.type != '\0') || (spec.type == '\0' && !value.Is(JinjaKind::kBool)))) {
    return Pad(FormatIntAs(value.int_value(), spec), spec, '>');
  }
  if (value.is_number() && spec.type != '\0' && spec.type != 's' && !wants_int) {
    return Pad(FormatFloatAs(value.float_value(), spec), spec, '>');
  }
  FailUnsupported(absl::StrFormat("the format specification '%s' for a value of type '%s'", text,
                                  value.TypeName()));
}

JinjaValue LookUpField(std::string_view name, const JinjaArgs& args, size_t* automatic) {
  if (name.find_first_of(".[") != std::string_view::npos) {
    FailUnsupported(absl::StrFormat("the replacement field '{%s}' is not supported", name));
  }
  const bool numbered =
      !name.empty() && name.find_first_not_of("0123456789") == std::string_view::npos;
  if (name.empty() || numbered) {
    size_t digits = 0;
    const size_t index =
        numbered ? static_cast<size_t>(ParseNumber(name, &digits)) : (*automatic)++;
    if (index >= args.positional.size()) {
      FailJinja(
          absl::StrFormat("replacement index %d out of range for positional arguments", index));
    }
    return args.positional[index];
  }
  for (const auto& [key, value] : args.named) {
    if (key == name) return value;
  }
  FailJinja(absl::StrFormat("format(): no argument '%s'", name));
}

}  // namespace

std::string PercentFormat(JinjaRuntime& rt, std::string_view format, const JinjaValue& value) {
  rt.ScanText(format);
  const bool is_tuple = value.Is(JinjaKind::kTuple);
  size_t used = 0;
  std::string out;
  for (size_t i = 0; i < format.size();) {
    if (format[i] != '%') {
      out += format[i++];
      continue;
    }
    if (++i < format.size() && format[i] == '%') {
      out += format[i++];
      continue;
    }
    std::optional<JinjaValue> keyed;
    if (i < format.size() && format[i] == '(') {
      const size_t end = format.find(')', i);
      if (end == std::string_view::npos) FailJinja("incomplete format key");
      if (!value.is_dict()) FailJinja("format requires a mapping");
      const std::string_view key = format.substr(i + 1, end - i - 1);
      const JinjaValue* found = value.dict().Find(key);
      if (found == nullptr) FailJinja(absl::StrFormat("no key '%s' for the format", key));
      keyed = *found;
      i = end + 1;
    }
    const FieldSpec spec = ParsePercentSpec(format, &i);
    const size_t available = is_tuple ? value.items().size() : 1;
    if (!keyed.has_value() && used >= available)
      FailJinja("not enough arguments for format string");
    const JinjaValue argument = keyed.has_value() ? *keyed : is_tuple ? value.items()[used] : value;
    if (!keyed.has_value()) ++used;
    out += PercentField(rt, argument, spec);
    rt.Allocate(static_cast<size_t>(spec.width));
  }
  const bool all_used = value.is_dict() || value.is_undefined() || value.Is(JinjaKind::kList) ||
                        used >= (is_tuple ? value.items().size() : 1);
  if (!all_used) FailJinja("not all arguments converted during string formatting");
  return out;
}

std::string BraceFormat(JinjaRuntime& rt, std::string_view format, const JinjaArgs& args) {
  rt.ScanText(format);
  size_t automatic = 0;
  std::string out;
  for (size_t i = 0; i < format.size(); ++i) {
    const char c = format[i];
    if (c != '{' && c != '}') {
      out += c;
      continue;
    }
    if (i + 1 < format.size() && format[i + 1] == c) {
      out += c;
      ++i;
      continue;
    }
    const size_t end = c == '{' ? format.find('}', i) : std::string_view::npos;
    if (end == std::string_view::npos) {
      FailJinja(absl::StrFormat("single '%c' encountered in format string", c));
    }
    std::string_view field = format.substr(i + 1, end - i - 1);
    if (field.find('{') != std::string_view::npos) FailUnsupported("nested replacement fields");
    std::string_view spec;
    if (const size_t colon = field.find(':'); colon != std::string_view::npos) {
      spec = field.substr(colon + 1);
      field = field.substr(0, colon);
    }
    bool as_repr = false;
    if (field.size() >= 2 && field[field.size() - 2] == '!') {
      const char conversion = field.back();
      if (conversion != 'r' && conversion != 's')
        FailUnsupported(absl::StrFormat("the conversion !%c is not supported", conversion));
      as_repr = conversion == 'r';
      field.remove_suffix(2);
    }
    JinjaValue value = LookUpField(field, args, &automatic);
    if (as_repr) value = rt.String(PythonRepr(rt, value));
    const std::string text = BraceField(rt, value, spec);
    rt.Allocate(text.size());
    out += text;
    i = end;
  }
  return out;
}

}  // namespace lockstep

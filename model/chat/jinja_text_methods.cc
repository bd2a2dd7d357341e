// Methods of str.
#include <algorithm>

#include "absl/strings/str_format.h"
#include "model/chat/jinja_methods.h"
#include "model/chat/python_text.h"

namespace lockstep {
namespace {

int64_t CharOffset(std::string_view text, size_t byte) {
  return static_cast<int64_t>(CountCodePoints(text.substr(0, byte)));
}

// The part of `text` that the optional arguments start and stop of find, count, startswith select,
// and where it begins. False if start lies behind the end of the text.
bool Window(const BoundArgs& args, size_t first, std::string_view text, std::string_view* window,
            int64_t* begin) {
  const bool absent = (args[first] == nullptr || args[first]->is_none()) &&
                      (args[first + 1] == nullptr || args[first + 1]->is_none());
  *begin = 0;
  *window = text;
  if (absent) return true;
  const auto length = static_cast<JinjaInt>(CountCodePoints(text));
  const auto bound = [&](size_t i, JinjaInt fallback) {
    JinjaInt value = args[i] == nullptr || args[i]->is_none() ? fallback : args.Int(i, 0);
    if (value < 0) value = std::max<JinjaInt>(0, value + length);
    return value;
  };
  const JinjaInt start = bound(first, 0);
  const JinjaInt stop = std::min(bound(first + 1, length), length);
  if (start > length || start > stop) return false;
  *begin = static_cast<int64_t>(start);
  const size_t from = ByteOffset(text, static_cast<size_t>(start));
  *window = text.substr(from, ByteOffset(text.substr(from), static_cast<size_t>(stop - start)));
  return true;
}

// One str method call: the text, the arguments and where results go.
class TextMethod {
 public:
  TextMethod(JinjaRuntime& rt, const JinjaMethod& method, const JinjaArgs& args)
      : rt_(rt), name_(method.name), text_(method.self.text()), args_(args) {}
  JinjaValue Call();

 private:
  JinjaValue Text(std::string_view text) { return rt_.String(std::string(text)); }
  BoundArgs Bind(std::initializer_list<const char*> names, size_t required = 0) const {
    return BoundArgs(name_, args_, names, required);
  }
  bool CallCase(JinjaValue* result);
  bool CallPredicate(JinjaValue* result);
  bool CallSplit(JinjaValue* result);
  bool CallSearch(JinjaValue* result);
  bool CallPad(JinjaValue* result);
  JinjaValue Strip();
  JinjaValue SplitOnSpace(JinjaInt max_splits, bool from_right);
  JinjaValue SplitOn(std::string_view separator, JinjaInt max_splits, bool from_right);
  JinjaValue SplitLines();
  JinjaValue Partition(bool from_right);
  JinjaValue Replace();
  JinjaValue Join();
  JinjaValue Affix();
  JinjaValue Count();
  bool All(bool (*predicate)(char32_t)) const;
  bool AllCased(bool (*wanted)(char32_t), bool (*unwanted)(char32_t)) const;

  JinjaRuntime& rt_;
  const std::string& name_;
  std::string_view text_;
  const JinjaArgs& args_;
};

JinjaValue TextMethod::Strip() {
  const BoundArgs args = Bind({"chars"});
  std::string_view chars;
  const bool given = args[0] != nullptr && !args[0]->is_none();
  if (given) {
    chars = args.Text(0, "");
    rt_.Step(static_cast<int64_t>(text_.size() * chars.size() / 64));
  }
  std::string_view text = text_;
  if (name_ != "rstrip") text = PythonStripLeft(text, given ? &chars : nullptr);
  if (name_ != "lstrip") text = PythonStripRight(text, given ? &chars : nullptr);
  return Text(text);
}

JinjaValue TextMethod::SplitOnSpace(JinjaInt max_splits, bool from_right) {
  std::vector<JinjaValue> parts;
  std::string_view rest = text_;
  while (true) {
    rest = from_right ? PythonStripRight(rest, nullptr) : PythonStripLeft(rest, nullptr);
    if (rest.empty()) break;
    if (max_splits >= 0 && static_cast<JinjaInt>(parts.size()) >= max_splits) {
      parts.push_back(Text(rest));
      break;
    }
    // The word at the end, or at the beginning: what white space next to it leaves.
    size_t begin = 0;
    size_t end = rest.size();
    if (from_right) {
      for (size_t p = 0; p < rest.size();) {
        if (IsPythonSpace(NextCodePoint(rest, &p))) begin = p;
      }
    } else {
      for (size_t p = 0; p < rest.size();) {
        const size_t at = p;
        if (IsPythonSpace(NextCodePoint(rest, &p))) {
          end = at;
          break;
        }
      }
    }
    rt_.ScanText(from_right ? rest : rest.substr(0, end));
    parts.push_back(Text(rest.substr(begin, end - begin)));
    rest = from_right ? rest.substr(0, begin) : rest.substr(end);
  }
  if (from_right) std::reverse(parts.begin(), parts.end());
  return rt_.List(std::move(parts));
}

JinjaValue TextMethod::SplitOn(std::string_view separator, JinjaInt max_splits, bool from_right) {
  if (separator.empty()) FailJinja("empty separator");
  std::vector<JinjaValue> parts;
  // From the right: the mirrored text is split from the left, and its parts mirrored back.
  const auto mirrored = [](std::string_view s) { return std::string(s.rbegin(), s.rend()); };
  const std::string text = from_right ? mirrored(text_) : std::string(text_);
  const std::string mark = from_right ? mirrored(separator) : std::string(separator);
  const auto add = [&](std::string_view part) {
    parts.push_back(from_right ? rt_.String(mirrored(part)) : Text(part));
  };
  std::string_view rest = text;
  while (max_splits < 0 || static_cast<JinjaInt>(parts.size()) < max_splits) {
    const size_t at = FindFirst(rest, mark);
    if (at == std::string_view::npos) break;
    add(rest.substr(0, at));
    rest.remove_prefix(at + mark.size());
  }
  add(rest);
  if (from_right) std::reverse(parts.begin(), parts.end());
  return rt_.List(std::move(parts));
}

JinjaValue TextMethod::SplitLines() {
  const bool keep = Bind({"keepends"}).Bool(0, false);
  std::vector<JinjaValue> lines;
  size_t begin = 0;
  for (size_t p = 0; p < text_.size();) {
    const size_t at = p;
    const char32_t c = NextCodePoint(text_, &p);
    const bool ends = (c >= 0xA && c <= 0xD) || (c >= 0x1C && c <= 0x1E) || c == 0x85 ||
                      c == 0x2028 || c == 0x2029;
    if (!ends) continue;
    if (c == '\r' && p < text_.size() && text_[p] == '\n') ++p;
    lines.push_back(Text(text_.substr(begin, (keep ? p : at) - begin)));
    begin = p;
  }
  if (begin < text_.size()) lines.push_back(Text(text_.substr(begin)));
  return rt_.List(std::move(lines));
}

JinjaValue TextMethod::Partition(bool from_right) {
  const BoundArgs args = Bind({"sep"}, 1);
  const std::string_view separator = args.Text(0, "");
  if (separator.empty()) FailJinja("empty separator");
  const size_t at = from_right ? FindLast(text_, separator) : FindFirst(text_, separator);
  if (at == std::string_view::npos) {
    return from_right ? rt_.Tuple({Text(""), Text(""), Text(text_)})
                      : rt_.Tuple({Text(text_), Text(""), Text("")});
  }
  return rt_.Tuple(
      {Text(text_.substr(0, at)), Text(separator), Text(text_.substr(at + separator.size()))});
}

JinjaValue TextMethod::Replace() {
  const BoundArgs args = Bind({"old", "new", "count"}, 2);
  const std::string_view old = args.Text(0, "");
  const std::string_view replacement = args.Text(1, "");
  JinjaInt left = args.Int(2, -1);
  std::string out;
  size_t p = 0;
  const auto append = [this, &out](std::string_view part) {
    rt_.Allocate(part.size());
    out += part;
  };
  while (left != 0) {
    if (old.empty()) {
      // Before each character and at the end.
      append(replacement);
      --left;
      if (p >= text_.size()) break;
      const size_t begin = p;
      NextCodePoint(text_, &p);
      out += text_.substr(begin, p - begin);
      continue;
    }
    const size_t at = FindFirst(text_, old, p);
    if (at == std::string_view::npos) break;
    out += text_.substr(p, at - p);
    append(replacement);
    p = at + old.size();
    --left;
  }
  out += text_.substr(std::min(p, text_.size()));
  return rt_.String(std::move(out));
}

JinjaValue TextMethod::Join() {
  const BoundArgs args = Bind({"iterable"}, 1);
  std::string out;
  bool first = true;
  const auto next = Iterate(rt_, *args[0]);
  for (JinjaValue item; next(&item); first = false) {
    if (!item.is_string()) {
      FailJinja(absl::StrFormat("join(): expected a str, found '%s'", item.TypeName()));
    }
    if (!first) out += text_;
    out += item.text();
    rt_.Allocate(item.text().size() + text_.size());
  }
  return rt_.String(std::move(out));
}

// startswith and endswith: one affix, or a tuple of them.
JinjaValue TextMethod::Affix() {
  const BoundArgs args = Bind({"affix", "start", "end"}, 1);
  std::string_view window;
  int64_t begin = 0;
  if (!Window(args, 1, text_, &window, &begin)) return JinjaValue::Bool(false);
  const bool at_start = name_ == "startswith";
  const auto matches = [&](const JinjaValue& affix) {
    RequireDefined(affix);
    if (!affix.is_string()) {
      FailJinja(
          absl::StrFormat("%s() needs a str or a tuple of str, not '%s'", name_, affix.TypeName()));
    }
    return at_start ? window.starts_with(affix.text()) : window.ends_with(affix.text());
  };
  if (!args[0]->Is(JinjaKind::kTuple)) return JinjaValue::Bool(matches(*args[0]));
  const auto& affixes = args[0]->items();
  return JinjaValue::Bool(std::any_of(affixes.begin(), affixes.end(), matches));
}

JinjaValue TextMethod::Count() {
  const BoundArgs args = Bind({"sub", "start", "end"}, 1);
  std::string_view window;
  int64_t begin = 0;
  if (!Window(args, 1, text_, &window, &begin)) return JinjaValue::Int(0);
  const std::string_view sub = args.Text(0, "");
  if (sub.empty()) return JinjaValue::Int(static_cast<JinjaInt>(CountCodePoints(window)) + 1);
  JinjaInt n = 0;
  for (size_t p = FindFirst(window, sub); p != std::string_view::npos;
       p = FindFirst(window, sub, p + sub.size()))
    ++n;
  return JinjaValue::Int(n);
}

bool TextMethod::CallCase(JinjaValue* result) {
  if (name_ == "upper")
    *result = Text(PythonUpper(text_));
  else if (name_ == "lower")
    *result = Text(PythonLower(text_));
  else if (name_ == "title")
    *result = Text(PythonTitle(text_));
  else if (name_ == "capitalize")
    *result = Text(PythonCapitalize(text_));
  else if (name_ == "swapcase")
    *result = Text(PythonSwapcase(text_));
  else
    return false;
  Bind({});
  return true;
}

bool TextMethod::All(bool (*predicate)(char32_t)) const {
  for (size_t p = 0; p < text_.size();) {
    if (!predicate(NextCodePoint(text_, &p))) return false;
  }
  return !text_.empty();
}

bool TextMethod::AllCased(bool (*wanted)(char32_t), bool (*unwanted)(char32_t)) const {
  bool found = false;
  for (size_t p = 0; p < text_.size();) {
    const char32_t c = NextCodePoint(text_, &p);
    if (unwanted(c)) return false;
    found |= wanted(c);
  }
  return found;
}

bool TextMethod::CallPredicate(JinjaValue* result) {
  bool holds = false;
  if (name_ == "isdigit")
    holds = All(IsPythonDigit);
  else if (name_ == "isalpha")
    holds = All(IsPythonAlpha);
  else if (name_ == "isalnum")
    holds = All(IsPythonAlnum);
  else if (name_ == "isspace")
    holds = All(IsPythonSpace);
  else if (name_ == "islower")
    holds = AllCased(IsPythonLower, IsPythonUpper);
  else if (name_ == "isupper")
    holds = AllCased(IsPythonUpper, IsPythonLower);
  else if (name_ == "isascii")
    holds = text_.empty() || All([](char32_t c) { return c < 0x80; });
  else
    return false;
  Bind({});
  *result = JinjaValue::Bool(holds);
  return true;
}

bool TextMethod::CallSplit(JinjaValue* result) {
  if (name_ == "splitlines") {
    *result = SplitLines();
  } else if (name_ == "partition" || name_ == "rpartition") {
    *result = Partition(name_ == "rpartition");
  } else if (name_ == "split" || name_ == "rsplit") {
    const BoundArgs args = Bind({"sep", "maxsplit"});
    const JinjaInt max_splits = args.Int(1, -1);
    const bool from_right = name_ == "rsplit";
    *result = args[0] == nullptr || args[0]->is_none()
                  ? SplitOnSpace(max_splits, from_right)
                  : SplitOn(args.Text(0, ""), max_splits, from_right);
  } else {
    return false;
  }
  return true;
}

bool TextMethod::CallSearch(JinjaValue* result) {
  const bool index = name_ == "index" || name_ == "rindex";
  if (!index && name_ != "find" && name_ != "rfind") return false;
  const BoundArgs args = Bind({"sub", "start", "end"}, 1);
  const std::string_view sub = args.Text(0, "");
  std::string_view window;
  int64_t begin = 0;
  size_t at = std::string_view::npos;
  if (Window(args, 1, text_, &window, &begin))
    at = name_[0] == 'r' ? FindLast(window, sub) : FindFirst(window, sub);
  if (at == std::string_view::npos && index) FailJinja("substring not found");
  *result = JinjaValue::Int(at == std::string_view::npos ? -1 : begin + CharOffset(window, at));
  return true;
}

bool TextMethod::CallPad(JinjaValue* result) {
  const bool zeros = name_ == "zfill";
  if (!zeros && name_ != "center" && name_ != "ljust" && name_ != "rjust") return false;
  const BoundArgs args = zeros ? Bind({"width"}, 1) : Bind({"width", "fillchar"}, 1);
  const std::string_view fill = zeros ? "0" : args.Text(1, " ");
  if (CountCodePoints(fill) != 1)
    FailJinja("the fill character must be exactly one character long");
  const auto length = static_cast<JinjaInt>(CountCodePoints(text_));
  const JinjaInt missing = std::max<JinjaInt>(0, args.Int(0, 0) - length);
  rt_.Allocate(static_cast<size_t>(std::min<JinjaInt>(missing, JinjaInt{1} << 40)) * fill.size());
  // Python puts the odd character on the left when both the width and what is missing are odd.
  const JinjaInt left = name_ == "ljust"    ? 0
                        : name_ == "center" ? missing / 2 + (missing & args.Int(0, 0) & 1)
                                            : missing;
  const auto repeat = [&fill](JinjaInt n) {
    std::string out;
    for (JinjaInt i = 0; i < n; ++i) out += fill;
    return out;
  };
  const size_t sign = zeros && !text_.empty() && (text_[0] == '-' || text_[0] == '+') ? 1 : 0;
  *result = rt_.String(std::string(text_.substr(0, sign)) + repeat(left) +
                       std::string(text_.substr(sign)) + repeat(missing - left));
  return true;
}

JinjaValue TextMethod::Call() {
  rt_.ScanText(text_);
  JinjaValue result;
  if (CallCase(&result) || CallPredicate(&result) || CallSplit(&result) || CallSearch(&result) ||
      CallPad(&result)) {
    return result;
  }
  if (name_ == "strip" || name_ == "lstrip" || name_ == "rstrip") return Strip();
  if (name_ == "replace") return Replace();
  if (name_ == "join") return Join();
  if (name_ == "startswith" || name_ == "endswith") return Affix();
  if (name_ == "count") return Count();
  if (name_ == "format") return rt_.String(BraceFormat(rt_, text_, args_));
  if (name_ == "removeprefix") {
    const BoundArgs args = Bind({"prefix"}, 1);
    const std::string_view prefix = args.Text(0, "");
    return Text(text_.starts_with(prefix) ? text_.substr(prefix.size()) : text_);
  }
  if (name_ == "removesuffix") {
    const BoundArgs args = Bind({"suffix"}, 1);
    const std::string_view suffix = args.Text(0, "");
    return Text(text_.ends_with(suffix) ? text_.substr(0, text_.size() - suffix.size()) : text_);
  }
  FailUnsupported(absl::StrFormat("the method '%s' of a str is not supported", name_));
}

// Text that was marked safe escapes the arguments of its methods and gives results that are marked,
// too.
JinjaValue CallMarkupMethod(JinjaRuntime& rt, const JinjaMethod& method, const JinjaArgs& args) {
  const auto escape = [&rt](const JinjaValue& v) {
    return v.is_string() && !v.markup() ? rt.String(EscapeHtml(v.text()), true) : v;
  };
  JinjaArgs escaped = args;
  for (JinjaValue& v : escaped.positional) v = escape(v);
  for (auto& [name, v] : escaped.named) v = escape(v);
  if (method.name == "join" && !escaped.positional.empty()) {
    std::vector<JinjaValue> items = ToVector(rt, args.positional[0]);
    for (JinjaValue& v : items) v = escape(v);
    escaped.positional[0] = rt.List(std::move(items));
  }
  const JinjaValue result = TextMethod(rt, method, escaped).Call();
  const auto mark = [&rt](const JinjaValue& v) {
    return v.is_string() ? rt.String(std::string(v.text()), true) : v;
  };
  if (!result.is_sequence()) return mark(result);
  std::vector<JinjaValue> items = result.items();
  for (JinjaValue& v : items) v = mark(v);
  return rt.Sequence(result.kind(), std::move(items));
}

}  // namespace

JinjaValue CallJinjaTextMethod(JinjaRuntime& rt, const JinjaMethod& method, const JinjaArgs& args) {
  if (method.self.markup()) return CallMarkupMethod(rt, method, args);
  return TextMethod(rt, method, args).Call();
}

}  // namespace lockstep

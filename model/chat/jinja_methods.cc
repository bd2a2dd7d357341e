// The names of methods, and the methods of dict, list, tuple and of the loop variable.
#include "model/chat/jinja_methods.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/str_format.h"

namespace lockstep {
namespace {

template <size_t n>
bool Has(const std::string_view (&names)[n], std::string_view name) {
  return std::find(std::begin(names), std::end(names), name) != std::end(names);
}

// What is called in templates...
constexpr std::string_view kTextMethods[] = {
    "strip",      "lstrip",   "rstrip",  "split",   "rsplit",       "splitlines",
    "startswith", "endswith", "upper",   "lower",   "title",        "capitalize",
    "swapcase",   "replace",  "find",    "rfind",   "index",        "rindex",
    "join",       "format",   "count",   "isdigit", "isalpha",      "isalnum",
    "isspace",    "islower",  "isupper", "isascii", "removeprefix", "removesuffix",
    "center",     "ljust",    "rjust",   "zfill",   "partition",    "rpartition"};
constexpr std::string_view kDictMethods[] = {"items", "keys", "values", "get", "copy"};
constexpr std::string_view kListMethods[] = {"index", "count", "copy"};
constexpr std::string_view kTupleMethods[] = {"index", "count"};
constexpr std::string_view kLoopMethods[] = {"cycle", "changed"};
// ... and what Python has besides: an attribute that hides a key of the same name, and is refused
// by name when called.
constexpr std::string_view kOtherTextMethods[] = {
    "casefold",  "encode",      "expandtabs", "format_map", "isdecimal", "isidentifier",
    "isnumeric", "isprintable", "istitle",    "maketrans",  "translate"};
constexpr std::string_view kOtherDictMethods[] = {"clear",   "fromkeys",   "pop",
                                                  "popitem", "setdefault", "update"};
constexpr std::string_view kOtherListMethods[] = {"append", "clear",  "extend",  "insert",
                                                  "pop",    "remove", "reverse", "sort"};

JinjaValue CallDictMethod(JinjaRuntime& rt, const JinjaMethod& method, const JinjaArgs& args) {
  const JinjaDict& dict = method.self.dict();
  const std::string& name = method.name;
  rt.Step(1 + static_cast<int64_t>(dict.items.size() / 8));
  if (name == "get") {
    if (!args.named.empty()) FailJinja("get() takes no named arguments");
    const BoundArgs bound(name, args, {"key", "default"}, 1);
    const JinjaValue* found = FindKey(rt, dict, *bound[0]);
    if (found != nullptr) return *found;
    return bound[1] == nullptr ? JinjaValue::None() : *bound[1];
  }
  BoundArgs(name, args, {});
  if (name == "copy") return method.self;
  std::vector<JinjaValue> items;
  for (const auto& [key, value] : dict.items) {
    items.push_back(name == "keys" ? key : name == "values" ? value : rt.Tuple({key, value}));
  }
  return rt.Sequence(name == "keys"     ? JinjaKind::kKeys
                     : name == "values" ? JinjaKind::kValues
                                        : JinjaKind::kItems,
                     std::move(items));
}

JinjaValue CallListMethod(JinjaRuntime& rt, const JinjaMethod& method, const JinjaArgs& args) {
  const auto& items = method.self.items();
  rt.Step(static_cast<int64_t>(items.size()));
  if (method.name == "copy") {
    BoundArgs(method.name, args, {});
    return method.self;
  }
  const BoundArgs bound(method.name, args, {"value"}, 1);
  const auto equal = [&rt, &bound](const JinjaValue& item) { return Equal(rt, item, *bound[0]); };
  if (method.name == "count") {
    return JinjaValue::Int(std::count_if(items.begin(), items.end(), equal));
  }
  const auto it = std::find_if(items.begin(), items.end(), equal);
  if (it == items.end()) FailJinja(PythonRepr(rt, *bound[0]) + " is not in list");
  return JinjaValue::Int(it - items.begin());
}

JinjaValue CallLoopMethod(JinjaRuntime& rt, const JinjaMethod& method, const JinjaArgs& args) {
  JinjaLoop& loop = method.self.loop();
  if (!args.named.empty()) FailJinja(method.name + "() takes no named arguments");
  if (method.name == "cycle") {
    if (args.positional.empty()) FailJinja("no items for cycling given");
    return args.positional[static_cast<size_t>(loop.index0) % args.positional.size()];
  }
  const JinjaValue values = rt.Tuple(args.positional);
  const bool changed = !loop.changed_called || !Equal(rt, values, loop.last_changed);
  loop.changed_called = true;
  loop.last_changed = values;
  loop.depth = std::max(loop.depth, values.depth() + 1);
  return JinjaValue::Bool(changed);
}

}  // namespace

bool IsJinjaMethodName(std::string_view name) {
  return Has(kTextMethods, name) || Has(kDictMethods, name) || Has(kListMethods, name) ||
         Has(kLoopMethods, name) || Has(kOtherTextMethods, name) || Has(kOtherDictMethods, name) ||
         Has(kOtherListMethods, name);
}

bool HasMethod(const JinjaValue& value, std::string_view name) {
  switch (value.kind()) {
    case JinjaKind::kString:
      return Has(kTextMethods, name) || Has(kOtherTextMethods, name);
    case JinjaKind::kDict:
      return Has(kDictMethods, name) || Has(kOtherDictMethods, name);
    case JinjaKind::kList:
      return Has(kListMethods, name) || Has(kOtherListMethods, name);
    case JinjaKind::kTuple:
      return Has(kTupleMethods, name);
    case JinjaKind::kLoop:
      return Has(kLoopMethods, name);
    default:
      return false;
  }
}

JinjaValue CallMethod(JinjaRuntime& rt, const JinjaMethod& method, const JinjaArgs& args) {
  const JinjaValue& self = method.self;
  if (self.is_string()) return CallJinjaTextMethod(rt, method, args);
  if (self.is_dict() && Has(kDictMethods, method.name)) return CallDictMethod(rt, method, args);
  if (self.Is(JinjaKind::kLoop)) return CallLoopMethod(rt, method, args);
  if (self.is_sequence() && Has(kListMethods, method.name)) return CallListMethod(rt, method, args);
  FailUnsupported(
      absl::StrFormat("the method '%s' of a %s is not supported", method.name, self.TypeName()));
}

}  // namespace lockstep

// The tests behind `is`.
#include <algorithm>
#include <iterator>

#include "absl/strings/str_format.h"
#include "model/chat/jinja_ops.h"
#include "model/chat/python_text.h"

namespace lockstep {
namespace {

using Rt = JinjaRuntime&;
using V = const JinjaValue&;
using Args = const JinjaArgs&;

const JinjaValue& Only(const char* test, Args args) {
  if (args.positional.size() != 1 || !args.named.empty()) {
    FailJinja(absl::StrFormat("the test '%s' takes one argument", test));
  }
  return args.positional[0];
}

JinjaInt Remainder(JinjaRuntime& rt, V v, JinjaInt divisor) {
  if (!v.is_number()) {
    RequireDefined(v);
    FailJinja(absl::StrFormat("'%s' is no number to divide", v.TypeName()));
  }
  const JinjaValue r = Arithmetic(rt, "%", v, JinjaValue::Int(divisor));
  return r.is_int() ? r.int_value() : (r.float_value() == 0 ? 0 : r.float_value() == 1 ? 1 : 2);
}

bool IsCasedAs(JinjaRuntime& rt, V v, const char* method) {
  const JinjaMethod call{rt.String(PythonStr(rt, v)), method};
  return CallMethod(rt, call, {}).bool_value();
}

bool Divisible(Rt rt, V v, Args args) {
  const JinjaValue& divisor = Only("divisibleby", args);
  return Equal(rt, Arithmetic(rt, "%", v, divisor), JinjaValue::Int(0));
}

bool IsIterable(Rt, V v, Args) {
  return v.is_sequence() || v.is_dict() || v.is_string() || v.is_undefined() ||
         v.Is(JinjaKind::kIterator) || v.Is(JinjaKind::kLoop);
}

bool IsSequence(Rt, V v, Args) {
  return v.Is(JinjaKind::kList) || v.Is(JinjaKind::kTuple) || v.Is(JinjaKind::kRange) ||
         v.is_dict() || v.is_string() || v.is_undefined();
}

bool IsSame(Rt rt, V v, Args args) {
  const JinjaValue& other = Only("sameas", args);
  if (v.kind() != other.kind()) return false;
  if (v.is_none() || v.Is(JinjaKind::kBool) || v.Is(JinjaKind::kNamespace))
    return Equal(rt, v, other);
  FailUnsupported(absl::StrFormat("the test 'sameas' of a %s", v.TypeName()));
}

struct NamedTest {
  std::string_view name;
  JinjaTest test;
};

const NamedTest kTests[] = {
    {"defined", [](Rt, V v, Args) { return !v.is_undefined(); }},
    {"undefined", [](Rt, V v, Args) { return v.is_undefined(); }},
    {"none", [](Rt, V v, Args) { return v.is_none(); }},
    {"boolean", [](Rt, V v, Args) { return v.Is(JinjaKind::kBool); }},
    {"true", [](Rt, V v, Args) { return v.Is(JinjaKind::kBool) && v.bool_value(); }},
    {"false", [](Rt, V v, Args) { return v.Is(JinjaKind::kBool) && !v.bool_value(); }},
    {"integer", [](Rt, V v, Args) { return v.Is(JinjaKind::kInt); }},
    {"float", [](Rt, V v, Args) { return v.Is(JinjaKind::kFloat); }},
    {"number", [](Rt, V v, Args) { return v.is_number(); }},
    {"string", [](Rt, V v, Args) { return v.is_string(); }},
    {"mapping", [](Rt, V v, Args) { return v.is_dict(); }},
    {"sequence", IsSequence},
    {"iterable", IsIterable},
    {"callable",
     [](Rt, V v, Args) {
       return v.Is(JinjaKind::kFunction) || v.Is(JinjaKind::kMethod) || v.Is(JinjaKind::kMacro) ||
              v.Is(JinjaKind::kLoop) || v.is_undefined();
     }},
    {"escaped", [](Rt, V v, Args) { return v.markup(); }},
    {"odd", [](Rt rt, V v, Args) { return Remainder(rt, v, 2) == 1; }},
    {"even", [](Rt rt, V v, Args) { return Remainder(rt, v, 2) == 0; }},
    {"divisibleby", Divisible},
    {"lower", [](Rt rt, V v, Args) { return IsCasedAs(rt, v, "islower"); }},
    {"upper", [](Rt rt, V v, Args) { return IsCasedAs(rt, v, "isupper"); }},
    {"sameas", IsSame},
    {"in", [](Rt rt, V v, Args args) { return Contains(rt, Only("in", args), v); }},
    {"filter", [](Rt, V v, Args) { return v.is_string() && FindJinjaFilter(v.text()) != nullptr; }},
    {"test", [](Rt, V v, Args) { return v.is_string() && FindJinjaTest(v.text()) != nullptr; }},
    {"eq", [](Rt rt, V v, Args args) { return Equal(rt, v, Only("eq", args)); }},
    {"ne", [](Rt rt, V v, Args args) { return !Equal(rt, v, Only("ne", args)); }},
    {"lt", [](Rt rt, V v, Args args) { return Less(rt, v, Only("lt", args)); }},
    {"le", [](Rt rt, V v, Args args) { return Less(rt, v, Only("le", args), "<="); }},
    {"gt", [](Rt rt, V v, Args args) { return Less(rt, Only("gt", args), v); }},
    {"ge", [](Rt rt, V v, Args args) { return Less(rt, Only("ge", args), v, "<="); }},
};

constexpr std::pair<std::string_view, std::string_view> kAliases[] = {
    {"==", "eq"}, {"equalto", "eq"}, {"!=", "ne"},          {"<", "lt"}, {"lessthan", "lt"},
    {"<=", "le"}, {">", "gt"},       {"greaterthan", "gt"}, {">=", "ge"}};

}  // namespace

JinjaTest FindJinjaTest(std::string_view name) {
  for (const auto& [alias, target] : kAliases) {
    if (alias == name) name = target;
  }
  for (const NamedTest& t : kTests) {
    if (t.name == name) return t.test;
  }
  return nullptr;
}

}  // namespace lockstep

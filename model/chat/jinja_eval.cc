#include <algorithm>
#include <ctime>

#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "model/chat/jinja_interpreter.h"
#include "model/chat/python_text.h"

namespace lockstep {
namespace {

struct NamedFunction {
  std::string_view name;
  JinjaFunction function;
};

constexpr NamedFunction kFunctions[] = {{"range", JinjaFunction::kRange},
                                        {"dict", JinjaFunction::kDict},
                                        {"namespace", JinjaFunction::kNamespace},
                                        {"raise_exception", JinjaFunction::kRaiseException},
                                        {"strftime_now", JinjaFunction::kStrftimeNow}};

}  // namespace

JinjaValue JinjaInterpreter::Eval(const JinjaExpr& expr, JinjaScope* scope) {
  using Kind = JinjaExprKind;
  const Recursion recursion(this, expr.line);
  const auto child = [&](size_t i) { return Eval(*expr.children[i], scope); };
  switch (expr.kind) {
    case Kind::kConst:
      return expr.constant;
    case Kind::kName:
      return EvalName(expr, scope);
    case Kind::kTuple:
      return rt_.Tuple(EvalAll(expr.children, scope));
    case Kind::kList:
      return rt_.List(EvalAll(expr.children, scope));
    case Kind::kDict:
      return EvalDict(expr, scope);
    case Kind::kGetAttribute:
      return GetAttribute(rt_, child(0), expr.name);
    case Kind::kGetItem: {
      const JinjaValue value = child(0);
      return GetItem(rt_, value, child(1));
    }
    case Kind::kSlice:
      return EvalSlice(expr, scope);
    case Kind::kCall: {
      const JinjaValue callee = child(0);
      return Call(callee, EvalArgs(expr.call, scope));
    }
    case Kind::kFilter:
      return EvalFilter(expr, scope, nullptr);
    case Kind::kTest: {
      const JinjaValue value = child(0);
      return JinjaValue::Bool(expr.test(rt_, value, EvalArgs(expr.call, scope)));
    }
    case Kind::kNot:
      return JinjaValue::Bool(!child(0).Truthy());
    case Kind::kNegate:
      return Negate(child(0));
    case Kind::kPositive:
      return Negate(Negate(child(0)));
    case Kind::kAnd: {
      JinjaValue left = child(0);
      return left.Truthy() ? child(1) : left;
    }
    case Kind::kOr: {
      JinjaValue left = child(0);
      return left.Truthy() ? left : child(1);
    }
    case Kind::kConditional:
      return EvalConditional(expr, scope);
    case Kind::kArithmetic: {
      const JinjaValue left = child(0);
      return Arithmetic(rt_, expr.name, left, child(1));
    }
    case Kind::kConcat:
      return EvalConcat(expr, scope);
    case Kind::kCompare:
      return EvalCompare(expr, scope);
    case Kind::kNamespaceRef:
      break;  // a target only
  }
  FailJinja("internal error: an expression of no kind");
}

JinjaValue JinjaInterpreter::EvalName(const JinjaExpr& expr, JinjaScope* scope) {
  for (JinjaScope* s = scope; s != nullptr; s = s->parent) {
    if (const JinjaValue* value = s->Find(expr.name)) return *value;
  }
  for (const NamedFunction& f : kFunctions) {
    if (f.name == expr.name) return JinjaValue::Function(f.function);
  }
  return JinjaValue::Undefined(absl::StrFormat("'%s' is undefined", expr.name));
}

std::vector<JinjaValue> JinjaInterpreter::EvalAll(const std::vector<JinjaExprPtr>& exprs,
                                                  JinjaScope* scope) {
  std::vector<JinjaValue> values;
  values.reserve(exprs.size());
  for (const JinjaExprPtr& expr : exprs) values.push_back(Eval(*expr, scope));
  return values;
}

JinjaValue JinjaInterpreter::EvalDict(const JinjaExpr& expr, JinjaScope* scope) {
  std::vector<JinjaPair> items;
  for (size_t i = 0; i + 1 < expr.children.size(); i += 2) {
    JinjaValue key = Eval(*expr.children[i], scope);
    JinjaValue value = Eval(*expr.children[i + 1], scope);
    items.emplace_back(std::move(key), std::move(value));
  }
  return rt_.Dict(std::move(items));
}

JinjaValue JinjaInterpreter::EvalSlice(const JinjaExpr& expr, JinjaScope* scope) {
  const auto part = [&](size_t i) {
    return expr.children[i] == nullptr ? JinjaValue::None() : Eval(*expr.children[i], scope);
  };
  const JinjaValue value = part(0);
  const JinjaValue start = part(1);
  const JinjaValue stop = part(2);
  return Slice(rt_, value, start, stop, part(3));
}

JinjaValue JinjaInterpreter::EvalCompare(const JinjaExpr& expr, JinjaScope* scope) {
  JinjaValue left = Eval(*expr.children[0], scope);
  for (size_t i = 0; i < expr.operators.size(); ++i) {
    JinjaValue right = Eval(*expr.children[i + 1], scope);
    const std::string& op = expr.operators[i];
    bool holds = false;
    if (op == "==") {
      holds = Equal(rt_, left, right);
    } else if (op == "!=") {
      holds = !Equal(rt_, left, right);
    } else if (op == "<") {
      holds = Less(rt_, left, right);
    } else if (op == "<=") {
      holds = Less(rt_, left, right, "<=");
    } else if (op == ">") {
      holds = Less(rt_, right, left);
    } else if (op == ">=") {
      holds = Less(rt_, right, left, "<=");
    } else {
      holds = Contains(rt_, right, left) == (op == "in");
    }
    if (!holds) return JinjaValue::Bool(false);
    left = std::move(right);
  }
  return JinjaValue::Bool(true);
}

JinjaValue JinjaInterpreter::EvalConcat(const JinjaExpr& expr, JinjaScope* scope) {
  std::string text;
  for (const JinjaExprPtr& part : expr.children) text += PythonStr(rt_, Eval(*part, scope));
  return rt_.String(std::move(text));
}

JinjaValue JinjaInterpreter::EvalConditional(const JinjaExpr& expr, JinjaScope* scope) {
  if (Eval(*expr.children[0], scope).Truthy()) return Eval(*expr.children[1], scope);
  if (expr.children.size() > 2) return Eval(*expr.children[2], scope);
  return JinjaValue::Undefined(
      absl::StrFormat("the inline if-expression on line %d is false and has no else", expr.line));
}

JinjaValue JinjaInterpreter::EvalFilter(const JinjaExpr& expr, JinjaScope* scope,
                                        const JinjaValue* head) {
  JinjaValue value;
  if (expr.children[0] == nullptr) {
    value = *head;
  } else if (head != nullptr) {
    const Recursion recursion(this, expr.line);
    value = EvalFilter(*expr.children[0], scope, head);
  } else {
    value = Eval(*expr.children[0], scope);
  }
  return expr.filter(rt_, value, EvalArgs(expr.call, scope));
}

JinjaArgs JinjaInterpreter::EvalArgs(const JinjaCallArgs& call, JinjaScope* scope) {
  JinjaArgs args;
  args.positional = EvalAll(call.positional, scope);
  for (const auto& [name, expr] : call.named) args.named.emplace_back(name, Eval(*expr, scope));
  if (call.star != nullptr) {
    for (JinjaValue& value : ToVector(rt_, Eval(*call.star, scope))) {
      args.positional.push_back(std::move(value));
    }
  }
  if (call.star_star != nullptr) {
    const JinjaValue named = Eval(*call.star_star, scope);
    if (!named.is_dict()) FailJinja("the argument behind ** must be a mapping");
    for (const auto& [key, value] : named.dict().items) {
      if (!key.is_string()) FailJinja("names of arguments must be strings");
      args.named.emplace_back(std::string(key.text()), value);
    }
  }
  return args;
}

JinjaValue JinjaInterpreter::Call(const JinjaValue& callee, JinjaArgs args) {
  switch (callee.kind()) {
    case JinjaKind::kUndefined:
      FailJinja(callee.undefined_message());
    case JinjaKind::kMacro:
      return CallMacro(callee.macro(), std::move(args));
    case JinjaKind::kMethod:
      return CallMethod(rt_, callee.method(), args);
    case JinjaKind::kFunction:
      return CallFunction(callee.function(), args);
    case JinjaKind::kLoop:
      FailUnsupported("recursive loops are not supported");
    default:
      FailJinja(absl::StrFormat("'%s' object is not callable", callee.TypeName()));
  }
}

JinjaValue JinjaInterpreter::CallFunction(JinjaFunction function, const JinjaArgs& args) {
  switch (function) {
    case JinjaFunction::kRange: {
      const BoundArgs bound("range", args, {"start", "stop", "step"}, 1);
      if (bound[1] == nullptr) return rt_.Range(0, bound.Int(0, 0), 1);
      return rt_.Range(bound.Int(0, 0), bound.Int(1, 0), bound.Int(2, 1));
    }
    case JinjaFunction::kDict:
      return NewDict(args, "dict");
    case JinjaFunction::kNamespace:
      return NewNamespace(args);
    case JinjaFunction::kRaiseException: {
      const BoundArgs bound("raise_exception", args, {"message"}, 1);
      throw JinjaError{absl::StatusCode::kAborted, PythonStr(rt_, *bound[0])};
    }
    case JinjaFunction::kStrftimeNow:
      return StrftimeNow(args);
  }
  FailJinja("internal error: an unknown function");
}

// dict(mapping or pairs, name=value, ...)
JinjaValue JinjaInterpreter::NewDict(const JinjaArgs& args, const char* callee) {
  if (args.positional.size() > 1)
    FailJinja(absl::StrFormat("%s() takes at most 1 argument", callee));
  std::vector<JinjaPair> items;
  if (!args.positional.empty()) {
    const JinjaValue& source = args.positional[0];
    if (source.is_dict()) {
      items = source.dict().items;
    } else {
      for (const JinjaValue& pair : ToVector(rt_, source)) {
        const std::vector<JinjaValue> parts = ToVector(rt_, pair);
        if (parts.size() != 2)
          FailJinja(absl::StrFormat("%s(): a pair has %d parts", callee, parts.size()));
        items.emplace_back(parts[0], parts[1]);
      }
    }
  }
  for (const auto& [name, value] : args.named) items.emplace_back(rt_.String(name), value);
  return rt_.Dict(std::move(items));
}

JinjaValue JinjaInterpreter::NewNamespace(const JinjaArgs& args) {
  std::vector<std::pair<std::string, JinjaValue>> attributes;
  const JinjaValue dict = NewDict(args, "namespace");
  for (const auto& [key, value] : dict.dict().items) {
    if (!key.is_string()) FailJinja("namespace(): names must be strings");
    attributes.emplace_back(std::string(key.text()), value);
  }
  return rt_.Namespace(std::move(attributes));
}

JinjaValue JinjaInterpreter::StrftimeNow(const JinjaArgs& args) {
  const BoundArgs bound("strftime_now", args, {"format"}, 1);
  const auto now = rt_.options().now.value_or(std::chrono::system_clock::now());
  const std::time_t seconds = std::chrono::system_clock::to_time_t(now);
  std::tm local{};
  localtime_r(&seconds, &local);
  // Python's datetime is naive here: its zone is empty, and %f is its own.
  const auto since_epoch =
      std::chrono::duration_cast<std::chrono::microseconds>(now.time_since_epoch());
  const std::string format =
      absl::StrReplaceAll(std::string(bound.Text(0, "")),
                          {{"%%", "%%"},
                           {"%f", absl::StrFormat("%06d", since_epoch.count() % 1000000)},
                           {"%z", ""},
                           {"%Z", ""}});
  if (format.empty()) return JinjaValue::String("");
  // strftime gives 0 both for an empty result and for a buffer that is too small: a mark keeps the
  // result from being empty.
  std::string buffer(format.size() * 4 + 1024, '\0');
  const size_t n = std::strftime(buffer.data(), buffer.size(), (format + "|").c_str(), &local);
  if (n == 0) FailUnsupported("strftime_now(): a result of this length");
  buffer.resize(n - 1);
  return rt_.String(std::move(buffer));
}

}  // namespace lockstep

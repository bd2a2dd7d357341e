#include "model/chat/jinja_interpreter.h"

#include <algorithm>

#include "absl/strings/str_format.h"

namespace lockstep {

JinjaValue* JinjaScope::Find(std::string_view name) {
  for (auto& [key, value] : variables) {
    if (key == name) return &value;
  }
  return nullptr;
}

void JinjaScope::Set(const std::string& name, JinjaValue value) {
  if (JinjaValue* known = Find(name)) {
    *known = std::move(value);
  } else {
    variables.emplace_back(name, std::move(value));
  }
}

JinjaInterpreter::Recursion::Recursion(JinjaInterpreter* interpreter, int line)
    : interpreter_(interpreter) {
  const int limit = interpreter->rt_.options().limits.max_recursion;
  if (interpreter->recursion_ >= limit) {
    throw JinjaError{absl::StatusCode::kResourceExhausted,
                     absl::StrFormat("the rendering recurses deeper than %d levels (limit "
                                     "max_recursion)",
                                     limit)};
  }
  ++interpreter->recursion_;
  interpreter->line_ = line;
  interpreter->rt_.Step();
}

JinjaInterpreter::~JinjaInterpreter() {
  for (const auto& scope : kept_) scope->variables.clear();
}

std::string JinjaInterpreter::Run(const JinjaProgram& program, JinjaScope variables) {
  std::string out;
  const auto scope = NewScope(&variables);
  ExecBody(program.body, scope.get(), &out);
  return out;
}

std::unique_ptr<JinjaScope> JinjaInterpreter::NewScope(JinjaScope* parent) {
  auto scope = std::make_unique<JinjaScope>();
  scope->parent = parent;
  return scope;
}

void JinjaInterpreter::Retire(std::unique_ptr<JinjaScope> scope) {
  if (!scope->captured) return;
  rt_.Allocate(sizeof(JinjaScope) + scope->variables.size() * sizeof(scope->variables[0]));
  kept_.push_back(std::move(scope));
}

void JinjaInterpreter::Write(std::string_view text, std::string* out) {
  const int64_t limit = rt_.options().limits.max_output_bytes;
  if (static_cast<int64_t>(out->size() + text.size()) > limit) {
    throw JinjaError{
        absl::StatusCode::kResourceExhausted,
        absl::StrFormat("the rendered text exceeds %d bytes (limit max_output_bytes)", limit)};
  }
  rt_.Allocate(text.size());
  *out += text;
}

JinjaInterpreter::Flow JinjaInterpreter::ExecBody(const JinjaBody& body, JinjaScope* scope,
                                                  std::string* out) {
  for (const auto& node : body) {
    const Flow flow = Exec(*node, scope, out);
    if (flow != Flow::kNormal) return flow;
  }
  return Flow::kNormal;
}

JinjaInterpreter::Flow JinjaInterpreter::ExecInner(const JinjaBody& body, JinjaScope* scope,
                                                   std::string* out) {
  auto inner = NewScope(scope);
  const Flow flow = ExecBody(body, inner.get(), out);
  Retire(std::move(inner));
  return flow;
}

JinjaInterpreter::Flow JinjaInterpreter::Exec(const JinjaNode& node, JinjaScope* scope,
                                              std::string* out) {
  const Recursion recursion(this, node.line);
  switch (node.kind) {
    case JinjaNodeKind::kText:
      Write(node.text, out);
      break;
    case JinjaNodeKind::kOutput:
      Write(PythonStr(rt_, Eval(*node.expr, scope)), out);
      break;
    case JinjaNodeKind::kIf:
      return ExecIf(node, scope, out);
    case JinjaNodeKind::kFor:
      return ExecFor(node, scope, out);
    case JinjaNodeKind::kSet:
      Assign(*node.target, Eval(*node.expr, scope), scope);
      break;
    case JinjaNodeKind::kSetBlock:
      return ExecSetBlock(node, scope);
    case JinjaNodeKind::kMacro:
      scope->Set(node.macro->name, NewMacro(node.macro.get(), scope));
      break;
    case JinjaNodeKind::kCallBlock:
      ExecCallBlock(node, scope, out);
      break;
    case JinjaNodeKind::kFilterBlock:
      return ExecFilterBlock(node, scope, out);
    case JinjaNodeKind::kWith:
      return ExecWith(node, scope, out);
    case JinjaNodeKind::kGeneration:
      return ExecInner(node.body, scope, out);
    case JinjaNodeKind::kBreak:
      return Flow::kBreak;
    case JinjaNodeKind::kContinue:
      return Flow::kContinue;
  }
  return Flow::kNormal;
}

JinjaInterpreter::Flow JinjaInterpreter::ExecIf(const JinjaNode& node, JinjaScope* scope,
                                                std::string* out) {
  // No scope of its own: what a branch sets stays set.
  for (const auto& [condition, body] : node.branches) {
    if (Eval(*condition, scope).Truthy()) return ExecBody(body, scope, out);
  }
  return ExecBody(node.else_body, scope, out);
}

std::shared_ptr<JinjaLoop> JinjaInterpreter::NewLoop(const JinjaNode& node, JinjaScope* scope) {
  const JinjaValue iterable = Eval(*node.expr, scope);
  auto loop = std::make_shared<JinjaLoop>();
  loop->depth = iterable.depth() + 1;
  loop->source = Iterate(rt_, iterable);
  if (node.condition != nullptr) {
    loop->source = [this, &node, scope, all = std::move(loop->source)](JinjaValue* item) {
      while (all(item)) {
        JinjaScope inner;
        inner.parent = scope;
        Assign(*node.target, *item, &inner);
        if (Eval(*node.condition, &inner).Truthy()) return true;
      }
      return false;
    };
  }
  return loop;
}

JinjaInterpreter::Flow JinjaInterpreter::ExecFor(const JinjaNode& node, JinjaScope* scope,
                                                 std::string* out) {
  const std::shared_ptr<JinjaLoop> loop = NewLoop(node, scope);
  // As in jinja2, a pass that break or continue ended does not keep the else part from running.
  bool completed = false;
  for (JinjaValue item; loop->Next(&item);) {
    rt_.Step();
    auto inner = NewScope(scope);
    inner->Set("loop", JinjaValue::Loop(loop));
    Assign(*node.target, item, inner.get());
    const Flow flow = ExecBody(node.body, inner.get(), out);
    Retire(std::move(inner));
    if (flow == Flow::kNormal) completed = true;
    if (flow == Flow::kBreak) break;
  }
  // `loop` may outlive the loop in a namespace; its source may not, as it looks into `scope`.
  loop->exhausted = true;
  loop->source = nullptr;
  return completed ? Flow::kNormal : ExecInner(node.else_body, scope, out);
}

JinjaInterpreter::Flow JinjaInterpreter::ExecWith(const JinjaNode& node, JinjaScope* scope,
                                                  std::string* out) {
  auto inner = NewScope(scope);
  for (const auto& [target, value] : node.bindings)
    Assign(*target, Eval(*value, scope), inner.get());
  const Flow flow = ExecBody(node.body, inner.get(), out);
  Retire(std::move(inner));
  return flow;
}

JinjaInterpreter::Flow JinjaInterpreter::ExecSetBlock(const JinjaNode& node, JinjaScope* scope) {
  std::string text;
  const Flow flow = ExecInner(node.body, scope, &text);
  if (flow != Flow::kNormal) return flow;
  JinjaValue value = rt_.String(std::move(text));
  if (node.filter != nullptr) value = EvalFilter(*node.filter, scope, &value);
  Assign(*node.target, value, scope);
  return flow;
}

JinjaInterpreter::Flow JinjaInterpreter::ExecFilterBlock(const JinjaNode& node, JinjaScope* scope,
                                                         std::string* out) {
  std::string text;
  const Flow flow = ExecInner(node.body, scope, &text);
  if (flow != Flow::kNormal) return flow;
  const JinjaValue value = rt_.String(std::move(text));
  Write(PythonStr(rt_, EvalFilter(*node.filter, scope, &value)), out);
  return flow;
}

void JinjaInterpreter::ExecCallBlock(const JinjaNode& node, JinjaScope* scope, std::string* out) {
  const JinjaValue callee = Eval(*node.expr->children[0], scope);
  JinjaArgs args = EvalArgs(node.expr->call, scope);
  args.named.emplace_back("caller", NewMacro(node.macro.get(), scope));
  Write(PythonStr(rt_, Call(callee, std::move(args))), out);
}

void JinjaInterpreter::Assign(const JinjaExpr& target, const JinjaValue& value, JinjaScope* scope) {
  if (target.kind == JinjaExprKind::kName) {
    scope->Set(target.name, value);
    return;
  }
  if (target.kind == JinjaExprKind::kNamespaceRef) {
    JinjaValue* ns = nullptr;
    for (JinjaScope* s = scope; s != nullptr && ns == nullptr; s = s->parent)
      ns = s->Find(target.name);
    if (ns == nullptr || !ns->Is(JinjaKind::kNamespace)) {
      FailJinja(absl::StrFormat("cannot assign attribute '%s': '%s' is no namespace",
                                target.attribute, target.name));
    }
    if (JinjaValue* known = ns->ns()->Find(target.attribute)) {
      *known = value;
    } else {
      rt_.Allocate(sizeof(JinjaPair));
      ns->ns()->attributes.emplace_back(target.attribute, value);
    }
    return;
  }
  const size_t wanted = target.children.size();
  const auto next = Iterate(rt_, value);
  std::vector<JinjaValue> items;
  for (JinjaValue item; next(&item);) {
    if (items.size() == wanted) {
      FailJinja(absl::StrFormat("too many values to unpack (expected %d)", wanted));
    }
    items.push_back(item);
  }
  if (items.size() < wanted) {
    FailJinja(
        absl::StrFormat("not enough values to unpack (expected %d, got %d)", wanted, items.size()));
  }
  for (size_t i = 0; i < wanted; ++i) Assign(*target.children[i], items[i], scope);
}

JinjaValue JinjaInterpreter::NewMacro(const JinjaMacroBody* body, JinjaScope* scope) {
  for (JinjaScope* s = scope; s != nullptr && !s->captured; s = s->parent) s->captured = true;
  rt_.Allocate(sizeof(JinjaMacro));
  return JinjaValue::Macro(std::make_shared<const JinjaMacro>(JinjaMacro{body, scope}));
}

void JinjaInterpreter::BindMacro(const JinjaMacroBody& macro, JinjaArgs* args, JinjaScope* scope) {
  const auto take = [args](const std::string& name, JinjaValue* value) {
    const auto it = std::find_if(args->named.begin(), args->named.end(),
                                 [&name](const auto& argument) { return argument.first == name; });
    if (it == args->named.end()) return false;
    *value = std::move(it->second);
    args->named.erase(it);
    return true;
  };
  const size_t positional = std::min(args->positional.size(), macro.parameters.size());
  for (size_t i = 0; i < macro.parameters.size(); ++i) {
    const JinjaParameter& parameter = macro.parameters[i];
    JinjaValue value;
    if (i < positional) {
      value = args->positional[i];
    } else if (!take(parameter.name, &value)) {
      value = parameter.fallback != nullptr
                  ? Eval(*parameter.fallback, scope)
                  : JinjaValue::Undefined(
                        absl::StrFormat("parameter '%s' was not provided", parameter.name));
    }
    scope->Set(parameter.name, std::move(value));
  }
  args->positional.erase(args->positional.begin(),
                         args->positional.begin() + static_cast<ptrdiff_t>(positional));
  if (macro.uses_caller && scope->Find("caller") == nullptr) {
    JinjaValue caller = JinjaValue::Undefined("No caller defined");
    take("caller", &caller);
    scope->Set("caller", std::move(caller));
  }
}

JinjaValue JinjaInterpreter::CallMacro(const JinjaMacro& macro, JinjaArgs args) {
  const Recursion recursion(this, line_);
  const JinjaMacroBody& body = *macro.body;
  auto scope = NewScope(macro.closure);
  BindMacro(body, &args, scope.get());
  if (body.uses_kwargs) {
    std::vector<JinjaPair> named;
    for (auto& [name, value] : args.named) named.emplace_back(rt_.String(name), std::move(value));
    scope->Set("kwargs", rt_.Dict(std::move(named)));
  } else if (!args.named.empty()) {
    FailJinja(absl::StrFormat("macro '%s' takes no argument '%s'", body.name, args.named[0].first));
  }
  if (body.uses_varargs) {
    scope->Set("varargs", rt_.Tuple(std::move(args.positional)));
  } else if (!args.positional.empty()) {
    FailJinja(absl::StrFormat("macro '%s' takes not more than %d arguments", body.name,
                              body.parameters.size()));
  }
  std::string text;
  ExecBody(body.body, scope.get(), &text);
  Retire(std::move(scope));
  return rt_.String(std::move(text));
}

}  // namespace lockstep

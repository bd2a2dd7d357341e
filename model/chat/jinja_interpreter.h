// Executes a syntax tree. One object a rendering.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "model/chat/jinja_ast.h"
#include "model/chat/jinja_ops.h"

namespace lockstep {

// Variables of one body: a loop iteration, a macro call, a block. A name is looked up outwards, a
// set assigns here.
struct JinjaScope {
  JinjaScope* parent = nullptr;
  std::vector<std::pair<std::string, JinjaValue>> variables;
  bool captured = false;  // a macro closes over it: it lives until the rendering ends

  JinjaValue* Find(std::string_view name);
  void Set(const std::string& name, JinjaValue value);
};

class JinjaInterpreter {
 public:
  explicit JinjaInterpreter(JinjaRuntime& runtime) : rt_(runtime) {}
  ~JinjaInterpreter();

  std::string Run(const JinjaProgram& program, JinjaScope variables);
  // Of what was executed last.
  int line() const { return line_; }

 private:
  enum class Flow { kNormal, kBreak, kContinue };
  class Recursion;

  // Statements: jinja_interpreter.cc.
  Flow ExecBody(const JinjaBody& body, JinjaScope* scope, std::string* out);
  Flow Exec(const JinjaNode& node, JinjaScope* scope, std::string* out);
  Flow ExecIf(const JinjaNode& node, JinjaScope* scope, std::string* out);
  Flow ExecFor(const JinjaNode& node, JinjaScope* scope, std::string* out);
  Flow ExecInner(const JinjaBody& body, JinjaScope* scope, std::string* out);
  Flow ExecWith(const JinjaNode& node, JinjaScope* scope, std::string* out);
  Flow ExecSetBlock(const JinjaNode& node, JinjaScope* scope);
  Flow ExecFilterBlock(const JinjaNode& node, JinjaScope* scope, std::string* out);
  void ExecCallBlock(const JinjaNode& node, JinjaScope* scope, std::string* out);
  std::shared_ptr<JinjaLoop> NewLoop(const JinjaNode& node, JinjaScope* scope);
  void Assign(const JinjaExpr& target, const JinjaValue& value, JinjaScope* scope);
  void Write(std::string_view text, std::string* out);
  std::unique_ptr<JinjaScope> NewScope(JinjaScope* parent);
  void Retire(std::unique_ptr<JinjaScope> scope);
  JinjaValue NewMacro(const JinjaMacroBody* body, JinjaScope* scope);
  JinjaValue CallMacro(const JinjaMacro& macro, JinjaArgs args);
  void BindMacro(const JinjaMacroBody& macro, JinjaArgs* args, JinjaScope* scope);

  // Expressions: jinja_eval.cc.
  JinjaValue Eval(const JinjaExpr& expr, JinjaScope* scope);
  JinjaValue EvalName(const JinjaExpr& expr, JinjaScope* scope);
  std::vector<JinjaValue> EvalAll(const std::vector<JinjaExprPtr>& exprs, JinjaScope* scope);
  JinjaValue EvalDict(const JinjaExpr& expr, JinjaScope* scope);
  JinjaValue EvalSlice(const JinjaExpr& expr, JinjaScope* scope);
  JinjaValue EvalCompare(const JinjaExpr& expr, JinjaScope* scope);
  JinjaValue EvalConcat(const JinjaExpr& expr, JinjaScope* scope);
  JinjaValue EvalConditional(const JinjaExpr& expr, JinjaScope* scope);
  // A chain of filters whose innermost value is null (a filter block) takes `head`.
  JinjaValue EvalFilter(const JinjaExpr& expr, JinjaScope* scope, const JinjaValue* head);
  JinjaArgs EvalArgs(const JinjaCallArgs& call, JinjaScope* scope);
  JinjaValue Call(const JinjaValue& callee, JinjaArgs args);
  JinjaValue CallFunction(JinjaFunction function, const JinjaArgs& args);
  JinjaValue NewDict(const JinjaArgs& args, const char* callee);
  JinjaValue NewNamespace(const JinjaArgs& args);
  JinjaValue StrftimeNow(const JinjaArgs& args);

  JinjaRuntime& rt_;
  int line_ = 1;
  int recursion_ = 0;
  std::deque<std::unique_ptr<JinjaScope>> kept_;  // captured scopes whose body has ended
};

// Counts nested executions and refuses too many.
class JinjaInterpreter::Recursion {
 public:
  Recursion(JinjaInterpreter* interpreter, int line);
  ~Recursion() { --interpreter_->recursion_; }

 private:
  JinjaInterpreter* interpreter_;
};

}  // namespace lockstep

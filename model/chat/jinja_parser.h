// Tokens to syntax tree. Grammar and precedence are jinja2's, quirks included: a test's argument
// needs no parentheses, `x is in [1]` is a test, a filter binds tighter than any operator.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "model/chat/jinja_ast.h"
#include "model/chat/jinja_lexer.h"

namespace lockstep {

// Throws JinjaSyntaxError (kUnimplemented for what is known and left out, or unknown by name).
std::unique_ptr<JinjaProgram> ParseJinja(std::string_view source);

class JinjaParser {
 public:
  explicit JinjaParser(std::vector<JinjaToken> tokens) : tokens_(std::move(tokens)) {}
  std::unique_ptr<JinjaProgram> Run();

 private:
  using Type = JinjaTokenType;

  // Tokens.
  const JinjaToken& Current() const { return tokens_[at_]; }
  const JinjaToken& Following() const { return tokens_[std::min(at_ + 1, tokens_.size() - 1)]; }
  const JinjaToken& Take() { return tokens_[at_ + 1 < tokens_.size() ? at_++ : at_]; }
  bool AtOperator(std::string_view op) const;
  bool AtName(std::string_view name) const;
  bool SkipOperator(std::string_view op);
  bool SkipName(std::string_view name);
  void ExpectOperator(std::string_view op);
  void Expect(Type type, std::string_view what);
  std::string ExpectName(std::string_view what);
  [[noreturn]] void Fail(std::string message, int line = 0) const;
  [[noreturn]] void Refuse(std::string message, int line = 0) const;
  [[noreturn]] void FailUnexpected(std::string_view expected) const;

  // Statements: jinja_parser.cc.
  JinjaBody ParseBody(std::initializer_list<const char*> ends);
  JinjaBody ParseBlockBody(std::initializer_list<const char*> ends);
  JinjaBody ParseScopedBody(const char* end);
  std::unique_ptr<JinjaNode> ParseStatement();
  std::unique_ptr<JinjaNode> ParseIf();
  std::unique_ptr<JinjaNode> ParseFor();
  std::unique_ptr<JinjaNode> ParseSet();
  std::unique_ptr<JinjaNode> ParseMacro();
  std::unique_ptr<JinjaNode> ParseCallBlock();
  std::unique_ptr<JinjaNode> ParseFilterBlock();
  std::unique_ptr<JinjaNode> ParseWith();
  std::unique_ptr<JinjaNode> ParseGeneration();
  std::unique_ptr<JinjaNode> ParseLoopControl(JinjaNodeKind kind);
  std::vector<JinjaParameter> ParseParameters();
  void ParseMacroBody(JinjaMacroBody* macro, const char* end);
  JinjaExprPtr ParseTarget(bool with_namespace);
  JinjaExprPtr ParseTargetTuple(bool parenthesised);
  std::unique_ptr<JinjaNode> NewNode(JinjaNodeKind kind, int line) const;
  [[noreturn]] void FailUnknownTag(const std::string& name) const;
  void CheckCalls() const;

  // Expressions: jinja_expr_parser.cc.
  JinjaExprPtr New(JinjaExprKind kind, int line, std::vector<JinjaExprPtr> children = {},
                   std::string name = "") const;
  void UpdateDepth(JinjaExpr* expr) const;
  bool AtTupleEnd(const char* extra_end) const;
  JinjaExprPtr ParseTuple(bool with_condition, const char* extra_end = nullptr,
                          bool parenthesised = false);
  JinjaExprPtr ParseExpression(bool with_condition = true);
  JinjaExprPtr ParseConditional();
  JinjaExprPtr ParseOr();
  JinjaExprPtr ParseAnd();
  JinjaExprPtr ParseNot();
  JinjaExprPtr ParseCompare();
  JinjaExprPtr ParseSum();
  JinjaExprPtr ParseConcat();
  JinjaExprPtr ParseProduct();
  JinjaExprPtr ParsePower();
  JinjaExprPtr ParseUnary(bool with_filter);
  JinjaExprPtr ParsePrimary();
  JinjaExprPtr ParseName();
  JinjaExprPtr ParseList();
  JinjaExprPtr ParseDict();
  JinjaExprPtr ParsePostfix(JinjaExprPtr expr);
  JinjaExprPtr ParseFilters(JinjaExprPtr expr);
  JinjaExprPtr ParseFilter(JinjaExprPtr expr);
  JinjaExprPtr ParseTest(JinjaExprPtr expr);
  JinjaExprPtr ParseSubscript(JinjaExprPtr expr);
  JinjaExprPtr ParseCall(JinjaExprPtr expr);
  JinjaCallArgs ParseCallArgs();
  void CheckNestedName(const JinjaExpr& filter) const;

  struct Called {
    std::string name;
    int line;
  };

  std::vector<JinjaToken> tokens_;
  size_t at_ = 0;
  int statement_depth_ = 0, expression_depth_ = 0;
  int loop_depth_ = 0;
  std::vector<std::string> open_tags_;
  std::vector<JinjaMacroBody*> macros_;  // being parsed, outermost first
  // What is called, and what a template mentions otherwise: a call of something never mentioned can
  // only fail.
  std::vector<Called> called_functions_, called_methods_;
  std::set<std::string> known_names_, known_attributes_;
};

}  // namespace lockstep

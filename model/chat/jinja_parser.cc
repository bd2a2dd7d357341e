#include "model/chat/jinja_parser.h"

#include <algorithm>

#include "absl/strings/str_format.h"

namespace lockstep {
namespace {

// Nested statements; the limit keeps the recursion of parser and interpreter small.
constexpr int kMaxStatementDepth = 100;

bool IsRefusedTag(std::string_view name) {
  static constexpr std::string_view kTags[] = {"include", "import", "from",  "extends",
                                               "block",   "do",     "debug", "autoescape"};
  return std::find(std::begin(kTags), std::end(kTags), name) != std::end(kTags);
}

}  // namespace

std::unique_ptr<JinjaProgram> ParseJinja(std::string_view source) {
  return JinjaParser(TokenizeJinja(source)).Run();
}

std::unique_ptr<JinjaProgram> JinjaParser::Run() {
  known_names_ = {"range",        "dict",   "namespace", "raise_exception",
                  "strftime_now", "caller", "loop"};
  auto program = std::make_unique<JinjaProgram>();
  program->body = ParseBody({});
  CheckCalls();
  return program;
}

void JinjaParser::CheckCalls() const {
  for (const Called& call : called_functions_) {
    if (known_names_.count(call.name) == 0) {
      Refuse(absl::StrFormat("unknown function '%s'", call.name), call.line);
    }
  }
  for (const Called& call : called_methods_) {
    if (!IsJinjaMethodName(call.name) && known_attributes_.count(call.name) == 0) {
      Refuse(absl::StrFormat("unknown method '%s'", call.name), call.line);
    }
  }
}

bool JinjaParser::AtOperator(std::string_view op) const {
  return Current().type == Type::kOperator && Current().text == op;
}
bool JinjaParser::AtName(std::string_view name) const {
  return Current().type == Type::kName && Current().text == name;
}
bool JinjaParser::SkipOperator(std::string_view op) {
  if (!AtOperator(op)) return false;
  Take();
  return true;
}
bool JinjaParser::SkipName(std::string_view name) {
  if (!AtName(name)) return false;
  Take();
  return true;
}
void JinjaParser::ExpectOperator(std::string_view op) {
  if (!SkipOperator(op)) FailUnexpected(absl::StrFormat("'%s'", op));
}
void JinjaParser::Expect(Type type, std::string_view what) {
  if (Current().type != type) FailUnexpected(what);
  Take();
}
std::string JinjaParser::ExpectName(std::string_view what) {
  if (Current().type != Type::kName) FailUnexpected(what);
  return Take().text;
}

void JinjaParser::Fail(std::string message, int line) const {
  throw JinjaSyntaxError{absl::StatusCode::kInvalidArgument, line == 0 ? Current().line : line,
                         std::move(message)};
}
void JinjaParser::Refuse(std::string message, int line) const {
  throw JinjaSyntaxError{absl::StatusCode::kUnimplemented, line == 0 ? Current().line : line,
                         std::move(message)};
}
void JinjaParser::FailUnexpected(std::string_view expected) const {
  Fail(absl::StrFormat("unexpected %s, expected %s", DescribeToken(Current()), expected));
}

std::unique_ptr<JinjaNode> JinjaParser::NewNode(JinjaNodeKind kind, int line) const {
  auto node = std::make_unique<JinjaNode>();
  node->kind = kind;
  node->line = line;
  return node;
}

// Text, outputs and statements up to a tag of `ends`, whose name is then the current token; up to
// the end of the template if `ends` is empty.
JinjaBody JinjaParser::ParseBody(std::initializer_list<const char*> ends) {
  JinjaBody body;
  for (;;) {
    const JinjaToken& token = Current();
    if (token.type == Type::kText) {
      body.push_back(NewNode(JinjaNodeKind::kText, token.line));
      body.back()->text = Take().text;
    } else if (token.type == Type::kOutputBegin) {
      auto node = NewNode(JinjaNodeKind::kOutput, Take().line);
      node->expr = ParseTuple(/*with_condition=*/true);
      Expect(Type::kOutputEnd, "'}}'");
      body.push_back(std::move(node));
    } else if (token.type == Type::kBlockBegin) {
      Take();
      const std::string& name = Current().text;
      if (Current().type == Type::kName &&
          std::any_of(ends.begin(), ends.end(), [&name](const char* end) { return name == end; })) {
        return body;
      }
      body.push_back(ParseStatement());
      Expect(Type::kBlockEnd, "'%}'");
    } else {
      if (ends.size() == 0) return body;
      Fail(absl::StrFormat("unexpected end of the template, the tag '%s' is not closed",
                           open_tags_.back()));
    }
  }
}

// The end of the opening tag, the body, and, when there is only one possible end, its name.
JinjaBody JinjaParser::ParseBlockBody(std::initializer_list<const char*> ends) {
  SkipOperator(":");
  Expect(Type::kBlockEnd, "'%}'");
  JinjaBody body = ParseBody(ends);
  if (ends.size() == 1) Take();
  return body;
}

// A body that is a function of its own: a break cannot leave it.
JinjaBody JinjaParser::ParseScopedBody(const char* end) {
  const int loop_depth = std::exchange(loop_depth_, 0);
  JinjaBody body = ParseBlockBody({end});
  loop_depth_ = loop_depth;
  return body;
}

void JinjaParser::FailUnknownTag(const std::string& name) const {
  if (IsRefusedTag(name)) Refuse(absl::StrFormat("the tag '%s' is not supported", name));
  if (!open_tags_.empty()) {
    Refuse(absl::StrFormat("unknown tag '%s' (the open tag is '%s')", name, open_tags_.back()));
  }
  Refuse(absl::StrFormat("unknown tag '%s'", name));
}

std::unique_ptr<JinjaNode> JinjaParser::ParseStatement() {
  if (Current().type != Type::kName) FailUnexpected("the name of a tag");
  if (++statement_depth_ > kMaxStatementDepth) Fail("statements nest too deep");
  const std::string name = Current().text;
  std::unique_ptr<JinjaNode> (JinjaParser::*parse)() = nullptr;
  if (name == "if") parse = &JinjaParser::ParseIf;
  if (name == "for") parse = &JinjaParser::ParseFor;
  if (name == "set") parse = &JinjaParser::ParseSet;
  if (name == "macro") parse = &JinjaParser::ParseMacro;
  if (name == "call") parse = &JinjaParser::ParseCallBlock;
  if (name == "filter") parse = &JinjaParser::ParseFilterBlock;
  if (name == "with") parse = &JinjaParser::ParseWith;
  if (name == "generation") parse = &JinjaParser::ParseGeneration;
  std::unique_ptr<JinjaNode> node;
  if (name == "break") {
    node = ParseLoopControl(JinjaNodeKind::kBreak);
  } else if (name == "continue") {
    node = ParseLoopControl(JinjaNodeKind::kContinue);
  } else if (parse != nullptr) {
    open_tags_.push_back(name);
    node = (this->*parse)();
    open_tags_.pop_back();
  } else {
    FailUnknownTag(name);
  }
  --statement_depth_;
  return node;
}

std::unique_ptr<JinjaNode> JinjaParser::ParseIf() {
  auto node = NewNode(JinjaNodeKind::kIf, Take().line);
  for (;;) {
    JinjaExprPtr condition = ParseTuple(/*with_condition=*/false);
    JinjaBody body = ParseBlockBody({"elif", "else", "endif"});
    node->branches.emplace_back(std::move(condition), std::move(body));
    const std::string end = Take().text;
    if (end == "elif") continue;
    if (end == "else") node->else_body = ParseBlockBody({"endif"});
    return node;
  }
}

std::unique_ptr<JinjaNode> JinjaParser::ParseFor() {
  auto node = NewNode(JinjaNodeKind::kFor, Take().line);
  node->target = ParseTarget(/*with_namespace=*/false);
  if (!SkipName("in")) FailUnexpected("'in'");
  node->expr = ParseTuple(/*with_condition=*/false, "recursive");
  if (SkipName("if")) node->condition = ParseExpression();
  if (AtName("recursive")) Refuse("recursive loops are not supported");
  ++loop_depth_;
  node->body = ParseBlockBody({"endfor", "else"});
  --loop_depth_;
  if (Take().text == "else") node->else_body = ParseBlockBody({"endfor"});
  return node;
}

std::unique_ptr<JinjaNode> JinjaParser::ParseLoopControl(JinjaNodeKind kind) {
  if (loop_depth_ == 0) Fail(absl::StrFormat("'%s' outside of a loop", Current().text));
  return NewNode(kind, Take().line);
}

std::unique_ptr<JinjaNode> JinjaParser::ParseSet() {
  auto node = NewNode(JinjaNodeKind::kSet, Take().line);
  node->target = ParseTarget(/*with_namespace=*/true);
  if (SkipOperator("=")) {
    node->expr = ParseTuple(/*with_condition=*/true);
    return node;
  }
  node->kind = JinjaNodeKind::kSetBlock;
  while (AtOperator("|")) node->filter = ParseFilter(std::move(node->filter));
  node->body = ParseBlockBody({"endset"});
  return node;
}

std::vector<JinjaParameter> JinjaParser::ParseParameters() {
  std::vector<JinjaParameter> parameters;
  ExpectOperator("(");
  while (!AtOperator(")")) {
    if (!parameters.empty()) ExpectOperator(",");
    if (AtOperator(")")) break;
    JinjaParameter parameter{ExpectName("the name of a parameter"), nullptr};
    known_names_.insert(parameter.name);
    if (SkipOperator("=")) {
      parameter.fallback = ParseExpression();
    } else if (!parameters.empty() && parameters.back().fallback != nullptr) {
      Fail(absl::StrFormat("parameter '%s' without default after one with a default",
                           parameter.name));
    }
    parameters.push_back(std::move(parameter));
  }
  ExpectOperator(")");
  return parameters;
}

void JinjaParser::ParseMacroBody(JinjaMacroBody* macro, const char* end) {
  macros_.push_back(macro);
  macro->body = ParseScopedBody(end);
  macros_.pop_back();
}

std::unique_ptr<JinjaNode> JinjaParser::ParseMacro() {
  auto node = NewNode(JinjaNodeKind::kMacro, Take().line);
  node->macro = std::make_unique<JinjaMacroBody>();
  node->macro->name = ExpectName("the name of a macro");
  known_names_.insert(node->macro->name);
  node->macro->parameters = ParseParameters();
  ParseMacroBody(node->macro.get(), "endmacro");
  return node;
}

std::unique_ptr<JinjaNode> JinjaParser::ParseCallBlock() {
  auto node = NewNode(JinjaNodeKind::kCallBlock, Take().line);
  node->macro = std::make_unique<JinjaMacroBody>();
  node->macro->name = "caller";
  if (AtOperator("(")) node->macro->parameters = ParseParameters();
  node->expr = ParseExpression();
  if (node->expr->kind != JinjaExprKind::kCall) Fail("a call expected", node->line);
  ParseMacroBody(node->macro.get(), "endcall");
  return node;
}

std::unique_ptr<JinjaNode> JinjaParser::ParseFilterBlock() {
  auto node = NewNode(JinjaNodeKind::kFilterBlock, Current().line);
  do {
    node->filter = ParseFilter(std::move(node->filter));  // takes 'filter' the first time, '|' then
  } while (AtOperator("|"));
  node->body = ParseBlockBody({"endfilter"});
  return node;
}

std::unique_ptr<JinjaNode> JinjaParser::ParseWith() {
  auto node = NewNode(JinjaNodeKind::kWith, Take().line);
  while (Current().type != Type::kBlockEnd && !AtOperator(":")) {
    if (!node->bindings.empty()) ExpectOperator(",");
    JinjaExprPtr target = ParseTarget(/*with_namespace=*/false);
    ExpectOperator("=");
    JinjaExprPtr value = ParseExpression();
    node->bindings.emplace_back(std::move(target), std::move(value));
  }
  node->body = ParseBlockBody({"endwith"});
  return node;
}

std::unique_ptr<JinjaNode> JinjaParser::ParseGeneration() {
  auto node = NewNode(JinjaNodeKind::kGeneration, Take().line);
  node->body = ParseScopedBody("endgeneration");
  return node;
}

JinjaExprPtr JinjaParser::ParseTarget(bool with_namespace) {
  if (with_namespace && Following().type == Type::kOperator && Following().text == ".") {
    auto target = New(JinjaExprKind::kNamespaceRef, Current().line);
    target->name = ExpectName("a name");
    ExpectOperator(".");
    target->attribute = ExpectName("the name of an attribute");
    known_attributes_.insert(target->attribute);
    return target;
  }
  return ParseTargetTuple(/*parenthesised=*/false);
}

JinjaExprPtr JinjaParser::ParseTargetTuple(bool parenthesised) {
  const int line = Current().line;
  if (++expression_depth_ > kMaxStatementDepth) Fail("targets nest too deep");
  std::vector<JinjaExprPtr> targets;
  bool is_tuple = false;
  while (Current().type == Type::kName || AtOperator("(")) {
    if (AtName("in")) break;
    if (SkipOperator("(")) {
      targets.push_back(ParseTargetTuple(/*parenthesised=*/true));
      ExpectOperator(")");
    } else {
      const std::string name = Take().text;
      if (name == "true" || name == "false" || name == "none" || name == "True" ||
          name == "False" || name == "None") {
        Fail(absl::StrFormat("cannot assign to '%s'", name));
      }
      known_names_.insert(name);
      targets.push_back(New(JinjaExprKind::kName, line, {}, name));
    }
    if (!SkipOperator(",")) break;
    is_tuple = true;
  }
  --expression_depth_;
  if (targets.empty() && !parenthesised) FailUnexpected("a name to assign to");
  if (!is_tuple && targets.size() == 1) return std::move(targets.front());
  return New(JinjaExprKind::kTuple, line, std::move(targets));
}

}  // namespace lockstep

#include <algorithm>

#include "absl/strings/str_format.h"
#include "model/chat/jinja_parser.h"

namespace lockstep {
namespace {

using Kind = JinjaExprKind;

// Of the tree of an expression, and of brackets within brackets while parsing (each costs a dozen
// stack frames).
constexpr int kMaxTreeDepth = 500;
constexpr int kMaxBrackets = 150;

bool IsOneOf(std::string_view text, std::initializer_list<const char*> choices) {
  return std::find(choices.begin(), choices.end(), text) != choices.end();
}

}  // namespace

JinjaExprPtr JinjaParser::New(Kind kind, int line, std::vector<JinjaExprPtr> children,
                              std::string name) const {
  auto expr = std::make_unique<JinjaExpr>();
  expr->kind = kind;
  expr->line = line;
  expr->children = std::move(children);
  expr->name = std::move(name);
  UpdateDepth(expr.get());
  return expr;
}

void JinjaParser::UpdateDepth(JinjaExpr* expr) const {
  int depth = 0;
  const auto visit = [&depth](const JinjaExprPtr& child) {
    if (child != nullptr) depth = std::max(depth, child->depth);
  };
  for (const JinjaExprPtr& child : expr->children) visit(child);
  for (const JinjaExprPtr& argument : expr->call.positional) visit(argument);
  for (const auto& [name, argument] : expr->call.named) visit(argument);
  visit(expr->call.star);
  visit(expr->call.star_star);
  expr->depth = depth + 1;
  if (expr->depth > kMaxTreeDepth) Fail("the expression nests too deep", expr->line);
}

namespace {

std::vector<JinjaExprPtr> Children(JinjaExprPtr a, JinjaExprPtr b = nullptr,
                                   JinjaExprPtr c = nullptr) {
  std::vector<JinjaExprPtr> children;
  children.push_back(std::move(a));
  if (b != nullptr) children.push_back(std::move(b));
  if (c != nullptr) children.push_back(std::move(c));
  return children;
}

}  // namespace

bool JinjaParser::AtTupleEnd(const char* extra_end) const {
  return Current().type == Type::kOutputEnd || Current().type == Type::kBlockEnd ||
         AtOperator(")") || (extra_end != nullptr && AtName(extra_end));
}

// One expression, or several with commas between them as a tuple.
JinjaExprPtr JinjaParser::ParseTuple(bool with_condition, const char* extra_end,
                                     bool parenthesised) {
  const int line = Current().line;
  std::vector<JinjaExprPtr> items;
  bool is_tuple = false;
  for (;;) {
    if (!items.empty()) ExpectOperator(",");
    if (AtTupleEnd(extra_end)) break;
    items.push_back(ParseExpression(with_condition));
    if (!AtOperator(",")) break;
    is_tuple = true;
  }
  if (!is_tuple && !items.empty()) return std::move(items.front());
  if (!is_tuple && !parenthesised) FailUnexpected("an expression");
  return New(Kind::kTuple, line, std::move(items));
}

JinjaExprPtr JinjaParser::ParseExpression(bool with_condition) {
  if (++expression_depth_ > kMaxBrackets) Fail("the expression nests too deep");
  JinjaExprPtr expr = with_condition ? ParseConditional() : ParseOr();
  --expression_depth_;
  return expr;
}

JinjaExprPtr JinjaParser::ParseConditional() {
  const int line = Current().line;
  JinjaExprPtr expr = ParseOr();
  while (SkipName("if")) {
    JinjaExprPtr condition = ParseOr();
    JinjaExprPtr otherwise = SkipName("else") ? ParseExpression() : nullptr;
    expr = New(Kind::kConditional, line,
               Children(std::move(condition), std::move(expr), std::move(otherwise)));
  }
  return expr;
}

JinjaExprPtr JinjaParser::ParseOr() {
  const int line = Current().line;
  JinjaExprPtr expr = ParseAnd();
  while (SkipName("or")) expr = New(Kind::kOr, line, Children(std::move(expr), ParseAnd()));
  return expr;
}

JinjaExprPtr JinjaParser::ParseAnd() {
  const int line = Current().line;
  JinjaExprPtr expr = ParseNot();
  while (SkipName("and")) expr = New(Kind::kAnd, line, Children(std::move(expr), ParseNot()));
  return expr;
}

JinjaExprPtr JinjaParser::ParseNot() {
  const int line = Current().line;
  int negations = 0;
  for (; SkipName("not"); ++negations) {
  }
  JinjaExprPtr expr = ParseCompare();
  for (; negations > 0; --negations) expr = New(Kind::kNot, line, Children(std::move(expr)));
  return expr;
}

JinjaExprPtr JinjaParser::ParseCompare() {
  const int line = Current().line;
  std::vector<JinjaExprPtr> operands = Children(ParseSum());
  std::vector<std::string> operators;
  for (;;) {
    if (Current().type == Type::kOperator &&
        IsOneOf(Current().text, {"==", "!=", "<", "<=", ">", ">="})) {
      operators.push_back(Take().text);
    } else if (SkipName("in")) {
      operators.emplace_back("in");
    } else if (AtName("not") && Following().type == Type::kName && Following().text == "in") {
      Take();
      Take();
      operators.emplace_back("not in");
    } else {
      break;
    }
    operands.push_back(ParseSum());
  }
  if (operators.empty()) return std::move(operands.front());
  JinjaExprPtr expr = New(Kind::kCompare, line, std::move(operands));
  expr->operators = std::move(operators);
  return expr;
}

JinjaExprPtr JinjaParser::ParseSum() {
  const int line = Current().line;
  JinjaExprPtr expr = ParseConcat();
  while (AtOperator("+") || AtOperator("-")) {
    const std::string op = Take().text;
    expr = New(Kind::kArithmetic, line, Children(std::move(expr), ParseConcat()), op);
  }
  return expr;
}

JinjaExprPtr JinjaParser::ParseConcat() {
  const int line = Current().line;
  std::vector<JinjaExprPtr> parts = Children(ParseProduct());
  while (SkipOperator("~")) parts.push_back(ParseProduct());
  if (parts.size() == 1) return std::move(parts.front());
  return New(Kind::kConcat, line, std::move(parts));
}

JinjaExprPtr JinjaParser::ParseProduct() {
  const int line = Current().line;
  JinjaExprPtr expr = ParsePower();
  while (Current().type == Type::kOperator && IsOneOf(Current().text, {"*", "/", "//", "%"})) {
    const std::string op = Take().text;
    expr = New(Kind::kArithmetic, line, Children(std::move(expr), ParsePower()), op);
  }
  return expr;
}

JinjaExprPtr JinjaParser::ParsePower() {
  const int line = Current().line;
  JinjaExprPtr expr = ParseUnary(/*with_filter=*/true);
  while (SkipOperator("**")) {
    expr = New(Kind::kArithmetic, line, Children(std::move(expr), ParseUnary(true)), "**");
  }
  return expr;
}

JinjaExprPtr JinjaParser::ParseUnary(bool with_filter) {
  const int line = Current().line;
  JinjaExprPtr expr;
  if (AtOperator("-") || AtOperator("+")) {
    if (++expression_depth_ > kMaxBrackets) Fail("the expression nests too deep");
    const bool negative = Take().text == "-";
    expr = New(negative ? Kind::kNegate : Kind::kPositive, line, Children(ParseUnary(false)));
    --expression_depth_;
  } else {
    expr = ParsePrimary();
  }
  expr = ParsePostfix(std::move(expr));
  return with_filter ? ParseFilters(std::move(expr)) : std::move(expr);
}

JinjaExprPtr JinjaParser::ParsePrimary() {
  const JinjaToken& token = Current();
  if (token.type == Type::kName) return ParseName();
  if (AtOperator("[")) return ParseList();
  if (AtOperator("{")) return ParseDict();
  if (SkipOperator("(")) {
    JinjaExprPtr expr = ParseTuple(/*with_condition=*/true, nullptr, /*parenthesised=*/true);
    ExpectOperator(")");
    return expr;
  }
  JinjaExprPtr expr = New(Kind::kConst, token.line);
  if (token.type == Type::kString) {
    std::string text;
    while (Current().type == Type::kString) text += Take().text;
    expr->constant = JinjaValue::String(std::move(text));
  } else if (token.type == Type::kInt) {
    expr->constant = JinjaValue::Int(Take().int_value);
  } else if (token.type == Type::kFloat) {
    expr->constant = JinjaValue::Float(Take().float_value);
  } else {
    FailUnexpected("an expression");
  }
  return expr;
}

JinjaExprPtr JinjaParser::ParseName() {
  const JinjaToken& token = Take();
  const std::string& name = token.text;
  JinjaExprPtr expr = New(Kind::kConst, token.line);
  if (name == "true" || name == "True" || name == "false" || name == "False") {
    expr->constant = JinjaValue::Bool(name == "true" || name == "True");
  } else if (name == "none" || name == "None") {
    expr->constant = JinjaValue::None();
  } else {
    expr->kind = Kind::kName;
    expr->name = name;
    for (JinjaMacroBody* macro : macros_) {
      macro->uses_caller |= name == "caller";
      macro->uses_varargs |= name == "varargs";
      macro->uses_kwargs |= name == "kwargs";
    }
    if (!AtOperator("(")) known_names_.insert(name);
  }
  return expr;
}

JinjaExprPtr JinjaParser::ParseList() {
  const int line = Take().line;
  std::vector<JinjaExprPtr> items;
  while (!AtOperator("]")) {
    if (!items.empty()) ExpectOperator(",");
    if (AtOperator("]")) break;
    items.push_back(ParseExpression());
  }
  Take();
  return New(Kind::kList, line, std::move(items));
}

JinjaExprPtr JinjaParser::ParseDict() {
  const int line = Take().line;
  std::vector<JinjaExprPtr> items;
  while (!AtOperator("}")) {
    if (!items.empty()) ExpectOperator(",");
    if (AtOperator("}")) break;
    items.push_back(ParseExpression());
    const JinjaExpr& key = *items.back();
    if (key.kind == Kind::kConst && key.constant.is_string()) {
      known_attributes_.emplace(key.constant.text());
    }
    ExpectOperator(":");
    items.push_back(ParseExpression());
  }
  Take();
  return New(Kind::kDict, line, std::move(items));
}

JinjaExprPtr JinjaParser::ParsePostfix(JinjaExprPtr expr) {
  for (;;) {
    if (AtOperator(".") || AtOperator("[")) {
      expr = ParseSubscript(std::move(expr));
    } else if (AtOperator("(")) {
      expr = ParseCall(std::move(expr));
    } else {
      return expr;
    }
  }
}

JinjaExprPtr JinjaParser::ParseFilters(JinjaExprPtr expr) {
  for (;;) {
    if (AtOperator("|")) {
      expr = ParseFilter(std::move(expr));
    } else if (AtName("is")) {
      expr = ParseTest(std::move(expr));
    } else if (AtOperator("(")) {
      expr = ParseCall(std::move(expr));
    } else {
      return expr;
    }
  }
}

JinjaExprPtr JinjaParser::ParseFilter(JinjaExprPtr value) {
  const int line = Take().line;  // '|', or the name of the tag 'filter'
  JinjaExprPtr expr = New(Kind::kFilter, line, {}, ExpectName("the name of a filter"));
  expr->children.push_back(std::move(value));
  expr->filter = FindJinjaFilter(expr->name);
  if (expr->filter == nullptr) {
    Refuse(absl::StrFormat("unknown or unsupported filter '%s'", expr->name), line);
  }
  if (AtOperator("(")) expr->call = ParseCallArgs();
  UpdateDepth(expr.get());
  CheckNestedName(*expr);
  return expr;
}

// map('trim') and select('string') name a filter or a test in their arguments.
void JinjaParser::CheckNestedName(const JinjaExpr& filter) const {
  const bool by_attribute = filter.name == "selectattr" || filter.name == "rejectattr";
  const bool by_test = by_attribute || filter.name == "select" || filter.name == "reject";
  if (!by_test && filter.name != "map") return;
  const size_t at = by_attribute ? 1 : 0;
  if (filter.call.positional.size() <= at) return;
  const JinjaExpr& name = *filter.call.positional[at];
  if (name.kind != Kind::kConst || !name.constant.is_string()) return;
  const std::string_view text = name.constant.text();
  if (by_test ? FindJinjaTest(text) == nullptr : FindJinjaFilter(text) == nullptr) {
    Refuse(absl::StrFormat("unknown or unsupported %s '%s'", by_test ? "test" : "filter", text),
           filter.line);
  }
}

JinjaExprPtr JinjaParser::ParseTest(JinjaExprPtr value) {
  const int line = Take().line;
  const bool negated = SkipName("not");
  if (Current().type != Type::kName) FailUnexpected("the name of a test");
  JinjaExprPtr expr = New(Kind::kTest, line, Children(std::move(value)), Take().text);
  expr->test = FindJinjaTest(expr->name);
  if (expr->test == nullptr) {
    Refuse(absl::StrFormat("unknown or unsupported test '%s'", expr->name), line);
  }
  const Type type = Current().type;
  if (AtOperator("(")) {
    expr->call = ParseCallArgs();
  } else if ((type == Type::kName && !AtName("else") && !AtName("or") && !AtName("and")) ||
             type == Type::kString || type == Type::kInt || type == Type::kFloat ||
             AtOperator("[") || AtOperator("{")) {
    if (AtName("is")) Fail("tests with 'is' cannot be chained");
    expr->call.positional.push_back(ParsePostfix(ParsePrimary()));
  }
  UpdateDepth(expr.get());
  return negated ? New(Kind::kNot, line, Children(std::move(expr))) : std::move(expr);
}

JinjaExprPtr JinjaParser::ParseSubscript(JinjaExprPtr value) {
  const int line = Current().line;
  if (SkipOperator(".")) {
    if (Current().type == Type::kInt) {
      JinjaExprPtr key = New(Kind::kConst, line);
      key->constant = JinjaValue::Int(Take().int_value);
      return New(Kind::kGetItem, line, Children(std::move(value), std::move(key)));
    }
    std::string name = ExpectName("the name of an attribute");
    return New(Kind::kGetAttribute, line, Children(std::move(value)), std::move(name));
  }
  ExpectOperator("[");
  std::vector<JinjaExprPtr> parts = Children(std::move(value));
  bool is_slice = false;
  while (!AtOperator("]")) {
    if (AtOperator(",")) Refuse("several subscripts within one pair of brackets are not supported");
    if (AtOperator(":")) {
      is_slice = true;
      if (parts.size() == 1) parts.push_back(nullptr);
      Take();
      if (parts.size() == 4) FailUnexpected("']'");
      parts.push_back(AtOperator(":") || AtOperator("]") ? nullptr : ParseExpression());
    } else if (parts.size() == 1) {
      parts.push_back(ParseExpression());
    } else {
      FailUnexpected("']'");
    }
  }
  if (parts.size() == 1) FailUnexpected("an expression");
  Take();
  if (is_slice) parts.resize(4);
  return New(is_slice ? Kind::kSlice : Kind::kGetItem, line, std::move(parts));
}

JinjaExprPtr JinjaParser::ParseCall(JinjaExprPtr callee) {
  const int line = Current().line;
  if (callee->kind == Kind::kName) called_functions_.push_back({callee->name, line});
  if (callee->kind == Kind::kGetAttribute) called_methods_.push_back({callee->name, line});
  JinjaExprPtr expr = New(Kind::kCall, line, Children(std::move(callee)));
  expr->call = ParseCallArgs();
  UpdateDepth(expr.get());
  return expr;
}

JinjaCallArgs JinjaParser::ParseCallArgs() {
  JinjaCallArgs args;
  const int line = Current().line;
  ExpectOperator("(");
  bool first = true;
  while (!AtOperator(")")) {
    if (!first) ExpectOperator(",");
    first = false;
    if (AtOperator(")")) break;
    if (SkipOperator("*")) {
      if (args.star != nullptr || args.star_star != nullptr) Fail("bad arguments of a call", line);
      args.star = ParseExpression();
    } else if (SkipOperator("**")) {
      if (args.star_star != nullptr) Fail("bad arguments of a call", line);
      args.star_star = ParseExpression();
    } else if (Current().type == Type::kName && Following().type == Type::kOperator &&
               Following().text == "=") {
      if (args.star_star != nullptr) Fail("bad arguments of a call", line);
      std::string name = Take().text;
      Take();
      known_attributes_.insert(name);
      for (const auto& [other, value] : args.named) {
        if (other == name) Fail(absl::StrFormat("argument '%s' is given twice", name), line);
      }
      args.named.emplace_back(std::move(name), ParseExpression());
    } else {
      if (args.star != nullptr || args.star_star != nullptr || !args.named.empty()) {
        Fail("positional argument after a named one", line);
      }
      args.positional.push_back(ParseExpression());
    }
  }
  ExpectOperator(")");
  return args;
}

}  // namespace lockstep

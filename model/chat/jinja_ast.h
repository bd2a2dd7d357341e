// The syntax tree of a template.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "model/chat/jinja_ops.h"
#include "model/chat/jinja_value.h"

namespace lockstep {

struct JinjaExpr;
using JinjaExprPtr = std::unique_ptr<JinjaExpr>;

enum class JinjaExprKind {
  kConst,
  kName,          // name
  kNamespaceRef,  // name.attribute, as the target of a set
  kTuple,         // children; also a target
  kList,
  kDict,          // children: key, value, key, value, ...
  kGetAttribute,  // child[0].name
  kGetItem,       // child[0][child[1]]
  kSlice,         // child[0][child[1]:child[2]:child[3]]; the last three may be null
  kCall,          // child[0](call)
  kFilter,        // child[0]|name(call); child[0] is null at the head of a filter block
  kTest,          // child[0] is name(call)
  kNot,
  kNegate,
  kPositive,
  kAnd,
  kOr,
  kConditional,  // child[1] if child[0] else child[2], which may be null
  kArithmetic,   // child[0] name child[1]
  kConcat,       // children joined by ~
  kCompare,      // child[0] operators[0] child[1] operators[1] child[2] ...
};

struct JinjaCallArgs {
  std::vector<JinjaExprPtr> positional;
  std::vector<std::pair<std::string, JinjaExprPtr>> named;
  JinjaExprPtr star, star_star;  // *x and **x, or null
};

struct JinjaExpr {
  JinjaExprKind kind;
  int line = 1;
  int depth = 1;  // of the tree below, itself included: bounded, so that recursion over it is
  std::string name, attribute;
  JinjaValue constant;
  std::vector<JinjaExprPtr> children;
  std::vector<std::string> operators;
  JinjaCallArgs call;
  JinjaFilter filter = nullptr;
  JinjaTest test = nullptr;
};

struct JinjaNode;
using JinjaBody = std::vector<std::unique_ptr<JinjaNode>>;

enum class JinjaNodeKind {
  kText,
  kOutput,       // expr
  kIf,           // branches; else_body
  kFor,          // target in expr if condition: body; else_body
  kSet,          // target = expr
  kSetBlock,     // target = body, through filter if there is one
  kMacro,        // name, parameters, body
  kCallBlock,    // expr (a call) with body as caller
  kFilterBlock,  // filter over body
  kWith,         // bindings; body
  kGeneration,   // body, as a scope of its own
  kBreak,
  kContinue,
};

struct JinjaParameter {
  std::string name;
  JinjaExprPtr fallback;  // null: undefined when not given
};

// What a macro and the body of a call block share.
struct JinjaMacroBody {
  std::string name;
  std::vector<JinjaParameter> parameters;
  JinjaBody body;
  bool uses_varargs = false, uses_kwargs = false, uses_caller = false;
};

struct JinjaNode {
  JinjaNodeKind kind;
  int line = 1;
  std::string text;
  JinjaExprPtr expr, target, condition, filter;
  std::vector<std::pair<JinjaExprPtr, JinjaBody>> branches;
  std::vector<std::pair<JinjaExprPtr, JinjaExprPtr>> bindings;
  JinjaBody body, else_body;
  std::unique_ptr<JinjaMacroBody> macro;
};

struct JinjaProgram {
  std::string where;
  JinjaBody body;
};

// A macro closes over the scope in which it was defined; the rendering owns the scope.
struct JinjaMacro {
  const JinjaMacroBody* body;
  JinjaScope* closure;
};

}  // namespace lockstep

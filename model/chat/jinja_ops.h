// Operators, conversions and attribute access on JinjaValues, with Python's meaning, and the
// account of what one rendering may use (JinjaRuntime). Failures throw JinjaError.
#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "model/chat/chat_template.h"
#include "model/chat/jinja_value.h"

namespace lockstep {

// What one rendering owns and may use. Not thread-safe; one a rendering.
class JinjaRuntime {
 public:
  explicit JinjaRuntime(const RenderOptions& options) : options_(options) {}
  ~JinjaRuntime();
  JinjaRuntime(const JinjaRuntime&) = delete;
  JinjaRuntime& operator=(const JinjaRuntime&) = delete;

  const RenderOptions& options() const { return options_; }

  // Work: one step is about one node of the template or 64 bytes of text.
  void Step(int64_t steps = 1);
  void ScanText(std::string_view text) { Step(1 + static_cast<int64_t>(text.size() / 64)); }
  // Memory handed out since the rendering began; what has been freed again counts too.
  void Allocate(size_t bytes);

  JinjaValue String(std::string text, bool markup = false);
  JinjaValue List(std::vector<JinjaValue> items) {
    return Sequence(JinjaKind::kList, std::move(items));
  }
  JinjaValue Tuple(std::vector<JinjaValue> items) {
    return Sequence(JinjaKind::kTuple, std::move(items));
  }
  JinjaValue Sequence(JinjaKind kind, std::vector<JinjaValue> items);
  JinjaValue Range(JinjaInt start, JinjaInt stop, JinjaInt step);
  // A later pair with an equal key replaces the earlier one's value.
  JinjaValue Dict(std::vector<JinjaPair> items);
  JinjaValue Iterator(std::string type, int source_depth, std::function<bool(JinjaValue*)> next);
  JinjaValue Namespace(std::vector<std::pair<std::string, JinjaValue>> attributes);

 private:
  int CheckDepth(int depth) const;

  const RenderOptions& options_;
  int64_t steps_ = 0;
  int64_t allocated_ = 0;
  std::deque<JinjaNamespace> namespaces_;
};

// Fails with the undefined value's own message.
void RequireDefined(const JinjaValue& value);

bool Equal(JinjaRuntime& rt, const JinjaValue& a, const JinjaValue& b);
// The value of an equal key; null when there is none.
const JinjaValue* FindKey(JinjaRuntime& rt, const JinjaDict& dict, const JinjaValue& key);
// Python's a < b (strict) or a <= b; `op` is for the message.
bool Less(JinjaRuntime& rt, const JinjaValue& a, const JinjaValue& b, const char* op = "<");
bool Contains(JinjaRuntime& rt, const JinjaValue& container, const JinjaValue& item);

// "+", "-", "*", "/", "//", "%", "**"
JinjaValue Arithmetic(JinjaRuntime& rt, std::string_view op, const JinjaValue& a,
                      const JinjaValue& b);
JinjaValue Negate(const JinjaValue& value);

// str() and repr().
std::string PythonStr(JinjaRuntime& rt, const JinjaValue& value);
std::string PythonRepr(JinjaRuntime& rt, const JinjaValue& value);
std::string PythonIntRepr(JinjaInt value);
std::string PythonFloatRepr(double value);

// `format % value` and `format.format(args)`. Conversions: s r d i u f F e E g G x X o c and %%;
// fields {} {0} {name} with fill, alignment, sign, width, precision and one of these types.
std::string PercentFormat(JinjaRuntime& rt, std::string_view format, const JinjaValue& value);
std::string BraceFormat(JinjaRuntime& rt, std::string_view format, const JinjaArgs& args);

// json.dumps. Fails for what JSON cannot hold.
struct JsonStyle {
  bool ensure_ascii = false;
  bool indented = false;
  std::string indent;
  std::string item_separator = ", ";
  std::string key_separator = ": ";
  bool sort_keys = false;
};
std::string DumpPythonJson(JinjaRuntime& rt, const JinjaValue& value, const JsonStyle& style);

// A function that gives one item a call and false at the end; fails for what Python cannot iterate.
std::function<bool(JinjaValue*)> Iterate(JinjaRuntime& rt, const JinjaValue& value);
std::vector<JinjaValue> ToVector(JinjaRuntime& rt, const JinjaValue& value);
// len(); fails where Python does.
int64_t Length(JinjaRuntime& rt, const JinjaValue& value);

// value.name and value[key] as jinja2 resolves them: an attribute before (after) an item.
JinjaValue GetAttribute(JinjaRuntime& rt, const JinjaValue& value, const std::string& name);
JinjaValue GetItem(JinjaRuntime& rt, const JinjaValue& value, const JinjaValue& key);
// value[start:stop:step]; an undefined JinjaValue is refused, None means absent.
JinjaValue Slice(JinjaRuntime& rt, const JinjaValue& value, const JinjaValue& start,
                 const JinjaValue& stop, const JinjaValue& step);

// Whether some type has a method of this name (known, or known to be refused).
bool IsJinjaMethodName(std::string_view name);
bool HasMethod(const JinjaValue& value, std::string_view name);
JinjaValue CallMethod(JinjaRuntime& rt, const JinjaMethod& method, const JinjaArgs& args);

// Parameters bound as Python binds them. [i] is null when parameter i was not given.
class BoundArgs {
 public:
  BoundArgs(const std::string& callee, const JinjaArgs& args,
            std::initializer_list<const char*> names, size_t required = 0);

  const JinjaValue* operator[](size_t i) const { return bound_[i]; }
  bool Bool(size_t i, bool fallback) const;
  JinjaInt Int(size_t i, JinjaInt fallback) const;
  std::string_view Text(size_t i, std::string_view fallback) const;

 private:
  std::string callee_;
  std::vector<std::string> names_;
  std::vector<const JinjaValue*> bound_;
};

// Filters and tests by name; null when unknown.
using JinjaFilter = JinjaValue (*)(JinjaRuntime& rt, const JinjaValue& value,
                                   const JinjaArgs& args);
using JinjaTest = bool (*)(JinjaRuntime& rt, const JinjaValue& value, const JinjaArgs& args);
JinjaFilter FindJinjaFilter(std::string_view name);
JinjaTest FindJinjaTest(std::string_view name);

}  // namespace lockstep

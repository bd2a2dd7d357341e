// The values of a Jinja expression: Python's None, bool, int, float, str, list, tuple, dict, their
// views and iterators, and Jinja's own (Undefined, namespace, macro, loop). Values are immutable
// and shared; a namespace alone is mutable.
//
// Inside this folder a failure of a template is a JinjaError, an exception: every operation of an
// expression can fail, and the one place that catches it is ChatTemplate. None leaves the folder.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"

namespace lockstep {

struct JinjaError {
  absl::StatusCode code = absl::StatusCode::kInvalidArgument;
  std::string message;
};

[[noreturn]] void FailJinja(std::string message);
[[noreturn]] void FailUnsupported(std::string message);

// Wide enough for what JSON may hold (64 bits, signed or unsigned), so that such numbers survive as
// Python's do.
using JinjaInt = __int128;

enum class JinjaKind {
  kUndefined,
  kNone,
  kBool,
  kInt,
  kFloat,
  kString,
  kList,
  kTuple,
  kRange,
  kKeys,    // dict.keys()
  kValues,  // dict.values()
  kItems,   // dict.items()
  kDict,
  kIterator,
  kNamespace,
  kLoop,
  kMacro,
  kFunction,
  kMethod,
};

class JinjaValue;
struct JinjaMacro;
struct JinjaScope;
using JinjaPair = std::pair<JinjaValue, JinjaValue>;

// Why a value is undefined, for the message of whatever uses it.
struct JinjaUndefined {
  std::string message;
};

struct JinjaText {
  std::string text;
  bool markup = false;  // result of `safe` or `escape`: `+` escapes the other side
};

struct JinjaSequence {
  std::vector<JinjaValue> items;
  JinjaInt start = 0, stop = 0, step = 1;  // of a range, for its repr
  int depth = 1;
};

struct JinjaDict {
  std::vector<JinjaPair> items;  // in order of insertion
  int depth = 1;

  const JinjaValue* Find(std::string_view key) const;
};

// Consumed by whoever iterates, as a Python generator.
struct JinjaIterator {
  std::function<bool(JinjaValue*)> next;  // false at the end
  std::string type = "generator";
  int depth = 1;
};

// Owned by the JinjaRuntime of one rendering, so that cycles through it neither leak nor recurse
// when they are destroyed.
struct JinjaNamespace {
  std::vector<std::pair<std::string, JinjaValue>> attributes;

  JinjaValue* Find(std::string_view name);
};

// State behind the variable `loop`.
struct JinjaLoop;

enum class JinjaFunction { kRange, kDict, kNamespace, kRaiseException, kStrftimeNow };

struct JinjaMethod;

class JinjaValue {
 public:
  JinjaValue() = default;  // undefined
  static JinjaValue None();
  static JinjaValue Bool(bool b);
  static JinjaValue Int(JinjaInt i);
  static JinjaValue Float(double d);
  // Literals and the like; what a template computes is made by JinjaRuntime, which keeps account of
  // the memory.
  static JinjaValue String(std::string text, bool markup = false);
  static JinjaValue Undefined(std::string message);
  static JinjaValue Sequence(JinjaKind kind, std::shared_ptr<const JinjaSequence> sequence);
  static JinjaValue Dict(std::shared_ptr<const JinjaDict> dict);
  static JinjaValue Iterator(std::shared_ptr<JinjaIterator> iterator);
  static JinjaValue Namespace(JinjaNamespace* ns);
  static JinjaValue Loop(std::shared_ptr<JinjaLoop> loop);
  static JinjaValue Macro(std::shared_ptr<const JinjaMacro> macro);
  static JinjaValue Function(JinjaFunction function);
  static JinjaValue Method(std::shared_ptr<const JinjaMethod> method);

  JinjaKind kind() const { return kind_; }
  bool Is(JinjaKind kind) const { return kind_ == kind; }
  bool is_undefined() const { return kind_ == JinjaKind::kUndefined; }
  bool is_none() const { return kind_ == JinjaKind::kNone; }
  bool is_string() const { return kind_ == JinjaKind::kString; }
  bool is_dict() const { return kind_ == JinjaKind::kDict; }
  bool is_sequence() const { return kind_ >= JinjaKind::kList && kind_ <= JinjaKind::kItems; }
  bool is_int() const { return kind_ == JinjaKind::kInt || kind_ == JinjaKind::kBool; }
  bool is_number() const { return is_int() || kind_ == JinjaKind::kFloat; }

  bool bool_value() const { return std::get<JinjaInt>(data_) != 0; }
  JinjaInt int_value() const { return std::get<JinjaInt>(data_); }  // of an int or a bool
  double float_value() const;                                       // of any number
  std::string_view text() const { return std::get<TextPtr>(data_)->text; }
  bool markup() const { return is_string() && std::get<TextPtr>(data_)->markup; }
  const std::vector<JinjaValue>& items() const { return sequence().items; }
  const JinjaSequence& sequence() const { return *std::get<SequencePtr>(data_); }
  const JinjaDict& dict() const { return *std::get<DictPtr>(data_); }
  JinjaIterator& iterator() const { return *std::get<std::shared_ptr<JinjaIterator>>(data_); }
  JinjaNamespace* ns() const { return std::get<JinjaNamespace*>(data_); }
  JinjaLoop& loop() const { return *std::get<std::shared_ptr<JinjaLoop>>(data_); }
  const JinjaMacro& macro() const { return *std::get<std::shared_ptr<const JinjaMacro>>(data_); }
  JinjaFunction function() const { return std::get<JinjaFunction>(data_); }
  const JinjaMethod& method() const { return *std::get<std::shared_ptr<const JinjaMethod>>(data_); }
  std::string undefined_message() const;

  // Levels of containers within containers, itself included; 0 for a scalar. Bounded
  // (JinjaRuntime), so recursion over a value is.
  int depth() const;
  bool Truthy() const;
  // Python's name of the type: "str", "NoneType", "dict", ...
  std::string TypeName() const;

 private:
  using TextPtr = std::shared_ptr<const JinjaText>;
  using SequencePtr = std::shared_ptr<const JinjaSequence>;
  using DictPtr = std::shared_ptr<const JinjaDict>;

  JinjaKind kind_ = JinjaKind::kUndefined;
  std::variant<std::monostate, std::shared_ptr<const JinjaUndefined>, JinjaInt, double, TextPtr,
               SequencePtr, DictPtr, std::shared_ptr<JinjaIterator>, JinjaNamespace*,
               std::shared_ptr<JinjaLoop>, std::shared_ptr<const JinjaMacro>, JinjaFunction,
               std::shared_ptr<const JinjaMethod>>
      data_;
};

// One execution of {% for %}: the items come from `source`, at most one ahead of the body unless
// the length is asked for.
struct JinjaLoop {
  std::function<bool(JinjaValue*)> source;
  std::vector<JinjaValue> ahead;  // taken from the source and not yet looped over, in reverse order
  bool exhausted = false;
  int64_t index0 = -1;
  int64_t known_length = -1;
  JinjaValue previous, current;
  JinjaValue last_changed;
  bool changed_called = false;
  int depth = 1;

  bool Peek(JinjaValue* next);
  bool Next(JinjaValue* next);
  int64_t Length();
};

// `value.name` where the name is a method of the value's type.
struct JinjaMethod {
  JinjaValue self;
  std::string name;
};

struct JinjaArgs {
  std::vector<JinjaValue> positional;
  std::vector<std::pair<std::string, JinjaValue>> named;
};

}  // namespace lockstep

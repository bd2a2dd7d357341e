#include "model/chat/jinja_value.h"

#include <algorithm>

namespace lockstep {

void FailJinja(std::string message) {
  throw JinjaError{absl::StatusCode::kInvalidArgument, std::move(message)};
}
void FailUnsupported(std::string message) {
  throw JinjaError{absl::StatusCode::kUnimplemented, std::move(message)};
}

const JinjaValue* JinjaDict::Find(std::string_view key) const {
  for (const JinjaPair& item : items) {
    if (item.first.is_string() && item.first.text() == key) return &item.second;
  }
  return nullptr;
}

JinjaValue* JinjaNamespace::Find(std::string_view name) {
  const auto it = std::find_if(attributes.begin(), attributes.end(),
                               [name](const auto& attribute) { return attribute.first == name; });
  return it == attributes.end() ? nullptr : &it->second;
}

bool JinjaLoop::Peek(JinjaValue* next) {
  if (ahead.empty() && !exhausted) {
    JinjaValue value;
    if (source(&value)) {
      ahead.push_back(std::move(value));
    } else {
      exhausted = true;
    }
  }
  if (ahead.empty()) return false;
  *next = ahead.back();
  return true;
}

bool JinjaLoop::Next(JinjaValue* next) {
  if (!Peek(next)) return false;
  ahead.pop_back();
  ++index0;
  previous = std::move(current);
  current = *next;
  return true;
}

int64_t JinjaLoop::Length() {
  if (known_length < 0) {
    std::vector<JinjaValue> rest;
    for (JinjaValue value; !exhausted && source(&value);) rest.push_back(value);
    exhausted = true;
    std::reverse(rest.begin(), rest.end());
    rest.insert(rest.end(), ahead.begin(), ahead.end());
    ahead = std::move(rest);
    known_length = index0 + 1 + static_cast<int64_t>(ahead.size());
  }
  return known_length;
}

JinjaValue JinjaValue::None() {
  JinjaValue v;
  v.kind_ = JinjaKind::kNone;
  return v;
}
JinjaValue JinjaValue::Bool(bool b) {
  JinjaValue v;
  v.kind_ = JinjaKind::kBool;
  v.data_ = JinjaInt{b ? 1 : 0};
  return v;
}
JinjaValue JinjaValue::Int(JinjaInt i) {
  JinjaValue v;
  v.kind_ = JinjaKind::kInt;
  v.data_ = i;
  return v;
}
JinjaValue JinjaValue::Float(double d) {
  JinjaValue v;
  v.kind_ = JinjaKind::kFloat;
  v.data_ = d;
  return v;
}
JinjaValue JinjaValue::String(std::string text, bool markup) {
  JinjaValue v;
  v.kind_ = JinjaKind::kString;
  v.data_ = std::make_shared<const JinjaText>(JinjaText{std::move(text), markup});
  return v;
}
JinjaValue JinjaValue::Undefined(std::string message) {
  JinjaValue v;
  v.data_ = std::make_shared<const JinjaUndefined>(JinjaUndefined{std::move(message)});
  return v;
}
JinjaValue JinjaValue::Sequence(JinjaKind kind, std::shared_ptr<const JinjaSequence> sequence) {
  JinjaValue v;
  v.kind_ = kind;
  v.data_ = std::move(sequence);
  return v;
}
JinjaValue JinjaValue::Dict(std::shared_ptr<const JinjaDict> dict) {
  JinjaValue v;
  v.kind_ = JinjaKind::kDict;
  v.data_ = std::move(dict);
  return v;
}
JinjaValue JinjaValue::Iterator(std::shared_ptr<JinjaIterator> iterator) {
  JinjaValue v;
  v.kind_ = JinjaKind::kIterator;
  v.data_ = std::move(iterator);
  return v;
}
JinjaValue JinjaValue::Namespace(JinjaNamespace* ns) {
  JinjaValue v;
  v.kind_ = JinjaKind::kNamespace;
  v.data_ = ns;
  return v;
}
JinjaValue JinjaValue::Loop(std::shared_ptr<JinjaLoop> loop) {
  JinjaValue v;
  v.kind_ = JinjaKind::kLoop;
  v.data_ = std::move(loop);
  return v;
}
JinjaValue JinjaValue::Macro(std::shared_ptr<const JinjaMacro> macro) {
  JinjaValue v;
  v.kind_ = JinjaKind::kMacro;
  v.data_ = std::move(macro);
  return v;
}
JinjaValue JinjaValue::Function(JinjaFunction function) {
  JinjaValue v;
  v.kind_ = JinjaKind::kFunction;
  v.data_ = function;
  return v;
}
JinjaValue JinjaValue::Method(std::shared_ptr<const JinjaMethod> method) {
  JinjaValue v;
  v.kind_ = JinjaKind::kMethod;
  v.data_ = std::move(method);
  return v;
}

double JinjaValue::float_value() const {
  return kind_ == JinjaKind::kFloat ? std::get<double>(data_)
                                    : static_cast<double>(std::get<JinjaInt>(data_));
}

std::string JinjaValue::undefined_message() const {
  const auto* undefined = std::get_if<std::shared_ptr<const JinjaUndefined>>(&data_);
  return undefined != nullptr && *undefined != nullptr ? (*undefined)->message
                                                       : "the value is undefined";
}

int JinjaValue::depth() const {
  if (is_sequence()) return sequence().depth;
  switch (kind_) {
    case JinjaKind::kDict:
      return dict().depth;
    case JinjaKind::kIterator:
      return iterator().depth;
    case JinjaKind::kLoop:
      return loop().depth;
    case JinjaKind::kMethod:
      return method().self.depth() + 1;
    default:
      return 0;
  }
}

bool JinjaValue::Truthy() const {
  if (is_sequence()) return !items().empty();
  switch (kind_) {
    case JinjaKind::kUndefined:
    case JinjaKind::kNone:
      return false;
    case JinjaKind::kBool:
    case JinjaKind::kInt:
      return int_value() != 0;
    case JinjaKind::kFloat:
      return float_value() != 0;
    case JinjaKind::kString:
      return !text().empty();
    case JinjaKind::kDict:
      return !dict().items.empty();
    case JinjaKind::kLoop:
      return loop().Length() != 0;
    default:
      return true;
  }
}

std::string JinjaValue::TypeName() const {
  switch (kind_) {
    case JinjaKind::kUndefined:
      return "Undefined";
    case JinjaKind::kNone:
      return "NoneType";
    case JinjaKind::kBool:
      return "bool";
    case JinjaKind::kInt:
      return "int";
    case JinjaKind::kFloat:
      return "float";
    case JinjaKind::kString:
      return markup() ? "Markup" : "str";
    case JinjaKind::kList:
      return "list";
    case JinjaKind::kTuple:
      return "tuple";
    case JinjaKind::kRange:
      return "range";
    case JinjaKind::kKeys:
      return "dict_keys";
    case JinjaKind::kValues:
      return "dict_values";
    case JinjaKind::kItems:
      return "dict_items";
    case JinjaKind::kDict:
      return "dict";
    case JinjaKind::kIterator:
      return iterator().type;
    case JinjaKind::kNamespace:
      return "Namespace";
    case JinjaKind::kLoop:
      return "LoopContext";
    case JinjaKind::kMacro:
      return "Macro";
    case JinjaKind::kFunction:
      return "function";
    case JinjaKind::kMethod:
      return "builtin_function_or_method";
  }
  return "object";
}

}  // namespace lockstep

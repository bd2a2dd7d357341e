#include "model/chat/jinja_ops.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_format.h"
#include "model/chat/python_text.h"

namespace lockstep {
namespace {

// Containers within containers. JSON comes with at most kMaxJsonDepth levels; a template may add
// some.
constexpr int kMaxValueDepth = 500;
constexpr int64_t kMaxRange = 100000;  // the sandbox's own limit

[[noreturn]] void FailLimit(std::string what) {
  throw JinjaError{absl::StatusCode::kResourceExhausted, std::move(what)};
}

// Where each item lies in the Python ordering `a op b` of two sequences: the first pair that
// differs decides.
bool LessSequence(JinjaRuntime& rt, const JinjaValue& a, const JinjaValue& b, const char* op) {
  const auto& x = a.items();
  const auto& y = b.items();
  for (size_t i = 0; i < std::min(x.size(), y.size()); ++i) {
    if (!Equal(rt, x[i], y[i])) return Less(rt, x[i], y[i], op);
  }
  return op[1] == '=' ? x.size() <= y.size() : x.size() < y.size();
}

// 128 bits hold any product of two numbers of JSON; more is no number of a chat template.
[[noreturn]] void FailWideInt() {
  FailUnsupported("integers of more than 127 bits are not supported");
}

JinjaInt FloorDivide(JinjaInt a, JinjaInt b) {
  if (b == 0) FailJinja("integer division or modulo by zero");
  const JinjaInt quotient = a / b;
  return quotient - ((a % b != 0 && (a < 0) != (b < 0)) ? 1 : 0);
}

JinjaValue Power(const JinjaValue& a, const JinjaValue& b) {
  if (!a.is_int() || !b.is_int() || b.int_value() < 0) {
    const double base = a.float_value();
    const double exponent = b.float_value();
    if (base == 0 && exponent < 0) FailJinja("0.0 cannot be raised to a negative power");
    if (base < 0 && exponent != std::floor(exponent)) {
      FailUnsupported("a power of a negative number that is complex");
    }
    const double value = std::pow(base, exponent);
    if (std::isinf(value) && !std::isinf(base) && !std::isinf(exponent)) {
      FailJinja("numerical result out of range");
    }
    return JinjaValue::Float(value);
  }
  JinjaInt result = 1;
  JinjaInt base = a.int_value();
  JinjaInt exponent = b.int_value();
  if (base == 0 || base == 1) return JinjaValue::Int(exponent == 0 ? 1 : base);
  if (base == -1) return JinjaValue::Int(exponent % 2 == 0 ? 1 : -1);
  for (; exponent > 0; --exponent) {
    if (__builtin_mul_overflow(result, base, &result)) FailWideInt();
  }
  return JinjaValue::Int(result);
}

JinjaValue FloatArithmetic(std::string_view op, double a, double b) {
  if (op == "+") return JinjaValue::Float(a + b);
  if (op == "-") return JinjaValue::Float(a - b);
  if (op == "*") return JinjaValue::Float(a * b);
  if (b == 0) FailJinja(op == "/" ? "division by zero" : "float floor division or modulo by zero");
  if (op == "/") return JinjaValue::Float(a / b);
  double remainder = std::fmod(a, b);
  if (remainder != 0 && (remainder < 0) != (b < 0)) remainder += b;
  if (op == "%") return JinjaValue::Float(remainder);
  return JinjaValue::Float(std::floor((a - remainder) / b + 0.5));
}

JinjaValue IntArithmetic(std::string_view op, JinjaInt a, JinjaInt b) {
  JinjaInt r = 0;
  const bool add = op == "+";
  const bool subtract = op == "-";
  if (add || subtract || op == "*") {
    const bool overflow = add        ? __builtin_add_overflow(a, b, &r)
                          : subtract ? __builtin_sub_overflow(a, b, &r)
                                     : __builtin_mul_overflow(a, b, &r);
    if (overflow) FailWideInt();
    return JinjaValue::Int(r);
  }
  if (op == "/") {
    if (b == 0) FailJinja("division by zero");
    return JinjaValue::Float(static_cast<double>(a) / static_cast<double>(b));
  }
  const JinjaInt quotient = FloorDivide(a, b);
  return JinjaValue::Int(op == "//" ? quotient : a - quotient * b);
}

[[noreturn]] void FailOperands(std::string_view op, const JinjaValue& a, const JinjaValue& b) {
  FailJinja(absl::StrFormat("unsupported operand types for %s: '%s' and '%s'", op, a.TypeName(),
                            b.TypeName()));
}

JinjaValue AddText(JinjaRuntime& rt, const JinjaValue& a, const JinjaValue& b) {
  if (!a.is_string() || !b.is_string()) {
    FailJinja(absl::StrFormat("can only concatenate str to str, not '%s' + '%s'", a.TypeName(),
                              b.TypeName()));
  }
  // Text that was marked safe escapes what is added to it.
  const bool markup = a.markup() || b.markup();
  std::string text = markup && !a.markup() ? EscapeHtml(a.text()) : std::string(a.text());
  text += markup && !b.markup() ? EscapeHtml(b.text()) : std::string(b.text());
  return rt.String(std::move(text), markup);
}

JinjaValue Repeat(JinjaRuntime& rt, const JinjaValue& value, JinjaInt times) {
  if (times < 0) times = 0;
  const size_t size = value.is_string() ? value.text().size() : value.items().size();
  if (size == 0) times = 0;
  if (times > (JinjaInt{1} << 40)) times = JinjaInt{1} << 40;
  const auto n = static_cast<size_t>(times);
  const size_t item_bytes = value.is_string() ? 1 : sizeof(JinjaValue);
  if (size != 0 && n > (size_t{1} << 40) / size) rt.Allocate(size_t{1} << 40);
  rt.Allocate(size * n * item_bytes);
  if (value.is_string()) {
    std::string text;
    text.reserve(size * n);
    for (size_t i = 0; i < n; ++i) text += value.text();
    return JinjaValue::String(std::move(text), value.markup());
  }
  std::vector<JinjaValue> items;
  items.reserve(size * n);
  for (size_t i = 0; i < n; ++i) {
    items.insert(items.end(), value.items().begin(), value.items().end());
  }
  return rt.Sequence(value.kind(), std::move(items));
}

bool IsListOrTuple(const JinjaValue& v) {
  return v.Is(JinjaKind::kList) || v.Is(JinjaKind::kTuple);
}

}  // namespace

JinjaRuntime::~JinjaRuntime() {
  // Values point at namespaces, never own them: emptying each first makes destruction flat.
  for (JinjaNamespace& ns : namespaces_) ns.attributes.clear();
}

void JinjaRuntime::Step(int64_t steps) {
  steps_ += steps;
  if (steps_ > options_.limits.max_steps) {
    FailLimit(absl::StrFormat("the rendering takes more than %d steps (limit max_steps)",
                              options_.limits.max_steps));
  }
}

void JinjaRuntime::Allocate(size_t bytes) {
  // What an object costs beside its payload: its head, the count of its users, the place that holds
  // it.
  constexpr int64_t kObjectBytes = 112;
  allocated_ += static_cast<int64_t>(std::min(bytes, size_t{1} << 40)) + kObjectBytes;
  Step(static_cast<int64_t>(bytes / 64));
  if (allocated_ > options_.limits.max_allocated_bytes) {
    FailLimit(
        absl::StrFormat("the rendering makes more than %d bytes of values (limit "
                        "max_allocated_bytes)",
                        options_.limits.max_allocated_bytes));
  }
}

int JinjaRuntime::CheckDepth(int depth) const {
  if (depth > kMaxValueDepth) {
    FailLimit(absl::StrFormat("values nest deeper than %d levels", kMaxValueDepth));
  }
  return depth;
}

JinjaValue JinjaRuntime::String(std::string text, bool markup) {
  Allocate(text.size());
  return JinjaValue::String(std::move(text), markup);
}

JinjaValue JinjaRuntime::Sequence(JinjaKind kind, std::vector<JinjaValue> items) {
  Allocate(items.size() * sizeof(JinjaValue));
  auto sequence = std::make_shared<JinjaSequence>();
  int depth = 0;
  for (const JinjaValue& item : items) depth = std::max(depth, item.depth());
  sequence->depth = CheckDepth(depth + 1);
  sequence->items = std::move(items);
  return JinjaValue::Sequence(kind, std::move(sequence));
}

JinjaValue JinjaRuntime::Range(JinjaInt start, JinjaInt stop, JinjaInt step) {
  if (step == 0) FailJinja("range() arg 3 must not be zero");
  const JinjaInt span = step > 0 ? stop - start : start - stop;
  const JinjaInt size = step > 0 ? step : -step;
  const JinjaInt n = span <= 0 ? 0 : (span + size - 1) / size;
  if (n > kMaxRange) FailLimit(absl::StrFormat("range() has more than %d items", kMaxRange));
  Allocate(static_cast<size_t>(n) * sizeof(JinjaValue));
  auto sequence = std::make_shared<JinjaSequence>();
  for (JinjaInt i = 0; i < n; ++i) sequence->items.push_back(JinjaValue::Int(start + i * step));
  sequence->start = start;
  sequence->stop = stop;
  sequence->step = step;
  return JinjaValue::Sequence(JinjaKind::kRange, std::move(sequence));
}

JinjaValue JinjaRuntime::Dict(std::vector<JinjaPair> items) {
  Allocate(items.size() * sizeof(JinjaPair));
  auto dict = std::make_shared<JinjaDict>();
  int depth = 0;
  for (JinjaPair& item : items) {
    if (item.first.is_dict() || (item.first.is_sequence() && !item.first.Is(JinjaKind::kTuple))) {
      FailJinja(absl::StrFormat("unhashable type: '%s'", item.first.TypeName()));
    }
    depth = std::max({depth, item.first.depth(), item.second.depth()});
    if (const JinjaValue* known = FindKey(*this, *dict, item.first)) {
      *const_cast<JinjaValue*>(known) = std::move(item.second);
    } else {
      dict->items.push_back(std::move(item));
    }
  }
  dict->depth = CheckDepth(depth + 1);
  return JinjaValue::Dict(std::move(dict));
}

JinjaValue JinjaRuntime::Iterator(std::string type, int source_depth,
                                  std::function<bool(JinjaValue*)> next) {
  Allocate(sizeof(JinjaIterator));
  auto iterator = std::make_shared<JinjaIterator>();
  iterator->next = std::move(next);
  iterator->type = std::move(type);
  iterator->depth = CheckDepth(source_depth + 1);
  return JinjaValue::Iterator(std::move(iterator));
}

JinjaValue JinjaRuntime::Namespace(std::vector<std::pair<std::string, JinjaValue>> attributes) {
  Allocate(sizeof(JinjaNamespace));
  namespaces_.push_back({std::move(attributes)});
  return JinjaValue::Namespace(&namespaces_.back());
}

void RequireDefined(const JinjaValue& value) {
  if (value.is_undefined()) FailJinja(value.undefined_message());
}

const JinjaValue* FindKey(JinjaRuntime& rt, const JinjaDict& dict, const JinjaValue& key) {
  rt.Step(1 + static_cast<int64_t>(dict.items.size() / 8));
  if (key.is_string()) return dict.Find(key.text());
  for (const JinjaPair& item : dict.items) {
    if (Equal(rt, item.first, key)) return &item.second;
  }
  return nullptr;
}

bool Equal(JinjaRuntime& rt, const JinjaValue& a, const JinjaValue& b) {
  if (a.is_number() && b.is_number()) {
    if (a.is_int() && b.is_int()) return a.int_value() == b.int_value();
    return a.float_value() == b.float_value();
  }
  if (a.kind() != b.kind()) return false;
  if (a.is_string()) {
    if (a.text().size() != b.text().size()) return false;
    rt.Step(static_cast<int64_t>(a.text().size() / 64));
    return a.text() == b.text();
  }
  if (a.is_sequence()) {
    rt.Step(static_cast<int64_t>(std::min(a.items().size(), b.items().size())));
    return std::equal(a.items().begin(), a.items().end(), b.items().begin(), b.items().end(),
                      [&rt](const JinjaValue& x, const JinjaValue& y) { return Equal(rt, x, y); });
  }
  if (a.is_dict()) {
    if (a.dict().items.size() != b.dict().items.size()) return false;
    return std::all_of(a.dict().items.begin(), a.dict().items.end(),
                       [&rt, &b](const JinjaPair& item) {
                         const JinjaValue* other = FindKey(rt, b.dict(), item.first);
                         return other != nullptr && Equal(rt, item.second, *other);
                       });
  }
  switch (a.kind()) {
    case JinjaKind::kIterator:
      return &a.iterator() == &b.iterator();
    case JinjaKind::kNamespace:
      return a.ns() == b.ns();
    case JinjaKind::kLoop:
      return &a.loop() == &b.loop();
    case JinjaKind::kMacro:
      return &a.macro() == &b.macro();
    case JinjaKind::kFunction:
      return a.function() == b.function();
    case JinjaKind::kMethod:
      return &a.method() == &b.method();
    default:
      return true;  // undefined, none
  }
}

bool Less(JinjaRuntime& rt, const JinjaValue& a, const JinjaValue& b, const char* op) {
  rt.Step();
  RequireDefined(a);
  RequireDefined(b);
  const bool or_equal = op[1] == '=';
  if (a.is_int() && b.is_int()) {
    return or_equal ? a.int_value() <= b.int_value() : a.int_value() < b.int_value();
  }
  if (a.is_number() && b.is_number()) {
    return or_equal ? a.float_value() <= b.float_value() : a.float_value() < b.float_value();
  }
  if (a.is_string() && b.is_string())
    rt.Step(static_cast<int64_t>(std::min(a.text().size(), b.text().size()) / 64));
  // The order of UTF-8's bytes is that of its code points.
  if (a.is_string() && b.is_string()) return or_equal ? a.text() <= b.text() : a.text() < b.text();
  if (a.kind() == b.kind() && IsListOrTuple(a)) return LessSequence(rt, a, b, op);
  FailJinja(absl::StrFormat("'%s' not supported between instances of '%s' and '%s'", op,
                            a.TypeName(), b.TypeName()));
}

JinjaValue Arithmetic(JinjaRuntime& rt, std::string_view op, const JinjaValue& a,
                      const JinjaValue& b) {
  if (op == "%" && a.is_string()) return rt.String(PercentFormat(rt, a.text(), b));
  RequireDefined(a);
  RequireDefined(b);
  if (a.is_number() && b.is_number()) {
    if (op == "**") return Power(a, b);
    if (a.is_int() && b.is_int()) return IntArithmetic(op, a.int_value(), b.int_value());
    return FloatArithmetic(op, a.float_value(), b.float_value());
  }
  if (op == "+" && (a.is_string() || b.is_string())) return AddText(rt, a, b);
  if (op == "+" && IsListOrTuple(a) && a.kind() == b.kind()) {
    std::vector<JinjaValue> items = a.items();
    items.insert(items.end(), b.items().begin(), b.items().end());
    return rt.Sequence(a.kind(), std::move(items));
  }
  if (op == "*" && b.is_int() && (a.is_string() || IsListOrTuple(a))) {
    return Repeat(rt, a, b.int_value());
  }
  if (op == "*" && a.is_int() && (b.is_string() || IsListOrTuple(b))) {
    return Repeat(rt, b, a.int_value());
  }
  FailOperands(op, a, b);
}

JinjaValue Negate(const JinjaValue& value) {
  RequireDefined(value);
  if (value.is_int()) return JinjaValue::Int(-value.int_value());
  if (value.is_number()) return JinjaValue::Float(-value.float_value());
  FailJinja(absl::StrFormat("bad operand type for unary -: '%s'", value.TypeName()));
}

BoundArgs::BoundArgs(const std::string& callee, const JinjaArgs& args,
                     std::initializer_list<const char*> names, size_t required)
    : callee_(callee), names_(names.begin(), names.end()), bound_(names.size(), nullptr) {
  if (args.positional.size() > names.size()) {
    FailJinja(absl::StrFormat("%s() takes at most %d arguments (%d given)", callee, names.size(),
                              args.positional.size()));
  }
  for (size_t i = 0; i < args.positional.size(); ++i) bound_[i] = &args.positional[i];
  for (const auto& [name, value] : args.named) {
    const auto it = std::find(names_.begin(), names_.end(), name);
    if (it == names_.end()) {
      FailJinja(absl::StrFormat("%s() got an unexpected argument '%s'", callee, name));
    }
    const auto i = static_cast<size_t>(it - names_.begin());
    if (bound_[i] != nullptr) {
      FailJinja(absl::StrFormat("%s() got several values for argument '%s'", callee, name));
    }
    bound_[i] = &value;
  }
  for (size_t i = 0; i < required; ++i) {
    if (bound_[i] == nullptr) {
      FailJinja(absl::StrFormat("%s() misses its argument '%s'", callee, names_[i]));
    }
  }
}

bool BoundArgs::Bool(size_t i, bool fallback) const {
  return bound_[i] == nullptr ? fallback : bound_[i]->Truthy();
}

JinjaInt BoundArgs::Int(size_t i, JinjaInt fallback) const {
  if (bound_[i] == nullptr) return fallback;
  RequireDefined(*bound_[i]);
  if (!bound_[i]->is_int()) {
    FailJinja(absl::StrFormat("%s(): argument '%s' must be an integer, not '%s'", callee_,
                              names_[i], bound_[i]->TypeName()));
  }
  return bound_[i]->int_value();
}

std::string_view BoundArgs::Text(size_t i, std::string_view fallback) const {
  if (bound_[i] == nullptr) return fallback;
  RequireDefined(*bound_[i]);
  if (!bound_[i]->is_string()) {
    FailJinja(absl::StrFormat("%s(): argument '%s' must be a string, not '%s'", callee_, names_[i],
                              bound_[i]->TypeName()));
  }
  return bound_[i]->text();
}

}  // namespace lockstep

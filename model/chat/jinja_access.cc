// Iteration, length, membership, attributes, items and slices.
#include <algorithm>

#include "absl/strings/str_format.h"
#include "model/chat/jinja_ops.h"
#include "model/chat/python_text.h"

namespace lockstep {
namespace {

[[noreturn]] void FailNotIterable(const JinjaValue& value) {
  FailJinja(absl::StrFormat("'%s' object is not iterable", value.TypeName()));
}

// How jinja2 calls an object in the message of what it lacks.
std::string ObjectName(const JinjaValue& value) {
  return value.is_none() ? "None" : value.TypeName() + " object";
}

JinjaValue NoAttribute(const JinjaValue& value, std::string_view name) {
  return JinjaValue::Undefined(
      absl::StrFormat("'%s' has no attribute '%s'", ObjectName(value), name));
}

JinjaValue NoElement(JinjaRuntime& rt, const JinjaValue& value, const JinjaValue& key) {
  if (key.is_string()) return NoAttribute(value, key.text());
  return JinjaValue::Undefined(
      absl::StrFormat("%s has no element %s", ObjectName(value), PythonRepr(rt, key)));
}

bool IsUnsafe(const JinjaValue& value, std::string_view name) {
  static constexpr std::string_view kList[] = {"append", "reverse", "insert",
                                               "sort",   "extend",  "remove"};
  static constexpr std::string_view kDict[] = {"clear", "pop", "popitem", "setdefault", "update"};
  if (value.Is(JinjaKind::kList))
    return std::find(std::begin(kList), std::end(kList), name) != std::end(kList);
  return value.is_dict() && std::find(std::begin(kDict), std::end(kDict), name) != std::end(kDict);
}

// obj.name as Python's getattr gives it; false if there is no such attribute.
bool PythonAttribute(JinjaRuntime& rt, const JinjaValue& value, const std::string& name,
                     JinjaValue* attribute) {
  if (value.Is(JinjaKind::kNamespace)) {
    const JinjaValue* found = value.ns()->Find(name);
    if (found == nullptr) return false;
    *attribute = *found;
    return true;
  }
  if (value.Is(JinjaKind::kLoop) || value.Is(JinjaKind::kRange) || HasMethod(value, name)) {
    JinjaLoop* loop = value.Is(JinjaKind::kLoop) ? &value.loop() : nullptr;
    JinjaValue item;
    if (HasMethod(value, name)) {
      if (IsUnsafe(value, name)) {
        *attribute = JinjaValue::Undefined(
            absl::StrFormat("access to attribute '%s' of '%s' object is unsafe: values cannot be "
                            "changed by a template",
                            name, value.TypeName()));
        return true;
      }
      rt.Allocate(sizeof(JinjaMethod));
      *attribute =
          JinjaValue::Method(std::make_shared<const JinjaMethod>(JinjaMethod{value, name}));
    } else if (loop == nullptr) {
      return false;
    } else if (name == "index0") {
      *attribute = JinjaValue::Int(loop->index0);
    } else if (name == "index") {
      *attribute = JinjaValue::Int(loop->index0 + 1);
    } else if (name == "first") {
      *attribute = JinjaValue::Bool(loop->index0 == 0);
    } else if (name == "last") {
      *attribute = JinjaValue::Bool(!loop->Peek(&item));
    } else if (name == "length") {
      *attribute = JinjaValue::Int(loop->Length());
    } else if (name == "revindex0") {
      *attribute = JinjaValue::Int(loop->Length() - loop->index0 - 1);
    } else if (name == "revindex") {
      *attribute = JinjaValue::Int(loop->Length() - loop->index0);
    } else if (name == "previtem") {
      *attribute =
          loop->index0 == 0 ? JinjaValue::Undefined("there is no previous item") : loop->previous;
    } else if (name == "nextitem") {
      *attribute = loop->Peek(&item) ? item : JinjaValue::Undefined("there is no next item");
    } else if (name == "depth" || name == "depth0") {
      *attribute = JinjaValue::Int(name == "depth" ? 1 : 0);
    } else {
      return false;
    }
    return true;
  }
  return false;
}

// obj[key] for a key that is no slice; false where Python raises TypeError or LookupError.
bool PythonItem(JinjaRuntime& rt, const JinjaValue& value, const JinjaValue& key,
                JinjaValue* item) {
  if (value.is_dict()) {
    const JinjaValue* found = FindKey(rt, value.dict(), key);
    if (found == nullptr) return false;
    *item = *found;
    return true;
  }
  const bool indexable = value.is_string() || value.Is(JinjaKind::kList) ||
                         value.Is(JinjaKind::kTuple) || value.Is(JinjaKind::kRange);
  if (!indexable || !key.is_int()) return false;
  JinjaInt index = key.int_value();
  const int64_t length = Length(rt, value);
  if (index < 0) index += length;
  if (index < 0 || index >= length) return false;
  if (!value.is_string()) {
    *item = value.items()[static_cast<size_t>(index)];
    return true;
  }
  const size_t begin = ByteOffset(value.text(), static_cast<size_t>(index));
  size_t end = begin;
  NextCodePoint(value.text(), &end);
  *item = rt.String(std::string(value.text().substr(begin, end - begin)), value.markup());
  return true;
}

// The indices that a slice takes, by Python's rules.
struct SliceRange {
  JinjaInt start = 0, step = 1;
  int64_t count = 0;
};

SliceRange ResolveSlice(int64_t length, const JinjaValue& start, const JinjaValue& stop,
                        const JinjaValue& step) {
  const auto number = [](const JinjaValue& v, JinjaInt fallback) {
    if (v.is_none()) return fallback;
    RequireDefined(v);
    if (!v.is_int()) FailJinja("slice indices must be integers or None");
    return v.int_value();
  };
  SliceRange r;
  r.step = number(step, 1);
  if (r.step == 0) FailJinja("slice step cannot be zero");
  const JinjaInt lowest = r.step < 0 ? -1 : 0;
  const JinjaInt highest = r.step < 0 ? length - 1 : length;
  const auto bound = [&](const JinjaValue& v, JinjaInt fallback) {
    JinjaInt i = number(v, fallback);
    if (!v.is_none() && i < 0) i += length;
    return std::clamp(i, lowest, std::max(lowest, highest));
  };
  r.start = bound(start, r.step < 0 ? highest : lowest);
  const JinjaInt end = bound(stop, r.step < 0 ? lowest : highest);
  const JinjaInt span = r.step > 0 ? end - r.start : r.start - end;
  const JinjaInt size = r.step > 0 ? r.step : -r.step;
  r.count = span <= 0 ? 0 : static_cast<int64_t>((span + size - 1) / size);
  return r;
}

JinjaValue SliceText(JinjaRuntime& rt, const JinjaValue& value, const SliceRange& r) {
  const std::string_view text = value.text();
  if (r.step == 1) {
    const size_t begin = ByteOffset(text, static_cast<size_t>(r.start));
    const size_t end = begin + ByteOffset(text.substr(begin), static_cast<size_t>(r.count));
    return rt.String(std::string(text.substr(begin, end - begin)), value.markup());
  }
  std::vector<std::string_view> characters;
  rt.Allocate(text.size() * sizeof(std::string_view));
  for (size_t p = 0; p < text.size();) {
    const size_t begin = p;
    NextCodePoint(text, &p);
    characters.push_back(text.substr(begin, p - begin));
  }
  std::string out;
  for (int64_t i = 0; i < r.count; ++i)
    out += characters[static_cast<size_t>(r.start + i * r.step)];
  return rt.String(std::move(out), value.markup());
}

}  // namespace

std::function<bool(JinjaValue*)> Iterate(JinjaRuntime& rt, const JinjaValue& value) {
  if (value.is_sequence()) {
    return [value, i = size_t{0}, &rt](JinjaValue* item) mutable {
      rt.Step();
      if (i >= value.items().size()) return false;
      *item = value.items()[i++];
      return true;
    };
  }
  if (value.is_dict()) {
    return [value, i = size_t{0}, &rt](JinjaValue* item) mutable {
      rt.Step();
      if (i >= value.dict().items.size()) return false;
      *item = value.dict().items[i++].first;
      return true;
    };
  }
  if (value.is_string()) {
    return [value, p = size_t{0}, &rt](JinjaValue* item) mutable {
      rt.Step();
      if (p >= value.text().size()) return false;
      const size_t begin = p;
      NextCodePoint(value.text(), &p);
      *item = rt.String(std::string(value.text().substr(begin, p - begin)));
      return true;
    };
  }
  if (value.Is(JinjaKind::kIterator)) {
    return [value, &rt](JinjaValue* item) {
      rt.Step();
      return value.iterator().next(item);
    };
  }
  if (value.is_undefined()) return [](JinjaValue*) { return false; };
  FailNotIterable(value);
}

std::vector<JinjaValue> ToVector(JinjaRuntime& rt, const JinjaValue& value) {
  std::vector<JinjaValue> items;
  if (value.is_sequence()) {
    rt.Allocate(value.items().size() * sizeof(JinjaValue));
    return value.items();
  }
  const auto next = Iterate(rt, value);
  for (JinjaValue item; next(&item);) {
    rt.Allocate(sizeof(JinjaValue));
    items.push_back(item);
  }
  return items;
}

int64_t Length(JinjaRuntime& rt, const JinjaValue& value) {
  if (value.is_sequence()) return static_cast<int64_t>(value.items().size());
  switch (value.kind()) {
    case JinjaKind::kUndefined:
      return 0;
    case JinjaKind::kString:
      rt.ScanText(value.text());
      return static_cast<int64_t>(CountCodePoints(value.text()));
    case JinjaKind::kDict:
      return static_cast<int64_t>(value.dict().items.size());
    case JinjaKind::kLoop:
      return value.loop().Length();
    default:
      FailJinja(absl::StrFormat("object of type '%s' has no len()", value.TypeName()));
  }
}

bool Contains(JinjaRuntime& rt, const JinjaValue& container, const JinjaValue& item) {
  if (container.is_string()) {
    if (!item.is_string()) {
      RequireDefined(item);
      FailJinja(absl::StrFormat("'in <string>' requires a string as left operand, not '%s'",
                                item.TypeName()));
    }
    rt.ScanText(container.text());
    return FindFirst(container.text(), item.text()) != std::string_view::npos;
  }
  if (container.is_dict()) {
    if (item.is_dict() || item.Is(JinjaKind::kList)) {
      FailJinja(absl::StrFormat("unhashable type: '%s'", item.TypeName()));
    }
    return FindKey(rt, container.dict(), item) != nullptr;
  }
  const bool iterable =
      container.is_sequence() || container.Is(JinjaKind::kIterator) || container.is_undefined();
  if (!iterable) {
    FailJinja(absl::StrFormat("argument of type '%s' is not iterable", container.TypeName()));
  }
  const auto next = Iterate(rt, container);
  for (JinjaValue candidate; next(&candidate);) {
    if (Equal(rt, candidate, item)) return true;
  }
  return false;
}

JinjaValue GetAttribute(JinjaRuntime& rt, const JinjaValue& value, const std::string& name) {
  RequireDefined(value);
  JinjaValue found;
  if (PythonAttribute(rt, value, name, &found)) return found;
  if (value.is_dict() && PythonItem(rt, value, JinjaValue::String(name), &found)) return found;
  return NoAttribute(value, name);
}

JinjaValue GetItem(JinjaRuntime& rt, const JinjaValue& value, const JinjaValue& key) {
  RequireDefined(value);
  JinjaValue found;
  if (PythonItem(rt, value, key, &found)) return found;
  if (key.is_string() && PythonAttribute(rt, value, std::string(key.text()), &found)) return found;
  return NoElement(rt, value, key);
}

JinjaValue Slice(JinjaRuntime& rt, const JinjaValue& value, const JinjaValue& start,
                 const JinjaValue& stop, const JinjaValue& step) {
  RequireDefined(value);
  const bool is_list = value.Is(JinjaKind::kList) || value.Is(JinjaKind::kTuple);
  if (!value.is_string() && !is_list && !value.Is(JinjaKind::kRange)) {
    FailJinja(absl::StrFormat("'%s' object cannot be sliced", value.TypeName()));
  }
  const SliceRange r = ResolveSlice(Length(rt, value), start, stop, step);
  if (value.is_string()) return SliceText(rt, value, r);
  if (!is_list) {
    const JinjaSequence& range = value.sequence();
    const JinjaInt first = range.start + r.start * range.step;
    const JinjaInt stride = r.step * range.step;
    return rt.Range(first, first + r.count * stride, stride);
  }
  std::vector<JinjaValue> items;
  for (int64_t i = 0; i < r.count; ++i) {
    items.push_back(value.items()[static_cast<size_t>(r.start + i * r.step)]);
  }
  return rt.Sequence(value.kind(), std::move(items));
}

}  // namespace lockstep

// Filters over sequences. Those that give generators in jinja2 give iterators here: true in a
// condition even when empty, without a length, gone after one pass.
#include <algorithm>

#include "absl/strings/str_format.h"
#include "model/chat/jinja_filters.h"
#include "model/chat/python_text.h"

namespace lockstep {
namespace {

using Rt = JinjaRuntime&;
using V = const JinjaValue&;
using Args = const JinjaArgs&;

JinjaValue LowerCase(Rt rt, const JinjaValue& v) {
  return v.is_string() ? rt.String(PythonLower(v.text())) : v;
}

// "a.b.0" split into keys; numbers are indices.
std::vector<JinjaValue> AttributeParts(Rt rt, const JinjaValue& attribute) {
  if (attribute.is_none()) return {};
  if (!attribute.is_string()) return {attribute};
  std::vector<JinjaValue> parts;
  std::string_view rest = attribute.text();
  for (bool more = true; more;) {
    const size_t dot = rest.find('.');
    more = dot != std::string_view::npos;
    const std::string_view part = rest.substr(0, dot);
    JinjaInt index = 0;
    const bool number =
        !part.empty() && part.find_first_not_of("0123456789") == std::string_view::npos;
    if (number && ParsePythonInt(part, 10, &index)) {
      parts.push_back(JinjaValue::Int(index));
    } else {
      parts.push_back(rt.String(std::string(part)));
    }
    if (more) rest.remove_prefix(dot + 1);
  }
  return parts;
}

JinjaValue Resolve(Rt rt, JinjaValue item, const std::vector<JinjaValue>& parts,
                   const JinjaValue* fallback = nullptr) {
  for (const JinjaValue& part : parts) {
    item = GetItem(rt, item, part);
    if (fallback != nullptr && item.is_undefined()) item = *fallback;
  }
  return item;
}

// What sort, unique, min and max compare: an attribute, in lower case unless case matters.
class KeyGetter {
 public:
  KeyGetter(Rt rt, const JinjaValue* attribute, bool case_sensitive)
      : rt_(rt), case_sensitive_(case_sensitive) {
    if (attribute != nullptr) parts_ = AttributeParts(rt, *attribute);
  }
  JinjaValue operator()(const JinjaValue& item) const {
    const JinjaValue key = Resolve(rt_, item, parts_);
    return case_sensitive_ ? key : LowerCase(rt_, key);
  }

 private:
  Rt rt_;
  bool case_sensitive_;
  std::vector<JinjaValue> parts_;
};

struct Keyed {
  JinjaValue key, value;
};

// std::stable_sort with Python's rule for `reverse`: equal elements keep their order.
std::vector<JinjaValue> SortByKey(Rt rt, std::vector<Keyed> items, bool reverse) {
  std::stable_sort(items.begin(), items.end(), [&rt, reverse](const Keyed& a, const Keyed& b) {
    return reverse ? Less(rt, b.key, a.key) : Less(rt, a.key, b.key);
  });
  std::vector<JinjaValue> sorted;
  for (Keyed& item : items) sorted.push_back(std::move(item.value));
  return sorted;
}

JinjaValue Sort(Rt rt, V v, Args args) {
  const BoundArgs bound("sort", args, {"reverse", "case_sensitive", "attribute"});
  std::vector<KeyGetter> getters;
  const bool case_sensitive = bound.Bool(1, false);
  if (bound[2] != nullptr && bound[2]->is_string()) {
    const JinjaMethod split{*bound[2], "split"};
    const JinjaValue parts = CallMethod(rt, split, {{rt.String(",")}, {}});
    for (const JinjaValue& part : parts.items()) getters.emplace_back(rt, &part, case_sensitive);
  } else {
    getters.emplace_back(rt, bound[2], case_sensitive);
  }
  std::vector<Keyed> items;
  for (const JinjaValue& item : ToVector(rt, v)) {
    std::vector<JinjaValue> keys;
    for (const KeyGetter& getter : getters) keys.push_back(getter(item));
    items.push_back({rt.List(std::move(keys)), item});
  }
  return rt.List(SortByKey(rt, std::move(items), bound.Bool(0, false)));
}

JinjaValue DictSort(Rt rt, V v, Args args) {
  const BoundArgs bound("dictsort", args, {"case_sensitive", "by", "reverse"});
  const std::string_view by = bound.Text(1, "key");
  if (by != "key" && by != "value") FailJinja("dictsort(): 'by' must be \"key\" or \"value\"");
  RequireDefined(v);
  if (!v.is_dict())
    FailJinja(absl::StrFormat("dictsort(): a mapping is needed, not '%s'", v.TypeName()));
  std::vector<Keyed> items;
  for (const auto& [key, value] : v.dict().items) {
    const JinjaValue& sort_key = by == "key" ? key : value;
    items.push_back(
        {bound.Bool(0, false) ? sort_key : LowerCase(rt, sort_key), rt.Tuple({key, value})});
  }
  return rt.List(SortByKey(rt, std::move(items), bound.Bool(2, false)));
}

JinjaValue Unique(Rt rt, V v, Args args) {
  const BoundArgs bound("unique", args, {"case_sensitive", "attribute"});
  const KeyGetter getter(rt, bound[1], bound.Bool(0, false));
  std::vector<JinjaValue> seen;
  return rt.Iterator(
      "generator", v.depth(), [&rt, getter, seen, next = Iterate(rt, v)](JinjaValue* item) mutable {
        while (next(item)) {
          const JinjaValue key = getter(*item);
          rt.Step(1 + static_cast<int64_t>(seen.size() / 8));
          const bool known = std::any_of(seen.begin(), seen.end(),
                                         [&rt, &key](V other) { return Equal(rt, other, key); });
          if (known) continue;
          rt.Allocate(sizeof(JinjaValue));
          seen.push_back(key);
          return true;
        }
        return false;
      });
}

JinjaValue Extreme(Rt rt, V v, Args args, bool want_max) {
  const BoundArgs bound(want_max ? "max" : "min", args, {"case_sensitive", "attribute"});
  const KeyGetter getter(rt, bound[1], bound.Bool(0, false));
  const auto next = Iterate(rt, v);
  JinjaValue best;
  if (!next(&best)) return JinjaValue::Undefined("No aggregated item, sequence was empty.");
  JinjaValue best_key = getter(best);
  for (JinjaValue item; next(&item);) {
    JinjaValue key = getter(item);
    if (want_max ? !Less(rt, best_key, key) : !Less(rt, key, best_key)) continue;
    best = item;
    best_key = std::move(key);
  }
  return best;
}

JinjaValue Sum(Rt rt, V v, Args args) {
  const BoundArgs bound("sum", args, {"attribute", "start"});
  std::vector<JinjaValue> parts;
  if (bound[0] != nullptr) parts = AttributeParts(rt, *bound[0]);
  JinjaValue total = bound[1] == nullptr ? JinjaValue::Int(0) : *bound[1];
  const auto next = Iterate(rt, v);
  for (JinjaValue item; next(&item);) total = Arithmetic(rt, "+", total, Resolve(rt, item, parts));
  return total;
}

JinjaValue Join(Rt rt, V v, Args args) {
  const BoundArgs bound("join", args, {"d", "attribute"});
  const std::string separator = bound[0] == nullptr ? "" : PythonStr(rt, *bound[0]);
  std::vector<JinjaValue> parts;
  if (bound[1] != nullptr) parts = AttributeParts(rt, *bound[1]);
  std::string out;
  bool first = true;
  const auto next = Iterate(rt, v);
  for (JinjaValue item; next(&item); first = false) {
    if (!first) out += separator;
    const std::string text = PythonStr(rt, Resolve(rt, item, parts));
    rt.Allocate(text.size() + separator.size());
    out += text;
  }
  return rt.String(std::move(out));
}

JinjaValue First(Rt rt, V v, Args args) {
  BoundArgs("first", args, {});
  JinjaValue item;
  if (Iterate(rt, v)(&item)) return item;
  return JinjaValue::Undefined("No first item, sequence was empty.");
}

JinjaValue Last(Rt rt, V v, Args args) {
  BoundArgs("last", args, {});
  if (v.Is(JinjaKind::kIterator))
    FailJinja(absl::StrFormat("'%s' object is not reversible (|list is missing)", v.TypeName()));
  const std::vector<JinjaValue> items = ToVector(rt, v);
  return items.empty() ? JinjaValue::Undefined("No last item, sequence was empty.") : items.back();
}

JinjaValue Reverse(Rt rt, V v, Args args) {
  BoundArgs("reverse", args, {});
  if (v.is_string()) {
    const JinjaValue none = JinjaValue::None();
    return Slice(rt, v, none, none, JinjaValue::Int(-1));
  }
  std::vector<JinjaValue> items = ToVector(rt, v);
  std::reverse(items.begin(), items.end());
  const JinjaValue list = rt.List(std::move(items));
  if (v.Is(JinjaKind::kIterator) || v.is_undefined()) return list;
  return rt.Iterator("list_reverseiterator", v.depth(), Iterate(rt, list));
}

JinjaValue Items(Rt rt, V v, Args args) {
  BoundArgs("items", args, {});
  if (!v.is_dict() && !v.is_undefined()) {
    FailJinja(absl::StrFormat("items: a mapping is needed, not '%s'", v.TypeName()));
  }
  JinjaValue items = rt.List({});
  if (v.is_dict()) items = CallMethod(rt, JinjaMethod{v, "items"}, {});
  return rt.Iterator("generator", v.depth(), Iterate(rt, items));
}

// Rows of `count` items; the last one is filled up when there is something to fill with.
JinjaValue Batch(Rt rt, V v, Args args) {
  const BoundArgs bound("batch", args, {"linecount", "fill_with"}, 1);
  const JinjaInt count = bound.Int(0, 1);
  std::vector<JinjaValue> rows;
  std::vector<JinjaValue> row;
  const auto flush = [&] {
    rows.push_back(rt.List(std::move(row)));
    row.clear();
  };
  const auto next = Iterate(rt, v);
  for (JinjaValue item; next(&item);) {
    if (static_cast<JinjaInt>(row.size()) == count) flush();
    row.push_back(item);
  }
  if (!row.empty()) {
    const bool fill = bound[1] != nullptr && !bound[1]->is_none();
    while (fill && static_cast<JinjaInt>(row.size()) < count) {
      rt.Allocate(sizeof(JinjaValue));
      row.push_back(*bound[1]);
    }
    flush();
  }
  return rt.Iterator("generator", v.depth() + 1, Iterate(rt, rt.List(std::move(rows))));
}

JinjaValue SliceColumns(Rt rt, V v, Args args) {
  const BoundArgs bound("slice", args, {"slices", "fill_with"}, 1);
  const std::vector<JinjaValue> items = ToVector(rt, v);
  const JinjaInt slices = bound.Int(0, 1);
  if (slices == 0) FailJinja("integer division or modulo by zero");
  const auto total = static_cast<JinjaInt>(items.size());
  std::vector<JinjaValue> columns;
  JinjaInt begin = 0;
  for (JinjaInt i = 0; i < slices; ++i) {
    const bool longer = i < total % slices;
    const JinjaInt size = total / slices + (longer ? 1 : 0);
    std::vector<JinjaValue> column(items.begin() + static_cast<ptrdiff_t>(begin),
                                   items.begin() + static_cast<ptrdiff_t>(begin + size));
    if (!longer && bound[1] != nullptr && !bound[1]->is_none()) column.push_back(*bound[1]);
    columns.push_back(rt.List(std::move(column)));
    begin += size;
  }
  return rt.Iterator("generator", v.depth() + 1, Iterate(rt, rt.List(std::move(columns))));
}

JinjaValue Map(Rt rt, V v, Args args) {
  if (!v.Truthy()) return rt.Iterator("generator", 0, [](JinjaValue*) { return false; });
  if (args.positional.empty()) {
    const BoundArgs bound("map", args, {"attribute", "default"});
    if (bound[0] == nullptr) FailJinja("map() needs the name of a filter or attribute=...");
    const bool has_default = bound[1] != nullptr && !bound[1]->is_none();
    const JinjaValue fallback = has_default ? *bound[1] : JinjaValue();
    return rt.Iterator("generator", std::max(v.depth(), fallback.depth()),
                       [&rt, has_default, fallback, parts = AttributeParts(rt, *bound[0]),
                        next = Iterate(rt, v)](JinjaValue* item) {
                         if (!next(item)) return false;
                         *item = Resolve(rt, *item, parts, has_default ? &fallback : nullptr);
                         return true;
                       });
  }
  if (!args.positional[0].is_string()) FailJinja("map() needs the name of a filter");
  const JinjaFilter filter = FindJinjaFilter(args.positional[0].text());
  if (filter == nullptr) {
    FailUnsupported(
        absl::StrFormat("unknown or unsupported filter '%s'", args.positional[0].text()));
  }
  JinjaArgs rest = args;
  rest.positional.erase(rest.positional.begin());
  const int depth = std::max(v.depth(), rt.Tuple(rest.positional).depth());
  return rt.Iterator("generator", depth,
                     [&rt, filter, rest, next = Iterate(rt, v)](JinjaValue* item) {
                       if (!next(item)) return false;
                       *item = filter(rt, *item, rest);
                       return true;
                     });
}

JinjaValue SelectIf(Rt rt, V v, Args args, bool keep, bool by_attribute, const char* name) {
  if (!v.Truthy()) return rt.Iterator("generator", 0, [](JinjaValue*) { return false; });
  JinjaArgs rest = args;
  std::vector<JinjaValue> parts;
  const auto take = [&rest] {
    const JinjaValue first = rest.positional.front();
    rest.positional.erase(rest.positional.begin());
    return first;
  };
  if (by_attribute) {
    if (rest.positional.empty())
      FailJinja(absl::StrFormat("%s() needs the name of an attribute", name));
    parts = AttributeParts(rt, take());
  }
  JinjaTest test = [](JinjaRuntime&, const JinjaValue& value, const JinjaArgs&) {
    return value.Truthy();
  };
  if (!rest.positional.empty()) {
    const JinjaValue test_name = take();
    test = test_name.is_string() ? FindJinjaTest(test_name.text()) : nullptr;
    if (test == nullptr) {
      FailUnsupported(
          absl::StrFormat("%s(): unknown or unsupported test %s", name, PythonRepr(rt, test_name)));
    }
  }
  const int depth = std::max(v.depth(), rt.Tuple(rest.positional).depth());
  return rt.Iterator("generator", depth,
                     [&rt, test, rest, parts, keep, next = Iterate(rt, v)](JinjaValue* item) {
                       while (next(item)) {
                         if (test(rt, Resolve(rt, *item, parts), rest) == keep) return true;
                       }
                       return false;
                     });
}

struct NamedFilter {
  std::string_view name;
  JinjaFilter filter;
};

const NamedFilter kFilters[] = {
    {"batch", Batch},
    {"dictsort", DictSort},
    {"first", First},
    {"items", Items},
    {"join", Join},
    {"last", Last},
    {"list", [](Rt rt, V v, Args) { return rt.List(ToVector(rt, v)); }},
    {"map", Map},
    {"max", [](Rt rt, V v, Args a) { return Extreme(rt, v, a, true); }},
    {"min", [](Rt rt, V v, Args a) { return Extreme(rt, v, a, false); }},
    {"reject", [](Rt rt, V v, Args a) { return SelectIf(rt, v, a, false, false, "reject"); }},
    {"rejectattr",
     [](Rt rt, V v, Args a) { return SelectIf(rt, v, a, false, true, "rejectattr"); }},
    {"reverse", Reverse},
    {"select", [](Rt rt, V v, Args a) { return SelectIf(rt, v, a, true, false, "select"); }},
    {"selectattr", [](Rt rt, V v, Args a) { return SelectIf(rt, v, a, true, true, "selectattr"); }},
    {"slice", SliceColumns},
    {"sort", Sort},
    {"sum", Sum},
    {"unique", Unique},
};

}  // namespace

JinjaFilter FindJinjaSequenceFilter(std::string_view name) {
  for (const NamedFilter& f : kFilters) {
    if (f.name == name) return f.filter;
  }
  return nullptr;
}

}  // namespace lockstep

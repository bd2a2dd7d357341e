#include "model/chat/chat_template.h"

#include <limits>

#include "model/chat/jinja_ast.h"
#include "model/chat/jinja_interpreter.h"
#include "model/chat/jinja_parser.h"

namespace lockstep {
namespace {

JinjaValue FromJson(JinjaRuntime& rt, const OrderedJson& json) {
  switch (json.type()) {
    case OrderedJson::value_t::boolean:
      return JinjaValue::Bool(json.get<bool>());
    case OrderedJson::value_t::number_integer:
      return JinjaValue::Int(json.get<int64_t>());
    case OrderedJson::value_t::number_unsigned:
      return JinjaValue::Int(json.get<uint64_t>());
    case OrderedJson::value_t::number_float:
      return JinjaValue::Float(json.get<double>());
    case OrderedJson::value_t::string:
      return rt.String(json.get_ref<const std::string&>());
    case OrderedJson::value_t::array: {
      std::vector<JinjaValue> items;
      for (const OrderedJson& item : json) items.push_back(FromJson(rt, item));
      return rt.List(std::move(items));
    }
    case OrderedJson::value_t::object: {
      std::vector<JinjaPair> items;
      for (const auto& [key, value] : json.items()) {
        items.emplace_back(rt.String(key), FromJson(rt, value));
      }
      return rt.Dict(std::move(items));
    }
    default:
      return JinjaValue::None();
  }
}

}  // namespace

ChatTemplate::ChatTemplate(std::unique_ptr<const JinjaProgram> program)
    : program_(std::move(program)) {}
ChatTemplate::~ChatTemplate() = default;

absl::StatusOr<std::unique_ptr<ChatTemplate>> ChatTemplate::Parse(std::string_view source,
                                                                  std::string_view where) {
  try {
    std::unique_ptr<JinjaProgram> program = ParseJinja(source);
    program->where = std::string(where);
    return std::unique_ptr<ChatTemplate>(new ChatTemplate(std::move(program)));
  } catch (const JinjaSyntaxError& e) {
    return absl::Status(
        e.code, absl::StrFormat("chat template of %s, line %d: %s", where, e.line, e.message));
  }
}

absl::StatusOr<std::string> ChatTemplate::Render(const OrderedJson& input,
                                                 const RenderOptions& options) const {
  if (!input.is_object()) {
    return absl::InvalidArgumentError("the variables of a chat template must be a JSON object");
  }
  JinjaRuntime runtime(options);
  JinjaInterpreter interpreter(runtime);
  try {
    JinjaScope variables;
    for (const auto& [name, value] : input.items()) {
      variables.variables.emplace_back(name, FromJson(runtime, value));
    }
    return interpreter.Run(*program_, std::move(variables));
  } catch (const JinjaError& e) {
    if (e.code == absl::StatusCode::kAborted) return absl::AbortedError(e.message);
    return absl::Status(e.code, absl::StrFormat("chat template of %s, line %d: %s", program_->where,
                                                interpreter.line(), e.message));
  }
}

}  // namespace lockstep

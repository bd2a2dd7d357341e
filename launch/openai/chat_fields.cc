// Messages and tools of a chat, checked and brought into the form that chat templates expect.
#include <algorithm>
#include <array>
#include <optional>
#include <string_view>

#include "launch/openai/json_text.h"
#include "launch/openai/prompt_fields.h"

namespace lockstep {

namespace {

std::string Quoted(const OrderedJson& value) {
  // Long values are named by what they are, not copied to be cut.
  if (value.is_structured() && value.size() > 16) return std::string("a long ") + value.type_name();
  if (value.is_string()) return QuotedText(value.get_ref<const std::string&>());
  return QuotedText(DumpJson(value));
}

absl::Status Bad(const std::string& name, const std::string& what, const OrderedJson& found) {
  return absl::InvalidArgumentError(
      absl::StrFormat("%s must be %s, found %s", name, what, Quoted(found)));
}

const OrderedJson* Find(const OrderedJson& object, const char* key) {
  const auto it = object.find(key);
  return it == object.end() || it->is_null() ? nullptr : &*it;
}

absl::Status CheckString(const OrderedJson& object, const char* key, const std::string& name) {
  const OrderedJson* const value = Find(object, key);
  if (value == nullptr) return absl::InvalidArgumentError(name + "." + key + " is missing");
  return value->is_string() ? absl::OkStatus() : Bad(name + "." + key, "a string", *value);
}

// --- messages

// [{"type": "text", "text": ...}, ...] as one text, a line each.
absl::StatusOr<std::string> JoinParts(const OrderedJson& parts, const std::string& name) {
  std::string text;
  for (size_t i = 0; i < parts.size(); ++i) {
    const std::string part_name = absl::StrFormat("%s[%d]", name, i);
    const OrderedJson& part = parts[i];
    if (!part.is_object()) return Bad(part_name, "an object", part);
    LOCKSTEP_RETURN_IF_ERROR(CheckString(part, "type", part_name));
    const std::string type = part["type"].get<std::string>();
    const char* key = "text";
    if (type == "refusal") {
      key = "refusal";
    } else if (type != "text" && type != "input_text" && type != "output_text") {
      return absl::InvalidArgumentError(absl::StrFormat("%s.type is %s: the model reads text alone",
                                                        part_name, QuotedText(type)));
    }
    LOCKSTEP_RETURN_IF_ERROR(CheckString(part, key, part_name));
    if (i > 0) text += '\n';
    text += part[key].get_ref<const std::string&>();
  }
  return text;
}

absl::Status ReadContent(OrderedJson& message, const std::string& name) {
  const auto it = message.find("content");
  const bool may_be_absent = message.contains("tool_calls");
  if (it == message.end() || it->is_null()) {
    // Templates that ask `content is none`, or that add it to a text, both get on with "".
    if (may_be_absent || message["role"] == "assistant") {
      message["content"] = "";
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(name + ".content is missing");
  }
  if (it->is_string()) return absl::OkStatus();
  if (!it->is_array()) return Bad(name + ".content", "a string or a list of parts", *it);
  LOCKSTEP_ASSIGN_OR_RETURN(std::string text, JoinParts(*it, name + ".content"));
  *it = std::move(text);
  return absl::OkStatus();
}

// OpenAI sends arguments as JSON in a string, templates print an object.
absl::Status ReadArguments(OrderedJson& function, const std::string& name) {
  const auto it = function.find("arguments");
  if (it == function.end() || it->is_null()) {
    function["arguments"] = OrderedJson::object();
    return absl::OkStatus();
  }
  if (it->is_object()) return absl::OkStatus();
  if (!it->is_string()) return Bad(name, "a JSON object in a string", *it);
  if (it->get_ref<const std::string&>().empty()) {
    *it = OrderedJson::object();
    return absl::OkStatus();
  }
  auto parsed = ParseOrderedJson(it->get_ref<const std::string&>(), name);
  if (!parsed.ok() || !parsed->is_object()) return Bad(name, "a JSON object in a string", *it);
  *it = *std::move(parsed);
  return absl::OkStatus();
}

absl::Status ReadToolCalls(OrderedJson& message, const std::string& name) {
  const auto it = message.find("tool_calls");
  if (it == message.end()) return absl::OkStatus();
  if (it->is_null() || (it->is_array() && it->empty())) {
    message.erase("tool_calls");
    return absl::OkStatus();
  }
  if (!it->is_array()) return Bad(name + ".tool_calls", "a list", *it);
  for (size_t i = 0; i < it->size(); ++i) {
    const std::string call_name = absl::StrFormat("%s.tool_calls[%d]", name, i);
    OrderedJson& call = (*it)[i];
    if (!call.is_object() || Find(call, "function") == nullptr || !call["function"].is_object()) {
      return Bad(call_name, "an object with a function", call);
    }
    LOCKSTEP_RETURN_IF_ERROR(CheckString(call["function"], "name", call_name + ".function"));
    LOCKSTEP_RETURN_IF_ERROR(ReadArguments(call["function"], call_name + ".function.arguments"));
  }
  return absl::OkStatus();
}

absl::Status ReadMessage(OrderedJson& message, const std::string& name) {
  if (!message.is_object()) return Bad(name, "an object with role and content", message);
  LOCKSTEP_RETURN_IF_ERROR(CheckString(message, "role", name));
  constexpr std::array<std::string_view, 5> kRoles = {"system", "developer", "user", "assistant",
                                                      "tool"};
  const std::string role = message["role"].get<std::string>();
  if (std::find(kRoles.begin(), kRoles.end(), role) == kRoles.end()) {
    return Bad(name + ".role", "system, developer, user, assistant or tool", message["role"]);
  }
  if (role == "developer") message["role"] = "system";
  if (const OrderedJson* const call = Find(message, "function_call"); call != nullptr) {
    return absl::InvalidArgumentError(name + ".function_call is not supported: use tool_calls");
  }
  LOCKSTEP_RETURN_IF_ERROR(ReadToolCalls(message, name));
  return ReadContent(message, name);
}

absl::Status ReadMessages(OrderedJson& body, OrderedJson& input) {
  const auto it = body.find("messages");
  if (it == body.end() || it->is_null()) {
    return absl::InvalidArgumentError("messages is missing: it must be a list of messages");
  }
  if (!it->is_array()) return Bad("messages", "a list of messages", *it);
  if (it->empty()) return absl::InvalidArgumentError("messages is an empty list");
  for (size_t i = 0; i < it->size(); ++i) {
    LOCKSTEP_RETURN_IF_ERROR(ReadMessage((*it)[i], absl::StrFormat("messages[%d]", i)));
  }
  input["messages"] = std::move(*it);
  return absl::OkStatus();
}

// --- tools

absl::Status CheckTools(const OrderedJson& tools) {
  if (!tools.is_array()) return Bad("tools", "a list", tools);
  for (size_t i = 0; i < tools.size(); ++i) {
    const std::string name = absl::StrFormat("tools[%d]", i);
    const OrderedJson& tool = tools[i];
    if (!tool.is_object()) return Bad(name, "an object", tool);
    LOCKSTEP_RETURN_IF_ERROR(CheckString(tool, "type", name));
    if (tool["type"] != "function") return Bad(name + ".type", "\"function\"", tool["type"]);
    const OrderedJson* const function = Find(tool, "function");
    if (function == nullptr || !function->is_object()) {
      return absl::InvalidArgumentError(name + ".function is missing: it must be an object");
    }
    LOCKSTEP_RETURN_IF_ERROR(CheckString(*function, "name", name + ".function"));
  }
  return absl::OkStatus();
}

// True unless tool_choice says "none".
absl::StatusOr<bool> MayCallTools(const OrderedJson& body) {
  const OrderedJson* const choice = Find(body, "tool_choice");
  if (choice == nullptr || *choice == "auto") return true;
  if (*choice == "none") return false;
  return absl::InvalidArgumentError(absl::StrFormat(
      "tool_choice is %s: only \"auto\" and \"none\" are supported, the model cannot "
      "be made to call a tool",
      Quoted(*choice)));
}

absl::Status ReadTools(OrderedJson& body, ChatPrompt& chat) {
  LOCKSTEP_ASSIGN_OR_RETURN(const bool may_call, MayCallTools(body));
  if (const OrderedJson* const parallel = Find(body, "parallel_tool_calls"); parallel != nullptr) {
    if (!parallel->is_boolean()) return Bad("parallel_tool_calls", "true or false", *parallel);
    chat.single_tool_call = !parallel->get<bool>();
  }
  const auto tools = body.find("tools");
  if (tools == body.end() || tools->is_null()) return absl::OkStatus();
  LOCKSTEP_RETURN_IF_ERROR(CheckTools(*tools));
  // A model that is not to call tools does not hear of them.
  if (tools->empty() || !may_call) return absl::OkStatus();
  chat.calls_tools = true;
  chat.input["tools"] = std::move(*tools);
  return absl::OkStatus();
}

// --- what else templates know

absl::Status ReadTemplateInput(OrderedJson& body, OrderedJson& input) {
  if (const OrderedJson* const add = Find(body, "add_generation_prompt"); add != nullptr) {
    if (!add->is_boolean()) return Bad("add_generation_prompt", "true or false", *add);
    input["add_generation_prompt"] = *add;
  }
  if (const OrderedJson* const documents = Find(body, "documents"); documents != nullptr) {
    if (!documents->is_array()) return Bad("documents", "a list", *documents);
    input["documents"] = *documents;
  }
  const OrderedJson* const others = Find(body, "chat_template_kwargs");
  if (others == nullptr) return absl::OkStatus();
  if (!others->is_object()) return Bad("chat_template_kwargs", "an object", *others);
  for (const auto& [key, value] : others->items()) {
    if (key == "messages" || key == "tools") {
      return absl::InvalidArgumentError(absl::StrFormat(
          "chat_template_kwargs names %s, which is a field of the request itself", key));
    }
    input[key] = value;
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ChatPrompt> ReadChat(OrderedJson& body) {
  ChatPrompt chat;
  chat.input = OrderedJson::object();
  LOCKSTEP_RETURN_IF_ERROR(ReadMessages(body, chat.input));
  LOCKSTEP_RETURN_IF_ERROR(ReadTools(body, chat));
  LOCKSTEP_RETURN_IF_ERROR(ReadTemplateInput(body, chat.input));
  return chat;
}

}  // namespace lockstep

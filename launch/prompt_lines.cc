#include "launch/prompt_lines.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <string_view>

#include "launch/sampling_fields.h"
#include "model/checkpoint/unique_json.h"
#include "model/tokenizer/utf8.h"

namespace lockstep {

namespace {

constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";

absl::Status CheckKeys(const Json& object, const std::string& where) {
  constexpr std::string_view kOwn[] = {"prompt", "messages", "priority", "cache_salt"};
  const auto sampling = SamplingFieldNames();
  for (const auto& [key, value] : object.items()) {
    if (std::find(std::begin(kOwn), std::end(kOwn), key) == std::end(kOwn) &&
        std::find(sampling.begin(), sampling.end(), key) == sampling.end()) {
      return absl::InvalidArgumentError(absl::StrFormat("%s: unknown key '%s'", where, key));
    }
  }
  return absl::OkStatus();
}

void ReadPrompt(const Json& object, JsonFields& fields, PromptLine& line) {
  const bool has_prompt = fields.Has("prompt");
  if (has_prompt == fields.Has("messages")) {
    fields.Fail(has_prompt ? "prompt and messages exclude each other" : "prompt is missing");
  } else if (has_prompt) {
    const Json& prompt = object.at("prompt");
    if (prompt.is_string()) {
      line.text = prompt.get<std::string>();
      if (line.text->empty()) fields.Fail("the prompt is an empty string");
    } else if (prompt.is_array()) {
      line.ids = fields.TokenIds("prompt");
    } else {
      fields.Fail("prompt must be a string or a list of token ids");
    }
  } else if (!object.at("messages").is_array()) {
    fields.Fail("messages must be a list");
  }
}

// What getline(3) allocates.
struct LineBuffer {
  LineBuffer() = default;
  LineBuffer(const LineBuffer&) = delete;
  LineBuffer& operator=(const LineBuffer&) = delete;
  ~LineBuffer() { std::free(data); }

  char* data = nullptr;
  size_t capacity = 0;
};
struct FileCloser {
  void operator()(std::FILE* file) const {
    if (file != stdin) std::fclose(file);
  }
};

absl::Status CannotRead(const std::string& name, int error) {
  const std::string message = absl::StrFormat("--prompts %s: %s", name, std::strerror(error));
  return error == ENOENT ? absl::NotFoundError(message) : absl::FailedPreconditionError(message);
}

}  // namespace

absl::StatusOr<PromptLine> ParsePromptLine(const std::string& text, const std::string& where) {
  if (const size_t at = FindInvalidUtf8(text); at != std::string_view::npos) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: invalid UTF-8 at byte %d of the line", where, at));
  }
  LOCKSTEP_ASSIGN_OR_RETURN(const Json object, ParseUniqueJson(text, where));
  JsonFields fields(object, where);
  LOCKSTEP_RETURN_IF_ERROR(fields.status());
  LOCKSTEP_RETURN_IF_ERROR(CheckKeys(object, where));
  PromptLine line;
  ReadPrompt(object, fields, line);
  line.sampling = ReadSamplingFields(object, fields);
  line.priority = static_cast<int32_t>(
      fields
          .Int("priority", std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max())
          .value_or(0));
  line.cache_salt = fields.String("cache_salt").value_or("");
  LOCKSTEP_RETURN_IF_ERROR(fields.status());
  if (!line.text.has_value() && !line.ids.has_value()) {
    // Templates see the keys of a message in the order of the file.
    LOCKSTEP_ASSIGN_OR_RETURN(OrderedJson ordered, ParseOrderedJson(text, where));
    line.messages = std::move(ordered.at("messages"));
  }
  return line;
}

absl::Status ReadPromptLines(
    const std::string& path,
    const std::function<absl::Status(PromptLine line, const std::string& where)>& each) {
  const std::string name = path == "-" ? "stdin" : path;
  const std::unique_ptr<std::FILE, FileCloser> file(path == "-" ? stdin
                                                                : std::fopen(path.c_str(), "r"));
  if (file == nullptr) return CannotRead(path, errno);
  bool has_prompt = false;
  LineBuffer buffer;
  for (int64_t number = 1;; ++number) {
    const ssize_t length = ::getline(&buffer.data, &buffer.capacity, file.get());
    if (length < 0) {
      if (std::feof(file.get()) == 0) return CannotRead(path, errno);
      break;
    }
    std::string_view line(buffer.data, static_cast<size_t>(length));
    if (number == 1 && line.starts_with(kByteOrderMark)) line.remove_prefix(kByteOrderMark.size());
    while (!line.empty() && (line.back() == '\n' || line.back() == '\r')) line.remove_suffix(1);
    if (line.find_first_not_of(" \t") == std::string_view::npos) continue;
    const std::string where = absl::StrFormat("%s line %d", name, number);
    LOCKSTEP_ASSIGN_OR_RETURN(PromptLine parsed, ParsePromptLine(std::string(line), where));
    LOCKSTEP_RETURN_IF_ERROR(each(std::move(parsed), where));
    has_prompt = true;
  }
  if (has_prompt) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat("--prompts %s: it holds no prompt", path));
}

}  // namespace lockstep

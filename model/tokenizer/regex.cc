#include "model/tokenizer/regex.h"

#include "model/tokenizer/utf8.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

namespace lockstep {

struct Regex::Code {
  std::string pattern;
  std::string where;
  pcre2_code* code = nullptr;
  bool jit = false;

  ~Code() { pcre2_code_free(code); }
};

namespace {

// What a thread needs to run patterns. One pair of offsets is enough: groups are never read.
struct Matcher {
  static constexpr size_t kMaxJitStackBytes = size_t{64} << 20;

  Matcher() {
    data = pcre2_match_data_create(1, nullptr);
    context = pcre2_match_context_create(nullptr);
    stack = pcre2_jit_stack_create(size_t{32} << 10, kMaxJitStackBytes, nullptr);
    pcre2_jit_stack_assign(context, nullptr, stack);
  }
  ~Matcher() {
    pcre2_match_data_free(data);
    pcre2_match_context_free(context);
    pcre2_jit_stack_free(stack);
  }

  pcre2_match_data* data;
  pcre2_match_context* context;
  pcre2_jit_stack* stack;
};

Matcher& ThreadMatcher() {
  thread_local Matcher matcher;
  return matcher;
}

std::string ErrorText(int code) {
  PCRE2_UCHAR buffer[256];
  pcre2_get_error_message(code, buffer, sizeof(buffer));
  return reinterpret_cast<const char*>(buffer);
}

pcre2_code* Compile(const std::string& pattern, int* error, size_t* offset) {
  pcre2_compile_context* context = pcre2_compile_context_create(nullptr);
  pcre2_set_newline(context, PCRE2_NEWLINE_LF);
  // Oniguruma's ^ and $ are anchors of lines.
  pcre2_code* code = pcre2_compile(
      reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
      PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C, error, offset, context);
  pcre2_compile_context_free(context);
  return code;
}

}  // namespace

Regex::Regex(std::unique_ptr<Code> code) : code_(std::move(code)) {}
Regex::~Regex() = default;

absl::StatusOr<std::shared_ptr<const Regex>> Regex::Create(std::string_view pattern,
                                                           const std::string& where) {
  absl::StatusOr<std::string> translated = TranslateOniguruma(pattern);
  if (!translated.ok()) {
    return absl::InvalidArgumentError(absl::StrFormat("%s: regular expression \"%s\": %s", where,
                                                      pattern,
                                                      std::string(translated.status().message())));
  }
  auto code = std::make_unique<Code>();
  code->pattern = std::string(pattern);
  code->where = where;
  int error;
  size_t offset;
  code->code = Compile(*translated, &error, &offset);
  if (code->code == nullptr) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: regular expression \"%s\" does not compile: %s", where, pattern, ErrorText(error)));
  }
  code->jit = pcre2_jit_compile(code->code, PCRE2_JIT_COMPLETE) == 0;
  return std::shared_ptr<const Regex>(new Regex(std::move(code)));
}

absl::StatusOr<std::shared_ptr<const Regex>> Regex::CreateLiteral(std::string_view text,
                                                                  const std::string& where) {
  if (text.empty())
    return absl::InvalidArgumentError(absl::StrFormat("%s: an empty pattern", where));
  std::string escaped;
  for (const char c : text) {
    if (std::string_view("\\^$.|?*+()[]{}").find(c) != std::string_view::npos) escaped += '\\';
    escaped += c;
  }
  return Create(escaped, where);
}

absl::StatusOr<bool> Regex::Finder::Next(Match* match) {
  const Matcher& matcher = ThreadMatcher();
  const auto* subject = reinterpret_cast<PCRE2_SPTR>(text_.data());
  const auto run = code_.jit ? pcre2_jit_match : pcre2_match;
  while (at_ <= text_.size()) {
    const int rc = run(code_.code, subject, text_.size(), at_, PCRE2_NO_UTF_CHECK, matcher.data,
                       matcher.context);
    if (rc == PCRE2_ERROR_NOMATCH) break;
    if (rc < 0) {
      return absl::ResourceExhaustedError(
          absl::StrFormat("%s: regular expression \"%s\" fails on this text: %s", code_.where,
                          code_.pattern, ErrorText(rc)));
    }
    const size_t* range = pcre2_get_ovector_pointer(matcher.data);
    if (range[0] == range[1] && range[1] == last_end_) {
      if (at_ == text_.size()) break;
      at_ += CharacterLength(text_[at_]);
      continue;
    }
    *match = {range[0], range[1]};
    at_ = last_end_ = range[1];
    return true;
  }
  at_ = text_.size() + 1;
  return false;
}

}  // namespace lockstep

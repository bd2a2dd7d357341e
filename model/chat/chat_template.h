// Chat templates: the subset of Jinja that published models use, rendered as Hugging Face
// transformers renders them, that is jinja2's ImmutableSandboxedEnvironment with trim_blocks,
// lstrip_blocks, break and continue, the tag `generation`, a `tojson` like
// json.dumps(ensure_ascii=False), `raise_exception` and `strftime_now`.
//
// Language: https://jinja.palletsprojects.com/en/3.1.x/templates/ without template inheritance,
// include, import, recursive loops, autoescape and the filters of web pages. What is left out is
// refused by name.
//
// A template comes with a checkpoint and is not trusted: RenderLimits bound the work, the memory
// and the recursion of a rendering, and nothing outside the input can be reached.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "runtime/core/json.h"
#include "runtime/core/status.h"

namespace lockstep {

// A published template uses a few hundred steps a message. The defaults end a hostile template
// within seconds.
struct RenderLimits {
  // About one a node executed, and one for 64 bytes of text worked on.
  int64_t max_steps = 20'000'000;
  // All values that one rendering ever makes, its input and its output included.
  int64_t max_allocated_bytes = int64_t{256} << 20;
  int64_t max_output_bytes = int64_t{64} << 20;
  int max_recursion = 600;  // nested statements and expressions being executed
};

struct RenderOptions {
  RenderLimits limits;
  std::optional<std::chrono::system_clock::time_point>
      now;  // what strftime_now sees, in local time; absent = the clock
};

struct JinjaProgram;

// Immutable after Parse; Render may be called from many threads.
class ChatTemplate {
 public:
  // `where` names the template in messages ("tokenizer_config.json of MODEL"). InvalidArgument with
  // line and what was unexpected for a syntax error; Unimplemented for a tag, filter, test,
  // function or method that is unknown or left out.
  static absl::StatusOr<std::unique_ptr<ChatTemplate>> Parse(std::string_view source,
                                                             std::string_view where);
  ~ChatTemplate();

  // `input` is an object: the template's variables (messages, tools, add_generation_prompt,
  // bos_token, ...). Errors: Aborted with exactly the template's own message when it calls
  // raise_exception; ResourceExhausted naming the limit; Unimplemented for a feature that only
  // shows while rendering; InvalidArgument with line and reason for any other failure.
  absl::StatusOr<std::string> Render(const OrderedJson& input,
                                     const RenderOptions& options = {}) const;

 private:
  explicit ChatTemplate(std::unique_ptr<const JinjaProgram> program);
  std::unique_ptr<const JinjaProgram> program_;
};

}  // namespace lockstep

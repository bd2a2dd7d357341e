#include "launch/generate_prompts.h"

#include <utility>

#include "launch/prompt_lines.h"
#include "runtime/core/file.h"
#include "runtime/kv_budget.h"
#include "runtime/request_check.h"

namespace lockstep {

namespace {

// Turns inputs into prompts, one after the other.
class PromptReader {
 public:
  PromptReader(const GenerateOptions& options, const ModelSource& source,
               const PromptEncoder& encoder)
      : options_(options), source_(source), encoder_(encoder) {}

  absl::Status Read(const PromptInput& input) {
    switch (input.kind) {
      case PromptInput::Kind::kIds:
        return Add(input.ids, {}, "");
      case PromptInput::Kind::kText:
        return AddText(input.text, "--prompt");
      case PromptInput::Kind::kFile: {
        LOCKSTEP_ASSIGN_OR_RETURN(const std::string text, ReadFile(input.text, FileKind::kAny));
        if (!text.empty()) return AddText(text, "--prompt-file " + input.text);
        return absl::InvalidArgumentError(
            absl::StrFormat("--prompt-file %s: the file is empty", input.text));
      }
      case PromptInput::Kind::kLines:
        return ReadPromptLines(input.text, [this](PromptLine line, const std::string& where) {
          return Annotate(AddLine(std::move(line), where), where);
        });
    }
    LOCKSTEP_CHECK(false);
  }

  std::vector<GeneratePrompt>& prompts() { return prompts_; }

 private:
  absl::Status AddText(const std::string& text, const std::string& option) {
    absl::StatusOr<std::vector<int32_t>> ids = encoder_.EncodeText(text);
    if (!ids.ok()) return Annotate(ids.status(), option);
    return Add(*std::move(ids), {}, "");
  }

  // Errors do not name the line.
  absl::Status AddLine(PromptLine line, const std::string& where) {
    if (line.sampling.stop.has_value() && !line.sampling.stop->empty()) {
      LOCKSTEP_RETURN_IF_ERROR(encoder_.NeedTokenizer("stop"));
    }
    if (!options_.json && (line.sampling.num_logprobs || line.sampling.num_prompt_logprobs)) {
      return absl::InvalidArgumentError(
          "logprobs and prompt_logprobs need --json: plain text has no place for them");
    }
    std::vector<int32_t> ids;
    if (line.ids.has_value()) {
      if (encoder_.chats()) {
        return absl::InvalidArgumentError(
            "the prompt is a list of ids, which are used as they are: not with --chat");
      }
      ids = *std::move(line.ids);
    } else if (line.text.has_value()) {
      LOCKSTEP_ASSIGN_OR_RETURN(ids, encoder_.EncodeText(*line.text));
    } else {
      if (!encoder_.chats()) return absl::InvalidArgumentError("messages need --chat");
      LOCKSTEP_ASSIGN_OR_RETURN(ids, encoder_.EncodeMessages(*line.messages));
    }
    LOCKSTEP_RETURN_IF_ERROR(Add(std::move(ids), line.sampling, where));
    prompts_.back().request.priority = line.priority;
    prompts_.back().request.cache_salt = std::move(line.cache_salt);
    return absl::OkStatus();
  }

  absl::Status Add(std::vector<int32_t> ids, const SamplingFlags& own, const std::string& where) {
    const SamplingFlags flags = Overridden(options_.sampling, own);
    LOCKSTEP_ASSIGN_OR_RETURN(EffectiveSampling sampling,
                              ResolveSampling(flags, source_.generation, source_.config));
    GeneratePrompt& prompt = prompts_.emplace_back();
    prompt.request.prompt = std::move(ids);
    prompt.request.sampling = std::move(sampling.params);
    prompt.stop = std::move(sampling.stop);
    prompt.where = where;
    prompt.has_seed = flags.seed.has_value();
    return absl::OkStatus();
  }

  const GenerateOptions& options_;
  const ModelSource& source_;
  const PromptEncoder& encoder_;
  std::vector<GeneratePrompt> prompts_;
};

}  // namespace

std::string PromptName(const std::vector<GeneratePrompt>& prompts, size_t index) {
  if (!prompts[index].where.empty()) return prompts[index].where;
  return prompts.size() == 1 ? "" : absl::StrFormat("prompt %d", index);
}

absl::StatusOr<GeneratePrompts> PreparePrompts(const GenerateOptions& options,
                                               const ModelSource& source,
                                               const PromptEncoder& encoder) {
  LOCKSTEP_ASSIGN_OR_RETURN(EffectiveSampling common,
                            ResolveSampling(options.sampling, source.generation, source.config));
  if (!common.stop.empty()) LOCKSTEP_RETURN_IF_ERROR(encoder.NeedTokenizer("--stop"));
  PromptReader reader(options, source, encoder);
  for (const PromptInput& input : options.prompts) LOCKSTEP_RETURN_IF_ERROR(reader.Read(input));
  LOCKSTEP_ASSIGN_OR_RETURN(const int64_t max_model_len,
                            WantedModelLen(options.engine.engine, source.config));
  LOCKSTEP_RETURN_IF_ERROR(
      CheckPromptLengths(reader.prompts(), source.config.vocab_size, max_model_len));
  return GeneratePrompts{std::move(reader.prompts()), std::move(common.summary)};
}

absl::Status CheckPromptLengths(const std::vector<GeneratePrompt>& prompts, int64_t vocab_size,
                                int64_t max_model_len) {
  PlanLimits limits;
  limits.vocab_size = vocab_size;
  limits.max_model_len = max_model_len;
  for (size_t i = 0; i < prompts.size(); ++i) {
    const absl::Status status = CheckRequest(prompts[i].request, limits);
    if (status.ok()) continue;
    const std::string name = PromptName(prompts, i);
    return name.empty() ? status : Annotate(status, name);
  }
  return absl::OkStatus();
}

}  // namespace lockstep

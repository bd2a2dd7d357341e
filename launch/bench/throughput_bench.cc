#include "launch/bench/throughput_bench.h"

#include <chrono>
#include <random>
#include <utility>
#include <vector>

#include "launch/bench/engine_report.h"
#include "launch/command_specs.h"
#include "launch/engine_session.h"
#include "launch/generate_prompts.h"
#include "launch/option_setters.h"
#include "launch/output_file.h"
#include "launch/result_writer.h"

namespace lockstep {

namespace {

using Clock = std::chrono::steady_clock;

constexpr char kMeasured[] =
    "Measured on rank 0, from the submission of the first prompt to the last token of all;\n"
    "loading, reading and tokenising lie before it. Rates are of this whole time; those of a\n"
    "rank are these divided by the number of ranks.\n";

class ThroughputJob : public EngineJob {
 public:
  explicit ThroughputJob(const ThroughputBenchOptions& options) : options_(options) {}

  absl::Status Prepare(const ModelSource& source) override;
  absl::Status Submit(Engine& engine, const SessionInfo& session) override;
  absl::Status Run(Engine& engine) override;
  absl::Status Finish(const Engine& engine, const SessionInfo& session) override;

 private:
  absl::Status ReadPrompts(const ModelSource& source);
  absl::Status DrawPrompts(const ModelSource& source, int64_t max_model_len);
  absl::Status CheckLengths(int64_t max_model_len) const;
  OrderedJson Result(const Engine& engine, const SessionInfo& session) const;
  std::string Text(const OrderedJson& result, const SessionInfo& session) const;

  const ThroughputBenchOptions& options_;
  std::vector<GeneratePrompt> prompts_;
  int64_t num_answers_ = 0;
  int64_t input_tokens_ = 0;
  int64_t output_tokens_ = 0;
  Clock::time_point start_;
  Clock::time_point last_token_;
  absl::Status request_error_;
};

absl::Status ThroughputJob::Prepare(const ModelSource& source) {
  std::vector<std::string> inputs;
  if (!options_.prompts.empty()) inputs.push_back(options_.prompts);
  LOCKSTEP_RETURN_IF_ERROR(CheckOutputIsNoInput("--step-log", options_.engine.engine.step_log,
                                                options_.engine.model, inputs));
  LOCKSTEP_ASSIGN_OR_RETURN(const int64_t max_model_len, ExpectedModelLen(options_.engine, source));
  LOCKSTEP_RETURN_IF_ERROR(options_.prompts.empty() ? DrawPrompts(source, max_model_len)
                                                    : ReadPrompts(source));
  return CheckLengths(max_model_len);
}

// As generate reads them, with other defaults: what a line does not say is made so that the work is
// known beforehand.
absl::Status ThroughputJob::ReadPrompts(const ModelSource& source) {
  GenerateOptions generate;
  generate.engine = options_.engine;
  generate.prompts = {{PromptInput::Kind::kLines, options_.prompts, {}}};
  generate.chat = options_.chat;
  generate.json = true;
  generate.sampling.temperature = 0;
  generate.sampling.max_tokens = options_.random.output_len;
  generate.sampling.ignore_eos = true;
  LOCKSTEP_ASSIGN_OR_RETURN(const PromptEncoder encoder,
                            PromptEncoder::Create(options_.engine.model, options_.chat));
  LOCKSTEP_ASSIGN_OR_RETURN(GeneratePrompts read, PreparePrompts(generate, source, encoder));
  prompts_ = std::move(read.prompts);
  for (const GeneratePrompt& prompt : prompts_) {
    if (prompt.stop.empty()) continue;
    return absl::InvalidArgumentError(prompt.where +
                                      ": stop strings are not looked for here, as no text is made");
  }
  const auto wanted = static_cast<size_t>(options_.num_prompts.value_or(std::ssize(prompts_)));
  if (wanted > prompts_.size()) {
    return absl::InvalidArgumentError(absl::StrFormat("--num-prompts %d, but %s holds %d", wanted,
                                                      options_.prompts, prompts_.size()));
  }
  prompts_.resize(wanted);
  return absl::OkStatus();
}

absl::Status ThroughputJob::DrawPrompts(const ModelSource& source, int64_t max_model_len) {
  std::mt19937_64 random(options_.seed);
  RandomPrompts draw = options_.random;
  draw.num_prompts = options_.num_prompts.value_or(draw.num_prompts);
  const std::vector<PromptLengths> lengths = DrawPromptLengths(draw, random);
  LOCKSTEP_RETURN_IF_ERROR(CheckAllFit(lengths, max_model_len));  // before the ids take memory
  for (const PromptLengths& one : lengths) {
    Request& request = prompts_.emplace_back().request;
    request.prompt = DrawIds(one.input, 0, static_cast<int32_t>(source.config.vocab_size), random);
    request.sampling.temperature = 0;
    request.sampling.max_tokens = one.output;
    request.sampling.ignore_eos = true;
  }
  return absl::OkStatus();
}

absl::Status ThroughputJob::CheckLengths(int64_t max_model_len) const {
  for (size_t i = 0; i < prompts_.size(); ++i) {
    const Request& request = prompts_[i].request;
    const PromptLengths lengths = {std::ssize(request.prompt), request.sampling.max_tokens};
    LOCKSTEP_RETURN_IF_ERROR(CheckFits(lengths, max_model_len, PromptName(prompts_, i)));
  }
  return absl::OkStatus();
}

absl::Status ThroughputJob::Submit(Engine& engine, const SessionInfo&) {
  return CheckLengths(engine.max_model_len());
}

absl::Status ThroughputJob::Run(Engine& engine) {
  start_ = last_token_ = Clock::now();
  for (size_t i = 0; i < prompts_.size(); ++i) {
    Request request = std::move(prompts_[i].request);
    input_tokens_ += std::ssize(request.prompt);
    num_answers_ += request.sampling.n;
    request.on_event = [this, i](const RequestEvent& event) {
      if (event.token.has_value()) {
        ++output_tokens_;
        last_token_ = Clock::now();
      }
      if (event.finish == FinishReason::kError && request_error_.ok()) {
        const std::string name = PromptName(prompts_, i);
        request_error_ =
            absl::InternalError((name.empty() ? "prompt 0" : name) + ": " + event.error);
      }
      return true;
    };
    LOCKSTEP_RETURN_IF_ERROR(engine.Submit(std::move(request)).status());
  }
  return engine.RunUntilIdle();
}

OrderedJson ThroughputJob::Result(const Engine& engine, const SessionInfo& session) const {
  const double seconds = std::chrono::duration<double>(last_token_ - start_).count();
  const EngineStats stats = engine.stats();
  OrderedJson json = EngineJson("throughput", options_.engine, session, engine.max_model_len());
  json["dataset"] = options_.prompts.empty() ? "random" : options_.prompts;
  json["seed"] = options_.seed;
  json["elapsed_time"] = seconds;
  json["num_requests"] = prompts_.size();
  json["num_answers"] = num_answers_;
  json["total_input_tokens"] = input_tokens_;
  json["total_output_tokens"] = output_tokens_;
  json["total_num_tokens"] = input_tokens_ + output_tokens_;
  const std::pair<const char*, int64_t> counts[] = {
      {"requests_per_second", std::ssize(prompts_)},
      {"input_tokens_per_second", input_tokens_},
      {"output_tokens_per_second", output_tokens_},
      {"tokens_per_second", input_tokens_ + output_tokens_}};
  for (const auto& [name, count] : counts) {
    json[name] = seconds > 0 ? OrderedJson(static_cast<double>(count) / seconds) : OrderedJson();
  }
  for (const auto& [name, count] : counts) {
    json[absl::StrCat(name, "_per_rank")] =
        seconds > 0 ? OrderedJson(static_cast<double>(count) / seconds / session.num_ranks)
                    : OrderedJson();
  }
  json["steps"] = stats.steps;
  json["preemptions"] = stats.scheduler.num_preemptions;
  json["prefix_cache_hit_tokens"] = stats.scheduler.prefix_cache_hit_tokens;
  return json;
}

std::string ThroughputJob::Text(const OrderedJson& result, const SessionInfo& session) const {
  std::string text = EngineText(options_.engine, session) + "\n";
  absl::StrAppend(
      &text, absl::StrFormat("%d requests in %.3f s, %d steps\n\n", prompts_.size(),
                             result["elapsed_time"].get<double>(), result["steps"].get<int64_t>()));
  absl::StrAppend(&text,
                  absl::StrFormat("%-16s%14s%14s%14s\n", "", "total", "a second", "and a rank"));
  const auto line = [&](const char* title, int64_t total, const std::string& rate) {
    const auto number = [&result](const std::string& name) {
      return result[name].is_null() ? std::string("-")
                                    : absl::StrFormat("%.2f", result[name].get<double>());
    };
    absl::StrAppend(&text, absl::StrFormat("%-16s%14d%14s%14s\n", title, total, number(rate),
                                           number(rate + "_per_rank")));
  };
  line("requests", std::ssize(prompts_), "requests_per_second");
  line("input tokens", input_tokens_, "input_tokens_per_second");
  line("output tokens", output_tokens_, "output_tokens_per_second");
  line("tokens", input_tokens_ + output_tokens_, "tokens_per_second");
  absl::StrAppend(&text, absl::StrFormat("\npreemptions: %d; prefix cache: %d tokens were there "
                                         "already\n\n",
                                         result["preemptions"].get<int64_t>(),
                                         result["prefix_cache_hit_tokens"].get<int64_t>()));
  return text + kMeasured;
}

absl::Status ThroughputJob::Finish(const Engine& engine, const SessionInfo& session) {
  LOCKSTEP_RETURN_IF_ERROR(request_error_);
  const OrderedJson result = Result(engine, session);
  ResultWriter writer;
  writer.Write(options_.json ? DumpJson(result) + "\n" : Text(result, session));
  return writer.status();
}

}  // namespace

CommandSpec ThroughputBenchSpec(ThroughputBenchOptions* options) {
  OptionGroup group = {
      "Benchmark",
      {{"--prompts", "FILE",
        "A prompt a line, - for stdin, as generate takes them. Lines that do not say otherwise are "
        "answered greedily by --output-len tokens, end tokens or not.",
        "random prompts", false, StoreText(&options->prompts)},
       Flag("--chat", "The lines of --prompts are chats, as with generate.", &options->chat),
       {"--num-prompts", "N", "So many random prompts, or the first N of the file.",
        absl::StrCat(options->random.num_prompts, ", or all of the file"), false,
        StoreInt(&options->num_prompts, 1, 100000000)}}};
  for (Option& option : LengthOptions(&options->random.input_len, &options->random.output_len)) {
    group.options.push_back(std::move(option));
  }
  group.options.push_back(DistributionOption(&options->random.distribution));
  group.options.push_back(SeedOption(&options->seed));
  group.options.push_back(Flag("--json", "One JSON object instead of a table.", &options->json));
  CommandSpec spec = {
      "bench throughput",
      "MODEL",
      "many prompts at once, without a server: requests/s, tokens/s",
      absl::StrCat("Submits all prompts at once and answers them as fast as it can.\n", kMeasured),
      {std::move(group), EmulationGroup(&options->engine), ModelGroup(&options->engine)},
      absl::StrCat(
          "Examples:\n"
          "  mpirun -np 2 lockstep bench throughput ./Llama --num-prompts 200 --input-len 512\n"
          "  lockstep bench throughput ./Llama --prompts in.jsonl --output-len 64 --json\n\n",
          kExitStatuses),
      &options->engine.model};
  for (OptionGroup& engine : EngineGroups(&options->engine)) {
    spec.groups.push_back(std::move(engine));
  }
  return spec;
}

absl::Status CheckThroughputBench(const ThroughputBenchOptions& options) {
  LOCKSTEP_RETURN_IF_ERROR(CheckEmulation(options.engine));
  if (!options.prompts.empty() || !options.chat) return absl::OkStatus();
  return absl::InvalidArgumentError("--chat needs --prompts: random prompts are token ids");
}

int RunThroughputBench(const ThroughputBenchOptions& options) {
  ThroughputJob job(options);
  return RunEngineJob(options.engine, job);
}

}  // namespace lockstep

#include "launch/bench/latency_bench.h"

#include <chrono>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "launch/bench/engine_report.h"
#include "launch/bench/random_prompts.h"
#include "launch/bench/statistics.h"
#include "launch/command_specs.h"
#include "launch/engine_session.h"
#include "launch/option_setters.h"
#include "launch/output_file.h"
#include "launch/result_writer.h"

namespace lockstep {

namespace {

using Clock = std::chrono::steady_clock;

double Milliseconds(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double, std::milli>(to - from).count();
}

constexpr char kMeasured[] =
    "Measured on rank 0, where the engine hands over tokens: ttft from the submission of\n"
    "the batch to a request's first token; prefill to the first token of all; decode from\n"
    "then to the last token of all; step between the last tokens of consecutive steps of\n"
    "the decode; tpot of a request from its first token to its last, divided by its tokens but\n"
    "one; e2e from submission to the last token of all. ttft and tpot have a value for each\n"
    "request of each repeat, step for each step, the others for each repeat.\n";

// One batch as it runs; everything on the engine's thread.
class BatchRun {
 public:
  explicit BatchRun(int64_t batch_size) : requests_(static_cast<size_t>(batch_size)) {}

  void Start() { start_ = Clock::now(); }
  // Always true, so that it can be what a request's callback returns.
  bool OnEvent(size_t request, const RequestEvent& event);
  void OnDelivered();

  absl::Status status() const { return status_; }
  int64_t num_tokens() const { return num_tokens_; }
  // After the end. Decode has none of them when answers have one token.
  double prefill_ms() const { return Milliseconds(start_, prefill_end_); }
  double decode_ms() const { return Milliseconds(prefill_end_, last_token_); }
  double e2e_ms() const { return Milliseconds(start_, last_token_); }
  int64_t decode_tokens() const { return decode_tokens_; }
  const std::vector<double>& step_ms() const { return step_ms_; }
  void AppendRequests(std::vector<double>* ttft_ms, std::vector<double>* tpot_ms) const;

 private:
  struct OneRequest {
    int64_t num_tokens = 0;
    Clock::time_point first;
    Clock::time_point last;
  };

  std::vector<OneRequest> requests_;
  size_t num_started_ = 0;  // requests that have a token
  int64_t num_tokens_ = 0;
  int64_t delivered_tokens_ = 0;  // as of the delivery before
  bool decoding_ = false;         // all had a token at the delivery before
  int64_t decode_tokens_ = 0;
  Clock::time_point start_;
  Clock::time_point prefill_end_;
  Clock::time_point last_token_;
  Clock::time_point last_delivery_;  // its last token
  std::vector<double> step_ms_;
  absl::Status status_;
};

bool BatchRun::OnEvent(size_t request, const RequestEvent& event) {
  if (event.finish == FinishReason::kError && status_.ok()) {
    status_ = absl::InternalError(absl::StrFormat("request %d: %s", request, event.error));
  }
  if (!event.token.has_value()) return true;
  OneRequest& one = requests_[request];
  last_token_ = one.last = Clock::now();
  ++num_tokens_;
  if (decoding_) ++decode_tokens_;
  if (one.num_tokens++ > 0) return true;
  one.first = one.last;
  if (++num_started_ == requests_.size()) prefill_end_ = one.first;
  return true;
}

void BatchRun::OnDelivered() {
  if (num_tokens_ == delivered_tokens_) return;  // a chunk of prompts, or nothing at all
  delivered_tokens_ = num_tokens_;
  if (decoding_) step_ms_.push_back(Milliseconds(last_delivery_, last_token_));
  last_delivery_ = last_token_;
  decoding_ = num_started_ == requests_.size();
}

void BatchRun::AppendRequests(std::vector<double>* ttft_ms, std::vector<double>* tpot_ms) const {
  for (const OneRequest& one : requests_) {
    ttft_ms->push_back(Milliseconds(start_, one.first));
    if (one.num_tokens > 1) {
      tpot_ms->push_back(Milliseconds(one.first, one.last) /
                         static_cast<double>(one.num_tokens - 1));
    }
  }
}

// The values of all repeats.
struct LatencySamples {
  std::vector<double> ttft_ms, prefill_ms, decode_ms, step_ms, tpot_ms, e2e_ms;
  std::vector<double> prefill_rate, decode_rate;  // tokens/s
};

class LatencyJob : public EngineJob {
 public:
  explicit LatencyJob(const LatencyBenchOptions& options)
      : options_(options), random_(options.seed) {}

  absl::Status Prepare(const ModelSource& source) override;
  absl::Status Submit(Engine& engine, const SessionInfo& session) override;
  absl::Status Run(Engine& engine) override;
  absl::Status Finish(const Engine& engine, const SessionInfo& session) override;

 private:
  PromptLengths lengths() const { return {options_.input_len, options_.output_len}; }
  absl::Status RunBatch(Engine& engine, bool counts);
  Request MakeRequest();
  void Keep(const BatchRun& run);
  std::string JsonText(const Engine& engine, const SessionInfo& session) const;
  std::string TableText(const SessionInfo& session) const;
  std::vector<std::pair<std::string, Statistics>> Times() const;

  const LatencyBenchOptions& options_;
  std::mt19937_64 random_;
  int64_t vocab_size_ = 0;
  int64_t num_submitted_ = 0;
  int64_t output_tokens_ = 0;  // of the repeats
  absl::Status request_error_;
  LatencySamples samples_;
};

absl::Status LatencyJob::Prepare(const ModelSource& source) {
  LOCKSTEP_RETURN_IF_ERROR(CheckOutputIsNoInput("--step-log", options_.engine.engine.step_log,
                                                options_.engine.model, {}));
  vocab_size_ = source.config.vocab_size;
  LOCKSTEP_ASSIGN_OR_RETURN(const int64_t max_model_len, ExpectedModelLen(options_.engine, source));
  return CheckFits(lengths(), max_model_len, "");
}

absl::Status LatencyJob::Submit(Engine& engine, const SessionInfo&) {
  return CheckFits(lengths(), engine.max_model_len(), "");
}

absl::Status LatencyJob::Run(Engine& engine) {
  for (int64_t i = 0; i < options_.warmup + options_.repeats && request_error_.ok(); ++i) {
    LOCKSTEP_RETURN_IF_ERROR(RunBatch(engine, /*counts=*/i >= options_.warmup));
  }
  return absl::OkStatus();
}

absl::Status LatencyJob::RunBatch(Engine& engine, bool counts) {
  std::vector<Request> requests;
  for (int64_t i = 0; i < options_.batch_size; ++i) requests.push_back(MakeRequest());
  BatchRun run(options_.batch_size);
  engine.OnDelivered([&run] { run.OnDelivered(); });
  run.Start();
  for (size_t i = 0; i < requests.size(); ++i) {
    requests[i].on_event = [&run, i](const RequestEvent& event) { return run.OnEvent(i, event); };
    LOCKSTEP_RETURN_IF_ERROR(engine.Submit(std::move(requests[i])).status());
  }
  const absl::Status status = engine.RunUntilIdle();
  engine.OnDelivered({});
  LOCKSTEP_RETURN_IF_ERROR(status);
  request_error_ = run.status();
  if (counts && request_error_.ok()) Keep(run);
  return absl::OkStatus();
}

Request LatencyJob::MakeRequest() {
  Request request;
  request.prompt = DrawIds(options_.input_len, 0, static_cast<int32_t>(vocab_size_), random_);
  request.sampling.temperature = 0;
  request.sampling.max_tokens = options_.output_len;
  request.sampling.ignore_eos = true;
  // No prompt finds its beginning in the prefix cache, however short it is.
  request.cache_salt = absl::StrCat("bench ", num_submitted_++);
  return request;
}

void LatencyJob::Keep(const BatchRun& run) {
  output_tokens_ += run.num_tokens();
  run.AppendRequests(&samples_.ttft_ms, &samples_.tpot_ms);
  samples_.step_ms.insert(samples_.step_ms.end(), run.step_ms().begin(), run.step_ms().end());
  samples_.prefill_ms.push_back(run.prefill_ms());
  samples_.e2e_ms.push_back(run.e2e_ms());
  const double prompt_tokens = static_cast<double>(options_.batch_size * options_.input_len);
  samples_.prefill_rate.push_back(prompt_tokens / run.prefill_ms() * 1000);
  if (run.decode_tokens() == 0) return;
  samples_.decode_ms.push_back(run.decode_ms());
  samples_.decode_rate.push_back(static_cast<double>(run.decode_tokens()) / run.decode_ms() * 1000);
}

std::vector<std::pair<std::string, Statistics>> LatencyJob::Times() const {
  return {{"ttft_ms", Statistics(samples_.ttft_ms)},
          {"prefill_ms", Statistics(samples_.prefill_ms)},
          {"decode_ms", Statistics(samples_.decode_ms)},
          {"step_ms", Statistics(samples_.step_ms)},
          {"tpot_ms", Statistics(samples_.tpot_ms)},
          {"e2e_ms", Statistics(samples_.e2e_ms)},
          {"prefill_tokens_per_second", Statistics(samples_.prefill_rate)},
          {"decode_tokens_per_second", Statistics(samples_.decode_rate)}};
}

std::string LatencyJob::JsonText(const Engine& engine, const SessionInfo& session) const {
  OrderedJson json = EngineJson("latency", options_.engine, session, engine.max_model_len());
  json["batch_size"] = options_.batch_size;
  json["input_len"] = options_.input_len;
  json["output_len"] = options_.output_len;
  json["warmup"] = options_.warmup;
  json["repeats"] = options_.repeats;
  json["seed"] = options_.seed;
  json["num_requests"] = options_.repeats * options_.batch_size;
  json["total_input_tokens"] = options_.repeats * options_.batch_size * options_.input_len;
  json["total_output_tokens"] = output_tokens_;
  for (const auto& [name, statistics] : Times()) json[name] = StatisticsJson(statistics);
  json["preemptions"] = engine.stats().scheduler.num_preemptions;
  return DumpJson(json) + "\n";
}

std::string LatencyJob::TableText(const SessionInfo& session) const {
  std::vector<StatisticsRow> rows;
  for (auto& [name, statistics] : Times()) rows.push_back({name, std::move(statistics)});
  return absl::StrFormat(
      "%s\n%d requests at once of %d + %d tokens, %d time%s after %d to warm up\n\n%s\n%s",
      EngineText(options_.engine, session), options_.batch_size, options_.input_len,
      options_.output_len, options_.repeats, options_.repeats == 1 ? "" : "s", options_.warmup,
      StatisticsTable(rows), kMeasured);
}

absl::Status LatencyJob::Finish(const Engine& engine, const SessionInfo& session) {
  LOCKSTEP_RETURN_IF_ERROR(request_error_);
  if (const int64_t preemptions = engine.stats().scheduler.num_preemptions; preemptions > 0) {
    LogWarning(absl::StrFormat(
        "%d preemptions: the KV blocks do not hold the batch, and some was computed twice",
        preemptions));
  }
  ResultWriter writer;
  writer.Write(options_.json ? JsonText(engine, session) : TableText(session));
  return writer.status();
}

}  // namespace

CommandSpec LatencyBenchSpec(LatencyBenchOptions* options) {
  OptionGroup group = {
      "Benchmark",
      {{"--batch-size", "N", "Requests that are submitted at once and run side by side.",
        absl::StrCat(options->batch_size), false, StoreInt(&options->batch_size, 1, 65536)}}};
  for (Option& option : LengthOptions(&options->input_len, &options->output_len)) {
    group.options.push_back(std::move(option));
  }
  group.options.push_back({"--warmup", "N", "Batches that run first and do not count.",
                           absl::StrCat(options->warmup), false,
                           StoreInt(&options->warmup, 0, 1000000)});
  group.options.push_back({"--repeats", "N", "Batches that count, one after the other.",
                           absl::StrCat(options->repeats), false,
                           StoreInt(&options->repeats, 1, 1000000)});
  group.options.push_back(SeedOption(&options->seed));
  group.options.push_back(Flag("--json", "One JSON object instead of a table.", &options->json));
  CommandSpec spec = {
      "bench latency",
      "MODEL",
      "a batch of random prompts: prefill, decode, time of a step",
      absl::StrCat("Runs batches of random prompts, one after the other, greedily and without the\n"
                   "prefix cache's help.\n",
                   kMeasured),
      {std::move(group), EmulationGroup(&options->engine), ModelGroup(&options->engine)},
      absl::StrCat("Examples:\n"
                   "  mpirun -np 2 lockstep bench latency ./Llama --batch-size 1 --input-len 512\n"
                   "  lockstep bench latency ./Llama --load-format dummy --json\n\n",
                   kExitStatuses),
      &options->engine.model};
  for (OptionGroup& engine : EngineGroups(&options->engine)) {
    spec.groups.push_back(std::move(engine));
  }
  return spec;
}

absl::Status CheckLatencyBench(const LatencyBenchOptions& options) {
  LOCKSTEP_RETURN_IF_ERROR(CheckEmulation(options.engine));
  if (options.batch_size <= options.engine.engine.max_num_seqs) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "--batch-size %d is more than --max-num-seqs %d: they would not run side by side",
      options.batch_size, options.engine.engine.max_num_seqs));
}

int RunLatencyBench(const LatencyBenchOptions& options) {
  LatencyJob job(options);
  return RunEngineJob(options.engine, job);
}

}  // namespace lockstep

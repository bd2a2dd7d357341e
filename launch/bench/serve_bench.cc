#include "launch/bench/serve_bench.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <memory>
#include <new>
#include <random>
#include <system_error>
#include <utility>

#include "absl/strings/str_join.h"
#include "launch/bench/arrival_schedule.h"
#include "launch/bench/load_generator.h"
#include "launch/bench/load_prompts.h"
#include "launch/bench/result_file.h"
#include "launch/bench/serve_report.h"
#include "launch/result_writer.h"
#include "launch/serve/signal_watch.h"
#include "runtime/core/log.h"

namespace lockstep {

namespace {

constexpr int64_t kOtherFiles = 64;  // what the process opens beside connections
constexpr std::chrono::seconds kTellInterval(10);
constexpr PromptLengths kTestLengths = {8, 2};  // or less, where the load asks less
// Of the input of all requests, which are made before the load: some 6 bytes each.
constexpr int64_t kMostTokens = int64_t{1} << 28;
constexpr size_t kMaxNameBytes = 100;  // of a model's name in a file's

absl::Status Refused(const std::string& why) { return absl::InvalidArgumentError(why); }

absl::Status CheckLoadFits(int64_t requests, int64_t tokens) {
  if (tokens <= kMostTokens) return absl::OkStatus();
  return Refused(absl::StrFormat(
      "%d requests have some %d tokens of input, more than the %d that a load may hold: fewer "
      "requests (--num-prompts) or shorter ones (--input-len)",
      requests, tokens, kMostTokens));
}

// Raises the limit of this process, where it may, so that so many connections can be open at once.
absl::Status AllowConnections(int64_t connections) {
  rlimit limit = {};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return absl::OkStatus();
  const auto wanted = static_cast<rlim_t>(connections + kOtherFiles);
  if (limit.rlim_cur >= wanted) return absl::OkStatus();
  limit.rlim_cur = std::min(wanted, limit.rlim_max);
  if (::setrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur >= wanted) return absl::OkStatus();
  const int64_t allowed = static_cast<int64_t>(limit.rlim_cur) - kOtherFiles;
  return Refused(absl::StrFormat(
      "%d requests may be open at once, but this process may open %d files (ulimit -n), which is "
      "enough for %d: give a smaller --max-concurrency",
      connections, limit.rlim_cur, std::max<int64_t>(allowed, 0)));
}

std::string Quoted(const HttpAnswer& answer) {
  constexpr size_t kMost = 300;
  return absl::StrFormat("HTTP status %d: %s", answer.status,
                         answer.body.empty() ? "no body" : answer.body.substr(0, kMost));
}

std::string Date() {
  const std::time_t now = std::time(nullptr);
  std::tm local = {};
  ::localtime_r(&now, &local);
  char text[32];
  std::strftime(text, sizeof(text), "%Y%m%d-%H%M%S", &local);
  return text;
}

class ServeBench {
 public:
  ServeBench(const ServeBenchOptions& options, SignalWatch& signals)
      : options_(options), signals_(signals), random_(options.seed) {}

  // Everything that can be told before the load.
  absl::Status Prepare();
  absl::Status Run();
  // Prints and saves.
  absl::Status Report();

 private:
  bool is_random() const { return options_.prompts.empty(); }
  bool ignores_eos() const { return options_.ignore_eos.value_or(is_random()); }
  const char* path() const {
    return options_.endpoint == BenchEndpoint::kChat ? "/v1/chat/completions" : "/v1/completions";
  }
  LoadRequest MakeRequest(const LoadPrompt& prompt, double arrival) const;
  LoadOptions Load() const;
  absl::Status MeetServer();
  absl::Status ChooseModel(const HttpAnswer& list);
  absl::Status CheckLengths() const;
  absl::Status TryRequest(bool as_ids);
  absl::Status MakeRequests();
  absl::Status OpenResult();
  std::string ResultPath() const;

  const ServeBenchOptions& options_;
  SignalWatch& signals_;
  std::mt19937_64 random_;
  std::vector<PromptLengths> lengths_;  // of random prompts
  std::vector<LoadPrompt> prompts_;     // of a file
  SocketAddress server_;
  std::optional<int64_t> max_model_len_;
  ServeRun run_;
  std::vector<LoadRequest> requests_;
  LoadResult load_;
  std::string result_path_;
  std::optional<ResultFile> result_file_;
};

absl::Status ServeBench::Prepare() {
  if (is_random()) {
    RandomPrompts draw = options_.random;
    draw.num_prompts = options_.num_prompts.value_or(draw.num_prompts);
    // Below 2^63 as options go; the mean, and then what was drawn.
    LOCKSTEP_RETURN_IF_ERROR(CheckLoadFits(draw.num_prompts, draw.num_prompts * draw.input_len));
    lengths_ = DrawPromptLengths(draw, random_);
    int64_t tokens = 0;
    for (const PromptLengths& lengths : lengths_) tokens += lengths.input;
    LOCKSTEP_RETURN_IF_ERROR(CheckLoadFits(draw.num_prompts, tokens));
  } else {
    LOCKSTEP_ASSIGN_OR_RETURN(prompts_, ReadLoadPrompts(options_));
  }
  const int64_t count = is_random() ? std::ssize(lengths_) : std::ssize(prompts_);
  LOCKSTEP_RETURN_IF_ERROR(
      AllowConnections(std::min(count, options_.max_concurrency.value_or(count))));
  run_.date = Date();
  LOCKSTEP_RETURN_IF_ERROR(MeetServer());
  LOCKSTEP_RETURN_IF_ERROR(CheckLengths());
  run_.as_ids = is_random() && options_.endpoint == BenchEndpoint::kCompletions;
  if (options_.test_request) {
    absl::Status tried = TryRequest(run_.as_ids);
    if (absl::IsInvalidArgument(tried) && run_.as_ids) {
      run_.as_ids = false;
      if (TryRequest(false).ok()) {
        LogInfo(absl::StrCat("the server takes no token ids, prompts are words: ",
                             std::string(tried.message())));
        tried = absl::OkStatus();
      }
    }
    LOCKSTEP_RETURN_IF_ERROR(tried);
  }
  return MakeRequests();
}

absl::Status ServeBench::MeetServer() {
  const BaseUrl& url = *options_.server;
  LOCKSTEP_ASSIGN_OR_RETURN(server_, FindServer(url, options_.connect_seconds));
  const absl::StatusOr<HttpAnswer> list =
      AskServer(server_, FormatHttpRequest(url, "/v1/models", "", options_.api_key),
                options_.connect_seconds);
  if (!list.ok()) {
    return Refused(
        absl::StrFormat("%s/v1/models: %s", url.text(), std::string(list.status().message())));
  }
  return ChooseModel(*list);
}

absl::Status ServeBench::ChooseModel(const HttpAnswer& list) {
  const std::string where = options_.server->text() + "/v1/models";
  if (list.status == 401 || list.status == 403) {
    return Refused(absl::StrCat(where, ": ", Quoted(list), " (see --api-key)"));
  }
  const std::vector<ListedModel> models =
      list.status == 200 ? ReadModelList(list.body) : std::vector<ListedModel>();
  run_.model = options_.model;
  if (run_.model.empty()) {
    if (models.empty()) return Refused(absl::StrCat(where, " lists no model: give --model"));
    run_.model = models[0].id;
  }
  std::vector<std::string> names;
  for (const ListedModel& model : models) {
    if (model.id == run_.model) {
      max_model_len_ = model.max_model_len;
      return absl::OkStatus();
    }
    names.push_back(model.id);
  }
  if (!models.empty()) {
    return Refused(absl::StrFormat("--model %s: the server has no model of that name; known: %s",
                                   run_.model, absl::StrJoin(names, ", ")));
  }
  return absl::OkStatus();
}

absl::Status ServeBench::CheckLengths() const {
  if (!max_model_len_.has_value()) return absl::OkStatus();
  if (is_random()) return CheckAllFit(lengths_, *max_model_len_);
  for (const LoadPrompt& prompt : prompts_) {
    const PromptLengths lengths = {prompt.input.value_or(0), prompt.output.value_or(0)};
    LOCKSTEP_RETURN_IF_ERROR(CheckFits(lengths, *max_model_len_, prompt.where));
  }
  return absl::OkStatus();
}

// A short request of its own, so that no prompt of the load is in the server's cache.
// InvalidArgument when the server finds fault with what it says (status 400 or 422).
absl::Status ServeBench::TryRequest(bool as_ids) {
  std::mt19937_64 random(options_.seed ^ 0x746573740a);
  PromptLengths lengths = kTestLengths;
  for (const PromptLengths& one : lengths_) {
    lengths = {std::min(lengths.input, one.input), std::min(lengths.output, one.output)};
  }
  LogInfo(absl::StrFormat("a first request to %s%s", options_.server->text(), path()));
  const LoadPrompt prompt = MakeRandomPrompt(lengths, options_, as_ids, random);
  LoadOptions load = Load();
  load.keeps_text = false;
  LOCKSTEP_ASSIGN_OR_RETURN(const LoadResult result, RunLoad(load, {MakeRequest(prompt, 0)}));
  const LoadRecord& record = result.records[0];
  if (record.ok()) return absl::OkStatus();
  const std::string why = absl::StrFormat(
      "%s%s: a first request of %d tokens has failed (--no-test-request goes "
      "without it): %s",
      options_.server->text(), path(), lengths.input, record.error);
  const bool at_fault = record.status == 400 || record.status == 422;
  return at_fault ? Refused(why) : absl::UnavailableError(why);
}

LoadRequest ServeBench::MakeRequest(const LoadPrompt& prompt, double arrival) const {
  return {arrival,
          FormatHttpRequest(*options_.server, path(),
                            RequestBody(prompt, run_.model, ignores_eos()), options_.api_key)};
}

absl::Status ServeBench::MakeRequests() {
  const auto add = [this](const LoadPrompt& prompt) {
    requests_.push_back(MakeRequest(prompt, 0));
    run_.prompt_tokens.push_back(prompt.input);
  };
  // One after the other: as JSON, ids take three times the memory.
  for (const PromptLengths& lengths : lengths_) {
    add(MakeRandomPrompt(lengths, options_, run_.as_ids, random_));
  }
  for (const LoadPrompt& prompt : prompts_) add(prompt);
  prompts_.clear();
  run_.arrivals =
      DrawArrivals(std::ssize(requests_), options_.request_rate, options_.burstiness, random_);
  constexpr double kMostSeconds = 366.0 * 86400;
  if (!run_.arrivals.empty() && !(run_.arrivals.back() <= kMostSeconds)) {
    return Refused(absl::StrFormat(
        "at a --request-rate of %g and a --burstiness of %g the last of %d requests would come "
        "after more than a year: a higher rate or fewer requests",
        options_.request_rate, options_.burstiness, requests_.size()));
  }
  for (size_t i = 0; i < requests_.size(); ++i) requests_[i].arrival = run_.arrivals[i];
  return OpenResult();
}

LoadOptions ServeBench::Load() const {
  LoadOptions load;
  load.server = server_;
  load.endpoint = options_.endpoint;
  load.max_concurrency = options_.max_concurrency.value_or(INT64_MAX);
  load.request_seconds = options_.request_seconds;
  load.keeps_text = options_.save_detailed;
  load.stop_fd = signals_.fd();
  return load;
}

absl::Status ServeBench::Run() {
  const size_t total = requests_.size();
  auto told = std::chrono::steady_clock::now();
  LogInfo(absl::StrFormat("%d requests to %s%s, model %s", total, options_.server->text(), path(),
                          run_.model));
  const auto tell = [&](size_t ended) {
    const auto now = std::chrono::steady_clock::now();
    if (now - told < kTellInterval) return;
    told = now;
    LogInfo(absl::StrFormat("%d of %d requests", ended, total));
  };
  LOCKSTEP_ASSIGN_OR_RETURN(load_, RunLoad(Load(), requests_, tell));
  if (load_.stopped) {
    const std::optional<StopSignal> signal = signals_.Wait(0);
    LogWarning(absl::StrFormat("stopped by %s: the results are those of what had ended",
                               signal ? strsignal(signal->number) : "a signal"));
  }
  return absl::OkStatus();
}

// vLLM's names of such files.
std::string ServeBench::ResultPath() const {
  std::string name = options_.result_filename;
  if (name.empty()) {
    const std::string rate = std::isinf(options_.request_rate)
                                 ? std::string("inf")
                                 : absl::StrFormat("%.10g", options_.request_rate);
    name = absl::StrCat(options_.endpoint == BenchEndpoint::kChat ? "openai-chat" : "openai", "-",
                        rate, "qps");
    if (options_.max_concurrency) {
      absl::StrAppend(&name, "-concurrency", *options_.max_concurrency);
    }
    // A server may call its model anything.
    std::string model = run_.model.substr(run_.model.rfind('/') + 1).substr(0, kMaxNameBytes);
    for (char& c : model) {
      if (std::isalnum(static_cast<unsigned char>(c)) == 0 && c != '.' && c != '_') c = '-';
    }
    absl::StrAppend(&name, "-", model, "-", run_.date, ".json");
  }
  return options_.result_dir.empty() ? name : options_.result_dir + "/" + name;
}

absl::Status ServeBench::OpenResult() {
  if (!options_.save_result) return absl::OkStatus();
  std::error_code error;
  if (!options_.result_dir.empty()) std::filesystem::create_directories(options_.result_dir, error);
  result_path_ = ResultPath();
  LOCKSTEP_ASSIGN_OR_RETURN(ResultFile file, ResultFile::Create(result_path_));
  result_file_.emplace(std::move(file));
  return absl::OkStatus();
}

absl::Status ServeBench::Report() {
  const OrderedJson result = ServeResult(options_, run_, load_);
  // Both are tried, whatever becomes of the other.
  absl::Status saved = absl::OkStatus();
  if (result_file_) {
    saved = result_file_->Write(DumpJson(result) + "\n");
    if (saved.ok()) LogInfo("saved: " + result_path_);
  }
  ResultWriter writer;
  writer.Write(options_.json ? DumpJson(result) + "\n" : ServeTable(options_, result));
  LOCKSTEP_RETURN_IF_ERROR(saved);
  LOCKSTEP_RETURN_IF_ERROR(writer.status());
  const auto failed = std::find_if(load_.records.begin(), load_.records.end(),
                                   [](const LoadRecord& record) { return !record.ok(); });
  if (failed == load_.records.end()) return absl::OkStatus();
  return absl::InternalError(absl::StrFormat(
      "%d of %d requests have failed; the first, request %d: %s", result["failed"].get<int64_t>(),
      load_.records.size(), failed - load_.records.begin(), failed->error));
}

int Fail(const absl::Status& status, int exit_status) {
  Log(LogLevel::kError, std::string(status.message()));
  return exit_status;
}

}  // namespace

int RunServeBench(const ServeBenchOptions& options) {
  SetLogLevel(LogLevel::kInfo);
  ServeBenchOptions resolved = options;
  if (const char* key = std::getenv("OPENAI_API_KEY"); resolved.api_key.empty() && key != nullptr) {
    resolved.api_key = key;
  }
  if (std::any_of(resolved.api_key.begin(), resolved.api_key.end(),
                  [](char c) { return std::iscntrl(static_cast<unsigned char>(c)) != 0; })) {
    return Fail(absl::InvalidArgumentError(
                    "the API key (--api-key, or OPENAI_API_KEY) holds control characters"),
                2);
  }
  absl::StatusOr<SignalWatch> signals = SignalWatch::Create();
  if (!signals.ok()) return Fail(signals.status(), 2);
  ServeBench bench(resolved, *signals);
  int exit_status = 2;  // before work
  try {
    if (const absl::Status status = bench.Prepare(); !status.ok()) return Fail(status, 2);
    exit_status = 1;
    if (const absl::Status status = bench.Run(); !status.ok()) return Fail(status, 1);
    if (const absl::Status status = bench.Report(); !status.ok()) return Fail(status, 1);
  } catch (const std::bad_alloc&) {
    return Fail(absl::ResourceExhaustedError(
                    "out of memory: fewer requests (--num-prompts) or shorter ones (--input-len) "
                    "may fit"),
                exit_status);
  }
  return 0;
}

}  // namespace lockstep

#include "launch/serve/metrics.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <numeric>

namespace lockstep {

namespace {

constexpr double kFirstTokenSeconds[] = {0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1,
                                         0.25,  0.5,   0.75, 1,    2.5,  5,    7.5,  10,
                                         20,    40,    80,   160,  640,  2560};
constexpr double kNextTokenSeconds[] = {0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025,
                                        0.03,  0.04,  0.05,  0.075, 0.1,   0.15, 0.2,   0.3,  0.4,
                                        0.5,   0.75,  1,     2.5,   5,     10,   20,    40,   80};
constexpr double kRequestSeconds[] = {0.05, 0.1, 0.3, 0.5, 0.8, 1,   1.5, 2,   2.5, 5,    10,  15,
                                      20,   30,  40,  50,  60,  120, 240, 480, 960, 1920, 7680};
constexpr double kTokens[] = {1,    2,    5,     10,    20,    50,     100,    200,    500,    1000,
                              2000, 5000, 10000, 20000, 50000, 100000, 200000, 500000, 1000000};
constexpr double kChoices[] = {1, 2, 5, 10, 20};

// By FinishReason, without kNone.
constexpr const char* kReasons[] = {"stop", "length", "error", "abort"};

std::string Number(double value) {
  char text[32];
  const auto end = std::to_chars(text, text + sizeof(text), value).ptr;
  return std::string(text, end);
}

std::string Quoted(const std::string& value) {
  std::string out = "\"";
  for (const char c : value) {
    if (c == '\n') {
      out += "\\n";
      continue;
    }
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out + "\"";
}

// Writes the page, one family of samples after another.
class Page {
 public:
  explicit Page(const std::string& labels) : labels_(labels) {}

  void Family(const char* name, const char* type, const char* help) {
    absl::StrAppend(&text_, "# HELP ", name, " ", help, "\n# TYPE ", name, " ", type, "\n");
  }
  // `more`: labels besides the model's, with a comma in front.
  void Sample(const char* name, const std::string& more, double value) {
    absl::StrAppend(&text_, name, "{", labels_, more, "} ", Number(value), "\n");
  }
  void Gauge(const char* name, const char* help, double value) {
    Family(name, "gauge", help);
    Sample(name, "", value);
  }
  void Counter(const char* name, const char* help, double value) {
    Family(name, "counter", help);
    Sample(name, "", value);
  }
  void Add(const std::string& name, const char* help, const Histogram& histogram) {
    Family(name.c_str(), "histogram", help);
    const std::vector<uint64_t> counts = histogram.counts();
    uint64_t total = 0;
    for (size_t i = 0; i < counts.size(); ++i) {
      total += counts[i];
      const std::string limit =
          i < histogram.limits().size() ? Number(histogram.limits()[i]) : "+Inf";
      Sample((name + "_bucket").c_str(), ",le=\"" + limit + "\"", static_cast<double>(total));
    }
    Sample((name + "_sum").c_str(), "", histogram.sum());
    Sample((name + "_count").c_str(), "", static_cast<double>(total));
  }
  std::string Take() { return std::move(text_); }

 private:
  const std::string& labels_;
  std::string text_;
};

uint64_t Total(const Histogram& histogram) {
  const std::vector<uint64_t> counts = histogram.counts();
  return std::accumulate(counts.begin(), counts.end(), uint64_t{0});
}

double ResidentBytes() {
  long pages = 0;
  if (std::FILE* const file = std::fopen("/proc/self/statm", "r"); file != nullptr) {
    if (std::fscanf(file, "%*s %ld", &pages) != 1) pages = 0;
    std::fclose(file);
  }
  return static_cast<double>(pages) * static_cast<double>(sysconf(_SC_PAGESIZE));
}

double CpuSeconds() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

void AddProcess(Page& page) {
  page.Gauge("process_resident_memory_bytes", "Resident memory of rank 0.", ResidentBytes());
  page.Counter("process_cpu_seconds_total", "User and system time of rank 0.", CpuSeconds());
}

void AddScheduler(const SchedulerStats& stats, Page& page) {
  const double blocks = static_cast<double>(stats.num_blocks);
  const double used = static_cast<double>(stats.num_blocks - stats.num_free_blocks);
  page.Gauge("lockstep:num_requests_running", "Choices that are being computed.",
             static_cast<double>(stats.num_running));
  page.Gauge("lockstep:num_requests_waiting", "Choices that wait to be computed.",
             static_cast<double>(stats.num_waiting));
  page.Gauge("lockstep:kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1.",
             blocks > 0 ? used / blocks : 0);
  page.Gauge("lockstep:kv_cache_blocks", "KV blocks in all.", blocks);
  page.Gauge("lockstep:kv_cache_used_blocks", "KV blocks in use.", used);
  page.Gauge("lockstep:kv_cache_cached_blocks", "KV blocks that the prefix cache knows.",
             static_cast<double>(stats.num_cached_blocks));
  page.Counter("lockstep:prefix_cache_queries_total", "Tokens looked up in the prefix cache.",
               static_cast<double>(stats.prefix_cache_query_tokens));
  page.Counter("lockstep:prefix_cache_hits_total", "Tokens found in the prefix cache.",
               static_cast<double>(stats.prefix_cache_hit_tokens));
  page.Counter("lockstep:num_preemptions_total", "Choices that gave up their KV blocks to others.",
               static_cast<double>(stats.num_preemptions));
}

void AddEngine(const EngineStats& stats, Page& page) {
  AddScheduler(stats.scheduler, page);
  page.Counter("lockstep:steps_total", "Steps of the engine.", static_cast<double>(stats.steps));
  page.Counter("lockstep:prefill_tokens_total",
               "Prompt tokens computed: without prefix hits, again after a preemption.",
               static_cast<double>(stats.prompt_tokens));
  const char* const phase = "lockstep:step_phase_seconds_total";
  page.Family(phase, "counter", "Time of rank 0's engine thread by phase of its steps.");
  page.Sample(phase, ",phase=\"plan\"", stats.phases.plan);
  page.Sample(phase, ",phase=\"broadcast\"", stats.phases.broadcast);
  page.Sample(phase, ",phase=\"launch\"", stats.phases.launch);
  page.Sample(phase, ",phase=\"land\"", stats.phases.land);
  page.Sample(phase, ",phase=\"deliver\"", stats.phases.deliver);
}

}  // namespace

Histogram::Histogram(std::span<const double> limits)
    : limits_(limits), counts_(new std::atomic<uint64_t>[limits.size() + 1]()) {
  LOCKSTEP_CHECK(std::is_sorted(limits.begin(), limits.end()));
}

void Histogram::Observe(double value) {
  const auto bucket = std::lower_bound(limits_.begin(), limits_.end(), value) - limits_.begin();
  counts_[static_cast<size_t>(bucket)].fetch_add(1, std::memory_order_relaxed);
  sum_.fetch_add(value, std::memory_order_relaxed);
}

std::vector<uint64_t> Histogram::counts() const {
  std::vector<uint64_t> counts(limits_.size() + 1);
  for (size_t i = 0; i < counts.size(); ++i) {
    counts[i] = counts_[i].load(std::memory_order_relaxed);
  }
  return counts;
}

Metrics::Metrics(const std::string& model_name)
    : labels_("model_name=" + Quoted(model_name)),
      first_token_(kFirstTokenSeconds),
      next_token_(kNextTokenSeconds),
      whole_(kRequestSeconds),
      queue_(kRequestSeconds),
      prompt_lengths_(kTokens),
      answer_lengths_(kTokens),
      max_tokens_(kTokens),
      num_choices_(kChoices) {}

void Metrics::OnSubmitted(int64_t prompt_tokens) {
  prompt_tokens_.fetch_add(prompt_tokens, std::memory_order_relaxed);
}

void Metrics::OnRefused(int http_status) {
  const size_t status = static_cast<size_t>(std::clamp(http_status, 0, 599));
  refused_[status].fetch_add(1, std::memory_order_relaxed);
}

void Metrics::OnFinished(const FinishedChoice& choice) {
  const int reason = static_cast<int>(choice.reason) - 1;
  LOCKSTEP_CHECK(reason >= 0 && reason < kNumReasons);
  finished_[static_cast<size_t>(reason)].fetch_add(1, std::memory_order_relaxed);
  if (choice.reason == FinishReason::kCancelled) return;
  whole_.Observe(choice.seconds);
  prompt_lengths_.Observe(static_cast<double>(choice.prompt_tokens));
  answer_lengths_.Observe(static_cast<double>(choice.generated_tokens));
  max_tokens_.Observe(static_cast<double>(choice.max_tokens));
  num_choices_.Observe(choice.n);
}

std::string Metrics::Render(const ServerGauges& server, const EngineStats* engine,
                            const MetricLabels& info) const {
  Page page(labels_);
  page.Gauge("lockstep:ready", "1 when requests are served.", server.ready ? 1 : 0);
  page.Gauge("lockstep:http_requests_open", "Requests that are not answered yet.",
             static_cast<double>(server.open_requests));
  page.Gauge("lockstep:http_connections", "Open connections.",
             static_cast<double>(server.connections));
  std::string labels;
  for (const auto& [name, value] : info) absl::StrAppend(&labels, ",", name, "=", Quoted(value));
  page.Family("lockstep:engine_info", "gauge", "What runs, in labels; always 1.");
  page.Sample("lockstep:engine_info", labels, 1);
  AddProcess(page);
  if (engine != nullptr) AddEngine(*engine, page);

  page.Counter("lockstep:prompt_tokens_total", "Tokens of the prompts given to the engine.",
               static_cast<double>(prompt_tokens_.load(std::memory_order_relaxed)));
  page.Counter("lockstep:generation_tokens_total", "Tokens generated.",
               static_cast<double>(Total(first_token_) + Total(next_token_)));
  page.Family("lockstep:request_success_total", "counter", "Choices that have ended, by reason.");
  for (size_t i = 0; i < kNumReasons; ++i) {
    page.Sample("lockstep:request_success_total",
                absl::StrCat(",finished_reason=\"", kReasons[i], "\""),
                static_cast<double>(finished_[i].load(std::memory_order_relaxed)));
  }
  page.Family("lockstep:requests_refused_total", "counter",
              "Requests that were answered with an error instead of being served.");
  for (size_t status = 0; status < refused_.size(); ++status) {
    const int64_t count = refused_[status].load(std::memory_order_relaxed);
    if (count == 0) continue;
    page.Sample("lockstep:requests_refused_total", absl::StrCat(",status=\"", status, "\""),
                static_cast<double>(count));
  }
  page.Add("lockstep:time_to_first_token_seconds", "From arrival to a choice's first token.",
           first_token_);
  page.Add("lockstep:inter_token_latency_seconds", "Between a choice's tokens.", next_token_);
  page.Add("lockstep:e2e_request_latency_seconds", "From arrival to a choice's end.", whole_);
  page.Add("lockstep:request_queue_time_seconds", "From submission until it is computed.", queue_);
  page.Add("lockstep:request_prompt_tokens", "Length of prompts.", prompt_lengths_);
  page.Add("lockstep:request_generation_tokens", "Length of answers.", answer_lengths_);
  page.Add("lockstep:request_params_max_tokens", "max_tokens of choices.", max_tokens_);
  page.Add("lockstep:request_params_n", "n of the choices' requests.", num_choices_);
  return page.Take();
}

}  // namespace lockstep

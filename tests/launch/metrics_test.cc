#include "launch/serve/metrics.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <sstream>
#include <thread>

namespace lockstep {
namespace {

TEST(HistogramTest, ALimitBelongsToItsBucketAndTheRestToTheLast) {
  constexpr double kLimits[] = {1, 2, 5};
  Histogram histogram(kLimits);
  for (const double value : {0.0, 1.0, 1.5, 2.0, 4.9, 5.0, 5.1, 1e9}) histogram.Observe(value);
  EXPECT_EQ(histogram.counts(), (std::vector<uint64_t>{2, 2, 2, 2}));
  EXPECT_DOUBLE_EQ(histogram.sum(), 0 + 1 + 1.5 + 2 + 4.9 + 5 + 5.1 + 1e9);
}

TEST(HistogramTest, ThreadsLoseNothing) {
  constexpr double kLimits[] = {1, 2};
  Histogram histogram(kLimits);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&histogram, t] {
      for (int i = 0; i < 20000; ++i) histogram.Observe(t);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(histogram.counts(), (std::vector<uint64_t>{40000, 20000, 20000}));
  EXPECT_DOUBLE_EQ(histogram.sum(), 20000 * (0 + 1 + 2 + 3));
}

// Samples by name and labels, as the page has them.
std::map<std::string, double> Samples(const std::string& page) {
  std::map<std::string, double> samples;
  std::istringstream lines(page);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("#")) continue;
    const size_t space = line.rfind(' ');
    EXPECT_TRUE(samples.emplace(line.substr(0, space), std::stod(line.substr(space + 1))).second)
        << line;
  }
  return samples;
}

TEST(MetricsTest, SaysWhatWasCounted) {
  Metrics metrics("a \"model\"\n\\");
  metrics.OnSubmitted(7);
  metrics.OnSubmitted(5);
  metrics.OnRefused(429);
  metrics.OnRefused(429);
  metrics.OnRefused(400);
  metrics.OnFirstToken(0.03);
  metrics.OnNextToken(0.02);
  metrics.OnNextToken(2000);
  metrics.OnFinished({.reason = FinishReason::kLength,
                      .seconds = 1.7,
                      .prompt_tokens = 7,
                      .generated_tokens = 3,
                      .n = 1,
                      .max_tokens = 3});
  metrics.OnFinished({.reason = FinishReason::kCancelled, .seconds = 1});
  EngineStats stats;
  stats.steps = 9;
  stats.phases.launch = 0.25;
  stats.scheduler.num_blocks = 40;
  stats.scheduler.num_free_blocks = 30;
  stats.scheduler.num_running = 2;
  const std::string page = metrics.Render({.ready = true, .open_requests = 3, .connections = 4},
                                          &stats, {{"dtype", "bfloat16"}});
  const auto samples = Samples(page);
  const std::string model = "model_name=\"a \\\"model\\\"\\n\\\\\"";
  const auto value = [&](const std::string& name, const std::string& labels = "") {
    const auto found = samples.find(name + "{" + model + labels + "}");
    return found == samples.end() ? std::nan("") : found->second;
  };
  EXPECT_EQ(value("lockstep:prompt_tokens_total"), 12);
  EXPECT_EQ(value("lockstep:generation_tokens_total"), 3);
  EXPECT_EQ(value("lockstep:requests_refused_total", ",status=\"429\""), 2);
  EXPECT_EQ(value("lockstep:requests_refused_total", ",status=\"400\""), 1);
  EXPECT_EQ(value("lockstep:request_success_total", ",finished_reason=\"length\""), 1);
  EXPECT_EQ(value("lockstep:request_success_total", ",finished_reason=\"abort\""), 1);
  EXPECT_EQ(value("lockstep:request_success_total", ",finished_reason=\"stop\""), 0);
  EXPECT_EQ(value("lockstep:time_to_first_token_seconds_bucket", ",le=\"0.02\""), 0);
  EXPECT_EQ(value("lockstep:time_to_first_token_seconds_bucket", ",le=\"0.04\""), 1);
  EXPECT_EQ(value("lockstep:inter_token_latency_seconds_bucket", ",le=\"80\""), 1);
  EXPECT_EQ(value("lockstep:inter_token_latency_seconds_bucket", ",le=\"+Inf\""), 2);
  EXPECT_EQ(value("lockstep:inter_token_latency_seconds_count"), 2);
  EXPECT_EQ(value("lockstep:inter_token_latency_seconds_sum"), 2000.02);
  EXPECT_EQ(value("lockstep:e2e_request_latency_seconds_count"), 1);
  EXPECT_EQ(value("lockstep:kv_cache_usage_perc"), 0.25);
  EXPECT_EQ(value("lockstep:num_requests_running"), 2);
  EXPECT_EQ(value("lockstep:steps_total"), 9);
  EXPECT_EQ(value("lockstep:step_phase_seconds_total", ",phase=\"launch\""), 0.25);
  EXPECT_EQ(value("lockstep:engine_info", ",dtype=\"bfloat16\""), 1);
  EXPECT_EQ(value("lockstep:ready"), 1);
  EXPECT_EQ(value("lockstep:http_connections"), 4);
  EXPECT_GT(value("process_resident_memory_bytes"), 1e6);
}

TEST(MetricsTest, BeforeTheEngineStandsNothingIsSaidOfIt) {
  const Metrics metrics("m");
  const auto samples = Samples(metrics.Render({}, nullptr, {}));
  EXPECT_EQ(samples.count("lockstep:num_requests_running{model_name=\"m\"}"), 0);
  EXPECT_EQ(samples.at("lockstep:ready{model_name=\"m\"}"), 0);
}

}  // namespace
}  // namespace lockstep

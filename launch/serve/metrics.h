// What /metrics says, in Prometheus' text format: https://prometheus.io/docs/instrumenting/
// exposition_formats. Names are vLLM's where they mean the same, with the prefix "lockstep:".
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "launch/openai/serving_observer.h"
#include "runtime/engine.h"

namespace lockstep {

// Counts of observations by size. Any thread may observe: a binary search and two atomic additions.
class Histogram {
 public:
  // Upper limits of the buckets, ascending, which must outlive this; one more bucket takes the
  // rest.
  explicit Histogram(std::span<const double> limits);
  void Observe(double value);

  std::span<const double> limits() const { return limits_; }
  // [limits + 1], not cumulative. Observations of other threads may be in one of counts and sum
  // only.
  std::vector<uint64_t> counts() const;
  double sum() const { return sum_.load(std::memory_order_relaxed); }

 private:
  const std::span<const double> limits_;
  std::unique_ptr<std::atomic<uint64_t>[]> counts_;  // [limits + 1]
  std::atomic<double> sum_ = 0;
};

// Labels of the metric lockstep:engine_info, such as {"dtype", "bfloat16"}.
using MetricLabels = std::vector<std::pair<std::string, std::string>>;

// Of the server, as it is when the page is made.
struct ServerGauges {
  bool ready = false;
  int64_t open_requests = 0;
  int64_t connections = 0;
};

class Metrics : public ServingObserver {
 public:
  // `model_name` labels every metric.
  explicit Metrics(const std::string& model_name);

  void OnSubmitted(int64_t prompt_tokens) override;
  void OnRefused(int http_status) override;
  void OnAdmitted(double seconds) override { queue_.Observe(seconds); }
  void OnFirstToken(double seconds) override { first_token_.Observe(seconds); }
  void OnNextToken(double seconds) override { next_token_.Observe(seconds); }
  void OnFinished(const FinishedChoice& choice) override;

  // The whole page. `engine`: null before the engine stands, as is `info` then.
  std::string Render(const ServerGauges& server, const EngineStats* engine,
                     const MetricLabels& info) const;

 private:
  static constexpr int kNumReasons = 4;

  const std::string labels_;  // model_name="..."
  Histogram first_token_;
  Histogram next_token_;
  Histogram whole_;
  Histogram queue_;
  Histogram prompt_lengths_;
  Histogram answer_lengths_;
  Histogram max_tokens_;
  Histogram num_choices_;
  std::atomic<int64_t> prompt_tokens_ = 0;
  std::array<std::atomic<int64_t>, kNumReasons> finished_ = {};
  std::array<std::atomic<int64_t>, 600> refused_ = {};  // by HTTP status
};

}  // namespace lockstep

#include "launch/bench/collectives_bench.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_split.h"
#include "launch/bench/statistics.h"
#include "launch/command_specs.h"
#include "launch/engine_session.h"
#include "launch/job_watch.h"
#include "launch/launch_check.h"
#include "launch/option_setters.h"
#include "launch/result_writer.h"
#include "launch/text_table.h"
#include "parallel/mpi_communicator.h"
#include "parallel/watched_communicator.h"
#include "runtime/core/cuda_device.h"
#include "runtime/core/log.h"

namespace lockstep {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kFloatBytes = sizeof(float);
constexpr int64_t kMostBytes = int64_t{1} << 30;
constexpr int64_t kLinkBytes = int64_t{64} << 20;  // beyond the caches of most CPUs
constexpr int kLinkRepeats = 5;

constexpr char kMeasured[] =
    "Sums of float32 over all ranks, in place, by what the engine on CPUs sums with. A time is "
    "that\n"
    "of one sum on the slowest rank; small ones are timed several in a row. algbw is bytes / "
    "median\n"
    "time, busbw 2 (N - 1) / N of it, what each rank sends and receives at least (as nccl-tests\n"
    "count). Each size's sums are checked before they are timed.\n";

OptionSet StoreSizes(std::vector<int64_t>* sizes) {
  return [sizes](const std::string& text) -> absl::Status {
    sizes->clear();
    for (const absl::string_view part : absl::StrSplit(text, ',')) {
      LOCKSTEP_ASSIGN_OR_RETURN(const int64_t bytes,
                                ParseByteSize(std::string_view(part.data(), part.size())));
      if (bytes % kFloatBytes != 0 || bytes > kMostBytes) {
        return absl::InvalidArgumentError(absl::StrFormat(
            "a size must be whole float32 values, 4 bytes to 1G, not %s", std::string(part)));
      }
      sizes->push_back(bytes);
    }
    return absl::OkStatus();
  };
}

// So many sums in a row that the clock and the start together do not count.
int SumsInARow(int64_t bytes) {
  if (bytes <= 64 << 10) return 20;
  return bytes <= 1 << 20 ? 4 : 1;
}

double Microseconds(Clock::time_point from) {
  return std::chrono::duration<double, std::micro>(Clock::now() - from).count();
}

struct SizeResult {
  int64_t bytes = 0;
  Statistics us;  // of a sum, on the slowest rank; a value a repeat

  double algbw() const { return static_cast<double>(bytes) / us.median() * 1e6; }
  double busbw(int num_ranks) const { return algbw() * 2 * (num_ranks - 1) / num_ranks; }
};

// One rank's part.
class CollectivesBench {
 public:
  CollectivesBench(const CollectivesBenchOptions& options, Communicator& communicator,
                   std::string_view transport)
      : options_(options), communicator_(communicator), transport_(transport) {}

  // COLLECTIVE. A refusal, the same on all ranks.
  absl::Status Prepare();
  // COLLECTIVE. An error leaves the job unusable.
  absl::Status Measure();
  // Rank 0.
  std::string JsonText() const;
  std::string TableText() const;

 private:
  absl::Status CheckJob() const;
  absl::Status MeasureLink();
  absl::Status CheckSum(int64_t count);
  absl::Status TimeSize(int64_t bytes, SizeResult* result);

  const CollectivesBenchOptions& options_;
  Communicator& communicator_;
  const std::string transport_;
  std::vector<float> data_;  // of the largest size
  double link_ = 0;          // bytes a second; 0: not measured, the ranks are on several hosts
  std::vector<SizeResult> rows_;
};

absl::Status CollectivesBench::CheckJob() const {
  if (communicator_.size() == 1) {
    return absl::InvalidArgumentError(
        "bench collectives needs several ranks: mpirun -np N lockstep bench collectives");
  }
  const DeviceKind device = options_.engine.engine.device;
  if (device == DeviceKind::kCuda || (device == DeviceKind::kAuto && NumCudaDevices() > 0)) {
    return absl::UnimplementedError(
        "bench collectives measures ranks on CPUs alone (--device cpu); the sums of GPUs are "
        "measured by tests/bench/cuda_sum_bench.cc");
  }
  return absl::OkStatus();
}

absl::Status CollectivesBench::Prepare() {
  LOCKSTEP_RETURN_IF_ERROR(CheckSameLaunch(options_.engine, communicator_));
  LOCKSTEP_RETURN_IF_ERROR(Agree(communicator_, CheckJob()));
  return Agree(communicator_, CatchExhaustion("memory for the sums", [&] {
                 const int64_t most =
                     *std::max_element(options_.sizes.begin(), options_.sizes.end());
                 data_.resize(static_cast<size_t>(most / kFloatBytes));
                 return absl::OkStatus();
               }));
}

// COLLECTIVE. One rank copies while the others wait.
absl::Status CollectivesBench::MeasureLink() {
  if (communicator_.ranks_on_host() < communicator_.size()) return absl::OkStatus();
  std::vector<double> rates;
  if (communicator_.rank() == 0) {
    const std::vector<char> from(kLinkBytes, 1);
    std::vector<char> to(kLinkBytes, 2);
    for (int i = 0; i < kLinkRepeats; ++i) {
      const Clock::time_point start = Clock::now();
      std::memcpy(to.data(), from.data(), kLinkBytes);
      rates.push_back(static_cast<double>(kLinkBytes) / Microseconds(start) * 1e6);
    }
    link_ = Statistics(rates).median();
  }
  return communicator_.Broadcast(&link_, sizeof(link_), 0);
}

// COLLECTIVE. Every value against the known sum; wrong ones on one rank end all.
absl::Status CollectivesBench::CheckSum(int64_t count) {
  const auto value = [](int64_t i) { return static_cast<float>(1 + i % 7); };
  for (int64_t i = 0; i < count; ++i) {
    data_[i] = value(i) * static_cast<float>(communicator_.rank() + 1);
  }
  LOCKSTEP_RETURN_IF_ERROR(communicator_.AllReduceSum(data_.data(), count));
  const int64_t n = communicator_.size();
  absl::Status mine;
  for (int64_t i = 0; i < count && mine.ok(); ++i) {
    const float sum = value(i) * static_cast<float>(n * (n + 1) / 2);
    if (data_[i] == sum) continue;
    mine = absl::InternalError(absl::StrFormat(
        "the sum of %d float32 values is wrong at %d: %g, not %g", count, i, data_[i], sum));
  }
  return Agree(communicator_, mine);
}

absl::Status CollectivesBench::TimeSize(int64_t bytes, SizeResult* result) {
  const int64_t count = bytes / kFloatBytes;
  LOCKSTEP_RETURN_IF_ERROR(CheckSum(count));
  std::fill_n(data_.begin(), count, 0.0f);  // stays 0, however often it is summed
  const int in_a_row = SumsInARow(bytes);
  std::vector<double> mine;
  for (int64_t repeat = 0; repeat < options_.warmup + options_.repeats; ++repeat) {
    LOCKSTEP_RETURN_IF_ERROR(communicator_.Barrier());
    const Clock::time_point start = Clock::now();
    for (int i = 0; i < in_a_row; ++i) {
      LOCKSTEP_RETURN_IF_ERROR(communicator_.AllReduceSum(data_.data(), count));
    }
    const double us = Microseconds(start) / in_a_row;
    if (repeat >= options_.warmup) mine.push_back(us);
  }
  std::vector<double> all(mine.size() * communicator_.size());
  LOCKSTEP_RETURN_IF_ERROR(communicator_.AllGather(
      mine.data(), static_cast<int64_t>(mine.size() * sizeof(double)), all.data()));
  for (size_t i = 0; i < all.size(); ++i) {
    double& slowest = mine[i % mine.size()];
    slowest = std::max(slowest, all[i]);
  }
  *result = {bytes, Statistics(std::move(mine))};
  return absl::OkStatus();
}

absl::Status CollectivesBench::Measure() {
  LOCKSTEP_RETURN_IF_ERROR(MeasureLink());
  for (const int64_t bytes : options_.sizes) {
    LOCKSTEP_RETURN_IF_ERROR(TimeSize(bytes, &rows_.emplace_back()));
  }
  return absl::OkStatus();
}

std::string CollectivesBench::JsonText() const {
  OrderedJson json;
  json["kind"] = "collectives";
  json["num_ranks"] = communicator_.size();
  json["device"] = "cpu";
  json["ranks_on_host"] = communicator_.ranks_on_host();
  json["warmup"] = options_.warmup;
  json["repeats"] = options_.repeats;
  json["link_bytes_per_second"] = nullptr;
  if (link_ > 0) json["link_bytes_per_second"] = link_;
  OrderedJson rows = OrderedJson::array();
  for (const SizeResult& row : rows_) {
    OrderedJson one;
    one["algorithm"] = transport_;
    one["bytes"] = row.bytes;
    one["us"] = StatisticsJson(row.us);
    one["algbw"] = row.algbw();
    one["busbw"] = row.busbw(communicator_.size());
    rows.push_back(std::move(one));
  }
  json["rows"] = std::move(rows);
  return DumpJson(json) + "\n";
}

std::string CollectivesBench::TableText() const {
  const auto number = [](double value) { return absl::StrFormat("%.2f", value); };
  std::vector<std::vector<std::string>> table = {
      {"bytes", "median us", "p90 us", "least us", "algbw GB/s", "busbw GB/s"}};
  if (link_ > 0) table[0].push_back("of a copy");
  for (const SizeResult& row : rows_) {
    const double busbw = row.busbw(communicator_.size());
    table.push_back({absl::StrCat(row.bytes), number(row.us.median()),
                     number(row.us.Percentile(90)), number(row.us.min()), number(row.algbw() / 1e9),
                     number(busbw / 1e9)});
    if (link_ > 0) table.back().push_back(absl::StrFormat("%.0f%%", busbw / link_ * 100));
  }
  std::string text = absl::StrFormat(
      "%d ranks, cpu, through %s; %d times after %d to warm up\n\n%s\n%s", communicator_.size(),
      transport_, options_.repeats, options_.warmup, TextTable(table), kMeasured);
  if (link_ > 0) {
    absl::StrAppend(
        &text, absl::StrFormat("One thread copies 64 MiB in memory at %.2f GB/s.\n", link_ / 1e9));
  }
  return text;
}

// What rank 0 has printed decides for all.
absl::StatusOr<int> PrintOnRank0(const CollectivesBenchOptions& options,
                                 const CollectivesBench& bench, Communicator& communicator) {
  int exit_status = 0;
  if (communicator.rank() == 0) {
    exit_status = PrintResult(options.json ? bench.JsonText() : bench.TableText());
  }
  LOCKSTEP_RETURN_IF_ERROR(communicator.Broadcast(&exit_status, sizeof(exit_status), 0));
  return exit_status;
}

absl::StatusOr<int> RunOnRanks(const CollectivesBenchOptions& options, CollectivesBench& bench,
                               Communicator& communicator) {
  LOCKSTEP_RETURN_IF_ERROR(bench.Measure());
  return PrintOnRank0(options, bench, communicator);
}

}  // namespace

CollectivesBenchOptions::CollectivesBenchOptions() {
  for (int64_t bytes = 1 << 10; bytes <= 16 << 20; bytes *= 4) sizes.push_back(bytes);
}

CommandSpec CollectivesBenchSpec(CollectivesBenchOptions* options) {
  OptionGroup group = {
      "Benchmark",
      {{"--sizes", "BYTES,...", "What is summed, in bytes; K and M stand for powers of 1024.",
        "1K,4K,16K,64K,256K,1M,4M,16M", false, StoreSizes(&options->sizes)},
       {"--warmup", "N", "Times that come first and do not count, for each size.",
        absl::StrCat(options->warmup), false, StoreInt(&options->warmup, 0, 1000000)},
       {"--repeats", "N", "Times that count, for each size.", absl::StrCat(options->repeats), false,
        StoreInt(&options->repeats, 1, 1000000)},
       Flag("--json", "One JSON object instead of a table.", &options->json)}};
  CommandSpec spec = {
      "bench collectives",
      "",
      "sums between ranks, by size",
      kMeasured,
      {KeptGroup(std::move(group), &options->engine), JobGroup(&options->engine)},
      absl::StrCat("Examples:\n"
                   "  mpirun -np 2 lockstep bench collectives\n"
                   "  mpirun -np 4 lockstep bench collectives --sizes 16K,1M --json\n\n",
                   kExitStatuses)};
  return spec;
}

int RunCollectivesBench(const CollectivesBenchOptions& options) {
  SetLogLevel(options.engine.log_level);
  StartWatch start_watch(LaunchedRank(), StartedByLauncher() ? options.engine.watchdog_seconds : 0);
  absl::StatusOr<std::unique_ptr<Communicator>> created = CreateMpiCommunicator();
  if (!created.ok()) {
    Log(LogLevel::kError, std::string(created.status().message()));
    return 2;
  }
  const std::unique_ptr<Communicator> ranks = *std::move(created);
  if (ranks->rank() != 0) SilenceLog();
  JobWatch watch(start_watch, {});
  WatchedCommunicator communicator(*ranks, watch.watched().progress);
  CollectivesBench bench(options, communicator, TransportOf(*ranks));
  absl::Status refused = bench.Prepare();
  if (refused.ok()) refused = watch.Start(communicator, options.engine.watchdog_seconds);
  if (!refused.ok()) {
    if (communicator.failed()) watch.Fail(communicator, refused);
    Log(LogLevel::kError, std::string(refused.message()));
    communicator.Barrier().IgnoreError();  // nobody leaves before the message is out
    watch.Stop();
    return 2;
  }
  const absl::StatusOr<int> exit_status = RunOnRanks(options, bench, communicator);
  if (!exit_status.ok()) watch.Fail(communicator, exit_status.status());
  watch.watched().progress.SetPhase(RankPhase::kEnd);
  watch.watched().progress.Enter(CollectiveKind::kFinalize, 0);
  return *exit_status;
}

}  // namespace lockstep

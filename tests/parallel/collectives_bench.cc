// Latency of the collectives: tests/mpirun.sh N collectives_bench. Medians over repeats; GB/s
// counts the message once (bytes / time).
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <vector>

#include "parallel/mpi_communicator.h"

namespace lockstep {
namespace {

double Microseconds(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start)
      .count();
}

struct Times {
  double p50, p90;
};

// Times of one call of `body`, on this rank, in batches so that the clock does not count.
template <typename Body>
Times Measure(int repeats, int batch, Body body) {
  std::vector<double> times(repeats);
  for (double& time : times) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < batch; ++i) {
      if (!body().ok()) AbortJob(1);
    }
    time = Microseconds(start) / batch;
  }
  std::sort(times.begin(), times.end());
  return {times[repeats / 2], times[repeats * 9 / 10]};
}

void Print(Communicator& job, const char* what, int64_t bytes, Times times) {
  if (job.rank() != 0) return;
  std::printf("%-28s %9lld B  p50 %9.2f us  p90 %9.2f us  %7.2f GB/s\n", what,
              static_cast<long long>(bytes), times.p50, times.p90, bytes / times.p50 / 1e3);
  std::fflush(stdout);
}

int Main() {
  auto communicator = CreateMpiCommunicator();
  if (!communicator.ok()) {
    std::fprintf(stderr, "%s\n", communicator.status().ToString().c_str());
    return 1;
  }
  Communicator& job = **communicator;
  for (const int64_t bytes : {2304, 8192, 14336, 65536, 262144, 1 << 20, 8 << 20}) {
    std::vector<float> data(bytes / 4, 1.0f);
    const bool large = bytes > 100000;
    const auto sum = [&] { return job.AllReduceSum(data.data(), bytes / 4); };
    Print(job, "AllReduceSum", bytes, Measure(large ? 30 : 100, large ? 4 : 50, sum));
  }
  for (const int64_t bytes : {256, 8192, 131072}) {
    std::vector<char> data(bytes);
    const auto broadcast = [&] { return job.Broadcast(data.data(), bytes, 0); };
    Print(job, "Broadcast", bytes, Measure(100, 20, broadcast));
  }
  // A decode step: rank 0 works (sampling, planning) before it broadcasts, others wait for it; the
  // latency is the time from the broadcast to the end of a barrier.
  for (const int work_us : {20, 200, 5000}) {
    std::vector<char> data(4096);
    std::vector<double> times(100);
    for (double& time : times) {
      if (job.rank() == 0) {
        const auto start = std::chrono::steady_clock::now();
        while (Microseconds(start) < work_us) {
        }
      }
      const auto start = std::chrono::steady_clock::now();
      if (!job.Broadcast(data.data(), 4096, 0).ok() || !job.Barrier().ok()) AbortJob(1);
      time = Microseconds(start);
    }
    std::sort(times.begin(), times.end());
    Print(job,
          work_us == 20    ? "wake after 20 us"
          : work_us == 200 ? "wake after 200 us"
                           : "wake after 5 ms",
          4096, {times[50], times[90]});
  }
  return 0;
}

}  // namespace
}  // namespace lockstep

int main() { return lockstep::Main(); }

#include "launch/bench/arrival_schedule.h"

#include <cmath>

namespace lockstep {

std::vector<double> DrawArrivals(int64_t count, double rate, double burstiness,
                                 std::mt19937_64& random) {
  std::vector<double> arrivals(static_cast<size_t>(count), 0.0);
  if (std::isinf(rate)) return arrivals;
  std::gamma_distribution<double> interval(burstiness, 1 / (rate * burstiness));
  double time = 0;
  for (double& arrival : arrivals) arrival = time += interval(random);
  // With a very small shape all intervals may be rounded to 0.
  const double wanted = static_cast<double>(count) / rate;
  for (double& arrival : arrivals) arrival = time > 0 ? arrival * (wanted / time) : wanted;
  return arrivals;
}

}  // namespace lockstep

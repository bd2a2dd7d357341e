// When the requests of an open-loop load arrive: drawn before the first is sent.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

namespace lockstep {

// Seconds from the start at which each of `count` requests arrives, ascending. `rate` is requests a
// second, or infinity: all arrive at 0. The intervals are drawn from a gamma distribution of shape
// `burstiness` (1: a Poisson process; below 1 burstier, above 1 more even) and mean 1 / rate, and
// then scaled so that the last request arrives at count / rate: the rate is met exactly.
std::vector<double> DrawArrivals(int64_t count, double rate, double burstiness,
                                 std::mt19937_64& random);

}  // namespace lockstep

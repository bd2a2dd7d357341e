// The Gumbel-max trick (Gumbel 1954; Maddison, Tarlow, Minka, "A* Sampling", 2014): the argmax of
// logit / temperature + noise is a draw from softmax(logits / temperature). Noise is a pure
// function of (seed, position, id). Thread-safe.
#pragma once

#include <cstdint>
#include <limits>

#include "runtime/logit_scan.h"

namespace lockstep {

// Noise of one vocabulary id, Gumbel(0, 1) distributed.
double GumbelNoise(uint64_t seed, int64_t position, int64_t id);

struct RaceResult {
  double score = -std::numeric_limits<double>::infinity();
  int32_t id = -1;  // -1: nobody took part
};
// The largest logit * inverse_temperature + noise among the survivors; lowest id on ties.
RaceResult GumbelRace(const LogitSlice& slice, const Survivors& survivors, uint64_t seed,
                      int64_t position, double inverse_temperature);

}  // namespace lockstep

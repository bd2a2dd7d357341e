// How the ranks of a RankStar find each other.
#pragma once

#include <chrono>
#include <vector>

#include "parallel/communicator.h"

namespace lockstep {

// COLLECTIVE. Connected, non-blocking sockets by rank, -1 where there is none; the caller closes
// them. Errors as RankStar::Connect.
absl::StatusOr<std::vector<int>> ConnectRanks(Communicator& communicator,
                                              std::chrono::duration<double> limit);

}  // namespace lockstep

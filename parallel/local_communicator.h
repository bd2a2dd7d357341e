// Threads of one process as ranks: tensor-parallel arithmetic is tested without MPI.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "parallel/communicator.h"

namespace lockstep {

// `size` communicators that talk to each other; each is used by one thread. If one is destroyed
// while others wait in a collective, they get an Aborted status instead of hanging.
std::vector<std::unique_ptr<Communicator>> CreateLocalCommunicators(int size);

// Runs body(communicator) on `size` threads and returns their statuses in rank order.
std::vector<absl::Status> RunLocalRanks(int size,
                                        const std::function<absl::Status(Communicator&)>& body);

}  // namespace lockstep

// What every Communicator must do, whatever carries it. Each check is COLLECTIVE and returns an
// error that names the first wrong value.
#pragma once

#include "parallel/communicator.h"

namespace lockstep {

absl::Status CheckAllReduceSum(Communicator& communicator);
absl::Status CheckGathers(Communicator& communicator);
absl::Status CheckBroadcast(Communicator& communicator);
// Many collectives of all kinds and sizes one after the other, with ranks delayed at random.
absl::Status CheckMixture(Communicator& communicator);
absl::Status CheckAgree(Communicator& communicator);

}  // namespace lockstep

// `lockstep version`: what is built in.
#pragma once

namespace lockstep {

struct VersionOptions {
  bool json = false;
};

// Exit status.
int RunVersion(const VersionOptions& options);

}  // namespace lockstep

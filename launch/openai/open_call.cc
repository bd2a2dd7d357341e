#include "launch/openai/open_call.h"

namespace lockstep {

absl::StatusOr<RequestId> OpenCall::Control::Submit(Engine& engine, Request request) {
  const std::lock_guard lock(mutex_);
  if (closed()) return 0;
  LOCKSTEP_ASSIGN_OR_RETURN(const RequestId id, engine.Submit(std::move(request)));
  ids_.push_back(id);
  return id;
}

void OpenCall::Control::Close(Engine& engine) {
  const std::lock_guard lock(mutex_);
  closed_.store(true, std::memory_order_relaxed);
  for (const RequestId id : ids_) engine.Cancel(id);
  ids_.clear();
}

}  // namespace lockstep

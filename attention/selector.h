// Chooses the attention backend of a layer, once, at load time.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "attention/attention_backend.h"
#include "runtime/core/thread_pool.h"

namespace lockstep {

// What the layers of a model and the options of the user ask of a backend.
struct AttentionRequirements {
  std::string device = "cpu";  // "cpu" or "cuda"
  DType activation_dtype = DType::kF32;
  DType kv_dtype = DType::kF32;
  int64_t head_dim = 0;
  int64_t block_size = 0;
  bool sliding_window = false;
  bool logit_softcap = false;
  bool alibi = false;
  bool sinks = false;
  bool non_causal = false;
  bool deterministic = false;
};

struct BackendRefusal {
  std::string backend;
  std::vector<std::string> reasons;  // all of them
};

struct SelectionReport {
  std::string chosen;
  GraphSupport graph_support = GraphSupport::kNever;  // of the chosen one
  std::vector<BackendRefusal> refused;                // in the order tried

  // "attention backend: cpu" and a line for each refusal with its reasons.
  std::string ToString() const;
};

struct BackendSelection {
  std::unique_ptr<AttentionBackend> backend;
  SelectionReport report;
};

// Every reason why a backend with these capabilities cannot do what is asked; empty when it can.
std::vector<std::string> ReasonsToRefuse(const AttentionCapabilities& capabilities,
                                         const AttentionRequirements& requirements);

// With an empty `user_choice` the first backend of the device's priority list that fits, else the
// named one if it fits.
//
// InvalidArgument: an unknown name (the message lists the known ones), or a device without backends
// in this build. Unimplemented: none fits, with all reasons of each.
absl::StatusOr<SelectionReport> ChooseBackend(const AttentionRequirements& requirements,
                                              std::string_view user_choice);

// ChooseBackend, and makes it, on the host. `pool` must outlive the backend. FailedPrecondition for
// one of another device: it needs a stream and sizes (CudaBackend::Create, or the launchers of
// cuda_attention.h).
absl::StatusOr<BackendSelection> SelectBackend(const AttentionRequirements& requirements,
                                               std::string_view user_choice, ThreadPool& pool);

}  // namespace lockstep

#include "attention/selector.h"

#include <algorithm>

#include "absl/strings/str_join.h"
#include "attention/cpu_backend.h"
#ifdef LOCKSTEP_WITH_CUDA
#include "attention/cuda_backend.h"
#endif
#include "attention/reference_backend.h"

namespace lockstep {
namespace {

struct BackendEntry {
  std::string name;
  std::string device;
  bool by_name_only;  // not in the device's priority list
  const AttentionCapabilities& capabilities;
  // Null where a thread pool is not enough to make one.
  std::unique_ptr<AttentionBackend> (*create)(ThreadPool& pool);
};

// Everything built in; the order within a device is its priority list. The reference is hundreds of
// times slower: taking it where nothing else fits would be a silent fallback.
const std::vector<BackendEntry>& Registry() {
  static const std::vector<BackendEntry> registry = {
      {.name = "cpu",
       .device = "cpu",
       .by_name_only = false,
       .capabilities = CpuBackend::Capabilities(),
       .create = [](ThreadPool& pool) -> std::unique_ptr<AttentionBackend> {
         return CpuBackend::Create(pool);
       }},
      {.name = "reference",
       .device = "cpu",
       .by_name_only = true,
       .capabilities = ReferenceBackend::Capabilities(),
       .create = [](ThreadPool&) -> std::unique_ptr<AttentionBackend> {
         return std::make_unique<ReferenceBackend>();
       }},
#ifdef LOCKSTEP_WITH_CUDA
      {.name = "cuda",
       .device = "cuda",
       .by_name_only = false,
       .capabilities = CudaAttentionCapabilities(),
       .create = nullptr},
#endif
  };
  return registry;
}

std::string Names(const std::vector<DType>& dtypes) {
  return absl::StrJoin(dtypes, ", ", [](std::string* out, DType dtype) { *out += Name(dtype); });
}

void CheckDType(const char* what, const std::vector<DType>& can, DType want,
                std::vector<std::string>* reasons) {
  if (std::find(can.begin(), can.end(), want) != can.end()) return;
  reasons->push_back(
      absl::StrFormat("%s %s is not supported (supported: %s)", what, Name(want), Names(can)));
}

std::string KnownNames() {
  return absl::StrJoin(Registry(), ", ",
                       [](std::string* out, const BackendEntry& entry) { *out += entry.name; });
}

std::string Lines(const std::vector<BackendRefusal>& refused) {
  std::string text;
  for (const BackendRefusal& refusal : refused) {
    absl::StrAppend(&text, "\n  ", refusal.backend, ": ", absl::StrJoin(refusal.reasons, "; "));
  }
  return text;
}

std::vector<std::string> Reasons(const BackendEntry& entry,
                                 const AttentionRequirements& requirements) {
  std::vector<std::string> reasons = ReasonsToRefuse(entry.capabilities, requirements);
  if (entry.device != requirements.device) {
    reasons.insert(reasons.begin(), absl::StrFormat("runs on device %s, not on %s", entry.device,
                                                    requirements.device));
  }
  return reasons;
}

}  // namespace

std::string SelectionReport::ToString() const {
  std::string text = absl::StrCat("attention backend: ", chosen.empty() ? "none" : chosen);
  if (!refused.empty()) absl::StrAppend(&text, "; refused:", Lines(refused));
  return text;
}

std::vector<std::string> ReasonsToRefuse(const AttentionCapabilities& can,
                                         const AttentionRequirements& want) {
  std::vector<std::string> reasons;
  CheckDType("activation dtype", can.activation_dtypes, want.activation_dtype, &reasons);
  CheckDType("KV cache dtype", can.kv_dtypes, want.kv_dtype, &reasons);
  if (can.activations_in_kv_dtype && want.activation_dtype != want.kv_dtype &&
      want.kv_dtype != DType::kF8E4M3) {
    reasons.push_back(absl::StrFormat("activation dtype %s with KV cache dtype %s",
                                      Name(want.activation_dtype), Name(want.kv_dtype)));
  }
  if (want.head_dim < can.min_head_dim || want.head_dim > can.max_head_dim) {
    reasons.push_back(absl::StrFormat("head_dim %d is outside %d to %d", want.head_dim,
                                      can.min_head_dim, can.max_head_dim));
  }
  if (want.head_dim % can.head_dim_multiple != 0) {
    reasons.push_back(absl::StrFormat("head_dim %d is not a multiple of %d", want.head_dim,
                                      can.head_dim_multiple));
  }
  if (want.block_size < 1 || want.block_size % can.block_size_multiple != 0) {
    reasons.push_back(absl::StrFormat("block size %d is not a positive multiple of %d",
                                      want.block_size, can.block_size_multiple));
  }
  const struct {
    const char* name;
    bool wanted;
    bool supported;
  } features[] = {
      {"sliding window", want.sliding_window, can.sliding_window},
      {"logit soft-cap", want.logit_softcap, can.logit_softcap},
      {"ALiBi", want.alibi, can.alibi},
      {"attention sinks", want.sinks, can.sinks},
      {"non-causal attention", want.non_causal, can.non_causal},
      {"results independent of the batch", want.deterministic, can.deterministic},
  };
  for (const auto& feature : features) {
    if (feature.wanted && !feature.supported) {
      reasons.push_back(absl::StrCat("no support for ", feature.name));
    }
  }
  return reasons;
}

absl::StatusOr<SelectionReport> ChooseBackend(const AttentionRequirements& requirements,
                                              std::string_view user_choice) {
  SelectionReport report;
  bool known = user_choice.empty();
  bool device_known = false;
  for (const BackendEntry& entry : Registry()) {
    device_known |= entry.device == requirements.device;
    if (user_choice.empty()) {
      if (entry.device != requirements.device || entry.by_name_only) continue;
    } else if (entry.name != user_choice) {
      continue;
    }
    known = true;
    std::vector<std::string> reasons = Reasons(entry, requirements);
    if (reasons.empty()) {
      report.chosen = entry.name;
      report.graph_support = entry.capabilities.graph_support;
      return report;
    }
    report.refused.push_back({.backend = entry.name, .reasons = std::move(reasons)});
  }
  if (!known) {
    return absl::InvalidArgumentError(
        absl::StrFormat("unknown attention backend \"%s\"; known: %s", user_choice, KnownNames()));
  }
  if (!device_known) {
    return absl::InvalidArgumentError(
        absl::StrFormat("this build has no attention backend for device \"%s\"; known: %s",
                        requirements.device, KnownNames()));
  }
  return absl::UnimplementedError(
      absl::StrCat("no attention backend can run this model:", Lines(report.refused)));
}

absl::StatusOr<BackendSelection> SelectBackend(const AttentionRequirements& requirements,
                                               std::string_view user_choice, ThreadPool& pool) {
  BackendSelection selection;
  LOCKSTEP_ASSIGN_OR_RETURN(selection.report, ChooseBackend(requirements, user_choice));
  for (const BackendEntry& entry : Registry()) {
    if (entry.name != selection.report.chosen) continue;
    if (entry.create == nullptr) {
      return absl::FailedPreconditionError(
          absl::StrFormat("attention backend \"%s\" is not made on the host alone", entry.name));
    }
    selection.backend = entry.create(pool);
  }
  return selection;
}

}  // namespace lockstep

// The arrays of a step on the device, at addresses that stay, and the block tables that stay with
// them. What a CUDA graph has captured reads them anew at each replay.
#pragma once

#include <array>
#include <cstdint>

#include "attention/cuda_attention.h"
#include "model/forward_batch.h"
#include "runtime/core/cuda_device.h"

namespace lockstep {

// Largest step: T tokens, B requests, R rows of logits.
struct CudaInputLimits {
  int64_t max_tokens = 0;
  int64_t max_requests = 0;
  int64_t max_logits_rows = 0;
  int64_t max_blocks = 0;  // entries of a block table
  int64_t num_slots = 0;   // block tables
  int64_t rotary_dim = 0;  // R of the angles that travel with each step; 0: none do
};

// Thread rule: the rank's engine thread. Stream rule: one stream, given to every call. The host
// goes on while the stream copies: staging memory is a ring, and BeginStep waits until the step
// that used its place before has been copied.
class CudaInputs {
 public:
  static absl::StatusOr<CudaInputs> Create(const CudaInputLimits& limits, CudaStream stream);

  // Before host_cos, host_sin and Upload of each step.
  absl::Status BeginStep();
  // Copies the batch's arrays and changes of block tables. Padded with requests of no tokens to
  // `num_requests` and rows without slot to `num_tokens` (at least those of the batch);
  // logits_rows with row 0 to `num_logits_rows`. Negative token ids become those of last_tokens().
  absl::Status Upload(const ForwardBatch& batch, int64_t num_requests, int64_t num_tokens,
                      int64_t num_logits_rows, CudaStream stream);
  // The angles of the step's tokens, float32 [T, R/2] each, where they travel with it: host memory
  // to fill before Upload.
  float* host_cos() const { return host<float>(cos_); }
  float* host_sin() const { return host<float>(sin_); }

  // int32 [slots]; see DeviceDecoder.
  int32_t* last_tokens() const { return last_tokens_.as<int32_t>(); }
  const int32_t* token_ids() const { return device<int32_t>(token_ids_); }
  const int32_t* positions() const { return device<int32_t>(positions_); }
  const int32_t* logits_rows() const { return device<int32_t>(logits_rows_); }
  const float* cos() const { return device<float>(cos_); }
  const float* sin() const { return device<float>(sin_); }
  // The pointers and the sizes of the padded step.
  CudaAttentionBatch attention(int64_t num_requests, int64_t num_tokens, int64_t block_size) const;

 private:
  // An array's place in the staging memory and in the device's copy of it.
  struct Place {
    int64_t offset = 0;
    int64_t bytes = 0;
  };

  Place Add(int64_t bytes);
  template <typename T>
  T* host(const Place& place) const {
    return reinterpret_cast<T*>(staging_[current_].memory.as<char>() + place.offset);
  }
  template <typename T>
  T* device(const Place& place) const {
    return reinterpret_cast<T*>(arrays_.as<char>() + place.offset);
  }
  absl::Status Send(const Place& place, int64_t bytes, CudaStream stream);
  absl::Status UploadTables(const ForwardBatch& batch, CudaStream stream);

  CudaInputLimits limits_;
  int64_t size_bytes_ = 0;
  Place token_ids_;        // int32 [T]
  Place positions_;        // int32 [T]
  Place slot_mapping_;     // int64 [T]
  Place query_start_loc_;  // int32 [B + 1]
  Place seq_lens_;         // int32 [B]
  Place table_rows_;       // int32 [B]
  Place logits_rows_;      // int32 [R]
  Place cos_;              // float32 [T, R/2]
  Place sin_;
  Place table_runs_;    // BlockTableRun [slots]
  Place table_blocks_;  // int32 [slots * max_blocks]
  // Two steps in flight, and one that the host fills.
  static constexpr size_t kStagingBuffers = 3;
  struct Staging {
    PinnedBuffer memory;
    OwnedCudaEvent copied;
  };
  std::array<Staging, kStagingBuffers> staging_;
  size_t current_ = 0;
  DeviceBuffer arrays_;
  DeviceBuffer last_tokens_;
  DeviceBuffer block_tables_;  // int32 [slots + 1, max_blocks]; the last row is a padding request's
};

}  // namespace lockstep

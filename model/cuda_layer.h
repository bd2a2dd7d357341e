// The weights of one decoder layer on a GPU, and how a rank reads its part of them.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "attention/cuda_attention.h"
#include "model/cuda_weights.h"
#include "model/model_config.h"
#include "parallel/partition.h"

namespace lockstep {

// Of one rank. Matrices and biases in the compute type.
struct CudaLayer {
  DeviceMatrix input_norm;  // float32 [E]
  DeviceMatrix qkv;         // [(Hq_local + 2 * Hkv_local) * D, E]
  DeviceMatrix qkv_bias;    // or none
  DeviceMatrix q_norm;      // float32 [D], or none
  DeviceMatrix k_norm;
  CudaAttentionLayer attention;
  DeviceMatrix o;                    // [E, Hq_local * D]
  DeviceMatrix o_bias;               // rank 0, or none
  DeviceMatrix post_attention_norm;  // float32 [E]
  DeviceMatrix gate_up;              // [2 * F_local, E]
  DeviceMatrix gate_up_bias;         // or none
  DeviceMatrix down;                 // [E, F_local]
  DeviceMatrix down_bias;            // rank 0, or none

  int64_t bytes() const {
    int64_t sum = 0;
    for (const DeviceMatrix* m :
         {&input_norm, &qkv, &qkv_bias, &q_norm, &k_norm, &o, &o_bias, &post_attention_norm,
          &gate_up, &gate_up_bias, &down, &down_bias}) {
      sum += m->bytes();
    }
    return sum;
  }
};

// Reads a rank's layers. The references must outlive it.
class CudaLayerReader {
 public:
  CudaLayerReader(const ModelConfig& config, const RankPartition& part, int rank, DType dtype,
                  DType kv_dtype, DeviceWeightLoader& loader)
      : config_(config),
        part_(part),
        rank_(rank),
        dtype_(dtype),
        kv_dtype_(kv_dtype),
        loader_(loader) {}

  // The weight of a norm over `size` elements, whole on every rank.
  absl::StatusOr<DeviceMatrix> Norm(const std::string& name, int64_t size);
  absl::StatusOr<CudaLayer> Read(int64_t layer);

 private:
  // Column-parallel: rows of several matrices, one below the other.
  absl::Status Column(const std::vector<std::pair<std::string, Range>>& slices, bool has_bias,
                      const std::vector<std::string>& biases, DeviceMatrix& weight,
                      DeviceMatrix& bias);
  // Row-parallel: columns of one matrix. The bias is in rank 0's product alone: it counts once.
  absl::Status Row(const std::string& name, Range columns, bool has_bias,
                   const std::string& bias_name, DeviceMatrix& weight, DeviceMatrix& bias);

  const ModelConfig& config_;
  const RankPartition& part_;
  const int rank_;
  const DType dtype_;
  const DType kv_dtype_;
  DeviceWeightLoader& loader_;
};

}  // namespace lockstep

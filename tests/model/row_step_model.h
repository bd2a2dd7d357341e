// A small model for tests of the decode step in one kernel: on the GPU whole or one rank's part of
// it, and on the host in double precision, rounded where the kernel rounds.
#pragma once

#include <cstdint>
#include <vector>

#include "model/cuda_row_step.h"
#include "tests/model/cuda_test_util.h"

namespace lockstep {

struct RowModelSizes {
  int64_t hidden, heads, kv_heads, head_dim, intermediate, vocab;
  DType dtype = DType::kBF16;
  int64_t rotary_dim = 0;  // 0: all of the head
  bool has_bias = false;
  bool has_row_parallel_bias = true;  // of o and down, where there are biases
  bool has_head_norm = false;
  int64_t window = 0;  // of every second layer
  float softcap = 0;
  int64_t block_size = 16;
};

inline constexpr int64_t kRowModelLayers = 3, kRowModelMaxLength = 4096;

class RowModel {
 public:
  RowModel(const RowModelSizes& sizes, CudaStream stream);
  // What rank `rank` of `size` holds, its cache included: whole KV heads with their query heads,
  // multiples of 8 of the intermediate size, words of the vocabulary, each shared out as evenly as
  // can be. Only rank 0 has the biases of o and down.
  RowModel Part(int rank, int size, CudaStream stream) const;

  int64_t rotary_dim() const { return s.rotary_dim == 0 ? s.head_dim : s.rotary_dim; }
  int64_t Window(int64_t layer) const { return layer % 2 == 1 ? s.window : 0; }
  int64_t CacheRow(int64_t kv_head, int64_t key) const {
    return (table[key / s.block_size] * s.kv_heads + kv_head) * s.block_size + key % s.block_size;
  }

  RowStepModel Description() const;
  std::vector<KvCacheView> Caches() const;

  // Logits of a step behind length - 1 tokens. Sets keys and values on the host.
  std::vector<double> Reference(int64_t length);
  // Of a Part: the newest keys and values on the host as Reference has set them in `whole`.
  void TakeNewest(const RowModel& whole, int64_t length);
  // What the step wrote, and nothing else, is in the cache on the device, if the host's is what it
  // should be; each element may round the other way. The host's becomes the device's.
  void ExpectCache(int64_t length, CudaStream stream);

  const RowModelSizes s;
  std::vector<CudaMatrix> input_norm, post_norm, q_norm, k_norm, qkv, o, gate_up, down;
  std::vector<CudaMatrix> qkv_bias, o_bias, gate_up_bias, down_bias, keys, values;
  std::vector<CudaMatrix> final_norm, head, hidden;
  std::vector<int32_t> table;

 private:
  double Rounded(double x) const;
  std::vector<double> Norm(const std::vector<double>& x, const CudaMatrix& weight) const;
  std::vector<double> Product(const CudaMatrix& weight, const CudaMatrix* bias,
                              const std::vector<double>& x) const;
  void Turn(double* head_values, const CudaMatrix& norm, int64_t position) const;
  std::vector<double> Attend(int64_t l, std::vector<double> qkv_row, int64_t length);

  Range kv_heads_{0, s.kv_heads};  // of the whole model
};

// Of a step of any length: what a launch reads, on the device.
class RowModelInputs {
 public:
  RowModelInputs(const RowModel& model, CudaStream stream);
  // length 0: a step of padding. Waits for the stream.
  void SetLength(int64_t length, CudaStream stream);
  RowStepInputs Get(const void* hidden, void* logits) const;

 private:
  const std::vector<int32_t> table_;
  const int64_t block_size_;
  CudaMatrix cos_, sin_;
  CudaIndices tables_, table_row_;
  CudaIndices position_, seq_len_;
  CudaSlots slot_;
};

std::vector<double> RowValues(const CudaMatrix& m, int64_t r);
// In the Euclidean norm.
double RelativeError(const std::vector<double>& got, const std::vector<double>& expected);

}  // namespace lockstep

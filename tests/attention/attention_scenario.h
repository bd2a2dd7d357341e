// A made-up step for attention tests: requests with random queries, keys and values, a paged cache
// whose unused slots are NaN, and the answer by dense attention in double.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "attention/attention_backend.h"
#include "cache/kv_pool.h"

namespace lockstep {

// One request: its last `query_len` of `seq_len` tokens are in the step.
struct RequestShape {
  int64_t query_len = 1;
  int64_t seq_len = 1;
};

struct ScenarioShape {
  std::vector<RequestShape> requests;
  std::vector<int64_t> group_sizes = {1};  // query heads of each KV head
  int64_t head_dim = 8;
  int64_t block_size = 16;
  int64_t sliding_window = 0;
  float logit_softcap = 0;
  DType kv_dtype = DType::kF32;
  float k_scale = 1;  // of kF8E4M3
  float v_scale = 1;
  int64_t padding_rows = 0;
  uint32_t seed = 1;
};

std::string Describe(const ScenarioShape& shape);

// The data of one request, by position: as if computed once, then fed to any batch or chunk.
struct RequestData {
  std::vector<float> queries;  // [seq_len, Hq * D]
  std::vector<float> keys;     // [seq_len, Hkv * D]
  std::vector<float> values;   // [seq_len, Hkv * D]
};

// A cache and block tables for the requests; blocks are a random permutation.
class Scenario {
 public:
  explicit Scenario(const ScenarioShape& shape);

  const ScenarioShape& shape() const { return shape_; }
  const AttentionGeometry& geometry() const { return geometry_; }
  std::vector<RequestData>& data() { return data_; }
  KvCacheView cache() const { return pool_.Layer(0); }
  int64_t query_width() const { return geometry_.num_query_heads * geometry_.head_dim; }

  // Runs all requests in one step: earlier tokens are written first (by the backend's WriteKv, as
  // an earlier step would), then the step. Every slot and output not written is NaN before.
  // Returns [T, Hq * D], padding included.
  std::vector<float> RunStep(const AttentionBackend& backend);

  // Runs a step of request `index` alone that ends at `seq_len`. The keys of earlier positions must
  // have been written. Returns [query_len, Hq * D].
  std::vector<float> RunChunk(const AttentionBackend& backend, int64_t index, int64_t query_len,
                              int64_t seq_len);

  // The answer of RunStep by dense attention over the keys and values as the cache holds them.
  std::vector<double> Expected() const;

  void PoisonAll();

 private:
  void Write(const AttentionBackend& backend, int64_t index, int64_t first, int64_t count);
  std::vector<float> Run(const AttentionBackend& backend, const std::vector<int64_t>& indexes,
                         const std::vector<RequestShape>& requests, int64_t padding_rows);

  ScenarioShape shape_;
  AttentionGeometry geometry_;
  std::vector<RequestData> data_;
  std::vector<std::vector<int32_t>> tables_;
  KvPool pool_;
};

// True when both have the same bits, NaN included; says where they differ first.
bool SameBits(const std::vector<float>& a, const std::vector<float>& b);
// Largest |a - b|; NaN in a makes it infinite.
double LargestDifference(const std::vector<float>& a, const std::vector<double>& b);

}  // namespace lockstep

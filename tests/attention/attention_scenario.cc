#include "tests/attention/attention_scenario.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "attention/kv_convert.h"
#include "cache/block_table.h"

namespace lockstep {
namespace {

std::vector<float> RandomFloats(int64_t count, std::mt19937& rng) {
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(rng);
  return values;
}

MatrixView View(const float* data, int64_t rows, int64_t cols) {
  return {.data = const_cast<float*>(data),
          .dtype = DType::kF32,
          .rows = rows,
          .cols = cols,
          .stride = cols};
}

// `values` as they are after a stay in a cache of `dtype`.
std::vector<float> Rounded(const std::vector<float>& values, float scale, DType dtype) {
  std::vector<float> rounded(values.size());
  std::vector<uint32_t> stored(values.size());
  const int64_t count = static_cast<int64_t>(values.size());
  ToCache(values.data(), scale, dtype, stored.data(), count);
  FromCache(stored.data(), scale, dtype, rounded.data(), count);
  return rounded;
}

}  // namespace

std::string Describe(const ScenarioShape& shape) {
  std::string text = absl::StrFormat(
      "D=%d P=%d window=%d softcap=%g kv=%s padding=%d seed=%d groups=", shape.head_dim,
      shape.block_size, shape.sliding_window, shape.logit_softcap, Name(shape.kv_dtype),
      shape.padding_rows, shape.seed);
  for (int64_t size : shape.group_sizes) absl::StrAppend(&text, size, " ");
  text += "requests=";
  for (const RequestShape& request : shape.requests) {
    absl::StrAppend(&text, request.query_len, "/", request.seq_len, " ");
  }
  return text;
}

Scenario::Scenario(const ScenarioShape& shape) : shape_(shape) {
  std::mt19937 rng(shape.seed);
  geometry_.num_kv_heads = static_cast<int64_t>(shape.group_sizes.size());
  geometry_.head_dim = shape.head_dim;
  geometry_.scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
  geometry_.sliding_window = shape.sliding_window;
  geometry_.logit_softcap = shape.logit_softcap;
  for (int64_t size : shape.group_sizes) {
    geometry_.kv_groups.push_back({geometry_.num_query_heads, geometry_.num_query_heads + size});
    geometry_.num_query_heads += size;
  }
  int64_t num_blocks = 0;
  for (const RequestShape& request : shape.requests) {
    const int64_t kv_width = geometry_.num_kv_heads * shape.head_dim;
    data_.push_back({.queries = RandomFloats(request.seq_len * query_width(), rng),
                     .keys = RandomFloats(request.seq_len * kv_width, rng),
                     .values = RandomFloats(request.seq_len * kv_width, rng)});
    num_blocks += BlocksForTokens(request.seq_len, shape.block_size);
  }
  // Some blocks belong to nobody.
  std::vector<int32_t> blocks(num_blocks + 5);
  std::iota(blocks.begin(), blocks.end(), 0);
  std::shuffle(blocks.begin(), blocks.end(), rng);
  for (const RequestShape& request : shape.requests) {
    const int64_t count = BlocksForTokens(request.seq_len, shape.block_size);
    tables_.emplace_back(blocks.end() - count, blocks.end());
    blocks.resize(blocks.size() - count);
  }
  auto pool = KvPool::Create({.num_layers = 1,
                              .num_kv_heads = geometry_.num_kv_heads,
                              .head_dim = shape.head_dim,
                              .block_size = shape.block_size,
                              .dtype = shape.kv_dtype},
                             num_blocks + 5);
  LOCKSTEP_CHECK(pool.ok());
  pool_ = *std::move(pool);
  if (shape.kv_dtype == DType::kF8E4M3) pool_.SetScales(0, shape.k_scale, shape.v_scale);
  PoisonAll();
}

void Scenario::PoisonAll() {
  for (int64_t block = 0; block < pool_.num_blocks(); ++block)
    LOCKSTEP_CHECK(pool_.Poison(block).ok());
}

void Scenario::Write(const AttentionBackend& backend, int64_t index, int64_t first, int64_t count) {
  const int64_t width = geometry_.num_kv_heads * geometry_.head_dim;
  std::vector<int64_t> slots(count);
  FillSlotMapping(tables_[index], shape_.block_size, first, count, slots.data());
  backend.WriteKv(View(data_[index].keys.data() + first * width, count, width),
                  View(data_[index].values.data() + first * width, count, width), slots, cache());
}

std::vector<float> Scenario::RunStep(const AttentionBackend& backend) {
  PoisonAll();
  std::vector<int64_t> indexes(shape_.requests.size());
  std::iota(indexes.begin(), indexes.end(), 0);
  for (int64_t i : indexes) {
    Write(backend, i, 0, shape_.requests[i].seq_len - shape_.requests[i].query_len);
  }
  return Run(backend, indexes, shape_.requests, shape_.padding_rows);
}

std::vector<float> Scenario::RunChunk(const AttentionBackend& backend, int64_t index,
                                      int64_t query_len, int64_t seq_len) {
  return Run(backend, {index}, {{.query_len = query_len, .seq_len = seq_len}}, 0);
}

std::vector<float> Scenario::Run(const AttentionBackend& backend,
                                 const std::vector<int64_t>& indexes,
                                 const std::vector<RequestShape>& requests, int64_t padding_rows) {
  std::vector<int32_t> query_start_loc = {0};
  std::vector<int32_t> seq_lens;
  std::vector<int64_t> slots;
  std::vector<float> queries;
  int64_t max_blocks = 1;
  for (const auto& table : tables_) {
    max_blocks = std::max<int64_t>(max_blocks, static_cast<int64_t>(table.size()) + 1);
  }
  // Tables lie in another order than the requests, with rows that are nobody's between them.
  const size_t num_tables = 2 * indexes.size();
  std::vector<int32_t> tables(num_tables * max_blocks, 1 << 30);  // the rest is never to be read
  std::vector<int32_t> table_rows;
  for (size_t i = 0; i < indexes.size(); ++i) {
    const auto [query_len, seq_len] = requests[i];
    const RequestData& data = data_[indexes[i]];
    const int64_t first = seq_len - query_len;
    Write(backend, indexes[i], first, query_len);
    query_start_loc.push_back(query_start_loc.back() + static_cast<int32_t>(query_len));
    seq_lens.push_back(static_cast<int32_t>(seq_len));
    slots.resize(slots.size() + query_len);
    FillSlotMapping(tables_[indexes[i]], shape_.block_size, first, query_len,
                    slots.data() + slots.size() - query_len);
    queries.insert(queries.end(), data.queries.begin() + first * query_width(),
                   data.queries.begin() + seq_len * query_width());
    table_rows.push_back(static_cast<int32_t>(num_tables - 1 - 2 * i));
    std::copy(tables_[indexes[i]].begin(), tables_[indexes[i]].end(),
              tables.begin() + table_rows.back() * max_blocks);
  }
  slots.resize(slots.size() + padding_rows, kNoSlot);
  const int64_t num_tokens = static_cast<int64_t>(slots.size());
  queries.resize(num_tokens * query_width(), NAN);
  std::vector<float> out(num_tokens * query_width(), NAN);
  const AttentionBatch batch = {.query_start_loc = query_start_loc,
                                .seq_lens = seq_lens,
                                .block_tables = tables,
                                .max_blocks = max_blocks,
                                .slot_mapping = slots,
                                .table_rows = table_rows};
  const auto metadata = backend.BuildMetadata(batch, shape_.block_size);
  LOCKSTEP_CHECK(metadata.ok());
  backend.Forward(geometry_, **metadata, View(queries.data(), num_tokens, query_width()), cache(),
                  View(out.data(), num_tokens, query_width()));
  return out;
}

std::vector<double> Scenario::Expected() const {
  const int64_t dim = geometry_.head_dim;
  const int64_t kv_width = geometry_.num_kv_heads * dim;
  std::vector<double> expected;
  for (size_t i = 0; i < data_.size(); ++i) {
    const std::vector<float> keys = Rounded(data_[i].keys, shape_.k_scale, shape_.kv_dtype);
    const std::vector<float> values = Rounded(data_[i].values, shape_.v_scale, shape_.kv_dtype);
    const auto [query_len, seq_len] = shape_.requests[i];
    for (int64_t position = seq_len - query_len; position < seq_len; ++position) {
      for (int64_t kv_head = 0; kv_head < geometry_.num_kv_heads; ++kv_head) {
        const Range group = geometry_.kv_groups[kv_head];
        for (int64_t head = group.begin; head < group.end; ++head) {
          const float* query = data_[i].queries.data() + position * query_width() + head * dim;
          std::vector<double> sums(dim, 0.0);
          double total = 0;
          for (int64_t j = 0; j <= position; ++j) {
            if (shape_.sliding_window > 0 && j + shape_.sliding_window <= position) continue;
            double logit = 0;
            for (int64_t d = 0; d < dim; ++d) {
              logit += double{query[d]} * keys[j * kv_width + kv_head * dim + d];
            }
            logit *= geometry_.scale;
            const double cap = shape_.logit_softcap;
            if (cap != 0) logit = cap * std::tanh(logit / cap);
            const double weight = std::exp(logit);  // logits of these data are small
            total += weight;
            for (int64_t d = 0; d < dim; ++d) {
              sums[d] += weight * values[j * kv_width + kv_head * dim + d];
            }
          }
          for (double sum : sums) expected.push_back(sum / total);
        }
      }
    }
  }
  expected.resize(expected.size() + shape_.padding_rows * query_width(), 0.0);
  return expected;
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

double LargestDifference(const std::vector<float>& a, const std::vector<double>& b) {
  if (a.size() != b.size()) return INFINITY;
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double difference = std::abs(a[i] - b[i]);
    if (!(difference <= largest)) largest = std::isnan(difference) ? INFINITY : difference;
  }
  return largest;
}

}  // namespace lockstep

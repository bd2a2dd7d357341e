#include "tests/model/row_step_model.h"

#include <algorithm>

namespace lockstep {
namespace {

constexpr double kEps = 1e-5;

double Angle(int64_t position, int64_t i) {
  return static_cast<double>(position) * std::pow(10000.0, -static_cast<double>(i) / 16.0);
}

using Ranges = std::vector<Range>;

int64_t Total(const Ranges& ranges) {
  int64_t size = 0;
  for (const Range& range : ranges) size += range.size();
  return size;
}

// `to` becomes these rows and columns of `from`, on the device as well.
void Cut(const CudaMatrix& from, const Ranges& rows, const Ranges& cols, CudaMatrix& to,
         CudaStream stream) {
  LOCKSTEP_CHECK(Total(rows) == to.rows() && Total(cols) == to.cols());
  int64_t to_row = 0;
  for (const Range& some_rows : rows) {
    for (int64_t r = some_rows.begin; r < some_rows.end; ++r, ++to_row) {
      int64_t to_col = 0;
      for (const Range& some_cols : cols) {
        for (int64_t c = some_cols.begin; c < some_cols.end; ++c) {
          to.Set(to_row, to_col++, from.At(r, c));
        }
      }
    }
  }
  to.Upload(stream);
}

Range Share(int64_t count, int rank, int size) {
  return {count * rank / size, count * (rank + 1) / size};
}
Range Times(const Range& range, int64_t factor, int64_t offset = 0) {
  return {offset + range.begin * factor, offset + range.end * factor};
}

// [max length, rotary / 2] of fn(angle).
CudaMatrix AngleTable(int64_t half, double (*fn)(double), CudaStream stream) {
  CudaMatrix table(kRowModelMaxLength, half, DType::kF32);
  for (int64_t p = 0; p < kRowModelMaxLength; ++p) {
    for (int64_t i = 0; i < half; ++i) table.Set(p, i, fn(Angle(p, i)));
  }
  table.Upload(stream);
  return table;
}

// The table in row 1 of two.
std::vector<int32_t> TwoTables(const std::vector<int32_t>& table) {
  std::vector<int32_t> tables(table.size(), -1);
  tables.insert(tables.end(), table.begin(), table.end());
  return tables;
}

}  // namespace

RowModel::RowModel(const RowModelSizes& sizes, CudaStream stream) : s(sizes) {
  const int64_t qkv_rows = (s.heads + 2 * s.kv_heads) * s.head_dim;
  const int64_t q_cols = s.heads * s.head_dim;
  const int64_t blocks = (kRowModelMaxLength + s.block_size - 1) / s.block_size;
  uint32_t seed = 100;
  const auto add = [&](std::vector<CudaMatrix>& to, int64_t rows, int64_t cols, DType dtype,
                       float scale, float mean = 0) {
    to.emplace_back(rows, cols, dtype);
    to.back().Fill(++seed, stream, scale, mean);
  };
  const auto spread = [](int64_t k) { return 1.0f / std::sqrt(static_cast<float>(k)); };
  for (int64_t l = 0; l < kRowModelLayers; ++l) {
    add(input_norm, 1, s.hidden, DType::kF32, 0.2f, 1);
    add(post_norm, 1, s.hidden, DType::kF32, 0.2f, 1);
    add(q_norm, 1, s.head_dim, DType::kF32, 0.2f, 1);
    add(k_norm, 1, s.head_dim, DType::kF32, 0.2f, 1);
    add(qkv, qkv_rows, s.hidden, s.dtype, 1.5f * spread(s.hidden));
    add(o, s.hidden, q_cols, s.dtype, spread(q_cols));
    add(gate_up, 2 * s.intermediate, s.hidden, s.dtype, spread(s.hidden));
    add(down, s.hidden, s.intermediate, s.dtype, spread(s.intermediate));
    add(qkv_bias, 1, qkv_rows, s.dtype, 0.3f);
    add(o_bias, 1, s.hidden, s.dtype, 0.3f);
    add(gate_up_bias, 1, 2 * s.intermediate, s.dtype, 0.3f);
    add(down_bias, 1, s.hidden, s.dtype, 0.3f);
    add(keys, blocks * s.kv_heads * s.block_size, s.head_dim, s.dtype, 1);
    add(values, blocks * s.kv_heads * s.block_size, s.head_dim, s.dtype, 1);
  }
  add(final_norm, 1, s.hidden, DType::kF32, 0.2f, 1);
  add(head, s.vocab, s.hidden, s.dtype, spread(s.hidden));
  add(hidden, 1, s.hidden, s.dtype, 1);
  for (int64_t b = 0; b < blocks; ++b) table.push_back(static_cast<int32_t>((b * 7 + 3) % blocks));
  LOCKSTEP_CHECK(blocks % 7 != 0);
}

RowModel RowModel::Part(int rank, int size, CudaStream stream) const {
  LOCKSTEP_CHECK(s.heads % s.kv_heads == 0 && s.intermediate % 8 == 0);
  const int64_t group = s.heads / s.kv_heads, dim = s.head_dim;
  const Range kv = Share(s.kv_heads, rank, size), vocab = Share(s.vocab, rank, size);
  const Range inner = Times(Share(s.intermediate / 8, rank, size), 8);
  RowModelSizes sizes = s;
  sizes.heads = kv.size() * group;
  sizes.kv_heads = kv.size();
  sizes.intermediate = inner.size();
  sizes.vocab = vocab.size();
  sizes.has_row_parallel_bias = s.has_row_parallel_bias && rank == 0;
  RowModel part(sizes, stream);
  part.kv_heads_ = kv;
  LOCKSTEP_CHECK(part.table == table);

  const Range q_cols = Times(kv, group * dim);
  const Ranges one = {{0, 1}}, width = {{0, s.hidden}}, head_width = {{0, dim}}, q = {q_cols};
  const Ranges qkv_rows = {q_cols, Times(kv, dim, s.heads * dim),
                           Times(kv, dim, (s.heads + s.kv_heads) * dim)};
  const Ranges gate_up_rows = {inner, Times(inner, 1, s.intermediate)};
  Ranges cache_rows;
  for (int64_t b = 0; b < std::ssize(table); ++b) {
    cache_rows.push_back(Times(kv, s.block_size, b * s.kv_heads * s.block_size));
  }
  for (int64_t l = 0; l < kRowModelLayers; ++l) {
    Cut(input_norm[l], one, width, part.input_norm[l], stream);
    Cut(post_norm[l], one, width, part.post_norm[l], stream);
    Cut(q_norm[l], one, head_width, part.q_norm[l], stream);
    Cut(k_norm[l], one, head_width, part.k_norm[l], stream);
    Cut(qkv[l], qkv_rows, width, part.qkv[l], stream);
    Cut(qkv_bias[l], one, qkv_rows, part.qkv_bias[l], stream);
    Cut(o[l], width, q, part.o[l], stream);
    Cut(o_bias[l], one, width, part.o_bias[l], stream);
    Cut(gate_up[l], gate_up_rows, width, part.gate_up[l], stream);
    Cut(gate_up_bias[l], one, gate_up_rows, part.gate_up_bias[l], stream);
    Cut(down[l], width, {inner}, part.down[l], stream);
    Cut(down_bias[l], one, width, part.down_bias[l], stream);
    Cut(keys[l], cache_rows, head_width, part.keys[l], stream);
    Cut(values[l], cache_rows, head_width, part.values[l], stream);
  }
  Cut(final_norm[0], one, width, part.final_norm[0], stream);
  Cut(head[0], {vocab}, width, part.head[0], stream);
  Cut(hidden[0], one, width, part.hidden[0], stream);
  return part;
}

RowStepModel RowModel::Description() const {
  RowStepModel model{.dtype = s.dtype,
                     .num_layers = kRowModelLayers,
                     .hidden_size = s.hidden,
                     .head_dim = s.head_dim,
                     .kv_groups = {},
                     .intermediate = s.intermediate,
                     .vocab = s.vocab,
                     .norm_eps = kEps,
                     .attention_scale = 1.0f / std::sqrt(static_cast<float>(s.head_dim)),
                     .logit_softcap = s.softcap,
                     .block_size = s.block_size,
                     .max_blocks = std::ssize(table),
                     .final_norm = final_norm[0].f32(),
                     .head = head[0].view().data,
                     .layers = {}};
  for (int64_t h = 0; h < s.kv_heads; ++h) {
    model.kv_groups.push_back(
        {s.heads * h / s.kv_heads, s.heads * (h + 1) / s.kv_heads});  // ragged
  }
  const auto optional = [](bool there, const CudaMatrix& m) {
    return there ? m.view().data : nullptr;
  };
  for (int64_t l = 0; l < kRowModelLayers; ++l) {
    model.layers.push_back(
        {.input_norm = input_norm[l].f32(),
         .qkv = qkv[l].view().data,
         .qkv_bias = optional(s.has_bias, qkv_bias[l]),
         .q_norm = s.has_head_norm ? q_norm[l].f32() : nullptr,
         .k_norm = s.has_head_norm ? k_norm[l].f32() : nullptr,
         .o = o[l].view().data,
         .o_bias = optional(s.has_bias && s.has_row_parallel_bias, o_bias[l]),
         .post_attention_norm = post_norm[l].f32(),
         .gate_up = gate_up[l].view().data,
         .gate_up_bias = optional(s.has_bias, gate_up_bias[l]),
         .down = down[l].view().data,
         .down_bias = optional(s.has_bias && s.has_row_parallel_bias, down_bias[l]),
         .sliding_window = static_cast<int32_t>(Window(l))});
  }
  return model;
}

std::vector<KvCacheView> RowModel::Caches() const {
  std::vector<KvCacheView> caches;
  for (int64_t l = 0; l < kRowModelLayers; ++l) {
    caches.push_back({.keys = keys[l].view().data,
                      .values = values[l].view().data,
                      .dtype = s.dtype,
                      .num_blocks = std::ssize(table),
                      .num_kv_heads = s.kv_heads,
                      .block_size = s.block_size,
                      .head_dim = s.head_dim});
  }
  return caches;
}

double RowModel::Rounded(double x) const {
  char bits[4];
  StoreElement(s.dtype, bits, 0, static_cast<float>(x));
  return LoadElement(s.dtype, bits, 0);
}

std::vector<double> RowModel::Norm(const std::vector<double>& x, const CudaMatrix& weight) const {
  double squares = 0;
  for (const double v : x) squares += v * v;
  const double scale = 1 / std::sqrt(squares / static_cast<double>(x.size()) + kEps);
  std::vector<double> out(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    out[i] = Rounded(x[i] * scale * weight.At(0, static_cast<int64_t>(i)));
  }
  return out;
}

std::vector<double> RowModel::Product(const CudaMatrix& weight, const CudaMatrix* bias,
                                      const std::vector<double>& x) const {
  std::vector<double> out(weight.rows());
  for (int64_t r = 0; r < weight.rows(); ++r) {
    double sum = s.has_bias && bias != nullptr ? bias->At(0, r) : 0;
    for (int64_t c = 0; c < weight.cols(); ++c) sum += weight.At(r, c) * x[c];
    out[r] = sum;
  }
  return out;
}

void RowModel::Turn(double* x, const CudaMatrix& norm, int64_t position) const {
  double scale = 0;
  for (int64_t d = 0; d < s.head_dim; ++d) scale += x[d] * x[d];
  scale = 1 / std::sqrt(scale / static_cast<double>(s.head_dim) + kEps);
  for (int64_t d = 0; d < s.head_dim; ++d) x[d] *= s.has_head_norm ? scale * norm.At(0, d) : 1;
  const int64_t half = rotary_dim() / 2;
  for (int64_t i = 0; i < half; ++i) {
    const double a = x[i], b = x[i + half], angle = Angle(position, i);
    x[i] = a * std::cos(angle) - b * std::sin(angle);
    x[i + half] = b * std::cos(angle) + a * std::sin(angle);
  }
  for (int64_t d = 0; d < s.head_dim; ++d) x[d] = Rounded(x[d]);
}

std::vector<double> RowModel::Attend(int64_t l, std::vector<double> row, int64_t length) {
  const int64_t newest = length - 1, dim = s.head_dim;
  for (double& x : row) x = Rounded(x);
  for (int64_t h = 0; h < s.heads + s.kv_heads; ++h) {
    Turn(row.data() + h * dim, h < s.heads ? q_norm[l] : k_norm[l], newest);
  }
  for (int64_t h = 0; h < s.kv_heads; ++h) {
    for (int64_t d = 0; d < dim; ++d) {
      keys[l].Set(CacheRow(h, newest), d, row[(s.heads + h) * dim + d]);
      values[l].Set(CacheRow(h, newest), d, row[(s.heads + s.kv_heads + h) * dim + d]);
    }
  }
  const std::vector<Range> groups = Description().kv_groups;
  std::vector<double> out(s.heads * dim);
  const int64_t begin = Window(l) > 0 ? std::max<int64_t>(0, length - Window(l)) : 0;
  for (int64_t h = 0; h < s.kv_heads; ++h) {
    for (int64_t g = groups[h].begin; g < groups[h].end; ++g) {
      std::vector<double> logits;
      double largest = -INFINITY, total = 0;
      for (int64_t key = begin; key < length; ++key) {
        double sum = 0;
        for (int64_t d = 0; d < dim; ++d) sum += row[g * dim + d] * keys[l].At(CacheRow(h, key), d);
        sum /= std::sqrt(static_cast<double>(dim));
        if (s.softcap > 0) sum = s.softcap * std::tanh(sum / s.softcap);
        logits.push_back(sum);
        largest = std::max(largest, sum);
      }
      for (int64_t key = begin; key < length; ++key) {
        const double weight = std::exp(logits[key - begin] - largest);
        total += weight;
        for (int64_t d = 0; d < dim; ++d) {
          out[g * dim + d] += weight * values[l].At(CacheRow(h, key), d);
        }
      }
      for (int64_t d = 0; d < dim; ++d) out[g * dim + d] = Rounded(out[g * dim + d] / total);
    }
  }
  return out;
}

std::vector<double> RowModel::Reference(int64_t length) {
  std::vector<double> stream = RowValues(hidden[0], 0);
  const auto add = [&](const std::vector<double>& delta) {
    for (size_t i = 0; i < stream.size(); ++i) stream[i] = Rounded(stream[i] + Rounded(delta[i]));
  };
  for (int64_t l = 0; l < kRowModelLayers; ++l) {
    const std::vector<double> row = Product(qkv[l], &qkv_bias[l], Norm(stream, input_norm[l]));
    add(Product(o[l], &o_bias[l], Attend(l, row, length)));
    const std::vector<double> both =
        Product(gate_up[l], &gate_up_bias[l], Norm(stream, post_norm[l]));
    std::vector<double> inner(s.intermediate);
    for (int64_t i = 0; i < s.intermediate; ++i) {
      inner[i] = Rounded(both[i] / (1 + std::exp(-both[i])) * both[s.intermediate + i]);
    }
    add(Product(down[l], &down_bias[l], inner));
  }
  return Product(head[0], nullptr, Norm(stream, final_norm[0]));
}

void RowModel::TakeNewest(const RowModel& whole, int64_t length) {
  for (int64_t l = 0; l < kRowModelLayers; ++l) {
    for (int64_t h = 0; h < s.kv_heads; ++h) {
      const int64_t to = CacheRow(h, length - 1);
      const int64_t from = whole.CacheRow(kv_heads_.begin + h, length - 1);
      for (int64_t d = 0; d < s.head_dim; ++d) {
        keys[l].Set(to, d, whole.keys[l].At(from, d));
        values[l].Set(to, d, whole.values[l].At(from, d));
      }
    }
  }
}

void RowModel::ExpectCache(int64_t length, CudaStream stream) {
  const int64_t newest = length - 1;
  for (int64_t l = 0; l < kRowModelLayers; ++l) {
    for (CudaMatrix* ours : {&keys[l], &values[l]}) {
      std::vector<std::string> wanted;
      std::vector<std::vector<double>> written;
      for (int64_t r = 0; r < ours->rows(); ++r) wanted.push_back(ours->RowBits(r));
      for (int64_t h = 0; h < s.kv_heads; ++h)
        written.push_back(RowValues(*ours, CacheRow(h, newest)));
      ours->Download(stream);
      for (int64_t h = 0; h < s.kv_heads; ++h) {
        const int64_t row = CacheRow(h, newest);
        for (int64_t d = 0; d < s.head_dim; ++d) {
          ASSERT_NEAR(ours->At(row, d), written[h][d],
                      0.05 + 12 * RoundingOf(s.dtype) * std::abs(written[h][d]))
              << "layer " << l << ", KV head " << h << ", dim " << d;
        }
        wanted[row] = ours->RowBits(row);
      }
      for (int64_t r = 0; r < ours->rows(); ++r) {
        ASSERT_TRUE(ours->RowBits(r) == wanted[r]) << "layer " << l << ", row " << r;
      }
    }
  }
}

RowModelInputs::RowModelInputs(const RowModel& model, CudaStream stream)
    : table_(model.table),
      block_size_(model.s.block_size),
      cos_(AngleTable(
          model.rotary_dim() / 2, [](double x) { return std::cos(x); }, stream)),
      sin_(AngleTable(
          model.rotary_dim() / 2, [](double x) { return std::sin(x); }, stream)),
      tables_(TwoTables(model.table), stream),
      table_row_({1}, stream),
      position_({0}, stream),
      seq_len_({0}, stream),
      slot_({kNoSlot}, stream) {}

void RowModelInputs::SetLength(int64_t length, CudaStream stream) {
  const absl::Status idle = Synchronize(stream);  // a launch may still read what is replaced
  EXPECT_TRUE(idle.ok()) << idle;
  const int64_t newest = length - 1;
  position_ = CudaIndices({static_cast<int32_t>(std::max<int64_t>(0, newest))}, stream);
  seq_len_ = CudaIndices({static_cast<int32_t>(length)}, stream);
  slot_ = CudaSlots(
      {length == 0 ? kNoSlot : table_[newest / block_size_] * block_size_ + newest % block_size_},
      stream);
}

RowStepInputs RowModelInputs::Get(const void* hidden, void* logits) const {
  return {.hidden = hidden,
          .rope = {cos_.f32(), sin_.f32(), position_.get(), 2 * cos_.cols()},
          .seq_len = seq_len_.get(),
          .block_tables = tables_.get(),
          .table_row = table_row_.get(),
          .slot = slot_.get(),
          .logits = static_cast<float*>(logits)};
}

std::vector<double> RowValues(const CudaMatrix& m, int64_t r) {
  std::vector<double> row(m.cols());
  for (int64_t c = 0; c < m.cols(); ++c) row[c] = m.At(r, c);
  return row;
}

double RelativeError(const std::vector<double>& got, const std::vector<double>& expected) {
  LOCKSTEP_CHECK(got.size() == expected.size());
  double error = 0, norm = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    error += std::pow(got[i] - expected[i], 2);
    norm += std::pow(expected[i], 2);
  }
  return std::sqrt(error / norm);
}

}  // namespace lockstep

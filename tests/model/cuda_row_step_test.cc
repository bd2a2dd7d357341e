// A decode step in one kernel against double precision, rounded where the kernel rounds.
#include "model/cuda_row_step.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <optional>

#include "tests/model/cuda_test_util.h"

namespace lockstep {
namespace {

struct Sizes {
  int64_t hidden, heads, kv_heads, head_dim, intermediate, vocab;
  DType dtype = DType::kBF16;
  int64_t rotary_dim = 0;  // 0: all of the head
  bool has_bias = false;
  bool has_head_norm = false;
  int64_t window = 0;  // of every second layer
  float softcap = 0;
  int64_t block_size = 16;
};

constexpr int64_t kLayers = 3, kMaxLength = 4096;
constexpr double kEps = 1e-5;

// A matrix's elements as doubles.
std::vector<double> Row(const CudaMatrix& m, int64_t r) {
  std::vector<double> row(m.cols());
  for (int64_t c = 0; c < m.cols(); ++c) row[c] = m.At(r, c);
  return row;
}

class Model {
 public:
  Model(const Sizes& sizes, CudaStream stream) : s(sizes) {
    const int64_t qkv_rows = (s.heads + 2 * s.kv_heads) * s.head_dim;
    const int64_t q_cols = s.heads * s.head_dim;
    const int64_t blocks = (kMaxLength + s.block_size - 1) / s.block_size;
    uint32_t seed = 100;
    const auto add = [&](std::vector<CudaMatrix>& to, int64_t rows, int64_t cols, DType dtype,
                         float scale, float mean = 0) {
      to.emplace_back(rows, cols, dtype);
      to.back().Fill(++seed, stream, scale, mean);
    };
    const auto spread = [](int64_t k) { return 1.0f / std::sqrt(static_cast<float>(k)); };
    for (int64_t l = 0; l < kLayers; ++l) {
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
    for (int64_t b = 0; b < blocks; ++b)
      table.push_back(static_cast<int32_t>((b * 7 + 3) % blocks));
    LOCKSTEP_CHECK(blocks % 7 != 0);
  }

  int64_t rotary_dim() const { return s.rotary_dim == 0 ? s.head_dim : s.rotary_dim; }
  int64_t Window(int64_t layer) const { return layer % 2 == 1 ? s.window : 0; }
  int64_t CacheRow(int64_t kv_head, int64_t key) const {
    return (table[key / s.block_size] * s.kv_heads + kv_head) * s.block_size + key % s.block_size;
  }

  RowStepModel Description() const {
    RowStepModel model{.dtype = s.dtype,
                       .num_layers = kLayers,
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
    for (int64_t l = 0; l < kLayers; ++l) {
      model.layers.push_back({.input_norm = input_norm[l].f32(),
                              .qkv = qkv[l].view().data,
                              .qkv_bias = optional(s.has_bias, qkv_bias[l]),
                              .q_norm = s.has_head_norm ? q_norm[l].f32() : nullptr,
                              .k_norm = s.has_head_norm ? k_norm[l].f32() : nullptr,
                              .o = o[l].view().data,
                              .o_bias = optional(s.has_bias, o_bias[l]),
                              .post_attention_norm = post_norm[l].f32(),
                              .gate_up = gate_up[l].view().data,
                              .gate_up_bias = optional(s.has_bias, gate_up_bias[l]),
                              .down = down[l].view().data,
                              .down_bias = optional(s.has_bias, down_bias[l]),
                              .sliding_window = static_cast<int32_t>(Window(l))});
    }
    return model;
  }
  std::vector<KvCacheView> Caches() const {
    std::vector<KvCacheView> caches;
    for (int64_t l = 0; l < kLayers; ++l) {
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

  // Logits of a step behind length - 1 tokens. Sets keys and values on the host.
  std::vector<double> Reference(int64_t length);

  const Sizes s;
  std::vector<CudaMatrix> input_norm, post_norm, q_norm, k_norm, qkv, o, gate_up, down;
  std::vector<CudaMatrix> qkv_bias, o_bias, gate_up_bias, down_bias, keys, values;
  std::vector<CudaMatrix> final_norm, head, hidden;
  std::vector<int32_t> table;

 private:
  double Rounded(double x) const {
    char bits[4];
    StoreElement(s.dtype, bits, 0, static_cast<float>(x));
    return LoadElement(s.dtype, bits, 0);
  }
  std::vector<double> Norm(const std::vector<double>& x, const CudaMatrix& weight) const {
    double squares = 0;
    for (const double v : x) squares += v * v;
    const double scale = 1 / std::sqrt(squares / static_cast<double>(x.size()) + kEps);
    std::vector<double> out(x.size());
    for (size_t i = 0; i < x.size(); ++i) {
      out[i] = Rounded(x[i] * scale * weight.At(0, static_cast<int64_t>(i)));
    }
    return out;
  }
  std::vector<double> Product(const CudaMatrix& weight, const CudaMatrix* bias,
                              const std::vector<double>& x) const {
    std::vector<double> out(weight.rows());
    for (int64_t r = 0; r < weight.rows(); ++r) {
      double sum = s.has_bias && bias != nullptr ? bias->At(0, r) : 0;
      for (int64_t c = 0; c < weight.cols(); ++c) sum += weight.At(r, c) * x[c];
      out[r] = sum;
    }
    return out;
  }
  void Turn(double* head_values, const CudaMatrix& norm, int64_t position) const;
  std::vector<double> Attend(int64_t l, std::vector<double> qkv_row, int64_t length);
};

double Angle(int64_t position, int64_t i) {
  return static_cast<double>(position) * std::pow(10000.0, -static_cast<double>(i) / 16.0);
}

void Model::Turn(double* x, const CudaMatrix& norm, int64_t position) const {
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

std::vector<double> Model::Attend(int64_t l, std::vector<double> row, int64_t length) {
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

std::vector<double> Model::Reference(int64_t length) {
  std::vector<double> stream = Row(hidden[0], 0);
  const auto add = [&](const std::vector<double>& delta) {
    for (size_t i = 0; i < stream.size(); ++i) stream[i] = Rounded(stream[i] + Rounded(delta[i]));
  };
  for (int64_t l = 0; l < kLayers; ++l) {
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

class RowStepTest : public CudaTest {
 protected:
  // Launches at these lengths, one after the other.
  void Check(const Sizes& sizes, const std::vector<int64_t>& lengths);
};

double RelativeError(const CudaMatrix& m, const std::vector<double>& expected) {
  double error = 0, norm = 0;
  for (int64_t i = 0; i < m.cols(); ++i) {
    error += std::pow(m.At(0, i) - expected[i], 2);
    norm += std::pow(expected[i], 2);
  }
  return std::sqrt(error / norm);
}

void RowStepTest::Check(const Sizes& sizes, const std::vector<int64_t>& lengths) {
  SCOPED_TRACE(absl::StrFormat("E %d, heads %d / %d of %d, F %d, V %d, %s, window %d", sizes.hidden,
                               sizes.heads, sizes.kv_heads, sizes.head_dim, sizes.intermediate,
                               sizes.vocab, Name(sizes.dtype), sizes.window));
  Model model(sizes, stream());
  const RowStepModel description = model.Description();
  ASSERT_TRUE(RowStep::Check(description).ok()) << RowStep::Check(description);
  auto step = RowStep::Create(description, nullptr, num_multiprocessors_, stream());
  ASSERT_TRUE(step.ok()) << step.status();
  EXPECT_STATUS_OK(step->SetCaches(model.Caches(), stream()));
  const int64_t half = model.rotary_dim() / 2;
  CudaMatrix cos(kMaxLength, half, DType::kF32), sin(kMaxLength, half, DType::kF32);
  for (int64_t p = 0; p < kMaxLength; ++p) {
    for (int64_t i = 0; i < half; ++i) {
      cos.Set(p, i, std::cos(Angle(p, i)));
      sin.Set(p, i, std::sin(Angle(p, i)));
    }
  }
  cos.Upload(stream());
  sin.Upload(stream());
  // The table in row 1 of two.
  std::vector<int32_t> tables(model.table.size(), -1);
  tables.insert(tables.end(), model.table.begin(), model.table.end());
  const CudaIndices device_tables(tables, stream()), table_row({1}, stream());
  CudaMatrix logits(1, sizes.vocab, DType::kF32);
  for (const int64_t length : lengths) {
    SCOPED_TRACE(absl::StrFormat("length %d", length));
    const int64_t newest = length - 1;
    const CudaIndices position({static_cast<int32_t>(std::max<int64_t>(0, newest))}, stream());
    const CudaIndices seq_len({static_cast<int32_t>(length)}, stream());
    const CudaSlots slot({length == 0 ? -1
                                      : model.table[newest / sizes.block_size] * sizes.block_size +
                                            newest % sizes.block_size},
                         stream());
    const auto launch = [&] {
      logits.Poison(stream());
      EXPECT_STATUS_OK(step->Launch({.hidden = model.hidden[0].view().data,
                                     .rope = {cos.f32(), sin.f32(), position.get(), 2 * half},
                                     .seq_len = seq_len.get(),
                                     .block_tables = device_tables.get(),
                                     .table_row = table_row.get(),
                                     .slot = slot.get(),
                                     .logits = static_cast<float*>(logits.view().data)},
                                    stream()));
      logits.Download(stream());
      return logits.Bits();
    };
    const std::string bits = launch();
    EXPECT_TRUE(launch() == bits) << "the same step gave other bits";
    if (length == 0) continue;  // padding: it ends, and writes nothing (checked below)
    const std::vector<double> expected = model.Reference(length);
    const double error = RelativeError(logits, expected);
    EXPECT_LT(error, sizes.dtype == DType::kBF16 ? 2e-2 : 3e-3);
    // What the step wrote, and nothing else, is in the cache: each element may round the other way.
    for (int64_t l = 0; l < kLayers; ++l) {
      for (const bool is_key : {true, false}) {
        CudaMatrix& ours = is_key ? model.keys[l] : model.values[l];
        std::vector<std::string> wanted;
        std::vector<std::vector<double>> written;
        for (int64_t r = 0; r < ours.rows(); ++r) wanted.push_back(ours.RowBits(r));
        for (int64_t h = 0; h < sizes.kv_heads; ++h) {
          written.push_back(Row(ours, model.CacheRow(h, newest)));
        }
        ours.Download(stream());
        for (int64_t h = 0; h < sizes.kv_heads; ++h) {
          const int64_t row = model.CacheRow(h, newest);
          for (int64_t d = 0; d < sizes.head_dim; ++d) {
            ASSERT_NEAR(ours.At(row, d), written[h][d],
                        0.05 + 12 * RoundingOf(sizes.dtype) * std::abs(written[h][d]))
                << "layer " << l << ", KV head " << h << ", dim " << d;
          }
          wanted[row] = ours.RowBits(row);
        }
        for (int64_t r = 0; r < ours.rows(); ++r) {
          ASSERT_TRUE(ours.RowBits(r) == wanted[r]) << "layer " << l << ", row " << r;
        }
      }
    }
    if (HasFailure()) return;
  }
}

TEST_F(RowStepTest, MatchesDoublePrecision) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    Check({.hidden = 256,
           .heads = 4,
           .kv_heads = 2,
           .head_dim = 64,
           .intermediate = 512,
           .vocab = 1000,
           .dtype = dtype},
          {1, 2, 64, 65, 300, 2000});
    Check({.hidden = 1792,
           .heads = 14,
           .kv_heads = 2,
           .head_dim = 128,
           .intermediate = 1184,
           .vocab = 777,
           .dtype = dtype,
           .has_bias = true},
          {1, 513, 17});
    Check({.hidden = 576,
           .heads = 9,
           .kv_heads = 3,
           .head_dim = 64,
           .intermediate = 1536,
           .vocab = 2000,
           .dtype = dtype,
           .has_head_norm = true},
          {0, 5, 129, 0, 6});
  }
}

// Several chunks a warp, of every product.
TEST_F(RowStepTest, TakesLongRows) {
  Check({.hidden = 4352,
         .heads = 8,
         .kv_heads = 4,
         .head_dim = 64,
         .intermediate = 200,
         .vocab = 300},
        {70});
  Check({.hidden = 264,
         .heads = 40,
         .kv_heads = 8,
         .head_dim = 128,
         .intermediate = 4600,
         .vocab = 40},
        {70});
  Check({.hidden = 64,
         .heads = 2,
         .kv_heads = 1,
         .head_dim = 32,
         .intermediate = 18944,
         .vocab = 133},
        {9});
  Check({.hidden = 64, .heads = 2, .kv_heads = 2, .head_dim = 8, .intermediate = 9480, .vocab = 1},
        {9});
  Check({.hidden = 72,
         .heads = 3,
         .kv_heads = 1,
         .head_dim = 24,
         .intermediate = 19200,
         .vocab = 264},
        {3});
}

TEST_F(RowStepTest, TakesOddHeadsWindowsAndCaps) {
  // Ragged groups, head_dim 80 and 256, partial rotation, windows, soft-cap, other block sizes.
  Check({.hidden = 320,
         .heads = 7,
         .kv_heads = 3,
         .head_dim = 80,
         .intermediate = 640,
         .vocab = 500,
         .rotary_dim = 32},
        {1, 200, 1000});
  Check({.hidden = 512,
         .heads = 15,
         .kv_heads = 1,
         .head_dim = 256,
         .intermediate = 640,
         .vocab = 500,
         .window = 100,
         .softcap = 5},
        {1, 99, 100, 101, 1500});
  Check({.hidden = 512,
         .heads = 5,
         .kv_heads = 5,
         .head_dim = 40,
         .intermediate = 640,
         .vocab = 500,
         .has_head_norm = true,
         .window = 16,
         .block_size = 24},
        {1, 16, 17, 700, 4000});
}

TEST_F(RowStepTest, RefusesByName) {
  const auto refusal = [&](auto change) {
    RowStepModel model{.num_layers = 2,
                       .hidden_size = 256,
                       .head_dim = 64,
                       .kv_groups = {{0, 2}, {2, 4}},
                       .intermediate = 512,
                       .vocab = 1000,
                       .block_size = 16,
                       .max_blocks = 4,
                       .layers = {}};
    change(model);
    return RowStep::Check(model);
  };
  EXPECT_TRUE(refusal([](RowStepModel&) {}).ok());
  const auto refused = [&](auto change) {
    return refusal(change).code() == absl::StatusCode::kUnimplemented;
  };
  EXPECT_TRUE(refused([](RowStepModel& m) { m.dtype = DType::kF32; }));
  EXPECT_TRUE(refused([](RowStepModel& m) { m.hidden_size = 260; }));
  EXPECT_TRUE(refused([](RowStepModel& m) { m.hidden_size = 20000; }));
  EXPECT_TRUE(refused([](RowStepModel& m) { m.intermediate = 19208; }));
  EXPECT_TRUE(refused([](RowStepModel& m) { m.head_dim = 512; }));
  EXPECT_TRUE(refused([](RowStepModel& m) { m.kv_groups = {{0, 16}}; }));
}

}  // namespace
}  // namespace lockstep

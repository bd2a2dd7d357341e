#include "tests/model/dense_reference.h"

#include <algorithm>
#include <cmath>

namespace lockstep {
namespace {

using Row = std::vector<double>;

Row MatVec(const DoubleMatrix& w, const Row& x) {
  Row y(w.size(), 0);
  for (size_t r = 0; r < w.size(); ++r) {
    for (size_t c = 0; c < x.size(); ++c) y[r] += w[r][c] * x[c];
  }
  return y;
}

void Add(Row& x, const Row& y) {
  for (size_t i = 0; i < x.size(); ++i) x[i] += y[i];
}

Row Norm(const Row& x, const Row& weight, double eps) {
  double mean = 0;
  for (double v : x) mean += v * v / static_cast<double>(x.size());
  Row y(x.size());
  for (size_t i = 0; i < x.size(); ++i) y[i] = x[i] / std::sqrt(mean + eps) * weight[i];
  return y;
}

double Mscale(double factor, double mscale) {
  return factor <= 1 ? 1 : 0.1 * mscale * std::log(factor) + 1;
}

double AttentionFactor(const RopeConfig& rope) {
  if (rope.type != RopeType::kYarn) return 1;
  if (rope.attention_factor) return *rope.attention_factor;
  if (rope.mscale && rope.mscale_all_dim) {
    return Mscale(rope.factor, *rope.mscale) / Mscale(rope.factor, *rope.mscale_all_dim);
  }
  return Mscale(rope.factor, 1);
}

// Radians a position of pair i of `dims` rotated dims, for a sequence of `length` tokens.
double Frequency(const RopeConfig& rope, int64_t dims, int64_t i, int64_t length) {
  const double d = static_cast<double>(dims);
  const double trained = static_cast<double>(rope.original_max_position_embeddings);
  double theta = rope.theta;
  if (rope.type == RopeType::kDynamic && length > rope.original_max_position_embeddings) {
    theta *= std::pow(rope.factor * static_cast<double>(length) / trained - (rope.factor - 1),
                      d / (d - 2));
  }
  const double plain = std::pow(theta, -2.0 * static_cast<double>(i) / d);
  const double turns = trained * plain / (2 * M_PI);  // over the trained length
  switch (rope.type) {
    case RopeType::kLinear:
      return plain / rope.factor;
    case RopeType::kLlama3: {
      const double share = std::clamp(
          (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0.0,
          1.0);
      return share * plain + (1 - share) * plain / rope.factor;
    }
    case RopeType::kYarn: {
      const auto dim_of = [&](double t) {
        return d * std::log(trained / (t * 2 * M_PI)) / (2 * std::log(theta));
      };
      double low = dim_of(rope.beta_fast);
      double high = dim_of(rope.beta_slow);
      if (rope.truncate) {
        low = std::floor(low);
        high = std::ceil(high);
      }
      low = std::max(low, 0.0);
      high = std::min(high, d - 1);
      const double share = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
      return (1 - share) * plain + share * plain / rope.factor;
    }
    default:
      break;
  }
  return rope.freq_factors.empty() ? plain : plain / rope.freq_factors[i];
}

void Rotate(const ModelConfig& config, int64_t position, int64_t length, double* head) {
  const int64_t dims = static_cast<int64_t>(static_cast<double>(config.head_dim) *
                                            config.rope.partial_rotary_factor);
  for (int64_t i = 0; i < dims / 2; ++i) {
    const double angle = static_cast<double>(position) * Frequency(config.rope, dims, i, length);
    const double c = std::cos(angle) * AttentionFactor(config.rope);
    const double s = std::sin(angle) * AttentionFactor(config.rope);
    const double a = head[i];
    const double b = head[i + dims / 2];
    head[i] = a * c - b * s;
    head[i + dims / 2] = b * c + a * s;
  }
}

struct Model {
  const ModelConfig& config;
  const TensorSource& tensors;
  int64_t layer = 0;

  DoubleMatrix Get(const std::string& suffix) const {
    return tensors("model.layers." + std::to_string(layer) + "." + suffix);
  }
  DoubleMatrix Project(const DoubleMatrix& x, const std::string& name, bool bias) const {
    const DoubleMatrix weight = Get(name + ".weight");
    DoubleMatrix y;
    for (const Row& row : x) {
      y.push_back(MatVec(weight, row));
      if (bias) Add(y.back(), Get(name + ".bias")[0]);
    }
    return y;
  }

  // Norms each head of every row if the model does, and rotates it.
  void PrepareHeads(DoubleMatrix& x, const std::string& norm, int64_t prompt_length) const {
    const int64_t dim = config.head_dim;
    for (size_t t = 0; t < x.size(); ++t) {
      const int64_t position = static_cast<int64_t>(t);
      for (size_t h = 0; h < x[t].size(); h += dim) {
        if (config.qk_norm) {
          const Row head(x[t].begin() + h, x[t].begin() + h + dim);
          const Row normed = Norm(head, Get(norm)[0], config.rms_norm_eps);
          std::copy(normed.begin(), normed.end(), x[t].begin() + h);
        }
        Rotate(config, position, std::max(prompt_length, position + 1), x[t].data() + h);
      }
    }
  }

  DoubleMatrix Attention(const DoubleMatrix& x, int64_t prompt_length) const {
    DoubleMatrix q = Project(x, "self_attn.q_proj", config.qkv_bias);
    DoubleMatrix k = Project(x, "self_attn.k_proj", config.qkv_bias);
    const DoubleMatrix v = Project(x, "self_attn.v_proj", config.qkv_bias);
    PrepareHeads(q, "self_attn.q_norm.weight", prompt_length);
    PrepareHeads(k, "self_attn.k_norm.weight", prompt_length);
    const int64_t dim = config.head_dim;
    const int64_t group = config.num_query_heads / config.num_kv_heads;
    const int64_t window = config.layer_windows[layer];
    DoubleMatrix out(x.size(), Row(config.num_query_heads * dim, 0));
    for (int64_t t = 0; t < static_cast<int64_t>(x.size()); ++t) {
      const int64_t first = window == 0 ? 0 : std::max<int64_t>(0, t + 1 - window);
      for (int64_t h = 0; h < config.num_query_heads; ++h) {
        const int64_t kv = h / group * dim;
        Row weights;
        double total = 0;
        for (int64_t s = first; s <= t; ++s) {
          double dot = 0;
          for (int64_t d = 0; d < dim; ++d) dot += q[t][h * dim + d] * k[s][kv + d];
          weights.push_back(std::exp(dot / std::sqrt(static_cast<double>(dim))));
          total += weights.back();
        }
        for (int64_t s = first; s <= t; ++s) {
          for (int64_t d = 0; d < dim; ++d) {
            out[t][h * dim + d] += weights[s - first] / total * v[s][kv + d];
          }
        }
      }
    }
    return Project(out, "self_attn.o_proj", config.o_bias);
  }

  DoubleMatrix Mlp(const DoubleMatrix& x) const {
    DoubleMatrix gate = Project(x, "mlp.gate_proj", config.mlp_bias);
    const DoubleMatrix up = Project(x, "mlp.up_proj", config.mlp_bias);
    for (size_t t = 0; t < gate.size(); ++t) {
      for (size_t i = 0; i < gate[t].size(); ++i) {
        gate[t][i] = gate[t][i] / (1 + std::exp(-gate[t][i])) * up[t][i];
      }
    }
    return Project(gate, "mlp.down_proj", config.mlp_bias);
  }
};

DoubleMatrix NormRows(const DoubleMatrix& x, const Row& weight, double eps) {
  DoubleMatrix y;
  for (const Row& row : x) y.push_back(Norm(row, weight, eps));
  return y;
}

void AddRows(DoubleMatrix& x, const DoubleMatrix& y) {
  for (size_t t = 0; t < x.size(); ++t) Add(x[t], y[t]);
}

}  // namespace

DoubleMatrix DenseLogits(const ModelConfig& config, const TensorSource& tensors,
                         const std::vector<int32_t>& tokens, int64_t prompt_length) {
  const DoubleMatrix embedding = tensors("model.embed_tokens.weight");
  DoubleMatrix x;
  for (int32_t token : tokens) x.push_back(embedding[token]);
  Model model{config, tensors};
  const double eps = config.rms_norm_eps;
  for (; model.layer < config.num_layers; ++model.layer) {
    AddRows(x, model.Attention(NormRows(x, model.Get("input_layernorm.weight")[0], eps),
                               prompt_length));
    AddRows(x, model.Mlp(NormRows(x, model.Get("post_attention_layernorm.weight")[0], eps)));
  }
  const DoubleMatrix head = config.tie_word_embeddings ? embedding : tensors("lm_head.weight");
  DoubleMatrix logits;
  for (const Row& row : NormRows(x, tensors("model.norm.weight")[0], eps)) {
    logits.push_back(MatVec(head, row));
  }
  return logits;
}

}  // namespace lockstep

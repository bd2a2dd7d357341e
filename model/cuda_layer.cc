#include "model/cuda_layer.h"

#include "model/attention_layer.h"
#include "model/checkpoint/tensor_names.h"

namespace lockstep {

absl::StatusOr<DeviceMatrix> CudaLayerReader::Norm(const std::string& name, int64_t size) {
  return loader_.LoadVector({{name, {0, 1}, {0, size}}}, DType::kF32);
}

absl::StatusOr<CudaLayer> CudaLayerReader::Read(int64_t l) {
  const auto name = [l](const char* suffix) { return LayerTensor(l, suffix); };
  CudaLayer layer;
  LOCKSTEP_ASSIGN_OR_RETURN(layer.input_norm, Norm(name(kInputNorm), config_.hidden_size));
  LOCKSTEP_ASSIGN_OR_RETURN(layer.post_attention_norm,
                            Norm(name(kPostAttentionNorm), config_.hidden_size));
  if (config_.qk_norm) {
    LOCKSTEP_ASSIGN_OR_RETURN(layer.q_norm, Norm(name(kQNorm), config_.head_dim));
    LOCKSTEP_ASSIGN_OR_RETURN(layer.k_norm, Norm(name(kKNorm), config_.head_dim));
  }
  const Range q_rows = HeadRows(part_.query_heads, config_.head_dim);
  const Range kv_rows = HeadRows(part_.kv_heads, config_.head_dim);
  LOCKSTEP_RETURN_IF_ERROR(Column(
      {{name(kQWeight), q_rows}, {name(kKWeight), kv_rows}, {name(kVWeight), kv_rows}},
      config_.qkv_bias, {name(kQBias), name(kKBias), name(kVBias)}, layer.qkv, layer.qkv_bias));
  LOCKSTEP_RETURN_IF_ERROR(
      Row(name(kOWeight), q_rows, config_.o_bias, name(kOBias), layer.o, layer.o_bias));
  const Range f = part_.intermediate;
  LOCKSTEP_RETURN_IF_ERROR(Column({{name(kGateWeight), f}, {name(kUpWeight), f}}, config_.mlp_bias,
                                  {name(kGateBias), name(kUpBias)}, layer.gate_up,
                                  layer.gate_up_bias));
  LOCKSTEP_RETURN_IF_ERROR(
      Row(name(kDownWeight), f, config_.mlp_bias, name(kDownBias), layer.down, layer.down_bias));
  LOCKSTEP_ASSIGN_OR_RETURN(const CudaPrefill prefill, DefaultCudaPrefill(kv_dtype_));
  LOCKSTEP_ASSIGN_OR_RETURN(
      layer.attention,
      CudaAttentionLayer::Create(LocalGeometry(config_, part_, l), dtype_, kv_dtype_, prefill));
  return layer;
}

absl::Status CudaLayerReader::Column(const std::vector<std::pair<std::string, Range>>& slices,
                                     bool has_bias, const std::vector<std::string>& biases,
                                     DeviceMatrix& weight, DeviceMatrix& bias) {
  std::vector<Rectangle> parts;
  std::vector<Rectangle> bias_parts;
  for (size_t i = 0; i < slices.size(); ++i) {
    parts.push_back({slices[i].first, slices[i].second, {0, config_.hidden_size}});
    if (has_bias) bias_parts.push_back({biases[i], {0, 1}, slices[i].second});
  }
  LOCKSTEP_ASSIGN_OR_RETURN(weight, loader_.Load(parts, dtype_));
  LOCKSTEP_ASSIGN_OR_RETURN(bias, loader_.LoadVector(bias_parts, dtype_));
  return absl::OkStatus();
}

absl::Status CudaLayerReader::Row(const std::string& name, Range columns, bool has_bias,
                                  const std::string& bias_name, DeviceMatrix& weight,
                                  DeviceMatrix& bias) {
  LOCKSTEP_ASSIGN_OR_RETURN(weight,
                            loader_.Load({{name, {0, config_.hidden_size}, columns}}, dtype_));
  if (!has_bias || rank_ != 0) return absl::OkStatus();
  LOCKSTEP_ASSIGN_OR_RETURN(
      bias, loader_.LoadVector({{bias_name, {0, 1}, {0, config_.hidden_size}}}, dtype_));
  return absl::OkStatus();
}

}  // namespace lockstep

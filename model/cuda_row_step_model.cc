#include "model/cuda_row_step_model.h"

#include "model/attention_layer.h"

namespace lockstep {

namespace {

// But for pointers.
RowStepModel RowStepSizes(const ModelConfig& config, const RankPartition& part,
                          const CudaDecoderOptions& options) {
  const AttentionGeometry geometry = LocalGeometry(config, part, 0);
  return {.dtype = options.dtype,
          .num_layers = config.num_layers,
          .hidden_size = config.hidden_size,
          .head_dim = config.head_dim,
          .kv_groups = geometry.kv_groups,
          .intermediate = part.intermediate.size(),
          .vocab = part.vocab.size(),
          .norm_eps = static_cast<float>(config.rms_norm_eps),
          .attention_scale = geometry.scale,
          .logit_softcap = geometry.logit_softcap,
          .block_size = options.block_size,
          .max_blocks = (options.max_model_len + options.block_size - 1) / options.block_size,
          .final_norm = nullptr,
          .head = nullptr,
          .layers = {}};
}

RowStepLayer RowStepLayerOf(const CudaLayer& layer) {
  return {.input_norm = layer.input_norm.values(),
          .qkv = layer.qkv.view.data,
          .qkv_bias = layer.qkv_bias.view.data,
          .q_norm = layer.q_norm.values(),
          .k_norm = layer.k_norm.values(),
          .o = layer.o.view.data,
          .o_bias = layer.o_bias.view.data,
          .post_attention_norm = layer.post_attention_norm.values(),
          .gate_up = layer.gate_up.view.data,
          .gate_up_bias = layer.gate_up_bias.view.data,
          .down = layer.down.view.data,
          .down_bias = layer.down_bias.view.data};
}

}  // namespace

absl::Status CheckRowSteps(const ModelConfig& config, const std::vector<RankPartition>& partition,
                           const CudaDecoderOptions& options, bool in_peer_memory) {
  if (options.check_attention) return absl::UnimplementedError("attention is compared");
  if (options.always_observed) return absl::UnimplementedError("every tensor is looked at");
  if (partition.size() > 1 && !in_peer_memory) {
    return absl::UnimplementedError("GPUs that do not reach each other's memory");
  }
  if (options.kv_dtype != options.dtype) {
    return absl::UnimplementedError(
        absl::StrCat("a KV cache of ", std::string(Name(options.kv_dtype))));
  }
  for (const RankPartition& part : partition) {
    LOCKSTEP_RETURN_IF_ERROR(RowStep::Check(RowStepSizes(config, part, options)));
  }
  return absl::OkStatus();
}

RowStepModel DescribeForRowSteps(const ModelConfig& config, const RankPartition& part,
                                 const CudaDecoderOptions& options,
                                 const std::vector<CudaLayer>& layers,
                                 const DeviceMatrix& final_norm, const DeviceMatrix& head) {
  RowStepModel model = RowStepSizes(config, part, options);
  model.final_norm = final_norm.values();
  model.head = head.view.data;
  for (int64_t l = 0; l < config.num_layers; ++l) {
    model.layers.push_back(RowStepLayerOf(layers[l]));
    model.layers.back().sliding_window =
        static_cast<int32_t>(LocalGeometry(config, part, l).sliding_window);
  }
  return model;
}

}  // namespace lockstep

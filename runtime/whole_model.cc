#include "runtime/whole_model.h"

#include <utility>

#include "model/cuda_decoder.h"
#include "parallel/local_communicator.h"

namespace lockstep {

namespace {

absl::StatusOr<std::unique_ptr<Decoder>> LoadOnCuda(const ModelSource& source,
                                                    const WholeModelOptions& options,
                                                    const RankPartition& partition,
                                                    const CudaSeat& cuda, ThreadPool& threads) {
  const CudaDecoderOptions decoder_options{.dtype = options.dtype,
                                           .kv_dtype = options.kv_dtype,
                                           .max_num_batched_tokens = options.max_num_batched_tokens,
                                           .max_num_seqs = options.max_num_seqs,
                                           .max_logits_rows = options.max_logits_rows,
                                           .max_model_len = options.max_model_len,
                                           .block_size = options.block_size,
                                           .graphs = false,
                                           .always_observed = true};
  const CudaRankContext context{.stream = cuda.stream.get(), .info = cuda.binding.info};
  return LoadCudaDecoder(source, {partition}, 0, decoder_options, context, threads);
}

}  // namespace

absl::StatusOr<std::unique_ptr<WholeModel>> WholeModel::Load(const ModelSource& source,
                                                             const WholeModelOptions& options,
                                                             const RankPartition& partition,
                                                             const CudaSeat* cuda,
                                                             ThreadPool& threads) {
  const ModelConfig& config = source.config;
  std::unique_ptr<WholeModel> whole(new WholeModel());
  whole->options_ = options;
  whole->vocab_size_ = config.vocab_size;
  whole->shape_ = {.num_layers = config.num_layers,
                   .num_kv_heads = config.num_kv_heads,
                   .head_dim = config.head_dim,
                   .block_size = options.block_size,
                   .dtype = options.kv_dtype};
  if (options.kv_dtype == DType::kF8E4M3) {
    LOCKSTEP_ASSIGN_OR_RETURN(whole->kv_scales_,
                              ReadKvScales(*source.checkpoint, config.num_layers));
  }
  if (cuda != nullptr) {
    whole->on_cuda_ = true;
    whole->stream_ = cuda->stream.get();
    LOCKSTEP_ASSIGN_OR_RETURN(whole->decoder_,
                              LoadOnCuda(source, options, partition, *cuda, threads));
    return whole;
  }
  whole->communicator_ = std::move(CreateLocalCommunicators(1)[0]);
  LOCKSTEP_ASSIGN_OR_RETURN(BackendSelection selection,
                            SelectAttention(config, options.kv_dtype, options.block_size,
                                            options.attention_backend, threads));
  whole->attention_ = std::move(selection.backend);
  const DecoderOptions decoder_options{.dtype = options.dtype,
                                       .max_num_batched_tokens = options.max_num_batched_tokens,
                                       .max_model_len = options.max_model_len};
  LOCKSTEP_ASSIGN_OR_RETURN(whole->decoder_,
                            Decoder::Load(source, {partition}, decoder_options, *whole->attention_,
                                          *whole->communicator_, threads));
  return whole;
}

absl::Status WholeModel::CreatePool(int64_t num_blocks) {
  auto pool = on_cuda_ ? KvPool::CreateOnCuda(shape_, num_blocks, stream_)
                       : KvPool::Create(shape_, num_blocks);
  if (!pool.ok()) return pool.status();
  pool_ = *std::move(pool);
  if (shape_.dtype == DType::kF8E4M3) kv_scales_.ApplyTo(pool_);
  return decoder_->Prepare(pool_);
}

absl::Status WholeModel::ChangePool(std::span<const int32_t> poisoned_blocks,
                                    std::span<const PlanBlockCopy> block_copies) {
  for (const int32_t block : poisoned_blocks) LOCKSTEP_RETURN_IF_ERROR(pool_.Poison(block));
  for (const PlanBlockCopy& copy : block_copies) {
    LOCKSTEP_RETURN_IF_ERROR(pool_.Copy(copy.source, copy.target));
  }
  return absl::OkStatus();
}

absl::Status WholeModel::Run(const ForwardBatch& batch, const DeviceDecoder* ranks,
                             TensorObserver& observer) {
  if (on_cuda_) {
    LOCKSTEP_CHECK(ranks != nullptr);
    LOCKSTEP_RETURN_IF_ERROR(CopyAsync(decoder_->device()->last_tokens(), ranks->last_tokens(),
                                       options_.max_num_seqs * int64_t{sizeof(int32_t)}, stream_));
  }
  const int64_t rows = std::ssize(batch.logits_rows);
  const int64_t bytes = rows * vocab_size_ * int64_t{sizeof(float)};
  LOCKSTEP_ASSIGN_OR_RETURN(const Buffer logits,
                            Buffer::Create(bytes, "--check-tp: logits of one rank"));
  decoder_->set_observer(&observer);
  return decoder_->Forward(batch, pool_,
                           {logits.data(), DType::kF32, rows, vocab_size_, vocab_size_});
}

}  // namespace lockstep

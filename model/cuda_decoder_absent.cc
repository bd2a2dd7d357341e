// A build without CUDA has no CUDA decoder, and says so.
#include "model/cuda_decoder.h"

namespace lockstep {

absl::StatusOr<std::unique_ptr<Decoder>> LoadCudaDecoder(const ModelSource&,
                                                         const std::vector<RankPartition>&, int,
                                                         const CudaDecoderOptions&,
                                                         const CudaRankContext&, ThreadPool&) {
  return absl::UnimplementedError("this build of Lockstep has no CUDA: use --device cpu");
}

}  // namespace lockstep

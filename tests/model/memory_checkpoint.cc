#include "tests/model/memory_checkpoint.h"

#include <cmath>
#include <random>

#include "model/checkpoint/tensor_names.h"

namespace lockstep {

MemoryCheckpoint::MemoryCheckpoint(const ModelConfig& config, uint32_t seed) {
  std::mt19937 random(seed);
  for (const TensorSpec& spec : RequiredTensors(config)) {
    Entry entry;
    entry.info.shape = spec.shape;
    entry.info.stored_type = "BF16";
    const int64_t count = entry.info.rows() * entry.info.cols();
    entry.info.stored_bytes = 2 * count;
    const bool is_norm = spec.name.ends_with("norm.weight");
    const bool is_embedding = spec.name == kEmbedTokens;
    const float deviation =
        is_norm || is_embedding ? 0.3f : 1.0f / std::sqrt(static_cast<float>(entry.info.cols()));
    std::normal_distribution<float> normal(is_norm ? 1.0f : 0.0f, deviation);
    for (int64_t i = 0; i < count; ++i) entry.values.push_back(ToFloat(ToBF16(normal(random))));
    tensors_[spec.name] = std::move(entry);
  }
}

const TensorInfo* MemoryCheckpoint::Find(const std::string& name) const {
  const auto it = tensors_.find(name);
  return it == tensors_.end() ? nullptr : &it->second.info;
}

std::vector<std::string> MemoryCheckpoint::Names() const {
  std::vector<std::string> names;
  for (const auto& [name, entry] : tensors_) names.push_back(name);
  return names;
}

absl::Status MemoryCheckpoint::Read(const std::string& name, Range rows, Range cols,
                                    const MatrixView& dst) const {
  const auto it = tensors_.find(name);
  if (it == tensors_.end()) return absl::NotFoundError("no tensor " + name);
  const TensorInfo& info = it->second.info;
  LOCKSTEP_CHECK(rows.begin >= 0 && rows.end <= info.rows() && rows.size() == dst.rows);
  LOCKSTEP_CHECK(cols.begin >= 0 && cols.end <= info.cols() && cols.size() == dst.cols);
  for (int64_t r = 0; r < dst.rows; ++r) {
    const float* source = &it->second.values[(rows.begin + r) * info.cols() + cols.begin];
    Convert(DType::kF32, source, dst.dtype,
            static_cast<char*>(dst.data) + r * dst.stride * SizeOf(dst.dtype), dst.cols);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  reads_[std::this_thread::get_id()].push_back({name, rows, cols, dst.dtype});
  return absl::OkStatus();
}

DoubleMatrix MemoryCheckpoint::Tensor(const std::string& name) const {
  const Entry& entry = tensors_.at(name);
  DoubleMatrix matrix;
  for (int64_t r = 0; r < entry.info.rows(); ++r) {
    const auto begin = entry.values.begin() + r * entry.info.cols();
    matrix.emplace_back(begin, begin + entry.info.cols());
  }
  return matrix;
}

std::vector<MemoryCheckpoint::Rectangle> MemoryCheckpoint::ReadByThisThread() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return reads_[std::this_thread::get_id()];
}

ModelSource MakeSource(const ModelConfig& config, MemoryCheckpoint** checkpoint) {
  auto weights = std::make_unique<MemoryCheckpoint>(config);
  if (checkpoint != nullptr) *checkpoint = weights.get();
  ModelSource source;
  source.path = "test";
  source.config = config;
  source.checkpoint = std::move(weights);
  return source;
}

}  // namespace lockstep

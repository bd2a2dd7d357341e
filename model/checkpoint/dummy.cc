#include "model/checkpoint/dummy.h"

#include <algorithm>
#include <array>
#include <map>

#include "model/checkpoint/dummy_values.h"
#include "model/checkpoint/store_values.h"
#include "model/checkpoint/tensor_names.h"

namespace lockstep {

namespace {

// FNV-1a.
uint64_t HashName(const std::string& name) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : name) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3u;
  return hash;
}

// The choice among clones is made before the thread sanitizer can run: it would crash.
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
#define LOCKSTEP_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define LOCKSTEP_CLONES
#endif

// Columns [begin, begin + count) of the row with this key. Compiled for several instruction sets,
// chosen when the program starts: baseline x86-64 has no 32-bit vector multiply.
LOCKSTEP_CLONES void FillRow(uint32_t row_key, int64_t begin, int64_t count, float* out) {
  const auto first = static_cast<uint32_t>(begin);
  for (int64_t i = 0; i < count; ++i) {
    out[i] = DummyValue(row_key, first + static_cast<uint32_t>(i));
  }
}

class DummyCheckpoint : public Checkpoint {
 public:
  DummyCheckpoint(const std::string& path, const ModelConfig& config) : path_(path) {
    for (TensorSpec& spec : RequiredTensors(config)) {
      TensorInfo info{std::move(spec.shape), "dummy", SizeOf(config.dtype), true};
      for (const int64_t size : info.shape) info.stored_bytes *= size;
      tensors_[spec.name] = std::move(info);
    }
  }

  std::string description() const override { return path_ + " (dummy weights)"; }

  const TensorInfo* Find(const std::string& name) const override {
    const auto it = tensors_.find(name);
    return it == tensors_.end() ? nullptr : &it->second;
  }

  std::vector<std::string> Names() const override {
    std::vector<std::string> names;
    for (const auto& [name, info] : tensors_) names.push_back(name);
    return names;
  }

  absl::Status Read(const std::string& name, Range rows, Range cols,
                    const MatrixView& dst) const override {
    const TensorInfo* info = Find(name);
    if (info == nullptr) {
      return absl::NotFoundError(absl::StrFormat("%s: no tensor %s", description(), name));
    }
    LOCKSTEP_CHECK(rows.begin >= 0 && rows.end <= info->rows() && cols.begin >= 0 &&
                   cols.end <= info->cols());
    LOCKSTEP_CHECK(dst.rows == rows.size() && dst.cols == cols.size());
    const MadeUpTensor made_up = MadeUp(name);
    std::array<float, 4096> values;  // stays in the first-level cache between filling and storing
    if (made_up.is_norm) values.fill(1.0f);
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      const uint32_t row_key = DummyRowKey(made_up.key, row);
      for (int64_t at = 0; at < cols.size(); at += values.size()) {
        const int64_t count = std::min<int64_t>(values.size(), cols.size() - at);
        if (!made_up.is_norm) FillRow(row_key, cols.begin + at, count, values.data());
        auto* out = static_cast<uint8_t*>(dst.data) +
                    ((row - rows.begin) * dst.stride + at) * SizeOf(dst.dtype);
        LOCKSTEP_CHECK(StoreValues(DType::kF32, values.data(), dst.dtype, out, count));
      }
    }
    return absl::OkStatus();
  }

  std::optional<MadeUpTensor> FindMadeUp(const std::string& name) const override {
    if (Find(name) == nullptr) return std::nullopt;
    return MadeUp(name);
  }

 private:
  static MadeUpTensor MadeUp(const std::string& name) {
    return {.key = HashName(name), .is_norm = name.ends_with("norm.weight")};
  }

  std::string path_;
  std::map<std::string, TensorInfo> tensors_;
};

}  // namespace

std::unique_ptr<Checkpoint> MakeDummyCheckpoint(const std::string& path,
                                                const ModelConfig& config) {
  return std::make_unique<DummyCheckpoint>(path, config);
}

}  // namespace lockstep

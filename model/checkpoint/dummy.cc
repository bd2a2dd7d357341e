#include "model/checkpoint/dummy.h"

#include <algorithm>
#include <array>
#include <map>

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

// Bijective mixers (the finalisers of MurmurHash3): nearby counters give unrelated numbers.
uint64_t Mix64(uint64_t x) {
  x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdu;
  x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53u;
  return x ^ (x >> 33);
}
inline uint32_t Mix32(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x85ebca6bu;
  x = (x ^ (x >> 13)) * 0xc2b2ae35u;
  return x ^ (x >> 16);
}

// A uniform variable on [-a, a) has standard deviation a / sqrt(3).
constexpr float kHalfWidth = 0.02f * 1.7320508f;

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
    const uint32_t bits = Mix32(row_key + (first + static_cast<uint32_t>(i)) * 0x9e3779b9u);
    out[i] = static_cast<float>(static_cast<int32_t>(bits)) * (kHalfWidth / 2147483648.0f);
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
    const bool is_norm = name.ends_with("norm.weight");
    const uint64_t name_key = HashName(name);
    std::array<float, 4096> values;  // stays in the first-level cache between filling and storing
    if (is_norm) values.fill(1.0f);
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      const auto row_key = static_cast<uint32_t>(Mix64(name_key + static_cast<uint64_t>(row)));
      for (int64_t at = 0; at < cols.size(); at += values.size()) {
        const int64_t count = std::min<int64_t>(values.size(), cols.size() - at);
        if (!is_norm) FillRow(row_key, cols.begin + at, count, values.data());
        auto* out = static_cast<uint8_t*>(dst.data) +
                    ((row - rows.begin) * dst.stride + at) * SizeOf(dst.dtype);
        LOCKSTEP_CHECK(StoreValues(DType::kF32, values.data(), dst.dtype, out, count));
      }
    }
    return absl::OkStatus();
  }

 private:
  std::string path_;
  std::map<std::string, TensorInfo> tensors_;
};

}  // namespace

std::unique_ptr<Checkpoint> MakeDummyCheckpoint(const std::string& path,
                                                const ModelConfig& config) {
  return std::make_unique<DummyCheckpoint>(path, config);
}

}  // namespace lockstep

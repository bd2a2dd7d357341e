// One set of weights stored in every floating type: the decoder's result depends on the values and
// on the compute type, never on how they were stored.
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "model/checkpoint/tensor_names.h"
#include "tests/checkpoint/test_files.h"
#include "tests/model/model_runner.h"

namespace lockstep {
namespace {

constexpr int kRankCounts[] = {1, 2};

struct Storage {
  const char* name;
  const char* matrices;  // safetensors types
  const char* norms;
};
constexpr Storage kF32 = {"F32", "F32", "F32"};
constexpr Storage kF16 = {"F16", "F16", "F16"};
constexpr Storage kBF16 = {"BF16", "BF16", "BF16"};
constexpr Storage kBF16WithF32Norms = {"BF16 with F32 norms", "BF16", "F32"};

Json TinyLlama() {
  return {{"architectures", {"LlamaForCausalLM"}},
          {"model_type", "llama"},
          {"torch_dtype", "float32"},
          {"hidden_size", 64},
          {"intermediate_size", 96},
          {"num_hidden_layers", 2},
          {"num_attention_heads", 4},
          {"num_key_value_heads", 2},
          {"vocab_size", 120},
          {"rms_norm_eps", 1e-5},
          {"max_position_embeddings", 512}};
}

bool IsNorm(const TensorSpec& spec) { return spec.name.ends_with("norm.weight"); }

int64_t NumValues(const TensorSpec& spec) {
  int64_t count = 1;
  for (const int64_t size : spec.shape) count *= size;
  return count;
}

// What both bfloat16 and float16 hold: 8 significant bits, and not below float16's normal numbers.
float InBothHalfTypes(float x) {
  const float rounded = ToFloat(ToBF16(x));
  return std::abs(rounded) < 0x1p-14f ? 0 : rounded;
}

std::string Stored(const std::vector<float>& values, const std::string& type) {
  if (type == "F32") return Bytes(values);
  std::vector<uint16_t> bits;
  for (const float x : values) bits.push_back(type == "F16" ? ToF16(x).bits : ToBF16(x).bits);
  return Bytes(bits);
}

class StoredTypesTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto config = ParseModelConfig(TinyLlama(), "config.json");
    ASSERT_TRUE(config.ok()) << config.status();
    specs_ = RequiredTensors(*config);
    std::mt19937 random(3);
    for (const TensorSpec& spec : specs_) {
      std::normal_distribution<float> normal(
          IsNorm(spec) ? 1.0f : 0.0f, IsNorm(spec) || spec.name == kEmbedTokens ? 0.3f : 0.125f);
      std::vector<float>& values = values_[spec.name];
      for (int64_t i = 0; i < NumValues(spec); ++i) values.push_back(normal(random));
    }
  }

  void RoundValuesToBothHalfTypes() {
    for (auto& [name, values] : values_) {
      for (float& x : values) {
        x = InBothHalfTypes(x);
        ASSERT_EQ(ToFloat(ToF16(x)), x);
        ASSERT_EQ(ToFloat(ToBF16(x)), x);
      }
    }
  }

  ModelSource Open(const Storage& storage) {
    std::map<std::string, StoredTensor> tensors;
    for (const TensorSpec& spec : specs_) {
      const char* const type = IsNorm(spec) ? storage.norms : storage.matrices;
      tensors[spec.name] = {type, spec.shape, Stored(values_.at(spec.name), type)};
    }
    WriteFile(folder_ / "config.json", TinyLlama().dump());
    WriteFile(folder_ / "model.safetensors", SafetensorsBytes(tensors));
    absl::StatusOr<ModelSource> source = OpenModel(folder_.path(), LoadFormat::kAuto);
    EXPECT_TRUE(source.ok()) << source.status();
    if (!source.ok()) return ModelSource();
    EXPECT_EQ(source->checkpoint->Find(kEmbedTokens)->stored_type, storage.matrices);
    EXPECT_EQ(source->checkpoint->Find(kFinalNorm)->stored_type, storage.norms);
    return *std::move(source);
  }

  // Logits of a whole prompt; checks weight_bytes() on the way.
  Logits Run(const Storage& storage, DType dtype, int ranks) {
    SCOPED_TRACE(testing::Message() << storage.name << ", " << ranks << " ranks");
    const ModelSource source = Open(storage);
    if (source.checkpoint == nullptr) return {};
    RunnerOptions options;
    options.dtype = dtype;
    options.kv_dtype = dtype;
    Logits logits;
    std::vector<int64_t> weight_bytes(ranks);
    RunRanks(source, ranks, options,
             [&](ModelRunner& runner, Communicator& communicator) -> absl::Status {
               weight_bytes[communicator.rank()] = runner.decoder().weight_bytes();
               const std::vector<int32_t> prompt = {3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26};
               LOCKSTEP_ASSIGN_OR_RETURN(Logits mine, runner.Prefill(0, prompt, 5));
               if (communicator.rank() == 0) logits = std::move(mine);
               return absl::OkStatus();
             });
    int64_t sum = 0;
    for (const int64_t bytes : weight_bytes) sum += bytes;
    EXPECT_EQ(sum, ComputeBytes(dtype, ranks));
    EXPECT_EQ(logits.size(), 12u);
    return logits;
  }

  // Matrices in the compute type, split over the ranks (so few that no KV head is on two of them);
  // norms in float32 on every rank.
  int64_t ComputeBytes(DType dtype, int ranks) const {
    int64_t bytes = 0;
    for (const TensorSpec& spec : specs_) {
      bytes += NumValues(spec) * (IsNorm(spec) ? SizeOf(DType::kF32) * ranks : SizeOf(dtype));
    }
    return bytes;
  }

  TempFolder folder_;
  std::vector<TensorSpec> specs_;
  std::map<std::string, std::vector<float>> values_;
};

// Relative to the largest logit; infinite where one is NaN or a shape differs.
double Difference(const Logits& a, const Logits& b) {
  if (a.size() != b.size()) return INFINITY;
  double largest = 0;
  double scale = 0;
  for (size_t r = 0; r < a.size(); ++r) {
    if (a[r].size() != b[r].size()) return INFINITY;
    for (size_t c = 0; c < a[r].size(); ++c) {
      const double difference = std::abs(static_cast<double>(a[r][c]) - b[r][c]);
      if (std::isnan(difference)) return INFINITY;
      largest = std::max(largest, difference);
      scale = std::max(scale, std::abs(static_cast<double>(b[r][c])));
    }
  }
  return scale > 0 ? largest / scale : INFINITY;
}

TEST_F(StoredTypesTest, ValuesThatEveryTypeHoldsGiveTheSameLogits) {
  RoundValuesToBothHalfTypes();
  for (const int ranks : kRankCounts) {
    const Logits f32 = Run(kF32, DType::kF32, ranks);
    const Logits bf16 = Run(kF32, DType::kBF16, ranks);
    for (const Storage& storage : {kF16, kBF16, kBF16WithF32Norms}) {
      EXPECT_EQ(Run(storage, DType::kF32, ranks), f32) << storage.name << ", " << ranks;
      EXPECT_EQ(Run(storage, DType::kBF16, ranks), bf16) << storage.name << ", " << ranks;
    }
    EXPECT_LT(Difference(bf16, f32), 0.03);
    EXPECT_GT(Difference(bf16, f32), 0) << "bfloat16 arithmetic was not used";
  }
}

TEST_F(StoredTypesTest, ValuesThatAreRoundedGiveCloseLogits) {
  for (const int ranks : kRankCounts) {
    const Logits f32 = Run(kF32, DType::kF32, ranks);
    for (const auto& [storage, tolerance] :
         {std::pair(kF16, 0.006), std::pair(kBF16, 0.03), std::pair(kBF16WithF32Norms, 0.03)}) {
      const double difference = Difference(Run(storage, DType::kF32, ranks), f32);
      EXPECT_LT(difference, tolerance) << storage.name << ", " << ranks;
      EXPECT_GT(difference, 0) << storage.name << ": the values were not rounded";
      EXPECT_LT(Difference(Run(storage, DType::kBF16, ranks), f32), 0.05) << storage.name;
    }
    // Loading F32 for bfloat16 compute rounds as the writer of a BF16 file does: nearest-even.
    EXPECT_EQ(Run(kF32, DType::kBF16, ranks), Run(kBF16WithF32Norms, DType::kBF16, ranks));
  }
}

}  // namespace
}  // namespace lockstep

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>

#include "model/checkpoint/checkpoint.h"
#include "model/checkpoint/tensor_names.h"
#include "tests/checkpoint/test_files.h"

namespace lockstep {
namespace {

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kNotFound = absl::StatusCode::kNotFound;

// Zeros of the right shape for every tensor of the config.
std::map<std::string, StoredTensor> ZeroTensors(const Json& json) {
  const ModelConfig config = *ParseModelConfig(json, "config.json");
  std::map<std::string, StoredTensor> tensors;
  for (const TensorSpec& spec : RequiredTensors(config)) {
    int64_t elements = 1;
    for (const int64_t size : spec.shape) elements *= size;
    tensors[spec.name] = {"BF16", spec.shape, std::string(elements * 2, '\0')};
  }
  return tensors;
}

class OpenModelTest : public ::testing::Test {
 protected:
  absl::StatusOr<ModelSource> Open(const Json& config,
                                   const std::map<std::string, StoredTensor>& tensors) {
    WriteFile(folder_ / "config.json", config.dump());
    WriteFile(folder_ / "model.safetensors", SafetensorsBytes(tensors));
    return OpenModel(folder_.path(), LoadFormat::kAuto);
  }

  TempFolder folder_;
};

TEST_F(OpenModelTest, OpensATinyModel) {
  const auto source = Open(TinyQwen3(), ZeroTensors(TinyQwen3()));
  ASSERT_TRUE(source.ok()) << source.status();
  EXPECT_EQ(source->config.head_dim, 32);
  EXPECT_TRUE(source->generation.eos_token_ids.empty());
  const TensorInfo* q = source->checkpoint->Find("model.layers.1.self_attn.q_proj.weight");
  ASSERT_NE(q, nullptr);
  EXPECT_EQ(q->shape, (std::vector<int64_t>{128, 64}));
}

TEST_F(OpenModelTest, HeadDimThatContradictsTheWeightsIsRefused) {
  const auto tensors = ZeroTensors(TinyQwen3());
  Json config = TinyQwen3();
  config["head_dim"] = 16;
  ExpectFault(Open(config, tensors).status(), kInvalid,
              {"model.layers.0.self_attn.q_proj.weight", "[64, 64]", "[128, 64]"});
  config["head_dim"] = nullptr;  // 64 / 4 = 16: the same contradiction
  ExpectFault(Open(config, tensors).status(), kInvalid, {"q_proj", "[64, 64]", "[128, 64]"});
}

TEST_F(OpenModelTest, AKeyThatIsThereTwiceIsRefusedByName) {
  ASSERT_TRUE(Open(TinyQwen3(), ZeroTensors(TinyQwen3())).ok());
  WriteFile(folder_ / "generation_config.json", R"({"top_k": 1, "top_k": 2})");
  ExpectFault(OpenModel(folder_.path(), LoadFormat::kAuto).status(), kInvalid,
              {"generation_config.json", "key top_k", "twice"});
  EXPECT_TRUE(OpenModel(folder_.path(), LoadFormat::kAuto, false).ok());
  WriteFile(folder_ / "config.json", R"({"hidden_size": 128, )" + TinyQwen3().dump().substr(1));
  ExpectFault(OpenModel(folder_.path(), LoadFormat::kAuto).status(), kInvalid,
              {"/config.json", "key hidden_size", "twice"});
  ExpectFault(OpenModelConfig(folder_.path()).status(), kInvalid,
              {"/config.json", "key hidden_size", "twice"});
}

TEST_F(OpenModelTest, LayersBeyondTheConfiguredOnesAreWarnedOfOnce) {
  const auto warning = [&](const std::map<std::string, StoredTensor>& tensors) {
    testing::internal::CaptureStderr();
    EXPECT_TRUE(Open(TinyQwen3(), tensors).ok());
    return testing::internal::GetCapturedStderr();
  };
  Json config = TinyQwen3();
  config["num_hidden_layers"] = 5;
  const std::string text = warning(ZeroTensors(config));
  EXPECT_NE(text.find("tensors of 5 layers, num_hidden_layers is 2"), std::string::npos) << text;
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1) << text;
  auto tensors = ZeroTensors(TinyQwen3());
  tensors["model.layers.x"] = tensors["model.layers.2"] = {"F32", {1}, "1234"};
  EXPECT_EQ(warning(tensors), "");
}

// Links as a hub's cache makes them, whose targets are gone or lead in a circle.
TEST_F(OpenModelTest, BrokenLinksAreToldAsSuch) {
  constexpr auto kFailed = absl::StatusCode::kFailedPrecondition;
  ASSERT_TRUE(Open(TinyQwen3(), ZeroTensors(TinyQwen3())).ok());
  WriteFile(folder_ / "generation_config.json", "{}");
  const auto open = [&] { return OpenModel(folder_.path(), LoadFormat::kAuto).status(); };
  for (const std::string name : {"config.json", "generation_config.json", "model.safetensors"}) {
    const std::string path = folder_ / name;
    std::filesystem::rename(path, folder_ / "aside");
    std::filesystem::create_symlink("blob", path);
    ExpectFault(open(), kFailed, {path, "dangling link"});
    std::filesystem::remove(path);
    std::filesystem::create_symlink(name, path);
    ExpectFault(open(), kFailed, {path, "Too many levels of symbolic links"});
    std::filesystem::remove(path);
    std::filesystem::create_symlink("aside", path);
    EXPECT_TRUE(open().ok()) << open();
    std::filesystem::remove(path);
    std::filesystem::rename(folder_ / "aside", path);
  }
  for (const std::string name : {"model", "model.gguf"}) {
    std::filesystem::create_symlink("nowhere", folder_ / name);
    ExpectFault(OpenModel(folder_ / name, LoadFormat::kAuto).status(), kFailed,
                {folder_ / name, "dangling link"});
  }
  std::filesystem::remove(folder_ / "model.safetensors");
  WriteFile(folder_ / "model.safetensors.index.json", R"({"weight_map":{"a":"1.safetensors"}})");
  std::filesystem::create_symlink("nowhere", folder_ / "1.safetensors");
  ExpectFault(open(), kFailed, {folder_ / "1.safetensors", "dangling link"});
}

TEST_F(OpenModelTest, FoldersThatMayNotBeSearchedAreToldAsSuch) {
  if (geteuid() == 0) GTEST_SKIP() << "root may search every folder";
  ASSERT_TRUE(Open(TinyQwen3(), ZeroTensors(TinyQwen3())).ok());
  std::filesystem::permissions(folder_.path(), std::filesystem::perms::owner_read);
  const absl::Status status = OpenModel(folder_.path(), LoadFormat::kAuto).status();
  std::filesystem::permissions(folder_.path(), std::filesystem::perms::owner_all);
  ExpectFault(status, absl::StatusCode::kFailedPrecondition,
              {folder_ / "config.json", "Permission denied"});
}

TEST_F(OpenModelTest, MissingAndExtraTensors) {
  auto tensors = ZeroTensors(TinyQwen3());
  tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = {"F32", {2}, std::string(8, '\0')};
  tensors["some.mask"] = {"BOOL", {3}, std::string(3, '\1')};
  EXPECT_TRUE(Open(TinyQwen3(), tensors).ok());
  tensors.erase("lm_head.weight");
  ExpectFault(Open(TinyQwen3(), tensors).status(), kNotFound,
              {"lm_head.weight", "tie_word_embeddings"});
  Json tied = TinyQwen3();
  tied["tie_word_embeddings"] = true;
  EXPECT_TRUE(Open(tied, tensors).ok());
  EXPECT_TRUE(Open(tied, ZeroTensors(TinyQwen3())).ok()) << "a spare lm_head is ignored";
  tensors.erase("model.layers.1.self_attn.k_norm.weight");
  ExpectFault(Open(tied, tensors).status(), kNotFound,
              {"model.layers.1.self_attn.k_norm.weight", "[32]"});
}

TEST_F(OpenModelTest, TypesThatAreNoWeightsAreRefusedByTensor) {
  auto tensors = ZeroTensors(TinyQwen3());
  tensors["model.layers.0.mlp.up_proj.weight"] = {"I64", {96, 64}, std::string(96 * 64 * 8, '\0')};
  ExpectFault(Open(TinyQwen3(), tensors).status(), kInvalid,
              {"model.layers.0.mlp.up_proj.weight", "I64"});
  tensors["model.layers.0.mlp.up_proj.weight"] = {"F8_E4M3", {96, 64}, std::string(96 * 64, '\0')};
  ExpectFault(Open(TinyQwen3(), tensors).status(), kInvalid,
              {"model.layers.0.mlp.up_proj.weight", "F8_E4M3"});
}

TEST_F(OpenModelTest, DTypeComesFromTheConfigElseFromTheWeights) {
  auto tensors = ZeroTensors(TinyQwen3());
  EXPECT_EQ(Open(TinyQwen3(), tensors)->config.dtype, DType::kBF16);
  for (auto& [name, tensor] : tensors) {
    tensor = {"F32", tensor.shape, std::string(tensor.bytes.size() * 2, '\0')};
  }
  EXPECT_EQ(Open(TinyQwen3(), tensors)->config.dtype, DType::kF32);
  Json config = TinyQwen3();
  config["torch_dtype"] = "bfloat16";
  EXPECT_EQ(Open(config, tensors)->config.dtype, DType::kBF16);
}

TEST_F(OpenModelTest, GenerationConfig) {
  Json config = TinyQwen3();
  config["eos_token_id"] = 5;
  const auto tensors = ZeroTensors(config);
  WriteFile(folder_ / "generation_config.json",
            R"({"eos_token_id": [5, 9], "temperature": 0.1, "top_k": 1})");
  const auto source = Open(config, tensors);
  ASSERT_TRUE(source.ok()) << source.status();
  EXPECT_EQ(source->config.eos_token_ids, (std::vector<int32_t>{5}));
  EXPECT_EQ(source->generation.eos_token_ids, (std::vector<int32_t>{5, 9}));
  EXPECT_EQ(source->generation.temperature, 0.1);
  WriteFile(folder_ / "generation_config.json", "{\"temperature\": ");
  ExpectFault(Open(config, tensors).status(), kInvalid, {"generation_config.json", "JSON"});
  WriteFile(folder_ / "generation_config.json", R"({"top_p": "high"})");
  ExpectFault(Open(config, tensors).status(), kInvalid, {"generation_config.json", "top_p"});
}

TEST_F(OpenModelTest, AnAssumedEosGivesWayToAStatedOne) {
  Json config = TinyQwen3();
  config["architectures"] = {"LlamaForCausalLM"};
  config["model_type"] = "llama";
  const auto tensors = ZeroTensors(config);
  EXPECT_EQ(Open(config, tensors)->config.eos_token_ids, (std::vector<int32_t>{2}));
  WriteFile(folder_ / "generation_config.json", R"({"eos_token_id": 9})");
  EXPECT_TRUE(Open(config, tensors)->config.eos_token_ids.empty());
}

TEST_F(OpenModelTest, SaysWhatModelMayBe) {
  const auto open = [](const std::string& path) {
    return OpenModel(path, LoadFormat::kAuto).status();
  };
  ExpectFault(open("someone/some-model"), kNotFound,
              {"someone/some-model", "config.json", ".gguf", "not downloaded"});
  ExpectFault(open(folder_.path()), kNotFound, {folder_.path(), "config.json"});
  WriteFile(folder_ / "config.json", TinyQwen3().dump());
  ExpectFault(open(folder_ / "config.json"), kNotFound, {"is a file", ".gguf"});
  ExpectFault(OpenModelConfig(folder_ / "config.json").status(), kNotFound, {"is a file"});
  EXPECT_TRUE(OpenModelConfig(folder_.path()).ok()) << "needs no weights";
}

TEST_F(OpenModelTest, MissingWeightsAreNamed) {
  WriteFile(folder_ / "config.json", TinyQwen3().dump());
  const auto open = [&] { return OpenModel(folder_.path(), LoadFormat::kAuto).status(); };
  ExpectFault(open(), kNotFound, {"model.safetensors", "model.safetensors.index.json"});
  WriteFile(folder_ / "pytorch_model.bin", "x");
  ExpectFault(open(), kNotFound, {"pytorch_model.bin", "safetensors are needed"});
  WriteFile(folder_ / "tiny.gguf", "x");
  ExpectFault(open(), kNotFound, {"tiny.gguf", "MODEL"});
  WriteFile(folder_ / "model-00001-of-00002.safetensors", "x");
  ExpectFault(open(), kNotFound, {"model-00001-of-00002.safetensors", "no index"});
}

TEST(OpenModel, GoldenCheckpointsOpenOrAreRefusedByName) {
  const std::string golden = SharedFolder() + "/golden";
  if (!std::filesystem::exists(golden)) GTEST_SKIP() << golden << " is not there";
  const std::map<std::string, std::string> refused = {
      {"gemma2", "Gemma2ForCausalLM"},   {"gemma3", "Gemma3ForCausalLM"},
      {"mixtral", "MixtralForCausalLM"}, {"olmo2", "Olmo2ForCausalLM"},
      {"phi3", "Phi3ForCausalLM"},       {"qwen3-moe", "Qwen3MoeForCausalLM"}};
  for (const auto& entry : std::filesystem::directory_iterator(golden)) {
    if (!entry.is_directory()) continue;
    const std::string name = entry.path().filename().string();
    const auto source = OpenModel(entry.path().string(), LoadFormat::kAuto);
    if (const auto it = refused.find(name); it != refused.end()) {
      ExpectFault(source.status(), kInvalid, {it->second, "LlamaForCausalLM", "Qwen3ForCausalLM"});
    } else {
      EXPECT_TRUE(source.ok()) << name << ": " << source.status();
    }
  }
}

TEST(OpenModel, PublishedConfigsOpenOrAreRefusedByName) {
  const std::string configs = SharedFolder() + "/configs";
  if (!std::filesystem::exists(configs)) GTEST_SKIP() << configs << " is not there";
  for (const auto& entry : std::filesystem::directory_iterator(configs)) {
    if (!entry.is_directory()) continue;
    const std::string name = entry.path().filename().string();
    const auto config = OpenModelConfig(entry.path().string());
    if (name == "Mixtral-8x7B" || name == "Qwen3-30B-A3B") {
      ExpectFault(config.status(), kInvalid, {"ForCausalLM is not supported"});
      continue;
    }
    ASSERT_TRUE(config.ok()) << config.status();
    const auto dummy = OpenModel(entry.path().string(), LoadFormat::kDummy);
    EXPECT_TRUE(dummy.ok()) << name << ": " << dummy.status();
  }
}

}  // namespace
}  // namespace lockstep

#include "model/checkpoint/gguf.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <limits>
#include <random>

#include "model/checkpoint/tensor_names.h"
#include "tests/checkpoint/gguf_builder.h"

namespace lockstep {
namespace {

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr int64_t kHidden = 64, kFfn = 96, kHeads = 4, kKvHeads = 2, kHeadDim = 16, kVocab = 40;

// Weights under their Hugging Face names and in their order; value = f(name, row, column).
float Value(const std::string& name, int64_t row, int64_t col) {
  return static_cast<float>(
      std::sin(static_cast<double>(std::hash<std::string>{}(name) % 1000 + row * 97 + col)));
}
std::vector<float> Values(const std::string& name, int64_t rows, int64_t cols) {
  std::vector<float> values(rows * cols);
  for (int64_t i = 0; i < rows * cols; ++i) values[i] = Value(name, i / cols, i % cols);
  return values;
}

// Rows of [heads * head_dim, cols] as llama.cpp's converter orders them: of each head, row i of the
// first half and row i of the second half become neighbours, over the first `rotary` rows.
std::vector<float> Permute(const std::vector<float>& rows, int64_t cols, int64_t rotary) {
  std::vector<float> out = rows;
  const auto num_heads = static_cast<int64_t>(rows.size()) / cols / kHeadDim;
  for (int64_t head = 0; head < num_heads; ++head) {
    for (int64_t half = 0; half < 2; ++half) {
      for (int64_t i = 0; i < rotary / 2; ++i) {
        const int64_t from = head * kHeadDim + half * (rotary / 2) + i;
        const int64_t to = head * kHeadDim + 2 * i + half;
        std::copy_n(rows.begin() + from * cols, cols, out.begin() + to * cols);
      }
    }
  }
  return out;
}

// A model of one layer.
GgufBuilder TinyGguf(const std::string& arch, int64_t rotary = kHeadDim, bool biases = false) {
  GgufBuilder g;
  g.Set("general.architecture", Str(arch));
  g.Set(arch + ".embedding_length", U32(kHidden));
  g.Set(arch + ".feed_forward_length", U32(kFfn));
  g.Set(arch + ".block_count", U32(1));
  g.Set(arch + ".attention.head_count", U32(kHeads));
  g.Set(arch + ".attention.head_count_kv", U32(kKvHeads));
  g.Set(arch + ".context_length", U32(128));
  g.Set(arch + ".attention.layer_norm_rms_epsilon", F32(1e-5f));
  g.Set(arch + ".rope.dimension_count", U32(static_cast<uint32_t>(rotary)));
  const auto add = [&](const std::string& name, const std::string& hf, int64_t rows, int64_t cols,
                       bool permuted = false) {
    std::vector<float> values = Values(hf, rows, cols);
    if (permuted && arch == "llama") {
      values = rows == 1 ? Permute(values, 1, rotary) : Permute(values, cols, rotary);
    }
    g.AddF32(name, rows == 1 ? std::vector<int64_t>{cols} : std::vector<int64_t>{rows, cols},
             values);
  };
  const auto layer = [](const char* suffix) { return LayerTensor(0, suffix); };
  add("token_embd.weight", kEmbedTokens, kVocab, kHidden);
  add("output_norm.weight", kFinalNorm, 1, kHidden);
  add("output.weight", kLmHead, kVocab, kHidden);
  add("blk.0.attn_norm.weight", layer(kInputNorm), 1, kHidden);
  add("blk.0.ffn_norm.weight", layer(kPostAttentionNorm), 1, kHidden);
  add("blk.0.attn_q.weight", layer(kQWeight), kHeads * kHeadDim, kHidden, true);
  add("blk.0.attn_k.weight", layer(kKWeight), kKvHeads * kHeadDim, kHidden, true);
  add("blk.0.attn_v.weight", layer(kVWeight), kKvHeads * kHeadDim, kHidden);
  add("blk.0.attn_output.weight", layer(kOWeight), kHidden, kHeads * kHeadDim);
  add("blk.0.ffn_gate.weight", layer(kGateWeight), kFfn, kHidden);
  add("blk.0.ffn_up.weight", layer(kUpWeight), kFfn, kHidden);
  add("blk.0.ffn_down.weight", layer(kDownWeight), kHidden, kFfn);
  if (biases) {
    add("blk.0.attn_q.bias", layer(kQBias), 1, kHeads * kHeadDim, true);
    add("blk.0.attn_k.bias", layer(kKBias), 1, kKvHeads * kHeadDim, true);
    add("blk.0.attn_v.bias", layer(kVBias), 1, kKvHeads * kHeadDim);
  }
  return g;
}

class GgufTest : public ::testing::Test {
 protected:
  std::string Write(const std::string& bytes) {
    WriteFile(folder_ / "tiny.gguf", bytes);
    return folder_ / "tiny.gguf";
  }
  absl::StatusOr<ModelSource> Open(const GgufBuilder& gguf) {
    return OpenModel(Write(gguf.Build()), LoadFormat::kAuto);
  }
  ModelConfig Config(const GgufBuilder& gguf) {
    const auto source = Open(gguf);
    EXPECT_TRUE(source.ok()) << source.status();
    return source.ok() ? source->config : ModelConfig();
  }
  void ExpectRefused(const GgufBuilder& gguf, const std::vector<std::string>& parts) {
    ExpectBytesRefused(gguf.Build(), parts);
  }
  void ExpectBytesRefused(const std::string& bytes, std::vector<std::string> parts) {
    parts.push_back(folder_ / "tiny.gguf");
    ExpectFault(OpenModel(Write(bytes), LoadFormat::kAuto).status(), kInvalid, parts);
  }
  // A tiny llama with one more metadata entry.
  GgufBuilder With(const std::string& key, const GgufValue& value) {
    GgufBuilder gguf = TinyGguf("llama");
    gguf.Set(key, value);
    return gguf;
  }

  TempFolder folder_;
};

// Every tensor and several rectangles of it against the Hugging Face original.
void ExpectOriginalValues(const ModelSource& source) {
  for (const TensorSpec& spec : RequiredTensors(source.config)) {
    const TensorInfo& info = *source.checkpoint->Find(spec.name);
    const int64_t num_rows = info.rows(), num_cols = info.cols();
    for (const Range rows : {Range{0, num_rows}, Range{num_rows / 3, num_rows}, Range{0, 1}}) {
      for (const Range cols : {Range{0, num_cols}, Range{5, num_cols - 3}, Range{7, 8}}) {
        const int64_t stride = cols.size() + 2;
        std::vector<float> out(rows.size() * stride);
        const auto status = source.checkpoint->Read(
            spec.name, rows, cols, {out.data(), DType::kF32, rows.size(), cols.size(), stride});
        ASSERT_TRUE(status.ok()) << status;
        for (int64_t r = rows.begin; r < rows.end; ++r) {
          for (int64_t c = cols.begin; c < cols.end; ++c) {
            ASSERT_EQ(out[(r - rows.begin) * stride + c - cols.begin], Value(spec.name, r, c))
                << spec.name << " row " << r << " column " << c;
          }
        }
      }
    }
  }
}

TEST_F(GgufTest, LlamaRowsComeBackInHuggingFaceOrder) {
  const auto source = Open(TinyGguf("llama", kHeadDim, /*biases=*/true));
  ASSERT_TRUE(source.ok()) << source.status();
  EXPECT_TRUE(source->config.qkv_bias);
  ExpectOriginalValues(*source);
}

TEST_F(GgufTest, TensorUnderBothNamesIsRefused) {
  GgufBuilder gguf = TinyGguf("llama");
  gguf.AddF32(kFinalNorm, {kHidden}, std::vector<float>(kHidden, 1.0f));
  ExpectRefused(gguf, {"tensor output_norm.weight is also there as model.norm.weight"});
}

TEST_F(GgufTest, PartialRotationPermutesTheRotatedRowsOnly) {
  const auto source = Open(TinyGguf("llama", /*rotary=*/6, /*biases=*/true));
  ASSERT_TRUE(source.ok()) << source.status();
  EXPECT_EQ(static_cast<int64_t>(kHeadDim * source->config.rope.partial_rotary_factor), 6);
  ExpectOriginalValues(*source);
}

TEST_F(GgufTest, Qwen2IsNotPermuted) {
  const auto source = Open(TinyGguf("qwen2", kHeadDim, /*biases=*/true));
  ASSERT_TRUE(source.ok()) << source.status();
  EXPECT_EQ(source->config.model_type, "qwen2");
  ExpectOriginalValues(*source);
  ExpectFault(Open(TinyGguf("qwen2")).status(), absl::StatusCode::kNotFound,
              {"model.layers.0.self_attn.q_proj.bias"});
}

TEST_F(GgufTest, QuantisedRowsAreCroppedToTheColumns) {
  // Q8_0 with d = 1: the values are the bytes.
  GgufBuilder gguf = TinyGguf("llama");
  std::string bytes;
  for (int64_t i = 0; i < kHidden * kFfn; ++i) {
    if (i % 32 == 0) bytes += LittleEndian(0x3c00, 2);
    bytes.push_back(static_cast<char>(i * 7 % 251 - 125));
  }
  gguf.Add("blk.0.ffn_down.weight", {kHidden, kFfn}, 8, bytes);
  const auto source = Open(gguf);
  ASSERT_TRUE(source.ok()) << source.status();
  const std::string name = LayerTensor(0, kDownWeight);
  EXPECT_EQ(source->checkpoint->Find(name)->stored_type, "Q8_0");
  EXPECT_EQ(source->checkpoint->Find(name)->stored_bytes, static_cast<int64_t>(bytes.size()));
  for (const Range cols : {Range{0, 96}, Range{31, 33}, Range{32, 64}, Range{40, 50}}) {
    std::vector<BF16> out(20 * cols.size());
    ASSERT_TRUE(
        source->checkpoint
            ->Read(name, {10, 30}, cols, {out.data(), DType::kBF16, 20, cols.size(), cols.size()})
            .ok());
    for (int64_t r = 10; r < 30; ++r) {
      for (int64_t c = cols.begin; c < cols.end; ++c) {
        const auto expected = static_cast<float>((r * kFfn + c) * 7 % 251 - 125);
        ASSERT_EQ(ToFloat(out[(r - 10) * cols.size() + c - cols.begin]), expected);
      }
    }
  }
}

TEST_F(GgufTest, ConfigFromMetadata) {
  GgufBuilder gguf = TinyGguf("llama");
  ModelConfig config = Config(gguf);
  EXPECT_EQ(config.model_type, "llama");
  EXPECT_EQ(config.hidden_size, kHidden);
  EXPECT_EQ(config.intermediate_size, kFfn);
  EXPECT_EQ(config.num_layers, 1);
  EXPECT_EQ(config.num_query_heads, kHeads);
  EXPECT_EQ(config.num_kv_heads, kKvHeads);
  EXPECT_EQ(config.head_dim, kHeadDim);
  EXPECT_EQ(config.vocab_size, kVocab);
  EXPECT_EQ(config.max_position_embeddings, 128);
  EXPECT_EQ(config.rms_norm_eps, static_cast<double>(1e-5f));
  EXPECT_EQ(config.rope.theta, 10000.0);
  EXPECT_EQ(config.dtype, DType::kF32);
  EXPECT_FALSE(config.tie_word_embeddings || config.qkv_bias || config.o_bias || config.mlp_bias);
  EXPECT_TRUE(config.eos_token_ids.empty());
  EXPECT_FALSE(config.bos_token_id.has_value());
  gguf.Set("llama.rope.freq_base", F32(500000.0f));
  gguf.Set("tokenizer.ggml.eos_token_id", U32(5));
  gguf.Set("tokenizer.ggml.eot_token_id", U32(9));
  gguf.Set("tokenizer.ggml.bos_token_id", U32(3));
  gguf.Remove("output.weight");
  config = Config(gguf);
  EXPECT_EQ(config.rope.theta, 500000.0);
  EXPECT_EQ(config.eos_token_ids, (std::vector<int32_t>{5, 9}));
  EXPECT_EQ(config.bos_token_id, 3);
  EXPECT_TRUE(config.tie_word_embeddings);
  EXPECT_EQ(OpenModelConfig(folder_ / "tiny.gguf")->vocab_size, kVocab);
}

TEST_F(GgufTest, VersionTwoIsTheSame) {
  GgufBuilder gguf = TinyGguf("llama");
  gguf.version = 2;
  EXPECT_EQ(Config(gguf).hidden_size, kHidden);
}

TEST_F(GgufTest, RopeScaling) {
  GgufBuilder gguf = With("llama.rope.scaling.type", Str("none"));
  EXPECT_EQ(Config(gguf).rope.type, RopeType::kPlain);
  gguf.Set("llama.rope.scaling.type", Str("linear"));
  gguf.Set("llama.rope.scaling.factor", F32(4));
  EXPECT_EQ(Config(gguf).rope.type, RopeType::kLinear);
  EXPECT_EQ(Config(gguf).rope.factor, 4.0);
  gguf.Unset("llama.rope.scaling.type");
  EXPECT_EQ(Config(gguf).rope.type, RopeType::kLinear) << "a factor alone";
  EXPECT_EQ(Config(With("llama.rope.scale_linear", F32(2))).rope.factor, 2.0);
  gguf.Set("llama.rope.scaling.type", Str("yarn"));
  gguf.Set("llama.rope.scaling.original_context_length", U32(32));
  RopeConfig rope = Config(gguf).rope;
  EXPECT_EQ(rope.type, RopeType::kYarn);
  EXPECT_EQ(rope.original_max_position_embeddings, 32);
  EXPECT_FALSE(rope.attention_factor.has_value());
  gguf.Set("llama.rope.scaling.attn_factor", F32(0.5f));
  EXPECT_NEAR(*Config(gguf).rope.attention_factor, 0.5 * (1 + 0.1 * std::log(4.0)), 1e-12);
  gguf.Set("llama.rope.scaling.type", Str("longrope"));
  ExpectRefused(gguf, {"llama.rope.scaling.type", "longrope", "yarn"});
}

TEST_F(GgufTest, FrequencyFactors) {
  GgufBuilder gguf = TinyGguf("llama");
  const std::vector<float> factors = {1, 1, 1, 2, 4, 8, 8, 8};
  gguf.AddF32("rope_freqs.weight", {8}, factors);
  EXPECT_EQ(Config(gguf).rope.freq_factors, factors);
  EXPECT_EQ(Config(gguf).rope.type, RopeType::kPlain);
  gguf.Set("llama.rope.scaling.factor", F32(4));
  ExpectRefused(gguf, {"rope_freqs.weight", "rope.scaling"});
  gguf.Unset("llama.rope.scaling.factor");
  gguf.AddF32("rope_freqs.weight", {7}, std::vector<float>(7, 1));
  ExpectRefused(gguf, {"rope_freqs.weight", "[8]", "[7]"});
  gguf.AddF32("rope_freqs.weight", {8}, std::vector<float>(8, 0));
  ExpectRefused(gguf, {"rope_freqs.weight", "0"});
  gguf.Remove("rope_freqs.weight");
  gguf.AddF32("rope_factors_long.weight", {8}, factors);
  ExpectRefused(gguf, {"rope_factors_long.weight", "longrope"});
}

TEST_F(GgufTest, WhatIsNotSupportedIsRefusedByName) {
  ExpectRefused(TinyGguf("gemma2"), {"gemma2", "llama and qwen2"});
  ExpectRefused(TinyGguf("qwen3"), {"qwen3", "llama and qwen2"});
  ExpectRefused(With("llama.expert_count", U32(8)), {"llama.expert_count", "experts"});
  ExpectRefused(With("llama.attention.sliding_window", U32(16)), {"attention.sliding_window"});
  ExpectRefused(With("llama.logit_scale", F32(2)), {"llama.logit_scale"});
  ExpectRefused(With("llama.attention.value_length", U32(8)), {"attention.value_length", "8"});
  ExpectRefused(With("split.count", U32(3)), {"3 files", "merge"});
  EXPECT_TRUE(Open(With("split.count", U32(1))).ok());
  GgufBuilder gguf = TinyGguf("llama");
  gguf.Add("blk.0.ffn_up.weight", {kFfn, kHidden}, 20, std::string(kFfn * 36, '\0'));
  ExpectRefused(gguf, {"model.layers.0.mlp.up_proj.weight", "IQ4_NL"});
}

TEST_F(GgufTest, MissingAndWrongMetadataIsNamed) {
  for (const char* key :
       {"embedding_length", "feed_forward_length", "block_count", "attention.head_count",
        "context_length", "attention.layer_norm_rms_epsilon"}) {
    GgufBuilder gguf = TinyGguf("llama");
    gguf.Unset(std::string("llama.") + key);
    ExpectRefused(gguf, {std::string("llama.") + key, "missing"});
    gguf.Set(std::string("llama.") + key, Str("many"));
    ExpectRefused(gguf, {std::string("llama.") + key, "many"});
  }
  GgufBuilder gguf = TinyGguf("llama");
  gguf.Unset("general.architecture");
  ExpectRefused(gguf, {"architecture"});
  ExpectRefused(With("llama.attention.head_count_kv", I32Array({2, 2})), {"head_count_kv"});
  ExpectRefused(With("llama.attention.head_count_kv", U32(3)), {"num_key_value_heads 3"});
  ExpectRefused(With("llama.block_count", U32(0)), {"num_hidden_layers", "0"});
  ExpectRefused(With("llama.attention.key_length", U32(32)), {"q_proj", "[128, 64]", "[64, 64]"});
  ExpectRefused(With("llama.rope.dimension_count", U32(18)), {"rope.dimension_count", "18", "16"});
  ExpectRefused(With("llama.rope.dimension_count", U32(5)), {"rope.dimension_count", "5"});
  ExpectRefused(With("tokenizer.ggml.tokens", StrArray(std::vector<std::string>(41, "x"))),
                {"tokenizer.ggml.tokens", "41", "40"});
  gguf = TinyGguf("llama");
  gguf.Remove("token_embd.weight");
  ExpectRefused(gguf, {"token_embd.weight"});
}

TEST_F(GgufTest, BrokenContainersAreRefused) {
  const GgufBuilder good = TinyGguf("llama");
  const std::string bytes = good.Build();
  ExpectBytesRefused("version https://git-lfs.github.com/spec/v1\n", {"Git LFS pointer"});
  ExpectBytesRefused("", {"empty"});
  ExpectBytesRefused("ELF and more bytes", {"GGUF"});
  ExpectBytesRefused("GGUF", {"short"});
  ExpectBytesRefused(bytes.substr(0, bytes.size() - 1),
                     {"short", std::to_string(bytes.size()), std::to_string(bytes.size() - 1)});
  const auto patched = [&](size_t at, const std::string& with) {
    return bytes.substr(0, at) + with + bytes.substr(at + with.size());
  };
  ExpectBytesRefused(patched(4, LittleEndian(1, 4)), {"version 1"});
  ExpectBytesRefused(patched(4, LittleEndian(4, 4)), {"version 4"});
  ExpectBytesRefused(patched(4, LittleEndian(3u << 24, 4)), {"big-endian"});
  ExpectBytesRefused(patched(8, LittleEndian(~uint64_t{0}, 8)), {"do not fit"});
  ExpectBytesRefused(patched(16, LittleEndian(uint64_t{1} << 40, 8)), {"do not fit"});
  ExpectBytesRefused(patched(24, LittleEndian(uint64_t{1} << 62, 8)), {"metadata key", "byte 24"});
  ExpectRefused(With("k", {8, LittleEndian(uint64_t{1} << 62, 8)}), {"string of", "key k"});

  ExpectRefused(With("k", {9, LittleEndian(4, 4) + LittleEndian(uint64_t{1} << 61, 8)}),
                {"array", "key k"});
  ExpectRefused(With("k", {9, LittleEndian(9, 4) + LittleEndian(1, 8) + std::string(12, '\0')}),
                {"arrays of arrays", "key k"});
  ExpectRefused(With("k", {9, LittleEndian(77, 4) + LittleEndian(1, 8)}), {"77", "key k"});
  ExpectRefused(With("k", {13, ""}), {"13", "key k"});
  ExpectRefused(With("k", {7, "\2"}), {"bool", "key k"});
  GgufBuilder twice = good;
  twice.metadata.push_back(twice.metadata[0]);
  ExpectRefused(twice, {"general.architecture", "twice"});
}

TEST_F(GgufTest, LongNamesAreRefusedAndNotPrinted) {
  const auto short_message = [&](const GgufBuilder& gguf, const std::vector<std::string>& parts) {
    const absl::Status status = Open(gguf).status();
    ExpectFault(status, kInvalid, parts);
    EXPECT_LT(status.message().size(), 700u) << status;
  };
  EXPECT_TRUE(Open(With(std::string(65535, 'k'), U32(1))).ok());
  GgufBuilder key = TinyGguf("llama");
  key.metadata.insert(key.metadata.begin(), {std::string(65536, 'k'), U32(1)});
  short_message(key, {"metadata key at byte 24", "65536", "65535"});
  short_message(With(std::string(65535, 'k'), {7, "\2"}), {"bool", "key kkk", "65535 bytes"});

  GgufBuilder name = TinyGguf("llama");
  name.Add(std::string(1024, 'n'), {4}, 0, std::string(16, '\0'));
  EXPECT_TRUE(Open(name).ok());
  name.Add(std::string(1025, 'n'), {4}, 0, std::string(16, '\0'));
  short_message(name, {"tensor name at byte ", "1025", "1024"});
  name = TinyGguf("llama");
  name.Add(std::string(1000, 'n'), {}, 0, "");
  short_message(name, {"tensor nnn", "1000 bytes", "0 dims"});
  short_message(With("general.architecture", Str(std::string(5000, 'a'))),
                {"architecture", "aaa", "5000 bytes"});
  short_message(With("general.alignment", Str(std::string(5000, 'a'))), {"general.alignment"});
  short_message(With("split.count", Str(std::string(5000, 'a'))), {"split model"});
}

TEST_F(GgufTest, BrokenDirectoriesAreRefused) {
  const GgufBuilder good = TinyGguf("llama");
  const auto extra = [&](const std::vector<int64_t>& shape, uint32_t type) {
    GgufBuilder gguf = good;
    gguf.Add("extra", shape, type, std::string(64, '\0'));
    return gguf;
  };
  EXPECT_TRUE(Open(extra({4, 4}, 0)).ok());
  ExpectRefused(extra({}, 0), {"tensor extra", "0 dims"});
  ExpectRefused(extra({1, 1, 1, 1, 1}, 0), {"tensor extra", "5 dims"});
  ExpectRefused(extra({0, 4}, 0), {"tensor extra", "0 elements"});
  ExpectRefused(extra({int64_t{1} << 40, int64_t{1} << 40}, 0), {"tensor extra", "out of range"});
  ExpectRefused(extra({2, 33}, 8), {"tensor extra", "33", "Q8_0"});
  ExpectRefused(extra({1000, 1000}, 0), {"tensor extra", "short"});
  GgufBuilder twice = good;
  twice.tensors.push_back(twice.tensors[0]);
  ExpectRefused(twice, {"token_embd.weight", "twice"});
  GgufBuilder overlap = good;
  for (size_t i = 0; i < overlap.tensors.size(); ++i) overlap.offsets.push_back(0);
  ExpectRefused(overlap, {"overlap"});
  GgufBuilder crooked = good;
  for (size_t i = 0; i < crooked.tensors.size(); ++i) {
    crooked.offsets.push_back(static_cast<int64_t>(i) * 100000 + 4);
  }
  ExpectRefused(crooked, {"alignment 32"});
  ExpectRefused(With("general.alignment", U32(0)), {"general.alignment"});
  GgufBuilder wide = With("general.alignment", U32(128));
  wide.alignment = 128;
  const auto source = Open(wide);
  ASSERT_TRUE(source.ok()) << source.status();
  ExpectOriginalValues(*source);
}

// A tensor of 36 values is the last: 16 bytes behind a multiple of 32.
TEST_F(GgufTest, BytesAfterThePaddingAreRefused) {
  for (const uint32_t alignment : {32u, 128u}) {
    GgufBuilder gguf = With("general.alignment", U32(alignment));
    gguf.alignment = alignment;
    gguf.AddF32("extra", {36}, std::vector<float>(36, 1.0f));
    const std::string exact = gguf.Build();
    const std::string padded(exact + std::string(alignment - 144 % alignment, '\0'));
    ASSERT_EQ(padded.size() % alignment, 0u);
    for (const std::string& bytes : {exact, exact + '\0', padded}) {
      EXPECT_TRUE(OpenModel(Write(bytes), LoadFormat::kAuto).ok()) << bytes.size();
    }
    for (const size_t surplus : {size_t{1}, size_t{8}, size_t{100000}}) {
      ExpectBytesRefused(
          padded + std::string(surplus, '\0'),
          {"too long", std::to_string(padded.size()), std::to_string(padded.size() + surplus)});
    }
  }
  GgufBuilder gguf = TinyGguf("llama");
  gguf.Add("extra", {64}, 99, std::string(100, '\0'));
  EXPECT_TRUE(Open(gguf).ok()) << "a type whose size is not known, in a tensor nobody reads";
}

TEST_F(GgufTest, FilesAreRecognisedByNameOrContent) {
  const std::string bytes = TinyGguf("llama").Build();
  WriteFile(folder_ / "model.bin", bytes);
  EXPECT_TRUE(OpenModel(folder_ / "model.bin", LoadFormat::kAuto).ok());
  const auto dummy = OpenModel(folder_ / "model.bin", LoadFormat::kDummy);
  ASSERT_TRUE(dummy.ok()) << dummy.status();
  EXPECT_EQ(dummy->checkpoint->Find(kEmbedTokens)->stored_type, "dummy");
}

TEST_F(GgufTest, OverflowAndCutFilesAreReported) {
  GgufBuilder gguf = TinyGguf("llama");
  std::vector<float> values(kFfn * kHidden, 1.0f);
  values[100] = 1e6f;
  gguf.AddF32("blk.0.ffn_up.weight", {kFfn, kHidden}, values);
  const auto source = Open(gguf);
  ASSERT_TRUE(source.ok()) << source.status();
  std::vector<float> out(kFfn * kHidden);
  const auto read = [&](DType dtype) {
    return source->checkpoint->Read(LayerTensor(0, kUpWeight), {0, kFfn}, {0, kHidden},
                                    {out.data(), dtype, kFfn, kHidden, kHidden});
  };
  EXPECT_TRUE(read(DType::kBF16).ok());
  ExpectFault(read(DType::kF16), absl::StatusCode::kFailedPrecondition,
              {"model.layers.0.mlp.up_proj.weight", "65504"});
  ASSERT_EQ(truncate((folder_ / "tiny.gguf").c_str(), 3000), 0);
  ExpectFault(read(DType::kF32), absl::StatusCode::kFailedPrecondition,
              {"tiny.gguf", "shorter now"});
}

TEST_F(GgufTest, TokenizerAndChatTemplate) {
  GgufBuilder gguf = TinyGguf("llama");
  ExpectFault(ReadGgufText(Write(gguf.Build())).status(), absl::StatusCode::kNotFound,
              {"tokenizer.ggml.model"});
  gguf.Set("tokenizer.ggml.model", Str("gpt2"));
  gguf.Set("tokenizer.ggml.pre", Str("smollm"));
  gguf.Set("tokenizer.ggml.tokens", StrArray({"a", "b", "<s>", "</s>", std::string("\xff\0x", 3)}));
  gguf.Set("tokenizer.ggml.merges", StrArray({"a b"}));
  gguf.Set("tokenizer.ggml.scores", F32Array({0.5f, -1, 0, 0, 0}));
  gguf.Set("tokenizer.ggml.token_type", I32Array({1, 1, 3, 3, 6}));
  gguf.Set("tokenizer.ggml.bos_token_id", U32(2));
  gguf.Set("tokenizer.ggml.eos_token_id", U32(3));
  gguf.Set("tokenizer.ggml.unknown_token_id", U32(0));
  gguf.Set("tokenizer.ggml.add_bos_token", Bool(true));
  gguf.Set("tokenizer.ggml.add_space_prefix", Bool(false));
  gguf.Set("tokenizer.chat_template", Str("{{ messages }}"));
  const auto text = ReadGgufText(Write(gguf.Build()));
  ASSERT_TRUE(text.ok()) << text.status();
  EXPECT_EQ(text->vocab.model, "gpt2");
  EXPECT_EQ(text->vocab.pre, "smollm");
  ASSERT_EQ(text->vocab.tokens.size(), 5u);
  EXPECT_EQ(text->vocab.tokens[4], std::string("\xff\0x", 3)) << "any bytes";
  EXPECT_EQ(text->vocab.merges, (std::vector<std::string>{"a b"}));
  EXPECT_EQ(text->vocab.scores, (std::vector<float>{0.5f, -1, 0, 0, 0}));
  EXPECT_EQ(text->vocab.token_types, (std::vector<int32_t>{1, 1, 3, 3, 6}));
  EXPECT_EQ(text->vocab.bos_token_id, 2);
  EXPECT_EQ(text->vocab.eos_token_id, 3);
  EXPECT_EQ(text->vocab.unk_token_id, 0);
  EXPECT_FALSE(text->vocab.pad_token_id.has_value());
  EXPECT_EQ(text->vocab.add_bos_token, true);
  EXPECT_FALSE(text->vocab.add_eos_token.has_value());
  EXPECT_EQ(text->vocab.add_space_prefix, false);
  EXPECT_EQ(text->chat_template, "{{ messages }}");
  EXPECT_EQ(text->bos_token, "<s>");
  EXPECT_EQ(text->eos_token, "</s>");
  gguf.Set("tokenizer.ggml.tokens", I32Array({1}));
  ExpectFault(ReadGgufText(Write(gguf.Build())).status(), kInvalid, {"tokenizer.ggml.tokens"});
}

// Whatever bytes are cut or changed: an error or a model that can be read, never a crash.
TEST_F(GgufTest, RandomDamageNeverCrashes) {
  GgufBuilder gguf = TinyGguf("llama", 6, true);
  gguf.Set("tokenizer.ggml.model", Str("gpt2"));
  gguf.Set("tokenizer.ggml.tokens", StrArray({"a", "b"}));
  const std::string good = gguf.Build();
  const size_t directory_bytes = good.find("blk.0.attn_v.bias") + 64;
  std::mt19937 random(1);
  int opened = 0;
  for (int round = 0; round < 1000; ++round) {
    std::string bytes = good;
    if (round % 4 == 0) bytes.resize(random() % directory_bytes);
    for (int flips = round % 3; flips > 0 && !bytes.empty(); --flips) {
      bytes[random() % std::min(bytes.size(), directory_bytes)] ^=
          static_cast<char>(1 << random() % 8);
    }
    const auto source = OpenModel(Write(bytes), LoadFormat::kAuto);
    ReadGgufText(folder_ / "tiny.gguf").status().IgnoreError();
    if (!source.ok()) continue;
    ++opened;
    for (const std::string& name : source->checkpoint->Names()) {
      const TensorInfo& info = *source->checkpoint->Find(name);
      if (!info.readable || info.shape.size() > 2) continue;
      std::vector<float> out(info.rows() * info.cols());
      source->checkpoint
          ->Read(name, {0, info.rows()}, {0, info.cols()},
                 {out.data(), DType::kF32, info.rows(), info.cols(), info.cols()})
          .IgnoreError();
    }
  }
  EXPECT_GT(opened, 50) << "some flips do no harm";
}

}  // namespace
}  // namespace lockstep

#include "model/checkpoint/gguf.h"

#include <cmath>
#include <limits>

#include "model/checkpoint/gguf_file.h"
#include "model/checkpoint/shorten.h"
#include "model/checkpoint/store_values.h"
#include "model/checkpoint/tensor_names.h"
#include "model/json_fields.h"

namespace lockstep {

namespace {

constexpr int64_t kMaxInt = int64_t{1} << 53;  // ParseModelConfig has the real bounds

// "blk.3.attn_q.weight" -> "model.layers.3.self_attn.q_proj.weight"; a name that is not in the
// table stays as it is.
std::string HuggingFaceName(const std::string& name) {
  static const std::map<std::string, std::string> kTop = {{"token_embd.weight", kEmbedTokens},
                                                          {"output_norm.weight", kFinalNorm},
                                                          {"output.weight", kLmHead}};
  static const std::map<std::string, std::string> kLayer = {
      {"attn_norm", "input_layernorm"},    {"ffn_norm", "post_attention_layernorm"},
      {"attn_q", "self_attn.q_proj"},      {"attn_k", "self_attn.k_proj"},
      {"attn_v", "self_attn.v_proj"},      {"attn_output", "self_attn.o_proj"},
      {"attn_q_norm", "self_attn.q_norm"}, {"attn_k_norm", "self_attn.k_norm"},
      {"ffn_gate", "mlp.gate_proj"},       {"ffn_up", "mlp.up_proj"},
      {"ffn_down", "mlp.down_proj"}};
  if (const auto it = kTop.find(name); it != kTop.end()) return it->second;
  const size_t number = 4;  // after "blk."
  const size_t dot = name.find('.', number);
  const size_t last = name.rfind('.');
  if (name.compare(0, number, "blk.") != 0 || dot == std::string::npos || last <= dot) return name;
  const auto it = kLayer.find(name.substr(dot + 1, last - dot - 1));
  if (it == kLayer.end()) return name;
  return "model.layers." + name.substr(number, dot - number) + "." + it->second + name.substr(last);
}

// GGUF stores the rows of llama's Q and K heads for rotation of neighbours (2i, 2i + 1), Hugging
// Face for rotation of halves (i, i + rotary_dims / 2). Rows past the rotated ones stay in place.
struct HeadLayout {
  int64_t head_dim = 0;  // 0: rows are stored as Hugging Face orders them
  int64_t rotary_dims = 0;

  int64_t HuggingFaceRow(int64_t stored_row) const {
    if (head_dim == 0) return stored_row;
    const int64_t d = stored_row % head_dim;
    if (d >= rotary_dims) return stored_row;
    return stored_row - d + d % 2 * (rotary_dims / 2) + d / 2;
  }
  // The stored rows among which the given ones are: whole heads.
  Range Cover(Range rows) const {
    if (head_dim == 0 || rows.size() == 0) return rows;
    return {rows.begin / head_dim * head_dim, (rows.end + head_dim - 1) / head_dim * head_dim};
  }
};

int64_t RotaryDims(const ModelConfig& config) {
  return static_cast<int64_t>(config.head_dim * config.rope.partial_rotary_factor);
}

class GgufCheckpoint : public Checkpoint {
 public:
  GgufCheckpoint(GgufFile gguf, HeadLayout layout) : file_(std::move(gguf.file)) {
    for (auto& [stored_name, tensor] : gguf.tensors) {
      const std::string name = HuggingFaceName(stored_name);
      Entry entry;
      entry.info = {tensor.shape, GgufTypeName(tensor.type_id), tensor.size_bytes,
                    tensor.type != nullptr, tensor.offset};
      if (name.find("q_proj.") != std::string::npos || name.find("k_proj.") != std::string::npos) {
        entry.layout = layout;
      }
      entry.stored_name = stored_name;
      entry.tensor = std::move(tensor);
      entries_[name] = std::move(entry);
    }
  }

  std::string description() const override { return file_->path(); }

  const TensorInfo* Find(const std::string& name) const override {
    const auto it = entries_.find(name);
    return it == entries_.end() ? nullptr : &it->second.info;
  }

  std::vector<std::string> Names() const override {
    std::vector<std::string> names;
    for (const auto& [name, entry] : entries_) names.push_back(name);
    return names;
  }

  absl::Status Read(const std::string& name, Range rows, Range cols,
                    const MatrixView& dst) const override {
    const auto it = entries_.find(name);
    if (it == entries_.end()) {
      return absl::NotFoundError(absl::StrFormat("%s: no tensor %s", description(), name));
    }
    const Entry& entry = it->second;
    if (!entry.info.readable || entry.info.shape.size() > 2) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "%s: tensor %s (%s): type %s, %d dims: cannot be read as a weight matrix", description(),
          name, entry.stored_name, entry.info.stored_type, entry.info.shape.size()));
    }
    LOCKSTEP_CHECK(rows.begin >= 0 && rows.end <= entry.info.rows() && cols.begin >= 0 &&
                   cols.end <= entry.info.cols());
    LOCKSTEP_CHECK(dst.rows == rows.size() && dst.cols == cols.size());
    // A bias is one row here; its elements are permuted as the rows of the weight are.
    const bool is_bias = entry.info.shape.size() == 1 && entry.layout.head_dim > 0;
    return is_bias ? ReadBias(name, entry, cols, dst) : ReadMatrix(name, entry, rows, cols, dst);
  }

 private:
  struct Entry {
    TensorInfo info;
    GgufTensor tensor;
    HeadLayout layout;
    std::string stored_name;
  };

  // Stored row `row` of the tensor, values of the blocks that cover `cols`, to fn.
  absl::Status ForRows(
      const Entry& entry, Range stored_rows, Range cols,
      const std::function<absl::Status(int64_t row, const float* values)>& fn) const {
    const GgufType& type = *entry.tensor.type;
    const int64_t row_bytes = entry.info.cols() / type.block_values * type.block_bytes;
    const Range blocks = {cols.begin / type.block_values,
                          (cols.end + type.block_values - 1) / type.block_values};
    std::vector<float> values(blocks.size() * type.block_values);
    return file_->ReadRows(
        entry.tensor.offset, row_bytes, stored_rows,
        {blocks.begin * type.block_bytes, blocks.end * type.block_bytes},
        [&](int64_t row, const uint8_t* bytes) {
          type.dequantize(bytes, blocks.size(), values.data());
          return fn(row, values.data() + cols.begin - blocks.begin * type.block_values);
        });
  }

  absl::Status Overflow(const std::string& name) const {
    return absl::FailedPreconditionError(absl::StrFormat(
        "%s: tensor %s: a value above 65504 does not fit float16; use bfloat16 or float32",
        description(), name));
  }

  absl::Status ReadMatrix(const std::string& name, const Entry& entry, Range rows, Range cols,
                          const MatrixView& dst) const {
    if (cols.size() == 0) return absl::OkStatus();
    return ForRows(entry, entry.layout.Cover(rows), cols, [&](int64_t stored, const float* values) {
      const int64_t row = entry.layout.HuggingFaceRow(stored);
      if (row < rows.begin || row >= rows.end) return absl::OkStatus();
      auto* out =
          static_cast<uint8_t*>(dst.data) + (row - rows.begin) * dst.stride * SizeOf(dst.dtype);
      return StoreValues(DType::kF32, values, dst.dtype, out, cols.size()) ? absl::OkStatus()
                                                                           : Overflow(name);
    });
  }

  absl::Status ReadBias(const std::string& name, const Entry& entry, Range cols,
                        const MatrixView& dst) const {
    if (dst.rows == 0 || cols.size() == 0) return absl::OkStatus();
    const Range stored = entry.layout.Cover(cols);
    std::vector<float> ordered(cols.size());
    LOCKSTEP_RETURN_IF_ERROR(ForRows(entry, {0, 1}, stored, [&](int64_t, const float* values) {
      for (int64_t i = stored.begin; i < stored.end; ++i) {
        const int64_t at = entry.layout.HuggingFaceRow(i);
        if (at >= cols.begin && at < cols.end) ordered[at - cols.begin] = values[i - stored.begin];
      }
      return absl::OkStatus();
    }));
    return StoreValues(DType::kF32, ordered.data(), dst.dtype, dst.data, cols.size())
               ? absl::OkStatus()
               : Overflow(name);
  }

  std::unique_ptr<CheckedFile> file_;
  std::map<std::string, Entry> entries_;
};

// Reads the keys of one architecture, "llama.block_count", into a config.json of the same meaning:
// so both spellings pass the same checks.
class ConfigReader {
 public:
  explicit ConfigReader(const GgufFile& gguf)
      : gguf_(gguf), fields_(gguf.metadata, gguf.file->path()) {}

  absl::StatusOr<ModelConfig> Read() {
    arch_ = fields_.String("general.architecture").value_or("");
    if (fields_.status().ok() && arch_ != "llama" && arch_ != "qwen2") {
      fields_.Fail(absl::StrFormat(
          "GGUF architecture \"%s\" is not supported; supported are llama and qwen2",
          Shortened(arch_)));
    }
    if (!fields_.status().ok()) return fields_.status();
    RefuseUnsupported();
    ReadSizes();
    ReadRope();
    ReadSpecialIds();
    if (!fields_.status().ok()) return fields_.status();
    LOCKSTEP_ASSIGN_OR_RETURN(ModelConfig config, ParseModelConfig(json_, fields_.where()));
    SetFromTensors(config);
    LOCKSTEP_RETURN_IF_ERROR(SetRotaryDims(config));
    LOCKSTEP_RETURN_IF_ERROR(ReadFrequencyFactors(config));
    return config;
  }

 private:
  std::string Key(const char* name) const { return arch_ + "." + name; }
  bool HasTensor(const char* name) const { return gguf_.tensors.contains(name); }

  void RefuseUnsupported() {
    if (fields_.Int(Key("expert_count").c_str(), 0, kMaxInt).value_or(0) > 0) {
      fields_.Fail(Key("expert_count") + " is set: mixtures of experts are not supported");
    }
    for (const char* name :
         {"attention.sliding_window", "attention.scale", "logit_scale", "attn_logit_softcapping",
          "final_logit_softcapping", "attention.clamp_kqv", "rope.scaling.yarn_log_multiplier"}) {
      if (fields_.Double(Key(name).c_str(), std::numeric_limits<double>::lowest()).value_or(0) !=
          0) {
        fields_.Fail(Key(name) + " is set: this model feature is not supported");
      }
    }
    for (const char* name : {"rope_factors_long.weight", "rope_factors_short.weight"}) {
      if (HasTensor(name)) {
        fields_.Fail(
            absl::StrFormat("tensor %s: rope type longrope is not supported", Shortened(name)));
      }
    }
  }

  int64_t Size(const char* name) { return fields_.RequiredInt(Key(name).c_str(), 0, kMaxInt); }

  void ReadSizes() {
    json_ = {{"model_type", arch_}};
    json_["hidden_size"] = Size("embedding_length");
    json_["intermediate_size"] = Size("feed_forward_length");
    json_["num_hidden_layers"] = Size("block_count");
    json_["num_attention_heads"] = Size("attention.head_count");
    json_["max_position_embeddings"] = Size("context_length");
    json_["rms_norm_eps"] =
        fields_.RequiredDouble(Key("attention.layer_norm_rms_epsilon").c_str(), 0.0, 1.0);
    json_["num_key_value_heads"] = fields_.Int(Key("attention.head_count_kv").c_str(), 0, kMaxInt)
                                       .value_or(json_["num_attention_heads"].get<int64_t>());
    const auto key_length = fields_.Int(Key("attention.key_length").c_str(), 0, kMaxInt);
    const auto value_length = fields_.Int(Key("attention.value_length").c_str(), 0, kMaxInt);
    if (key_length) json_["head_dim"] = *key_length;
    if (value_length && key_length != value_length) {
      fields_.Fail(absl::StrFormat("%s %d is not %s %d: not supported",
                                   Key("attention.value_length"), *value_length,
                                   Key("attention.key_length"), key_length.value_or(0)));
    }
    const auto embedding = gguf_.tensors.find("token_embd.weight");
    if (embedding == gguf_.tensors.end())
      return fields_.Fail("tensor token_embd.weight is missing");
    json_["vocab_size"] = embedding->second.shape[0];
    const auto tokens = gguf_.metadata.find("tokenizer.ggml.tokens");
    if (tokens != gguf_.metadata.end() && tokens->is_array() &&
        static_cast<int64_t>(tokens->size()) > embedding->second.shape[0]) {
      fields_.Fail(
          absl::StrFormat("tokenizer.ggml.tokens has %d tokens, token_embd.weight only %d rows",
                          tokens->size(), embedding->second.shape[0]));
    }
  }

  void ReadRope() {
    rotary_dims_ = fields_.Int(Key("rope.dimension_count").c_str(), 0, kMaxInt);
    json_["rope_theta"] = fields_.Double(Key("rope.freq_base").c_str(), 1e-3).value_or(10000.0);
    const double legacy_factor = fields_.Double(Key("rope.scale_linear").c_str(), 0.0).value_or(0);
    const double factor =
        fields_.Double(Key("rope.scaling.factor").c_str(), 0.0).value_or(legacy_factor);
    // A factor alone means linear scaling; 0 and 1 both mean no scaling.
    const std::string type = fields_.String(Key("rope.scaling.type").c_str()).value_or("linear");
    if (type == "none" || (type == "linear" && (factor == 0 || factor == 1))) return;
    if (type != "linear" && type != "yarn") {
      return fields_.Fail(
          absl::StrFormat("%s: rope type %s is not supported; supported are none, linear, yarn",
                          Key("rope.scaling.type"), Shortened(type)));
    }
    Json& rope = json_["rope_scaling"];
    rope = {{"rope_type", type}, {"factor", factor}};
    if (type == "linear") return;
    const auto copy = [&](const char* from, const char* to) {
      if (const auto value = fields_.Double(Key(from).c_str(), 0.0)) rope[to] = *value;
    };
    copy("rope.scaling.original_context_length", "original_max_position_embeddings");
    copy("rope.scaling.yarn_beta_fast", "beta_fast");
    copy("rope.scaling.yarn_beta_slow", "beta_slow");
    if (fields_.Double(Key("rope.scaling.yarn_ext_factor").c_str(), -1e9).value_or(1.0) != 1.0) {
      fields_.Fail(Key("rope.scaling.yarn_ext_factor") + " other than 1 is not supported");
    }
    for (const char* name : {"rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"}) {
      // The file's number multiplies YaRN's own factor; Hugging Face's replaces it.
      const double value = fields_.Double(Key(name).c_str(), 1e-6).value_or(1.0);
      if (value != 1.0) rope["attention_factor"] = value * (1.0 + 0.1 * std::log(factor));
    }
  }

  void ReadSpecialIds() {
    json_["eos_token_id"] = Json::array();
    for (const char* key : {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"}) {
      for (const int32_t id : fields_.TokenIds(key)) json_["eos_token_id"].push_back(id);
    }
    json_["bos_token_id"] = fields_.TokenIds("tokenizer.ggml.bos_token_id");
  }

  // What config.json states and GGUF leaves to be seen from the tensors.
  void SetFromTensors(ModelConfig& config) const {
    config.tie_word_embeddings = !HasTensor("output.weight");
    config.qkv_bias = config.qkv_bias || HasTensor("blk.0.attn_q.bias");
    config.o_bias = HasTensor("blk.0.attn_output.bias");
    config.mlp_bias = HasTensor("blk.0.ffn_up.bias");
    const auto weight = gguf_.tensors.find("blk.0.attn_q.weight");
    const std::string stored =
        weight == gguf_.tensors.end() ? "" : GgufTypeName(weight->second.type_id);
    if (stored == "F32") config.dtype = DType::kF32;
    if (stored == "F16") config.dtype = DType::kF16;
  }

  absl::Status Fault(const std::string& message) const {
    return absl::InvalidArgumentError(fields_.where() + ": " + message);
  }

  // rope.dimension_count, as the share of the head that config.json would state.
  absl::Status SetRotaryDims(ModelConfig& config) const {
    const int64_t rotary = rotary_dims_.value_or(config.head_dim);
    if (rotary < 2 || rotary > config.head_dim || rotary % 2 != 0) {
      return Fault(absl::StrFormat("%s %d must be even and from 2 to head_dim %d",
                                   Key("rope.dimension_count"), rotary, config.head_dim));
    }
    double& share = config.rope.partial_rotary_factor;
    share = static_cast<double>(rotary) / static_cast<double>(config.head_dim);
    // The product is truncated where it is used: it must not come out just below.
    while (RotaryDims(config) < rotary) share = std::nextafter(share, 2);
    return absl::OkStatus();
  }

  absl::Status ReadFrequencyFactors(ModelConfig& config) const {
    const auto it = gguf_.tensors.find("rope_freqs.weight");
    if (it == gguf_.tensors.end()) return absl::OkStatus();
    const GgufTensor& tensor = it->second;
    const int64_t pairs = RotaryDims(config) / 2;
    if (tensor.type_id != 0 || tensor.shape != std::vector<int64_t>{pairs}) {
      return Fault(absl::StrFormat("tensor rope_freqs.weight: expected F32 [%d], found %s [%d]",
                                   pairs, GgufTypeName(tensor.type_id), tensor.shape.back()));
    }
    if (config.rope.type != RopeType::kPlain) {
      return Fault("tensor rope_freqs.weight together with " + Key("rope.scaling.type") +
                   " is not supported");
    }
    std::vector<float> factors(pairs);
    LOCKSTEP_RETURN_IF_ERROR(gguf_.file->ReadAt(tensor.offset, tensor.size_bytes, factors.data()));
    for (const float factor : factors) {
      if (!(factor > 0 && factor < HUGE_VALF)) {
        return Fault(absl::StrFormat("tensor rope_freqs.weight holds %g", factor));
      }
    }
    config.rope.freq_factors = std::move(factors);
    return absl::OkStatus();
  }

  const GgufFile& gguf_;
  JsonFields fields_;
  std::string arch_;
  Json json_;
  std::optional<int64_t> rotary_dims_;
};

std::vector<double> Numbers(JsonFields& fields, const Json& metadata, const char* key) {
  std::vector<double> numbers;
  const auto it = metadata.find(key);
  if (it == metadata.end()) return numbers;
  bool good = it->is_array();
  if (good) {
    for (const Json& item : *it) {
      good = good && item.is_number();
      if (good) numbers.push_back(item.get<double>());
    }
  }
  if (!good) fields.Fail(absl::StrFormat("%s must be a list of numbers", key));
  return numbers;
}

// A tensor may lie under GGUF's name or under Hugging Face's, but not under both: of two spans for
// one tensor, neither is to be believed.
absl::Status CheckNames(const GgufFile& gguf, const std::string& path) {
  for (const auto& [stored_name, tensor] : gguf.tensors) {
    const std::string name = HuggingFaceName(stored_name);
    if (name != stored_name && gguf.tensors.contains(name)) {
      return absl::InvalidArgumentError(absl::StrFormat("%s: tensor %s is also there as %s", path,
                                                        Shortened(stored_name), Shortened(name)));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<GgufModel> OpenGguf(const std::string& path) {
  LOCKSTEP_ASSIGN_OR_RETURN(GgufFile gguf, GgufFile::Open(path));
  LOCKSTEP_RETURN_IF_ERROR(CheckNames(gguf, path));
  GgufModel model;
  LOCKSTEP_ASSIGN_OR_RETURN(model.config, ConfigReader(gguf).Read());
  HeadLayout layout;
  if (model.config.model_type == "llama") {
    layout = {model.config.head_dim, RotaryDims(model.config)};
  }
  model.metadata = Json::object();
  for (const auto& [key, value] : gguf.metadata.items()) {
    if (!key.starts_with("tokenizer.")) model.metadata[key] = value;
  }
  model.checkpoint = std::make_unique<GgufCheckpoint>(std::move(gguf), layout);
  return model;
}

absl::StatusOr<GgufText> ReadGgufText(const std::string& path) {
  LOCKSTEP_ASSIGN_OR_RETURN(const GgufFile gguf, GgufFile::Open(path));
  JsonFields fields(gguf.metadata, path);
  GgufText text;
  GgufVocab& vocab = text.vocab;
  if (!fields.Has("tokenizer.ggml.model")) {
    return absl::NotFoundError(path + ": carries no tokenizer (tokenizer.ggml.model)");
  }
  vocab.model = fields.String("tokenizer.ggml.model").value_or("");
  vocab.pre = fields.String("tokenizer.ggml.pre").value_or("");
  vocab.tokens = fields.Strings("tokenizer.ggml.tokens");
  vocab.merges = fields.Strings("tokenizer.ggml.merges");
  for (const double score : Numbers(fields, gguf.metadata, "tokenizer.ggml.scores")) {
    vocab.scores.push_back(static_cast<float>(score));
  }
  for (const double type : Numbers(fields, gguf.metadata, "tokenizer.ggml.token_type")) {
    vocab.token_types.push_back(type >= 0 && type < 100 ? static_cast<int32_t>(type) : -1);
  }
  const auto id = [&](const char* key) -> std::optional<int32_t> {
    const std::vector<int32_t> ids = fields.TokenIds(key);
    return ids.empty() ? std::nullopt : std::optional<int32_t>(ids[0]);
  };
  vocab.bos_token_id = id("tokenizer.ggml.bos_token_id");
  vocab.eos_token_id = id("tokenizer.ggml.eos_token_id");
  vocab.unk_token_id = id("tokenizer.ggml.unknown_token_id");
  vocab.pad_token_id = id("tokenizer.ggml.padding_token_id");
  vocab.add_bos_token = fields.Bool("tokenizer.ggml.add_bos_token");
  vocab.add_eos_token = fields.Bool("tokenizer.ggml.add_eos_token");
  vocab.add_space_prefix = fields.Bool("tokenizer.ggml.add_space_prefix");
  text.chat_template = fields.String("tokenizer.chat_template");
  if (!fields.status().ok()) return fields.status();
  const auto token = [&](const std::optional<int32_t>& id) {
    return id && *id < static_cast<int32_t>(vocab.tokens.size()) ? vocab.tokens[*id]
                                                                 : std::string();
  };
  text.bos_token = token(vocab.bos_token_id);
  text.eos_token = token(vocab.eos_token_id);
  return text;
}

}  // namespace lockstep

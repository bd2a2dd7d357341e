// Weights on disk, whatever the format: named matrices of which a rank reads a rectangle.
//
// Names are Hugging Face's for llama-like models ("model.layers.3.self_attn.q_proj.weight",
// "lm_head.weight"); readers of other formats translate, and undo layout differences (GGUF's
// permuted Q and K rows), so callers see one convention. A 1-D tensor of n elements is a matrix of
// 1 row and n columns.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "model/model_config.h"
#include "runtime/core/buffer.h"
#include "runtime/core/range.h"

namespace lockstep {

struct TensorInfo {
  std::vector<int64_t> shape;
  std::string stored_type;  // as the format names it: "BF16", "Q4_1"
  int64_t stored_bytes = 0;
  bool readable = true;       // Read can convert stored_type
  int64_t stored_offset = 0;  // of its first byte in its file; 0 where there is none

  int64_t rows() const { return shape.size() == 1 ? 1 : shape[0]; }
  int64_t cols() const { return shape.back(); }
};

// The dtype of a tensor that is stored as plain numbers; nullopt for other types.
std::optional<DType> StoredDType(const TensorInfo& info);

// A tensor whose numbers are computed and not read: dummy_values.h says how, from key, row and
// column of an element; those of a norm are 1.
struct MadeUpTensor {
  uint64_t key = 0;
  bool is_norm = false;
};

// Immutable after opening; Read may be called from several threads at once.
class Checkpoint {
 public:
  virtual ~Checkpoint() = default;

  // Path and format, for messages.
  virtual std::string description() const = 0;
  // nullptr when there is no such tensor.
  virtual const TensorInfo* Find(const std::string& name) const = 0;
  virtual std::vector<std::string> Names() const = 0;
  // Reads [rows, cols] of `name` into dst (dst.rows == rows.size(), dst.cols == cols.size()),
  // converted to dst.dtype nearest-even, reading from disk only what the rectangle needs.
  // FailedPrecondition, naming tensor and file, when the file cannot be read or a finite value does
  // not fit float16.
  virtual absl::Status Read(const std::string& name, Range rows, Range cols,
                            const MatrixView& dst) const = 0;
  // How `name` is made up, for a device that does it itself; Read gives the same numbers. nullopt
  // when it is read.
  virtual std::optional<MadeUpTensor> FindMadeUp(const std::string& /*name*/) const {
    return std::nullopt;
  }
};

enum class LoadFormat { kAuto, kDummy, kNull };

// MODEL of the command line, opened: headers read and checked, no weight loaded.
struct ModelSource {
  std::string path;
  ModelConfig config;
  GenerationConfig generation;  // empty where the checkpoint has none
  // What config.json says of the model, or a GGUF file's metadata without its tokenizer: a pair for
  // each field, by name, the value as JSON. Copies of one model state the same.
  std::vector<std::pair<std::string, std::string>> stated = {};
  std::unique_ptr<Checkpoint> checkpoint;
};

// A Hugging Face folder (config.json, model.safetensors or its sharded index) or a .gguf file.
// kDummy needs config.json alone and makes weights from a fixed counter-based generator: the same
// numbers at every TP size; kNull is the same, for a model whose weights nobody reads
// (null_decoder.h). Every header is checked against its file's size, and every tensor the
// model needs against the shape the config implies, before this returns: InvalidArgument or
// NotFound say file, tensor, expected and found. Without `use_generation_config` the file
// generation_config.json is not looked at: it may be broken.
absl::StatusOr<ModelSource> OpenModel(const std::string& path, LoadFormat format,
                                      bool use_generation_config = true);

// config.json (or GGUF metadata) alone: what `lockstep plan` needs.
absl::StatusOr<ModelConfig> OpenModelConfig(const std::string& path);

}  // namespace lockstep

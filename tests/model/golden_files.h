// The tiny checkpoints in $LOCKSTEP_SHARED/golden, and what the reference computed from them.
#pragma once

#include <cmath>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "model/checkpoint/safetensors.h"
#include "runtime/core/file.h"
#include "runtime/core/json.h"
#include "tests/model/model_runner.h"

namespace lockstep {

inline const char* const kGoldenCases[] = {
    "llama-9heads", "llama-bias",        "llama-gqa",       "llama-headdim",     "llama-mha",
    "llama-mqa",    "llama-rope-linear", "llama-rope-yarn", "llama-rope-llama3", "llama-tied-bf16",
    "qwen2",        "qwen2-14heads",     "qwen3",           "mistral-window"};
inline std::string GoldenFolder() {
  const char* shared = std::getenv("LOCKSTEP_SHARED");
  const std::string root =
      shared != nullptr ? shared : std::string(LOCKSTEP_SOURCE_DIR) + "/../shared";
  return root + "/golden/";
}

struct Golden {
  std::vector<std::vector<int32_t>> prompts;
  std::vector<std::vector<int32_t>> greedy;
  std::vector<std::vector<double>> margins;
  std::vector<Logits> logits;  // of each prompt
};

inline absl::StatusOr<Golden> ReadGolden(const std::string& folder) {
  LOCKSTEP_ASSIGN_OR_RETURN(const std::string text, ReadFile(folder + "/golden.json"));
  LOCKSTEP_ASSIGN_OR_RETURN(const Json json, ParseJson(text, folder + "/golden.json"));
  Golden golden;
  golden.prompts = json.at("prompts").get<std::vector<std::vector<int32_t>>>();
  golden.greedy = json.at("greedy").get<std::vector<std::vector<int32_t>>>();
  golden.margins = json.at("margins").get<std::vector<std::vector<double>>>();
  LOCKSTEP_ASSIGN_OR_RETURN(const std::unique_ptr<Checkpoint> file,
                            OpenSafetensors({folder + "/golden.safetensors"}));
  for (size_t i = 0; i < golden.prompts.size(); ++i) {
    const std::string name = absl::StrCat("logits_", i);
    const TensorInfo* info = file->Find(name);
    if (info == nullptr) return absl::NotFoundError(name);
    std::vector<float> values(info->rows() * info->cols());
    LOCKSTEP_RETURN_IF_ERROR(
        file->Read(name, {0, info->rows()}, {0, info->cols()},
                   {values.data(), DType::kF32, info->rows(), info->cols(), info->cols()}));
    Logits logits;
    for (int64_t r = 0; r < info->rows(); ++r) {
      logits.emplace_back(values.begin() + r * info->cols(),
                          values.begin() + (r + 1) * info->cols());
    }
    golden.logits.push_back(std::move(logits));
  }
  return golden;
}

// NaN anywhere, or another shape, is infinitely far.
inline double LargestDifference(const Logits& a, const Logits& b) {
  if (a.size() != b.size()) return INFINITY;
  double largest = 0;
  for (size_t r = 0; r < a.size(); ++r) {
    if (a[r].size() != b[r].size()) return INFINITY;
    for (size_t c = 0; c < a[r].size(); ++c) {
      const double difference = std::abs(static_cast<double>(a[r][c]) - b[r][c]);
      if (!(difference <= largest)) largest = std::isnan(difference) ? INFINITY : difference;
    }
  }
  return largest;
}

}  // namespace lockstep

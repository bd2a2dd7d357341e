// Writes GGUF files for the tests, good and bad ones.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "tests/checkpoint/test_files.h"

namespace lockstep {

inline std::string GgufString(const std::string& text) {
  return LittleEndian(text.size(), 8) + text;
}

// A metadata value: its type number and its bytes.
struct GgufValue {
  uint32_t type;
  std::string bytes;
};
inline GgufValue U32(uint32_t value) { return {4, LittleEndian(value, 4)}; }
inline GgufValue F32(float value) { return {6, Bytes(std::vector<float>{value})}; }
inline GgufValue Bool(bool value) { return {7, LittleEndian(value, 1)}; }
inline GgufValue Str(const std::string& value) { return {8, GgufString(value)}; }
inline GgufValue StrArray(const std::vector<std::string>& values) {
  std::string bytes = LittleEndian(8, 4) + LittleEndian(values.size(), 8);
  for (const std::string& value : values) bytes += GgufString(value);
  return {9, bytes};
}
inline GgufValue I32Array(const std::vector<int32_t>& values) {
  return {9, LittleEndian(5, 4) + LittleEndian(values.size(), 8) + Bytes(values)};
}
inline GgufValue F32Array(const std::vector<float>& values) {
  return {9, LittleEndian(6, 4) + LittleEndian(values.size(), 8) + Bytes(values)};
}

struct GgufBuilder {
  struct Tensor {
    std::string name;
    std::vector<int64_t> shape;  // row-major
    uint32_t type;
    std::string bytes;
  };

  uint32_t version = 3;
  uint64_t alignment = 32;  // as the data are laid out; general.alignment is up to the caller
  std::vector<std::pair<std::string, GgufValue>> metadata;
  std::vector<Tensor> tensors;
  std::vector<int64_t> offsets;  // filled by Build where it is empty

  void Set(const std::string& key, const GgufValue& value) {
    for (auto& [known, old] : metadata) {
      if (known == key) {
        old = value;
        return;
      }
    }
    metadata.emplace_back(key, value);
  }
  void Unset(const std::string& key) {
    std::erase_if(metadata, [&](const auto& entry) { return entry.first == key; });
  }
  void Add(const std::string& name, const std::vector<int64_t>& shape, uint32_t type,
           const std::string& bytes) {
    std::erase_if(tensors, [&](const Tensor& tensor) { return tensor.name == name; });
    tensors.push_back({name, shape, type, bytes});
  }
  void AddF32(const std::string& name, const std::vector<int64_t>& shape,
              const std::vector<float>& values) {
    Add(name, shape, 0, Bytes(values));
  }
  void Remove(const std::string& name) {
    std::erase_if(tensors, [&](const Tensor& tensor) { return tensor.name == name; });
  }

  std::string Build() const {
    std::string out = "GGUF" + LittleEndian(version, 4) + LittleEndian(tensors.size(), 8) +
                      LittleEndian(metadata.size(), 8);
    for (const auto& [key, value] : metadata) {
      out += GgufString(key) + LittleEndian(value.type, 4) + value.bytes;
    }
    std::string data;
    for (size_t i = 0; i < tensors.size(); ++i) {
      const Tensor& tensor = tensors[i];
      out += GgufString(tensor.name) + LittleEndian(tensor.shape.size(), 4);
      for (size_t d = tensor.shape.size(); d-- > 0;) out += LittleEndian(tensor.shape[d], 8);
      data.resize((data.size() + alignment - 1) / alignment * alignment);
      const uint64_t offset = offsets.empty() ? data.size() : static_cast<uint64_t>(offsets[i]);
      out += LittleEndian(tensor.type, 4) + LittleEndian(offset, 8);
      data += tensor.bytes;
    }
    out.resize((out.size() + alignment - 1) / alignment * alignment);
    return out + data;
  }
};

}  // namespace lockstep

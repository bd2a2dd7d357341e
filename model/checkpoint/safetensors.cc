#include "model/checkpoint/safetensors.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <map>
#include <set>

#include "model/checkpoint/checked_file.h"
#include "model/checkpoint/shorten.h"
#include "model/checkpoint/store_values.h"
#include "model/checkpoint/unique_json.h"
#include "runtime/core/file.h"

namespace lockstep {

namespace {

constexpr int64_t kMaxHeaderBytes = 100'000'000;  // the format's own limit
constexpr int64_t kLengthBytes = 8;

struct StoredType {
  const char* name;
  int bits;
};
// The types the format defines. Read converts the floating ones of DType only; the others are
// known so that a file with a mask or a counter in it can still be checked.
constexpr std::array<StoredType, 20> kStoredTypes = {{
    {"F4", 4},   {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"BOOL", 8},    {"U8", 8},
    {"I8", 8},   {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"I16", 16},
    {"U16", 16}, {"F16", 16},    {"BF16", 16},   {"I32", 32},    {"U32", 32},
    {"F32", 32}, {"F64", 64},    {"I64", 64},    {"U64", 64},    {"C64", 64},
}};

struct Entry {
  TensorInfo info;
  const CheckedFile* file = nullptr;
  int64_t begin = 0;  // bytes; in the file's data section while parsing, in the file afterwards
  int64_t end = 0;
};

absl::Status Fault(const std::string& file, const std::string& tensor, const std::string& message) {
  return absl::InvalidArgumentError(
      absl::StrFormat("%s: tensor %s: %s", file, Shortened(tensor), message));
}

// A non-negative integer of the header. Counts above 2^62 cannot be true of any file.
std::optional<int64_t> ToCount(const Json& value) {
  if (!value.is_number_unsigned()) return std::nullopt;
  const uint64_t count = value.get<uint64_t>();
  if (count > (uint64_t{1} << 62)) return std::nullopt;
  return static_cast<int64_t>(count);
}

absl::StatusOr<Entry> ParseEntry(const Json& value, const std::string& path,
                                 const std::string& name) {
  Entry entry;
  const auto get = [&](const char* key) -> const Json* {
    const auto it = value.is_object() ? value.find(key) : value.end();
    return it == value.end() ? nullptr : &*it;
  };
  if (!value.is_object()) return Fault(path, name, "its header entry is not an object");
  const Json* dtype = get("dtype");
  const Json* shape = get("shape");
  const Json* offsets = get("data_offsets");
  if (dtype == nullptr || !dtype->is_string()) return Fault(path, name, "dtype is no string");
  if (shape == nullptr || !shape->is_array()) return Fault(path, name, "shape is no list");
  if (offsets == nullptr || !offsets->is_array() || offsets->size() != 2) {
    return Fault(path, name, "data_offsets is no list of two numbers");
  }
  entry.info.stored_type = dtype->get<std::string>();
  int64_t elements = 1;
  for (const Json& item : *shape) {
    const std::optional<int64_t> size = ToCount(item);
    if (!size)
      return Fault(path, name, "shape holds " + Shortened(DumpJson(item)) + ", which is no size");
    if (__builtin_mul_overflow(elements, *size, &elements)) {
      return Fault(path, name, "shape " + Shortened(DumpJson(*shape)) + " overflows");
    }
    entry.info.shape.push_back(*size);
  }
  if (entry.info.shape.empty()) entry.info.shape.push_back(1);  // a scalar
  const std::optional<int64_t> begin = ToCount((*offsets)[0]);
  const std::optional<int64_t> end = ToCount((*offsets)[1]);
  if (!begin || !end || *begin > *end) {
    return Fault(path, name, "data_offsets " + Shortened(DumpJson(*offsets)) + " is no byte range");
  }
  entry.begin = *begin;
  entry.end = *end;
  entry.info.stored_bytes = *end - *begin;
  const auto type = std::find_if(kStoredTypes.begin(), kStoredTypes.end(), [&](const auto& known) {
    return entry.info.stored_type == known.name;
  });
  entry.info.readable = StoredDType(entry.info).has_value();
  if (type == kStoredTypes.end()) return entry;  // size unknown; refused by name if it is needed
  int64_t bits = 0;
  if (__builtin_mul_overflow(elements, static_cast<int64_t>(type->bits), &bits) || bits % 8 != 0 ||
      bits / 8 != entry.info.stored_bytes) {
    return Fault(path, name,
                 absl::StrFormat("shape %s of %s does not fill its span of %d bytes",
                                 Shortened(DumpJson(*shape)), Shortened(entry.info.stored_type),
                                 entry.info.stored_bytes));
  }
  return entry;
}

// The spans must tile the data section: no gap, no overlap, nothing after the last.
absl::Status CheckSpans(const CheckedFile& file, int64_t data_start,
                        const std::map<std::string, Entry>& entries) {
  std::vector<const std::pair<const std::string, Entry>*> sorted;
  for (const auto& entry : entries) sorted.push_back(&entry);
  std::sort(sorted.begin(), sorted.end(), [](const auto* a, const auto* b) {
    return std::pair(a->second.begin, a->second.end) < std::pair(b->second.begin, b->second.end);
  });
  int64_t end = 0;
  for (const auto* entry : sorted) end = std::max(end, entry->second.end);
  if (data_start + end > file.size_bytes()) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: the file is short: its header needs %d bytes, it has %d; copy or download it again",
        file.path(), data_start + end, file.size_bytes()));
  }
  int64_t at = 0;
  for (size_t i = 0; i < sorted.size(); ++i) {
    const auto& [name, entry] = *sorted[i];
    if (entry.begin < at) {
      return Fault(file.path(), name,
                   absl::StrFormat("its bytes %d to %d overlap those of %s", entry.begin, entry.end,
                                   Shortened(sorted[i - 1]->first)));
    }
    if (entry.begin > at) {
      return Fault(
          file.path(), name,
          absl::StrFormat("bytes %d to %d before it belong to no tensor", at, entry.begin));
    }
    at = entry.end;
  }
  if (data_start + at < file.size_bytes()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: the file is too long: its header accounts for %d bytes, it has %d",
                        file.path(), data_start + at, file.size_bytes()));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> ReadHeader(const CheckedFile& file) {
  if (file.size_bytes() < kLengthBytes) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: %d bytes are too few for a safetensors file", file.path(), file.size_bytes()));
  }
  std::array<uint8_t, kLengthBytes> bytes;
  LOCKSTEP_RETURN_IF_ERROR(file.ReadAt(0, kLengthBytes, bytes.data()));
  uint64_t length = 0;
  for (int i = kLengthBytes - 1; i >= 0; --i) length = length << 8 | bytes[i];
  if (length == 0) {
    return absl::InvalidArgumentError(file.path() + ": the safetensors header has length 0");
  }
  if (length > static_cast<uint64_t>(file.size_bytes() - kLengthBytes)) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: the safetensors header claims %d bytes, the file has %d: it is cut short, or is no "
        "safetensors file",
        file.path(), length, file.size_bytes()));
  }
  if (length > static_cast<uint64_t>(kMaxHeaderBytes)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: the safetensors header has %d bytes, the format allows %d",
                        file.path(), length, kMaxHeaderBytes));
  }
  std::string header(length, '\0');
  LOCKSTEP_RETURN_IF_ERROR(file.ReadAt(kLengthBytes, header.size(), header.data()));
  return header;
}

absl::StatusOr<std::map<std::string, Entry>> ParseFile(const CheckedFile& file) {
  LOCKSTEP_ASSIGN_OR_RETURN(const std::string text, ReadHeader(file));
  const std::string what = file.path() + ": safetensors header";
  LOCKSTEP_ASSIGN_OR_RETURN(const Json header, ParseUniqueJson(text, what));
  if (!header.is_object()) return absl::InvalidArgumentError(what + ": is not a JSON object");
  std::map<std::string, Entry> entries;
  for (const auto& [name, value] : header.items()) {
    if (name == "__metadata__") continue;
    LOCKSTEP_ASSIGN_OR_RETURN(entries[name], ParseEntry(value, file.path(), name));
  }
  const int64_t data_start = kLengthBytes + static_cast<int64_t>(text.size());
  LOCKSTEP_RETURN_IF_ERROR(CheckSpans(file, data_start, entries));
  for (auto& [name, entry] : entries) {
    entry.file = &file;
    entry.begin += data_start;
    entry.end += data_start;
    entry.info.stored_offset = entry.begin;
  }
  return entries;
}

class SafetensorsCheckpoint : public Checkpoint {
 public:
  explicit SafetensorsCheckpoint(std::string description) : description_(std::move(description)) {}

  absl::Status Add(const std::string& path) {
    LOCKSTEP_ASSIGN_OR_RETURN(std::unique_ptr<CheckedFile> file, CheckedFile::Open(path));
    LOCKSTEP_ASSIGN_OR_RETURN(const auto entries, ParseFile(*file));
    for (const auto& [name, entry] : entries) {
      const auto [known, is_new] = entries_.emplace(name, entry);
      if (!is_new) {
        return Fault(path, name, "is also in " + known->second.file->path());
      }
    }
    files_.push_back(std::move(file));
    return absl::OkStatus();
  }

  const CheckedFile* FileOf(const std::string& name) const {
    const auto it = entries_.find(name);
    return it == entries_.end() ? nullptr : it->second.file;
  }

  std::string description() const override { return description_; }

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
    const std::optional<DType> stored = StoredDType(entry.info);
    if (!stored || entry.info.shape.size() > 2) {
      return Fault(entry.file->path(), name,
                   absl::StrFormat("type %s, %d dims: cannot be read as a weight matrix",
                                   entry.info.stored_type, entry.info.shape.size()));
    }
    LOCKSTEP_CHECK(rows.begin >= 0 && rows.end <= entry.info.rows() && cols.begin >= 0 &&
                   cols.end <= entry.info.cols());
    LOCKSTEP_CHECK(dst.rows == rows.size() && dst.cols == cols.size());
    const int64_t size = SizeOf(*stored);
    const int64_t row_bytes = entry.info.cols() * size;
    if (*stored == dst.dtype && dst.stride == entry.info.cols() && dst.cols == dst.stride) {
      return entry.file->ReadAt(entry.begin + rows.begin * row_bytes, rows.size() * row_bytes,
                                dst.data);
    }
    return entry.file->ReadRows(
        entry.begin, row_bytes, rows, {cols.begin * size, cols.end * size},
        [&](int64_t row, const uint8_t* bytes) -> absl::Status {
          auto* out =
              static_cast<uint8_t*>(dst.data) + (row - rows.begin) * dst.stride * SizeOf(dst.dtype);
          if (StoreValues(*stored, bytes, dst.dtype, out, cols.size())) return absl::OkStatus();
          return absl::FailedPreconditionError(absl::StrFormat(
              "%s: tensor %s: a value above 65504 does not fit float16; use bfloat16 or float32",
              entry.file->path(), name));
        });
  }

 private:
  std::string description_;
  std::vector<std::unique_ptr<CheckedFile>> files_;
  std::map<std::string, Entry> entries_;
};

// Shard file names by tensor, from the index.
absl::StatusOr<std::map<std::string, std::string>> ReadWeightMap(const std::string& path) {
  LOCKSTEP_ASSIGN_OR_RETURN(const std::string text, ReadFile(path));
  LOCKSTEP_ASSIGN_OR_RETURN(const Json index, ParseUniqueJson(text, path));
  const auto it = index.is_object() ? index.find("weight_map") : index.end();
  if (!index.is_object() || it == index.end() || !it->is_object() || it->empty()) {
    return absl::InvalidArgumentError(path + ": has no object weight_map");
  }
  std::map<std::string, std::string> weight_map;
  for (const auto& [tensor, file] : it->items()) {
    // Shards lie beside the index: a path could lead anywhere.
    if (!file.is_string() || file.get<std::string>().empty() ||
        file.get<std::string>().find('/') != std::string::npos) {
      return Fault(path, tensor,
                   Shortened(DumpJson(file)) + " is not the name of a file in this folder");
    }
    weight_map[tensor] = file.get<std::string>();
  }
  return weight_map;
}

absl::StatusOr<std::unique_ptr<Checkpoint>> OpenSharded(const std::string& folder,
                                                        const std::string& index_path) {
  LOCKSTEP_ASSIGN_OR_RETURN(const auto weight_map, ReadWeightMap(index_path));
  std::set<std::string> shards;
  for (const auto& [tensor, shard] : weight_map) shards.insert(shard);
  auto checkpoint = std::make_unique<SafetensorsCheckpoint>(index_path);
  for (const std::string& shard : shards) {
    const absl::Status status = checkpoint->Add(folder + "/" + shard);
    if (absl::IsNotFound(status)) {
      return absl::NotFoundError(
          absl::StrFormat("%s: names the shard %s, which is not there", index_path, shard));
    }
    LOCKSTEP_RETURN_IF_ERROR(status);
  }
  for (const auto& [tensor, shard] : weight_map) {
    const CheckedFile* file = checkpoint->FileOf(tensor);
    if (file == nullptr || file->path() != folder + "/" + shard) {
      return Fault(index_path, tensor,
                   absl::StrFormat("should be in %s, which does not hold it", shard));
    }
  }
  return checkpoint;
}

// What a folder without safetensors holds instead, as a hint.
std::string OtherWeights(const std::string& folder) {
  std::set<std::string> pytorch, gguf, safetensors;
  std::error_code error;
  for (std::filesystem::directory_iterator it(folder, error), end; !error && it != end;
       it.increment(error)) {
    const std::string name = it->path().filename().string();
    const std::string extension = it->path().extension().string();
    if (extension == ".safetensors") safetensors.insert(name);
    if (extension == ".bin" || extension == ".pt" || extension == ".pth") pytorch.insert(name);
    if (extension == ".gguf") gguf.insert(name);
  }
  if (!safetensors.empty()) {
    return absl::StrFormat("; %s is there, but no index that says which tensors it holds",
                           *safetensors.begin());
  }
  if (!gguf.empty()) {
    return absl::StrFormat("; %s is there: give that file as MODEL", *gguf.begin());
  }
  if (!pytorch.empty()) {
    return absl::StrFormat(
        "; %s is there, but PyTorch weights are not read: safetensors are needed",
        *pytorch.begin());
  }
  return "";
}

}  // namespace

absl::StatusOr<std::unique_ptr<Checkpoint>> OpenSafetensors(const std::string& path) {
  auto checkpoint = std::make_unique<SafetensorsCheckpoint>(path);
  LOCKSTEP_RETURN_IF_ERROR(checkpoint->Add(path));
  return checkpoint;
}

absl::StatusOr<std::unique_ptr<Checkpoint>> OpenSafetensorsFolder(const std::string& folder) {
  const std::string single = folder + "/model.safetensors";
  const std::string index = folder + "/model.safetensors.index.json";
  const absl::Status has_single = CheckPath(single);
  if (has_single.ok()) return OpenSafetensors(single);
  if (!absl::IsNotFound(has_single)) return has_single;
  const absl::Status has_index = CheckPath(index);
  if (has_index.ok()) return OpenSharded(folder, index);
  if (!absl::IsNotFound(has_index)) return has_index;
  return absl::NotFoundError(
      absl::StrFormat("%s: no weights: looked for model.safetensors and "
                      "model.safetensors.index.json%s",
                      folder, OtherWeights(folder)));
}

}  // namespace lockstep

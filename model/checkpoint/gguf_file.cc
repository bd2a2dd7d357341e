#include "model/checkpoint/gguf_file.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "model/checkpoint/shorten.h"

namespace lockstep {

namespace {

constexpr std::string_view kMagic = "GGUF";
constexpr int64_t kMaxElements = int64_t{1} << 25;  // of all arrays together: bounds the memory
constexpr int64_t kMaxDims = 4;
constexpr uint64_t kMaxKeyBytes = 65535;  // the format's limit
constexpr uint64_t kMaxNameBytes = 1024;  // of a tensor; the format's writers keep to 64
constexpr int64_t kMaxAlignment = int64_t{1} << 20;

// Types of metadata values, as the file numbers them.
enum ValueType : uint32_t {
  kUint8,
  kInt8,
  kUint16,
  kInt16,
  kUint32,
  kInt32,
  kFloat32,
  kBool,
  kString,
  kArray,
  kUint64,
  kInt64,
  kFloat64,
  kNumValueTypes
};
constexpr std::array<int64_t, kNumValueTypes> kMinValueBytes = {1, 1, 2,  2, 4, 4, 4,
                                                                1, 8, 12, 8, 8, 8};

// Reads the file front to back through a window, never past its end.
class Parser {
 public:
  explicit Parser(const CheckedFile& file) : file_(file) {}

  int64_t position() const { return position_; }
  int64_t remaining() const { return file_.size_bytes() - position_; }

  absl::Status Fault(const std::string& message) const {
    return absl::InvalidArgumentError(file_.path() + ": " + message);
  }

  absl::Status Bytes(int64_t size, void* dst) {
    if (size > remaining()) {
      return Fault(absl::StrFormat("the file is short: its metadata goes on after byte %d",
                                   file_.size_bytes()));
    }
    if (position_ < window_start_ ||
        position_ + size > window_start_ + static_cast<int64_t>(window_.size())) {
      if (size > kWindowBytes) {
        LOCKSTEP_RETURN_IF_ERROR(file_.ReadAt(position_, size, dst));
        position_ += size;
        return absl::OkStatus();
      }
      window_.resize(std::min(kWindowBytes, remaining()));
      window_start_ = position_;
      LOCKSTEP_RETURN_IF_ERROR(file_.ReadAt(position_, window_.size(), window_.data()));
    }
    std::memcpy(dst, window_.data() + (position_ - window_start_), size);
    position_ += size;
    return absl::OkStatus();
  }

  template <typename T>
  absl::StatusOr<T> Number() {
    T value{};
    LOCKSTEP_RETURN_IF_ERROR(Bytes(sizeof value, &value));
    return value;
  }

  // A key or a name: of a bounded length.
  absl::StatusOr<std::string> Name(std::string_view what, uint64_t max_bytes) {
    const int64_t begin = position_;
    LOCKSTEP_ASSIGN_OR_RETURN(const uint64_t size, Number<uint64_t>());
    if (size > max_bytes) {
      return Fault(absl::StrFormat("the %s at byte %d has %d bytes; at most %d are allowed", what,
                                   begin, size, max_bytes));
    }
    position_ = begin;
    return String();
  }

  absl::StatusOr<std::string> String() {
    LOCKSTEP_ASSIGN_OR_RETURN(const uint64_t size, Number<uint64_t>());
    if (size > static_cast<uint64_t>(remaining())) {
      return Fault(absl::StrFormat("a string of %d bytes at byte %d does not fit the file", size,
                                   position_ - 8));
    }
    std::string text(size, '\0');
    LOCKSTEP_RETURN_IF_ERROR(Bytes(size, text.data()));
    return text;
  }

  absl::StatusOr<Json> Value(uint32_t type) {
    switch (type) {
      case kUint8:
        return NumberValue<uint8_t>();
      case kInt8:
        return NumberValue<int8_t>();
      case kUint16:
        return NumberValue<uint16_t>();
      case kInt16:
        return NumberValue<int16_t>();
      case kUint32:
        return NumberValue<uint32_t>();
      case kInt32:
        return NumberValue<int32_t>();
      case kUint64:
        return NumberValue<uint64_t>();
      case kInt64:
        return NumberValue<int64_t>();
      case kFloat32:
        return NumberValue<float>();
      case kFloat64:
        return NumberValue<double>();
      case kBool: {
        LOCKSTEP_ASSIGN_OR_RETURN(const uint8_t value, Number<uint8_t>());
        if (value > 1) return Fault(absl::StrFormat("%d is no bool", value));
        return Json(value == 1);
      }
      case kString: {
        LOCKSTEP_ASSIGN_OR_RETURN(std::string text, String());
        return Json(std::move(text));
      }
      case kArray:
        return ArrayValue();
      default:
        return Fault(absl::StrFormat("%d is no type of a metadata value", type));
    }
  }

 private:
  static constexpr int64_t kWindowBytes = 1 << 20;

  template <typename T>
  absl::StatusOr<Json> NumberValue() {
    LOCKSTEP_ASSIGN_OR_RETURN(const T value, Number<T>());
    return Json(value);
  }

  absl::StatusOr<Json> ArrayValue() {
    LOCKSTEP_ASSIGN_OR_RETURN(const uint32_t type, Number<uint32_t>());
    LOCKSTEP_ASSIGN_OR_RETURN(const uint64_t count, Number<uint64_t>());
    if (type >= kNumValueTypes) {
      return Fault(absl::StrFormat("%d is no type of a metadata value", type));
    }
    if (type == kArray) return Fault("arrays of arrays are not supported");
    if (count > static_cast<uint64_t>(remaining() / kMinValueBytes[type])) {
      return Fault(absl::StrFormat("an array of %d elements at byte %d does not fit the file",
                                   count, position_ - 12));
    }
    elements_ += static_cast<int64_t>(count);
    if (elements_ > kMaxElements) {
      return Fault(absl::StrFormat("its metadata arrays have more than %d elements", kMaxElements));
    }
    Json array = Json::array();
    array.get_ref<Json::array_t&>().reserve(count);
    for (uint64_t i = 0; i < count; ++i) {
      LOCKSTEP_ASSIGN_OR_RETURN(Json value, Value(type));
      array.push_back(std::move(value));
    }
    return array;
  }

  const CheckedFile& file_;
  int64_t position_ = 0;
  int64_t window_start_ = 0;
  std::vector<uint8_t> window_;
  int64_t elements_ = 0;
};

struct Counts {
  uint64_t tensors = 0;
  uint64_t values = 0;
};

absl::StatusOr<Counts> ParseStart(Parser& in) {
  std::string magic(kMagic.size(), '\0');
  LOCKSTEP_RETURN_IF_ERROR(in.Bytes(magic.size(), magic.data()));
  if (magic != kMagic) return in.Fault("is no GGUF file: it does not start with GGUF");
  LOCKSTEP_ASSIGN_OR_RETURN(const uint32_t version, in.Number<uint32_t>());
  if (version == __builtin_bswap32(2) || version == __builtin_bswap32(3)) {
    return in.Fault("is a big-endian GGUF file: only little-endian ones are supported");
  }
  if (version != 2 && version != 3) {
    return in.Fault(absl::StrFormat("GGUF version %d is not supported; 2 and 3 are", version));
  }
  Counts counts;
  LOCKSTEP_ASSIGN_OR_RETURN(counts.tensors, in.Number<uint64_t>());
  LOCKSTEP_ASSIGN_OR_RETURN(counts.values, in.Number<uint64_t>());
  // The smallest entries: an empty name or key, and the least that follows it.
  if (counts.tensors > static_cast<uint64_t>(in.remaining() / 24) ||
      counts.values > static_cast<uint64_t>(in.remaining() / 13)) {
    return in.Fault(absl::StrFormat("%d tensors and %d metadata values do not fit the file",
                                    counts.tensors, counts.values));
  }
  return counts;
}

absl::StatusOr<Json> ParseMetadata(Parser& in, uint64_t count) {
  Json metadata = Json::object();
  for (uint64_t i = 0; i < count; ++i) {
    LOCKSTEP_ASSIGN_OR_RETURN(std::string key, in.Name("metadata key", kMaxKeyBytes));
    LOCKSTEP_ASSIGN_OR_RETURN(const uint32_t type, in.Number<uint32_t>());
    absl::StatusOr<Json> value = in.Value(type);
    if (!value.ok()) {
      return absl::Status(value.status().code(),
                          absl::StrFormat("%s (metadata key %s)",
                                          std::string(value.status().message()), Shortened(key)));
    }
    if (!metadata.emplace(key, *std::move(value)).second) {
      return in.Fault(absl::StrFormat("the metadata key %s is there twice", Shortened(key)));
    }
  }
  return metadata;
}

// One entry of the directory; the offset is still relative to the data section.
absl::Status ParseTensor(Parser& in, std::map<std::string, GgufTensor>& tensors) {
  LOCKSTEP_ASSIGN_OR_RETURN(const std::string name, in.Name("tensor name", kMaxNameBytes));
  const auto fault = [&](const std::string& message) {
    return in.Fault(absl::StrFormat("tensor %s: %s", Shortened(name), message));
  };
  GgufTensor tensor;
  LOCKSTEP_ASSIGN_OR_RETURN(const uint32_t num_dims, in.Number<uint32_t>());
  if (num_dims < 1 || num_dims > kMaxDims) return fault(absl::StrFormat("has %d dims", num_dims));
  int64_t elements = 1;
  for (uint32_t i = 0; i < num_dims; ++i) {
    LOCKSTEP_ASSIGN_OR_RETURN(const uint64_t size, in.Number<uint64_t>());
    if (size < 1 || size > uint64_t{1} << 48 ||
        __builtin_mul_overflow(elements, static_cast<int64_t>(size), &elements) ||
        elements > int64_t{1} << 48) {
      return fault(absl::StrFormat("a dimension of %d elements is out of range", size));
    }
    tensor.shape.insert(tensor.shape.begin(), static_cast<int64_t>(size));
  }
  LOCKSTEP_ASSIGN_OR_RETURN(tensor.type_id, in.Number<uint32_t>());
  LOCKSTEP_ASSIGN_OR_RETURN(const uint64_t offset, in.Number<uint64_t>());
  if (offset > uint64_t{1} << 62) return fault("its offset is outside the file");
  tensor.offset = static_cast<int64_t>(offset);
  tensor.type = FindGgufType(tensor.type_id);
  if (tensor.type != nullptr) {
    if (tensor.shape.back() % tensor.type->block_values != 0) {
      return fault(absl::StrFormat("rows of %d values are no whole blocks of %s",
                                   tensor.shape.back(), tensor.type->name));
    }
    tensor.size_bytes = elements / tensor.type->block_values * tensor.type->block_bytes;
  }
  if (!tensors.emplace(name, std::move(tensor)).second) return fault("is there twice");
  return absl::OkStatus();
}

// Moves the offsets to the file's start and checks that every tensor lies inside, on its own, and
// that nothing follows the last one and its padding.
absl::Status PlaceTensors(const Parser& in, const Json& metadata, int64_t file_bytes,
                          std::map<std::string, GgufTensor>& tensors) {
  int64_t alignment = 32;
  if (const auto it = metadata.find("general.alignment"); it != metadata.end()) {
    const bool good = it->is_number_unsigned() && it->get<uint64_t>() >= 1 &&
                      it->get<uint64_t>() <= kMaxAlignment;
    if (!good)
      return in.Fault("general.alignment " + Shortened(DumpJson(*it)) + " is no alignment");
    alignment = it->get<int64_t>();
  }
  const int64_t data_start = (in.position() + alignment - 1) / alignment * alignment;
  std::vector<std::pair<const std::string, GgufTensor>*> sorted;
  for (auto& entry : tensors) sorted.push_back(&entry);
  std::sort(sorted.begin(), sorted.end(),
            [](const auto* a, const auto* b) { return a->second.offset < b->second.offset; });
  int64_t end = 0;
  for (size_t i = 0; i < sorted.size(); ++i) {
    auto& [name, tensor] = *sorted[i];
    if (tensor.offset % alignment != 0) {
      return in.Fault(absl::StrFormat("tensor %s: offset %d is no multiple of the alignment %d",
                                      Shortened(name), tensor.offset, alignment));
    }
    if (tensor.offset < end) {
      return in.Fault(absl::StrFormat("tensor %s: its bytes overlap those of %s", Shortened(name),
                                      Shortened(sorted[i - 1]->first)));
    }
    end = tensor.offset + tensor.size_bytes;
    if (data_start + end > file_bytes) {
      return in.Fault(absl::StrFormat(
          "the file is short: tensor %s needs %d bytes, the file has %d; copy or download it again",
          Shortened(name), data_start + end, file_bytes));
    }
    tensor.offset += data_start;
  }
  // A tensor of a type without a known size may reach to the file's end.
  if (!sorted.empty() && sorted.back()->second.type == nullptr) return absl::OkStatus();
  const int64_t padded_end = data_start + (end + alignment - 1) / alignment * alignment;
  if (file_bytes > padded_end) {
    return in.Fault(absl::StrFormat(
        "the file is too long: its directory and padding account for %d bytes, it has %d",
        padded_end, file_bytes));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<GgufFile> GgufFile::Open(const std::string& path) {
  GgufFile gguf;
  LOCKSTEP_ASSIGN_OR_RETURN(gguf.file, CheckedFile::Open(path));
  Parser in(*gguf.file);
  LOCKSTEP_ASSIGN_OR_RETURN(const Counts counts, ParseStart(in));
  LOCKSTEP_ASSIGN_OR_RETURN(gguf.metadata, ParseMetadata(in, counts.values));
  for (uint64_t i = 0; i < counts.tensors; ++i) {
    LOCKSTEP_RETURN_IF_ERROR(ParseTensor(in, gguf.tensors));
  }
  if (const auto it = gguf.metadata.find("split.count");
      it != gguf.metadata.end() && *it != 0 && *it != 1) {
    return in.Fault("is one of " + Shortened(DumpJson(*it)) +
                    " files of a split model: merge them into one file first");
  }
  LOCKSTEP_RETURN_IF_ERROR(PlaceTensors(in, gguf.metadata, gguf.file->size_bytes(), gguf.tensors));
  return gguf;
}

bool IsGgufFile(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) return false;  // opening a FIFO would wait
  std::ifstream in(path, std::ios::binary);
  std::string start(kMagic.size(), '\0');
  return in.read(start.data(), static_cast<std::streamsize>(start.size())) && start == kMagic;
}

}  // namespace lockstep

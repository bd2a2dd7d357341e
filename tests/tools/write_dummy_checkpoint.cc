// Writes the weights of `--load-format dummy` as a checkpoint: a real one, of any shape, in
// seconds.
//
//   write_dummy_checkpoint MODEL FOLDER [DTYPE [SHARDS [THREADS]]]
//
// MODEL is a folder with a config.json; FOLDER gets model-0000K-of-0000N.safetensors with their
// index, and copies of MODEL's other .json files (config, tokenizer). DTYPE: bfloat16 (default),
// float16 or float32. What is computed from FOLDER equals what --load-format dummy gives for MODEL
// in the same DTYPE.
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>
#include <vector>

#include "model/checkpoint/checkpoint.h"
#include "model/checkpoint/tensor_names.h"
#include "runtime/core/json.h"
#include "runtime/core/thread_pool.h"

namespace lockstep {
namespace {

constexpr int64_t kPieceBytes = int64_t{8} << 20;

// Rows of a tensor and where they go.
struct Piece {
  const TensorSpec* tensor;
  Range rows;
  int fd;
  int64_t offset;
};

int64_t Rows(const TensorSpec& tensor) { return tensor.shape.size() == 1 ? 1 : tensor.shape[0]; }

absl::Status Failed(const std::string& what) {
  return absl::FailedPreconditionError(absl::StrCat(what, ": ", std::strerror(errno)));
}

absl::Status WriteAt(int fd, const char* data, int64_t size, int64_t offset) {
  while (size > 0) {
    const ssize_t n = pwrite(fd, data, static_cast<size_t>(size), offset);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return Failed("writing");
    data += n;
    size -= n;
    offset += n;
  }
  return absl::OkStatus();
}

// Creates the file with its header; adds the pieces of its tensors.
absl::Status StartShard(const std::string& path, std::span<const TensorSpec> tensors, DType dtype,
                        std::vector<Piece>& pieces) {
  const char* const type = dtype == DType::kF32 ? "F32" : dtype == DType::kF16 ? "F16" : "BF16";
  Json header;
  int64_t end = 0;
  for (const TensorSpec& tensor : tensors) {
    const int64_t begin = end;
    end += Rows(tensor) * tensor.shape.back() * SizeOf(dtype);
    header[tensor.name] = {
        {"dtype", type}, {"shape", tensor.shape}, {"data_offsets", {begin, end}}};
  }
  std::string text = DumpJson(header);
  text.append((8 - text.size() % 8) % 8, ' ');
  std::string start(8, '\0');
  for (int i = 0; i < 8; ++i) start[i] = static_cast<char>(text.size() >> (8 * i) & 0xff);
  start += text;
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd < 0) return Failed(path);
  LOCKSTEP_RETURN_IF_ERROR(WriteAt(fd, start.data(), std::ssize(start), 0));
  for (const TensorSpec& tensor : tensors) {
    const int64_t base = std::ssize(start) + header[tensor.name]["data_offsets"][0].get<int64_t>();
    const int64_t row_bytes = tensor.shape.back() * SizeOf(dtype);
    const int64_t step = std::max<int64_t>(1, kPieceBytes / row_bytes);
    for (int64_t row = 0; row < Rows(tensor); row += step) {
      pieces.push_back(
          {&tensor, {row, std::min(row + step, Rows(tensor))}, fd, base + row * row_bytes});
    }
  }
  return absl::OkStatus();
}

absl::Status WritePiece(const Checkpoint& weights, const Piece& piece, DType dtype) {
  const int64_t cols = piece.tensor->shape.back();
  std::vector<char> bytes(static_cast<size_t>(piece.rows.size() * cols * SizeOf(dtype)));
  LOCKSTEP_RETURN_IF_ERROR(weights.Read(piece.tensor->name, piece.rows, {0, cols},
                                        {bytes.data(), dtype, piece.rows.size(), cols, cols}));
  return WriteAt(piece.fd, bytes.data(), std::ssize(bytes), piece.offset);
}

absl::Status CopyJsonFiles(const std::string& from, const std::string& to) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(from, error)) {
    const std::string name = entry.path().filename().string();
    if (!name.ends_with(".json") || name.ends_with(".index.json")) continue;
    std::filesystem::copy_file(entry.path(), to + "/" + name,
                               std::filesystem::copy_options::overwrite_existing, error);
  }
  return error ? absl::FailedPreconditionError(to + ": " + error.message()) : absl::OkStatus();
}

absl::Status Write(const std::string& model, const std::string& folder, DType dtype, int num_shards,
                   int num_threads) {
  LOCKSTEP_ASSIGN_OR_RETURN(const ModelSource source, OpenModel(model, LoadFormat::kDummy));
  std::filesystem::create_directories(folder);
  LOCKSTEP_RETURN_IF_ERROR(CopyJsonFiles(model, folder));
  const std::vector<TensorSpec> tensors = RequiredTensors(source.config);
  num_shards = std::min(num_shards, static_cast<int>(tensors.size()));
  std::vector<Piece> pieces;
  Json index = {{"metadata", Json::object()}};
  for (int s = 0; s < num_shards; ++s) {
    const size_t begin = tensors.size() * s / num_shards;
    const size_t end = tensors.size() * (s + 1) / num_shards;
    const std::string name = absl::StrFormat("model-%05d-of-%05d.safetensors", s + 1, num_shards);
    for (size_t t = begin; t < end; ++t) index["weight_map"][tensors[t].name] = name;
    LOCKSTEP_RETURN_IF_ERROR(StartShard(
        folder + "/" + name, std::span(tensors).subspan(begin, end - begin), dtype, pieces));
  }
  std::ofstream(folder + "/model.safetensors.index.json") << DumpJson(index);
  ThreadPool threads(num_threads);
  std::atomic<bool> failed = false;
  threads.ParallelFor(std::ssize(pieces), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end && !failed; ++i) {
      const absl::Status status = WritePiece(*source.checkpoint, pieces[i], dtype);
      if (status.ok()) continue;
      failed = true;
      std::fprintf(stderr, "%s\n", status.ToString().c_str());
    }
  });
  return failed ? absl::FailedPreconditionError(folder + ": not written") : absl::OkStatus();
}

int Main(int argc, char** argv) {
  const std::string type = argc > 3 ? argv[3] : "bfloat16";
  const DType dtype = type == "float32"   ? DType::kF32
                      : type == "float16" ? DType::kF16
                                          : DType::kBF16;
  if (argc < 3 || argc > 6 || type != Name(dtype)) {
    std::fprintf(stderr,
                 "usage: write_dummy_checkpoint MODEL FOLDER [float32|float16|bfloat16 [SHARDS "
                 "[THREADS]]]\n");
    return 2;
  }
  const int shards = argc > 4 ? std::max(1, std::atoi(argv[4])) : 4;
  const int threads = argc > 5 ? std::max(1, std::atoi(argv[5]))
                               : static_cast<int>(std::thread::hardware_concurrency());
  const auto start = std::chrono::steady_clock::now();
  const absl::Status status = Write(argv[1], argv[2], dtype, shards, threads);
  if (!status.ok()) {
    std::fprintf(stderr, "write_dummy_checkpoint: %s\n", status.ToString().c_str());
    return 1;
  }
  std::printf("%s: written in %.1f s\n", argv[2],
              std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  return 0;
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) { return lockstep::Main(argc, argv); }

#include "tests/attention/cuda_test_device.h"

#include <algorithm>
#include <cmath>

namespace lockstep {
namespace {

// Ends the test program: what fails here is the device, not the code under test.
void Must(const absl::Status& status) {
  if (status.ok()) return;
  absl::FPrintF(stderr, "%s\n", status.ToString());
  LOCKSTEP_CHECK(status.ok());
}

int64_t CacheBytes(const KvCacheView& cache) {
  return cache.Offset(cache.num_blocks, 0, 0) * SizeOf(cache.dtype);
}

MatrixView OnDevice(const MatrixView& view, DType dtype, const DeviceBuffer& buffer) {
  return {.data = buffer.data(),
          .dtype = dtype,
          .rows = view.rows,
          .cols = view.cols,
          .stride = view.cols};
}

struct DeviceCache {
  DeviceBuffer keys;
  DeviceBuffer values;
  KvCacheView view;
};

DeviceCache Upload(const KvCacheView& cache) {
  DeviceCache device = {.keys = ToDevice(cache.keys, CacheBytes(cache)),
                        .values = ToDevice(cache.values, CacheBytes(cache)),
                        .view = cache};
  device.view.keys = device.keys.data();
  device.view.values = device.values.data();
  return device;
}

}  // namespace

DeviceBuffer ToDevice(const void* data, int64_t bytes) {
  auto buffer = DeviceBuffer::Create(std::max<int64_t>(bytes, 1), "test data");
  Must(buffer.status());
  if (bytes > 0) Must(CopyAsync(buffer->data(), data, bytes, nullptr));
  Must(Synchronize(nullptr));
  return *std::move(buffer);
}

DeviceBuffer PoisonedDevice(int64_t bytes) {
  const std::vector<unsigned char> poison(bytes, 0xff);
  return ToDevice(poison);
}

void ToHost(const DeviceBuffer& buffer, void* data, int64_t bytes) {
  Must(CopyAsync(data, buffer.data(), bytes, nullptr));
  Must(Synchronize(nullptr));
}

std::vector<char> Packed(const MatrixView& view, DType dtype) {
  std::vector<char> packed(view.rows * view.cols * SizeOf(dtype));
  for (int64_t r = 0; r < view.rows; ++r) {
    Convert(view.dtype, view.row<const char>(0) + r * view.stride * SizeOf(view.dtype), dtype,
            packed.data() + r * view.cols * SizeOf(dtype), view.cols);
  }
  return packed;
}

std::vector<float> RoundedTo(const std::vector<float>& values, DType dtype) {
  std::vector<float> rounded(values.size());
  std::vector<char> stored(values.size() * SizeOf(dtype));
  const int64_t count = static_cast<int64_t>(values.size());
  Convert(DType::kF32, values.data(), dtype, stored.data(), count);
  Convert(dtype, stored.data(), DType::kF32, rounded.data(), count);
  return rounded;
}

void RoundData(Scenario& scenario, DType dtype) {
  for (RequestData& data : scenario.data()) {
    for (std::vector<float>* values : {&data.queries, &data.keys, &data.values}) {
      *values = RoundedTo(*values, dtype);
    }
  }
}

double RelativeError(const std::vector<float>& a, const std::vector<double>& b) {
  if (a.size() != b.size()) return INFINITY;
  double difference = 0;
  double norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    norm += b[i] * b[i];
  }
  if (!std::isfinite(difference)) return INFINITY;
  return norm == 0 ? (difference == 0 ? 0 : INFINITY) : std::sqrt(difference / norm);
}

// float32: sums of a few hundred products, exponentials of logits of size 10. The 2-byte dtypes:
// weights and outputs rounded to nearest, errors of at most u = 2^-9 (bfloat16) or 2^-12 (float16)
// each, half of that on average: a third of what is allowed.
double RelativeErrorTolerance(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return 5e-6;
    case DType::kF16:
      return 0x1p-11;
    case DType::kBF16:
      return 0x1p-8;
    case DType::kF8E4M3:  // no backend computes in it
      break;
  }
  LOCKSTEP_CHECK(false);
}

HostFacedCuda::HostFacedCuda(const CudaBackend::Options& options, DType activations,
                             bool write_float32)
    : activations_(activations), write_float32_(write_float32) {
  auto stream = OwnedCudaStream::Create();
  Must(stream.status());
  stream_ = *std::move(stream);
  auto backend = CudaBackend::Create(options, stream_.get());
  Must(backend.status());
  backend_ = *std::move(backend);
}

HostFacedCuda::~HostFacedCuda() { Must(Synchronize(stream_.get())); }

absl::StatusOr<std::unique_ptr<AttentionMetadata>> HostFacedCuda::BuildMetadata(
    const AttentionBatch& batch, int64_t block_size) const {
  return backend_->BuildMetadata(batch, block_size);
}

void HostFacedCuda::WriteKv(const MatrixView& keys, const MatrixView& values,
                            std::span<const int64_t> slots, const KvCacheView& cache) const {
  const DType dtype = write_float32_ ? DType::kF32 : activations_;
  const DeviceCache device = Upload(cache);
  const DeviceBuffer device_keys = ToDevice(Packed(keys, dtype));
  const DeviceBuffer device_values = ToDevice(Packed(values, dtype));
  backend_->WriteKv(OnDevice(keys, dtype, device_keys), OnDevice(values, dtype, device_values),
                    slots, device.view);
  Must(backend_->status());
  Must(Synchronize(stream_.get()));
  ToHost(device.keys, cache.keys, CacheBytes(cache));
  ToHost(device.values, cache.values, CacheBytes(cache));
}

void HostFacedCuda::Forward(const AttentionGeometry& geometry, const AttentionMetadata& metadata,
                            const MatrixView& query, const KvCacheView& cache,
                            const MatrixView& out) const {
  const DeviceCache device = Upload(cache);
  const DeviceBuffer device_query = ToDevice(Packed(query, activations_));
  const int64_t bytes = out.rows * out.cols * SizeOf(activations_);
  const DeviceBuffer device_out = PoisonedDevice(bytes);
  backend_->Forward(geometry, metadata, OnDevice(query, activations_, device_query), device.view,
                    OnDevice(out, activations_, device_out));
  Must(backend_->status());
  Must(Synchronize(stream_.get()));
  std::vector<char> packed(bytes);
  ToHost(device_out, packed.data(), bytes);
  for (int64_t r = 0; r < out.rows; ++r) {
    Convert(activations_, packed.data() + r * out.cols * SizeOf(activations_), DType::kF32,
            out.row<float>(r), out.cols);
  }
}

CudaBackend::Options OptionsFor(const ScenarioShape& shape) {
  CudaBackend::Options options;
  options.block_size = shape.block_size;
  auto& sizes = options.sizes;
  sizes.max_num_requests = std::max<int64_t>(1, std::ssize(shape.requests));
  sizes.max_num_tokens = std::max<int64_t>(1, shape.padding_rows);
  sizes.max_model_len = 1;
  for (const RequestShape& request : shape.requests) {
    // Each request is written whole, too.
    sizes.max_num_tokens += request.seq_len;
    sizes.max_model_len = std::max(sizes.max_model_len, request.seq_len);
  }
  for (int64_t size : shape.group_sizes) sizes.num_query_heads += size;
  sizes.num_kv_heads = std::ssize(shape.group_sizes);
  sizes.head_dim = shape.head_dim;
  sizes.sliding_windows = {0};
  if (shape.sliding_window != 0) sizes.sliding_windows.push_back(shape.sliding_window);
  return options;
}

std::unique_ptr<AttentionBackend> MakeHostFacedCuda(const ScenarioShape& shape, DType activations,
                                                    CudaPrefill prefill) {
  CudaBackend::Options options = OptionsFor(shape);
  options.prefill = prefill;
  return std::make_unique<HostFacedCuda>(options, activations, shape.seed % 2 == 0);
}

bool HasWarpgroupPrefill() {
  const AttentionGeometry geometry = {
      .num_query_heads = 1, .num_kv_heads = 1, .head_dim = 64, .kv_groups = {{0, 1}}, .scale = 1};
  const auto layer =
      CudaAttentionLayer::Create(geometry, DType::kBF16, DType::kBF16, CudaPrefill::kWarpgroup);
  LOCKSTEP_CHECK(layer.ok() || layer.status().code() == absl::StatusCode::kUnimplemented);
  return layer.ok();
}

}  // namespace lockstep

#include "attention/checked_backend.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "attention/kv_convert.h"
#include "attention/reference_backend.h"
#include "runtime/core/difference.h"

namespace lockstep {
namespace {

class CheckedMetadata : public AttentionMetadata {
 public:
  std::unique_ptr<AttentionMetadata> backend;
  std::unique_ptr<AttentionMetadata> reference;
};

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

void FillNan(const MatrixView& m) {
  for (int64_t row = 0; row < m.rows; ++row) std::fill_n(m.row<float>(row), m.cols, kNan);
}

}  // namespace

double AttentionTolerance(DType kv_dtype) {
  switch (kv_dtype) {
    case DType::kF32:
      return 0x1p-12;
    case DType::kF16:
      return 0x1p-9;
    case DType::kBF16:
    case DType::kF8E4M3:
      return 0x1p-6;
  }
  LOCKSTEP_CHECK(false);
}

absl::StatusOr<std::unique_ptr<CheckedBackend>> CheckedBackend::Create(
    std::unique_ptr<AttentionBackend> backend) {
  if (dynamic_cast<const ReferenceBackend*>(backend.get()) != nullptr) {
    return absl::InvalidArgumentError(
        "the check of attention compares a backend with \"reference\", and \"reference\" is the "
        "backend in use: choose another");
  }
  return std::unique_ptr<CheckedBackend>(new CheckedBackend(std::move(backend)));
}

CheckedBackend::CheckedBackend(std::unique_ptr<AttentionBackend> backend)
    : backend_(std::move(backend)),
      reference_(std::make_unique<ReferenceBackend>()),
      capabilities_(backend_->capabilities()) {
  capabilities_.graph_support = GraphSupport::kNever;
}

std::string CheckedBackend::name() const { return backend_->name() + ", checked"; }

absl::StatusOr<std::unique_ptr<AttentionMetadata>> CheckedBackend::BuildMetadata(
    const AttentionBatch& batch, int64_t block_size) const {
  auto metadata = std::make_unique<CheckedMetadata>();
  LOCKSTEP_ASSIGN_OR_RETURN(metadata->reference, reference_->BuildMetadata(batch, block_size));
  LOCKSTEP_ASSIGN_OR_RETURN(metadata->backend, backend_->BuildMetadata(batch, block_size));
  ++found_.steps;
  layer_ = 0;
  query_start_loc_.assign(batch.query_start_loc.begin(), batch.query_start_loc.end());
  seq_lens_.assign(batch.seq_lens.begin(), batch.seq_lens.end());
  slot_mapping_.assign(batch.slot_mapping.begin(), batch.slot_mapping.end());
  return metadata;
}

// Row of the last batch -> request and position; padding belongs to none.
void CheckedBackend::Locate(int64_t row, AttentionDifference& place) const {
  place.row = row;
  if (row >= query_start_loc_.back()) return;
  const auto next = std::upper_bound(query_start_loc_.begin(), query_start_loc_.end(), row);
  place.request = next - query_start_loc_.begin() - 1;
  place.position = seq_lens_[place.request] - (*next - row);
}

void CheckedBackend::WriteKv(const MatrixView& keys, const MatrixView& values,
                             std::span<const int64_t> slots, const KvCacheView& cache) const {
  backend_->WriteKv(keys, values, slots, cache);
  found_.kv_dtype = cache.dtype;
  const bool of_batch =
      std::equal(slots.begin(), slots.end(), slot_mapping_.begin(), slot_mapping_.end());
  for (int64_t t = 0; t < keys.rows; ++t) {
    if (slots[t] == kNoSlot) continue;
    AttentionDifference place{.step = found_.steps, .layer = layer_, .row = t, .slot = slots[t]};
    if (of_batch) Locate(t, place);
    for (place.head = 0; place.head < cache.num_kv_heads; ++place.head) {
      const int64_t column = place.head * cache.head_dim;
      place.where = AttentionDifference::Where::kWrittenKeys;
      CompareWritten(place, keys.row<const float>(t) + column, cache);
      place.where = AttentionDifference::Where::kWrittenValues;
      CompareWritten(place, values.row<const float>(t) + column, cache);
    }
  }
}

void CheckedBackend::CompareWritten(AttentionDifference place, const float* wanted,
                                    const KvCacheView& cache) const {
  const int64_t dim = cache.head_dim;
  const int64_t bytes = SizeOf(cache.dtype);
  const bool keys = place.where == AttentionDifference::Where::kWrittenKeys;
  const char* const written = static_cast<const char*>(keys ? cache.keys : cache.values) +
                              bytes * cache.Offset(place.slot / cache.block_size, place.head,
                                                   place.slot % cache.block_size);
  converted_.resize(dim * bytes);
  const float kv_scale = keys ? cache.k_scale : cache.v_scale;
  ToCache(wanted, kv_scale, cache.dtype, converted_.data(), dim);
  if (std::memcmp(written, converted_.data(), dim * bytes) == 0) return;
  const float scale = LargestMagnitude(wanted, dim);
  for (place.element = 0; place.element < dim; ++place.element) {
    const int64_t offset = place.element * bytes;
    FromCache(written + offset, kv_scale, cache.dtype, &place.value, 1);
    FromCache(converted_.data() + offset, kv_scale, cache.dtype, &place.expected, 1);
    place.relative = RelativeDifference(place.value, place.expected, scale);
    if (place.relative > 0) Keep(place, /*tolerance=*/0);
  }
}

void CheckedBackend::Forward(const AttentionGeometry& geometry, const AttentionMetadata& metadata,
                             const MatrixView& query, const KvCacheView& cache,
                             const MatrixView& out) const {
  const auto* checked = dynamic_cast<const CheckedMetadata*>(&metadata);
  LOCKSTEP_CHECK(checked != nullptr);
  const size_t size = static_cast<size_t>(out.rows * out.cols);
  if (expected_.size() < size) expected_.resize(size);
  const MatrixView expected{expected_.data(), DType::kF32, out.rows, out.cols, out.cols};
  FillNan(expected);
  FillNan(out);
  reference_->Forward(geometry, *checked->reference, query, cache, expected);
  backend_->Forward(geometry, *checked->backend, query, cache, out);
  found_.kv_dtype = cache.dtype;
  for (int64_t row = 0; row < out.rows; ++row) {
    AttentionDifference place{.step = found_.steps, .layer = layer_};
    Locate(row, place);
    CompareRow(geometry, place, out.row<const float>(row), expected.row<const float>(row));
  }
  found_.rows += out.rows;
  ++found_.layers;
  ++layer_;
}

void CheckedBackend::CompareRow(const AttentionGeometry& geometry, AttentionDifference place,
                                const float* value, const float* expected) const {
  const int64_t width = geometry.num_query_heads * geometry.head_dim;
  const float scale = LargestMagnitude(expected, width);
  bool not_finite = false;
  AttentionDifference largest = place;
  for (int64_t i = 0; i < width; ++i) {
    not_finite |= std::isnan(value[i]) && std::isnan(expected[i]);
    const double relative = RelativeDifference(value[i], expected[i], scale);
    if (!(relative > largest.relative)) continue;
    largest.relative = relative;
    largest.head = i / geometry.head_dim;
    largest.element = i % geometry.head_dim;
    largest.value = value[i];
    largest.expected = expected[i];
  }
  if (not_finite) ++found_.rows_not_finite;
  if (largest.relative > 0) Keep(largest, AttentionTolerance(found_.kv_dtype));
}

void CheckedBackend::Keep(const AttentionDifference& difference, double tolerance) const {
  if (difference.relative > found_.largest.relative) found_.largest = difference;
  if (found_.failed || difference.relative <= tolerance) return;
  found_.failed = true;
  found_.first = difference;
}

std::string CheckedBackend::Describe(const AttentionDifference& d) const {
  const std::string row = d.request < 0 ? absl::StrFormat("row %d", d.row)
                                        : absl::StrFormat("request %d, position %d (row %d)",
                                                          d.request, d.position, d.row);
  const std::string place = absl::StrFormat("step %d, layer %d, %s", d.step, d.layer, row);
  if (d.where != AttentionDifference::Where::kOutput) {
    const bool keys = d.where == AttentionDifference::Where::kWrittenKeys;
    return absl::StrFormat("%s, local KV head %d, element %d: slot %d holds the %s %.9g, not %.9g",
                           place, d.head, d.element, d.slot, keys ? "key" : "value", d.value,
                           d.expected);
  }
  return absl::StrFormat(
      "%s, local query head %d, element %d: %.9g, the reference gives %.9g: %.3g of the row's "
      "largest "
      "magnitude",
      place, d.head, d.element, d.value, d.expected, d.relative);
}

absl::Status CheckedBackend::status() const {
  if (!found_.failed) return absl::OkStatus();
  std::string message = absl::StrFormat("attention backend \"%s\" is wrong: %s", backend_->name(),
                                        Describe(found_.first));
  if (found_.first.where == AttentionDifference::Where::kOutput) {
    absl::StrAppend(&message,
                    absl::StrFormat("; the tolerance of a %s cache is %.3g", Name(found_.kv_dtype),
                                    AttentionTolerance(found_.kv_dtype)));
  }
  return absl::InternalError(message);
}

std::string CheckedBackend::Summary() const {
  std::string text = absl::StrFormat(
      "attention backend \"%s\" against \"reference\": %d step%s, %d layers, %d rows compared",
      backend_->name(), found_.steps, found_.steps == 1 ? "" : "s", found_.layers, found_.rows);
  if (found_.rows_not_finite > 0) {
    absl::StrAppend(&text, "; NaN in ", found_.rows_not_finite, " rows of both");
  }
  if (found_.largest.relative == 0) return text + "; no difference";
  absl::StrAppend(&text, "; largest difference (tolerance ",
                  absl::StrFormat("%.3g): ", AttentionTolerance(found_.kv_dtype)),
                  Describe(found_.largest));
  return text;
}

}  // namespace lockstep

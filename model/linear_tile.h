// The one GEMM loop of Linear, for all instruction sets: instantiated by linear_*.cc with a `V`
// that wraps the vector type. Included inside an unnamed namespace of each, since those files are
// compiled for different CPUs: nothing here may be shared between them, nor call an inline function
// that is (the linker would keep any one copy).
//
// Order of sums, the reason for the batch invariance that ops.h promises: K is cut into blocks of
// kDepthBlock; in a block, lane l of one vector accumulates the products of k = l, l + L, l + 2L,
// ... in turn (L = V::kLanes, missing elements of the last vector are zeros), the lanes are then
// added by V::Reduce4's fixed tree, and the blocks are added in order. A tile of any height and
// width does exactly this for each of its elements.
//
// V has: X, W element types; XVec, WVec, Acc vectors; kLanes; kTileRows; Zero(), LoadX(p),
// LoadX(p, n), LoadW(p), LoadW(p, n) (n < kLanes elements, rest zero), Fma(acc, x, w), and
// Reduce4(a, b, c, d, out): out[i] = sum of the lanes of the i-th.

// 2048: an x block of 64 rows (512 KB in float32) stays in a 1-2 MB L2 beside the weights' stream,
// and 4 weight rows (32 KB) in a 48 KB L1; the sum of lanes is at most 6% of a tile's work.
constexpr int64_t kDepthBlock = 2048;
constexpr int64_t kRowBlock = 64;
constexpr int kTileCols = 4;
constexpr int kStreamCols = 8;  // with one row, more columns give more independent sums

struct TileOut {
  float* y;  // [M, N of the tile]
  int64_t stride;
  const float* bias;  // null: none, or not yet the last block
  bool first;         // block 0 writes y, later ones add to it
};

template <class V, int M, int N>
inline void StoreTile(const typename V::Acc (&acc)[M][N], const TileOut& out) {
  for (int m = 0; m < M; ++m) {
    float* y = out.y + m * out.stride;
    for (int n0 = 0; n0 < N; n0 += 4) {
      constexpr int kLast = N - 1;
      const auto pick = [&](int i) -> const typename V::Acc& {
        return acc[m][n0 + i < N ? n0 + i : kLast];
      };
      float sums[4];
      V::Reduce4(pick(0), pick(1), pick(2), pick(3), sums);
      for (int i = 0; i < 4 && n0 + i < N; ++i) {
        float sum = out.first ? sums[i] : y[n0 + i] + sums[i];
        if (out.bias != nullptr) sum += out.bias[n0 + i];
        y[n0 + i] = sum;
      }
    }
  }
}

// kPrefetch: ask for the weights of the tile to the right, whose rows are pages away, where the
// hardware's prefetcher would start anew.
template <class V, int M, int N, bool kPrefetch>
inline void Tile(const typename V::X* x, int64_t x_stride, const typename V::W* w, int64_t w_stride,
                 int64_t depth, const TileOut& out) {
  typename V::Acc acc[M][N];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) acc[m][n] = V::Zero();
  }
  const auto step = [&](const auto& load_x, const auto& load_w) __attribute__((always_inline)) {
    typename V::WVec ws[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) ws[n] = load_w(n);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const typename V::XVec xs = load_x(m);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) acc[m][n] = V::Fma(acc[m][n], xs, ws[n]);
    }
  };
  int64_t k = 0;
  for (; k + V::kLanes <= depth; k += V::kLanes) {
    if constexpr (kPrefetch) {
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) __builtin_prefetch(w + (N + n) * w_stride + k, 0, 2);
    }
    step(
        [&](int m) __attribute__((always_inline)) { return V::LoadX(x + m * x_stride + k); },
        [&](int n) __attribute__((always_inline)) { return V::LoadW(w + n * w_stride + k); });
  }
  if (k < depth) {
    const int rest = static_cast<int>(depth - k);
    step(
        [&](int m) __attribute__((always_inline)) { return V::LoadX(x + m * x_stride + k, rest); },
        [&](int n) __attribute__((always_inline)) { return V::LoadW(w + n * w_stride + k, rest); });
  }
  StoreTile<V, M, N>(acc, out);
}

// `rows` < kMax rows, by the tile of that height.
template <class V, int N, bool kPrefetch, int kMax>
inline void TileOfRows(int64_t rows, const typename V::X* x, int64_t x_stride,
                       const typename V::W* w, int64_t w_stride, int64_t depth,
                       const TileOut& out) {
  if constexpr (kMax > 1) {
    if (rows < kMax) {
      return TileOfRows<V, N, kPrefetch, kMax - 1>(rows, x, x_stride, w, w_stride, depth, out);
    }
  }
  Tile<V, kMax, N, kPrefetch>(x, x_stride, w, w_stride, depth, out);
}

// Columns [n, n + N) of rows [begin, end), kRows at a time, over one block of K.
template <class V, int N, int kRows>
inline void Panel(const LinearArgs& args, int64_t begin, int64_t end, int64_t n, int64_t k,
                  int64_t depth, bool prefetch) {
  const auto* x = static_cast<const typename V::X*>(args.x) + k;
  const auto* w = static_cast<const typename V::W*>(args.weight) + n * args.weight_stride + k;
  const bool last = k + depth == args.depth;
  const float* bias = last && args.bias != nullptr ? args.bias + n : nullptr;
  for (int64_t t = begin; t < end; t += kRows) {
    const int64_t rows = end - t < kRows ? end - t : kRows;
    const TileOut out = {args.y + t * args.y_stride + n, args.y_stride, bias, k == 0};
    if (prefetch && t == begin) {
      TileOfRows<V, N, true, kRows>(rows, x + t * args.x_stride, args.x_stride, w,
                                    args.weight_stride, depth, out);
    } else {
      TileOfRows<V, N, false, kRows>(rows, x + t * args.x_stride, args.x_stride, w,
                                     args.weight_stride, depth, out);
    }
  }
}

template <class V>
void LinearColumns(const LinearArgs& args, Range columns) {
  for (int64_t k = 0; k < args.depth; k += kDepthBlock) {
    const int64_t depth = args.depth - k < kDepthBlock ? args.depth - k : kDepthBlock;
    for (int64_t t = 0; t < args.rows; t += kRowBlock) {
      const int64_t end = args.rows - t < kRowBlock ? args.rows : t + kRowBlock;
      int64_t n = columns.begin;
      // The tile to the right must exist for its weights to be prefetched.
      if (args.rows == 1) {
        for (; n + kStreamCols <= columns.end; n += kStreamCols) {
          Panel<V, kStreamCols, 1>(args, t, end, n, k, depth, n + 2 * kStreamCols <= columns.end);
        }
      }
      for (; n + kTileCols <= columns.end; n += kTileCols) {
        Panel<V, kTileCols, V::kTileRows>(args, t, end, n, k, depth,
                                          n + 2 * kTileCols <= columns.end);
      }
      for (; n < columns.end; ++n) Panel<V, 1, V::kTileRows>(args, t, end, n, k, depth, false);
    }
  }
}

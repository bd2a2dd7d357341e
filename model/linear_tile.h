// The one GEMM loop of Linear, for all instruction sets: instantiated by linear_*.cc with a `V`
// that wraps the vector type. Included inside an unnamed namespace of each, since those files are
// compiled for different CPUs: nothing here may be shared between them, nor call an inline function
// that is (the linker would keep any one copy).
//
// Order of sums, the reason for the batch invariance that ops.h promises: K's steps (packed lines,
// see linear_packing.h) are cut into blocks of kStepBlock; in a block an element's sum starts at
// zero and takes V::Fma of one step after the other, and the blocks are added in order. Every
// element has a lane of its own, so tiles of any height and width do exactly this.
//
// V has: X, an element of x; Acc, XStep and WStep, the operands of a step for kLanes columns;
// kLanes; kStep, elements of x in a step; kRows, the most rows of a tile; Vectors(rows), how many
// vectors of columns go with them (all sums, a step's weights and one x must fit in the
// registers); Zero(), LoadX(p), LoadW(words), Fma(acc, x, w), Load(p), Store(p, acc), Add(a, b).

constexpr int64_t kPanel = 16;  // words of a line, columns of a panel

// 1024: 4 panels of a block (256 KB) leave room in a 1 MB L2 for the rows' block beside them; and
// it bounds the rounding errors of long sums.
constexpr int64_t kStepBlock = 1024;

// Where a sum goes and how.
struct TileOut {
  float* y;  // of the tile's first element
  int64_t stride;
  const float* bias;  // of the tile's first column; null: none, or not yet the last block
  bool first;         // block 0 writes y, later ones add to it
};

// One row of sums whose columns are not all there: the last `columns` of a product.
__attribute__((noinline)) void StorePart(const float* sums, int64_t columns, float* y,
                                         const TileOut& out) {
  for (int64_t i = 0; i < columns; ++i) {
    float sum = out.first ? sums[i] : y[i] + sums[i];
    if (out.bias != nullptr) sum += out.bias[i];
    y[i] = sum;
  }
}

template <class V, int M, int N>
inline void StoreTile(const typename V::Acc (&acc)[M][N], int64_t columns, const TileOut& out) {
  if (columns < N * V::kLanes) {
    float sums[N * V::kLanes];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) V::Store(sums + n * V::kLanes, acc[m][n]);
      StorePart(sums, columns, out.y + m * out.stride, out);
    }
    return;
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      float* const y = out.y + m * out.stride + n * V::kLanes;
      typename V::Acc sum = out.first ? acc[m][n] : V::Add(V::Load(y), acc[m][n]);
      if (out.bias != nullptr) sum = V::Add(sum, V::Load(out.bias + n * V::kLanes));
      V::Store(y, sum);
    }
  }
}

// With few rows memory is the limit, and the hardware's prefetcher loses time at the end of every
// page and panel: tiles of at most kPrefetchRows rows ask for each panel's line this many ahead,
// and near the end of the panels for the first lines of those to the right. Measured: 12 to 32 are
// alike, into L2; into L1 costs a fifth.
constexpr int64_t kPrefetchLines = 24;
constexpr int kPrefetchRows = 8;

template <class V, int M, int N>
inline void Tile(const LinearArgs& args, int64_t row, int64_t column, int64_t columns,
                 int64_t begin, int64_t end) {
  const auto* x = static_cast<const typename V::X*>(args.x) + row * args.x_stride;
  const uint32_t* w[N];
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) {
    const int64_t c = column + n * V::kLanes;
    w[n] =
        static_cast<const uint32_t*>(args.weight) + c / kPanel * args.steps * kPanel + c % kPanel;
  }
  typename V::Acc acc[M][N];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) acc[m][n] = V::Zero();
  }
  // Steps [s, until), with an eye on what lies `ahead` words further.
  const auto run = [&](int64_t s, int64_t until, int64_t ahead) __attribute__((always_inline)) {
    for (; s < until; ++s) {
      typename V::WStep ws[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        const uint32_t* const line = w[n] + s * kPanel;
        ws[n] = V::LoadW(line);
        if constexpr (M <= kPrefetchRows) __builtin_prefetch(line + ahead, 0, 2);
      }
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const typename V::XStep xs = V::LoadX(x + m * args.x_stride + s * V::kStep);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) acc[m][n] = V::Fma(acc[m][n], xs, ws[n]);
      }
    }
  };
  if constexpr (M <= kPrefetchRows) {
    const int64_t turn = end - begin > kPrefetchLines ? end - kPrefetchLines : begin;
    const int64_t right = N * V::kLanes * args.steps - (end - begin) * kPanel;
    run(begin, turn, kPrefetchLines * kPanel);
    run(turn, end, kPrefetchLines * kPanel + right);
  } else {
    run(begin, end, 0);
  }
  const bool last = end == args.steps;
  StoreTile<V, M, N>(acc, columns - column,
                     {args.y + row * args.y_stride + column, args.y_stride,
                      last && args.bias != nullptr ? args.bias + column : nullptr, begin == 0});
}

// `rows` <= kMax rows, by the tile of that height; N vectors of columns.
template <class V, int N, int kMax>
inline void TileOfRows(int64_t rows, const LinearArgs& args, int64_t row, int64_t column,
                       int64_t columns, int64_t begin, int64_t end) {
  if constexpr (kMax > 1) {
    if (rows < kMax) {
      return TileOfRows<V, N, kMax - 1>(rows, args, row, column, columns, begin, end);
    }
  }
  // Where the registers do not hold N vectors for so many rows, the caller does not ask for it.
  if constexpr (N <= V::Vectors(kMax)) {
    Tile<V, kMax, N>(args, row, column, columns, begin, end);
  }
}

// Rows of a tile: 9 rows go as 5 and 4, not as 8 and a slow single one.
template <class V>
constexpr int64_t RowsAtOnce(int64_t rows) {
  const int64_t tiles = (rows + V::kRows - 1) / V::kRows;
  return (rows + tiles - 1) / tiles;
}

template <class V, int N>
inline void TilesOfRows(const LinearArgs& args, Range rows, int64_t column, int64_t columns,
                        int64_t begin, int64_t end) {
  const int64_t step = RowsAtOnce<V>(rows.end - rows.begin);
  for (int64_t row = rows.begin; row < rows.end; row += step) {
    const int64_t count = rows.end - row < step ? rows.end - row : step;
    TileOfRows<V, N, V::kRows>(count, args, row, column, columns, begin, end);
  }
}

template <class V, int N>
inline int64_t WideColumns(const LinearArgs& args, Range rows, int64_t column, int64_t columns,
                           int64_t begin, int64_t end) {
  for (; column + N * V::kLanes <= columns; column += N * V::kLanes) {
    TilesOfRows<V, N>(args, rows, column, columns, begin, end);
  }
  return column;
}

template <class V>
void LinearRun(const LinearArgs& args, Range rows, Range columns) {
  const int wide = V::Vectors(RowsAtOnce<V>(rows.end - rows.begin));
  for (int64_t s = 0; s < args.steps; s += kStepBlock) {
    const int64_t end = args.steps - s < kStepBlock ? args.steps : s + kStepBlock;
    int64_t column = columns.begin;
    if (wide == 4) column = WideColumns<V, 4>(args, rows, column, columns.end, s, end);
    if (wide == 3) column = WideColumns<V, 3>(args, rows, column, columns.end, s, end);
    if (wide >= 2) column = WideColumns<V, 2>(args, rows, column, columns.end, s, end);
    for (; column < columns.end; column += V::kLanes) {
      TilesOfRows<V, 1>(args, rows, column, columns.end, s, end);
    }
  }
}

template <class V>
int64_t ColumnsAtOnce(int64_t rows) {
  const int64_t columns = V::Vectors(RowsAtOnce<V>(rows)) * V::kLanes;
  // Reading is all that few rows wait for: smaller pieces, so that all threads end together.
  if (rows <= 2 && columns > 2 * kPanel) return 2 * kPanel;
  return columns < kPanel ? kPanel : columns;
}

template <class V>
constexpr LinearKernel KernelOf() {
  return {LinearRun<V>, ColumnsAtOnce<V>};
}

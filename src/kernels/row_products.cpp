// SPDX-License-Identifier: Apache-2.0
//
// Tiles of 6 by 16 in registers, over packed panels (kernels/lanes.h).
//
// Threads: see row_products.h.   Memory: see row_products.h.
#include "kernels/row_products.h"

#include <algorithm>
#include <vector>

#include "kernels/shared_rows.h"

namespace plimsoll::kernels {
namespace {

constexpr std::int64_t kRowsPacked = 256;

// Products of rows: panels of 16 columns of the weights, kPanelRows rows at a time.
constexpr std::int64_t kPanel = 2 * kLanes;
constexpr int kPanelRows = 6;

template <int R>
PLIMSOLL_INLINE void multiply_panel(const RowProduct& p, const float* panel, std::int64_t row,
                                    std::int64_t column, float* y) {
  Lanes sum[R][2] = {};
  for (std::int64_t k = 0; k < p.in; ++k) {
    Lanes w0;
    Lanes w1;
    load(panel + k * kPanel, w0);
    load(panel + k * kPanel + kLanes, w1);
    for (int r = 0; r < R; ++r) {
      const float x = p.x[(row + r) * p.in + k];
      sum[r][0] += w0 * x;
      sum[r][1] += w1 * x;
    }
  }
  for (std::int64_t half = 0; half < 2; ++half) {
    const std::int64_t c = column + half * kLanes;
    if (c >= p.out) {
      break;
    }
    Lanes bias = {};
    if (p.bias != nullptr) {
      load_some(p.bias + c, p.out - c, 0.0F, bias);
    }
    for (int r = 0; r < R; ++r) {
      store_some(sum[r][half] + bias, p.out - c, y + (row + r) * p.out + c);
    }
  }
}

PLIMSOLL_CLONES void multiply_some(const RowProduct& p, const float* panels, std::int64_t begin,
                                   std::int64_t end, float* y) {
  constexpr std::int64_t kBand = 8 * kPanelRows;  // Rows that stay in the cache over all panels.
  for (std::int64_t band = begin; band < end; band += kBand) {
    const std::int64_t stop = std::min(end, band + kBand);
    for (std::int64_t column = 0; column < p.out; column += kPanel) {
      const float* panel = panels + column * p.in;
      std::int64_t row = band;
      for (; row + kPanelRows <= stop; row += kPanelRows) {
        multiply_panel<kPanelRows>(p, panel, row, column, y);
      }
      for (; row < stop; ++row) {
        multiply_panel<1>(p, panel, row, column, y);
      }
    }
  }
}

// A tile of gᵀ x over one block of rows: R columns of g by 16 of x, both packed.
template <int R>
PLIMSOLL_INLINE void add_tile(const float* g, const float* x, std::int64_t rows, std::int64_t step,
                              std::int64_t columns, float* sum) {
  Lanes part[R][2] = {};
  for (std::int64_t v = 0; v < rows; ++v) {
    Lanes x0;
    Lanes x1;
    load(x + v * kPanel, x0);
    load(x + v * kPanel + kLanes, x1);
    for (int r = 0; r < R; ++r) {
      const float by = g[v * kPanelRows + r];
      part[r][0] += x0 * by;
      part[r][1] += x1 * by;
    }
  }
  for (int r = 0; r < R; ++r) {
    for (std::int64_t half = 0; half < 2 && half * kLanes < columns; ++half) {
      float* to = sum + r * step + half * kLanes;
      const std::int64_t left = columns - half * kLanes;
      Lanes before;
      load_some(to, left, 0.0F, before);
      store_some(before + part[r][half], left, to);
    }
  }
}

PLIMSOLL_INLINE void add_tiles(std::int64_t wide, const float* g, const float* x, std::int64_t rows,
                               std::int64_t step, std::int64_t columns, float* sum) {
  switch (wide) {
    case 1:
      return add_tile<1>(g, x, rows, step, columns, sum);
    case 2:
      return add_tile<2>(g, x, rows, step, columns, sum);
    case 3:
      return add_tile<3>(g, x, rows, step, columns, sum);
    case 4:
      return add_tile<4>(g, x, rows, step, columns, sum);
    case 5:
      return add_tile<5>(g, x, rows, step, columns, sum);
    default:
      return add_tile<kPanelRows>(g, x, rows, step, columns, sum);
  }
}

// Copies `wide` columns of a block of rows side by side, `step` floats a row, filled up with zeros.
PLIMSOLL_INLINE void pack_columns(const float* from, std::int64_t columns, std::int64_t rows,
                                  std::int64_t wide, std::int64_t step, float* to) {
  for (std::int64_t v = 0; v < rows; ++v) {
    for (std::int64_t c = 0; c < step; ++c) {
      to[v * step + c] = c < wide ? from[v * columns + c] : 0.0F;
    }
  }
}

// Columns first … last of g, each thread its own. `packed` holds a block of x and one of g.
PLIMSOLL_CLONES void multiply_some_columns(const ColumnProduct& p, std::int64_t first,
                                           std::int64_t last, float* packed, float* sum) {
  float* packed_g = packed + kRowsPacked * (p.in + kPanel);
  for (std::int64_t begin = 0; begin < p.rows; begin += kRowsPacked) {
    const std::int64_t rows = std::min(kRowsPacked, p.rows - begin);
    for (std::int64_t c = 0; c < p.in; c += kPanel) {
      pack_columns(p.x + begin * p.in + c, p.in, rows, std::min(kPanel, p.in - c), kPanel,
                   packed + c * kRowsPacked);
    }
    for (std::int64_t o = first; o < last; o += kPanelRows) {
      const std::int64_t wide = std::min<std::int64_t>(kPanelRows, last - o);
      pack_columns(p.g + begin * p.out + o, p.out, rows, wide, kPanelRows, packed_g);
      for (std::int64_t c = 0; c < p.in; c += kPanel) {
        add_tiles(wide, packed_g, packed + c * kRowsPacked, rows, p.in, std::min(kPanel, p.in - c),
                  sum + o * p.in + c);
      }
    }
  }
}

}  // namespace

void multiply_rows(const RowProduct& product, float* y) {
  const std::int64_t in = product.in;
  const std::int64_t out = product.out;
  std::vector<float> packed(static_cast<std::size_t>(blocks_of(out, kPanel) * kPanel * in), 0.0F);
  for (std::int64_t c = 0; c < out; ++c) {
    float* to = packed.data() + c / kPanel * kPanel * in + c % kPanel;
    const float* from = product.weight + (product.turned ? c : c * in);
    const std::int64_t step = product.turned ? out : 1;
    for (std::int64_t k = 0; k < in; ++k) {
      to[k * kPanel] = from[k * step];
    }
  }
  share(product.rows, in * out / 8, [&](std::int64_t begin, std::int64_t end) {
    multiply_some(product, packed.data(), begin, end, y);
  });
}

void multiply_columns(const ColumnProduct& product, float* sum) {
  if (!product.add) {
    std::fill(sum, sum + product.out * product.in, 0.0F);
  }
  share(blocks_of(product.out, kPanelRows), product.rows * product.in * kPanelRows / 8,
        [&](std::int64_t first, std::int64_t last) {
          std::vector<float> packed(
              static_cast<std::size_t>(kRowsPacked * (product.in + kPanel + kPanelRows)));
          multiply_some_columns(product, first * kPanelRows,
                                std::min(product.out, last * kPanelRows), packed.data(), sum);
        });
}

}  // namespace plimsoll::kernels

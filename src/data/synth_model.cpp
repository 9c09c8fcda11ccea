// SPDX-License-Identifier: Apache-2.0
//
// SynthModel: see synth_model.h.
//
// Threads, Memory: as the header says.
#include "data/synth_model.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "base/clones.h"
#include "base/philox.h"
#include "base/round.h"

namespace plimsoll {
namespace {

constexpr std::int64_t kVector = 16;  // Floats handled at once.
constexpr std::int64_t kTileRows = 4;
constexpr float kImageNoise = 1.0F;  // Beside a signal of 1 per element.
constexpr float kTextNoise = 1.0F;
constexpr float kShared = 0.9F;           // Of A in B; the rest is B's own.
constexpr float kCentre = 0.8F;           // Of the class centre in z; the rest is the row's own.
constexpr float kConditionAngle = 0.58F;  // Tangent of the angle the condition turns a text by.

// Streams of the generator. Rows use their number.
constexpr std::uint64_t kImageMapStream = ~0ULL;
constexpr std::uint64_t kTextMapStream = ~0ULL - 1;
constexpr std::uint64_t kPlaneStream = ~0ULL - 2;
constexpr std::uint64_t kCentreStream = ~0ULL - 3;

// About normal: the sum of four uniform bytes, mean 510, variance 4 × (256² − 1) / 12.
float bell(std::uint32_t word) noexcept {
  const std::uint32_t pairs = (word & 0x00FF00FFU) + ((word >> 8) & 0x00FF00FFU);
  const auto sum = static_cast<std::int32_t>((pairs & 0xFFFFU) + (pairs >> 16));
  return static_cast<float>(sum - 510) * 6.765875e-3F;
}

// Writes `count` bell-shaped numbers × scale; returns the counter after the last used.
PLIMSOLL_CLONES std::uint64_t draw(std::uint64_t seed, std::uint64_t stream, std::uint64_t counter,
                                   float scale, float* out, std::int64_t count) {
  for (std::int64_t i = 0; i < count; i += 4) {
    const PhiloxBlock block = philox(seed, stream, counter++);
    const std::int64_t rest = std::min<std::int64_t>(4, count - i);
    for (std::int64_t t = 0; t < rest; ++t) {
      out[i + t] = bell(block[static_cast<std::size_t>(t)]) * scale;
    }
  }
  return counter;
}

// out[r] += sum over k of latent[r][k] × map[k], for kTileRows rows of `width` floats.
PLIMSOLL_CLONES void project(const float* latent, const float* map, std::int64_t width,
                             float* out) {
  for (std::int64_t j = 0; j < width; j += kVector) {
    float sums[kTileRows][kVector];
    for (std::int64_t r = 0; r < kTileRows; ++r) {
      for (std::int64_t t = 0; t < kVector; ++t) {
        sums[r][t] = out[r * width + j + t];
      }
    }
    for (std::int64_t k = 0; k < SynthModel::kLatent; ++k) {
      const float* row = map + k * width + j;
      for (std::int64_t r = 0; r < kTileRows; ++r) {
        const float z = latent[r * SynthModel::kLatent + k];
        for (std::int64_t t = 0; t < kVector; ++t) {
          sums[r][t] += z * row[t];
        }
      }
    }
    for (std::int64_t r = 0; r < kTileRows; ++r) {
      for (std::int64_t t = 0; t < kVector; ++t) {
        out[r * width + j + t] = sums[r][t];
      }
    }
  }
}

// Scales the first `dim` of `row` to unit length into `out`. The sum runs in kVector lanes.
PLIMSOLL_CLONES void normalise(const float* row, std::int64_t dim, float* out) {
  float lanes[kVector] = {};
  std::int64_t i = 0;
  for (; i + kVector <= dim; i += kVector) {
    for (std::int64_t t = 0; t < kVector; ++t) {
      lanes[t] += row[i + t] * row[i + t];
    }
  }
  for (std::int64_t t = 0; i + t < dim; ++t) {
    lanes[t] += row[i + t] * row[i + t];
  }
  float sum = 0.0F;
  for (const float lane : lanes) {
    sum += lane;
  }
  const float scale = sum > 0.0F ? 1.0F / std::sqrt(sum) : 0.0F;
  for (std::int64_t j = 0; j < dim; ++j) {
    out[j] = row[j] * scale;
  }
}

}  // namespace

// Work space of one call of fill().
struct SynthModel::Tile {
  std::array<float, kTileRows * kLatent> latent{};
  std::vector<float> image;
  std::vector<float> text;
};

SynthModel::SynthModel(std::uint64_t seed, std::int64_t image_dim, std::int64_t text_dim,
                       std::int64_t classes)
    : seed_(seed),
      image_dim_(image_dim),
      text_dim_(text_dim),
      image_width_(round_up(image_dim, kVector)),
      text_width_(round_up(text_dim, kVector)),
      classes_(classes),
      image_map_(static_cast<std::size_t>(kLatent * image_width_)),
      text_map_(static_cast<std::size_t>(kLatent * text_width_)),
      plane_(static_cast<std::size_t>(2 * text_width_)),
      centres_(static_cast<std::size_t>(classes * kLatent)) {
  // Columns of variance 1 / kLatent, so that a projected element has variance 1.
  const float scale = 1.0F / std::sqrt(static_cast<float>(kLatent));
  draw(seed, kImageMapStream, 0, scale, image_map_.data(), kLatent * image_width_);
  draw(seed, kTextMapStream, 0, scale, text_map_.data(), kLatent * text_width_);
  if (image_dim == text_dim) {
    const float own = std::sqrt(1.0F - kShared * kShared);
    for (std::size_t i = 0; i < text_map_.size(); ++i) {
      text_map_[i] = kShared * image_map_[i] + own * text_map_[i];
    }
  }
  // Directions of the length that turns a text (length about √dim × √(1 + noise²)) by the angle.
  draw(seed, kPlaneStream, 0, 1.0F, plane_.data(), 2 * text_width_);
  const float length =
      kConditionAngle * std::sqrt(static_cast<float>(text_dim) * (1.0F + kTextNoise * kTextNoise));
  for (std::int64_t d = 0; d < 2; ++d) {
    float* direction = plane_.data() + d * text_width_;
    normalise(direction, text_dim, direction);
    for (std::int64_t j = 0; j < text_width_; ++j) {
      direction[j] = j < text_dim ? direction[j] * length : 0.0F;
    }
  }
  draw(seed, kCentreStream, 0, 1.0F, centres_.data(), classes * kLatent);
}

void SynthModel::fill(std::int64_t first, std::span<float> image, std::span<float> text) const {
  Tile tile;
  tile.image.resize(static_cast<std::size_t>(kTileRows * image_width_));
  tile.text.resize(static_cast<std::size_t>(kTileRows * text_width_));
  const std::int64_t rows = static_cast<std::int64_t>(image.size()) / image_dim_;
  for (std::int64_t r = 0; r < rows; r += kTileRows) {
    fill_tile(first + r, std::min(kTileRows, rows - r), image.data() + r * image_dim_,
              text.data() + r * text_dim_, tile);
  }
}

void SynthModel::fill_tile(std::int64_t first, std::int64_t rows, float* image, float* text,
                           Tile& tile) const {
  for (std::int64_t r = 0; r < rows; ++r) {
    const auto stream = static_cast<std::uint64_t>(first + r);
    const PhiloxBlock choice = philox(seed_, stream, 0);
    float* z = tile.latent.data() + r * kLatent;
    std::uint64_t counter = draw(seed_, stream, 1, 1.0F, z, kLatent);
    if (classes_ > 0) {
      const float* centre =
          centres_.data() + static_cast<std::int64_t>(choice[0]) % classes_ * kLatent;
      for (std::int64_t k = 0; k < kLatent; ++k) {
        z[k] = kCentre * centre[k] + 0.6F * z[k];
      }
    }
    counter = draw(seed_, stream, counter, kImageNoise, tile.image.data() + r * image_width_,
                   image_width_);
    float* noisy = tile.text.data() + r * text_width_;
    draw(seed_, stream, counter, kTextNoise, noisy, text_width_);
    float x = bell(choice[1]);
    float y = bell(choice[2]);
    const float radius = std::sqrt(x * x + y * y);
    x = radius > 0.0F ? x / radius : 1.0F;
    y = radius > 0.0F ? y / radius : 0.0F;
    for (std::int64_t j = 0; j < text_width_; ++j) {
      noisy[j] += x * plane_[static_cast<std::size_t>(j)] +
                  y * plane_[static_cast<std::size_t>(text_width_ + j)];
    }
  }
  project(tile.latent.data(), image_map_.data(), image_width_, tile.image.data());
  project(tile.latent.data(), text_map_.data(), text_width_, tile.text.data());
  for (std::int64_t r = 0; r < rows; ++r) {
    normalise(tile.image.data() + r * image_width_, image_dim_, image + r * image_dim_);
    normalise(tile.text.data() + r * text_width_, text_dim_, text + r * text_dim_);
  }
}

}  // namespace plimsoll

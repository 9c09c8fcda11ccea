// SPDX-License-Identifier: Apache-2.0
#include "plimsoll/synth.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>
#include <numeric>
#include <thread>
#include <vector>

#include <fmt/core.h>

#include "base/check.h"
#include "base/philox.h"

namespace plimsoll {
namespace {

constexpr std::int64_t kLatent = 64;
constexpr std::int64_t kBlockRows = 2048;
constexpr std::int64_t kDimMax = 1 << 16;
constexpr float kNoise = 1.2F;   // Per side, relative to the shared part.
constexpr float kHidden = 0.8F;  // Length of the image's component in the hidden plane.

// Streams of the counter-based generator; a row's own streams come after them.
enum Stream : std::uint64_t { kImageMap = 1, kTextMap = 2, kPlane = 3, kFirstRow = 1 << 10 };
enum Part : std::uint64_t { kLatentPart = 0, kImageNoise = 1ULL << 32, kTextNoise = 2ULL << 32 };

// A nearly normal number of variance 1 from one random word: the sum of its four bytes (an
// Irwin-Hall distribution). Ten times cheaper than a logarithm, and noise is most of the work.
float bell(std::uint32_t word) {
  const auto sum = static_cast<float>((word & 0xFFU) + ((word >> 8) & 0xFFU) +
                                      ((word >> 16) & 0xFFU) + (word >> 24));
  return (sum - 510.0F) * (1.0F / 147.8F);
}

void add_noise(std::uint64_t seed, std::uint64_t stream, std::uint64_t part, float scale,
               std::span<float> out) {
  for (std::size_t i = 0; i < out.size(); i += 4) {
    const PhiloxBlock words = philox(seed, stream, part + i);
    for (std::size_t k = 0; k < 4 && i + k < out.size(); ++k) {
      out[i + k] += scale * bell(words[k]);
    }
  }
}

void normalise(std::span<float> x) {
  const float square = std::inner_product(x.begin(), x.end(), x.begin(), 0.0F);
  const float scale = 1.0F / std::max(std::sqrt(square), 1e-12F);
  std::for_each(x.begin(), x.end(), [scale](float& value) { value *= scale; });
}

// out += sum over k of z[k] · map[k], vectorised along the row.
__attribute__((target_clones("avx2", "default"))) void add_product(const float* z, const float* map,
                                                                   std::int64_t dim, float* out) {
  for (std::int64_t k = 0; k < kLatent; ++k) {
    const float factor = z[k];
    const float* row = map + k * dim;
    for (std::int64_t j = 0; j < dim; ++j) {
      out[j] += factor * row[j];
    }
  }
}

// The fixed parts: linear maps from the latent, and the hidden plane.
struct World {
  std::int64_t image_dim;
  std::int64_t text_dim;
  std::uint64_t seed;
  std::vector<float> image_map;
  std::vector<float> text_map;
  std::vector<float> plane;

  explicit World(const SynthOptions& options)
      : image_dim(options.image_dim), text_dim(options.text_dim), seed(options.seed) {
    const float scale = 1.0F / std::sqrt(static_cast<float>(kLatent));
    image_map.assign(static_cast<std::size_t>(kLatent * image_dim), 0.0F);
    add_noise(seed, kImageMap, 0, scale, image_map);
    if (text_dim == image_dim) {
      text_map = image_map;
    } else {
      text_map.assign(static_cast<std::size_t>(kLatent * text_dim), 0.0F);
      add_noise(seed, kTextMap, 0, scale, text_map);
    }
    plane.assign(static_cast<std::size_t>(2 * image_dim), 0.0F);
    add_noise(seed, kPlane, 0, 1.0F, plane);
  }

  void write_row(std::int64_t row, std::span<float> image, std::span<float> text) const {
    const std::uint64_t stream = kFirstRow + static_cast<std::uint64_t>(row);
    std::array<float, kLatent + 1> latent{};  // The last one turns into the hidden angle.
    add_noise(seed, stream, kLatentPart, 1.0F, latent);
    std::fill(image.begin(), image.end(), 0.0F);
    std::fill(text.begin(), text.end(), 0.0F);
    add_product(latent.data(), image_map.data(), image_dim, image.data());
    add_product(latent.data(), text_map.data(), text_dim, text.data());
    const float angle = latent[kLatent] * std::numbers::pi_v<float>;
    const float a = kHidden * std::cos(angle);
    const float b = kHidden * std::sin(angle);
    for (std::size_t j = 0; j < image.size(); ++j) {
      image[j] += a * plane[j] + b * plane[image.size() + j];
    }
    add_noise(seed, stream, kImageNoise, kNoise, image);
    add_noise(seed, stream, kTextNoise, kNoise, text);
    normalise(image);
    normalise(text);
  }
};

// One block of rows, filled by several threads and then appended.
struct Block {
  std::vector<std::int64_t> ids;
  std::vector<float> image;
  std::vector<float> text;

  void fill(const World& world, std::int64_t first, std::int64_t rows, int threads) {
    ids.resize(static_cast<std::size_t>(rows));
    std::iota(ids.begin(), ids.end(), first);
    image.resize(static_cast<std::size_t>(rows * world.image_dim));
    text.resize(static_cast<std::size_t>(rows * world.text_dim));
    const auto share = [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        world.write_row(first + i,
                        std::span(image).subspan(static_cast<std::size_t>(i * world.image_dim),
                                                 static_cast<std::size_t>(world.image_dim)),
                        std::span(text).subspan(static_cast<std::size_t>(i * world.text_dim),
                                                static_cast<std::size_t>(world.text_dim)));
      }
    };
    std::vector<std::jthread> crew;
    for (int t = 1; t < threads; ++t) {
      crew.emplace_back(share, rows * t / threads, rows * (t + 1) / threads);
    }
    share(0, rows / threads);
  }
};

Result<void> check(const SynthOptions& options) {
  if (options.rows < 1) {
    return fail(ErrorCode::kInvalidArgument, fmt::format("{} rows", options.rows),
                "--rows takes a whole number of at least 1");
  }
  if (options.image_dim < 1 || options.image_dim > kDimMax || options.text_dim < 1 ||
      options.text_dim > kDimMax) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("widths {} and {}", options.image_dim, options.text_dim),
                "--image-dim and --text-dim take 1 to 65536");
  }
  return {};
}

}  // namespace

Result<FeatureInfo> synth_cosir(Governor governor, const SynthOptions& options,
                                const std::function<bool(std::int64_t, std::int64_t)>& progress) {
  PLIMSOLL_TRY_VOID(check(options));
  const int threads = std::clamp(options.threads, 1, 64);
  const std::int64_t floats = options.image_dim + options.text_dim;
  // The block being filled, and the maps.
  PLIMSOLL_TRY(const Lease lease,
               governor.reserve(Tag::kOther, (kBlockRows * (floats + 2) + (kLatent + 2) * floats) *
                                                 static_cast<std::int64_t>(sizeof(float))));
  PLIMSOLL_TRY(auto writer,
               FeatureWriter::create(governor,
                                     {.directory = options.out,
                                      .columns = {{"image", DType::kFloat32, {options.image_dim}},
                                                  {"text", DType::kFloat32, {options.text_dim}}}}));
  const World world(options);
  Block block;
  for (std::int64_t first = 0; first < options.rows; first += kBlockRows) {
    const std::int64_t rows = std::min(kBlockRows, options.rows - first);
    block.fill(world, first, rows, threads);
    const std::array<std::span<const std::byte>, 2> columns{std::as_bytes(std::span(block.image)),
                                                            std::as_bytes(std::span(block.text))};
    PLIMSOLL_TRY_VOID(writer.append(block.ids, columns));
    if (progress && !progress(first + rows, options.rows)) {
      return fail(ErrorCode::kInvalidArgument,
                  fmt::format("{}: cancelled after {} rows; nothing was kept", options.out.string(),
                              first + rows));
    }
  }
  PLIMSOLL_TRY_VOID(writer.finish());
  return FeatureStore::inspect(options.out);
}

}  // namespace plimsoll

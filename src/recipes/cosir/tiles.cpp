// SPDX-License-Identifier: Apache-2.0
#include "recipes/cosir/tiles.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <span>
#include <utility>

namespace plimsoll::cosir {

Encoded empty_encoded(const Model& model, const LossOptions& options, std::int64_t rows) {
  const auto room = [&] { return at::empty({rows, model.shape.dim}, at::kFloat); };
  Encoded all;
  all.turned.out = room();
  all.turned.unit = room();
  if (options.weights[kInfoNce] != 0.0) {
    all.image = room();
  }
  return all;
}

std::vector<at::Tensor> trained_parameters(const Model& model) {
  std::vector<at::Tensor> list;
  for (const auto& part : {combiner_parameters(model), projection_parameters(model)}) {
    for (const NamedTensor& named : part) {
      list.push_back(named.tensor);
    }
  }
  return list;
}

Tiles::Tiles(const Model& model, const LossOptions& options, bool gradient_caching,
             const LossInput& in)
    : model_(model),
      options_(options),
      caching_(gradient_caching),
      in_(in),
      rows_(in.conditions.size(0)),
      values_(in.conditions.detach()),
      kept_(static_cast<std::size_t>(tiles_of(rows_))) {}

std::int64_t Tiles::rows_of(std::int64_t tile) const noexcept {
  return std::min(kTileRows, rows_ - first_row(tile));
}

Tiles::Tile Tiles::made(std::int64_t tile) const {
  const std::int64_t first = first_row(tile);
  const std::int64_t count = rows_of(tile);
  Tile one{{in_.image.narrow(0, first, count), in_.text.narrow(0, first, count),
            values_.narrow(0, first, count).detach(),
            in_.ids.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(count)),
            in_.groups.narrow(0, first, count), in_.epoch},
           {}};
  one.in.conditions.set_requires_grad(true);
  one.rows = cosir::encode(model_, one.in, options_);
  return one;
}

void Tiles::encode(std::int64_t tile, Encoded& all) {
  const c10::AutoGradMode graph{!caching_};
  Tile one = made(tile);
  const c10::AutoGradMode off{false};
  // The whole takes a tile's values over, and the tile keeps its graph alone.
  const auto take = [&](const at::Tensor& whole, at::Tensor& part) {
    const at::Tensor place = whole.narrow(0, first_row(tile), part.size(0));
    place.copy_(part);
    part.set_data(place);
  };
  take(all.turned.out, one.rows.turned.out);
  take(all.turned.unit, one.rows.turned.unit);
  if (one.rows.image.defined()) {
    take(all.image, one.rows.image);
  }
  if (tile == 0) {
    all.text = one.rows.text.narrow(0, 0, std::min(rows_, kRotationTexts)).clone();
  }
  if (!caching_) {
    kept_[static_cast<std::size_t>(tile)] = std::move(one);
  }
}

std::vector<at::Tensor> Tiles::gradients(std::int64_t tile, const Slopes& slopes) {
  auto& kept = kept_[static_cast<std::size_t>(tile)];
  const Tile one = kept ? *std::exchange(kept, std::nullopt) : made(tile);
  const std::int64_t count = rows_of(tile);
  std::vector<at::Tensor> ends;
  std::vector<at::Tensor> down;
  const auto join = [&](const at::Tensor& end, const at::Tensor& slope, std::int64_t most) {
    if (slope.defined() && end.requires_grad()) {
      ends.push_back(most < count ? end.narrow(0, 0, most) : end);
      down.push_back(slope.narrow(0, first_row(tile), most));
    }
  };
  join(one.rows.turned.out, slopes.out, count);
  join(one.rows.turned.unit, slopes.text_unit, count);
  if (tile == 0) {
    join(one.rows.text, slopes.text, std::min(rows_, kRotationTexts));
  }
  if (one.rows.image.defined()) {
    join(one.rows.image, slopes.image, count);
  }
  if (ends.empty()) {
    return {};
  }
  std::vector<at::Tensor> asked = trained_parameters(model_);
  asked.insert(asked.begin(), one.in.conditions);
  return torch::autograd::grad(ends, asked, down, std::nullopt, false, /*allow_unused=*/true);
}

}  // namespace plimsoll::cosir

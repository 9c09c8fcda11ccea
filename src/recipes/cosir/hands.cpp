// SPDX-License-Identifier: Apache-2.0
#include "recipes/cosir/hands.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <span>
#include <tuple>
#include <utility>

#include "base/check.h"
#include "base/round.h"
#include "plimsoll/torch.h"
#include "recipes/cosir/settle.h"
#include "torch/admission.h"

namespace plimsoll::cosir {
namespace {

constexpr std::int64_t kAligned = 64;
constexpr std::int64_t kSlopes = 3;

// Where ranks agree, behind RankCrew::kShare.
enum Place : std::int64_t { kShape = 1, kRoom, kOrder, kEncoded, kCompared, kGraded, kAdmitted };
// What rank 0 orders.
enum Order : std::int64_t { kEnd, kStep, kAdmit };

std::vector<at::Tensor> all_parameters(const Model& model) {
  std::vector<at::Tensor> list;
  for (const NamedTensor& named : frozen_parameters(model)) {
    list.push_back(named.tensor);
  }
  for (const at::Tensor& trained : trained_parameters(model)) {
    list.push_back(trained);
  }
  return list;
}

}  // namespace

StepRoom::StepRoom(const Model& of, std::int64_t rows_most, std::shared_ptr<RankRows> room)
    : room_(std::move(room)) {
  const ModelShape& shape = of.shape;
  const std::int64_t tiles = tiles_of(rows_most);
  const auto rows = [&](std::int64_t width) { return next({rows_most, width}, at::kFloat); };
  image = rows(shape.image_dim);
  text = rows(shape.text_dim);
  conditions = rows(shape.label_dim);
  groups = next({rows_most}, at::kLong);
  ids = next({rows_most}, at::kLong);
  for (at::Tensor* each :
       {&out, &text_unit, &encoded_image, &out_slope, &text_unit_slope, &image_slope}) {
    *each = rows(shape.dim);
  }
  of_conditions = rows(shape.label_dim);
  const auto trained = trained_parameters(of);
  for (const at::Tensor& parameter : trained) {
    std::vector<std::int64_t> sizes = parameter.sizes().vec();
    sizes.insert(sizes.begin(), tiles);
    of_parameters.push_back(next(sizes, at::kFloat));
  }
  defined = next({kSlopes + tiles * (1 + static_cast<std::int64_t>(trained.size()))}, at::kByte);
  for (const at::Tensor& parameter : all_parameters(of)) {
    model.push_back(next(parameter.sizes(), at::kFloat));
  }
}

at::Tensor StepRoom::next(at::IntArrayRef shape, at::ScalarType kind) {
  const std::int64_t bytes =
      c10::multiply_integers(shape) * static_cast<std::int64_t>(c10::elementSize(kind));
  const std::int64_t begin = used_;
  used_ = round_up(used_ + bytes, kAligned);
  if (room_ == nullptr) {
    return {};
  }
  const auto all = std::as_writable_bytes(room_->rows());
  return tensor_over(all.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(bytes)),
                     shape, kind, room_);
}

Hands::Hands(RankCrew& crew, const CosirConfig& config, const Model& model, Governor governor,
             StepRoom room)
    : crew_(crew),
      config_(config),
      model_(model),
      loss_(loss_options(config)),
      governor_(std::move(governor)),
      room_(std::move(room)) {}

Result<std::unique_ptr<Hands>> Hands::open(RankCrew& crew, const CosirConfig& config,
                                           const Model& model, std::int64_t rows_most,
                                           Governor& governor) {
  if (crew.first()) {
    const ModelShape& shape = model.shape;
    const std::array<std::int64_t, 6> numbers{
        shape.image_dim,           shape.text_dim, shape.dim, shape.label_dim,
        shape.projections ? 1 : 0, rows_most};
    PLIMSOLL_TRY_VOID(crew.say(kShape, numbers));
  }
  const StepRoom sizes(model, rows_most, nullptr);
  PLIMSOLL_TRY(const RankRows room, crew.make_room(kRoom, sizes.bytes(), governor));
  return std::unique_ptr<Hands>(new Hands(
      crew, config, model, governor, StepRoom(model, rows_most, std::make_shared<RankRows>(room))));
}

Hands::~Hands() {
  if (crew_.first() && !crew_.broken()) {
    const std::array<std::int64_t, 1> end{kEnd};
    static_cast<void>(crew_.say(kOrder, end));
  }
}

bool Hands::own(std::int64_t tile) const noexcept {
  return tile % crew_.count() == crew_.rank();
}

LossInput Hands::input(std::int64_t rows, std::int64_t epoch) const {
  return {room_.image.narrow(0, 0, rows),
          room_.text.narrow(0, 0, rows),
          room_.conditions.narrow(0, 0, rows),
          {room_.ids.const_data_ptr<std::int64_t>(), static_cast<std::size_t>(rows)},
          room_.groups.narrow(0, 0, rows),
          epoch};
}

Result<LossInput> Hands::begin(const LossInput& in) {
  const c10::AutoGradMode off{false};
  const std::int64_t rows = in.conditions.size(0);
  LossInput shared = input(rows, in.epoch);
  shared.image.copy_(in.image);
  shared.text.copy_(in.text);
  shared.conditions.copy_(in.conditions);
  shared.groups.copy_(in.groups);
  std::copy(in.ids.begin(), in.ids.end(), room_.ids.data_ptr<std::int64_t>());
  const auto parameters = all_parameters(model_);
  for (std::size_t k = 0; k < parameters.size(); ++k) {
    room_.model[k].copy_(parameters[k]);
  }
  const std::array<std::int64_t, 3> order{kStep, rows, in.epoch};
  PLIMSOLL_TRY_VOID(crew_.say(kOrder, order));
  return shared;
}

Encoded Hands::encoded(std::int64_t rows) const {
  Encoded all;
  all.turned.out = room_.out.narrow(0, 0, rows);
  all.turned.unit = room_.text_unit.narrow(0, 0, rows);
  if (loss_.weights[kInfoNce] != 0.0) {
    all.image = room_.encoded_image.narrow(0, 0, rows);
  }
  return all;
}

Result<void> Hands::encode(Tiles& tiles, Encoded& all) {
  PLIMSOLL_TRY_VOID(crew_.agree(kEncoded, {}, [&]() -> Result<void> {
    for (std::int64_t tile = 0; tile < tiles.count(); ++tile) {
      if (own(tile)) {
        tiles.encode(tile, all);
      }
    }
    return {};
  }));
  return {};
}

Result<void> Hands::compare(const std::function<Slopes()>& compare) {
  PLIMSOLL_TRY_VOID(crew_.agree(kCompared, {}, [&]() -> Result<void> {
    const c10::AutoGradMode off{false};
    const Slopes made = compare();
    auto* flags = room_.defined.data_ptr<std::uint8_t>();
    const auto lay = [&](const at::Tensor& slope, const at::Tensor& place) {
      *flags++ = slope.defined() ? 1 : 0;
      if (slope.defined()) {
        place.narrow(0, 0, slope.size(0)).copy_(slope);
      }
    };
    lay(made.out, room_.out_slope);
    lay(made.text_unit, room_.text_unit_slope);
    lay(made.image, room_.image_slope);
    return {};
  }));
  return {};
}

void Hands::lay(const Tiles& tiles, std::int64_t tile, const std::vector<at::Tensor>& made) {
  const c10::AutoGradMode off{false};
  const auto each = 1 + static_cast<std::int64_t>(room_.of_parameters.size());
  auto* flags = room_.defined.data_ptr<std::uint8_t>() + kSlopes + tile * each;
  std::fill_n(flags, each, std::uint8_t{0});
  for (std::size_t k = 0; k < made.size(); ++k) {
    flags[k] = made[k].defined() ? 1 : 0;
    if (!made[k].defined()) {
      continue;
    }
    const at::Tensor place =
        k == 0 ? room_.of_conditions.narrow(0, Tiles::first_row(tile), tiles.rows_of(tile))
               : room_.of_parameters[k - 1][tile];
    place.copy_(made[k]);
  }
}

Result<void> Hands::differentiate(Tiles& tiles, const Slopes& slopes) {
  PLIMSOLL_TRY_VOID(crew_.agree(kGraded, {}, [&]() -> Result<void> {
    for (std::int64_t tile = 0; tile < tiles.count(); ++tile) {
      if (own(tile)) {
        lay(tiles, tile, tiles.gradients(tile, slopes));
      }
    }
    return {};
  }));
  return {};
}

std::vector<at::Tensor> Hands::gradients(const Tiles& tiles, std::int64_t tile) const {
  const auto each = 1 + static_cast<std::int64_t>(room_.of_parameters.size());
  const auto* flags = room_.defined.const_data_ptr<std::uint8_t>() + kSlopes + tile * each;
  std::vector<at::Tensor> found(static_cast<std::size_t>(each));
  if (flags[0] != 0) {
    found[0] = room_.of_conditions.narrow(0, Tiles::first_row(tile), tiles.rows_of(tile));
  }
  for (std::size_t k = 1; k < found.size(); ++k) {
    if (flags[k] != 0) {
      found[k] = room_.of_parameters[k - 1][tile];
    }
  }
  return found;
}

Result<void> Hands::admit() {
  const std::array<std::int64_t, 1> order{kAdmit};
  PLIMSOLL_TRY_VOID(crew_.say(kOrder, order));
  PLIMSOLL_TRY_VOID(crew_.say(kAdmitted));
  return {};
}

// ---- Of the others ----

Result<void> Hands::step(std::int64_t rows, std::int64_t epoch) {
  Tiles tiles(model_, loss_, config_.gradient_caching, input(rows, epoch));
  Encoded all = encoded(rows);
  PLIMSOLL_TRY_VOID(encode(tiles, all));
  PLIMSOLL_TRY_VOID(crew_.say(kCompared));
  const auto* flags = room_.defined.const_data_ptr<std::uint8_t>();
  const auto slope = [&](const at::Tensor& place) {
    return *flags++ != 0 ? place.narrow(0, 0, rows) : at::Tensor();
  };
  Slopes slopes;
  slopes.out = slope(room_.out_slope);
  slopes.text_unit = slope(room_.text_unit_slope);
  slopes.image = slope(room_.image_slope);
  return differentiate(tiles, slopes);
}

Result<void> Hands::serve() {
  const auto parameters = all_parameters(model_);
  for (std::size_t k = 0; k < parameters.size(); ++k) {
    parameters[k].set_data(room_.model[k]);
  }
  TensorArena::reset_peak();
  for (;;) {
    PLIMSOLL_TRY(const auto said, crew_.say(kOrder));
    const auto [what, rows, epoch] =
        std::tuple(said[0].numbers[0], said[0].numbers[1], said[0].numbers[2]);
    Result<void> done;
    if (what == kEnd) {
      return {};
    }
    if (what == kStep) {
      done = without_refusal([&] { return step(rows, epoch); });
    } else {
      const std::int64_t peak = TensorArena::stats().leased_peak_bytes;
      const auto admitted = crew_.agree(
          kAdmitted, {}, [&] { return admit_tensors(governor_, peak, "its part of a step"); });
      done = admitted ? Result<void>{} : tl::unexpected(admitted.error());
    }
    if (crew_.broken()) {
      return done;
    }
    if (!done) {
      TensorArena::purge();  // Rank 0 has heard it, and orders the same step again, or ends.
    }
    static_cast<void>(governor_.step_boundary());
  }
}

Result<void> lend_a_hand(RankCrew& crew, const CosirConfig& given) {
  CosirConfig config = given;
  PLIMSOLL_TRY_VOID(crew.take_share(config));
  PLIMSOLL_TRY(Governor governor, settle(config, std::filesystem::current_path()));
  PLIMSOLL_TRY(const auto said, crew.say(kShape));
  const auto& numbers = said[0].numbers;
  const ModelShape shape{.image_dim = numbers[0],
                         .text_dim = numbers[1],
                         .dim = numbers[2],
                         .label_dim = numbers[3],
                         .projections = numbers[4] != 0};
  const std::int64_t rows_most = numbers[5];
  const Model model =
      make_model(shape, seed_for(static_cast<std::uint64_t>(config.seed), Purpose::kModel));
  PLIMSOLL_TRY(const auto hands, Hands::open(crew, config, model, rows_most, governor));
  return hands->serve();
}

}  // namespace plimsoll::cosir

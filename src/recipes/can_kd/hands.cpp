// SPDX-License-Identifier: Apache-2.0
#include "recipes/can_kd/hands.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <utility>

#include "base/check.h"
#include "base/round.h"
#include "plimsoll/torch.h"
#include "recipes/can_kd/planning.h"
#include "torch/admission.h"

namespace plimsoll::can_kd {
namespace {

constexpr std::int64_t kAligned = 64;
constexpr std::array kAllAsked{Asked::kHeldOut, Asked::kNormals, Asked::kTests};

// Where ranks agree, behind RankCrew::kShare.
enum Place : std::int64_t { kRoom = 1, kOrder, kDone };
// What rank 0 orders.
enum Order : std::int64_t { kEnd, kAnswer, kRehearse, kAdmit };

std::int64_t answers_bytes(const Data& data) {
  std::size_t most = 0;
  for (const Asked asked : kAllAsked) {
    most = std::max(most, graphs_of(data, asked).size());
  }
  return round_up(static_cast<std::int64_t>(4 * most), kAligned);
}

std::int64_t bytes_of(const at::Tensor& tensor) {
  return round_up(static_cast<std::int64_t>(tensor.nbytes()), kAligned);
}

// Of the graphs asked for the chunks from `first` on, every `every`-th; each into its place.
Result<void> answer_chunks(const Learner& learner, const Data& data, std::int64_t chunk,
                           Asked asked, Answer answer, std::int64_t first, std::int64_t every,
                           const at::Tensor& answers) {
  const c10::AutoGradMode off{false};
  const auto graphs = graphs_of(data, asked);
  const std::int64_t step = std::max<std::int64_t>(1, chunk);
  for (std::int64_t at = first * step; at < std::ssize(graphs); at += every * step) {
    const std::int64_t count = std::min(step, std::ssize(graphs) - at);
    PLIMSOLL_TRY_VOID(data.for_each(
        graphs.subspan(static_cast<std::size_t>(at), static_cast<std::size_t>(count)), count,
        [&](std::int64_t, const GraphTensors& batch) -> Result<void> {
          answers.narrow(0, at, count)
              .copy_(answer == Answer::kLoss ? learner.losses(batch) : learner.scores(batch));
          return {};
        }));
  }
  return {};
}

}  // namespace

std::span<const std::int64_t> graphs_of(const Data& data, Asked asked) {
  return asked == Asked::kHeldOut   ? data.held_out()
         : asked == Asked::kNormals ? data.normals()
                                    : data.set().split(GraphSplit::kTest);
}

Result<at::Tensor> answers_of(const Learner& learner, const Data& data, const CanKdConfig& config,
                              Asked asked, Answer answer) {
  const at::Tensor answers = at::empty({std::ssize(graphs_of(data, asked))}, at::kFloat);
  PLIMSOLL_TRY_VOID(
      answer_chunks(learner, data, config.scoring_chunk, asked, answer, 0, 1, answers));
  return answers;
}

Hands::Hands(RankCrew& crew, const CanKdConfig& config, const Data& data, Governor governor,
             RankRows room)
    : crew_(crew),
      config_(config),
      data_(data),
      governor_(std::move(governor)),
      room_(std::make_shared<RankRows>(std::move(room))) {}

Result<std::unique_ptr<Hands>> Hands::open(RankCrew& crew, const CanKdConfig& config,
                                           const Data& data, Governor& governor) {
  std::int64_t largest = 0;
  for (const Task& task : all_tasks()) {
    if (has_rehearsal(task)) {
      std::int64_t bytes = 0;
      const auto one = make_learner(config, task, data.set().info().table_rows(), nullptr);
      for (const NamedTensor& named : one->model()) {
        bytes += bytes_of(named.tensor);
      }
      largest = std::max(largest, bytes);
    }
  }
  PLIMSOLL_TRY(RankRows room, crew.make_room(kRoom, answers_bytes(data) + largest, governor));
  return std::unique_ptr<Hands>(new Hands(crew, config, data, governor, std::move(room)));
}

Hands::~Hands() {
  if (crew_.first() && !crew_.broken()) {
    const std::array<std::int64_t, 1> end{kEnd};
    static_cast<void>(crew_.say(kOrder, end));
  }
}

at::Tensor Hands::answers(Asked asked) const {
  const std::int64_t graphs = std::ssize(graphs_of(data_, asked));
  const auto bytes = std::as_writable_bytes(room_->rows());
  return tensor_over(bytes.first(static_cast<std::size_t>(4 * graphs)), {graphs}, at::kFloat,
                     room_);
}

std::vector<at::Tensor> Hands::laid(const Learner& learner) const {
  const auto bytes = std::as_writable_bytes(room_->rows());
  std::int64_t begin = answers_bytes(data_);
  std::vector<at::Tensor> list;
  for (const NamedTensor& named : learner.model()) {
    list.push_back(
        tensor_over(bytes.subspan(static_cast<std::size_t>(begin), named.tensor.nbytes()),
                    named.tensor.sizes(), named.tensor.scalar_type(), room_));
    begin += bytes_of(named.tensor);
  }
  return list;
}

Result<void> Hands::answer_own(const Learner& learner, Asked asked, Answer answer) {
  return answer_chunks(learner, data_, config_.scoring_chunk, asked, answer, crew_.rank(),
                       crew_.count(), answers(asked));
}

Result<at::Tensor> Hands::ask(const Learner& learner, const Task& task, Asked asked,
                              Answer answer) {
  const c10::AutoGradMode off{false};
  const auto model = learner.model();
  const auto places = laid(learner);
  for (std::size_t k = 0; k < model.size(); ++k) {
    places[k].copy_(model[k].tensor);
  }
  const std::array<std::int64_t, 5> order{
      kAnswer, static_cast<std::int64_t>(task.role), static_cast<std::int64_t>(task.stage),
      static_cast<std::int64_t>(asked), static_cast<std::int64_t>(answer)};
  PLIMSOLL_TRY_VOID(crew_.say(kOrder, order));
  PLIMSOLL_TRY_VOID(crew_.agree(kDone, {}, [&] { return answer_own(learner, asked, answer); }));
  return answers(asked).clone();
}

Result<void> Hands::admit(std::span<const Task> tasks) {
  for (const Task& task : tasks) {
    if (has_rehearsal(task)) {
      const std::array<std::int64_t, 3> order{kRehearse, static_cast<std::int64_t>(task.role),
                                              static_cast<std::int64_t>(task.stage)};
      PLIMSOLL_TRY_VOID(crew_.say(kOrder, order));
      PLIMSOLL_TRY_VOID(crew_.say(kDone));
    }
  }
  const std::array<std::int64_t, 1> order{kAdmit};
  PLIMSOLL_TRY_VOID(crew_.say(kOrder, order));
  PLIMSOLL_TRY_VOID(crew_.say(kDone));
  return {};
}

// ---- Of the others ----

const Learner& Hands::learner_of(const Task& task) {
  if (!learner_ || !(task_ == task)) {
    learner_.reset();
    learner_ = make_learner(config_, task, data_.set().info().table_rows(), nullptr);
    task_ = task;
  }
  return *learner_;
}

Result<void> Hands::rehearse(const Task& task) {
  const c10::AutoGradMode off{false};
  const Learner& learner = learner_of(task);
  for (const Asked asked : kAllAsked) {
    if (const auto graphs = graphs_of(data_, asked); !graphs.empty()) {
      PLIMSOLL_TRY(const GraphTensors batch,
                   data_.gather(data_.largest(graphs, config_.scoring_chunk)));
      static_cast<void>(learner.losses(batch));
    }
  }
  return {};
}

Result<void> Hands::serve() {
  TensorArena::reset_peak();
  for (;;) {
    PLIMSOLL_TRY(const auto said, crew_.say(kOrder));
    const auto order = said[0].numbers;
    const Task task{static_cast<Role>(order[1]), static_cast<Stage>(order[2])};
    if (order[0] == kEnd) {
      return {};
    }
    const auto done = without_refusal([&]() -> Result<void> {
      PLIMSOLL_TRY_VOID(crew_.agree(kDone, {}, [&]() -> Result<void> {
        if (order[0] == kAdmit) {
          return admit_tensors(governor_, TensorArena::stats().leased_peak_bytes,
                               "its part of an evaluation");
        }
        if (order[0] == kRehearse) {
          return rehearse(task);
        }
        const c10::AutoGradMode off{false};
        const Learner& learner = learner_of(task);
        const auto model = learner.model();
        const auto places = laid(learner);
        for (std::size_t k = 0; k < model.size(); ++k) {
          model[k].tensor.copy_(places[k]);
        }
        return answer_own(learner, static_cast<Asked>(order[3]), static_cast<Answer>(order[4]));
      }));
      return {};
    });
    if (crew_.broken()) {
      return done;
    }
    if (!done) {
      TensorArena::purge();  // Rank 0 has heard it, and orders the same again, or ends.
    }
    static_cast<void>(governor_.step_boundary());
  }
}

Result<void> lend_a_hand(RankCrew& crew, const CanKdConfig& given) {
  CanKdConfig config = given;
  PLIMSOLL_TRY_VOID(crew.take_share(config));
  PLIMSOLL_TRY(Governor governor, settle(config, std::filesystem::current_path()));
  PLIMSOLL_TRY(const auto data, open_data(governor, config));
  PLIMSOLL_TRY(const auto hands, Hands::open(crew, config, *data, governor));
  return hands->serve();
}

}  // namespace plimsoll::can_kd

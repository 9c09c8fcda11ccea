// SPDX-License-Identifier: Apache-2.0
#include "recipes/can_kd/task.h"

#include <algorithm>
#include <array>

namespace plimsoll::can_kd {
namespace {

constexpr std::array kTrained{Stage::kAutoencoder, Stage::kCurriculum, Stage::kNormal,
                              Stage::kFusion};

}  // namespace

const char* stage_name(Stage stage) noexcept {
  constexpr std::array kNames{"autoencoder", "curriculum", "normal", "fusion", "evaluation"};
  return kNames.at(static_cast<std::size_t>(stage));
}

const char* role_name(Role role) noexcept {
  return role == Role::kTeacher ? "teacher" : "student";
}

std::string Task::name() const {
  const std::string whose = role_name(role);
  switch (stage) {
    case Stage::kAutoencoder:
      return whose + "_vgae";
    case Stage::kCurriculum:
      return whose + "_gat_curriculum";
    case Stage::kNormal:
      return whose + "_gat_normal";
    case Stage::kFusion:
      return whose + "_fusion";
    case Stage::kEvaluation:
      break;
  }
  return "evaluation";
}

std::uint64_t Task::number() const noexcept {
  return static_cast<std::uint64_t>(role) * 16 + static_cast<std::uint64_t>(stage);
}

std::vector<Task> all_tasks() {
  std::vector<Task> tasks;
  for (const Role role : {Role::kTeacher, Role::kStudent}) {
    for (const Stage stage : kTrained) {
      tasks.push_back({role, stage});
    }
  }
  tasks.push_back({Role::kStudent, Stage::kEvaluation});
  return tasks;
}

std::vector<Task> wanted_tasks(const CanKdConfig& config) {
  auto tasks = all_tasks();
  std::erase_if(tasks, [&](const Task& task) {
    if (config.stage != "all" && config.stage != stage_name(task.stage)) {
      return true;
    }
    if (task.stage == Stage::kEvaluation) {
      return config.stage == "all" && !config.run_test;
    }
    return config.model_size != "both" && config.model_size != role_name(task.role);
  });
  return tasks;
}

Task classifier_task(Role role, const CanKdConfig& config) {
  return {role, config.fusion_gat == "normal" ? Stage::kNormal : Stage::kCurriculum};
}

}  // namespace plimsoll::can_kd

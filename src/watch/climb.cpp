// SPDX-License-Identifier: Apache-2.0
#include "watch/climb.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

namespace plimsoll {
namespace {

constexpr double kStep = 1.04;     // From one kept look to the next.
constexpr double kFrom = 0.7;      // Share of the peak at which the last part of the way begins.
constexpr std::size_t kRises = 4;  // Kept looks on that part that make it a steady growth.

double real(std::int64_t bytes) {
  return static_cast<double>(bytes);
}

}  // namespace

void Climb::add(double seconds, TreeUse tree) {
  if (tree.bytes > peak_.bytes) {
    peak_ = tree;
  }
  if (!kept_.empty() && real(tree.bytes) < kStep * real(kept_.back().tree.bytes)) {
    return;
  }
  kept_.push_back({seconds, std::move(tree)});
  if (kept_.size() > kKeptMost) {
    kept_.pop_front();
  }
}

Growth Climb::growth() const {
  const auto begins = std::ranges::find_if(
      kept_, [&](const Look& look) { return real(look.tree.bytes) >= kFrom * real(peak_.bytes); });
  if (static_cast<std::size_t>(kept_.end() - begins) < kRises) {
    return {};
  }
  const Look& first = begins == kept_.begin() ? *begins : *std::prev(begins);
  const Look& last = kept_.back();
  Growth growth{.seconds = last.seconds - first.seconds, .ended_at = last.seconds};
  std::map<std::pair<int, std::string>, std::pair<int, std::int64_t>> groups;
  for (const ProcessUse& now : last.tree.largest) {
    const auto was = std::ranges::find(first.tree.largest, now.pid, &ProcessUse::pid);
    if (was != first.tree.largest.end() && now.bytes > was->bytes) {
      auto& [processes, bytes] = groups[{now.parent, now.name}];
      ++processes;
      bytes += now.bytes - was->bytes;
      growth.bytes += now.bytes - was->bytes;
    }
  }
  if (2 * growth.bytes < last.tree.bytes - first.tree.bytes) {
    return {};  // More processes, not larger ones.
  }
  for (const auto& [key, group] : groups) {
    if (group.second > growth.group_bytes) {
      growth.name = key.second;
      std::tie(growth.processes, growth.group_bytes) = group;
    }
  }
  return growth;
}

}  // namespace plimsoll

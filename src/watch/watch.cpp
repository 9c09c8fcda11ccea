// SPDX-License-Identifier: Apache-2.0
#include "watch/watch.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include <fmt/format.h>

#include "base/check.h"
#include "os/clock.h"
#include "plimsoll/bytes.h"

namespace plimsoll {
namespace {

// In which a leak is looked for. What is retained, files and page tables are judged apart.
constexpr std::array kMayLeak{Owner::kTensors, Owner::kLeased,  Owner::kPython,
                              Owner::kNative,  Owner::kHeap,    Owner::kUnexplained,
                              Owner::kShared,  Owner::kChildren};
constexpr std::array kJudged{
    Owner::kTensors,     Owner::kLeased, Owner::kPython,   Owner::kNative,   Owner::kHeap,
    Owner::kUnexplained, Owner::kShared, Owner::kChildren, Owner::kRetained, Owner::kFiles};
// What is said where nothing leaks: the first of these that some owner does.
constexpr std::array kWorthAWord{Course::kSaturating, Course::kStep, Course::kWarmUp,
                                 Course::kSawtooth};
constexpr double kInOnePhase = 0.5;  // Share of the growth.

std::size_t index(Owner owner) noexcept {
  return static_cast<std::size_t>(owner);
}

std::string signed_bytes(double bytes) {
  return format_bytes(static_cast<std::int64_t>(std::llround(bytes)));
}

}  // namespace

Watch::Watch(int pid, double width) : looker_(pid, TreeLooker::Root::kCounted) {
  trends_.fill(Trend(width));
}

Result<void> Watch::look(double at, const Inside& inside, std::string_view phase,
                         std::int64_t close_bytes) {
  PLIMSOLL_TRY(seen_, looker_.look(close_bytes));
  last_ns_ = now_ns();
  last_at_ = at;
  if (looks_++ == 0) {
    first_ns_ = last_ns_;
    first_at_ = at;
  }
  const Holdings now(seen_, inside);
  note_phase(phase, now);
  note_processes();
  holdings_ = now;
  for (std::size_t owner = 0; owner < kOwnerCount; ++owner) {
    if (const std::int64_t bytes = now.of(static_cast<Owner>(owner)); bytes >= 0) {
      trends_[owner].add(at, bytes);
    }
  }
  return {};
}

// What came in a phase is kept by owner, once the first windows are over.
void Watch::note_phase(std::string_view name, const Holdings& now) {
  constexpr std::size_t kFirstWindows = 2;
  if (trends_[index(Owner::kFiles)].windows() < kFirstWindows) {
    return;
  }
  auto phase = std::ranges::find(phases_, name, &Phase::name);
  if (phase == phases_.end()) {
    if (phases_.size() < kPhasesMost) {
      phases_.push_back({.name = std::string(name)});
    }
    phase = std::prev(phases_.end());
  }
  for (std::size_t owner = 0; owner < kOwnerCount; ++owner) {
    const std::int64_t before = holdings_.of(static_cast<Owner>(owner));
    const std::int64_t after = now.of(static_cast<Owner>(owner));
    if (before >= 0 && after >= 0) {
      phase->grown[owner] += after - before;
    }
  }
}

void Watch::note_processes() {
  const auto& largest = seen_.tree.largest;
  std::erase_if(first_, [&](const First& one) {
    return std::ranges::find(largest, one.pid, &ProcessUse::pid) == largest.end();
  });
  for (const ProcessUse& use : largest) {
    if (std::ranges::find(first_, use.pid, &First::pid) == first_.end()) {
      first_.push_back({.pid = use.pid, .anonymous = use.anonymous});
    }
  }
}

std::string Watch::grown_process() const {
  std::string name;
  std::int64_t most = 0;
  for (const ProcessUse& use : seen_.tree.largest) {
    const auto first = std::ranges::find(first_, use.pid, &First::pid);
    if (first != first_.end() && use.anonymous - first->anonymous > most) {
      most = use.anonymous - first->anonymous;
      name = fmt::format("{} {}", use.name, use.pid);
    }
  }
  return name;
}

std::string Watch::growing_phase(Owner owner) const {
  std::int64_t all = 0;
  const Phase* most = nullptr;
  for (const Phase& phase : phases_) {
    const std::int64_t grown = phase.grown[index(owner)];
    all += std::max<std::int64_t>(grown, 0);
    if (grown > 0 && (most == nullptr || grown > most->grown[index(owner)])) {
      most = &phase;
    }
  }
  const bool above = most != nullptr && static_cast<double>(most->grown[index(owner)]) >
                                            kInOnePhase * static_cast<double>(all);
  return above ? most->name : "";
}

Finding Watch::found(Owner owner, const Judged& judged, Course course) const {
  Finding finding{.course = course,
                  .owner = owner,
                  .bytes_per_unit = judged.slope,
                  .grown_bytes = judged.grown_bytes,
                  .bound_bytes = judged.bound_bytes};
  if (course == Course::kLeak) {
    const double seconds = static_cast<double>(last_ns_ - first_ns_) / 1e9;
    finding.bytes_per_second = seconds > 0 ? judged.slope * (last_at_ - first_at_) / seconds : 0;
    finding.phase = growing_phase(owner);
    finding.process = owner == Owner::kChildren ? grown_process() : "";
  }
  return finding;
}

// Every owner that is known is known from the first look on, as files are: one trend's windows are
// all of them.
void Watch::judge() {
  const Trend& files = trends_[index(Owner::kFiles)];
  if (files.windows() == judged_windows_ && files.width() == judged_width_) {
    return;
  }
  judged_windows_ = files.windows();
  judged_width_ = files.width();
  for (const Owner owner : kJudged) {
    judged_[index(owner)] = trends_[index(owner)].judge();
  }
}

Finding Watch::verdict() {
  judge();
  std::optional<Owner> leaks;
  for (const Owner owner : kMayLeak) {
    if (judged_[index(owner)].course == Course::kLeak &&
        (!leaks || judged_[index(owner)].slope > judged_[index(*leaks)].slope)) {
      leaks = owner;
    }
  }
  if (leaks) {
    return found(*leaks, judged_[index(*leaks)], Course::kLeak);
  }
  for (const auto& [owner, course] : {std::pair{Owner::kRetained, Course::kRetention},
                                      std::pair{Owner::kFiles, Course::kCache}}) {
    if (const Judged& one = judged_[index(owner)]; one.course == Course::kLeak) {
      return found(owner, one, course);
    }
  }
  for (const Course course : kWorthAWord) {
    const auto who = std::ranges::max_element(kJudged, {}, [&](Owner owner) {
      const Judged& one = judged_[index(owner)];
      return one.course == course ? one.grown_bytes : INT64_MIN;
    });
    if (judged_[index(*who)].course == course) {
      return found(*who, judged_[index(*who)], course);
    }
  }
  return {.course = judged_[index(Owner::kFiles)].course == Course::kTooShort ? Course::kTooShort
                                                                              : Course::kPlateau};
}

std::string Finding::text(std::string_view unit) const {
  const std::string who =
      process.empty() ? owner_name(owner) : fmt::format("{} ({})", owner_name(owner), process);
  const std::string where = phase.empty() ? "" : ", in phase " + phase;
  switch (course) {
    case Course::kTooShort:
      return fmt::format("too early: a verdict takes 8 windows of 25 {}s", unit);
    case Course::kPlateau:
      return "plateau: nothing grows";
    case Course::kWarmUp:
      return fmt::format("warm-up: {} rose by {} at first, and stays", who,
                         format_bytes(grown_bytes));
    case Course::kSaturating:
      return fmt::format("saturating: {} grows ever slower, to about {}", who,
                         format_bytes(bound_bytes));
    case Course::kStep:
      return fmt::format("step: {} rose once, by {}", who, format_bytes(grown_bytes));
    case Course::kSawtooth:
      return fmt::format("sawtooth: {} comes and goes", who);
    case Course::kLeak:
      return fmt::format("leak: {} grows by {} a {}{}", who, signed_bytes(bytes_per_unit), unit,
                         where);
    case Course::kRetention:
      return fmt::format("retention: malloc() keeps {} a {} more of what was freed",
                         signed_bytes(bytes_per_unit), unit);
    case Course::kCache:
      break;
  }
  return fmt::format("cache: mapped files grow by {} a {}; the kernel takes them back",
                     signed_bytes(bytes_per_unit), unit);
}

std::vector<std::string> Finding::advice() const {
  if (course == Course::kRetention) {
    return {
        "set MALLOC_ARENA_MAX=2, or call malloc_trim(0) now and then: nothing is held that is "
        "in use"};
  }
  if (course != Course::kLeak) {
    return {};
  }
  switch (owner) {
    case Owner::kTensors:
      return {
          "look for tensors kept from step to step: a loss that is added up without .item(), "
          "outputs in a list without .detach(), hooks that are registered again in each step"};
    case Owner::kPython:
      return {
          "look for Python objects kept from step to step: lists and dicts that only grow, "
          "functools.lru_cache without a bound, log records that nobody flushes"};
    case Owner::kShared:
      return {
          "look for batches kept after their step: tensors that workers sent stay in shared "
          "memory until the last view of them is gone"};
    case Owner::kChildren:
      return {
          "look for what each worker keeps from item to item: a cache in the dataset, lists of "
          "Python objects that are copied as they are counted; persistent_workers=False starts "
          "them anew each epoch"};
    case Owner::kLeased:
      return {
          "look for batches or leases that are never closed; `plimsoll status RUN` has them by "
          "name"};
    default:
      return {
          "look for what is kept from step to step: losses with their graphs, lists, caches "
          "without a bound, buffers of an extension that are never freed"};
  }
}

}  // namespace plimsoll

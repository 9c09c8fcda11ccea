// SPDX-License-Identifier: Apache-2.0
#include "watch/watch.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include "base/check.h"
#include "base/utf8.h"
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
// What malloc() says parts these: they are not known apart at a look that did not ask it.
constexpr std::array kByMalloc{Owner::kNative, Owner::kRetained, Owner::kUnexplained};
constexpr double kInOnePhase = 0.5;  // Share of the growth.
constexpr int kCollectSteps = 100;
constexpr double kCopied = 0.3;  // Of children's growth, what is resident in all of them grows by.

std::size_t index(Owner owner) noexcept {
  return static_cast<std::size_t>(owner);
}

bool is_by_malloc(std::size_t owner) noexcept {
  return std::ranges::count(kByMalloc, static_cast<Owner>(owner)) > 0;
}

// "38 minutes": for a sentence.
std::string lasting(double seconds) {
  constexpr double kMinute = 60;
  constexpr double kHour = 3600;
  if (seconds < 2 * kMinute) {
    return fmt::format("{:.0f} seconds", seconds);
  }
  return seconds < 2 * kHour ? fmt::format("{:.0f} minutes", seconds / kMinute)
                             : fmt::format("{:.0f} hours", seconds / kHour);
}

const char* advice_of(Owner owner) noexcept {
  switch (owner) {
    case Owner::kTensors:
      return "look for tensors kept from step to step: a loss that is added up without .item(), "
             "outputs in a list without .detach(), hooks that are registered again in each step";
    case Owner::kPython:
      return "look for Python objects kept from step to step: lists and dicts that only grow, "
             "functools.lru_cache without a bound, log records that nobody flushes";
    case Owner::kShared:
      return "look for batches kept after their step: tensors that workers sent stay in shared "
             "memory until the last view of them is gone";
    case Owner::kChildren:
      return "look for what each worker keeps from item to item: a cache in the dataset, lists of "
             "Python objects that are copied as they are counted; persistent_workers=False starts "
             "them anew each epoch";
    case Owner::kLeased:
      return "look for batches or leases that are never closed; `plimsoll status RUN` has them by "
             "name";
    default:
      return "look for what is kept from step to step: losses with their graphs, lists, caches "
             "without a bound, buffers of an extension that are never freed";
  }
}

constexpr std::array kEvaluations{"evaluation", "evaluating", "evaluate",   "eval",   "validation",
                                  "validate",   "validating", "prediction", "predict"};

std::string signed_bytes(double bytes) {
  return format_bytes(static_cast<std::int64_t>(std::llround(bytes)));
}

}  // namespace

const char* evaluation_advice() noexcept {
  return "an evaluation holds the outputs of all its batches until it ends, at any batch size: "
         "keep "
         "less of each (of a Trainer: preprocess_logits_for_metrics), none where only the loss is "
         "wanted (prediction_loss_only=True), add metrics up batch by batch "
         "(batch_eval_metrics=True); on a device eval_accumulation_steps moves them to the host";
}

const char* copies_advice() noexcept {
  return "workers copy pages that they share with the process that forked them, as they count "
         "references to its Python objects: keep what a dataset holds (lists of paths, dicts) in "
         "one NumPy array, tensor or Arrow table; fewer workers copy less";
}

bool is_evaluation(std::string_view phase) noexcept {
  return std::ranges::find(kEvaluations, phase) != kEvaluations.end();
}

Watch::Watch(int pid, double width) : looker_(pid, TreeLooker::Root::kCounted), width_(width) {
  trends_.fill(Trend(width));
  resident_ = Trend(width);
}

Result<void> Watch::look(double at, const Inside& inside, std::optional<std::string_view> phase,
                         std::int64_t close_bytes) {
  PLIMSOLL_TRY(TreeLook seen, looker_.look(close_bytes));
  take(std::move(seen), at, inside, phase);
  return {};
}

void Watch::take(TreeLook seen, double at, const Inside& inside,
                 std::optional<std::string_view> phase) {
  seen_ = std::move(seen);
  last_ns_ = now_ns();
  last_at_ = at;
  if (looks_++ == 0) {
    first_ns_ = last_ns_;
    first_at_ = at;
  }
  Inside said = inside;
  if (inside.malloc_later) {
    said.native = holdings_.of(Owner::kNative);
    said.retained = holdings_.of(Owner::kRetained);
  }
  if (looks_ == 1) {
    const bool itself = said.python >= 0 || said.native >= 0;  // Who looks on later cannot know.
    before_ =
        itself && said.before < 0 ? Holdings(seen_, said).of(Owner::kUnexplained) : said.before;
  }
  said.before = before_;
  const Holdings now(seen_, said);
  const bool heap_known = !inside.malloc_later || said.native < 0;
  if (phase) {
    note_phase(*phase, now, heap_known && heap_known_);
  }
  note_processes();
  if (looks_ > 1 && holdings_.of(Owner::kNative) < 0 && said.native >= 0) {  // Known again.
    trends_[index(Owner::kUnexplained)] = Trend(trends_[index(Owner::kFiles)].width());
  }
  resident_.add(at, seen_.bound_bytes);
  holdings_ = now;
  heap_known_ = heap_known;
  for (std::size_t owner = 0; owner < kOwnerCount; ++owner) {
    if (!heap_known && is_by_malloc(owner)) {
      continue;
    }
    if (const std::int64_t bytes = now.of(static_cast<Owner>(owner)); bytes >= 0) {
      trends_[owner].add(at, bytes);
    } else if (trends_[owner].windows() > 0) {  // It is not known any more, and unexplained now.
      for (const std::size_t begins : {owner, index(Owner::kUnexplained)}) {
        trends_[begins] = Trend(trends_[index(Owner::kFiles)].width());
      }
    }
  }
}

std::vector<PicturePoint> Watch::points() const {
  const Trend& files = trends_[index(Owner::kFiles)];
  std::vector<PicturePoint> points;
  for (const Point& window : files.floors()) {
    points.push_back({.x = window.at});
  }
  for (std::size_t owner = 0; owner < kOwnerCount; ++owner) {
    const std::vector<Point> floors = trends_[owner].floors();
    std::size_t begun = 0;  // Who is known since later has windows that lie across these.
    for (PicturePoint& point : points) {
      while (begun < floors.size() && floors[begun].at < point.x + files.width()) {
        ++begun;
      }
      point.owners[owner] = begun == 0 ? -1 : static_cast<std::int64_t>(floors[begun - 1].bytes);
    }
  }
  return points;
}

// What came in a phase is kept by owner, once the first windows are over; half of it each time that
// twice as much has passed: a cache that was filled early is no part of what grows late.
void Watch::note_phase(std::string_view name, const Holdings& now, bool heap_known) {
  constexpr std::size_t kFirstWindows = 2;
  if (trends_[index(Owner::kFiles)].windows() < kFirstWindows) {
    return;
  }
  if (last_at_ - first_at_ >= 2 * halved_at_) {
    halved_at_ = last_at_ - first_at_;
    for (Phase& one : phases_) {
      std::ranges::for_each(one.grown, [](std::int64_t& bytes) { bytes /= 2; });
    }
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
    if (before >= 0 && after >= 0 && (heap_known || !is_by_malloc(owner))) {
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
      name = fmt::format("{} {}", as_utf8(use.name), use.pid);  // It may be cut in a character.
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
  if (course == Course::kLeak || course == Course::kGarbage || course == Course::kRetention) {
    const double seconds = static_cast<double>(last_ns_ - first_ns_) / 1e9;
    finding.bytes_per_second = seconds > 0 ? judged.slope * (last_at_ - first_at_) / seconds : 0;
    finding.phase = growing_phase(owner);
    finding.process = owner == Owner::kChildren ? grown_process() : "";
    finding.copies = owner == Owner::kChildren && course == Course::kLeak &&
                     resident_.rise() < kCopied * trends_[index(owner)].rise();
  }
  if (course == Course::kRetention) {
    finding.trimmed_bytes = trimmed_bytes_;
  }
  const auto told = std::ranges::find(told_, owner, &Where::owner);
  if (told != told_.end() && (course == Course::kLeak || course == Course::kGarbage)) {
    finding.sites = told->sites;
    finding.holder = told->holder;
    if (told->garbage) {
      finding.course = Course::kGarbage;
      finding.bytes_per_unit = told->bytes_per_unit;
    }
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

void Watch::tell(Where where) {
  where.sites.resize(std::min(where.sites.size(), kSitesMost));
  std::erase_if(told_, [&](const Where& one) { return one.owner == where.owner; });
  told_.push_back(std::move(where));
}

std::size_t Watch::windows() const noexcept {
  return trends_[index(Owner::kFiles)].windows();
}

bool Watch::retains() const {
  return trends_[index(Owner::kRetained)].rise() > 0;
}

std::optional<Watch::Suspect> Watch::suspect() const {
  std::optional<Suspect> most;
  for (const Owner owner : kMayLeak) {
    const double rise = trends_[index(owner)].rise();
    if (rise > 0 && (!most || rise > most->bytes_per_unit)) {
      most = {.owner = owner, .bytes_per_unit = rise};
    }
  }
  return most;
}

// How long it takes, as windows came so far: one in which nobody looked is none.
Finding Watch::early(Owner owner, double slope, std::size_t wanted) const {
  const Trend& trend = trends_[index(owner)];
  Finding finding{.course = Course::kTooShort,
                  .owner = owner,
                  .bytes_per_unit = slope,
                  .window = trend.width(),
                  .windows_seen = std::min(trend.windows(), wanted),
                  .windows_wanted = wanted};
  const double passed = last_at_ - first_at_;
  const double seconds = static_cast<double>(last_ns_ - first_ns_) / 1e9;
  const auto seen = static_cast<double>(trend.windows());
  const double each = seen > 0 ? std::max(passed / seen, trend.width()) : trend.width();
  finding.units_wanted = static_cast<double>(wanted - finding.windows_seen) * each;
  finding.seconds_wanted = passed > 0 ? finding.units_wanted * seconds / passed : 0;
  return finding;
}

// What rises fastest so far, whatever becomes of it.
Finding Watch::too_early() const {
  Owner fastest = Owner::kFiles;
  double rate = 0;
  for (const Owner owner : kMayLeak) {
    if (const double one = trends_[index(owner)].so_far(); one > rate) {
      rate = one;
      fastest = owner;
    }
  }
  Finding finding = early(Owner::kFiles, rate, Trend::kWindowsLeast);
  finding.owner = rate > 0 ? fastest : Owner::kHeap;
  return finding;
}

Finding Watch::verdict() {
  judge();
  Finding finding = grows();
  if (finding.course != Course::kLeak) {  // What was collected once may be a sawtooth since.
    for (const Where& where : told_) {
      if (where.garbage && finding.course != Course::kGarbage) {
        finding = found(where.owner, judged_[index(where.owner)], Course::kGarbage);
      }
    }
  }
  if (finding.course != Course::kTooShort) {
    finding.window = width_;
  }
  return finding;
}

// Who rises so that it may yet be a leak; of several, the fastest.
std::optional<Owner> Watch::waiting() const {
  std::optional<Owner> waits;
  for (const Owner owner : kMayLeak) {
    const Judged& one = judged_[index(owner)];
    if (one.course == Course::kTooShort && one.slope > 0 &&
        (!waits || one.slope > judged_[index(*waits)].slope)) {
      waits = owner;
    }
  }
  return waits;
}

Finding Watch::grows() const {
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
  if (const auto waits = waiting()) {
    const Judged& one = judged_[index(*waits)];
    return early(*waits, one.slope, one.windows_wanted);
  }
  if (holdings_.of(Owner::kNative) >= 0 &&
      judged_[index(Owner::kNative)].course == Course::kTooShort) {
    Finding finding = too_early();  // Where malloc() is asked rarely, the rest says it earlier.
    const Owner fastest = finding.owner;
    finding = early(Owner::kNative, finding.bytes_per_unit, Trend::kWindowsLeast);
    finding.owner = fastest;
    return finding;
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
  if (judged_[index(Owner::kFiles)].course == Course::kTooShort) {
    return too_early();
  }
  return {.course = Course::kPlateau};
}

std::string Finding::text(std::string_view unit) const {
  const std::string who =
      process.empty() ? owner_name(owner) : fmt::format("{} ({})", owner_name(owner), process);
  const auto growth = [&] {
    return fmt::format("{} grows by {} a {}", who, signed_bytes(bytes_per_unit), unit) +
           (phase.empty() ? "" : ", in phase " + phase) +
           (sites.empty() ? "" : ", allocated at " + site()) +
           (holder.empty() ? "" : ", held by " + holder);
  };
  switch (course) {
    case Course::kTooShort:
      return fmt::format(
          "too early: {} of {} windows of {:g} {}s were seen, the others take {:.0f} {}s more{}; "
          "so far {}",
          windows_seen, windows_wanted, window, unit, std::ceil(units_wanted), unit,
          seconds_wanted > 0 && unit != "second" ? " (" + lasting(seconds_wanted) + ")" : "",
          bytes_per_unit >= 1
              ? fmt::format("{} rises by {} a {}", who, signed_bytes(bytes_per_unit), unit)
              : "nothing rises");
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
      return "leak: " + growth() +
             (seconds_left ? ", " + lasting(*seconds_left) + " to the limit" : "");
    case Course::kGarbage:
      return "uncollected garbage: " + growth() + ", until the garbage collector runs";
    case Course::kRetention:
      return fmt::format("retention: malloc() keeps {} a {} more of what was freed{}",
                         signed_bytes(bytes_per_unit), unit,
                         trimmed_bytes
                             ? fmt::format("; one malloc_trim() gave {} back",
                                           format_bytes(std::max<std::int64_t>(*trimmed_bytes, 0)))
                             : "");
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
  if (course == Course::kGarbage) {
    return {fmt::format(
        "objects that refer to each other in a circle{} wait for the garbage collector: break the "
        "circle, or call gc.collect() now and then (at most every {} steps, as it takes "
        "time); gc.disable() and gc.freeze() make it worse",
        sites.empty() ? "" : " (allocated at " + site() + ")", kCollectSteps)};
  }
  if (course != Course::kLeak) {
    return {};
  }
  std::vector<std::string> lines;
  if (is_evaluation(phase)) {
    lines.emplace_back(evaluation_advice());
  }
  if (copies) {
    lines.emplace_back(copies_advice());
    return lines;
  }
  if (holder == kNobodyCreateGraph) {
    lines.emplace_back(
        "backward(create_graph=True) leaves each parameter and its gradient in a circle inside "
        "autograd, which no garbage collector sees: take gradients by torch.autograd.grad(…, "
        "create_graph=True), or set each .grad to None before you let go of the model");
    return lines;
  }
  if (!holder.empty()) {
    lines.push_back(fmt::format("what {} is kept by {}: empty it, bound it, or keep less of it",
                                sites.empty() ? "grows" : site() + " allocates", holder));
    if (holder.starts_with("autograd graph")) {
      lines.emplace_back(
          "each step's graph hangs on the one before: add up numbers (loss.item()) or tensors "
          "without a graph (loss.detach()), and keep outputs detached");
      return lines;
    }
  } else if (!sites.empty()) {
    lines.push_back(fmt::format("look for what keeps what {} allocates", site()));
  }
  lines.push_back(advice_of(owner));
  return lines;
}

}  // namespace plimsoll

// SPDX-License-Identifier: Apache-2.0
#include "run/recorder.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <fstream>
#include <thread>
#include <utility>

#include <unistd.h>

#include "base/check.h"
#include "base/mutex.h"
#include "os/background_thread.h"
#include "os/blocked_signals.h"
#include "os/pace.h"
#include "os/process_tree.h"
#include "plimsoll/tree_memory.h"
#include "watch/tree_record.h"

namespace plimsoll {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kEvery{1000};
constexpr std::chrono::milliseconds kEveryNear{250};
constexpr std::chrono::milliseconds kEveryPhase{200};  // Phases that are shorter are not looked at.
constexpr std::chrono::seconds kToldAgain{60};         // From one verdict told to another.
constexpr double kNear = 0.85;                         // Of the limit.
constexpr std::int64_t kPaced = 4 * Pace::kCalm;       // A quarter of 1 % of a core each.
constexpr std::size_t kChildrenMost = 256;

// "python\0train.py\0" as "python train.py".
std::string own_command() {
  std::ifstream file("/proc/self/cmdline");
  std::string text(1024, '\0');
  file.read(text.data(), std::ssize(text));
  text.resize(static_cast<std::size_t>(file.gcount()));
  while (!text.empty() && text.back() == '\0') {
    text.pop_back();
  }
  std::ranges::replace(text, '\0', ' ');
  return text;
}

// Resident sizes: what they share with each other counts for each.
ProcessUse size_of(int pid, int parent) {
  ProcessUse use{.pid = pid, .parent = parent};
  if (const auto resident = read_resident(pid)) {
    use.anonymous = resident->anonymous;
    use.shared = resident->shared;
    use.file = resident->file;
    use.bytes = resident->total();
  }
  std::ifstream("/proc/" + std::to_string(pid) + "/comm") >> use.name;
  return use;
}

}  // namespace

struct Recorder::State {
  State(Governor held, std::function<Inside()> said, TreeRecord kept)
      : governor(std::move(held)), inside(std::move(said)), record(std::move(kept)) {}

  const Governor governor;
  const std::function<Inside()> inside;
  Mutex mutex{};
  CondVar changed{};
  bool ended PLIMSOLL_GUARDED_BY(mutex){false};
  RunStatus status PLIMSOLL_GUARDED_BY(mutex){};
  std::string phase PLIMSOLL_GUARDED_BY(mutex){};
  std::string phase_that_ended PLIMSOLL_GUARDED_BY(mutex){};
  bool phase_ended PLIMSOLL_GUARDED_BY(mutex){false};
  std::optional<Finding> news PLIMSOLL_GUARDED_BY(mutex){};
  TreeRecord record;  // This and the rest: the thread's own.
  Clock::time_point looked{};
  std::int64_t step{0};
  bool near{false};
  Finding told{};
  Clock::time_point told_at{};
  Pace inside_pace{};
  Inside inside_seen{};
  Pace children_pace{};
  std::vector<ProcessUse> children{};
  std::thread thread{};
};

Result<std::unique_ptr<Recorder>> Recorder::start(const std::filesystem::path& run,
                                                  Governor governor,
                                                  std::function<Inside()> inside) {
  PLIMSOLL_TRY(TreeRecord record, TreeRecord::open(run / LookHistory::kFile, ::getpid(),
                                                   /*steps=*/true, own_command()));
  return std::unique_ptr<Recorder>(new Recorder(
      std::make_unique<State>(std::move(governor), std::move(inside), std::move(record))));
}

Recorder::Recorder(std::unique_ptr<State> state) : state_(std::move(state)) {
  const BlockedSignals all;  // They belong to the program's own threads.
  state_->thread = std::thread([own = state_.get()] { work(*own); });
}

Recorder::~Recorder() {
  if (mark_.forked()) {
    static_cast<void>(state_.release());
    return;
  }
  {
    MutexLock lock(state_->mutex);
    state_->ended = true;
  }
  state_->changed.notify_all();
  state_->thread.join();
}

void Recorder::note(const RunStatus& status) {
  if (!mark_.forked()) {
    MutexLock lock(state_->mutex);
    state_->status = status;
  }
}

void Recorder::phase(std::string_view name) {
  if (mark_.forked()) {
    return;
  }
  {
    MutexLock lock(state_->mutex);
    if (state_->phase == name) {
      return;
    }
    if (!state_->phase_ended) {
      state_->phase_that_ended = state_->phase;
      state_->phase_ended = true;
    }
    state_->phase = name;
  }
  state_->changed.notify_all();
}

void Recorder::work(State& state) {
  enter_background("pl-record");
  for (bool ended = false; !ended;) {
    std::string phase;
    {
      MutexLock lock(state.mutex);
      const auto next = state.looked + (state.near ? kEveryNear : kEvery);
      while (!state.ended && Clock::now() < next &&
             !(state.phase_ended && Clock::now() >= state.looked + kEveryPhase)) {
        const bool soon = state.phase_ended;
        state.changed.wait_until(state.mutex, soon ? state.looked + kEveryPhase : next);
      }
      ended = state.ended;
      phase = state.phase_ended ? state.phase_that_ended : state.phase;
      state.phase_ended = false;
    }
    look(state, phase);
    state.looked = Clock::now();
  }
}

void Recorder::look(State& state, std::string_view phase) {
  RunStatus status;
  {
    MutexLock lock(state.mutex);
    status = state.status;
  }
  const std::int64_t now = now_ns();
  if (state.inside_pace.due(now, kPaced)) {
    state.inside_pace.time([&] { state.inside_seen = state.inside(); });
  }
  if (state.children_pace.due(now, kPaced)) {
    state.children_pace.time([&] {
      state.children.clear();
      const auto pids = descendants(::getpid());
      for (const int pid : pids ? *pids : std::vector<int>{}) {
        if (state.children.size() < kChildrenMost) {
          state.children.push_back(size_of(pid, ::getpid()));
        }
      }
    });
  }
  const Measured measured = last_look();
  TreeLook seen;
  seen.root = read_resident().value_or(measured.resident);
  seen.in_flight_bytes = measured.tree.in_flight_bytes;
  seen.tree.anonymous = seen.root.anonymous + measured.tree.children_bytes;
  seen.tree.shared = seen.root.shared + measured.tree.in_flight_bytes;
  seen.tree.file = seen.root.file;
  seen.tree.bytes = seen.tree.anonymous + seen.tree.shared + seen.tree.file;
  seen.tree.processes = 1 + static_cast<int>(state.children.size());
  seen.tree.largest = state.children;
  seen.tree.largest.push_back(size_of(::getpid(), ::getppid()));
  std::ranges::sort(seen.tree.largest, std::ranges::greater{}, &ProcessUse::bytes);
  for (const ProcessUse& use : seen.tree.largest) {
    seen.bound_bytes += use.anonymous + use.shared;
  }
  seen.bound_bytes = std::max(seen.bound_bytes + seen.in_flight_bytes, seen.tree.unbacked());
  seen.close = true;
  const std::int64_t limit =
      state.governor.valid() ? state.governor.state().limit_bytes : status.limit_bytes;
  const std::int64_t held = seen.tree.unbacked();
  state.near = limit > 0 && static_cast<double>(held) > kNear * static_cast<double>(limit);
  state.step = std::max(state.step, status.step);
  const bool ended =
      status.status == "finished" || status.status == "stopped" || status.status == "failed";
  const std::string_view doing = ended                        ? kEndingPhase
                                 : !phase.empty()             ? phase
                                 : status.status == "running" ? "train"
                                                              : std::string_view(status.status);
  Finding finding =
      state.record.add(std::move(seen), static_cast<double>(state.step), state.inside_seen, doing,
                       {.step = state.step,
                        .epoch = static_cast<std::int32_t>(status.epoch),
                        .loss = status.loss,
                        .rows_per_second = status.rows_per_second,
                        .limit_bytes = limit});
  constexpr std::array kTold{Course::kSaturating, Course::kLeak, Course::kRetention};
  const bool again = finding.course == state.told.course && finding.owner == state.told.owner;
  if (!again && std::ranges::count(kTold, finding.course) > 0 &&
      Clock::now() - state.told_at > kToldAgain) {
    state.told = finding;
    state.told_at = Clock::now();
    MutexLock lock(state.mutex);
    state.news = std::move(finding);
  }
}

std::optional<Finding> Recorder::news() {
  if (mark_.forked()) {
    return std::nullopt;
  }
  MutexLock lock(state_->mutex);
  return std::exchange(state_->news, std::nullopt);
}

}  // namespace plimsoll

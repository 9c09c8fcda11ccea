// SPDX-License-Identifier: Apache-2.0
//
// See streams.h. Order here: streams, gates, events.
#include "tests/device/streams.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <thread>
#include <utility>

namespace sim {
namespace {

class Worker {
 public:
  void add(std::function<void()> work, std::shared_ptr<void> kept) {
    std::vector<Work> over;
    const std::lock_guard lock(mutex_);
    if (!started_) {
      started_ = true;
      std::thread([this] { run(); }).detach();  // Ends with the process, as the device does.
    }
    over.swap(over_);
    waiting_.push_back({std::move(work), std::move(kept)});
    ++queued_;
    changed_.notify_all();
  }
  void drain(bool tells) {
    std::vector<Work> over;
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this, until = queued_] { return done_ >= until; });
    over.swap(over_);
    const std::string wrong = tells ? std::exchange(wrong_, "") : "";
    lock.unlock();
    TORCH_CHECK(wrong.empty(), "sim: a kernel that ran in a stream failed: ", wrong);
  }
  // Gives back what work that is over kept.
  void let_go() {
    std::vector<Work> over;
    const std::lock_guard lock(mutex_);
    over.swap(over_);
  }
  bool idle() {
    const std::lock_guard lock(mutex_);
    return done_ == queued_;
  }
  std::uint64_t queued() {
    const std::lock_guard lock(mutex_);
    return queued_;
  }
  bool reached(std::uint64_t count) {
    const std::lock_guard lock(mutex_);
    return done_ >= count;
  }

 private:
  struct Work {
    std::function<void()> run;
    std::shared_ptr<void> kept;
  };
  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return !waiting_.empty(); });
      Work work = std::move(waiting_.front());
      waiting_.pop_front();
      lock.unlock();
      std::string failed;
      try {
        work.run();
      } catch (const std::exception& error) {
        failed = error.what();
      }
      lock.lock();
      if (wrong_.empty()) {
        wrong_ = failed;
      }
      // A host's thread lets go of it: tensors of the host may take Python's lock, which whoever
      // waits in drain() may hold.
      over_.push_back(std::move(work));
      ++done_;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> waiting_;
  std::vector<Work> over_;
  std::uint64_t queued_{0}, done_{0};
  std::string wrong_;  // Of work that ran later; whoever waits is told.
  bool started_{false};
};

Worker& worker(int device, int stream) {
  static auto* all = new std::array<std::array<Worker, kStreams>, kDevices>;
  return (*all)[std::size_t(device)][std::size_t(stream)];
}

thread_local int device_now = 0;
thread_local std::array<int, kDevices> stream_now{};
std::atomic<bool> ahead{false};

}  // namespace

int& current_device() {
  return device_now;
}
int& current_stream(int device) {
  return stream_now[std::size_t(device)];
}
int new_stream(int device) {
  static std::array<std::atomic<int>, kDevices> next{};
  return 1 + next[std::size_t(device)]++ % (kStreams - 1);
}

void enqueue(int device, int stream, std::function<void()> work, std::shared_ptr<void> kept) {
  worker(device, stream).add(std::move(work), std::move(kept));
}
void drain(int device, int stream, bool tells) {
  worker(device, stream).drain(tells);
}
bool idle(int device, int stream) {
  return worker(device, stream).idle();
}
std::uint64_t queued(int device, int stream) {
  return worker(device, stream).queued();
}
bool reached(int device, int stream, std::uint64_t count) {
  return worker(device, stream).reached(count);
}
void set_run_ahead(bool on) {
  ahead = on;
}
bool runs_ahead() {
  return ahead;
}

// ---- Gates ----

namespace {

std::mutex gate_mutex;
std::condition_variable gate_changed;
std::uint64_t gates_opened = 0;
bool copies_held = false;

void wait_at_gate(std::uint64_t opened) {
  std::unique_lock lock(gate_mutex);
  gate_changed.wait(lock, [opened] { return gates_opened > opened; });
}

}  // namespace

void set_copies_held(bool held) {
  const std::lock_guard lock(gate_mutex);
  copies_held = held;
}
void hold_stream(int device, int stream) {
  const std::lock_guard lock(gate_mutex);
  enqueue(device, stream, [opened = gates_opened] { wait_at_gate(opened); });
}
std::function<void()> gate_of_copies() {
  const std::lock_guard lock(gate_mutex);
  if (!copies_held) {
    return [] {};
  }
  return [opened = gates_opened] { wait_at_gate(opened); };
}
void open_gates() {
  const std::lock_guard lock(gate_mutex);
  ++gates_opened;
  gate_changed.notify_all();
}

// ---- Events ----

void record(const std::shared_ptr<Event>& event, int device, int stream) {
  std::unique_lock lock(event->mutex);
  event->clock = clock_of(device, stream);
  event->device = device;
  event->stream = stream;
  const std::uint64_t count = ++event->recorded;
  lock.unlock();
  enqueue(device, stream, [event, count] {
    const std::lock_guard inner(event->mutex);
    event->reached = std::max(event->reached, count);
    event->nanoseconds = std::chrono::steady_clock::now().time_since_epoch().count();
    event->changed.notify_all();
  });
}

void block(const std::shared_ptr<Event>& event, int device, int stream) {
  std::unique_lock lock(event->mutex);
  const std::uint64_t count = event->recorded;
  if (count == 0) {
    return;
  }
  comes_after(device, stream, event->clock);
  lock.unlock();
  enqueue(device, stream, [event, count] {
    std::unique_lock inner(event->mutex);
    event->changed.wait(inner, [&] { return event->reached >= count; });
  });
}

void synchronize(Event& event) {
  std::unique_lock lock(event.mutex);
  event.changed.wait(lock, [&event, count = event.recorded] { return event.reached >= count; });
  host_waited(event.clock);
  const auto [device, stream] = std::pair(event.device, event.stream);
  lock.unlock();
  worker(device, stream).let_go();
}

}  // namespace sim

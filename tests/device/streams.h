// SPDX-License-Identifier: Apache-2.0
//
// Streams of a simulated device, their events, and the order that a program gives to accesses.
//
// A stream is a thread with a queue. Kernels run in the thread that calls them, after all that
// waits in their stream; or, run_ahead(), in the stream's thread, where torch's meta kernels say
// beforehand what they will make. Copies that do not block always run in the stream's thread.
//
// Each access is checked against what streams, events and waits have ordered, whatever the clock
// says: a missing wait is found without luck. Each stream has a vector clock, and each range of
// bytes the last read and write by each stream.
//
// Threads: thread-safe; current_device() and current_stream() are of the calling thread.
// Memory:  a thread for each stream that was used; 1 KiB for each range of bytes that is checked.
#pragma once

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tests/device/memory.h"

namespace sim {

// ---- Streams ----

int& current_device();
int& current_stream(int device);
/// A stream that nobody has, until all were given once.
int new_stream(int device);

/// kept: is let go of by a thread of the program, which may have Python's lock.
void enqueue(int device, int stream, std::function<void()> work, std::shared_ptr<void> kept = {});
/// Waits until all has run. tells: throws what a late kernel threw.
void drain(int device, int stream, bool tells = true);
bool idle(int device, int stream);
std::uint64_t queued(int device, int stream);
bool reached(int device, int stream, std::uint64_t count);

void set_run_ahead(bool ahead);
bool runs_ahead();
/// Lateness without a clock: what is held goes on when open_gates() is called. held: copies that do
/// not block, from now on.
void set_copies_held(bool held);
void hold_stream(int device, int stream);  ///< What comes next in it.
void open_gates();
std::function<void()> gate_of_copies();  ///< Returns when the gate is open.

// ---- Order ----

inline constexpr std::size_t kAllStreams = std::size_t{kDevices} * kStreams;
using Clock = std::array<std::uint64_t, kAllStreams + 1>;  ///< The last is the host's own view.

struct Access {
  std::size_t begin, end;  ///< Of device addresses.
  bool writes;
};
void set_order_checked(bool checked);
/// Something runs in this stream. Errors: c10::Error where nothing orders it after what it must
/// follow; it names both.
void accessed(int device, int stream, const std::string& what, const std::vector<Access>& all);
void host_waited(int device, int stream);  ///< For all that is in it.
void host_waited(const Clock& clock);
void forget(std::size_t begin, std::size_t end);  ///< The device has these addresses back.
/// Of an event that a stream records, and of a stream that waits for one.
Clock clock_of(int device, int stream);
void comes_after(int device, int stream, const Clock& clock);

// ---- Events ----

struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  std::uint64_t recorded{0}, reached{0};
  std::int64_t nanoseconds{0};
  int device{0}, stream{0};  // Of the last record().
  Clock clock{};
};
void record(const std::shared_ptr<Event>& event, int device, int stream);
void block(const std::shared_ptr<Event>& event, int device, int stream);
void synchronize(Event& event);

}  // namespace sim

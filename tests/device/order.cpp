// SPDX-License-Identifier: Apache-2.0
//
// See streams.h. Vector clocks: a stream's says how much of each stream comes before what it runs
// now. Memory that was let go of and made anew keeps its history, so a record_stream() that is
// missing is found.
#include <c10/util/Exception.h>

#include <algorithm>
#include <map>

#include "tests/device/streams.h"

namespace sim {
namespace {

struct Place {
  std::uint64_t at{0};
  std::string what;
};
struct Span {
  std::size_t end{0};
  std::array<Place, kAllStreams> read, written;
};

std::mutex order_mutex;
bool order_checked = false;
std::array<Clock, kAllStreams + 1> clocks{};  // The last is the host's.
std::map<std::size_t, Span> spans;

std::size_t number_of(int device, int stream) {
  return std::size_t(device * kStreams + stream);
}

void join(Clock& into, const Clock& other) {
  for (std::size_t i = 0; i < into.size(); ++i) {
    into[i] = std::max(into[i], other[i]);
  }
}

// Makes a span begin at `at`, if one is there.
void cut(std::size_t at) {
  auto it = spans.upper_bound(at);
  if (it == spans.begin() || (--it)->first == at || it->second.end <= at) {
    return;
  }
  const Span rest = it->second;
  it->second.end = at;
  spans.emplace(at, rest);
}

// What another stream did to the span and nothing orders before this.
std::string disorder(const Span& span, std::size_t me, bool writes, const std::string& what) {
  const Clock& clock = clocks[me];
  for (std::size_t other = 0; other < kAllStreams; ++other) {
    const Place &read = span.read[other], &written = span.written[other];
    const bool after_write = written.at > clock[other];
    if (other == me || !(after_write || (writes && read.at > clock[other]))) {
      continue;
    }
    return c10::str("sim: stream ", me % kStreams, writes ? " writes (" : " reads (", what,
                    ") what stream ", other % kStreams, after_write ? " writes (" : " reads (",
                    after_write ? written.what : read.what,
                    "), and nothing orders them: an event is to be waited for, or record_stream() "
                    "is missing");
  }
  return "";
}

}  // namespace

void set_order_checked(bool checked) {
  const std::lock_guard lock(order_mutex);
  order_checked = checked;
  spans.clear();
  clocks = {};
}

void accessed(int device, int stream, const std::string& what, const std::vector<Access>& all) {
  const std::lock_guard lock(order_mutex);
  if (!order_checked) {
    return;
  }
  const std::size_t me = number_of(device, stream);
  join(clocks[me], clocks.back());
  ++clocks[me][me];
  std::string wrong;
  for (const Access& one : all) {
    if (one.begin >= one.end) {
      continue;
    }
    cut(one.begin);
    cut(one.end);
    for (std::size_t at = one.begin; at < one.end;) {
      auto it = spans.lower_bound(at);
      if (it == spans.end() || it->first > at) {
        Span fresh;
        fresh.end = it == spans.end() ? one.end : std::min(one.end, it->first);
        it = spans.emplace(at, fresh).first;
      }
      if (wrong.empty()) {
        wrong = disorder(it->second, me, one.writes, what);
      }
      (one.writes ? it->second.written : it->second.read)[me] = {clocks[me][me], what};
      at = it->second.end;
    }
  }
  TORCH_CHECK(wrong.empty(), wrong);
}

void host_waited(const Clock& clock) {
  const std::lock_guard lock(order_mutex);
  join(clocks.back(), clock);
}

void host_waited(int device, int stream) {
  const std::lock_guard lock(order_mutex);
  join(clocks.back(), clocks[number_of(device, stream)]);
}

void forget(std::size_t begin, std::size_t end) {
  const std::lock_guard lock(order_mutex);
  cut(begin);
  cut(end);
  spans.erase(spans.lower_bound(begin), spans.lower_bound(end));
}

Clock clock_of(int device, int stream) {
  const std::lock_guard lock(order_mutex);
  Clock& clock = clocks[number_of(device, stream)];
  join(clock, clocks.back());
  return clock;
}

void comes_after(int device, int stream, const Clock& clock) {
  const std::lock_guard lock(order_mutex);
  join(clocks[number_of(device, stream)], clock);
}

}  // namespace sim

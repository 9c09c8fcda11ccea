// SPDX-License-Identifier: Apache-2.0
//
// RowCrew: the calling thread and a few more share a range of independent rows.
//
// Each takes the next `grain` rows until none are left, so who does which is left to chance and
// nothing may depend on it: rows must be disjoint and their results independent of order. The
// caller waits for rows, not for members: one that the system does not let run holds nobody up.
//
// Threads: single-owner; `body` runs on all members at once.
// Memory:  threads − 1 stacks; run() allocates nothing.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace plimsoll {

class RowCrew {
 public:
  /// `threads` counts the caller: 1 starts none.
  explicit RowCrew(int threads);
  ~RowCrew() = default;
  RowCrew(const RowCrew&) = delete;
  RowCrew& operator=(const RowCrew&) = delete;

  /// Calls body(begin, end, member) over [0, count); returns when all is done. `body` must not
  /// throw. Requires: count < 2^32. member is 0 … threads − 1.
  template <class Body>
  void run(std::int64_t count, std::int64_t grain, Body&& body) {
    run_erased(
        count, grain,
        [](void* context, std::int64_t begin, std::int64_t end, int member) {
          (*static_cast<std::remove_reference_t<Body>*>(context))(begin, end, member);
        },
        &body);
  }

  [[nodiscard]] int threads() const noexcept { return static_cast<int>(members_.size()) + 1; }

 private:
  using Erased = void (*)(void*, std::int64_t, std::int64_t, int);
  void run_erased(std::int64_t count, std::int64_t grain, Erased body, void* context);
  bool take_rows(int member) noexcept;
  void work(int member) noexcept;

  // The job: written by the caller before it publishes tickets_, read by whoever holds rows of it.
  Erased body_{nullptr};
  void* context_{nullptr};
  std::int64_t count_{0};
  std::atomic<std::uint32_t> grain_{1};    // Written by the caller; read by all.
  std::atomic<std::uint64_t> tickets_{0};  // job << 32 | rows nobody has taken; CAS by all.
  std::atomic<std::uint32_t> left_{0};     // Rows not done; lowered by whoever did them.
  std::atomic<std::uint32_t> round_{0};    // Raised by the caller, once per job, to wake members.
  std::atomic<bool> stopping_{false};
  std::vector<std::jthread> members_;  // Joined before what is above is destroyed.

  // Destroyed first, also when not every thread could be started: tells those there are to end.
  struct Ending {
    RowCrew& crew;
    ~Ending();
  };
  Ending ending_{*this};
};

}  // namespace plimsoll

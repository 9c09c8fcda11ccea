// SPDX-License-Identifier: Apache-2.0
//
// LimitRequests: the memory limit of a run, changed from another shell while it trains.
//
// `plimsoll limit RUN SIZE` leaves RUN/.limit, renamed into place. A thread looks for it several
// times a second, whatever the run is doing (a long step, an evaluation, a pause), takes it away
// and tells the governor; caches and queues follow there and then. The thread that trains asks what
// has become of it and writes it down. Looking for a file works on network file systems too, where
// nobody would tell us of it. The limit of a device is torch's: the thread that trains imposes it.
//
// Reading order: control.h, governor.h (set_limit), this file, limit_requests.cpp.
//
// Threads: one of its own, named pl-limit; take() for the thread that trains.
// Memory:  the outcomes not yet taken, kOutcomesMax at most.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "plimsoll/governor.h"
#include "plimsoll/result.h"

namespace plimsoll {

/// What became of a request.
struct LimitOutcome {
  std::string asked;           ///< As it was written: "6GiB".
  bool of_devices{false};      ///< Taken and not served: it is for whoever calls take().
  Result<LimitChange> change;  ///< Or why nothing was changed.
};

/// What this process may hold of a limit for all processes of its run, in bytes. Called in the
/// thread of LimitRequests.
using OwnLimit = std::function<std::int64_t(std::int64_t)>;

class LimitRequests {
 public:
  static constexpr std::chrono::milliseconds kLookEvery{200};
  static constexpr std::size_t kOutcomesMax = 16;

  /// own: empty where the limit is this process's.
  LimitRequests(Governor governor, const std::filesystem::path& run, OwnLimit own = {});
  ~LimitRequests();
  LimitRequests(const LimitRequests&) = delete;
  LimitRequests& operator=(const LimitRequests&) = delete;

  /// What has been asked for since the last call, oldest first; the newest kOutcomesMax of them.
  [[nodiscard]] std::vector<LimitOutcome> take();

 private:
  void work();
  void look();
  Result<LimitChange> set(const std::string& asked);

  Governor governor_;
  OwnLimit own_;
  std::filesystem::path request_;
  std::filesystem::path taken_;
  Mutex mutex_;
  CondVar ended_;
  std::vector<LimitOutcome> outcomes_ PLIMSOLL_GUARDED_BY(mutex_);
  bool stop_ PLIMSOLL_GUARDED_BY(mutex_){false};
  std::jthread thread_;  // Last: joined before the rest is destroyed.
};

/// What `plimsoll limit RUN SIZE` does: leaves the request. False: no process trains there, and
/// nothing was left behind.
/// of_devices: the limit of each device that has one.
/// Errors: kInvalidArgument for an unreadable size; kNotFound (no run there); kIo.
Result<bool> ask_for_limit(const std::filesystem::path& run, const std::string& size,
                           bool of_devices = false);

}  // namespace plimsoll

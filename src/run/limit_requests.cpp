// SPDX-License-Identifier: Apache-2.0
#include "run/limit_requests.h"

#include <cerrno>
#include <exception>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/check.h"
#include "os/blocked_signals.h"
#include "os/file.h"
#include "plimsoll/limits.h"
#include "run/run_folder.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;
constexpr const char* kRequest = ".limit";
constexpr const char* kTaken = ".limit.taken";
constexpr const char* kSource = "plimsoll limit";
constexpr std::string_view kOfDevices = "devices ";  // Before the size of such a request.

std::string without_end(std::string text) {
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) {
    text.pop_back();
  }
  return text;
}

}  // namespace

LimitRequests::LimitRequests(Governor governor, const fs::path& run, OwnLimit own)
    : governor_(std::move(governor)),
      own_(std::move(own)),
      request_(run / kRequest),
      taken_(run / kTaken) {
  const BlockedSignals blocked;
  thread_ = std::jthread([this] { work(); });
}

LimitRequests::~LimitRequests() {
  {
    const MutexLock lock(mutex_);
    stop_ = true;
  }
  ended_.notify_all();
}

std::vector<LimitOutcome> LimitRequests::take() {
  const MutexLock lock(mutex_);
  return std::exchange(outcomes_, {});
}

void LimitRequests::work() {
  pthread_setname_np(pthread_self(), "pl-limit");
  for (;;) {
    try {
      look();
    } catch (const std::exception&) {
      // Thread entry: nothing may leave it. Want of memory for a few words; the file is looked for
      // again.
    }
    MutexLock lock(mutex_);
    const auto until = std::chrono::steady_clock::now() + kLookEvery;
    while (!stop_ && ended_.wait_until(mutex_, until)) {
    }
    if (stop_) {
      return;
    }
  }
}

void LimitRequests::look() {
  struct stat status {};
  if (::stat(request_.c_str(), &status) != 0) {
    return;
  }
  // Out of the way first: a request that comes meanwhile is another one.
  std::error_code failed;
  fs::rename(request_, taken_, failed);
  auto text = read_small_file(taken_);
  fs::remove(taken_, failed);
  LimitOutcome outcome;
  if (text) {
    outcome.asked = without_end(*std::move(text));
    outcome.of_devices = outcome.asked.starts_with(kOfDevices);
    if (outcome.of_devices) {
      outcome.asked.erase(0, kOfDevices.size());
    }
    outcome.change = outcome.of_devices ? LimitChange{}
                     : outcome.asked.empty()
                         ? fail(ErrorCode::kInvalidArgument, request_.string() + ": it is empty",
                                "write a size such as 6GiB")
                         : set(outcome.asked);
  } else {
    outcome.change = tl::unexpected(text.error());
  }
  const MutexLock lock(mutex_);
  if (outcomes_.size() == kOutcomesMax) {
    outcomes_.erase(outcomes_.begin());
  }
  outcomes_.push_back(std::move(outcome));
}

Result<LimitChange> LimitRequests::set(const std::string& asked) {
  if (!own_) {
    return governor_.set_limit(asked, kSource);
  }
  PLIMSOLL_TRY(const LimitReport all, find_limit({.user_limit = asked, .user_source = kSource}));
  const std::int64_t own = own_(all.limit_bytes);
  if (own <= 0) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{}: the run's other processes hold all of it", asked), "ask for more");
  }
  return governor_.set_limit(fmt::format("{}", own), kSource);
}

Result<bool> ask_for_limit(const fs::path& run, const std::string& size, bool of_devices) {
  if (size.empty()) {
    return fail(ErrorCode::kInvalidArgument, "a limit of no size", "write one such as 6GiB");
  }
  LimitQuery query;
  query.user_limit = size;
  query.user_source = "SIZE";
  PLIMSOLL_TRY_VOID(find_limit(query));
  PLIMSOLL_TRY(const RunView view, RunFolder::view(run));
  if (!view.alive) {
    return false;
  }
  // Whole or not at all, and one of its own for every process that asks.
  const fs::path beside = run / fmt::format("{}.{}", kRequest, ::getpid());
  std::error_code failed;
  fs::remove(beside, failed);
  PLIMSOLL_TRY(const int file, open_descriptor(beside, O_WRONLY | O_CREAT | O_EXCL));
  const std::string text = std::string(of_devices ? kOfDevices : "") + size + "\n";
  const ssize_t written = ::write(file, text.data(), text.size());
  const int reason = written < 0 ? errno : ENOSPC;
  ::close(file);
  if (written != static_cast<ssize_t>(text.size())) {
    fs::remove(beside, failed);
    return fail_io(reason, beside.string());
  }
  fs::rename(beside, run / kRequest, failed);
  if (failed) {
    return fail_io(failed.value(), (run / kRequest).string());
  }
  return true;
}

}  // namespace plimsoll

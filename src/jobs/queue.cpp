// SPDX-License-Identifier: Apache-2.0
#include "jobs/queue.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "base/check.h"
#include "os/directories.h"
#include "os/file.h"
#include "run/sealed_file.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;

// Others hold it for a write and its sync: seconds on a busy disk.
constexpr std::chrono::milliseconds kLockWait{60'000};

bool over(JobState state) noexcept {
  return state == JobState::kDone || state == JobState::kFailed || state == JobState::kCancelled;
}

}  // namespace

std::int64_t unix_now() noexcept {
  return std::chrono::duration_cast<std::chrono::seconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

Result<Queue> Queue::make(const fs::path& folder) {
  for (const char* name : {"jobs", "logs"}) {
    PLIMSOLL_TRY_VOID(make_directories(folder / name));
  }
  return Queue(folder);
}

Result<Queue> Queue::open(const fs::path& folder) {
  std::error_code none;
  if (!fs::is_directory(folder / "jobs", none)) {
    return fail(ErrorCode::kNotFound, folder.string() + ": no queue there",
                "`plimsoll queue add DIR` makes it");
  }
  return Queue(folder);
}

fs::path Queue::file_of(std::int64_t id) const {
  return folder_ / "jobs" / fmt::format("{}.json", id);
}

fs::path Queue::log_of(std::int64_t id) const {
  return folder_ / "logs" / fmt::format("{}.log", id);
}

Result<FolderLock> Queue::lock_runner() const {
  return FolderLock::take(folder_, {"runs this queue", "one process at a time runs a queue"});
}

Result<FolderLock> Queue::lock_jobs() const {
  return FolderLock::take(folder_ / "jobs", {"changes a job", "try again"}, kLockWait);
}

Result<std::vector<std::int64_t>> Queue::ids() const {
  PLIMSOLL_TRY(const auto names, names_in(folder_ / "jobs"));
  std::vector<std::int64_t> ids;
  for (const std::string& name : names) {
    std::int64_t id = 0;
    const char* const last = name.data() + name.size();
    const auto [end, status] = std::from_chars(name.data(), last, id);
    if (status == std::errc() && id > 0 &&
        std::string_view(end, static_cast<std::size_t>(last - end)) == ".json") {
      ids.push_back(id);
    }
  }
  std::ranges::sort(ids);
  return ids;
}

Result<Job> Queue::read(std::int64_t id) const {
  auto text = read_sealed(file_of(id), Job::kRecordBytesMost);
  if (!text && text.error().code == ErrorCode::kNotFound) {
    return fail(ErrorCode::kNotFound, fmt::format("{}: no job {}", folder_.string(), id),
                "`plimsoll queue list DIR` shows them");
  }
  if (!text && text.error().code == ErrorCode::kCorrupt) {  // Its advice is for a run.
    return fail(ErrorCode::kCorrupt,
                fmt::format("{}: its checksum does not match: it was damaged, or edited by hand",
                            file_of(id).string()),
                "remove the file, and add the job again");
  }
  PLIMSOLL_TRY_VOID(text);
  PLIMSOLL_TRY(Job job, job_from_json(*text, file_of(id).string()));
  if (job.id != id) {
    return fail(ErrorCode::kCorrupt, fmt::format("{}: it is job {}", file_of(id).string(), job.id),
                "give the file its name again");
  }
  return job;
}

Result<void> Queue::write(const Job& job) const {
  const std::string text = to_json(job) + "\n";
  if (static_cast<std::int64_t>(text.size()) > Job::kRecordBytesMost - 64) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{}: job {} is larger than a record may be", folder_.string(), job.id),
                "write a long command as a script");
  }
  return write_sealed(file_of(job.id), text);
}

// Removes the oldest of those that ended, and counts those that did not.
Result<void> Queue::make_room(const std::vector<std::int64_t>& ids) const {
  std::vector<std::int64_t> ended;
  std::int64_t waiting = 0;
  for (const std::int64_t id : ids) {
    const auto job = read(id);
    (job && over(job->state) ? ended.push_back(id) : static_cast<void>(++waiting));
  }
  if (waiting >= kWaitingMost) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{}: {} jobs wait already", folder_.string(), waiting),
                "a queue takes 1,000: run it, or cancel some");
  }
  for (std::size_t at = 0; at + kEndedMost < ended.size(); ++at) {
    const fs::path log = log_of(ended[at]);
    PLIMSOLL_TRY_VOID(remove_file(log));
    PLIMSOLL_TRY_VOID(remove_file(log.string() + ".old"));
    PLIMSOLL_TRY_VOID(remove_file(file_of(ended[at])));
  }
  return {};
}

Result<std::int64_t> Queue::add(Job job) {
  std::size_t bytes = job.directory.size();
  for (const std::string& word : job.command) {
    bytes += word.size() + 1;
  }
  if (bytes > Job::kCommandBytesMost) {
    return fail(
        ErrorCode::kInvalidArgument,
        fmt::format("the command has {} bytes, and may have {}", bytes, Job::kCommandBytesMost),
        "write a long command as a script");
  }
  PLIMSOLL_TRY(const FolderLock lock, lock_jobs());
  PLIMSOLL_TRY(const auto taken, ids());
  PLIMSOLL_TRY_VOID(make_room(taken));
  job.id = taken.empty() ? 1 : taken.back() + 1;
  job.state = JobState::kWaiting;
  job.added = unix_now();
  PLIMSOLL_TRY_VOID(write(job));
  return job.id;
}

Result<Job> Queue::change(std::int64_t id, const std::function<void(Job&)>& how) {
  PLIMSOLL_TRY(const FolderLock lock, lock_jobs());
  PLIMSOLL_TRY(Job job, read(id));
  how(job);
  PLIMSOLL_TRY_VOID(write(job));
  return job;
}

Result<bool> Queue::cancel(std::int64_t id) {
  bool was_over = false;
  PLIMSOLL_TRY(const Job job, change(id, [&](Job& one) {
                 was_over = over(one.state);
                 if (one.state == JobState::kWaiting) {
                   one.state = JobState::kCancelled;
                   one.ended = unix_now();
                   one.why = "cancelled while it waited";
                 } else if (one.state == JobState::kRunning) {
                   one.cancel = true;
                   one.why = "cancelled, asked to end";
                 }
               }));
  return !was_over;
}

}  // namespace plimsoll

// SPDX-License-Identifier: Apache-2.0
#include "run/metrics_tensorboard.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <span>
#include <system_error>
#include <utility>

#include "base/check.h"
#include "base/crc32c.h"
#include "os/directories.h"
#include "os/room.h"

namespace plimsoll {
namespace {

// Field numbers of event.proto and summary.proto.
constexpr int kWallTime = 1;
constexpr int kStep = 2;
constexpr int kFileVersion = 3;
constexpr int kSummary = 5;
constexpr int kSessionLog = 7;
constexpr int kSummaryValue = 1;
constexpr int kTag = 1;
constexpr int kSimpleValue = 2;
constexpr int kSessionStatus = 1;
constexpr std::uint64_t kSessionStart = 1;

enum WireType : unsigned { kVarint = 0, kFixed64 = 1, kDelimited = 2, kFixed32 = 5 };

static_assert(std::endian::native == std::endian::little);

template <class T>
void put_raw(std::string& out, T value) {
  std::array<char, sizeof(T)> bytes{};
  std::memcpy(bytes.data(), &value, sizeof(T));
  out.append(bytes.data(), bytes.size());
}

void put_varint(std::string& out, std::uint64_t value) {
  for (; value >= 0x80; value >>= 7) {
    out += static_cast<char>((value & 0x7f) | 0x80);
  }
  out += static_cast<char>(value);
}

void put_key(std::string& out, int field, WireType type) {
  put_varint(out, static_cast<std::uint64_t>(field) << 3U | type);
}

void put_integer(std::string& out, int field, std::uint64_t value) {
  put_key(out, field, kVarint);
  put_varint(out, value);
}

void put_double(std::string& out, int field, double value) {
  put_key(out, field, kFixed64);
  put_raw(out, value);
}

void put_text(std::string& out, int field, std::string_view text) {
  put_key(out, field, kDelimited);
  put_varint(out, text.size());
  out += text;
}

/// TFRecord's guard against CRCs of data that holds CRCs.
std::uint32_t masked_crc(std::string_view data) {
  const std::uint32_t crc = crc32c(std::as_bytes(std::span(data)));
  return std::rotr(crc, 15) + 0xa282ead8U;
}

std::string event_at(double wall_seconds, std::int64_t step) {
  std::string event;
  put_double(event, kWallTime, wall_seconds);
  if (step != 0) {
    put_integer(event, kStep, static_cast<std::uint64_t>(step));
  }
  return event;
}

double wall_now() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace

void append_record(std::string& out, std::string_view data) {
  std::string length;
  put_raw(length, static_cast<std::uint64_t>(data.size()));
  out += length;
  put_raw(out, masked_crc(length));
  out += data;
  put_raw(out, masked_crc(data));
}

std::string version_event(double wall_seconds) {
  std::string event = event_at(wall_seconds, 0);
  put_text(event, kFileVersion, "brain.Event:2");
  return event;
}

std::string scalar_event(std::string_view tag, double value, std::int64_t step,
                         double wall_seconds) {
  std::string entry;
  put_text(entry, kTag, tag);
  put_key(entry, kSimpleValue, kFixed32);
  put_raw(entry, static_cast<float>(value));
  std::string summary;
  put_text(summary, kSummaryValue, entry);
  std::string event = event_at(wall_seconds, step);
  put_text(event, kSummary, summary);
  return event;
}

std::string restart_event(std::int64_t step, double wall_seconds) {
  std::string log;
  put_integer(log, kSessionStatus, kSessionStart);
  std::string event = event_at(wall_seconds, step);
  put_text(event, kSessionLog, log);
  return event;
}

Result<EventFile> EventFile::create(const std::filesystem::path& directory,
                                    std::int64_t resumed_step) {
  PLIMSOLL_TRY_VOID(make_directories(directory));
  std::array<char, 256> host{};
  if (::gethostname(host.data(), host.size() - 1) != 0) {
    host[0] = '-';
  }
  const double now = wall_now();
  EventFile file;
  // TensorBoard reads the files of one folder in the order of their names.
  for (int attempt = 0; file.descriptor_ < 0; ++attempt) {
    file.path_ =
        directory / fmt::format("events.out.tfevents.{:010}.{}.{}.{}",
                                static_cast<std::int64_t>(now), host.data(), ::getpid(), attempt);
    file.descriptor_ =
        ::open(file.path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0644);
    if (file.descriptor_ < 0 && (errno != EEXIST || attempt == 1000)) {
      return fail_io(errno, file.path_.string());
    }
  }
  append_record(file.buffer_, version_event(now));
  if (resumed_step >= 0) {
    append_record(file.buffer_, restart_event(resumed_step + 1, now));
  }
  PLIMSOLL_TRY_VOID(file.flush());
  return file;
}

EventFile::EventFile(EventFile&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)),
      path_(std::move(other.path_)),
      buffer_(std::move(other.buffer_)) {}

EventFile& EventFile::operator=(EventFile&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  std::swap(path_, other.path_);
  std::swap(buffer_, other.buffer_);
  return *this;
}

EventFile::~EventFile() {
  if (descriptor_ >= 0) {
    [[maybe_unused]] const auto written = flush();  // flush() is where a failure is reported.
    ::close(descriptor_);
  }
}

Result<void> EventFile::scalar(std::string_view tag, double value, std::int64_t step,
                               double wall_seconds) {
  if (buffer_.size() < kKeptMost) {
    append_record(buffer_, scalar_event(tag, value, step, wall_seconds));
  }
  return buffer_.size() < kBufferBytes ? Result<void>{} : flush();
}

Result<void> EventFile::flush() {
  std::size_t done = 0;
  int reason = 0;
  while (done < buffer_.size() && reason == 0) {
    const ssize_t written = ::write(descriptor_, buffer_.data() + done, buffer_.size() - done);
    reason = written < 0 && errno != EINTR ? errno : 0;
    done += written < 0 ? 0 : static_cast<std::size_t>(written);
  }
  if (reason != 0 && !is_full(reason)) {
    buffer_.clear();  // Bounded: what cannot be written is dropped, and said.
    return fail_io(reason, path_.string());
  }
  buffer_.erase(0, done);  // The rest waits for room.
  return {};
}

}  // namespace plimsoll

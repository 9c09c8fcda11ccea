// SPDX-License-Identifier: Apache-2.0
#include "watch/progress.h"

#include <array>
#include <cerrno>
#include <cstdlib>
#include <tuple>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <fmt/format.h>

namespace plimsoll {

namespace {

void tell_note(const char* path, const std::string& text) noexcept {
  const int note = ::open(path, O_WRONLY | O_CLOEXEC);
  if (note < 0) {
    return;
  }
  // As a whole, its end in zeros: a reader that comes in between does not see two texts.
  std::array<char, ProgressNote::kBytesMost> page{};
  text.copy(page.data(), page.size() - 1);
  std::ignore = ::pwrite(note, page.data(), page.size(), 0);
  ::close(note);
}

std::string name_of(int note) {
  return fmt::format("/proc/{}/fd/{}", ::getpid(), note);
}

std::string text_of(int note) {
  std::array<char, ProgressNote::kBytesMost> page{};
  std::ignore = ::pread(note, page.data(), page.size() - 1, 0);
  return page.data();
}

}  // namespace

void tell_progress(const std::string& text) noexcept {
  if (const char* const path = std::getenv(ProgressNote::kVariable); path != nullptr) {
    tell_note(path, text);
  }
}

bool is_progress_asked() noexcept {
  return std::getenv(ProgressNote::kVariable) != nullptr;
}

std::string told_progress() {
  const char* const path = std::getenv(ProgressNote::kVariable);
  const int note = path == nullptr ? -1 : ::open(path, O_RDONLY | O_CLOEXEC);
  if (note < 0) {
    return "";
  }
  std::string text = text_of(note);
  ::close(note);
  return text;
}

Result<ProgressNote> ProgressNote::create() {
  const char* const around = std::getenv(kVariable);
  ProgressNote note(::memfd_create("plimsoll-progress", MFD_CLOEXEC),
                    around == nullptr ? "" : around);
  if (note.descriptor_ < 0 || ::setenv(kVariable, name_of(note.descriptor_).c_str(), 1) != 0) {
    return fail_io(errno, "a note of how far a command has come");
  }
  return note;
}

ProgressNote::ProgressNote(ProgressNote&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)), around_(std::move(other.around_)) {}

ProgressNote::~ProgressNote() {
  if (descriptor_ < 0) {
    return;
  }
  // Its descriptor may be another file's from now on; what is told would be written there.
  const char* const named = std::getenv(kVariable);
  if (named != nullptr && name_of(descriptor_) == named) {
    if (around_.empty()) {
      ::unsetenv(kVariable);
    } else {
      ::setenv(kVariable, around_.c_str(), 1);
    }
  }
  ::close(descriptor_);
}

std::string ProgressNote::read() const {
  std::string text = text_of(descriptor_);
  if (!around_.empty() && !text.empty()) {
    tell_note(around_.c_str(), text);
  }
  return text;
}

}  // namespace plimsoll

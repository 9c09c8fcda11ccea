// SPDX-License-Identifier: Apache-2.0
#include "watch/progress.h"

#include <array>
#include <cerrno>
#include <cstdlib>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <fmt/format.h>

namespace plimsoll {

void tell_progress(const std::string& text) noexcept {
  const char* const path = std::getenv(ProgressNote::kVariable);
  if (path == nullptr) {
    return;
  }
  const int note = ::open(path, O_WRONLY | O_CLOEXEC);
  if (note < 0) {
    return;
  }
  // As a whole, its end in zeros: a reader that comes in between does not see two texts.
  std::array<char, ProgressNote::kBytesMost> page{};
  text.copy(page.data(), page.size() - 1);
  static_cast<void>(::pwrite(note, page.data(), page.size(), 0));
  ::close(note);
}

Result<ProgressNote> ProgressNote::create() {
  ProgressNote note(::memfd_create("plimsoll-progress", MFD_CLOEXEC));
  const auto path = fmt::format("/proc/{}/fd/{}", ::getpid(), note.descriptor_);
  if (note.descriptor_ < 0 || ::setenv(kVariable, path.c_str(), 1) != 0) {
    return fail_io(errno, "a note of how far a command has come");
  }
  return note;
}

ProgressNote::ProgressNote(ProgressNote&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)) {}

ProgressNote::~ProgressNote() {
  if (descriptor_ >= 0) {
    ::close(descriptor_);
  }
}

std::string ProgressNote::read() const {
  std::array<char, kBytesMost> page{};
  static_cast<void>(::pread(descriptor_, page.data(), page.size() - 1, 0));
  return page.data();
}

}  // namespace plimsoll

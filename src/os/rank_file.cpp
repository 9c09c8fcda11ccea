// SPDX-License-Identifier: Apache-2.0
#include "os/rank_file.h"

#include <array>
#include <cerrno>
#include <charconv>
#include <filesystem>
#include <optional>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fmt/format.h>

#include "base/check.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;

struct RankAddress {
  int pid{0};
  int descriptor{0};
  std::string_view name{};
};

// "PID DESCRIPTOR NAME".
std::optional<RankAddress> rank_address(std::string_view text) noexcept {
  RankAddress address;
  const char* const end = text.data() + text.size();
  const auto [first, pid] = std::from_chars(text.data(), end, address.pid);
  if (pid != std::errc() || first == end || *first != ' ') {
    return std::nullopt;
  }
  const auto [second, descriptor] = std::from_chars(first + 1, end, address.descriptor);
  if (descriptor != std::errc() || second == end || *second != ' ') {
    return std::nullopt;
  }
  address.name = {second + 1, static_cast<std::size_t>(end - second - 1)};
  return address.name.starts_with(kRankFileName) ? std::optional(address) : std::nullopt;
}

}  // namespace

RankPages::RankPages(RankPages&& other) noexcept
    : mark_(other.mark_),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)) {}

RankPages& RankPages::operator=(RankPages&& other) noexcept {
  std::swap(mark_, other.mark_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

RankPages::~RankPages() {
  if (data_ != nullptr && !mark_.forked()) {  // There something else may be by now.
    ::munmap(data_, static_cast<std::size_t>(bytes_));
  }
}

Result<RankFile> RankFile::create(std::int64_t bytes) {
  std::array<unsigned char, 16> random{};
  if (::getrandom(random.data(), random.size(), 0) != std::ssize(random)) {
    return fail_io(errno, "a name for memory that ranks share");
  }
  RankFile made;
  made.pid_ = ::getpid();
  made.name_ = fmt::format("{}{:02x}", kRankFileName, fmt::join(random, ""));
  made.file_ = OwnDescriptor::in_memory(made.name_.c_str());
  if (made.file_.get() < 0) {
    return fail_io(errno, "memory that ranks share (memfd_create)");
  }
  PLIMSOLL_TRY_VOID(made.resize(bytes));
  return made;
}

Result<RankFile> RankFile::open(const std::string& address, int rank) {
  const auto parts = rank_address(address);
  if (!parts) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("'{}' is no address of memory of rank {}", address, rank));
  }
  const std::string path = fmt::format("/proc/{}/fd/{}", parts->pid, parts->descriptor);
  RankFile opened;
  opened.file_ = OwnDescriptor::open(path, O_RDWR);
  if (opened.file_.get() < 0) {
    return fail_io(errno, path);
  }
  opened.pid_ = parts->pid;
  opened.name_ = parts->name;
  std::error_code unread;
  const fs::path named =
      fs::read_symlink(fmt::format("/proc/self/fd/{}", opened.file_.get()), unread);
  if (unread || named.native().find(opened.name_) == std::string::npos) {
    return fail(ErrorCode::kIo,
                fmt::format("{} is not what rank {} calls {}", path, rank, opened.name_));
  }
  return opened;
}

std::string RankFile::address() const {
  return fmt::format("{} {} {}", pid_, file_.get(), name_);
}

Result<void> RankFile::resize(std::int64_t bytes) {
  if (::ftruncate(file_.get(), bytes) != 0) {
    return fail_io(errno, fmt::format("making memory that ranks share {} bytes large", bytes));
  }
  return {};
}

Result<std::int64_t> RankFile::bytes() const {
  struct stat status {};
  if (::fstat(file_.get(), &status) != 0) {
    return fail_io(errno, "the size of memory that ranks share");
  }
  return status.st_size;
}

Result<RankPages> RankFile::map(std::int64_t begin, std::int64_t bytes) const {
  const auto size = static_cast<std::size_t>(bytes);
  void* const data = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file_.get(), begin);
  if (data == MAP_FAILED) {
    return fail_io(errno, fmt::format("mapping {} bytes that ranks share", bytes));
  }
  RankPages pages;
  pages.data_ = static_cast<std::byte*>(data);
  pages.bytes_ = bytes;
  if (::madvise(data, size, MADV_DONTFORK) != 0) {
    return fail_io(errno, "keeping what ranks share from children");
  }
  return pages;
}

}  // namespace plimsoll

// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/philox.h"
#include "os/aio_transfers.h"
#include "os/file_faults.h"
#include "os/io_pool.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;

class IoPoolTest : public testing::TestWithParam<int> {
 protected:
  IoPoolTest() {
    std::string pattern = (fs::temp_directory_path() / "plimsoll_pool_XXXXXX").string();
    directory_ = ::mkdtemp(pattern.data());
  }
  ~IoPoolTest() override { fs::remove_all(directory_); }
  IoPoolTest(const IoPoolTest&) = delete;
  IoPoolTest& operator=(const IoPoolTest&) = delete;

  [[nodiscard]] File create(const std::string& name) const {
    return File::open(directory_ / name, FileMode::kCreate).or_throw();
  }
  fs::path directory_;
};

constexpr std::size_t kBlock = 512;

// `count` requests over consecutive blocks of `file` and `memory`.
std::vector<IoRequest> blocks(File& file, std::vector<std::byte>& memory, bool write) {
  std::vector<IoRequest> requests;
  for (std::size_t at = 0; at < memory.size(); at += kBlock) {
    requests.push_back({.file = &file,
                        .offset = static_cast<std::int64_t>(at),
                        .bytes = std::span(memory).subspan(at, kBlock),
                        .kind = write ? IoKind::kWrite : IoKind::kRead});
  }
  return requests;
}

TEST_P(IoPoolTest, ReadsBackEveryBlockItWrote) {
  IoPool pool(GetParam());
  File file = create("blocks");
  std::vector<std::byte> out(kBlock * 200);
  for (std::size_t i = 0; i < out.size(); ++i) {
    out[i] = static_cast<std::byte>(mix64(i));
  }
  std::vector<std::byte> in(out.size());
  auto writes = blocks(file, out, true);
  pool.run(writes).or_throw();
  auto reads = blocks(file, in, false);
  pool.run(reads).or_throw();
  EXPECT_EQ(in, out);
  pool.run({}).or_throw();
}

TEST_P(IoPoolTest, ReturnsAnErrorAfterEveryRequestHasEnded) {
  IoPool pool(GetParam());
  File file = create("blocks");
  std::vector<std::byte> out(kBlock * 50, std::byte{7});
  auto writes = blocks(file, out, true);
  {
    const ScopedFileFault fault({.call = FileCall::kWrite, .nth = 5, .os_errno = ENOSPC});
    const auto result = pool.run(writes);
    ASSERT_FALSE(result);
    EXPECT_EQ(result.error().os_errno, ENOSPC);
    EXPECT_EQ(file_fault_calls(), 50);
  }
  pool.run(writes).or_throw();  // The pool is none the worse.
}

TEST_P(IoPoolTest, SyncsSeveralFilesAndReportsTheOneThatFails) {
  IoPool pool(GetParam());
  File first = create("first");
  File second = create("second");
  std::vector<IoRequest> syncs{{.file = &first, .kind = IoKind::kSync},
                               {.file = &second, .kind = IoKind::kSync}};
  const ScopedFileFault fault({.call = FileCall::kSync, .nth = 2, .os_errno = EIO});
  const auto result = pool.run(syncs);
  ASSERT_FALSE(result);
  EXPECT_EQ(result.error().os_errno, EIO);
  EXPECT_EQ(file_fault_calls(), 2);
  pool.run(syncs).or_throw();
  EXPECT_EQ(file_fault_calls(), 4);
}

TEST_P(IoPoolTest, SyncsAFileBehindAWriteUnlessTheWriteFails) {
  IoPool pool(GetParam());
  File first = create("first");
  File second = create("second");
  std::vector<std::byte> out(kBlock, std::byte{7});
  std::vector<IoRequest> both{{.file = &first, .bytes = out, .kind = IoKind::kWriteAndSync},
                              {.file = &second, .bytes = out, .kind = IoKind::kWriteAndSync}};
  {
    const ScopedFileFault counting({.call = FileCall::kSync, .nth = 100});
    pool.run(both).or_throw();
    EXPECT_EQ(file_fault_calls(), 2);
  }
  for (const File* file : {&first, &second}) {
    std::vector<std::byte> in(kBlock);
    file->read_at(0, in).or_throw();
    EXPECT_EQ(in, out);
  }
  {
    const ScopedFileFault fault({.call = FileCall::kWrite, .os_errno = EIO, .keeps_failing = true});
    EXPECT_FALSE(pool.run(both));
  }
  const ScopedFileFault fault({.call = FileCall::kSync, .nth = 2, .os_errno = EIO});
  EXPECT_FALSE(pool.run(both));
}

TEST_P(IoPoolTest, ReportsTheFirstOfSeveralErrorsByPlaceNotByTime) {
  IoPool pool(GetParam());
  File file = create("short");
  std::vector<std::byte> in(kBlock * 30);
  auto reads = blocks(file, in, false);
  const auto result = pool.run(reads);
  ASSERT_FALSE(result);
  EXPECT_NE(result.error().to_string().find("512 bytes at 0 "), std::string::npos)
      << result.error().to_string();
}

TEST_P(IoPoolTest, ServesMoreCallersThanItHasPlacesForBatches) {
  IoPool pool(GetParam());
  constexpr std::size_t kCallers = 24;  // The pool holds 16 batches; the rest wait.
  std::vector<int> wrong(kCallers);
  {
    std::vector<std::jthread> callers;
    for (std::size_t c = 0; c < kCallers; ++c) {
      callers.emplace_back([&, c] {
        File file = create("caller" + std::to_string(c));
        std::vector<std::byte> out(kBlock * 20, static_cast<std::byte>(c));
        for (int round = 0; round < 5; ++round) {
          std::vector<std::byte> in(out.size());
          auto writes = blocks(file, out, true);
          auto reads = blocks(file, in, false);
          wrong[c] += pool.run(writes) && pool.run(reads) && in == out ? 0 : 1;
        }
      });
    }
  }
  EXPECT_EQ(wrong, std::vector<int>(kCallers));
}

// 4 KiB blocks of a direct file, read in a shuffled order, more at once than one call can begin.
class DirectReads {
 public:
  explicit DirectReads(File file, std::size_t blocks)
      : file_(std::move(file)),
        memory_(static_cast<std::byte*>(std::aligned_alloc(kPage, kPage * blocks)), &std::free) {
    std::memset(memory_.get(), 0, kPage * blocks);
    for (std::size_t i = 0; i < blocks; ++i) {
      const std::size_t block = i * 7919 % blocks;  // A prime: every block once.
      requests_.push_back({.file = &file_,
                           .offset = static_cast<std::int64_t>(block * kPage),
                           .bytes = {memory_.get() + block * kPage, kPage},
                           .kind = IoKind::kRead});
    }
  }
  std::span<IoRequest> requests() { return requests_; }
  [[nodiscard]] bool holds(const std::vector<std::byte>& expected) const {
    return std::equal(expected.begin(), expected.end(), memory_.get());
  }
  static constexpr std::size_t kPage = 4096;

 private:
  File file_;
  std::unique_ptr<std::byte, decltype(&std::free)> memory_;
  std::vector<IoRequest> requests_;
};

TEST_P(IoPoolTest, ReadsDirectFilesFromManyCallersAtOnce) {
  constexpr std::size_t kBlocks = 1000;
  constexpr std::size_t kCallers = 12;  // More than AioTransfers has contexts.
  std::vector<std::byte> out(kBlocks * DirectReads::kPage);
  for (std::size_t i = 0; i < out.size(); ++i) {
    out[i] = static_cast<std::byte>(mix64(i / 64));
  }
  create("pages").write_at(0, out).or_throw();
  IoPool pool(GetParam());
  std::vector<int> wrong(kCallers);
  {
    std::vector<std::jthread> callers;
    for (std::size_t c = 0; c < kCallers; ++c) {
      callers.emplace_back([&, c] {
        DirectReads reads(File::open(directory_ / "pages", FileMode::kRead, true).or_throw(),
                          kBlocks);
        wrong[c] = pool.run(reads.requests()) && reads.holds(out) ? 0 : 1;
      });
    }
  }
  EXPECT_EQ(wrong, std::vector<int>(kCallers));
}

TEST_P(IoPoolTest, TellsOfEachRequestThatEndedOnceWithItsBytesThere) {
  std::vector<std::byte> out(300 * DirectReads::kPage);
  for (std::size_t i = 0; i < out.size(); ++i) {
    out[i] = static_cast<std::byte>(mix64(i / 64));
  }
  create("pages").write_at(0, out).or_throw();
  IoPool pool(GetParam());
  for (const bool direct : {true, false}) {
    DirectReads reads(File::open(directory_ / "pages", FileMode::kRead, direct).or_throw(), 300);
    std::vector<int> told(300);
    const auto caller = std::this_thread::get_id();
    const auto ended = [&](std::size_t i) {
      const IoRequest& request = reads.requests()[i];
      const bool there =
          std::memcmp(out.data() + request.offset, request.bytes.data(), request.bytes.size()) == 0;
      told[i] += there && std::this_thread::get_id() == caller ? 1 : 1000;
    };
    pool.run(reads.requests(), ended).or_throw();
    EXPECT_EQ(told, std::vector<int>(300, 1)) << "direct " << direct;
  }
}

TEST_P(IoPoolTest, NamesTheFirstDirectReadThatEndsShort) {
  create("short").write_at(0, std::vector<std::byte>(3 * DirectReads::kPage)).or_throw();
  IoPool pool(GetParam());
  DirectReads reads(File::open(directory_ / "short", FileMode::kRead, true).or_throw(), 300);
  std::size_t first = 0;
  while (reads.requests()[first].offset < std::int64_t{3 * DirectReads::kPage}) {
    ++first;
  }
  const auto result = pool.run(reads.requests());
  ASSERT_FALSE(result);
  EXPECT_EQ(result.error().code, ErrorCode::kCorrupt);
  const auto at = std::to_string(reads.requests()[first].offset);
  EXPECT_NE(result.error().to_string().find("4096 bytes at " + at + " "), std::string::npos)
      << result.error().to_string();
}

// Runs of one to seven neighbours of a file, direct or not, each page to memory of its own.
struct Neighbours {
  static constexpr std::size_t kPage = DirectReads::kPage;
  static constexpr std::size_t kPages = 400;

  explicit Neighbours(const fs::path& path, bool direct)
      : file(File::open(path, FileMode::kRead, direct).or_throw()) {
    for (std::size_t first = 0; first < kPages;) {
      const std::size_t count = std::min(1 + first % 7, kPages - first);
      for (std::size_t i = first; i < first + count; ++i) {  // From the end of the memory on.
        parts[i] = {memory.get() + (kPages - 1 - i) * kPage, kPage};
      }
      requests.push_back(IoRequest::read_parts(file, static_cast<std::int64_t>(first * kPage),
                                               std::span(parts).subspan(first, count)));
      first += count;
    }
    std::memset(memory.get(), 0, kPages * kPage);
  }
  [[nodiscard]] bool hold(const std::vector<std::byte>& expected) const {
    for (std::size_t i = 0; i < kPages; ++i) {
      if (std::memcmp(expected.data() + i * kPage, parts[i].iov_base, kPage) != 0) {
        return false;
      }
    }
    return true;
  }

  File file;
  std::unique_ptr<std::byte, decltype(&std::free)> memory{
      static_cast<std::byte*>(std::aligned_alloc(kPage, kPages* kPage)), &std::free};
  std::array<iovec, kPages> parts{};
  std::vector<IoRequest> requests{};
};

TEST_P(IoPoolTest, ReadsNeighboursIntoPartsOfTheirOwn) {
  std::vector<std::byte> out(Neighbours::kPages * Neighbours::kPage);
  for (std::size_t i = 0; i < out.size(); ++i) {
    out[i] = static_cast<std::byte>(mix64(i / 64));
  }
  create("pages").write_at(0, out).or_throw();
  IoPool pool(GetParam());
  for (const bool direct : {true, false}) {
    Neighbours reads(directory_ / "pages", direct);
    pool.run(reads.requests).or_throw();
    EXPECT_TRUE(reads.hold(out)) << "direct " << direct;
  }
  // One of several parts is behind the end.
  create("short").write_at(0, std::span(out).first(2 * Neighbours::kPage)).or_throw();
  Neighbours reads(directory_ / "short", true);
  const auto refused = pool.run(reads.requests);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kCorrupt);
}

// What the kernel may answer to a read of a batch: the caller's memory is whole all the same, each
// read that failed having been tried by other means, once.
TEST(AioTransfersTest, LeavesToOthersWhatFailsEndsShortOrIsNeverReported) {
  constexpr std::size_t kBlocks = 300;
  std::vector<std::byte> out(kBlocks * DirectReads::kPage);
  for (std::size_t i = 0; i < out.size(); ++i) {
    out[i] = static_cast<std::byte>(mix64(i / 64));
  }
  std::string pattern = (fs::temp_directory_path() / "plimsoll_aio_XXXXXX").string();
  const fs::path directory = ::mkdtemp(pattern.data());
  File::open(directory / "pages", FileMode::kCreate).or_throw().write_at(0, out).or_throw();
  struct Case {
    const char* name;
    FileFault fault;
    std::size_t again;
  };
  const Case cases[] = {
      {"one fails", {.call = FileCall::kAioRead, .nth = 7, .os_errno = EIO}, 1},
      {"all fail", {.call = FileCall::kAioRead, .os_errno = EIO, .keeps_failing = true}, kBlocks},
      {"one ends short",
       {.call = FileCall::kAioRead, .nth = 200, .os_errno = 0, .short_bytes = 512},
       1},
      {"one is lost", {.call = FileCall::kAioRead, .nth = 3, .lost = true}, 1},
      {"all are lost", {.call = FileCall::kAioRead, .keeps_failing = true, .lost = true}, kBlocks},
  };
  for (const Case& one : cases) {
    SCOPED_TRACE(one.name);
    AioTransfers aio(std::chrono::milliseconds(40));
    for (int round = 0; round < 2; ++round) {  // Also with the context made anew.
      DirectReads reads(File::open(directory / "pages", FileMode::kRead, true).or_throw(), kBlocks);
      if (!reads.requests()[0].file->direct()) {
        fs::remove_all(directory);
        GTEST_SKIP() << directory << " is on a file system without direct I/O";
      }
      std::size_t again = 0;
      std::vector<int> told(kBlocks);
      const ScopedFileFault armed(one.fault);
      const bool carried_out = aio.run(reads.requests(), [&](std::size_t i, bool whole) {
        ++told[i];
        if (whole) {
          return;
        }
        const IoRequest& request = reads.requests()[i];
        std::memset(request.bytes.data(), 0xEE, request.bytes.size());
        request.file->read_at(request.offset, request.bytes).or_throw();
        ++again;
      });
      if (!carried_out) {
        fs::remove_all(directory);
        GTEST_SKIP() << "the kernel offers no AIO here";
      }
      EXPECT_TRUE(reads.holds(out));
      EXPECT_EQ(again, one.again);
      EXPECT_EQ(told, std::vector<int>(kBlocks, 1));
    }
  }
  out.resize(Neighbours::kPages * Neighbours::kPage);
  File::open(directory / "more", FileMode::kCreate).or_throw().write_at(0, out).or_throw();
  for (const std::size_t times : {std::size_t{0}, std::size_t{1}}) {  // Of several parts, too.
    SCOPED_TRACE(times);
    Neighbours reads(directory / "more", true);
    const ScopedFileFault armed({.call = FileCall::kAioRead,
                                 .nth = times == 0 ? 1'000'000 : 5,
                                 .os_errno = 0,
                                 .short_bytes = 512});
    std::size_t again = 0;
    ASSERT_TRUE(AioTransfers().run(reads.requests, [&](std::size_t i, bool whole) {
      if (whole) {
        return;
      }
      ++again;
      std::int64_t at = reads.requests[i].offset;
      for (const iovec& part : reads.requests[i].parts()) {
        const auto page = std::span(static_cast<std::byte*>(part.iov_base), part.iov_len);
        std::memset(page.data(), 0xEE, page.size());
        reads.file.read_at(at, page).or_throw();
        at += static_cast<std::int64_t>(page.size());
      }
    }));
    EXPECT_EQ(again, times);
    EXPECT_TRUE(reads.hold(out));
  }
  fs::remove_all(directory);
}

// The same of writes: what the file holds in the end is whole.
TEST(AioTransfersTest, WritesThatFailEndShortOrAreNeverReportedAreTriedAgain) {
  constexpr std::size_t kBlocks = 300;
  std::string pattern = (fs::temp_directory_path() / "plimsoll_aio_XXXXXX").string();
  const fs::path directory = ::mkdtemp(pattern.data());
  for (const FileFault& fault :
       {FileFault{.call = FileCall::kAioWrite, .nth = 7, .os_errno = ENOSPC},
        FileFault{.call = FileCall::kAioWrite, .os_errno = EIO, .keeps_failing = true},
        FileFault{.call = FileCall::kAioWrite, .nth = 200, .os_errno = 0, .short_bytes = 512},
        FileFault{.call = FileCall::kAioWrite, .nth = 3, .lost = true}}) {
    SCOPED_TRACE(fault.nth);
    fs::remove(directory / "pages");
    File::open(directory / "pages", FileMode::kCreate)
        .or_throw()
        .truncate(kBlocks * DirectReads::kPage)
        .or_throw();
    DirectReads pages(File::open(directory / "pages", FileMode::kReadWrite, true).or_throw(),
                      kBlocks);
    if (!pages.requests()[0].file->direct()) {
      fs::remove_all(directory);
      GTEST_SKIP() << directory << " is on a file system without direct I/O";
    }
    for (IoRequest& request : pages.requests()) {
      request.kind = IoKind::kWrite;
      for (std::size_t i = 0; i < request.bytes.size(); ++i) {
        request.bytes[i] =
            static_cast<std::byte>(mix64(static_cast<std::uint64_t>(request.offset) + i));
      }
    }
    AioTransfers aio(std::chrono::milliseconds(40));
    std::int64_t again = 0;
    const ScopedFileFault armed(fault);
    const bool carried_out = aio.run(pages.requests(), [&](std::size_t i, bool whole) {
      if (!whole) {
        const IoRequest& request = pages.requests()[i];
        request.file->write_at(request.offset, request.bytes).or_throw();
        ++again;
      }
    });
    if (!carried_out) {
      fs::remove_all(directory);
      GTEST_SKIP() << "the kernel offers no AIO here";
    }
    EXPECT_EQ(again, fault.keeps_failing ? kBlocks : 1);
    std::vector<std::byte> in(kBlocks * DirectReads::kPage);
    File::open(directory / "pages", FileMode::kRead).or_throw().read_at(0, in).or_throw();
    EXPECT_TRUE(pages.holds(in));
  }
  fs::remove_all(directory);
}

INSTANTIATE_TEST_SUITE_P(Threads, IoPoolTest, testing::Values(0, 1, 3));

}  // namespace
}  // namespace plimsoll

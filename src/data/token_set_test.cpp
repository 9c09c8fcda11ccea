// SPDX-License-Identifier: Apache-2.0
//
// Goal: what is written is read back, whatever happens on the way. Method: rows are a function of
// their number; a set made in one go is the oracle of every set that was made with kills, power
// failures, faults and resumptions.
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <random>

#include <sys/wait.h>

#include "data/token_set_format.h"
#include "os/crash_point.h"
#include "os/file_faults.h"
#include "os/power_loss.h"
#include "plimsoll/token_set.h"
#include "tests/support/array_files.h"
#include "tests/support/feature_set.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;

struct Row {
  std::vector<std::uint32_t> ids{};
  std::vector<std::uint8_t> trained{};
};

// Row `number` of so many tokens at most; every seventh is trained nowhere.
Row row_of(std::int64_t number, std::int64_t vocabulary, std::int64_t most = 300) {
  std::mt19937_64 random(static_cast<std::uint64_t>(number) * 7919 + 1);
  Row row;
  row.ids.resize(random() % static_cast<std::uint64_t>(most) + (number % 7 == 0 ? 0 : 1));
  row.trained.resize(row.ids.size());
  for (std::size_t i = 0; i < row.ids.size(); ++i) {
    row.ids[i] = static_cast<std::uint32_t>(random() % static_cast<std::uint64_t>(vocabulary));
    row.trained[i] = number % 7 == 0 ? 0 : (random() % 3 == 0 || i == 0 ? 1 : 0);
  }
  return row;
}

// The row in two pieces, as a long chat comes.
Result<void> write_row(TokenWriter& writer, const Row& row) {
  const std::size_t half = row.ids.size() / 2;
  for (const auto& [begin, end] :
       {std::pair(std::size_t{0}, half), std::pair(half, row.ids.size())}) {
    std::vector<TokenSpan> spans;
    for (std::size_t i = begin; i < end; ++i) {
      if (row.trained[i] != 0) {
        spans.push_back(
            {static_cast<std::int64_t>(i - begin), static_cast<std::int64_t>(i - begin + 1)});
      }
    }
    if (auto done = writer.append(std::span(row.ids).subspan(begin, end - begin), spans); !done) {
      return done;
    }
  }
  const auto ended = writer.end_row();
  return ended ? Result<void>{} : tl::unexpected(ended.error());
}

class TokenSetTest : public ::testing::Test {
 protected:
  void SetUp() override { record_unsynced({}); }  // Syncs are not passed on.
  void TearDown() override { stop_recording_unsynced(); }

  static constexpr std::int64_t kRows = 80;

  // Writes what is not yet written, a commit every ten rows.
  Result<void> work(const fs::path& path, std::int64_t vocabulary = 300) {
    auto writer =
        TokenWriter::open(governor_, {.path = path, .vocabulary = vocabulary, .fingerprint = "f"});
    if (!writer) {
      return tl::unexpected(writer.error());
    }
    if (writer->whole()) {
      return {};
    }
    std::int64_t at = writer->position().empty() ? 0 : std::stoll(writer->position());
    for (; at < kRows; ++at) {
      if (auto done = write_row(*writer, row_of(at, vocabulary)); !done) {
        return done;
      }
      if (at % 10 == 9) {
        if (auto done = writer->commit(std::to_string(at + 1)); !done) {
          return done;
        }
      }
    }
    return writer->finish(R"({"what":"a test"})");
  }

  std::string good(std::int64_t vocabulary = 300) {
    const fs::path path = scratch_ / "good";
    work(path, vocabulary).or_throw();
    return test::slurp(path);
  }

  void expect_nothing_beside(const fs::path& path) {
    EXPECT_FALSE(fs::exists(path.string() + ".partial"));
  }

  test::ScratchDirectory scratch_;
  Governor governor_{Governor::create({.memory_limit = "1GiB"}).or_throw()};
};

TEST_F(TokenSetTest, RowsComeBackAsTheyWere) {
  for (const std::int64_t vocabulary : {300, 70'000}) {
    const fs::path path = scratch_ / std::to_string(vocabulary);
    work(path, vocabulary).or_throw();
    expect_nothing_beside(path);
    const auto set = TokenSet::open(path).or_throw();
    EXPECT_EQ(set.info().id_bytes, vocabulary == 300 ? 2 : 4);
    EXPECT_EQ(set.info().about, R"({"what":"a test"})");
    EXPECT_EQ(set.info().fingerprint, "f");
    std::int64_t next = 0;
    std::int64_t tokens = 0;
    std::int64_t trained = 0;
    std::int64_t longest = 0;
    for (std::int64_t number = 0; number < kRows; ++number) {
      const Row row = row_of(number, vocabulary);
      if (std::count(row.trained.begin(), row.trained.end(), 1) == 0) {
        continue;  // M10: left out.
      }
      std::vector<std::int32_t> ids(row.ids.size());
      std::vector<std::uint8_t> mask(row.ids.size());
      ASSERT_EQ(set.length(next).or_throw(), static_cast<std::int64_t>(ids.size()));
      set.read(next, ids, mask).or_throw();
      EXPECT_TRUE(std::equal(ids.begin(), ids.end(), row.ids.begin(),
                             [](auto a, auto b) { return static_cast<std::uint32_t>(a) == b; }));
      EXPECT_EQ(mask, row.trained);
      ++next;
      tokens += static_cast<std::int64_t>(ids.size());
      trained += std::count(mask.begin(), mask.end(), 1);
      longest = std::max(longest, static_cast<std::int64_t>(ids.size()));
    }
    EXPECT_EQ(set.rows(), next);
    EXPECT_EQ(set.info().tokens, tokens);
    EXPECT_EQ(set.info().trained_tokens, trained);
    EXPECT_EQ(set.info().longest_row, longest);
    set.verify(nullptr).or_throw();
  }
}

TEST_F(TokenSetTest, RowsOfOtherSetsAreAppendedToTheBytesThatTheyHadAtOnce) {
  for (const std::int64_t vocabulary : {300, 70'000}) {
    const fs::path path = scratch_ / std::to_string(vocabulary);
    work(path, vocabulary).or_throw();
    const auto set = TokenSet::open(path).or_throw();
    const TokenWriterOptions options{
        .path = scratch_ / "joined", .vocabulary = vocabulary, .fingerprint = "f"};
    for (const std::int64_t end : {std::int64_t{0}, std::int64_t{30}, set.rows()}) {
      auto writer = TokenWriter::open(governor_, options).or_throw();
      EXPECT_GE(writer.append_rows(set, writer.info().rows, end).or_throw(), 0);
      writer.commit("here").or_throw();
    }
    auto writer = TokenWriter::open(governor_, options).or_throw();
    EXPECT_FALSE(writer.append_rows(set, set.rows(), set.rows() + 1));
    writer.finish(set.info().about).or_throw();
    EXPECT_EQ(test::slurp(options.path), test::slurp(path));
    fs::remove(options.path);
  }
}

TEST_F(TokenSetTest, ASecondImportFindsItWholeAndAnotherFingerprintReplacesIt) {
  const fs::path path = scratch_ / "set";
  work(path).or_throw();
  const auto before = fs::last_write_time(path);
  work(path).or_throw();
  EXPECT_EQ(fs::last_write_time(path), before);
  auto other =
      TokenWriter::open(governor_, {.path = path, .vocabulary = 9, .fingerprint = "g"}).or_throw();
  EXPECT_FALSE(other.whole());
  EXPECT_EQ(TokenSet::inspect(path).or_throw().fingerprint, "f");  // Until it is whole.
  const std::array<std::uint32_t, 2> ids{8, 1};
  const std::array<TokenSpan, 1> spans{{{0, 1}}};
  other.append(ids, spans).or_throw();
  EXPECT_EQ(other.end_row().or_throw().trained, 1);
  other.finish("{}").or_throw();
  EXPECT_EQ(TokenSet::inspect(path).or_throw().fingerprint, "g");
  expect_nothing_beside(path);
}

// A row longer than the writer's buffer is on disk before it is known that none of it is trained.
TEST_F(TokenSetTest, ALongRowThatIsDroppedLeavesNothingBehindTheEnd) {
  const fs::path path = scratch_ / "set";
  const Row row = row_of(1, 300);
  auto writer = TokenWriter::open(governor_, {.path = path, .vocabulary = 300, .fingerprint = "f"})
                    .or_throw();
  write_row(writer, row).or_throw();
  const std::vector<std::uint32_t> untrained(kTokenWriterBytes);
  writer.append(untrained, {}).or_throw();
  EXPECT_EQ(writer.end_row().or_throw().trained, 0);
  writer.finish("{}").or_throw();
  const auto set = TokenSet::open(path);
  ASSERT_TRUE(set.has_value()) << *set.error().detail;
  EXPECT_EQ(set->rows(), 1);
  EXPECT_TRUE(set->verify({}).has_value());
}

// Each file that was imported is named: 150,000 of them take 12 MB.
TEST_F(TokenSetTest, ItMayBeMadeOfVeryManyFiles) {
  const fs::path path = scratch_ / "set";
  auto writer = TokenWriter::open(governor_, {.path = path, .vocabulary = 300, .fingerprint = "f"})
                    .or_throw();
  write_row(writer, row_of(1, 300)).or_throw();
  writer.commit(std::string(8 << 20, '7')).or_throw();
  const auto refused = writer.finish(std::string((64 << 20) + 1, ' '));
  ASSERT_FALSE(refused.has_value());
  EXPECT_NE(refused.error().to_string().find("more than 67108864: put the inputs into fewer files"),
            std::string::npos);
  writer = TokenWriter::open(governor_,
                             {.path = scratch_ / "other", .vocabulary = 300, .fingerprint = "f"})
               .or_throw();  // Lets go of the first one's folder.
  writer = TokenWriter::open(governor_, {.path = path, .vocabulary = 300, .fingerprint = "f"})
               .or_throw();
  EXPECT_EQ(writer.position().size(), std::size_t{8 << 20});
  const std::string about = '"' + std::string(16 << 20, 'a') + '"';
  writer.finish(about).or_throw();
  EXPECT_EQ(TokenSet::open(path).or_throw().info().about, about);
}

TEST_F(TokenSetTest, SaysWhatIsWrong) {
  const fs::path path = scratch_ / "set";
  const auto refused = [](const auto& result) {
    return result ? std::string("done") : result.error().to_string();
  };
  test::spill(scratch_ / "mine", "a letter");
  EXPECT_NE(
      refused(TokenWriter::open(governor_,
                                {.path = scratch_ / "mine", .vocabulary = 9, .fingerprint = "f"}))
          .find("there is something else, which is no token set: choose another name with out "
                "(--out)"),
      std::string::npos);
  auto writer =
      TokenWriter::open(governor_,
                        {.path = path, .vocabulary = 9, .fingerprint = "f", .row_tokens_max = 3})
          .or_throw();
  EXPECT_NE(
      refused(TokenWriter::open(governor_, {.path = path, .vocabulary = 9, .fingerprint = "f"}))
          .find("is making this token set: wait for it, or choose another name"),
      std::string::npos);
  const std::array<std::uint32_t, 4> ids{1, 2, 3, 9};
  EXPECT_NE(refused(writer.append(ids, std::array<TokenSpan, 1>{{{0, 5}}}))
                .find("trained tokens [0, 5) of 4"),
            std::string::npos);
  writer.append(ids, std::array<TokenSpan, 1>{{{2, 4}}}).or_throw();  // The fourth is cut off.
  const RowEnd row = writer.end_row().or_throw();
  EXPECT_EQ(row.tokens, 3);
  EXPECT_EQ(row.trained, 1);
  EXPECT_TRUE(row.cut);
  EXPECT_NE(refused(writer.append(std::span(ids).last(1), {})).find("id 9 in a vocabulary of 9"),
            std::string::npos);
  writer.drop_row();
  writer.finish("{}").or_throw();
  const auto set = TokenSet::open(path).or_throw();
  EXPECT_NE(refused(set.length(1)).find("there is no row 1 of 1"), std::string::npos);
  std::array<std::int32_t, 2> few{};
  std::array<std::uint8_t, 2> mask{};
  EXPECT_NE(refused(set.read(0, few, mask)).find("row 0 has 3 tokens; room for 2 was given"),
            std::string::npos);
}

TEST_F(TokenSetTest, KilledAnywhereItGoesOnToTheSameBytes) {
  const std::string wanted = good();
  const fs::path path = scratch_ / "set";
  int killed = 0;
  bool more = true;
  for (int at = 1; more; ++at) {
    SCOPED_TRACE("crash *:" + std::to_string(at));
    fs::remove_all(path);
    fs::remove_all(path.string() + ".partial");
    governor_.close();
    const pid_t child = ::fork();
    if (child == 0) {
      governor_ = Governor::create({.memory_limit = "1GiB"}).or_throw();
      record_unsynced({});  // Syncs are not passed on: they cost more than all the rest.
      ::setenv("PLIMSOLL_CRASH", ("*:" + std::to_string(at)).c_str(), 1);
      reload_crash_points();
      std::_Exit(work(path) ? 0 : 3);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    governor_ = Governor::create({.memory_limit = "1GiB"}).or_throw();
    more = WIFSIGNALED(status);
    killed += more ? 1 : 0;
    ASSERT_TRUE(more || WEXITSTATUS(status) == 0);
    work(path).or_throw();
    ASSERT_EQ(test::slurp(path), wanted);
    expect_nothing_beside(path);
  }
  EXPECT_GT(killed, 40);
}

TEST_F(TokenSetTest, AfterAPowerFailureItGoesOnToTheSameBytes) {
  const std::string wanted = good();
  std::mt19937_64 random(4);
  for (int trial = 0; trial < 150; ++trial) {
    SCOPED_TRACE(trial);
    const fs::path path = scratch_ / ("set" + std::to_string(trial));
    record_unsynced({});
    set_file_fault({.call = FileCall::kAny,
                    .nth = static_cast<std::int64_t>(1 + random() % 130),
                    .os_errno = EIO,
                    .keeps_failing = true});
    const bool done = work(path).has_value();
    clear_file_fault();
    const auto changes = unsynced_changes();
    stop_recording_unsynced();  // strike() changes files, too.
    strike(
        changes, [&](std::size_t, std::int64_t) { return random() % 2 == 0; }, 512);
    if (done) {
      EXPECT_EQ(test::slurp(path), wanted) << "whole, and then lost";
    }
    record_unsynced({});
    work(path).or_throw();
    ASSERT_EQ(test::slurp(path), wanted);
    expect_nothing_beside(path);
    fs::remove(path);
  }
}

TEST_F(TokenSetTest, EveryFaultIsToldAndTheNextTryGoesOn) {
  const std::string wanted = good();
  const fs::path path = scratch_ / "set";
  for (const FileCall call :
       {FileCall::kWrite, FileCall::kSync, FileCall::kRename, FileCall::kRead, FileCall::kRemove,
        FileCall::kOpenToWrite, FileCall::kMakeDirectory}) {
    for (std::int64_t nth = 1;; ++nth) {
      SCOPED_TRACE("call " + std::to_string(static_cast<int>(call)) + " nth " +
                   std::to_string(nth));
      fs::remove_all(path);
      fs::remove_all(path.string() + ".partial");
      set_file_fault({.call = call, .nth = nth, .os_errno = ENOSPC});
      const auto done = work(path);
      const bool met = file_fault_calls() >= nth;
      clear_file_fault();
      if (done) {
        EXPECT_EQ(test::slurp(path), wanted);
      }
      work(path).or_throw();
      ASSERT_EQ(test::slurp(path), wanted);
      expect_nothing_beside(path);
      if (!met) {
        break;
      }
    }
  }
}

TEST_F(TokenSetTest, OneBitOfTheFileIsNoticed) {
  std::string text = good();
  const fs::path path = scratch_ / "bits";
  std::mt19937_64 random(8);
  int unnoticed = 0;
  for (int trial = 0; trial < 400; ++trial) {
    const std::size_t at = random() % text.size();
    text[at] = static_cast<char>(text[at] ^ (1 << trial % 8));
    test::spill(path, text);
    const auto set = TokenSet::open(path);
    if (set && set->verify(nullptr)) {
      ++unnoticed;  // Only the zeros before the index have no checksum.
    }
    text[at] = static_cast<char>(text[at] ^ (1 << trial % 8));
  }
  EXPECT_LE(unnoticed, 3);
}

}  // namespace
}  // namespace plimsoll

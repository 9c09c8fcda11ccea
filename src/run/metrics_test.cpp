// SPDX-License-Identifier: Apache-2.0
//
// Golden bytes of the event format, and the files Metrics leaves. TensorBoard itself reads them
// back in tests/python/test_tensorboard.py.
#include "run/metrics.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <filesystem>

#include "run/metrics_tensorboard.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;

std::string hex(std::string_view bytes) {
  std::string text;
  for (const char c : bytes) {
    text += fmt::format("{:02x}", static_cast<unsigned char>(c));
  }
  return text;
}

class MetricsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::temp_directory_path() /
            fmt::format("plimsoll-metrics-{}-{}", ::getpid(),
                        ::testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::create_directories(root_ / "run" / "metrics");
  }
  void TearDown() override { fs::remove_all(root_); }
  fs::path root_;
};

TEST(TensorboardFormatTest, RecordsHaveTensorflowsFraming) {
  // Written by tensorboard.summary.writer.record_writer.RecordWriter for b"plimsoll".
  std::string record;
  append_record(record, "plimsoll");
  EXPECT_EQ(hex(record), "0800000000000000ff86240f706c696d736f6c6c3ab4bdd8");
}

TEST(TensorboardFormatTest, EventsHaveTensorflowsEncoding) {
  // Event(...).SerializeToString() of tensorboard.compat.proto.
  EXPECT_EQ(hex(version_event(1.5)), "09000000000000f83f1a0d627261696e2e4576656e743a32");
  EXPECT_EQ(hex(scalar_event("loss/total", 0.25, 300, 2.0)),
            "09000000000000004010ac022a130a110a0a6c6f73732f746f74616c15000080"
            "3e");
  EXPECT_EQ(hex(restart_event(7, 2.0)), "09000000000000004010073a020801");
}

TEST_F(MetricsTest, EventFilesAreMadeAnewForEachStart) {
  for (int start = 0; start < 3; ++start) {
    auto file = EventFile::create(root_ / "events", start - 1).or_throw();
    ASSERT_TRUE(file.scalar("a", 1.0, start, 1.0));
  }
  EXPECT_EQ(std::distance(fs::directory_iterator(root_ / "events"), fs::directory_iterator()), 3);
}

TEST_F(MetricsTest, AFailureIsReportedOnceByFlush) {
  auto metrics = Metrics::open(root_ / "events").or_throw();
  ASSERT_TRUE(metrics.flush());
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  ::signal(SIGXFSZ, SIG_IGN);
  const rlimit full{0, before.rlim_max};  // Every write of a file now fails with EFBIG.
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &full), 0);
  metrics.scalar("a", 1, 1);
  const auto failed = metrics.flush();
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  ::signal(SIGXFSZ, SIG_DFL);
  ASSERT_FALSE(failed);
  EXPECT_EQ(failed.error().os_errno, EFBIG);
  EXPECT_TRUE(metrics.flush());
}

TEST_F(MetricsTest, WithoutAFolderScalarsLeaveNothing) {
  auto metrics = Metrics::open({}).or_throw();
  metrics.scalar("a", 1, 1);
  EXPECT_TRUE(metrics.flush());
  EXPECT_TRUE(fs::is_empty(root_ / "run" / "metrics"));
}

}  // namespace
}  // namespace plimsoll

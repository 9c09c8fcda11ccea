// SPDX-License-Identifier: Apache-2.0
//
// Golden bytes of the event format, and the files Metrics leaves. TensorBoard itself reads them
// back in tests/python/test_tensorboard.py.
#include "recipes/metrics.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <sstream>

#include "recipes/metrics_mlflow.h"
#include "recipes/metrics_tensorboard.h"

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

std::string read(const fs::path& path) {
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
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

TEST_F(MetricsTest, WritesMlflowsLayoutAndGoesOnWithItAfterAResumption) {
  const std::vector<std::pair<std::string, std::string>> params{{"lr", "0.1"}, {"epochs", "3"}};
  const MetricsOptions options{
      .mlflow = root_ / "mlruns", .run_name = "it's run", .run = root_ / "run", .params = params};
  for (int start = 0; start < 2; ++start) {
    auto metrics = Metrics::open(options).or_throw();
    metrics.scalar("loss/total", 0.5, start);
    metrics.scalar("speed", 10, start);
    ASSERT_TRUE(metrics.finish(start == 0 ? "stopped" : "finished"));
  }
  std::vector<fs::path> experiments;
  for (const auto& entry : fs::directory_iterator(root_ / "mlruns")) {
    experiments.push_back(entry.path());
  }
  ASSERT_EQ(experiments.size(), 1U);
  EXPECT_NE(read(experiments[0] / "meta.yaml").find("name: cosir\n"), std::string::npos);
  const std::string id = read(root_ / "run" / "metrics" / "mlflow_run_id").substr(0, 32);
  const fs::path run = experiments[0] / id;
  EXPECT_EQ(read(run / "params" / "lr"), "0.1");
  const std::string losses = read(run / "metrics" / "loss" / "total");
  EXPECT_EQ(std::count(losses.begin(), losses.end(), '\n'), 2) << losses;
  EXPECT_NE(losses.find(" 0.5 1\n"), std::string::npos) << losses;
  const std::string meta = read(run / "meta.yaml");
  EXPECT_NE(meta.find("status: 3\n"), std::string::npos) << meta;
  EXPECT_NE(meta.find("run_name: 'it''s run'\n"), std::string::npos) << meta;
  EXPECT_NE(meta.find("run_id: '" + id + "'\n"), std::string::npos) << meta;
}

TEST_F(MetricsTest, AFailureIsReportedOnceByFlush) {
  auto metrics = Metrics::open({.mlflow = root_ / "mlruns", .run = root_ / "run"}).or_throw();
  fs::remove_all(root_ / "mlruns");
  std::ofstream(root_ / "mlruns") << "in the way";
  metrics.scalar("a", 1, 1);
  metrics.scalar("b", 1, 1);
  EXPECT_FALSE(metrics.flush());
  EXPECT_TRUE(metrics.flush());
}

TEST_F(MetricsTest, WithoutAnySinkScalarsCostNothing) {
  auto metrics = Metrics::open({}).or_throw();
  metrics.scalar("a", 1, 1);
  EXPECT_TRUE(metrics.finish("finished"));
}

}  // namespace
}  // namespace plimsoll

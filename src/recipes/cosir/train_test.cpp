// SPDX-License-Identifier: Apache-2.0
//
// Goal: whole runs of `cosir` learn, end in the same bits however they are cut up, obey each
// option, and refuse a limit that is too small before the first step.
// Method: small synthetic data, trained in this process again and again.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <chrono>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "plimsoll/embedding_store.h"
#include "plimsoll/synth.h"
#include "recipes/cosir/cosir.h"
#include "recipes/cosir/step.h"
#include "run/control.h"
#include "run/run_folder.h"
#include "tests/support/feature_set.h"
#include "torch/run_report.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;
using Options = std::map<std::string, std::string>;
using nlohmann::json;

struct Ended {
  RunSummary summary;
  fs::path folder;
  [[nodiscard]] std::vector<json> events(const std::string& name) const {
    std::vector<json> list;
    std::ifstream lines(folder / "events.jsonl");
    for (std::string line; std::getline(lines, line);) {
      auto event = json::parse(line);
      if (event.at("event") == name) {
        list.push_back(std::move(event));
      }
    }
    return list;
  }
  [[nodiscard]] json recall() const { return json::parse(summary.recall_json); }
  [[nodiscard]] json before() const { return json::parse(summary.recall_before_json); }
};

class CosirTrainTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    scratch_ = new test::ScratchDirectory;
    make("wide", 1500, 32, 24);
    make("small", 130, 16, 16);
  }
  static void TearDownTestSuite() { delete scratch_; }

  static void make(const std::string& name, std::int64_t rows, std::int64_t image_dim,
                   std::int64_t text_dim) {
    CosirSynthOptions options;
    options.rows = rows;
    options.out = *scratch_ / name;
    options.image_dim = image_dim;
    options.text_dim = text_dim;
    options.classes = 0;
    synth_cosir(test::governor_of(), options, {}).or_throw();
  }

  // "small" for three steps an epoch, unless told otherwise.
  static CosirSettings settings_of(const std::string& data, const fs::path& out,
                                   const Options& more) {
    Options all{{"memory_limit", "2GiB"},    {"epochs", "2"},
                {"batch_size", "40"},        {"seed", "7"},
                {"tensorboard", "false"},    {"compute_threads", "1"},
                {"eval_every_n_epochs", "0"}};
    for (const auto& [key, value] : more) {
      all[key] = value;
    }
    all["data"] = (*scratch_ / data).string();
    all["out"] = out.string();
    CosirSettings settings;
    for (const auto& [key, value] : all) {
      settings.set(key, value, "test").or_throw();
    }
    settings.resolve().or_throw();
    return settings;
  }

  static Result<RunSummary> train(const CosirSettings& settings, bool resume = false) {
    TrainOptions options;
    options.resume = resume;
    options.progress.quiet = true;
    options.progress.stream = std::tmpfile();
    auto result = train_cosir(settings, options);
    std::fclose(options.progress.stream);
    return result;
  }
  static fs::path next_folder() {
    static int count = 0;
    return *scratch_ / ("run" + std::to_string(count++));
  }
  static Ended run(const std::string& data, const Options& options = {}) {
    const fs::path out = next_folder();
    return {train(settings_of(data, out, options)).or_throw(), out};
  }

  static test::ScratchDirectory* scratch_;
};
test::ScratchDirectory* CosirTrainTest::scratch_ = nullptr;

const Options kLearning{{"epochs", "12"},     {"batch_size", "128"},     {"dim", "32"},
                        {"label_lr", "0.05"}, {"projection_lr", "0.01"}, {"holdout", "300"}};

TEST_F(CosirTrainTest, LossFallsAndRetrievalImproves) {
  const Ended ended = run("wide", kLearning);
  EXPECT_EQ(ended.summary.status(), "finished");
  const auto steps = ended.events("step");
  ASSERT_EQ(steps.size(), 12U * 10U);  // 1,200 training pairs.
  EXPECT_LT(steps.back().at("loss"), 0.8 * steps.front().at("loss").get<double>());
  const auto before = ended.before();
  const auto after = ended.recall();
  for (const char* side : {"raw", "oracle"}) {
    for (const char* way : {"t2i", "i2t"}) {
      EXPECT_GT(after.at(side).at(way).at("r10"), before.at(side).at(way).at("r10"));
      EXPECT_LT(after.at(side).at(way).at("mean_rank"), before.at(side).at(way).at("mean_rank"));
    }
  }
  EXPECT_LT(after.at("raw").at("t2i").at("mean_rank"),
            0.75 * after.at("chance").at("t2i").get<double>());
  EXPECT_LT(after.at("train_mean_rank"), before.at("train_mean_rank"));
  EXPECT_EQ(ended.summary.state_sha256.size(), 64U);
}

TEST_F(CosirTrainTest, BitsDependNeitherOnLimitsNorOnLoaderThreads) {
  const std::string bits = run("small").summary.state_sha256;
  const std::vector<Options> others{
      {},
      {{"loader_threads", "1"}},
      {{"memory_limit", "512MiB"}},  // With the others' 2 GiB: three, each four times the last.
      {{"memory_limit", "8GiB"}},
      {{"label_layout", "sample_order"}},
      {{"label_layout", "sample_order"},
       {"store_bytes", "4MiB"},
       {"checkpoint_every_n_steps", "2"},
       {"eval_every_n_epochs", "1"}},
      {{"store_bytes", "4MiB"}, {"cache_bytes", "4MiB"}, {"queue_bytes", "1MiB"}},
      {{"checkpoint_every_n_steps", "1"}, {"keep_checkpoints", "1"}},
      {{"eval_every_n_epochs", "1"}, {"eval_pairs", "5"}, {"oracle_angles", "3"}},
      {{"io_threads", "1"}, {"stats_every_n_epochs", "0"}, {"metrics_every_n_steps", "1"}}};
  for (std::size_t k = 0; k < others.size(); ++k) {
    EXPECT_EQ(run("small", others[k]).summary.state_sha256, bits) << "variant " << k;
  }
}

TEST_F(CosirTrainTest, GradientCachingTrainsIntoTheSameBitsWithLessMemory) {
  const Options options{{"batch_size", "1100"}, {"epochs", "5"}, {"dim", "256"}};
  Options caching = options;
  caching["gradient_caching"] = "true";
  const Ended kept = run("wide", options);
  const Ended cached = run("wide", caching);
  EXPECT_EQ(cached.summary.state_sha256, kept.summary.state_sha256);
  const auto losses = [](const Ended& ended) {
    std::vector<double> list;
    for (const json& step : ended.events("step")) {
      list.push_back(step.at("loss").get<double>());
    }
    return list;
  };
  EXPECT_GE(losses(kept).size(), 5U);
  EXPECT_EQ(losses(cached), losses(kept));
  const auto peak = [](const Ended& ended) {
    return ended.events("admitted").at(0).at("step_peak_bytes").get<std::int64_t>();
  };
  EXPECT_LT(peak(cached), peak(kept));
}

TEST_F(CosirTrainTest, EveryOptionOfTheRunsIdentityChangesItsBits) {
  const Options base{{"projections", "true"}, {"dim", "16"}};
  const Options with_phase2{{"phase2_epochs", "1"}};
  const std::string plain = run("small", base).summary.state_sha256;
  const std::vector<Options> changes{{{"epochs", "3"}},
                                     {{"batch_size", "50"}},
                                     {{"seed", "8"}},
                                     {{"dim", "12"}},
                                     {{"label_dim", "3"}},
                                     {{"projections", "false"}},
                                     {{"temperature", "0.1"}},
                                     {{"loss_infonce", "0"}},
                                     {{"loss_infonce", "0.5"}},
                                     {{"loss_laplacian", "0"}},
                                     {{"loss_angular", "0"}},
                                     {{"loss_radius", "0"}},
                                     {{"loss_rotation", "0"}},
                                     {{"loss_boundary", "1"}, {"label_init_scale", "20"}},
                                     {{"loss_boundary", "2"}, {"label_init_scale", "20"}},
                                     {{"lr", "1e-3"}},
                                     {{"projection_lr", "1e-2"}},
                                     {{"weight_decay", "0.5"}},
                                     {{"label_dtype", "bfloat16"}},
                                     {{"label_optimizer", "adamw_fresh"}},
                                     {{"label_optimizer", "adagrad"}},
                                     {{"label_lr", "0.2"}},
                                     {{"label_weight_decay", "0.5"}},
                                     {{"label_init", "zeros"}},
                                     {{"label_init", "uniform"}},
                                     {{"label_init_scale", "0.3"}},
                                     {{"label_schedule", "cosine"}},
                                     {{"drop_last", "true"}},
                                     {{"holdout", "20"}},
                                     with_phase2,
                                     {{"phase2_epochs", "1"}, {"phase2_lr", "1e-3"}}};
  std::map<std::string, std::size_t> seen{{plain, changes.size()}};
  for (std::size_t k = 0; k < changes.size(); ++k) {
    Options options = base;
    for (const auto& [key, value] : changes[k]) {
      options[key] = value;
    }
    const auto [found, fresh] = seen.emplace(run("small", options).summary.state_sha256, k);
    EXPECT_TRUE(fresh) << changes[k].begin()->first << " = " << changes[k].begin()->second
                       << " ended in the bits of change " << found->second;
  }
}

TEST_F(CosirTrainTest, RowsAreKeptAsLabelDtypeSays) {
  for (const char* dtype : {"float32", "bfloat16"}) {
    const Ended ended = run("small", {{"label_dtype", dtype}, {"label_dim", "8"}});
    const auto info = EmbeddingStore::inspect(ended.folder / "embeddings").or_throw();
    const bool whole = std::string(dtype) == "float32";
    EXPECT_EQ(info.dtype, whole ? RowDType::kFloat32 : RowDType::kBFloat16);
    EXPECT_EQ(info.record_bytes, 16 + (whole ? 32 : 16) + 2 * 32);
    EXPECT_GT(ended.summary.step, 0);
  }
}

TEST_F(CosirTrainTest, EachTermIsReportedWhenItsWeightIsNotZero) {
  const Ended ended =
      run("small", {{"loss_radius", "0"}, {"loss_boundary", "0.1"}, {"label_init_scale", "20"}});
  const auto first = ended.events("step").front();
  for (const char* term : {"infonce", "laplacian", "angular", "rotation", "boundary"}) {
    EXPECT_GT(first.at(term), 0.0) << term;
  }
  EXPECT_EQ(first.at("radius"), 0.0);
}

TEST_F(CosirTrainTest, OptionsOfReportingDoWhatTheySay) {
  const Ended ended = run("small", {{"epochs", "4"},
                                    {"eval_every_n_epochs", "2"},
                                    {"eval_pairs", "9"},
                                    {"checkpoint_every_n_steps", "3"},
                                    {"keep_checkpoints", "2"},
                                    {"store_bytes", "4MiB"},
                                    {"cache_bytes", "5MiB"},
                                    {"tensorboard", "true"},
                                    {"drop_last", "true"}});
  EXPECT_EQ(ended.events("eval").size(), 3U);  // Before, after epoch 2, after.
  EXPECT_EQ(ended.recall().at("pairs"), 9);
  EXPECT_EQ(ended.summary.step, 8);              // 104 training pairs, 40 a batch, no partial one.
  EXPECT_EQ(ended.events("commit").size(), 4U);  // Steps 0, 3, 6 and 8.
  const auto folder = RunFolder::open(ended.folder).or_throw();
  EXPECT_EQ(folder.checkpoint_steps().or_throw(), (std::vector<std::int64_t>{6, 8}));
  const auto admitted = ended.events("admitted").front();
  EXPECT_EQ(admitted.at("store_bytes"), 4 << 20);
  EXPECT_EQ(admitted.at("cache_bytes"), 5 << 20);
  EXPECT_GT(admitted.at("step_peak_bytes"), 0);
  EXPECT_FALSE(fs::is_empty(ended.folder / "metrics"));
  EXPECT_EQ(ended.events("epoch").size(), 4U);
}

TEST_F(CosirTrainTest, CheckpointsComeWithEachEpochWhenNoNumberIsGiven) {
  const Ended ended = run("small", {{"checkpoint_every_n_steps", "0"}});
  std::vector<std::int64_t> steps;
  for (const auto& event : ended.events("commit")) {
    steps.push_back(event.at("step"));
  }
  EXPECT_EQ(steps, (std::vector<std::int64_t>{0, 3, 6}));
}

TEST_F(CosirTrainTest, ALoneRowIsPassedOverAndCounted) {
  const Ended ended = run("small", {{"batch_size", "103"}, {"epochs", "2"}});
  EXPECT_EQ(ended.summary.step, 4);  // 104 training pairs: 103 and 1.
  EXPECT_EQ(ended.summary.rows_skipped, 2);
}

// Asks for a stop once `step` has been passed.
std::jthread stop_after(const fs::path& run, std::int64_t step) {
  return std::jthread([run, step](const std::stop_token& ended) {
    const std::string mark = "\"step\":" + std::to_string(step) + ",";
    while (!ended.stop_requested()) {
      std::ifstream lines(run / "events.jsonl");
      for (std::string line; std::getline(lines, line);) {
        if (line.find("\"event\":\"step\"") != std::string::npos &&
            line.find(mark) != std::string::npos) {
          static_cast<void>(ask_to_stop(run));
          return;
        }
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
}

TEST_F(CosirTrainTest, AStoppedRunResumesToTheBitsOfAnUndisturbedOne) {
  const Options options{{"epochs", "40"}, {"phase2_epochs", "20"}, {"phase2_lr", "1e-3"}};
  const Ended calm = run("small", options);
  const fs::path out = next_folder();
  const auto settings = settings_of("small", out, options);
  int stops = 0;
  std::string bits;
  for (const std::int64_t step : {7, 20, 61, 130, 150}) {
    auto watcher = stop_after(out, step);
    const auto summary = train(settings, stops > 0).or_throw();
    watcher.request_stop();
    if (!summary.stop) {
      bits = summary.state_sha256;
      break;
    }
    EXPECT_EQ(summary.status(), "stopped");
    EXPECT_EQ(summary.stop->why, ".stop");
    ++stops;
  }
  EXPECT_GT(stops, 0);
  if (bits.empty()) {
    const auto summary = train(settings, true).or_throw();
    EXPECT_EQ(summary.status(), "finished");
    bits = summary.state_sha256;
    EXPECT_EQ(summary.recall_json, calm.summary.recall_json);
    EXPECT_EQ(summary.recall_before_json, calm.summary.recall_before_json);
    EXPECT_EQ(summary.phase2_json, calm.summary.phase2_json);
    EXPECT_EQ(summary.loss, calm.summary.loss);
  }
  EXPECT_EQ(bits, calm.summary.state_sha256);
}

TEST_F(CosirTrainTest, RowsLieInSampleOrderWhenTheyDoNotFitIntoMemoryOrAreToldTo) {
  const auto layout_with = [&](const std::string& key, const std::string& value) {
    Options options{
        {"dim", "1024"}, {"label_dim", "1024"}, {"epochs", "1"}, {"holdout", "300"}};  // 15 MB.
    options[key] = value;
    const Ended ended = run("wide", options);
    const auto table = EmbeddingStore::inspect(ended.folder / "embeddings").or_throw();
    EXPECT_EQ(table.rows, 1200);  // Those held out have none.
    return table.layout;
  };
  EXPECT_EQ(layout_with("label_layout", "auto"), RowLayout::kAnyOrder);
  EXPECT_EQ(layout_with("label_layout", "sample_order"), RowLayout::kSampleOrder);
  EXPECT_EQ(layout_with("store_bytes", "48MiB"), RowLayout::kAnyOrder);
  EXPECT_EQ(layout_with("store_bytes", "17MiB"), RowLayout::kSampleOrder);
  EXPECT_EQ(layout_with("store_bytes", "12MiB"), RowLayout::kAnyOrder);  // Too few for buckets.
}

TEST_F(CosirTrainTest, ARunInSampleOrderStopsAndResumesToTheBitsOfAnyOrder) {
  const Options options{{"epochs", "30"}, {"drop_last", "true"}, {"phase2_epochs", "3"}};
  const Ended calm = run("small", options);
  Options ordered = options;
  ordered["label_layout"] = "sample_order";
  const fs::path out = next_folder();
  const auto settings = settings_of("small", out, ordered);
  auto watcher = stop_after(out, 7);
  const auto first = train(settings).or_throw();
  watcher.request_stop();
  EXPECT_TRUE(first.stop.has_value());
  Options other = options;  // The table stays as it was made.
  other["label_layout"] = "any_order";
  const auto last = train(settings_of("small", out, other), true).or_throw();
  EXPECT_EQ(last.state_sha256, calm.summary.state_sha256);
  EXPECT_EQ(last.recall_json, calm.summary.recall_json);
  const auto table = EmbeddingStore::inspect(out / "embeddings").or_throw();
  EXPECT_EQ(table.layout, RowLayout::kSampleOrder);
  EXPECT_EQ(json::parse(eval_cosir(settings).or_throw().json).at("recall"),
            json::parse(last.recall_json));
}

TEST_F(CosirTrainTest, AFinishedRunCanBeEvaluatedAndResumedWithoutChange) {
  const fs::path out = next_folder();
  const auto settings = settings_of("small", out, {});
  const auto summary = train(settings).or_throw();
  const auto evaluated = json::parse(eval_cosir(settings).or_throw().json);
  EXPECT_EQ(evaluated.at("step"), summary.step);
  EXPECT_EQ(evaluated.at("recall"), json::parse(summary.recall_json));
  const auto again = train(settings, true).or_throw();
  EXPECT_EQ(again.state_sha256, summary.state_sha256);
  EXPECT_EQ(again.step, summary.step);
}

TEST_F(CosirTrainTest, APausedRunGoesOnToTheSameBits) {
  const Options options{{"epochs", "20"}};
  const Ended calm = run("small", options);
  const fs::path out = next_folder();
  bool paused = false;
  std::jthread visitor([&](const std::stop_token& ended) {
    while (!ended.stop_requested() && !RunFolder::is_run(out)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    static_cast<void>(ask_to_pause(out));
    while (!ended.stop_requested() && !paused) {
      const auto view = RunFolder::view(out);
      paused = view && view->status.status == "paused";
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    static_cast<void>(ask_to_continue(out));
  });
  const auto summary = train(settings_of("small", out, options)).or_throw();
  visitor.request_stop();
  visitor.join();
  EXPECT_TRUE(paused);
  EXPECT_EQ(summary.status(), "finished");
  EXPECT_EQ(summary.state_sha256, calm.summary.state_sha256);
}

// The pairs of `from` again: ids of their own, captions in fives per image, or as half floats.
void copy_as(const fs::path& from, const fs::path& to, bool own_ids, bool grouped, DType dtype) {
  auto governor = test::governor_of();
  auto source = FeatureStore::open(governor, {.directory = from}).or_throw();
  const std::int64_t rows = source.info().rows;
  const std::int64_t dim = source.info().columns[0].shape[0];
  auto writer =
      FeatureWriter::create(governor, {.directory = to,
                                       .columns = {{"image", dtype, {dim}}, {"text", dtype, {dim}}},
                                       .grouped = grouped})
          .or_throw();
  for (std::int64_t row = 0; row < rows; ++row) {
    std::vector<std::vector<std::byte>> bytes;
    std::vector<std::span<const std::byte>> columns;
    for (const int k : {0, 1}) {
      std::vector<float> values(static_cast<std::size_t>(dim));
      const std::span<std::byte> out = std::as_writable_bytes(std::span(values));
      const std::int64_t ordinal = grouped && k == 0 ? row / 5 * 5 : row;
      source.read_ordinals({&ordinal, 1}, {&k, 1}, {&out, 1}).or_throw();
      auto tensor = at::tensor(values, at::kFloat).to(at::kHalf);  // So that both types agree.
      tensor = dtype == DType::kFloat16 ? tensor : tensor.to(at::kFloat);
      const auto* data = static_cast<const std::byte*>(tensor.const_data_ptr());
      bytes.emplace_back(data, data + tensor.nbytes());
    }
    columns.assign(bytes.begin(), bytes.end());
    const std::int64_t id = own_ids ? 1'000'003 * ((row * 37) % rows) - 99 : row;
    const std::int64_t group = row / 5;
    writer
        .append(
            {&id, 1}, columns,
            grouped ? std::span<const std::int64_t>{&group, 1} : std::span<const std::int64_t>{})
        .or_throw();
  }
  writer.finish().or_throw();
}

TEST_F(CosirTrainTest, HalfFloatsTrainAsTheFloatsTheyAre) {
  copy_as(*scratch_ / "small", *scratch_ / "as_float", false, true, DType::kFloat32);
  copy_as(*scratch_ / "small", *scratch_ / "as_half", false, true, DType::kFloat16);
  const Ended whole = run("as_float");
  const Ended half = run("as_half");
  EXPECT_EQ(whole.summary.state_sha256, half.summary.state_sha256);
  EXPECT_EQ(whole.recall().at("pairs").get<int>() % 5, 0);  // Whole groups are held out.
  EXPECT_DOUBLE_EQ(whole.recall().at("chance").at("t2i"),
                   (whole.recall().at("pairs").get<int>() / 5 + 1) / 2.0);
}

TEST_F(CosirTrainTest, IdsOfTheirOwnAreTrainedStoppedAndResumed) {
  copy_as(*scratch_ / "small", *scratch_ / "sparse", true, false, DType::kFloat32);
  const Options options{{"epochs", "30"}};
  const Ended calm = run("sparse", options);
  const fs::path out = next_folder();
  const auto settings = settings_of("sparse", out, options);
  auto watcher = stop_after(out, 5);
  const auto first = train(settings).or_throw();
  watcher.request_stop();
  EXPECT_TRUE(first.stop.has_value());
  EXPECT_EQ(train(settings, true).or_throw().state_sha256, calm.summary.state_sha256);
  const auto table = EmbeddingStore::inspect(out / "embeddings").or_throw();
  EXPECT_FALSE(table.dense_ids);
  EXPECT_EQ(table.rows, 104);
  EXPECT_FALSE(fs::exists(out / "embeddings.ids.npy"));
}

TEST_F(CosirTrainTest, PhaseTwoLearnsAboveChance) {
  Options options = kLearning;
  options["epochs"] = "4";
  options["phase2_epochs"] = "20";
  options["phase2_lr"] = "1e-3";
  const Ended ended = run("wide", options);
  const auto accuracy = json::parse(ended.summary.phase2_json);
  EXPECT_EQ(accuracy.at("pairs"), 300);
  EXPECT_GT(accuracy.at("both"), 1.5 * accuracy.at("chance").get<double>());
  EXPECT_GT(accuracy.at("both"), accuracy.at("commonest"));
  const auto steps = ended.events("step");
  EXPECT_LT(steps.back().at("loss"), steps[4 * 10].at("loss"));
}

TEST_F(CosirTrainTest, ASmallLimitIsRefusedWithOneThatDoes) {
  const Resident now = read_resident().or_throw();
  std::int64_t limit = now.total() + (20LL << 20);
  for (int round = 0; round < 8; ++round) {
    const fs::path out = next_folder();
    const auto ended = train(settings_of("wide", out,
                                         {{"batch_size", "1200"},
                                          {"holdout", "300"},
                                          {"epochs", "1"},
                                          {"foreign_bytes", "8MiB"},
                                          {"memory_limit", std::to_string(limit)}}));
    if (ended) {
      EXPECT_GT(round, 0) << "the first limit was meant to be too small";
      EXPECT_LE(ended->leased_peak_bytes, limit);
      return;
    }
    EXPECT_EQ(ended.error().code, ErrorCode::kOverBudget) << ended.error().to_string();
    EXPECT_FALSE(fs::exists(out)) << "a refused run leaves nothing";
    ASSERT_GT(ended.error().smallest_limit_bytes, limit) << ended.error().to_string();
    limit = ended.error().smallest_limit_bytes;
  }
  FAIL() << "no limit that was named would do";
}

TEST_F(CosirTrainTest, AStepTooLargeNamesLimitAndOptions) {
  const Resident now = read_resident().or_throw();
  const auto refused =
      train(settings_of("wide", next_folder(),
                        {{"batch_size", "1200"},
                         {"holdout", "300"},
                         {"store_bytes", "2MiB"},
                         {"cache_bytes", "2MiB"},
                         {"queue_bytes", "1MiB"},
                         {"foreign_bytes", "8MiB"},
                         {"memory_limit", std::to_string(now.total() + (24LL << 20))}}));
  ASSERT_FALSE(refused.has_value());
  const std::string text = refused.error().to_string();
  for (const char* part :
       {"a step of 1200 rows needs", "of tensors", "MiB would do", "--memory-limit", "batch_size",
        "store_bytes", "cache_bytes", "queue_bytes"}) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  }
}

TEST_F(CosirTrainTest, RefusesATemperatureItCannotCompute) {
  const auto refused = train(settings_of("small", next_folder(), {{"temperature", "0.02"}}));
  ASSERT_FALSE(refused.has_value());
  EXPECT_NE(refused.error().to_string().find("temperature"), std::string::npos);
}

TEST(CosirScheduleTest, FallsFromOneToTheLeastRate) {
  EXPECT_DOUBLE_EQ(cosir::cosine_scale(0, 100, 1e-5), 1.0);
  EXPECT_NEAR(cosir::cosine_scale(50, 100, 1e-5), 0.5, 1e-12);
  EXPECT_DOUBLE_EQ(cosir::cosine_scale(100, 100, 1e-5) * 1e-5, 1e-9);
  for (int k = 1; k <= 100; ++k) {
    EXPECT_LE(cosir::cosine_scale(k, 100, 1e-5), cosir::cosine_scale(k - 1, 100, 1e-5));
  }
}

TEST(RunReportTest, WarnsOfAFolderOnANetwork) {
  const test::ScratchDirectory scratch;
  auto folder = RunFolder::create(scratch / "run", "seed = 1\n").or_throw();
  RunReport report(&folder, Metrics::open(folder.root()).or_throw(), {.quiet = true},
                   test::governor_of());
  report.on_network("").or_throw();
  EXPECT_TRUE((Ended{{}, folder.root()}.events("warning").empty()));
  report.on_network("NFS").or_throw();
  const auto events = Ended{{}, folder.root()}.events("warning");
  ASSERT_EQ(events.size(), 1U);
  const auto message = events[0].at("message").get<std::string>();
  EXPECT_NE(message.find("is on NFS"), std::string::npos);
  EXPECT_NE(message.find("--out"), std::string::npos);
}

}  // namespace
}  // namespace plimsoll

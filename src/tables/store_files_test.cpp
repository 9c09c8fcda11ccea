// SPDX-License-Identifier: Apache-2.0
//
// Goal: what is exported from a table and imported again is the same table, in every form; and
// bad files are named and leave nothing behind.
#include <gtest/gtest.h>

#include <array>
#include <cstdlib>

#include <sys/wait.h>

#include "os/crash_point.h"
#include "run/ended_command.h"
#include "run/run_folder.h"
#include "tables/store_compact.h"
#include "tables/store_export.h"
#include "tables/store_import.h"
#include "tests/support/array_files.h"
#include "tests/support/embedding_table_fixture.h"

namespace plimsoll {
namespace {

using namespace test;
namespace fs = std::filesystem;

class StoreFilesTest : public EmbeddingTableTest {
 protected:
  // A table of random rows at commits 1 and 2; a tenth of the rows changed in between.
  void make_table(RowLayout layout = RowLayout::kAnyOrder) {
    auto store = open({.directory = directory(), .dim = 5, .layout = layout, .ids = ids_});
    std::mt19937_64 random(1);
    rows_ = random_floats(ids_.size() * 5, random);
    store.update(ids_, rows_).or_throw();
    store.commit(1).or_throw();
    for (std::size_t i = 0; i < ids_.size(); i += 10) {
      changed_.push_back(ids_[i]);
      rows_[i * 5] += 1.0F;
      store.update({&ids_[i], 1}, std::span(rows_).subspan(i * 5, 5)).or_throw();
    }
    store.commit(2).or_throw();
  }
  // Those that changed after commit 1, to a file and back.
  void expect_changed_rows_go_out() {
    EXPECT_EQ(export_to(root_ / "some.safetensors", "", 1).or_throw(),
              static_cast<std::int64_t>(changed_.size()));
    EXPECT_EQ(import_from({root_ / "some.safetensors"}).or_throw(),
              static_cast<std::int64_t>(changed_.size()));
    std::vector<float> wanted;
    for (std::size_t i = 0; i < ids_.size(); i += 10) {
      wanted.insert(wanted.end(), rows_.begin() + static_cast<std::ptrdiff_t>(i * 5),
                    rows_.begin() + static_cast<std::ptrdiff_t>(i * 5 + 5));
    }
    expect_copy(changed_, wanted);
  }
  Result<std::int64_t> export_to(const fs::path& out, const std::string& format = "",
                                 std::int64_t since = -1) {
    return export_store(
        governor_, {.directory = directory(), .out = out, .format = format, .since = since}, {});
  }
  Result<std::int64_t> import_from(const std::vector<fs::path>& files) {
    return import_store(governor_, {.files = files, .out = root_ / "copy"}, {});
  }
  void expect_copy(const std::vector<std::int64_t>& ids, const std::vector<float>& rows) {
    auto store = open({.directory = root_ / "copy", .init = {.kind = RowInitKind::kZeros}});
    EXPECT_EQ(store.last_commit(), 0);
    EXPECT_EQ(store.rows(), static_cast<std::int64_t>(ids.size()));
    EXPECT_EQ(gather(store, ids), rows);
    EXPECT_TRUE(EmbeddingStore::verify(root_ / "copy", {}));
  }
  void expect_refused(const std::vector<fs::path>& files, const std::string& words) {
    const auto refused = import_from(files);
    ASSERT_FALSE(refused);
    EXPECT_NE(refused.error().to_string().find(words), std::string::npos)
        << refused.error().to_string();
    EXPECT_FALSE(fs::exists(root_ / "copy"));
    EXPECT_FALSE(fs::exists(root_ / "copy.ids.npy"));
  }
  std::vector<std::int64_t> ids_ = sparse_ids(3000, 5);
  std::vector<float> rows_;
  std::vector<std::int64_t> changed_;
};

TEST_F(StoreFilesTest, EveryFormGoesOutAndComesBackTheSame) {
  make_table();
  for (const char* form : {"safetensors", "npy", "csv"}) {
    SCOPED_TRACE(form);
    const fs::path file = root_ / (std::string("rows.") + form);
    EXPECT_EQ(export_to(file).or_throw(), 3000);
    EXPECT_EQ(import_from({file}).or_throw(), 3000);
    expect_copy(ids_, rows_);
    fs::remove_all(root_ / "copy");
  }
}

TEST_F(StoreFilesTest, TheFormMayBeSaidInsteadOfNamed) {
  make_table();
  EXPECT_EQ(export_to(root_ / "rows", "csv").or_throw(), 3000);
  EXPECT_TRUE(slurp(root_ / "rows").starts_with("id,rows_0,"));
  EXPECT_FALSE(export_to(root_ / "other", "xls"));
  EXPECT_FALSE(export_to(root_ / "other"));
}

TEST_F(StoreFilesTest, Bfloat16RowsGoOutAsTheyAreWhereTheFormHasThem) {
  std::mt19937_64 random(3);
  std::vector<float> rows = random_floats(ids_.size() * 5, random);
  {
    auto store =
        open({.directory = directory(), .dim = 5, .dtype = RowDType::kBFloat16, .ids = ids_});
    store.update(ids_, rows).or_throw();
    store.commit(1).or_throw();
    rows = gather(store, ids_);
  }
  for (const char* form : {"safetensors", "npy", "csv"}) {
    for (const auto dtype : {RowDType::kBFloat16, RowDType::kFloat32}) {
      SCOPED_TRACE(form);
      const fs::path file = root_ / (std::string("rows.") + form);
      EXPECT_EQ(export_to(file).or_throw(), 3000);
      if (std::string(form) == "safetensors") {
        EXPECT_NE(slurp(file).substr(0, 300).find("BF16"), std::string::npos);
      }
      EXPECT_EQ(
          import_store(governor_, {.files = {file}, .out = root_ / "copy", .dtype = dtype}, {})
              .or_throw(),
          3000);
      auto store = open(
          {.directory = root_ / "copy", .dtype = dtype, .init = {.kind = RowInitKind::kZeros}});
      EXPECT_EQ(gather(store, ids_), rows);
      fs::remove_all(root_ / "copy");
      fs::remove(file);
      fs::remove(root_ / "rows.ids.npy");
    }
  }
  EXPECT_EQ(export_to(root_ / "none.safetensors", "", 1).or_throw(), 0);
  static_cast<void>(compact_store(governor_, directory(), {}).or_throw());
  EXPECT_EQ(EmbeddingStore::inspect(directory()).or_throw().dtype, RowDType::kBFloat16);
  auto store = open({.directory = directory(), .dtype = RowDType::kBFloat16});
  EXPECT_EQ(gather(store, ids_), rows);
}

TEST_F(StoreFilesTest, OnlyWhatChangedSinceACommitGoesOut) {
  make_table();
  EXPECT_EQ(export_to(root_ / "some.csv", "", 1).or_throw(),
            static_cast<std::int64_t>(changed_.size()));
  expect_changed_rows_go_out();
  EXPECT_EQ(export_to(root_ / "none.csv", "", 2).or_throw(), 0);
  const auto missing = export_to(root_ / "missing.csv", "", 7);
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().code, ErrorCode::kNotFound);
  EXPECT_NE(missing.error().to_string().find("there is one at 1 and 2"), std::string::npos)
      << missing.error().to_string();
}

TEST_F(StoreFilesTest, InSampleOrderTooOnlyWhatChangedGoesOutAndBothCommitsStay) {
  make_table(RowLayout::kSampleOrder);
  expect_changed_rows_go_out();
  EXPECT_EQ(EmbeddingStore::inspect(directory()).or_throw().commit_steps,
            (std::vector<std::int64_t>{2, 1}));
}

TEST_F(StoreFilesTest, TheCommitAskedForGoesOutWhileTrainingGoesOn) {
  make_table();
  auto store = open({.directory = directory(), .dim = 5, .ids = ids_});
  std::vector<float> later = rows_;
  int commits = 0;
  // Ids and rows are two passes over the table, and neither may see what is committed between.
  const ExportOptions how{.directory = directory(), .out = root_ / "two.safetensors", .step = 2};
  const auto exported = export_store(governor_, how, [&](std::int64_t, std::int64_t) {
    for (int more = 0; more < 3; ++more, ++commits) {
      later[static_cast<std::size_t>(commits)] += 1.0F;
      store.update(ids_, later).or_throw();
      store.commit(store.last_commit() + 1).or_throw();
    }
    return true;
  });
  ASSERT_TRUE(exported) << exported.error().to_string();
  EXPECT_EQ(*exported, 3000);
  EXPECT_GE(commits, 6);
  EXPECT_EQ(import_from({how.out}).or_throw(), 3000);
  expect_copy(ids_, rows_);
  EXPECT_EQ(gather(store, ids_), later);
  const auto gone =
      export_store(governor_, {.directory = directory(), .out = root_ / "gone.csv", .step = 2}, {});
  ASSERT_FALSE(gone);
  EXPECT_EQ(gone.error().code, ErrorCode::kNotFound);
  EXPECT_FALSE(fs::exists(root_ / "gone.csv"));
}

TEST_F(StoreFilesTest, RowsThatCameHaveChangedAndThoseThatWentDoNotGoOut) {
  const std::vector<std::int64_t> later{1, 2, 3};
  {
    auto store = open({.directory = directory(), .dim = 5, .ids = ids_, .rows_max = 4000});
    store.commit(1).or_throw();
    store.insert(later).or_throw();
    store.erase(std::span(ids_).first(100)).or_throw();
    store.update(std::span(ids_).last(1), std::vector<float>(5, 7.0F)).or_throw();
    store.commit(2).or_throw();
  }
  EXPECT_EQ(export_to(root_ / "all.npy").or_throw(), 2903);
  EXPECT_EQ(export_to(root_ / "some.csv", "", 1).or_throw(), 4);
  const std::string text = slurp(root_ / "some.csv");
  for (const std::int64_t id : {std::int64_t{1}, std::int64_t{2}, std::int64_t{3}, ids_.back()}) {
    EXPECT_NE(text.find('\n' + std::to_string(id) + ','), std::string::npos) << id;
  }
}

TEST_F(StoreFilesTest, ShardsFollowEachOtherAndMayHaveNoIds) {
  write_npy<float>(root_ / "a.npy", "<f4", {2, 3}, {1, 2, 3, 4, 5, 6});
  write_npy<float>(root_ / "b.npy", "<f4", {1, 3}, {7, 8, 9});
  const std::vector<fs::path> files{root_ / "a.npy", root_ / "b.npy"};
  EXPECT_EQ(
      import_store(governor_, {.files = files, .out = root_ / "copy", .number_rows = true}, {})
          .or_throw(),
      3);
  expect_copy({0, 1, 2}, {1, 2, 3, 4, 5, 6, 7, 8, 9});
}

TEST_F(StoreFilesTest, R43_RowsWithoutIdsAreNumberedOnlyWhenThatIsAskedFor) {
  write_npy<float>(root_ / "a.npy", "<f4", {2, 3}, {1, 2, 3, 4, 5, 6});
  expect_refused({root_ / "a.npy"}, "a.npy: its rows have no ids: " +
                                        (root_ / "a.ids.npy").string() + " is not there");
  expect_refused({root_ / "a.npy"}, "--number-rows");
}

TEST_F(StoreFilesTest, R43_TheFilesItReadsAndThoseBesideTheTableAreThereAfterwards) {
  make_table();
  EXPECT_EQ(export_to(root_ / "copy.npy").or_throw(), 3000);  // And copy.ids.npy.
  for (const char* name : {"copy.partial.ids.npy", "copy.ids.npy.partial", "copy.csv"}) {
    spill(root_ / name, "mine");
  }
  const std::string ids = slurp(root_ / "copy.ids.npy");
  EXPECT_EQ(import_from({root_ / "copy.npy"}).or_throw(), 3000);
  expect_copy(ids_, rows_);
  EXPECT_EQ(slurp(root_ / "copy.ids.npy"), ids);
  EXPECT_EQ(slurp(root_ / "copy.partial.ids.npy"), "mine");
  EXPECT_EQ(slurp(root_ / "copy.ids.npy.partial"), "mine");
  EXPECT_FALSE(fs::exists(root_ / "copy.partial"));
}

// At each crash point in turn, sparser the further on.
TEST_F(StoreFilesTest, R65_AKilledImportLeavesNoTable) {
  make_table();
  EXPECT_EQ(export_to(root_ / "rows.csv").or_throw(), 3000);
  governor_.close();
  int killed = 0;
  for (int passage = 1;; passage += 1 + passage / 4) {
    SCOPED_TRACE(passage);
    const pid_t child = ::fork();
    if (child == 0) {
      ::setenv("PLIMSOLL_CRASH", ("*:" + std::to_string(passage)).c_str(), 1);
      reload_crash_points();
      governor_ = Governor::create({.memory_limit = "1GiB"}).or_throw();
      ::_exit(import_from({root_ / "rows.csv"}) ? 0 : 1);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    ASSERT_TRUE(WIFSIGNALED(status) || WEXITSTATUS(status) == 0);
    const bool there = fs::exists(root_ / "copy");
    EXPECT_TRUE(there || WIFSIGNALED(status));
    if (there) {  // Killed or not, behind the last step.
      governor_ = Governor::create({.memory_limit = "1GiB"}).or_throw();
      expect_copy(ids_, rows_);
      governor_.close();
      fs::remove_all(root_ / "copy");
    }
    ASSERT_FALSE(HasFailure());
    if (!WIFSIGNALED(status)) {
      break;
    }
    ++killed;
  }
  EXPECT_GT(killed, 10);
  EXPECT_FALSE(fs::exists(root_ / "copy.partial")) << "the next import clears up";
}

TEST_F(StoreFilesTest, R45_OfTwoImportsIntoOneFolderExactlyOneWins) {
  make_table();
  EXPECT_EQ(export_to(root_ / "rows.csv").or_throw(), 3000);
  governor_.close();
  for (int round = 0; round < 8; ++round) {
    SCOPED_TRACE(round);
    std::array<pid_t, 2> children{};
    for (pid_t& child : children) {
      child = ::fork();
      if (child == 0) {
        governor_ = Governor::create({.memory_limit = "1GiB"}).or_throw();
        const auto done = import_from({root_ / "rows.csv"});
        const std::string text = done ? "" : done.error().to_string();
        const bool told = text.find("another process is writing there") != std::string::npos ||
                          text.find("already there") != std::string::npos;
        ::_exit(done ? 0 : told ? 1 : 2);
      }
    }
    std::array<int, 2> results{};
    for (std::size_t i = 0; i < 2; ++i) {
      int status = 0;
      ::waitpid(children[i], &status, 0);
      ASSERT_TRUE(WIFEXITED(status));
      results[i] = WEXITSTATUS(status);
    }
    EXPECT_EQ(std::min(results[0], results[1]), 0);
    EXPECT_EQ(std::max(results[0], results[1]), 1);
    governor_ = Governor::create({.memory_limit = "1GiB"}).or_throw();
    expect_copy(ids_, rows_);
    governor_.close();
    fs::remove_all(root_ / "copy");
    EXPECT_FALSE(fs::exists(root_ / "copy.partial"));
  }
}

TEST_F(StoreFilesTest, R67_NothingIsWrittenThroughALink) {
  make_table();
  spill(root_ / "victim", "victim");
  fs::create_directories(root_ / "precious");
  for (const char* name : {"rows.npy.partial", "rows.ids.npy.partial", "copy.ids.npy.partial"}) {
    fs::create_symlink(root_ / "victim", root_ / name);
  }
  EXPECT_EQ(export_to(root_ / "rows.npy").or_throw(), 3000);
  EXPECT_EQ(import_from({root_ / "rows.npy"}).or_throw(), 3000);
  expect_copy(ids_, rows_);
  EXPECT_EQ(slurp(root_ / "victim"), "victim");
  fs::remove_all(root_ / "copy");
  fs::create_directory_symlink(root_ / "precious", root_ / "copy.partial");
  EXPECT_FALSE(import_from({root_ / "rows.npy"}));
  EXPECT_TRUE(fs::is_empty(root_ / "precious"));
}

TEST_F(StoreFilesTest, TextIsReadWithAndWithoutAHeadingAndByEitherLineEnd) {
  spill(root_ / "a.csv", "id,x,y\r\n-5,0.5,1e-3\r\n9,nan,-inf");
  EXPECT_EQ(import_from({root_ / "a.csv"}).or_throw(), 2);
  auto store = open({.directory = root_ / "copy", .init = {.kind = RowInitKind::kZeros}});
  const auto got = gather(store, std::vector<std::int64_t>{-5, 9});
  EXPECT_EQ(got[0], 0.5F);
  EXPECT_EQ(got[1], 1e-3F);
  EXPECT_TRUE(std::isnan(got[2]) && std::isinf(got[3]));
}

TEST_F(StoreFilesTest, BadFilesAreNamedAndLeaveNothing) {
  spill(root_ / "a.csv", "1,2,3\n4,5\n");
  expect_refused({root_ / "a.csv"}, "a.csv:2: 1 numbers, expected 2");
  spill(root_ / "b.csv", "1,2\n2,x\n");
  expect_refused({root_ / "b.csv"}, "b.csv:2: number 1 cannot be read");
  spill(root_ / "c.csv", "1,2\n\n1,3\n");
  expect_refused({root_ / "c.csv"}, "1");
  spill(root_ / "d.csv", "");
  expect_refused({root_ / "d.csv"}, "d.csv");
  write_npy<double>(root_ / "e.npy", "<f8", {1, 2}, {1, 2});
  write_npy<std::int64_t>(root_ / "e.ids.npy", "<i8", {1}, {4});
  expect_refused({root_ / "e.npy"}, "expected float32");
  spill(root_ / "f.csv", "1,2\n");
  spill(root_ / "g.csv", "2,2,3\n");
  expect_refused({root_ / "f.csv", root_ / "g.csv"}, "2 numbers a row");
  expect_refused({root_ / "h.csv"}, "h.csv");
  expect_refused({root_ / "i.pt"}, "i.pt: saved rows are read in Python");
}

TEST_F(StoreFilesTest, AFolderThatHoldsSomethingIsLeftAlone) {
  fs::create_directories(root_ / "copy");
  spill(root_ / "copy" / "thesis.txt", "mine");
  spill(root_ / "a.csv", "1,2\n");
  const auto refused = import_from({root_ / "a.csv"});
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().to_string().find("not an empty directory"), std::string::npos);
  EXPECT_EQ(slurp(root_ / "copy" / "thesis.txt"), "mine");
}

TEST_F(StoreFilesTest, CompactingSaysWhatItSaved) {
  ids_ = sparse_ids(12'000, 5);  // A smaller table's file is written in full when it is made.
  make_table();
  const auto done = compact_store(governor_, directory(), {}).or_throw();
  EXPECT_LT(done.bytes, done.bytes_before);
  auto store = open({.directory = directory()});
  EXPECT_EQ(store.last_commit(), 2);
  EXPECT_EQ(gather(store, ids_), rows_);
  const auto missing = compact_store(governor_, root_ / "nowhere", {});
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().code, ErrorCode::kNotFound);
}

TEST_F(StoreFilesTest, CompactingTheRowsOfARunLeavesHowItEnded) {
  const fs::path run = root_ / "run";
  {
    auto folder = RunFolder::create(run, "seed = 1\n").or_throw();
    auto store = open({.directory = run / "embeddings", .dim = 5, .ids = ids_});
    store.commit(1).or_throw();
    folder.write_status({.status = "finished", .step = 1}, /*force=*/true).or_throw();
  }
  write_ended(run, "{}").or_throw();
  const std::string before = slurp(run / "status.json");
  static_cast<void>(compact_store(governor_, run, {}).or_throw());
  EXPECT_EQ(slurp(run / "status.json"), before);
  EXPECT_EQ(RunFolder::view(run).or_throw().status.status, "finished");
  EXPECT_TRUE(fs::exists(run / EndedCommand::kFile));
}

// A crash between a table's commit and the manifest leaves the table ahead of its run.
TEST_F(StoreFilesTest, CompactingATableOfARunKeepsTheCommitThatItsManifestNames) {
  for (const char* place : {"embeddings", "embeddings/items", "embeddings-2-0/rank-1/items"}) {
    const fs::path run = root_ / "run";
    const fs::path table = run / place;
    {
      auto folder = RunFolder::create(run, "seed = 1\n").or_throw();
      auto store = open({.directory = table, .dim = 5, .ids = ids_});
      store.commit(1).or_throw();
      fs::create_directories(folder.checkpoint_path(1));
      folder.publish(1, 2).or_throw();
      store.commit(2).or_throw();
    }
    static_cast<void>(compact_store(governor_, table / "", {}).or_throw());
    EXPECT_EQ(EmbeddingStore::inspect(table).or_throw().commit_steps,
              (std::vector<std::int64_t>{1}))
        << place;
    fs::remove_all(run);
  }
}

TEST_F(StoreFilesTest, WhereTablesAreOneIsNamed) {
  const fs::path run = root_ / "run";
  static_cast<void>(RunFolder::create(run, "seed = 1\n").or_throw());
  open({.directory = run / "embeddings" / "items", .dim = 5, .ids = ids_}).commit(1).or_throw();
  for (const Error& refused :
       {compact_store(governor_, run, {}).error(), verify_store(run, {}).error(),
        export_store(governor_, {.directory = run, .out = root_ / "x.npy"}, {}).error()}) {
    EXPECT_EQ(refused.code, ErrorCode::kNotFound);
    EXPECT_NE(
        refused.to_string().find("1 table is there, as " + (run / "embeddings" / "items").string()),
        std::string::npos)
        << refused.to_string();
  }
}

}  // namespace
}  // namespace plimsoll

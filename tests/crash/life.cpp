// SPDX-License-Identifier: Apache-2.0
#include "tests/crash/life.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <set>
#include <stdexcept>

#include <unistd.h>

#include <fmt/format.h>

#include "base/check.h"
#include "data/safetensors.h"
#include "os/crash_point.h"
#include "os/file.h"
#include "plimsoll/governor.h"
#include "plimsoll/sample_order.h"
#include "run/run_folder.h"
#include "tables/store_compact.h"

namespace plimsoll::test {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kBatchMost = 48;
constexpr std::int64_t kStepsPerProcess = 24;

std::uint64_t draw(std::uint64_t seed, std::uint64_t what) {
  return mix64(seed ^ mix64(what));
}

TableSpec make_table(std::uint64_t seed, const char* name) {
  constexpr std::array<std::int64_t, 5> kDims{1, 7, 24, 96, 130};
  constexpr std::array kKinds{RowOptimizer::kAdamW, RowOptimizer::kAdamWFresh,
                              RowOptimizer::kAdagrad};
  constexpr std::array kInits{RowInitKind::kZeros, RowInitKind::kNormal, RowInitKind::kUniform};
  std::mt19937_64 random(seed);
  TableSpec table{.name = name, .dim = kDims[random() % kDims.size()]};
  table.optimizer = {.kind = kKinds[random() % kKinds.size()],
                     .learning_rate = 0.05F,
                     .weight_decay = random() % 2 == 0 ? 0.0F : 0.01F};
  table.init = {.kind = kInits[random() % kInits.size()], .seed = random()};
  table.dense = random() % 2 == 0;
  table.ids.resize(1 + random() % 220);
  for (std::size_t i = 0; i < table.ids.size(); ++i) {
    // Odd multiples of an odd number are distinct, and far apart.
    const std::uint64_t sparse = (2 * i + 1) * 0x9E3779B97F4A7C15ULL;
    table.ids[i] = static_cast<std::int64_t>(table.dense ? i : sparse);
  }
  table.layout = random() % 2 == 0 ? RowLayout::kAnyOrder : RowLayout::kSampleOrder;
  table.order_seed = random();
  if (random() % 2 == 0) {
    table.pool = table.ids;
    table.ids.resize(random() % (table.ids.size() + 1));
    // When a table is compacted, all rows that are there become those it was made with, whose
    // places are free again only at the next compaction.
    const std::size_t kept = table.layout == RowLayout::kAnyOrder ? table.pool.size() : 0;
    table.rows_max = static_cast<std::int64_t>(kept + table.pool.size());
  }
  table.dtype = random() % 4 == 0 ? RowDType::kBFloat16 : RowDType::kFloat32;
  return table;
}

std::string difference(std::int64_t id, std::int64_t step, const OracleRow& wanted,
                       std::uint32_t sequence, std::span<const float> values) {
  if (sequence != wanted.sequence) {
    return fmt::format("id {} at step {}: sequence {}, expected {}", id, step, sequence,
                       wanted.sequence);
  }
  const std::size_t dim = wanted.weights.size();
  for (std::size_t k = 0; k < values.size(); ++k) {
    const auto& part = k < dim ? wanted.weights : k < 2 * dim ? wanted.slot1 : wanted.slot2;
    if (std::bit_cast<std::uint32_t>(values[k]) != std::bit_cast<std::uint32_t>(part[k % dim])) {
      return fmt::format("id {} at step {}: float {} is {}, expected {}", id, step, k, values[k],
                         part[k % dim]);
    }
  }
  return "";
}

Governor make_governor() {
  return Governor::create({.memory_limit = "1GiB"}).or_throw();
}

std::vector<float> model_at(std::uint64_t seed, std::int64_t step) {
  std::vector<float> model(40);
  for (std::size_t i = 0; i < model.size(); ++i) {
    model[i] = uniform01(philox(seed, static_cast<std::uint64_t>(step), i)[0]);
  }
  return model;
}

}  // namespace

Life::Life(const fs::path& directory, std::uint64_t seed)
    : directory_(directory), seed_(seed), is_run_(draw(seed, 1) % 3 == 0) {
  tables_.push_back(make_table(draw(seed, 2), "users"));
  if (is_run_) {
    tables_.push_back(make_table(draw(seed, 3), "items"));
  }
  oracles_.resize(tables_.size());
}

// The step that brings an id of a table in sample order.
std::int64_t Life::comes(std::size_t table, std::size_t at) const {
  const std::uint64_t drawn = draw(seed_, 1000 * at + 8 + table);
  return at < tables_[table].ids.size() ? 0 : static_cast<std::int64_t>(1 + drawn % 90);
}

// Each id of a pool comes and goes at times of its own; those the table is made with begin there.
// In sample order none goes.
bool Life::is_there(std::size_t table, std::size_t at, std::int64_t step) const {
  if (tables_[table].layout == RowLayout::kSampleOrder) {
    return comes(table, at) <= step;
  }
  const std::uint64_t drawn = draw(seed_, 1000 * at + 8 + table);
  const auto period = static_cast<std::int64_t>(3 + drawn % 50);
  const auto stays =
      static_cast<std::int64_t>(1 + (drawn >> 16) % static_cast<std::uint64_t>(period - 1));
  const auto phase = static_cast<std::int64_t>((drawn >> 32) % 64);
  const bool made = at < tables_[table].ids.size();
  const std::int64_t began = made ? phase % stays : stays + phase % (period - stays);
  return (began + step) % period < stays;
}

std::vector<std::int64_t> Life::ids_after(std::size_t table, std::int64_t step) const {
  const TableSpec& spec = tables_[table];
  if (spec.rows_max == 0) {
    return spec.ids;
  }
  std::vector<std::size_t> there;
  for (std::size_t at = 0; at < spec.pool.size(); ++at) {
    if (is_there(table, at, step)) {
      there.push_back(at);
    }
  }
  if (spec.layout == RowLayout::kSampleOrder) {  // In the order in which they came.
    std::ranges::stable_sort(there, {}, [&](std::size_t at) { return comes(table, at); });
  }
  std::vector<std::int64_t> ids;
  ids.reserve(there.size());
  for (const std::size_t at : there) {
    ids.push_back(spec.pool[at]);
  }
  return ids;
}

// What step `step` does to a table: nothing but (seed, table, step) decides it.
Life::Batch Life::batch(std::size_t table, std::int64_t step) const {
  const TableSpec& spec = tables_[table];
  std::mt19937_64 random(draw(seed_, static_cast<std::uint64_t>(step) * 4 + table));
  Batch batch{.sets = random() % 5 == 0};
  for (std::size_t at = 0; at < spec.pool.size(); ++at) {
    const bool now = is_there(table, at, step);
    if (now != is_there(table, at, step - 1)) {
      (now ? batch.inserted : batch.erased).push_back(spec.pool[at]);
    }
  }
  const auto ids = ids_after(table, step);
  const std::size_t count = random() % 16 == 0 ? 0 : 1 + random() % kBatchMost;
  for (std::size_t i = 0; i < count && !ids.empty(); ++i) {
    batch.ids.push_back(ids[random() % ids.size()]);
  }
  if (spec.layout == RowLayout::kSampleOrder) {
    // Most steps go on in the order of their epoch; the others jump about in it.
    const auto most = static_cast<std::int64_t>(std::max(spec.ids.size(), spec.pool.size()));
    const std::int64_t a_step = 1 + most / 5;
    const std::int64_t steps = (most + a_step - 1) / a_step;
    batch.epoch = (step - 1) / steps;
    const auto in_order = ids_after(table, batch.epoch * steps);  // When it began.
    const auto rows = static_cast<std::int64_t>(in_order.size());
    if (random() % 5 != 0) {
      const SampleOrder order(rows, spec.order_seed, batch.epoch);
      const std::int64_t begin = (step - 1) % steps * a_step;
      batch.ids.clear();
      for (std::int64_t at = begin; at < std::min(begin + a_step, rows); ++at) {
        batch.ids.push_back(in_order[static_cast<std::size_t>(order.at(at))]);
      }
    }
  }
  batch.values.resize(batch.ids.size() * static_cast<std::size_t>(spec.dim));
  for (std::size_t i = 0; i < batch.values.size(); ++i) {
    batch.values[i] = uniform01(philox(seed_, static_cast<std::uint64_t>(step), i)[0]) - 0.5F;
  }
  return batch;
}

EmbeddingStoreOptions Life::options(std::size_t table, std::uint64_t seed) const {
  const TableSpec& spec = tables_[table];
  std::mt19937_64 random(draw(seed, table));
  EmbeddingStoreOptions options{.directory = directory_ / spec.name,
                                .dim = spec.dim,
                                .dtype = spec.dtype,
                                .optimizer = spec.optimizer,
                                .init = spec.init,
                                .layout = spec.layout,
                                .order_seed = spec.order_seed,
                                .rows_max = spec.rows_max,
                                .batch_rows = static_cast<std::int64_t>(kBatchMost),
                                .io_threads = static_cast<int>(random() % 3),
                                .compute_threads = 1 + static_cast<int>(random() % 2)};
  options.batch_rows += static_cast<std::int64_t>(random() % 64);
  if (spec.dense) {
    options.rows = static_cast<std::int64_t>(spec.ids.size());
  } else {
    options.ids = spec.ids;
  }
  options.store_bytes = EmbeddingStore::plan(options).or_throw().floor_bytes;
  options.store_bytes += static_cast<std::int64_t>(random() % (128 << 10));
  return options;
}

EmbeddingOracle& Life::oracle_at(std::size_t table, std::int64_t step) {
  Position& at = oracles_[table];
  if (at.oracle == nullptr || at.step > step) {
    const TableSpec& spec = tables_[table];
    at = {0, std::make_unique<EmbeddingOracle>(spec.dim, spec.optimizer, spec.init, spec.dtype)};
  }
  while (at.step < step) {
    const Batch next = batch(table, ++at.step);
    at.oracle->erase(next.erased);
    if (next.sets) {
      at.oracle->update(next.ids, next.values);
    } else {
      at.oracle->apply(next.ids, next.values);
    }
  }
  return *at.oracle;
}

// ---- Work -------------------------------------------------------------------------------------

std::vector<EmbeddingStore> Life::open_tables(Governor& governor, const Process& process,
                                              std::int64_t at_step) const {
  std::vector<EmbeddingStore> tables;
  for (std::size_t table = 0; table < tables_.size(); ++table) {
    EmbeddingStoreOptions how = options(table, process.seed);
    how.at_step = at_step;
    tables.push_back(EmbeddingStore::open(governor, how).or_throw());
  }
  return tables;
}

// Applies step `step` to store and oracle, and now and then reads rows before it.
void Life::train_step(std::vector<EmbeddingStore>& tables, std::int64_t step, std::uint64_t seed) {
  for (std::size_t table = 0; table < tables.size(); ++table) {
    EmbeddingStore& store = tables[table];
    const Batch now = batch(table, step);
    store.begin_epoch(now.epoch).or_throw();
    if (tables_[table].rows_max > 0) {
      if (!now.erased.empty()) {
        store.erase(now.erased).or_throw();
      }
      store.insert(now.inserted).or_throw();
    }
    if (draw(seed, static_cast<std::uint64_t>(step)) % 3 == 0) {
      store.prefetch(batch(table, step + 1).ids);
    }
    if (draw(seed, static_cast<std::uint64_t>(step)) % 4 == 0) {
      EmbeddingOracle& oracle = oracle_at(table, step - 1);
      std::vector<float> row(static_cast<std::size_t>(store.dim()));
      for (const std::int64_t id : now.ids) {
        store.gather({&id, 1}, row).or_throw();
        if (row != oracle.row(id).weights) {
          throw std::runtime_error(
              fmt::format("a wrong row of id {} before step {} while training", id, step));
        }
      }
    }
    (now.sets ? store.update(now.ids, now.values) : store.apply(now.ids, now.values)).or_throw();
  }
}

// ---- Company ----------------------------------------------------------------------------------

// Forks processes that do beside this one what users do: a DataLoader's worker that reads through
// its parent's handle, a second trainer or a compaction, a reader of a commit.
void Life::keep_company(std::vector<EmbeddingStore>& tables, const Process& process,
                        LastWords& words) {
  const int trainer = ::getpid();
  for (int i = 0; i < process.company; ++i) {
    if (::fork() == 0) {
      ::unsetenv("PLIMSOLL_CRASH");  // Only the trainer dies.
      reload_crash_points();
      int status = 0;
      try {
        attend(tables, draw(process.seed, 500 + static_cast<std::uint64_t>(i)), trainer, words);
      } catch (const std::exception& problem) {
        std::snprintf(words.failure, sizeof words.failure, "beside it: %s", problem.what());
        status = 4;
      }
      ::_exit(status);
    }
  }
}

// One of the company, until the trainer is gone or it has seen enough.
void Life::attend(std::vector<EmbeddingStore>& tables, std::uint64_t seed, int trainer,
                  LastWords& words) {
  std::mt19937_64 random(seed);
  oracles_.clear();
  oracles_.resize(tables_.size());
  for (int look = 0; look < 4 && ::getppid() == trainer; ++look) {
    const std::size_t table = random() % tables_.size();
    const auto kind = random() % 4;
    const std::string wrong = kind == 0   ? be_worker(tables, words)
                              : kind == 1 ? be_rival(table, random(), trainer, words)
                                          : be_reader(table, random(), words);
    if (!wrong.empty()) {
      throw std::runtime_error(wrong);
    }
    ::usleep(static_cast<useconds_t>(random() % 2000));
  }
}

std::string Life::be_worker(std::vector<EmbeddingStore>& tables, LastWords& words) const {
  for (EmbeddingStore& table : tables) {
    std::vector<float> row(static_cast<std::size_t>(table.dim()));
    const std::int64_t id = 0;
    const auto read = table.gather({&id, 1}, row);
    const auto written = table.commit(1'000'000);
    if (read || read.error().code != ErrorCode::kInvalidArgument || written ||
        written.error().code != ErrorCode::kInvalidArgument) {
      return "a forked worker used its parent's handle";
    }
    ++words.refused;
  }
  return "";
}

std::string Life::be_rival(std::size_t table, std::uint64_t seed, int trainer,
                           LastWords& words) const {
  Governor governor = make_governor();
  const EmbeddingStoreOptions how = options(table, seed);
  const bool compacts = seed % 2 == 0 && how.layout == RowLayout::kAnyOrder;
  // As `plimsoll store compact` does it: of a run's table the commit that the run goes on from. The
  // trainer may have died with one of its tables ahead, whose newest commit is not that one.
  const auto done = compacts ? compact_store(governor, how.directory, {}).map([](auto&&) {})
                             : EmbeddingStore::open(governor, how).map([](auto&&) {});
  if (!done) {
    ++words.refused;
    const std::string text = done.error().to_string();
    return done.error().code == ErrorCode::kInvalidArgument &&
                   (text.find("has this table open to change it") != std::string::npos ||
                    text.find("another process trains in this run") != std::string::npos)
               ? ""
               : "a second writer: " + text;
  }
  for (int ms = 0; ms < 2000; ++ms) {  // Its lock ended with the trainer, which is dying.
    if (::getppid() != trainer) {
      return "";
    }
    ::usleep(1000);
  }
  return fmt::format("{} had two writers at once", how.directory.string());
}

std::string Life::be_reader(std::size_t table, std::uint64_t seed, LastWords& words) {
  Governor governor = make_governor();
  EmbeddingStoreOptions how = options(table, seed);
  how.pinned = true;
  const auto fine = [&](const Error& error) {
    const bool gone = error.code == ErrorCode::kNotFound;
    const bool moving = error.code == ErrorCode::kInvalidArgument &&
                        how.layout == RowLayout::kSampleOrder &&
                        error.to_string().find("somebody trains") != std::string::npos;
    words.gone += gone ? 1 : 0;
    words.refused += moving ? 1 : 0;
    return gone || moving ? "" : "a reader: " + error.to_string();
  };
  auto store = EmbeddingStore::open(governor, how);
  if (!store) {
    return fine(store.error());
  }
  std::optional<Error> stopped;
  const std::string wrong =
      compare(table, *store, std::max<std::int64_t>(store->last_commit(), 0), &stopped);
  if (stopped) {
    return fine(*stopped);
  }
  ++words.read;
  return wrong.empty() ? "" : "a reader: " + wrong;
}

// Compacts instead of training. False: there is nothing to compact.
bool Life::compact(const Process& process, LastWords& words) const {
  const fs::path table = directory_ / tables_[0].name;
  if (!process.compacts || is_run_ || tables_[0].layout == RowLayout::kSampleOrder ||
      !fs::exists(table / "table.json")) {
    return false;
  }
  Governor governor = make_governor();
  EmbeddingStore::compact(governor, table, -1, {}).or_throw();
  ++words.compacted;
  return true;
}

void Life::work_on_table(Governor& governor, const Process& process, LastWords& words) {
  if (compact(process, words)) {
    return;
  }
  std::mt19937_64 random(process.seed);
  std::int64_t at_step = -1;
  if (random() % 8 == 0) {  // Goes on from the older commit, as a manifest may ask for.
    const auto info = EmbeddingStore::inspect(directory_ / tables_[0].name);
    if (info && info->commit_steps.size() == 2) {
      at_step = info->commit_steps[1];
      words.rolled_back = at_step;
    }
  }
  auto tables = open_tables(governor, process, at_step);
  keep_company(tables, process, words);
  std::int64_t step = std::max<std::int64_t>(tables[0].last_commit(), 0);
  for (std::int64_t done = 0; done < kStepsPerProcess; ++done) {
    train_step(tables, ++step, process.seed);
    ++words.steps;
    if (random() % 3 == 0) {
      words.attempted = step;
      tables[0].commit(step).or_throw();
      words.acknowledged = step;
      words.rolled_back = -1;
    }
  }
}

// As plimsoll.Run saves a run: the checkpoint, every table, then the manifest.
void Life::save(std::vector<EmbeddingStore>& tables, std::int64_t step) const {
  const fs::path final = directory_ / "checkpoints" / checkpoint_name(step);
  const fs::path beside = final.string() + ".new";
  fs::remove_all(beside);
  fs::create_directory(beside);
  const auto model = model_at(seed_, step);
  auto writer = SafetensorsWriter::create(
                    beside / "tensors.safetensors",
                    {{"model", DType::kFloat32, {static_cast<std::int64_t>(model.size())}}})
                    .or_throw();
  writer.write(std::as_bytes(std::span(model))).or_throw();
  writer.finish().or_throw();
  replace_file(beside / "state.json", fmt::format("{{\"step\": {}}}\n", step)).or_throw();
  rename_durable(beside, final).or_throw();
  for (EmbeddingStore& table : tables) {
    table.commit(step).or_throw();
  }
}

void Life::work_on_run(Governor& governor, const Process& process, LastWords& words) {
  std::mt19937_64 random(process.seed);
  RunFolder folder = (RunFolder::is_run(directory_) ? RunFolder::open(directory_)
                                                    : RunFolder::create(directory_, "seed = 1\n"))
                         .or_throw();
  const auto published = folder.published_step().or_throw();
  folder.discard_unpublished().or_throw();
  if (!published) {
    for (const TableSpec& table : tables_) {  // There is nothing to go on from: trained anew.
      fs::remove_all(directory_ / table.name);
    }
  }
  auto tables = open_tables(governor, process, published.value_or(-1));
  keep_company(tables, process, words);
  std::int64_t step = published.value_or(0);
  for (std::int64_t done = 0; done < kStepsPerProcess; ++done) {
    train_step(tables, ++step, process.seed);
    ++words.steps;
    if (random() % 3 == 0) {
      words.attempted = step;
      save(tables, step);
      folder.publish(step, 2).or_throw();
      words.acknowledged = step;
    }
  }
}

void Life::work(const Process& process, LastWords& words) {
  Governor governor = make_governor();
  if (is_run_) {
    work_on_run(governor, process, words);
  } else {
    work_on_table(governor, process, words);
  }
}

// ---- Judgement --------------------------------------------------------------------------------

std::string Life::compare(std::size_t table, EmbeddingStore& store, std::int64_t step,
                          std::optional<Error>* stopped) {
  EmbeddingOracle& oracle = oracle_at(table, step);
  const auto wanted = ids_after(table, step);
  std::set<std::int64_t> left(wanted.begin(), wanted.end());
  std::string wrong;
  std::size_t seen = 0;
  const std::size_t width = static_cast<std::size_t>(store.dim() + store.state_floats());
  const auto scanned =
      store.scan([&](std::span<const std::int64_t> ids, std::span<const std::uint32_t> sequences,
                     std::span<const float> values) -> Result<void> {
        for (std::size_t i = 0; i < ids.size() && wrong.empty(); ++i, ++seen) {
          const bool expected = tables_[table].rows_max > 0
                                    ? left.erase(ids[i]) == 1
                                    : seen < wanted.size() && ids[i] == wanted[seen];
          if (!expected) {
            wrong = fmt::format("row {} is of id {}", seen, ids[i]);
          } else {
            wrong = difference(ids[i], step, oracle.row(ids[i]), sequences[i],
                               values.subspan(i * width, width));
          }
        }
        return {};
      });
  if (!scanned) {
    if (stopped != nullptr) {
      *stopped = scanned.error();
    }
    return scanned.error().to_string();
  }
  if (wrong.empty() && seen != wanted.size()) {
    wrong = fmt::format("{} rows, expected {}", seen, wanted.size());
  }
  return wrong;
}

std::string Life::checkpoint_differs(std::int64_t step) const {
  const fs::path path = directory_ / "checkpoints" / checkpoint_name(step) / "tensors.safetensors";
  const auto reader = SafetensorsReader::open(path);
  if (!reader) {
    return reader.error().to_string();
  }
  const auto wanted = model_at(seed_, step);
  std::vector<float> found(wanted.size());
  const auto entry = reader->find("model");
  const auto read = entry ? reader->read(**entry, 0, std::as_writable_bytes(std::span(found)))
                          : Result<void>(tl::unexpected(entry.error()));
  if (!read) {
    return read.error().to_string();
  }
  return found == wanted ? "" : path.string() + ": not the model of that step";
}

std::string Life::judge(const LastWords& words) {
  Governor governor = make_governor();
  std::int64_t at_step = -1;
  std::int64_t found = 0;
  if (is_run_) {
    if (!RunFolder::is_run(directory_)) {
      return words.acknowledged > 0 ? "the run is gone" : "";
    }
    auto folder = RunFolder::open(directory_);
    const auto published =
        folder ? folder->published_step()
               : Result<std::optional<std::int64_t>>(tl::unexpected(folder.error()));
    if (!published) {
      return published.error().to_string();
    }
    found = published->value_or(0);
    at_step = found == 0 ? -1 : found;
  }
  std::string wrong;
  for (std::size_t table = 0; table < tables_.size() && wrong.empty(); ++table) {
    if (is_run_ && found == 0) {
      continue;  // Nothing was ever published: the tables belong to nobody.
    }
    EmbeddingStoreOptions how = options(table, draw(seed_, 77));
    how.io_threads = 0;
    how.at_step = at_step;
    if (fs::exists(how.directory / "table.json")) {
      if (const auto sound = EmbeddingStore::verify(how.directory, {}); !sound) {
        return sound.error().to_string();
      }
    }
    auto store = EmbeddingStore::open(governor, how);
    if (!store) {
      return store.error().to_string();
    }
    found = std::max<std::int64_t>(store->last_commit(), 0);
    wrong = compare(table, *store, found);
    const auto info = EmbeddingStore::inspect(how.directory);
    if (wrong.empty() && info && info->disk_bytes > store->plan().disk_cap_bytes) {
      wrong = fmt::format("{} bytes on disk, but the plan allows {}", info->disk_bytes,
                          store->plan().disk_cap_bytes);
    }
  }
  governor.close();
  if (wrong.empty() && is_run_ && found > 0) {
    wrong = checkpoint_differs(found);
  }
  const bool legal = found == words.acknowledged || found == words.attempted ||
                     (words.rolled_back >= 0 && found == words.rolled_back);
  if (wrong.empty() && !legal) {
    wrong = fmt::format("it holds step {}, but step {} was acknowledged and step {} attempted",
                        found, words.acknowledged.load(), words.attempted.load());
  }
  step_ = found;
  return wrong;
}

}  // namespace plimsoll::test

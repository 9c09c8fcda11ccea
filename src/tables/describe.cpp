// SPDX-License-Identifier: Apache-2.0
#include "tables/describe.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <string>

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <system_error>

#include <sys/resource.h>
#include <sys/statvfs.h>

#include "base/check.h"
#include "data/image_set_format.h"
#include "data/npy.h"
#include "data/safetensors.h"
#include "data/token_set_format.h"
#include "plimsoll/bytes.h"
#include "plimsoll/embedding_store.h"
#include "plimsoll/feature_store.h"
#include "run/progress.h"
#include "run/run_folder.h"
#include "store/embedding_description.h"
#include "store/feature_format.h"
#include "store/row_optimizer.h"
#include "tables/describe_graphs.h"
#include "tables/describe_tables.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;
constexpr const char* kSharedMemory = "/dev/shm";
constexpr std::size_t kTensorsListed = 40;  // Of a long file; the rest are counted.

Description finish(const char* kind, const fs::path& path, std::string text, Json details) {
  Json json{{"kind", kind}, {"path", path.string()}};
  json.update(details);
  return {kind, std::move(text), json.dump(-1, ' ', false, Json::error_handler_t::replace)};
}

std::string layout_text(const TableInfo& info) {
  if (info.layout == RowLayout::kAnyOrder) {
    return "any order";
  }
  return fmt::format("sample order of seed {}, {} rows into epoch {}", info.order_seed,
                     format_count(info.cursor), info.epoch);
}

const char* init_name(RowInitKind kind) {
  switch (kind) {
    case RowInitKind::kZeros:
      return "zeros";
    case RowInitKind::kNormal:
      return "normal";
    case RowInitKind::kUniform:
      return "uniform";
  }
  return "unknown";
}

std::string rows_text(const TableInfo& info) {
  return info.rows_max == 0
             ? format_count(info.rows)
             : fmt::format("{} (at most {})", format_count(info.rows), format_count(info.rows_max));
}

std::string column_text(const ColumnSpec& column) {
  return fmt::format(
      "{} {} {}{}", column.name, dtype_name(column.dtype), shape_text(column.shape),
      column.ragged() ? fmt::format(", 0 to {} a record", column.length_max) : std::string());
}

Result<Description> describe_embeddings(const fs::path& path) {
  PLIMSOLL_TRY(const TableInfo info, EmbeddingStore::inspect(path));
  PLIMSOLL_TRY(const SlabPlan plan, EmbeddingStore::plan({.directory = path,
                                                          .dtype = info.dtype,
                                                          .optimizer = {.kind = info.optimizer},
                                                          .init = info.init,
                                                          .layout = info.layout}));
  std::string commits;
  for (const auto step : info.commit_steps) {
    commits += fmt::format("{}{}", commits.empty() ? "" : ", ", step);
  }
  auto text = fmt::format(
      "embedding store {}\n"
      "  rows      {} of {} [{}], {} bytes each with optimizer state\n"
      "  optimizer {}\n"
      "  initial   {}, scale {}, seed {}\n"
      "  ids       {}\n"
      "  layout    {}\n"
      "  pages     {} of {} rows\n"
      "  commits   {}\n"
      "  disk      {}, at most {}\n"
      "  memory    {} unless store_bytes says otherwise, at least {}: pages of rows {}, index {}, "
      "buffers {}, look-ahead {}\n",
      path.string(), rows_text(info), row_dtype_name(info.dtype), info.dim, info.record_bytes,
      optimizer_name(info.optimizer), init_name(info.init.kind), info.init.scale, info.init.seed,
      info.dense_ids ? "0 … rows−1" : "arbitrary", layout_text(info), format_bytes(info.page_bytes),
      info.rows_per_page, commits.empty() ? "none" : "step " + commits,
      format_bytes(info.disk_bytes), format_bytes(plan.disk_cap_bytes),
      format_bytes(plan.total_bytes), format_bytes(plan.floor_bytes),
      format_bytes(plan.frame_bytes), format_bytes(plan.index_bytes),
      format_bytes(plan.buffer_bytes), format_bytes(plan.queue_bytes));
  return finish("embedding_store", path, std::move(text),
                {{"rows", info.rows},
                 {"rows_max", info.rows_max},
                 {"dim", info.dim},
                 {"dtype", row_dtype_name(info.dtype)},
                 {"optimizer", optimizer_name(info.optimizer)},
                 {"init", init_name(info.init.kind)},
                 {"init_scale", info.init.scale},
                 {"init_seed", info.init.seed},
                 {"dense_ids", info.dense_ids},
                 {"layout", layout_name(info.layout)},
                 {"order_seed", info.order_seed},
                 {"epoch", info.epoch},
                 {"cursor", info.cursor},
                 {"record_bytes", info.record_bytes},
                 {"page_bytes", info.page_bytes},
                 {"rows_per_page", info.rows_per_page},
                 {"commit_steps", info.commit_steps},
                 {"disk_bytes", info.disk_bytes},
                 {"disk_cap_bytes", plan.disk_cap_bytes},
                 {"slab_bytes", plan.total_bytes},
                 {"slab_floor_bytes", plan.floor_bytes},
                 {"frame_bytes", plan.frame_bytes},
                 {"index_bytes", plan.index_bytes},
                 {"buffer_bytes", plan.buffer_bytes},
                 {"queue_bytes", plan.queue_bytes}});
}

std::string blocks_text(const FeatureInfo& info) {
  auto text = fmt::format("{} of {}", format_count(info.blocks), format_bytes(info.block_bytes));
  if (info.compression == BlockCompression::kNone) {
    return text + ", not compressed";
  }
  const auto whole = static_cast<double>(info.blocks * info.block_bytes);
  return text +
         fmt::format(", {}: {} on disk, {:.1f} % of their size; {} did not shrink",
                     compression_name(info.compression), format_bytes(info.stored_bytes),
                     whole > 0 ? 100.0 * static_cast<double>(info.stored_bytes) / whole : 100.0,
                     format_count(info.plain_blocks));
}

// What the import said was odd: "3 empty_turns (a.jsonl:7, …)".
std::string oddities_text(const Json& about) {
  std::string text;
  const auto odd = about.find("odd");
  if (odd == about.end() || !odd->is_object()) {
    return text;
  }
  for (const auto& [key, value] : odd->items()) {
    std::string first;
    for (const Json& place : value.value("first", Json::array())) {
      first += (first.empty() ? "" : ", ") + (place.is_string() ? place.get<std::string>() : "");
    }
    const std::int64_t count = value.value("count", std::int64_t{0});
    text += fmt::format("  odd       {} {} ({}{})\n", format_count(count), key, first,
                        count > 3 ? ", …" : "");
  }
  return text;
}

// Keys of rows that an import did not use: "topic in 7 rows", each on a line of its own.
std::string keys_text(const Json& about) {
  std::string text;
  const Json keys = about.value("keys", Json());
  const Json counted = keys.is_object() ? keys.value("counted", Json()) : Json();
  for (const auto& [name, counts] : counted.items()) {
    const bool two = counts.is_array() && counts.size() == 2 && counts[0].is_number_integer();
    text += fmt::format("  not used  {} in {} rows\n", name == "empty" ? "empty keys" : name,
                        format_count(two ? counts[0].get<std::int64_t>() : 0));
  }
  return text;
}

Result<Description> describe_tokens(const fs::path& path) {
  PLIMSOLL_TRY(const TokenSetInfo info, TokenSet::inspect(path));
  const Json about = Json::parse(info.about, nullptr, false);
  const auto mean =
      static_cast<double>(info.tokens) / static_cast<double>(std::max<std::int64_t>(1, info.rows));
  auto text = fmt::format(
      "token set {}\n"
      "  rows      {}, {:.1f} tokens each, at most {}\n"
      "  tokens    {}, {} of them trained on\n"
      "  ids       below {}, {} bytes each\n"
      "  disk      {}\n",
      path.string(), format_count(info.rows), mean, format_count(info.longest_row),
      format_count(info.tokens), format_count(info.trained_tokens), format_count(info.vocabulary),
      info.id_bytes, format_bytes(info.disk_bytes));
  if (about.is_object()) {
    text += oddities_text(about) + keys_text(about);
  }
  return finish("token_set", path, std::move(text),
                {{"rows", info.rows},
                 {"tokens", info.tokens},
                 {"trained_tokens", info.trained_tokens},
                 {"longest_row", info.longest_row},
                 {"vocabulary", info.vocabulary},
                 {"id_bytes", info.id_bytes},
                 {"fingerprint", info.fingerprint},
                 {"disk_bytes", info.disk_bytes},
                 {"about", about.is_discarded() ? Json() : about}});
}

Result<Description> describe_images(const fs::path& path) {
  PLIMSOLL_TRY(const ImageSetInfo info, ImageSet::inspect(path));
  const Json about = Json::parse(info.about, nullptr, false);
  auto text = fmt::format(
      "image set {}\n"
      "  rows      {}\n"
      "  images    {}, {} encoded; decoded they would take {}\n"
      "  decoding  {} beside the pixels of one, at most\n"
      "  disk      {}\n",
      path.string(), format_count(info.rows), format_count(info.images),
      format_bytes(info.encoded_bytes), format_bytes(info.decoded_bytes),
      format_bytes(info.work_bytes_max), format_bytes(info.disk_bytes));
  if (about.is_object()) {
    text += oddities_text(about) + keys_text(about);
  }
  return finish("image_set", path, std::move(text),
                {{"rows", info.rows},
                 {"images", info.images},
                 {"encoded_bytes", info.encoded_bytes},
                 {"decoded_bytes", info.decoded_bytes},
                 {"work_bytes_max", info.work_bytes_max},
                 {"fingerprint", info.fingerprint},
                 {"disk_bytes", info.disk_bytes},
                 {"about", about.is_discarded() ? Json() : about}});
}

Result<Description> describe_run(const fs::path& path) {
  PLIMSOLL_TRY(const RunView view, RunFolder::view(path));
  auto text = fmt::format("run {}: {}", path.string(), view.to_text());
  auto details = Json::parse(view.to_json());
  if (is_embedding_store(path / "embeddings")) {
    PLIMSOLL_TRY(const Description rows, describe_embeddings(path / "embeddings"));
    text += rows.text;
    details["embeddings"] = Json::parse(rows.json);
  }
  for (const fs::path& folder : tables_folders(path)) {
    PLIMSOLL_TRY(const Description tables, describe_tables(folder));
    text += tables.text;
    details["tables"].push_back(Json::parse(tables.json));
  }
  return finish("run", path, std::move(text), std::move(details));
}

/// A commit of a run, whose parts torch alone reads.
Result<Description> describe_commit(const fs::path& path, const fs::path& parts) {
  std::error_code status;
  const auto bytes = static_cast<std::int64_t>(fs::file_size(parts, status));
  auto text = fmt::format("checkpoint {}\n  parts     {}\n", path.string(), format_bytes(bytes));
  Json details;
  details["disk_bytes"] = bytes;
  return finish("checkpoint", path, std::move(text), std::move(details));
}

Result<Description> describe_safetensors(const fs::path& path, const char* kind,
                                         const fs::path& named) {
  PLIMSOLL_TRY(const auto reader, SafetensorsReader::open(path));
  std::error_code status;
  const auto bytes = static_cast<std::int64_t>(fs::file_size(path, status));
  auto text = fmt::format("{} {}\n  tensors   {}, {}\n", kind, named.string(),
                          reader.entries().size(), format_bytes(bytes));
  Json tensors = Json::array();
  for (const SafetensorsEntry& entry : reader.entries()) {
    if (tensors.size() < kTensorsListed) {
      text += fmt::format("  {:<9} {} {}\n", entry.dtype_text, entry.name, shape_text(entry.shape));
    }
    tensors.push_back({{"name", entry.name}, {"dtype", entry.dtype_text}, {"shape", entry.shape}});
  }
  if (tensors.size() > kTensorsListed) {
    text += fmt::format("  … and {} more (--json lists all)\n", tensors.size() - kTensorsListed);
  }
  return finish(kind, named, std::move(text), {{"bytes", bytes}, {"tensors", tensors}});
}

Result<Description> describe_npy(const fs::path& path) {
  PLIMSOLL_TRY(const TensorRows rows, open_npy(path));
  std::vector<std::int64_t> shape{rows.rows()};
  shape.insert(shape.end(), rows.row_shape().begin(), rows.row_shape().end());
  const auto bytes = rows.rows() * rows.row_bytes();
  return finish("npy", path,
                fmt::format("npy {}\n  array     {} {}, {}\n", path.string(),
                            dtype_name(rows.dtype()), shape_text(shape), format_bytes(bytes)),
                {{"dtype", dtype_name(rows.dtype())}, {"shape", shape}, {"bytes", bytes}});
}

// A line of /proc/meminfo, in bytes; 0 where there is none.
std::int64_t meminfo_bytes(const std::string& name) {
  std::ifstream file("/proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(name + ":")) {
      return std::strtoll(line.c_str() + name.size() + 1, nullptr, 10) << 10;
    }
  }
  return 0;
}

}  // namespace

Description describe_features(const fs::path& path, const FeatureInfo& info) {
  auto text = fmt::format("feature store {}\n  records   {} of {}\n", path.string(),
                          format_count(info.rows), format_bytes(info.record_bytes));
  Json columns = Json::array();
  for (const ColumnSpec& column : info.columns) {
    text += fmt::format("  column    {}\n", column_text(column));
    columns.push_back(
        {{"name", column.name}, {"dtype", dtype_name(column.dtype)}, {"shape", column.shape}});
    if (column.ragged()) {
      columns.back()["length_max"] = column.length_max;
    }
  }
  text += fmt::format("  ids       {}\n", info.dense_ids ? "0 … rows−1" : "arbitrary");
  if (info.parts > 1) {
    text += fmt::format("  parts     {}\n", info.parts);
  }
  if (info.groups > 0) {
    text += fmt::format(
        "  groups    {}{}\n", format_count(info.groups),
        info.uniform_group > 0 ? fmt::format(" of {} each", info.uniform_group) : std::string());
  }
  text +=
      fmt::format("  blocks    {}\n  memory    a slab of at least {}\n  disk      {}\n",
                  blocks_text(info), format_bytes(info.floor_bytes), format_bytes(info.disk_bytes));
  return finish("feature_store", path, std::move(text),
                {{"rows", info.rows},
                 {"columns", columns},
                 {"record_bytes", info.record_bytes},
                 {"dense_ids", info.dense_ids},
                 {"groups", info.groups},
                 {"uniform_group", info.uniform_group},
                 {"parts", info.parts},
                 {"compression", compression_name(info.compression)},
                 {"block_bytes", info.block_bytes},
                 {"blocks", info.blocks},
                 {"plain_blocks", info.plain_blocks},
                 {"stored_bytes", info.stored_bytes},
                 {"floor_bytes", info.floor_bytes},
                 {"disk_bytes", info.disk_bytes},
                 {"fingerprint", info.fingerprint}});
}

Description describe_limits(const LimitReport& report) {
  std::string text;
  Json candidates = Json::array();
  for (std::size_t i = 0; i < report.candidates.size(); ++i) {
    const LimitCandidate& candidate = report.candidates[i];
    text += fmt::format("{} {:>12}  {:<24} {}\n", i == report.winner ? "*" : " ",
                        format_bytes(candidate.bytes), candidate.source, candidate.where);
    candidates.push_back(
        {{"source", candidate.source}, {"where", candidate.where}, {"bytes", candidate.bytes}});
  }
  text += fmt::format("limit: {}\n", report.explain());
  // Beside memory, what runs out in loops with workers.
  Json shared = nullptr;
  struct ::statvfs space {};
  if (::statvfs(kSharedMemory, &space) == 0) {
    const auto unit = static_cast<std::int64_t>(space.f_frsize);
    const std::int64_t bytes = unit * static_cast<std::int64_t>(space.f_blocks);
    const std::int64_t free_bytes = unit * static_cast<std::int64_t>(space.f_bavail);
    text += fmt::format("shared memory: {} of {} free in {}, in which workers pass batches\n",
                        format_bytes(free_bytes), format_bytes(bytes), kSharedMemory);
    shared = {{"where", kSharedMemory}, {"bytes", bytes}, {"free_bytes", free_bytes}};
  }
  struct ::rlimit files {};
  ::getrlimit(RLIMIT_NOFILE, &files);
  const auto most = [](::rlim_t count) {
    return count == RLIM_INFINITY ? std::int64_t{-1} : static_cast<std::int64_t>(count);
  };
  const auto in_words = [&](::rlim_t count) {
    return count == RLIM_INFINITY ? std::string("any number") : std::to_string(count);
  };
  text += fmt::format("open files: {} for each process, {} after `ulimit -n {}`\n",
                      in_words(files.rlim_cur), in_words(files.rlim_max), most(files.rlim_max));
  const std::int64_t swap = meminfo_bytes("SwapTotal");
  const std::int64_t used = swap - meminfo_bytes("SwapFree");
  text += swap == 0 ? std::string("swap: none\n")
                    : fmt::format(
                          "swap: {}, {} of it used; no bound counts it, and what is swapped "
                          "waits for the disk\n",
                          format_bytes(swap), format_bytes(used));
  const Json json{
      {"limit_bytes", report.limit_bytes},
      {"winner", report.winner},
      {"defaulted", report.defaulted},
      {"explain", report.explain()},
      {"candidates", candidates},
      {"swap_bytes", swap},
      {"swap_used_bytes", used},
      {"shared_memory", shared},
      {"open_files", {{"limit", most(files.rlim_cur)}, {"most", most(files.rlim_max)}}}};
  return {"limits", std::move(text), json.dump()};
}

bool is_embedding_store(const fs::path& directory) {
  std::error_code status;
  return fs::is_regular_file(directory / table_files::kDescription, status);
}

bool is_feature_store(const fs::path& directory) {
  std::error_code status;
  return fs::is_regular_file(directory / kFeatureHeaderFile, status);
}

fs::path store_directory(const fs::path& path) {
  return RunFolder::is_run(path) ? path / "embeddings" : path;
}

Result<Description> describe(const fs::path& path) {
  std::error_code status;
  if (!fs::exists(path, status)) {
    return fail(ErrorCode::kNotFound, fmt::format("{}: no such file or directory", path.string()));
  }
  if (RunFolder::is_run(path)) {
    return describe_run(path);
  }
  if (is_embedding_store(path)) {
    return describe_embeddings(path);
  }
  if (is_tables_folder(path)) {
    return describe_tables(path);
  }
  if (is_feature_store(path)) {
    PLIMSOLL_TRY(const FeatureInfo info, FeatureStore::inspect(path));
    return describe_features(path, info);
  }
  if (is_graph_set(path)) {
    return describe_graphs(path);
  }
  if (is_token_set(path)) {
    return describe_tokens(path);
  }
  if (is_image_set(path)) {
    return describe_images(path);
  }
  if (const auto parts = path / "parts.pt"; fs::is_regular_file(parts, status)) {
    return describe_commit(path, parts);
  }
  if (const auto tensors = path / "tensors.safetensors"; fs::is_regular_file(tensors, status)) {
    return describe_safetensors(tensors, "checkpoint", path);
  }
  if (path.extension() == ".safetensors") {
    return describe_safetensors(path, "safetensors", path);
  }
  if (path.extension() == ".npy") {
    return describe_npy(path);
  }
  if (path.extension() == ".pt" || path.extension() == ".pth") {
    return fail(ErrorCode::kNotFound, fmt::format("{}: a file of torch.save()", path.string()),
                "`info` opens no pickled file; `plimsoll store import` reads saved rows "
                "(embeddings_chunk_*.pt), `plimsoll import can` saved graphs");
  }
  return fail(ErrorCode::kNotFound, fmt::format("{}: nothing that Plimsoll knows", path.string()),
              "`info` describes folders of runs, stores, graph sets and a run's checkpoints "
              "(RUN/checkpoints/step-…), token sets, image sets, and .safetensors and .npy files");
}

}  // namespace plimsoll

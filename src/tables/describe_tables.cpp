// SPDX-License-Identifier: Apache-2.0
#include "tables/describe_tables.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <string>
#include <system_error>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/check.h"
#include "os/directories.h"
#include "plimsoll/bytes.h"
#include "plimsoll/embedding_store.h"
#include "run/progress.h"
#include "store/embedding_description.h"
#include "store/row_optimizer.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;
constexpr const char* kRankPrefix = "rank-";
constexpr const char* kTablesPrefix = "embeddings";
constexpr const char* kPartialSuffix = ".partial";  // Of a table that is being made.

std::vector<fs::path> folders_in(const fs::path& directory) {
  std::vector<fs::path> found;
  for (const std::string& name : names_in(directory).value_or(std::vector<std::string>{})) {
    std::error_code status;
    if (fs::is_directory(directory / name, status)) {
      found.push_back(directory / name);
    }
  }
  return found;
}

std::vector<fs::path> tables_in(const fs::path& directory) {
  std::vector<fs::path> found = folders_in(directory);
  std::erase_if(found, [](const fs::path& one) {
    return one.extension() == kPartialSuffix || !is_embedding_store(one);
  });
  return found;
}

std::vector<fs::path> ranks_in(const fs::path& directory) {
  std::vector<fs::path> found = folders_in(directory);
  std::erase_if(found, [](const fs::path& one) {
    return !one.filename().string().starts_with(kRankPrefix) || tables_in(one).empty();
  });
  return found;
}

/// One table, of as many parts as ranks have of it.
struct Dealt {
  std::int64_t parts{0};
  std::int64_t rows{0};
  std::int64_t disk_bytes{0};
  TableInfo first{};
  std::vector<std::int64_t> commit_steps{};  ///< That all parts can be read as of.
};

}  // namespace

bool is_tables_folder(const fs::path& directory) {
  return !tables_in(directory).empty() || !ranks_in(directory).empty();
}

std::vector<fs::path> tables_folders(const fs::path& run) {
  std::vector<fs::path> found = folders_in(run);
  std::erase_if(found, [](const fs::path& one) {
    return !one.filename().string().starts_with(kTablesPrefix) || !is_tables_folder(one);
  });
  return found;
}

Error no_store_at(const fs::path& path) {
  std::vector<fs::path> tables = tables_in(path);
  for (const fs::path& rank : ranks_in(path)) {
    std::ranges::copy(tables_in(rank), std::back_inserter(tables));
  }
  if (tables.empty()) {
    return make_error(ErrorCode::kNotFound, fmt::format("{}: no store there", path.string()));
  }
  return make_error(
      ErrorCode::kNotFound,
      fmt::format("{}: {} {} there, as {}", path.string(), tables.size(),
                  tables.size() == 1 ? "table is" : "tables are", tables.front().string()),
      "name the folder of one table; `plimsoll store info` lists them");
}

Result<Description> describe_tables(const fs::path& directory) {
  const std::vector<fs::path> ranks = ranks_in(directory);
  std::map<std::string, Dealt> tables;
  for (const fs::path& part : ranks.empty() ? std::vector{directory} : ranks) {
    for (const fs::path& path : tables_in(part)) {
      PLIMSOLL_TRY(const TableInfo info, EmbeddingStore::inspect(path));
      Dealt& dealt = tables[path.filename().string()];
      if (dealt.parts == 0) {
        dealt.first = info;
        dealt.commit_steps = info.commit_steps;
      }
      ++dealt.parts;
      dealt.rows += info.rows;
      dealt.disk_bytes += info.disk_bytes;
      std::erase_if(dealt.commit_steps, [&info](std::int64_t step) {
        return std::ranges::find(info.commit_steps, step) == info.commit_steps.end();
      });
    }
  }
  auto text = fmt::format("tables {}{}\n", directory.string(),
                          ranks.empty() ? "" : fmt::format(", dealt to {} ranks", ranks.size()));
  Json listed = Json::array();
  for (const auto& [name, dealt] : tables) {
    const TableInfo& info = dealt.first;
    text += fmt::format("  {:<9} {} rows of {} [{}], {}, {}, {}\n", name, format_count(dealt.rows),
                        row_dtype_name(info.dtype), info.dim, optimizer_name(info.optimizer),
                        dealt.commit_steps.empty()
                            ? "no commit"
                            : fmt::format("commit of step {}", dealt.commit_steps.front()),
                        format_bytes(dealt.disk_bytes));
    listed.push_back({{"name", name},
                      {"parts", dealt.parts},
                      {"rows", dealt.rows},
                      {"dim", info.dim},
                      {"dtype", row_dtype_name(info.dtype)},
                      {"optimizer", optimizer_name(info.optimizer)},
                      {"commit_steps", dealt.commit_steps},
                      {"disk_bytes", dealt.disk_bytes}});
  }
  const Json json{{"kind", "tables"},
                  {"path", directory.string()},
                  {"ranks", std::max<std::size_t>(ranks.size(), 1)},
                  {"tables", listed}};
  return Description{"tables", std::move(text),
                     json.dump(-1, ' ', false, Json::error_handler_t::replace)};
}

}  // namespace plimsoll

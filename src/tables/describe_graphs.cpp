// SPDX-License-Identifier: Apache-2.0
#include "tables/describe_graphs.h"

#include <array>
#include <span>
#include <string>
#include <system_error>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/check.h"
#include "plimsoll/bytes.h"
#include "plimsoll/graph_set.h"
#include "run/progress.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

// What is told of a file only where there is any of it, beside what was skipped.
constexpr std::array<GraphSkipped, 7> kOddities{
    {{"left_over_frames", "in no window", &GraphFileInfo::left_over_frames},
     {"unknown_id_frames", "of unknown ids", &GraphFileInfo::unknown_id_frames},
     {"unlabelled_frames", "without a label, taken as normal", &GraphFileInfo::unlabelled_frames},
     {"empty_payloads", "with empty payloads", &GraphFileInfo::empty_payloads},
     {"back_steps", "back in time", &GraphFileInfo::back_steps},
     {"blank_lines", "blank lines", &GraphFileInfo::blank_lines},
     {"ignored_columns", "columns ignored", &GraphFileInfo::ignored_columns}}};

std::string file_text(const GraphFileInfo& file) {
  auto text = fmt::format("    {} ({}): {} graphs, {} with attacks; {} frames, {} attacks",
                          file.name, file.test ? "test" : "train", format_count(file.graphs),
                          format_count(file.attack_graphs), format_count(file.frames),
                          format_count(file.attack_frames));
  const char* before = "; ";
  for (const auto& oddities : {std::span(kOddities), std::span(kGraphSkipped)}) {
    for (const GraphSkipped& oddity : oddities) {
      if (file.*oddity.count > 0) {
        text += fmt::format("{}{} {}", before, format_count(file.*oddity.count), oddity.text);
        before = ", ";
      }
    }
  }
  return text + "\n";
}

Json file_json(const GraphFileInfo& file) {
  Json out{{"name", file.name},
           {"test", file.test},
           {"graphs", file.graphs},
           {"attack_graphs", file.attack_graphs},
           {"frames", file.frames},
           {"attack_frames", file.attack_frames},
           {"skipped_rows", file.skipped_rows()}};
  for (const auto& oddities : {std::span(kOddities), std::span(kGraphSkipped)}) {
    for (const GraphSkipped& oddity : oddities) {
      out[oddity.key] = file.*oddity.count;
    }
  }
  return out;
}

double share(std::int64_t part, std::int64_t whole) {
  return whole > 0 ? static_cast<double>(part) / static_cast<double>(whole) : 0.0;
}

}  // namespace

bool is_graph_set(const fs::path& directory) {
  std::error_code status;
  return fs::is_regular_file(directory / kGraphSetFile, status);
}

Result<Description> describe_graphs(const fs::path& directory) {
  PLIMSOLL_TRY(const GraphSetInfo info, GraphSet::inspect(directory));
  auto text = fmt::format(
      "graph set {}\n"
      "  graphs    {}: {} train, {} validation, {} test; {} with attacks\n"
      "  windows   of {} frames, one every {}\n"
      "  nodes     {}, {:.1f} a graph\n"
      "  edges     {}, {:.1f} a graph\n"
      "  ids       {}, and one index for all others\n"
      "  disk      {}\n",
      directory.string(), format_count(info.graphs), format_count(info.split_graphs[0]),
      format_count(info.split_graphs[1]), format_count(info.split_graphs[2]),
      format_count(info.attack_graphs()), format_count(info.window), format_count(info.stride),
      format_count(info.nodes), share(info.nodes, info.graphs), format_count(info.edges),
      share(info.edges, info.graphs), format_count(info.ids), format_bytes(info.disk_bytes));
  text += fmt::format("  files     {}\n", info.files.size());
  Json files = Json::array();
  for (const GraphFileInfo& file : info.files) {
    text += file_text(file);
    files.push_back(file_json(file));
  }
  if (!info.excluded_files.empty()) {
    text += fmt::format("  left out  {}\n", fmt::join(info.excluded_files, ", "));
  }
  const Json json{{"kind", "graph_set"},
                  {"path", directory.string()},
                  {"graphs", info.graphs},
                  {"nodes", info.nodes},
                  {"edges", info.edges},
                  {"ids", info.ids},
                  {"table_rows", info.table_rows()},
                  {"window", info.window},
                  {"stride", info.stride},
                  {"seed", info.seed},
                  {"validation", info.validation},
                  {"train_graphs", info.split_graphs[0]},
                  {"validation_graphs", info.split_graphs[1]},
                  {"test_graphs", info.split_graphs[2]},
                  {"attack_graphs", info.attack_graphs()},
                  {"files", files},
                  {"excluded_files", info.excluded_files},
                  {"fingerprint", info.fingerprint},
                  {"disk_bytes", info.disk_bytes}};
  return Description{"graph_set", std::move(text),
                     json.dump(-1, ' ', false, Json::error_handler_t::replace)};
}

}  // namespace plimsoll

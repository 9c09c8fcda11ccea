// SPDX-License-Identifier: Apache-2.0
//
// Graphs that the original program saved (processed_graphs.pt beside id_mapping.pkl) become a set.
//
// Both files are read in Python (python/plimsoll/data/importers/_saved_graphs.py), whose bindings
// name the reader.
// Reading order: include/plimsoll/can_import.h, graph_parts.h, this file.
//
// Threads: single-owner.   Memory: the reader's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "data/can_files.h"
#include "data/graph_parts.h"
#include "plimsoll/can_import.h"
#include "plimsoll/governor.h"
#include "plimsoll/graph_set.h"
#include "plimsoll/result.h"

namespace plimsoll {

/// What reads one file is given.
struct SavedGraphs {
  std::filesystem::path path{};  ///< Of the .pt.
  std::int64_t window{0};
  std::int64_t ids_max{0};
  /// Takes the next graph. Requires: nodes and edges as a window has them. Errors: kIo.
  std::function<Result<void>(const GraphRows&)> take{};
  /// Reports the share that is read; false once the import is cancelled.
  std::function<bool(double)> step{};
};
/// Reads a file, and returns the ids that its mapping has.
/// Errors: kCorrupt (a class that is not known, by its name; damage), kInvalidArgument (a graph, by
///         its number; cancelled), kIo, kOverBudget.
using ReadSavedGraphs =
    std::function<Result<std::vector<std::uint32_t>>(const Governor&, const SavedGraphs&)>;
/// Requires: no import is at work.
void set_saved_graphs_reader(ReadSavedGraphs read);

/// True when the files are saved graphs (.pt) and no CSV.
[[nodiscard]] bool is_saved_graphs(const CanFiles& found);

/// What beside the files themselves decides the graphs: the contents of each id_mapping.pkl.
/// Errors: kNotFound naming a mapping that is missing; kInvalidArgument for CSV among them; kIo.
Result<std::string> saved_graphs_text(const CanFiles& found);

/// Writes the set's file through side files in `folder`. `info` has everything but files, sizes,
/// ids and fingerprint, which are filled in.
/// Errors: the reader's; kInvalidArgument where there is none; kNotFound.
Result<void> import_saved_graphs(Governor governor, const CanImportOptions& options,
                                 const CanFiles& found, const std::filesystem::path& folder,
                                 GraphSetInfo& info,
                                 std::optional<std::vector<std::uint32_t>> vocabulary,
                                 const std::function<bool(std::int64_t, std::int64_t)>& progress);

/// The last step of any import: fills in what follows of `info`, asks for room on the disk and
/// joins the side files. Errors: as join_parts(); kOverBudget for the disk.
Result<void> join_graphs(Governor governor, const CanImportOptions& options,
                         const std::filesystem::path& folder,
                         std::span<const std::uint32_t> vocabulary, std::span<std::byte> buffer,
                         GraphSetInfo& info, const std::function<bool()>& step);

}  // namespace plimsoll

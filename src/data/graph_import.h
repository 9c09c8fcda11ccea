// SPDX-License-Identifier: Apache-2.0
//
// Graphs that the original program saved (processed_graphs.pt beside id_mapping.pkl) become a set.
//
// A processed_graphs.pt is a torch.save of a list of torch_geometric Data objects; id_mapping.pkl a
// dict of arbitration ids and their indices. Both are read as plain values: torch_geometric need
// not be there, and nothing of theirs is run.
// Reading order: include/plimsoll/can_import.h, torch_archive.h, graph_parts.h, this file.
//
// Threads: single-owner.
// Memory:  leased (Tag::kOther): about 600 bytes a graph of the file being read, where its tensors
//          lie; their bytes go by one graph at a time.
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
#include "plimsoll/can_import.h"
#include "plimsoll/governor.h"
#include "plimsoll/graph_set.h"
#include "plimsoll/result.h"

namespace plimsoll {

/// True when the files are saved graphs (.pt) and no CSV.
[[nodiscard]] bool is_saved_graphs(const CanFiles& found);

/// What beside the files themselves decides the graphs: the contents of each id_mapping.pkl.
/// Errors: kNotFound naming a mapping that is missing; kInvalidArgument for CSV among them; kIo.
Result<std::string> saved_graphs_text(const CanFiles& found);

/// Writes the set's file through side files in `folder`. `info` has everything but files, sizes,
/// ids and fingerprint, which are filled in.
/// Errors: kCorrupt (a class that is not known, by its name; damage), kInvalidArgument (a graph, by
///         its number; cancelled), kNotFound, kIo, kOverBudget.
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

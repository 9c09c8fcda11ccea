// SPDX-License-Identifier: Apache-2.0
//
// import_can: frames of a CAN bus, as CSV or logs, become a GraphSet: one graph a window of frames.
//
// A frame points at the one after it. Of a window the ids are the nodes, the distinct pairs of
// consecutive ids the edges, and the label says whether any frame was an attack.
// docs/formats/graph_set.md has the features.
// Reading order: graph_set.h, this file, src/data/can_import.cpp.
//
// Threads: called by one thread; reads files in `threads` of its own.
// Memory:  a few MiB a thread, leased (Tag::kOther), however large the files are; of saved graphs
//          about 4 KiB a graph.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "plimsoll/governor.h"
#include "plimsoll/graph_set.h"
#include "plimsoll/result.h"

namespace plimsoll {

/// How the lines of a file are read. kAuto: as its first line shows.
enum class CanDialect : std::uint8_t {
  kAuto,
  kCsv,      ///< Columns with a header, or time, id, payload and label without one.
  kDecimal,  ///< The same, with ids and bytes in decimal.
  kHcrl,     ///< HCRL's rows (time, id, DLC, bytes, R or T) or texts ("Timestamp: … DLC: …").
  kCandump,  ///< Logs of can-utils: "(time) can0 123#11223344".
  kRoad,     ///< The same, with labels from the capture_metadata.json beside it.
};
inline constexpr std::array<const char*, 6> kCanDialects{"auto", "csv",     "decimal",
                                                         "hcrl", "candump", "road"};
/// Errors: kInvalidArgument, with the names there are.
Result<CanDialect> can_dialect_named(const std::string& name);

struct CanImportOptions {
  /// Files, and folders in which every .csv and .log is taken (.gz, too), and every .txt that holds
  /// frames as HCRL or candump write them. A file whose name, or the nearest
  /// folder that says so, begins with "test_" is for testing; all others are for training. Or all
  /// of them .pt: graphs the original program saved, each with its id_mapping.pkl beside it; they
  /// are read in Python (src/data/graph_import.h).
  std::vector<std::filesystem::path> inputs{};
  std::filesystem::path out{};  ///< Made, or holding an earlier import.
  std::int64_t window{100};     ///< Frames of a graph.
  std::int64_t stride{100};     ///< From the first frame of one window to that of the next.
  double validation{0.2};       ///< Share of the training graphs held out, …
  std::uint64_t seed{42};       ///< … chosen by this.
  /// Files with any of these in their name are left out.
  std::vector<std::string> exclude{"suppress", "masquerade"};
  CanDialect dialect{CanDialect::kAuto};
  /// The header's names of time, id, payload and label. Known others are understood as well, and
  /// payloads with a column for each byte. "-" for a time or a label: the files have none.
  std::vector<std::string> columns{"timestamp", "arbitration_id", "data_field", "attack"};
  /// A GraphSet whose vocabulary is taken. Empty: every id of the training files (of all files when
  /// there are none of these). Ids that are not in it share the last index.
  std::filesystem::path vocabulary{};
  /// Only ids of frames that are no attack, for which the training files are read once more: an
  /// attack with thousands of made-up ids then costs every model no row for each. Not with
  /// `vocabulary`, nor for saved graphs.
  bool normal_ids{false};
  std::int64_t ids_max{65'536};       ///< Most different ids there may be.
  bool skip_bad{false};               ///< Leave out rows that cannot be read, and count them.
  bool rebuild{false};                ///< Even when nothing has changed since `out` was made.
  int threads{1};                     ///< The result does not depend on them, …
  std::int64_t chunk_bytes{1 << 20};  ///< … nor on how much is read at a time.
};

struct CanImport {
  GraphSetInfo info{};
  bool reused{false};  ///< `out` already held exactly this.
};

/// Makes `out`/graphs.safetensors, or leaves it alone when inputs and options have not changed. The
/// old file stays until the new one is whole and on disk.
///
/// `progress(done, total)` in bytes of the inputs is called now and then; returning false cancels.
/// Errors: kNotFound (an input, or none left), kInvalidArgument (an option; a row that cannot be
///         read, as FILE:LINE, unless skip_bad), kCorrupt (a damaged gzip, likewise), kIo,
///         kOverBudget. Nothing new is left behind.
Result<CanImport> import_can(Governor governor, const CanImportOptions& options,
                             const std::function<bool(std::int64_t, std::int64_t)>& progress);

}  // namespace plimsoll

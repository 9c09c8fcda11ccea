// SPDX-License-Identifier: Apache-2.0
//
// The file of a GraphSet: names of its tensors, and what its metadata says.
//
// Reading order: docs/formats/graph_set.md, safetensors.h, this file, graph_parts.h, graph_set.cpp.
//
// Threads: pure functions.   Memory: the header's text.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "data/safetensors.h"
#include "plimsoll/graph_set.h"
#include "plimsoll/result.h"

namespace plimsoll {

namespace graph_tensors {
inline constexpr const char* kNodePtr = "node_ptr";
inline constexpr const char* kEdgePtr = "edge_ptr";
inline constexpr const char* kFilePtr = "file_ptr";
inline constexpr const char* kSplitPtr = "split_ptr";
inline constexpr const char* kSplitGraphs = "split_graphs";
inline constexpr const char* kVocabulary = "vocabulary";
inline constexpr const char* kX = "x";
inline constexpr const char* kEdgeAttr = "edge_attr";
inline constexpr const char* kChecksum = "checksum";
inline constexpr const char* kEdges = "edges";
inline constexpr const char* kLabels = "y";
}  // namespace graph_tensors

inline constexpr const char* kGraphIndexCrc = "index_crc32c";  // Key of the metadata.
/// Places of nodes are one byte in windows up to here, four above.
inline constexpr std::int64_t kNarrowWindowMost = 255;

/// Bytes of a node's place in the tensor "edges".
[[nodiscard]] inline std::int64_t place_bytes(std::int64_t window) noexcept {
  return window <= kNarrowWindowMost ? 1 : 4;
}

/// The tensors of a set in the order of the file.
[[nodiscard]] std::vector<TensorSpec> graph_tensor_specs(const GraphSetInfo& info);

/// Everything in `info` that the tensors do not say, without the checksum of the index.
[[nodiscard]] std::map<std::string, std::string> graph_metadata(const GraphSetInfo& info);

/// CRC-32C of every key and value but that of the index: the beginning of the index's checksum.
[[nodiscard]] std::uint32_t metadata_crc(const std::map<std::string, std::string>& metadata);

/// Reads the metadata and compares types and shapes of all tensors. `name`: what errors call it.
/// Errors: kCorrupt.
Result<GraphSetInfo> parse_graph_header(const SafetensorsReader& reader, const std::string& name);

/// Of options and files' contents, as 32 hexadecimal digits.
[[nodiscard]] std::string graph_fingerprint(const std::string& options,
                                            const std::vector<GraphFileInfo>& files);

}  // namespace plimsoll

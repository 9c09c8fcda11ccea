// SPDX-License-Identifier: Apache-2.0
//
// Two counting sorts: by target, then of the result by source.
#include "kernels/edges.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace plimsoll::kernels {

bool count_edges(const EdgePairs& given, std::int32_t* in_ptr, std::uint8_t* self_edge) {
  const std::int64_t nodes = given.nodes;
  std::fill(in_ptr, in_ptr + nodes + 1, 0);
  std::fill(self_edge, self_edge + nodes, std::uint8_t{0});
  for (std::int64_t e = 0; e < given.count; ++e) {
    const std::int64_t source = given.source[e];
    const std::int64_t target = given.target[e];
    if (source < 0 || source >= nodes || target < 0 || target >= nodes) {
      return false;
    }
    if (source == target) {
      self_edge[source] = 1;
    } else {
      ++in_ptr[target + 1];
    }
  }
  for (std::int64_t v = 0; v < nodes; ++v) {
    in_ptr[v + 1] += in_ptr[v] + 1;
  }
  return true;
}

void place_edges(const EdgePairs& given, const std::int32_t* in_ptr, std::int32_t* in_source,
                 std::int32_t* out_ptr, std::int32_t* out_target, std::int32_t* out_edge) {
  const std::int64_t nodes = given.nodes;
  std::vector<std::int32_t> next(in_ptr, in_ptr + nodes);
  for (std::int64_t e = 0; e < given.count; ++e) {
    if (given.source[e] != given.target[e]) {
      auto& place = next[static_cast<std::size_t>(given.target[e])];
      in_source[place++] = static_cast<std::int32_t>(given.source[e]);
    }
  }
  for (std::size_t v = 0; v < next.size(); ++v) {
    in_source[next[v]] = static_cast<std::int32_t>(v);
  }
  std::fill(out_ptr, out_ptr + nodes + 1, 0);
  for (std::int32_t e = 0; e < in_ptr[nodes]; ++e) {
    ++out_ptr[in_source[e] + 1];
  }
  std::partial_sum(out_ptr, out_ptr + nodes + 1, out_ptr);
  next.assign(out_ptr, out_ptr + nodes);
  for (std::int64_t v = 0; v < nodes; ++v) {
    for (std::int32_t e = in_ptr[v]; e < in_ptr[v + 1]; ++e) {
      auto& place = next[static_cast<std::size_t>(in_source[e])];
      out_target[place] = static_cast<std::int32_t>(v);
      out_edge[place++] = e;
    }
  }
}

}  // namespace plimsoll::kernels

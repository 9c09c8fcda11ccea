// SPDX-License-Identifier: Apache-2.0
#include "kernels/edge_tensors.h"

#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <tuple>

#include "kernels/operators.h"

namespace plimsoll::kernels {
namespace {

void check_edge_index(const at::Tensor& edge_index) {
  TORCH_CHECK_TYPE(edge_index.scalar_type() == at::kLong,
                   "sort_edges: edge_index: ", edge_index.scalar_type(), " is not int64");
  TORCH_CHECK_VALUE(edge_index.dim() == 2 && edge_index.sym_size(0) == 2,
                    "sort_edges: edge_index: ", edge_index.sym_sizes(), " is not [2, edges]");
}

using Sorted = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

Sorted sort_composed(const at::Tensor& edge_index, c10::SymInt nodes) {
  check_edge_index(edge_index);
  const auto whole = edge_index.options();
  const auto own = at::ones_symint({nodes}, whole).cumsum(0) - 1;
  const auto from = edge_index.select(0, 0);
  const auto to = edge_index.select(0, 1);
  const auto self = from == to;
  const auto self_edge = at::zeros_symint({nodes + 1}, whole)
                             .index_fill(0, at::where(self, from, at::zeros_like(from) + nodes), 1);
  // Edges from a node to itself go behind the last node, and each node's own behind its others.
  const auto target = at::cat({at::where(self, at::zeros_like(from) + nodes, to), own});
  const auto source = at::cat({at::where(self, at::zeros_like(from), from), own});
  const auto ends = [&](const at::Tensor& of) {
    const auto count = at::zeros_symint({nodes + 1}, whole).index_add(0, of, at::ones_like(of));
    return (count.cumsum(0) - count).to(at::kInt);
  };
  const auto [by_target, in] = target.sort(/*stable=*/true, 0, /*descending=*/false);
  const auto in_source = source.index_select(0, in);
  const auto last = by_target == nodes;
  const auto by_source_key = at::where(last, at::zeros_like(in_source) + nodes, in_source);
  const auto [by_source, out] = by_source_key.sort(/*stable=*/true, 0, /*descending=*/false);
  const auto used = by_source != nodes;
  const auto zero = at::zeros_like(out);
  return {ends(target),
          in_source.to(at::kInt),
          ends(by_source_key),
          at::where(used, by_target.index_select(0, out), zero).to(at::kInt),
          at::where(used, out, zero).to(at::kInt),
          self_edge.slice_symint(0, 0, nodes).to(at::kByte)};
}

Sorted sort_cpu(const at::Tensor& given, std::int64_t nodes) {
  check_edge_index(given);
  TORCH_CHECK_VALUE(nodes >= 0 && nodes + given.size(1) < std::numeric_limits<std::int32_t>::max(),
                    "sort_edges: ", nodes, " nodes and ", given.size(1),
                    " edges are not below 2^31");
  const auto edge_index = given.contiguous();
  const std::int64_t count = edge_index.size(1);
  const auto* source = edge_index.const_data_ptr<std::int64_t>();
  const EdgePairs pairs{nodes, count, source, source + count};
  const auto whole = edge_index.options().dtype(at::kInt);
  auto in_ptr = at::empty({nodes + 1}, whole);
  auto self_edge = at::empty({nodes}, whole.dtype(at::kByte));
  TORCH_CHECK_INDEX(
      count_edges(pairs, in_ptr.data_ptr<std::int32_t>(), self_edge.data_ptr<std::uint8_t>()),
      "sort_edges: an edge names a node that is not from 0 to ", nodes - 1);
  // Behind the last edge there are zeros, as many as edges from a node to itself were left out.
  auto in_source = at::zeros({count + nodes}, whole);
  auto out_ptr = at::empty({nodes + 1}, whole);
  auto out_target = at::zeros({count + nodes}, whole);
  auto out_edge = at::zeros({count + nodes}, whole);
  place_edges(pairs, in_ptr.const_data_ptr<std::int32_t>(), in_source.data_ptr<std::int32_t>(),
              out_ptr.data_ptr<std::int32_t>(), out_target.data_ptr<std::int32_t>(),
              out_edge.data_ptr<std::int32_t>());
  return {in_ptr, in_source, out_ptr, out_target, out_edge, self_edge};
}

Sorted sort_meta(const at::Tensor& edge_index, c10::SymInt nodes) {
  check_edge_index(edge_index);
  const auto whole = edge_index.options().dtype(at::kInt);
  const auto all = edge_index.sym_size(1) + nodes;
  return {at::empty_symint({nodes + 1}, whole), at::empty_symint({all}, whole),
          at::empty_symint({nodes + 1}, whole), at::empty_symint({all}, whole),
          at::empty_symint({all}, whole),       at::empty_symint({nodes}, whole.dtype(at::kByte))};
}

}  // namespace

void check_edge_tensors(at::TensorList e, const at::Tensor& x) {
  TORCH_CHECK_VALUE(e.size() == kEdgeParts, "edges: ", e.size(), " tensors, not the ", kEdgeParts,
                    " of sort_edges()");
  for (std::size_t part = 0; part < kEdgeParts; ++part) {
    TORCH_CHECK_TYPE(
        e[part].scalar_type() == (part == kSelfEdge ? at::kByte : at::kInt) && e[part].dim() == 1,
        "edges: tensor ", part, " is not as sort_edges() makes it");
    TORCH_CHECK_VALUE(e[part].device() == x.device(), "edges: on ", e[part].device(),
                      ", but rows are on ", x.device());
  }
  for (const EdgePart part : {kInPtr, kOutPtr}) {
    TORCH_CHECK_VALUE(e[part].sym_size(0) == x.sym_size(0) + 1, "edges: of ",
                      e[part].sym_size(0) - 1, " nodes, but there are ", x.sym_size(0), " rows");
  }
  TORCH_CHECK_VALUE(e[kSelfEdge].sym_size(0) == x.sym_size(0) &&
                        e[kOutTarget].sym_size(0) == e[kInSource].sym_size(0) &&
                        e[kOutEdge].sym_size(0) == e[kInSource].sym_size(0),
                    "edges: lists of different lengths");
}

Edges checked_edges(at::TensorList given) {
  Edges e;
  e.nodes = given[kInPtr].size(0) - 1;
  e.count = given[kInSource].size(0);
  const auto list = [](const at::Tensor& x) {
    TORCH_CHECK_VALUE(x.is_contiguous(), "edges: not contiguous");
    return x.const_data_ptr<std::int32_t>();
  };
  e.in_ptr = list(given[kInPtr]);
  e.in_source = list(given[kInSource]);
  e.out_ptr = list(given[kOutPtr]);
  e.out_target = list(given[kOutTarget]);
  e.out_edge = list(given[kOutEdge]);
  bool good = true;
  for (const std::int32_t* ptr : {e.in_ptr, e.out_ptr}) {
    good = good && ptr[0] == 0 && ptr[e.nodes] <= e.count;
    for (std::int64_t v = 0; v < e.nodes; ++v) {
      good = good && ptr[v + 1] >= ptr[v];
    }
  }
  for (std::int64_t v = 0; v < e.nodes; ++v) {
    e.degree_max = std::max<std::int64_t>(e.degree_max, e.in_ptr[v + 1] - e.in_ptr[v]);
  }
  for (std::int64_t k = 0; k < e.count; ++k) {
    good = good && e.in_source[k] >= 0 && e.in_source[k] < e.nodes && e.out_target[k] >= 0 &&
           e.out_target[k] < e.nodes && e.out_edge[k] >= 0 && e.out_edge[k] < e.count;
  }
  TORCH_CHECK_INDEX(good, "edges name nodes or edges that are not there");
  return e;
}

at::Tensor nodes_of(const at::Tensor& ptr, const at::Tensor& like) {
  const auto place = at::ones_like(like, like.options().dtype(at::kLong)).cumsum(0) - 1;
  return at::searchsorted(ptr.to(at::kLong), place, /*out_int32=*/false, /*right=*/true) - 1;
}

}  // namespace plimsoll::kernels

TORCH_LIBRARY_FRAGMENT(plimsoll, m) {
  m.def(
      "sort_edges(Tensor edge_index, SymInt nodes) -> (Tensor in_ptr, Tensor in_source,"
      " Tensor out_ptr, Tensor out_target, Tensor out_edge, Tensor self_edge)");
}

TORCH_LIBRARY_IMPL(plimsoll, CompositeExplicitAutograd, m) {
  m.impl("sort_edges", &plimsoll::kernels::sort_composed);
}

TORCH_LIBRARY_IMPL(plimsoll, CPU, m) {
  m.impl("sort_edges", &plimsoll::kernels::sort_cpu);
}

TORCH_LIBRARY_IMPL(plimsoll, Meta, m) {
  m.impl("sort_edges", &plimsoll::kernels::sort_meta);
}

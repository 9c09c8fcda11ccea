// SPDX-License-Identifier: Apache-2.0
//
// GraphBatches: an epoch is cut, in the order of the keyed permutation, wherever a bound would be
// passed. The same cuts for any cache, thread or limit.
#include <algorithm>
#include <utility>

#include <fmt/core.h>

#include "base/check.h"
#include "plimsoll/graph_set.h"

namespace plimsoll {
namespace {

constexpr std::int64_t kNoBound = INT64_MAX;

std::int64_t bound_of(std::int64_t option) noexcept {
  return option > 0 ? option : kNoBound;
}

// What `a` and one more graph of `b` come to.
GraphCounts sum(const GraphCounts& a, const GraphCounts& b) noexcept {
  return {a.graphs + b.graphs, a.nodes + b.nodes, a.edges + b.edges};
}

tl::unexpected<Error> wrong(std::string what, const char* advice) {
  return fail(ErrorCode::kInvalidArgument, std::move(what), advice);
}

}  // namespace

GraphBatches::GraphBatches(const GraphSet* set, GraphBatchesOptions options)
    : set_(set),
      options_(std::move(options)),
      planned_(static_cast<std::size_t>(options_.batch_graphs)) {}

std::span<const std::int64_t> GraphBatches::members() const noexcept {
  return options_.graphs.empty() ? set_->split(options_.split)
                                 : std::span<const std::int64_t>(options_.graphs);
}

std::int64_t GraphBatches::graphs() const noexcept {
  return static_cast<std::int64_t>(members().size());
}

Result<GraphBatches> GraphBatches::open(const GraphSet* set, GraphBatchesOptions options) {
  const auto graphs = static_cast<std::int64_t>(
      options.graphs.empty() ? set->split(options.split).size() : options.graphs.size());
  if (graphs == 0) {
    return wrong(fmt::format("there are no {} graphs", graph_split_name(options.split)),
                 "choose another split, or import files for it (test_*.csv, --validation)");
  }
  if (options.batch_graphs < 1 || options.nodes_max < 0 || options.edges_max < 0 ||
      options.bytes_max < 0 || options.min_steps < 0) {
    return wrong("a bound of a batch is negative, or it has no graphs",
                 "batch_graphs is at least 1; the others at least 0");
  }
  for (const std::int64_t graph : options.graphs) {
    if (graph < 0 || graph >= set->graphs()) {
      return wrong(fmt::format("there is no graph {} of {}", graph, set->graphs()),
                   "graphs are numbered from 0");
    }
  }
  if (options.min_steps > graphs) {
    return wrong(fmt::format("{} steps of {} graphs", options.min_steps, graphs),
                 "lower min_steps: a batch has at least one graph");
  }
  if (options.min_steps > 0) {
    options.batch_graphs = std::min(options.batch_graphs, graphs / options.min_steps);
  }
  options.batch_graphs = std::min(options.batch_graphs, graphs);
  GraphBatches batches(set, std::move(options));
  const GraphBatchesOptions& asked = batches.options_;
  GraphCounts largest;
  for (const std::int64_t graph : batches.members()) {
    const GraphCounts size = set->counts(graph);
    if (size.nodes > bound_of(asked.nodes_max) || size.edges > bound_of(asked.edges_max) ||
        size.bytes() > bound_of(asked.bytes_max)) {
      return wrong(fmt::format("graph {} alone has {} nodes, {} edges and {} bytes", graph,
                               size.nodes, size.edges, size.bytes()),
                   "raise nodes_max, edges_max or bytes_max to hold it");
    }
    largest.nodes = std::max(largest.nodes, size.nodes);
    largest.edges = std::max(largest.edges, size.edges);
  }
  const std::int64_t bytes_most = bound_of(asked.bytes_max);
  const GraphCounts one_node{0, 1, 0};
  const GraphCounts one_edge{0, 0, 1};
  batches.most_ = {.graphs = asked.batch_graphs,
                   .nodes = std::min({asked.batch_graphs * largest.nodes, bound_of(asked.nodes_max),
                                      bytes_most / one_node.bytes()}),
                   .edges = std::min({asked.batch_graphs * largest.edges, bound_of(asked.edges_max),
                                      bytes_most / one_edge.bytes()})};
  PLIMSOLL_TRY_VOID(batches.seek(asked.epoch, asked.position));
  return batches;
}

std::int64_t GraphBatches::plan(const SampleOrder& order, std::int64_t position) {
  const auto all = members();
  GraphCounts total;
  for (std::int64_t at = position; at < order.samples() && total.graphs < options_.batch_graphs;
       ++at) {
    const std::int64_t rank = options_.shuffle ? order.at(at) : at;
    const std::int64_t graph = all[static_cast<std::size_t>(rank)];
    const GraphCounts with = sum(total, set_->counts(graph));
    if (with.nodes > bound_of(options_.nodes_max) || with.edges > bound_of(options_.edges_max) ||
        with.bytes() > bound_of(options_.bytes_max)) {
      break;
    }
    planned_[static_cast<std::size_t>(total.graphs)] = graph;
    total = with;
  }
  return total.graphs;
}

std::int64_t GraphBatches::steps(std::int64_t epoch) {
  const SampleOrder order(graphs(), options_.seed, epoch);
  std::int64_t count = 0;
  for (std::int64_t at = 0; at < graphs(); ++count) {
    at += plan(order, at);
  }
  planned_count_ = 0;
  return count;
}

Result<void> GraphBatches::seek(std::int64_t epoch, std::int64_t position) {
  if (epoch < 0 || position < 0 || position > graphs()) {
    return wrong(fmt::format("position {} of epoch {}", position, epoch),
                 "an epoch has positions from 0 to its number of graphs");
  }
  const bool over = position == graphs();
  options_.epoch = over ? epoch + 1 : epoch;
  options_.position = over ? 0 : position;
  planned_count_ = 0;
  return {};
}

std::span<const std::int64_t> GraphBatches::planned() {
  if (planned_count_ == 0) {
    planned_count_ = plan(SampleOrder(graphs(), options_.seed, options_.epoch), options_.position);
  }
  return std::span<const std::int64_t>(planned_).first(static_cast<std::size_t>(planned_count_));
}

GraphCounts GraphBatches::peek() {
  GraphCounts total;
  for (const std::int64_t graph : planned()) {
    total = sum(total, set_->counts(graph));
  }
  return total;
}

Result<GraphBatch> GraphBatches::next(const GraphBuffers& out) {
  PLIMSOLL_TRY_VOID(set_->check_process("next"));
  const auto chosen = planned();
  if (out.graphs.size() < chosen.size()) {
    return wrong(fmt::format("a batch of {} graphs needs as many elements of \"graphs\"; the "
                             "buffer has {}",
                             chosen.size(), out.graphs.size()),
                 "make the buffers as large as GraphBatches::most() says");
  }
  PLIMSOLL_TRY(const GraphCounts counts, set_->gather(chosen, out));
  std::copy(chosen.begin(), chosen.end(), out.graphs.begin());
  GraphBatch batch{.counts = counts, .epoch = options_.epoch, .position = options_.position};
  batch.ends_epoch = batch.position + counts.graphs == graphs();
  PLIMSOLL_TRY_VOID(seek(batch.epoch, batch.position + counts.graphs));
  if (!set_->cached()) {
    set_->prefetch(planned());
  }
  return batch;
}

}  // namespace plimsoll

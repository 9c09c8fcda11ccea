// SPDX-License-Identifier: Apache-2.0
//
// The graphs of a can-kd run as tensors: batches in order, and any graphs by number.
//
// Reading order: plimsoll/graph_set.h, graph_tensors.h, this file.
//
// Threads: single-owner.
// Memory:  the set's (leased); 8 bytes a training graph; each batch exactly its size, in tensors.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "plimsoll/governor.h"
#include "plimsoll/graph_set.h"
#include "plimsoll/result.h"
#include "recipes/can_kd/config.h"
#include "recipes/can_kd/graph_tensors.h"

namespace plimsoll::can_kd {

class Data {
 public:
  /// Errors: those of GraphSet::open(); kInvalidArgument for a set without training graphs.
  static Result<std::unique_ptr<Data>> open(const Governor& governor, const CanKdConfig& config);

  [[nodiscard]] const GraphSet& set() const noexcept { return set_; }
  [[nodiscard]] std::span<const std::int64_t> train() const noexcept;
  /// The validation split; the training split when there is none.
  [[nodiscard]] std::span<const std::int64_t> held_out() const noexcept;
  /// The training graphs without an attack, ascending; and those with one.
  [[nodiscard]] std::span<const std::int64_t> normals() const noexcept;
  [[nodiscard]] std::span<const std::int64_t> attacks() const noexcept;

  /// Graphs, in this order; with the features of their edges on request. Errors: kCorrupt, kIo; a
  /// refusal is thrown, as by any tensor.
  Result<GraphTensors> gather(std::span<const std::int64_t> graphs, bool edge_attr = false) const;

  /// The next batch of `batches`; `seen` says where it stands.
  Result<GraphTensors> next(GraphBatches& batches, GraphBatch& seen) const;

  /// Calls `work(first, batch)` with `graphs` in order, `chunk` at a time; `first` is the place of
  /// the batch's first graph among them. Errors: of gather() and `work`.
  Result<void> for_each(std::span<const std::int64_t> graphs, std::int64_t chunk,
                        const std::function<Result<void>(std::int64_t, const GraphTensors&)>& work,
                        bool edge_attr = false) const;

  /// The `count` largest of `graphs` (nodes and edges): the most that a batch can ask for.
  [[nodiscard]] std::vector<std::int64_t> largest(std::span<const std::int64_t> graphs,
                                                  std::int64_t count) const;

 private:
  explicit Data(GraphSet set) noexcept : set_(std::move(set)) {}

  GraphSet set_;
  at::Tensor by_label_;  // int64 [train]: normal graphs, then attacks.
  std::int64_t normals_{0};
};

}  // namespace plimsoll::can_kd

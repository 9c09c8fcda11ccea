// SPDX-License-Identifier: Apache-2.0
//
// Mode: how a model is run this time.
//
// Outside training the bits of what is said of a graph depend on no other graph of the batch, on no
// place in it and on no number of threads: every layer works row by row or graph by graph.
//
// Threads: a value.   Memory: 24 bytes.
#pragma once

#include <cstdint>

namespace plimsoll::can_kd {

struct Mode {
  bool training{false};  ///< Dropout, batch statistics and sampling; else none of them.
  /// Seed of this step's dropout and sampling. Every mask is a function of it, of the place in the
  /// model and of the element, so running a step again gives the same masks.
  std::uint64_t noise{0};
  bool checkpointing{false};  ///< Layers keep their inputs alone; the rest is computed again.
  bool bf16{false};           ///< Products of matrices take bfloat16, sum and give float32.
};

}  // namespace plimsoll::can_kd

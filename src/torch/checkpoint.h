// SPDX-License-Identifier: Apache-2.0
//
// Checkpoints: named tensors as safetensors, and the rest of a run's state as state.json.
//
//   step-NNNNNNNNN/tensors.safetensors   model and optimizer, streamed, never held twice
//   step-NNNNNNNNN/state.json            step, epoch, loader position, SHA-256 of the tensors
//
// Written under a temporary name and renamed durably: a checkpoint is whole or not there.
// Reading order: run_folder.h, this file, checkpoint.cpp.
//
// Threads: free functions.   Memory: a fixed buffer; no copy of a contiguous CPU tensor is made.
#pragma once

#include <filesystem>
#include <map>
#include <span>
#include <string>

#include <torch/types.h>

#include "plimsoll/loader.h"
#include "plimsoll/result.h"
#include "run/digest.h"

namespace plimsoll {

struct NamedTensor {
  std::string name{};   ///< "model.w1", "adamw.exp_avg.w1".
  at::Tensor tensor{};  ///< On the CPU; contiguous.
};

/// What a checkpoint knows beside its tensors.
struct CheckpointState {
  std::int64_t step{0};
  std::int64_t phase{1};  ///< 1: labels and combiner; 2: the classifier of conditions.
  LoaderState loader{};   ///< Where the next batch begins.
  std::map<std::string, double> numbers{};     ///< Sums and counts; exact across a round trip.
  std::map<std::string, std::string> texts{};  ///< Small JSON documents, such as an evaluation.
};

/// Writes the checkpoint at `directory` (whose parent exists), replacing none.
/// Requires: contiguous CPU tensors of float32, float64 or int64.   Errors: kIo.
Result<void> save_checkpoint(const std::filesystem::path& directory, const CheckpointState& state,
                             std::span<const NamedTensor> tensors);

/// Reads a checkpoint into tensors that exist already (same names, shapes and types).
/// Errors: kNotFound, kCorrupt (naming the file), kInvalidArgument (naming the tensor).
Result<CheckpointState> load_checkpoint(const std::filesystem::path& directory,
                                        std::span<const NamedTensor> tensors);

/// What a checkpoint knows beside its tensors, alone. Errors: kNotFound, kCorrupt.
Result<CheckpointState> read_checkpoint_state(const std::filesystem::path& directory);

/// Writes tensors alone, as one safetensors file, whole or not at all. Errors: kIo.
Result<void> save_tensors(const std::filesystem::path& path, std::span<const NamedTensor> tensors,
                          const std::map<std::string, std::string>& metadata = {});

/// Reads tensors by name into some that exist; the file may hold others beside them.
/// Errors: kNotFound, kCorrupt (naming the file), kInvalidArgument (naming the tensor).
Result<void> load_tensors(const std::filesystem::path& path, std::span<const NamedTensor> tensors);

/// Adds the bytes of each tensor to a digest, in the order given.
void digest_tensors(StateDigest& digest, std::span<const NamedTensor> tensors);

}  // namespace plimsoll

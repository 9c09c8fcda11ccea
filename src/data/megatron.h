// SPDX-License-Identifier: Apache-2.0
//
// Megatron's indexed datasets, PREFIX.idx and PREFIX.bin, made of a token set and made into one.
//
// The index is "MMIDIDX\0\0", u64 1, u8 the type of an id, u64 sequences S, u64 D; i32 [S] lengths,
// i64 [S] where each begins in PREFIX.bin, i64 [D] at which sequence each document begins, the last
// of them S. Little-endian. Which tokens are trained on it does not say.
// Source: NVIDIA Megatron-LM, megatron/core/datasets/indexed_dataset.py.
// Reading order: include/plimsoll/token_set.h, this file.
//
// Threads: pure functions of the files.   Memory: 256 KiB and a document, leased (Tag::kOther).
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>

#include "plimsoll/governor.h"
#include "plimsoll/result.h"

namespace plimsoll {

/// progress(done, total) in rows; returning false cancels.
using MegatronProgress = std::function<bool(std::int64_t, std::int64_t)>;

/// Writes PREFIX.bin and PREFIX.idx, each row a document of one sequence: ids of 2 bytes for a
/// vocabulary below 65,500 as Megatron chooses them, else of 4. Files that are there are replaced,
/// the index last; one of them is never half there. Returns the rows.
/// Errors: those of TokenSet, kIo, kOverBudget, kInvalidArgument when cancelled.
Result<std::int64_t> export_megatron(Governor governor, const std::filesystem::path& tokens,
                                     const std::filesystem::path& prefix,
                                     const MegatronProgress& progress);

struct MegatronImport {
  std::filesystem::path prefix{};  ///< PREFIX, or one of its two files.
  std::filesystem::path out{};     ///< Token set to make.
  std::int64_t vocabulary{0};      ///< Every id is below it; 0: one above the largest, looked for.
};

/// Makes a token set in which every token is trained on, each document a row; documents without a
/// token are left out. What was at `out` is replaced at the end. Returns the rows.
/// Errors: kNotFound; kCorrupt (no such index, a sequence that is not in PREFIX.bin);
///         kInvalidArgument (ids that are no whole numbers or below 0, above the vocabulary; a
///         document above kRowTokensMost; cancelled); those of TokenWriter.
Result<std::int64_t> import_megatron(Governor governor, const MegatronImport& options,
                                     const MegatronProgress& progress);

}  // namespace plimsoll

// SPDX-License-Identifier: Apache-2.0
//
// w2_skewed_ids --ids sparse: what finding the rows of random 64-bit ids costs beside ids 0 … N−1.
//
// Threads: single-owner.   Memory: two tables with all rows in RAM, and 16 bytes a row.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace w2 {

/// Reports the worst ratio of times, sparse to dense, of gather, apply, update, insert and erase of
/// 4,096 random rows, both tables taking turns with the same rows: warm, everything in RAM. Then
/// cold, a tenth of the rows in RAM: time for each 4 KiB read. Returns the exit status.
int run_sparse(std::int64_t rows, int rounds, bool smoke, const std::filesystem::path& directory,
               const std::string& command);

}  // namespace w2

// SPDX-License-Identifier: Apache-2.0
//
// bench_raw_disk: raw_disk.h for benchmarks in Python. Its last line is a JSON object of
// bytes_per_second, depth and by_depth.
#include <string>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "bench/raw_disk.h"
#include "bench/report.h"

namespace {

bench::RawDiskWork work_of(bench::Arguments& words) {
  bench::RawDiskWork work;
  while (words.next()) {
    if (words.is("--directory")) {
      work.directory = words.word();
    } else if (words.is("--file-bytes")) {
      work.file_bytes = words.number(4096);
    } else if (words.is("--bytes")) {
      work.bytes = words.number(4096);
    } else if (words.is("--read-bytes")) {
      work.read_bytes = words.number(1, 1 << 26);
    } else if (words.is("--read-bytes-least")) {
      work.read_bytes_least = words.number(0, 1 << 26);
    } else if (words.is("--write-bytes")) {
      work.write_bytes = words.number(1, 1 << 26);
    } else if (words.is("--read-percent")) {
      work.read_share = static_cast<double>(words.number(0, 100)) / 100;
    } else if (words.is("--random")) {
      work.random = true;
    } else {
      words.refuse();
    }
  }
  if (work.directory.empty() || work.read_bytes % 4096 != 0 || work.write_bytes % 4096 != 0) {
    throw std::invalid_argument(
        "wants --directory, and multiples of 4096 of --read-bytes and --write-bytes");
  }
  if (work.read_bytes_least > 0 && (!work.random || work.read_bytes_least % 4096 != 0 ||
                                    work.read_bytes_least > work.read_bytes)) {
    throw std::invalid_argument(
        "--read-bytes-least: a multiple of 4096, at most --read-bytes, and --random");
  }
  return work;
}

}  // namespace

int main(int argc, char** argv) {
  return bench::run_benchmark(
      argc, argv, "raw_disk",
      "--directory DIR [--file-bytes N] [--bytes N] [--read-bytes N] [--read-bytes-least N]\n  "
      "[--write-bytes N] [--read-percent N] [--random]",
      [](bench::Arguments& words) {
        const auto speed = bench::RawDisk(work_of(words)).measure();
        nlohmann::json by_depth;
        for (const auto& [depth, bytes_per_second] : speed.by_depth) {
          by_depth[std::to_string(depth)] = bytes_per_second;
        }
        fmt::print("{}\n", nlohmann::json{{"bytes_per_second", speed.bytes_per_second},
                                          {"depth", speed.depth},
                                          {"by_depth", by_depth}}
                               .dump());
        return 0;
      });
}

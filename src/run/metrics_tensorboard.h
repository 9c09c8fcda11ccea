// SPDX-License-Identifier: Apache-2.0
//
// EventFile: a TensorBoard event file, written without TensorFlow.
//
// A file is a sequence of TFRecords: length u64, masked CRC of the length u32, data, masked CRC of
// the data u32, all little-endian. The data is an Event in protobuf's wire format.
// Source: TensorFlow, core/util/event.proto and core/lib/io/record_writer.h (format only).
//
// Threads: single-owner.   Memory: a buffer of at most kBufferBytes; kKeptMost while the disk is
//                          full, what comes then is left out.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "plimsoll/result.h"

namespace plimsoll {

class EventFile {
 public:
  static constexpr std::size_t kBufferBytes = 64 << 10;
  static constexpr std::size_t kKeptMost = 1 << 20;

  /// Makes a new file in `directory`, which is made when missing. `resumed_step` >= 0 tells
  /// TensorBoard to forget what earlier files of the run say about later steps.
  /// Errors: kIo.
  static Result<EventFile> create(const std::filesystem::path& directory,
                                  std::int64_t resumed_step = -1);

  EventFile(EventFile&& other) noexcept;
  EventFile& operator=(EventFile&& other) noexcept;
  EventFile(const EventFile&) = delete;
  EventFile& operator=(const EventFile&) = delete;
  ~EventFile();  ///< Writes out what is buffered, as far as it can.

  /// Errors: kIo, when the buffer was full and could not be written.
  Result<void> scalar(std::string_view tag, double value, std::int64_t step, double wall_seconds);
  Result<void> flush();

 private:
  EventFile() = default;
  int descriptor_{-1};
  std::filesystem::path path_{};
  std::string buffer_{};
};

/// One TFRecord around `data`, appended to `out`.
void append_record(std::string& out, std::string_view data);

/// Serialised Events, for EventFile and its golden test. A restart makes TensorBoard forget what
/// earlier files say about `step` and later ones.
[[nodiscard]] std::string version_event(double wall_seconds);
[[nodiscard]] std::string scalar_event(std::string_view tag, double value, std::int64_t step,
                                       double wall_seconds);
[[nodiscard]] std::string restart_event(std::int64_t step, double wall_seconds);

}  // namespace plimsoll

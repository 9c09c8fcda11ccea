// SPDX-License-Identifier: Apache-2.0
//
// TorchArchive: a file that torch.save wrote, as a zip of one pickle and the bytes of its tensors.
//
// Members are stored as they are, each storage as NAME/data/NUMBER. Only where they lie is kept;
// their bytes go by in a window as they are asked for. The zip's own checksums are compared: of the
// pickle, and of every storage that a tensor takes whole.
// Source: PKWARE's APPNOTE.TXT, 4.3 to 4.5 (zip64 included); torch/csrc of the format: caffe2's
// serialize/inline_container.h.
// Reading order: pickle_reader.h, this file, graph_import.cpp.
//
// Threads: single-owner.
// Memory:  leased (Tag::kOther): 32 bytes a storage, and two buffers of 4 MiB.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "data/pickle_reader.h"
#include "os/file.h"
#include "plimsoll/governor.h"
#include "plimsoll/result.h"

namespace plimsoll {

class TorchArchive {
 public:
  static constexpr std::int64_t kWindowBytes = 4 << 20;

  /// Reads the directory of the zip. `advice` is that of its errors and its pickle's; a literal.
  /// Errors: kCorrupt (no such file of torch's, one of before torch 1.6, a directory that points
  ///         outside), kNotFound, kIo, kOverBudget.
  static Result<TorchArchive> open(Governor governor, const std::filesystem::path& path,
                                   const char* advice);

  /// The pickle, as Pickle::read(); `options.name` and `advice` are filled in. Errors: the same.
  Result<Pickle> pickle(Governor governor, PickleOptions options);

  /// The elements of a tensor in order, each as it lies in its storage, until the next call.
  /// Errors: kCorrupt (no such storage, outside of it, another checksum); kInvalidArgument (larger
  ///         than the window); kIo.
  Result<std::span<const std::byte>> elements(const TorchTensor& tensor);

  /// The elements of a tensor of any size into `out`. Requires: out has their bytes.
  /// Errors: those of elements(); kInvalidArgument when they are apart and larger than the window.
  Result<void> read(const TorchTensor& tensor, std::span<std::byte> out);

  [[nodiscard]] const std::string& name() const noexcept { return name_; }

 private:
  struct Member {
    std::uint64_t number{0};
    std::int64_t header{0};  ///< Where its local header is.
    std::int64_t bytes{0};
    std::uint32_t crc{0};
  };
  /// The bytes a tensor's elements lie within.
  struct Extent {
    const Member* member{nullptr};
    std::int64_t begin{0};
    std::int64_t bytes{0};
    bool contiguous{true};
    [[nodiscard]] bool whole() const noexcept { return bytes == member->bytes; }
  };
  TorchArchive() noexcept = default;

  Result<void> read_directory();
  Result<void> add_member(std::string_view name, const Member& member);
  Result<std::span<const std::byte>> view(std::int64_t offset, std::int64_t bytes);
  Result<std::int64_t> data_of(const Member& member);
  Result<const Member*> member_of(const TorchTensor& tensor) const;
  Result<Extent> extent_of(const TorchTensor& tensor);
  [[nodiscard]] tl::unexpected<Error> bad(std::string_view what) const;

  File file_;
  std::string name_;
  const char* advice_{""};
  std::int64_t file_bytes_{0};
  Lease lease_;
  Member pickle_{};               // bytes is 0 when there is none.
  std::vector<Member> storages_;  // By number.
  std::vector<std::byte> window_;
  std::int64_t window_at_{0};
  std::int64_t window_held_{0};
  std::vector<std::byte> gathered_;  // The elements of a tensor whose own are apart.
};

/// The CRC-32 of zip and gzip, continuing from `seed` (one returned earlier; 0 to begin).
[[nodiscard]] std::uint32_t zip_crc32(std::span<const std::byte> bytes,
                                      std::uint32_t seed = 0) noexcept;

}  // namespace plimsoll

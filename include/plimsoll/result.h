// SPDX-License-Identifier: Apache-2.0
//
// Result<T>: a value, or the reason there is none.
//
// Inside the library a failure that a caller can act on (a refused lease, a short read, a bad
// checksum) is returned, never thrown. Callers who prefer exceptions end the call with or_throw().
// Reading order: this file, bytes.h, lease.h, governor.h.
//
// Threads: values; no shared state.   Memory: a refused lease builds its Error without allocating.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include <tl/expected.hpp>

namespace plimsoll {

/// What kind of failure; each code maps to exactly one Python exception (docs/errors.md).
enum class ErrorCode : std::uint8_t {
  kOverBudget,       ///< The governor refused; the caller may shrink, wait or spill.
  kNotFound,         ///< No such row, shard or file.
  kCorrupt,          ///< Checksum or format mismatch; the bytes on disk are not ours.
  kIo,               ///< The operating system failed us; see os_errno.
  kInvalidArgument,  ///< The caller broke a documented precondition.
  kInternal,         ///< A bug in Plimsoll.
};

/// Whose bytes they are; the ledger adds up per tag. tag_name() gives the printed word.
enum class Tag : std::uint8_t {
  kTensor,     ///< Tensors: parameters, activations, gradients (the arena).
  kEmbedding,  ///< The slabs of embedding stores.
  kFeature,    ///< The slabs of feature stores.
  kLoader,     ///< The loader's ring of slots.
  kPinned,     ///< Page-locked buffers through which batches reach a device.
  kWeights,    ///< Slots through which the frozen weights of a model stream.
  kForeign,    ///< Declared for what we cannot see: Python, NumPy, kernels' scratch, code.
  kOther,      ///< Everything else.
};
inline constexpr int kTagCount = 8;

/// The word printed for a tag: "tensors", "rows", "features", "loader", "pinned", "weights",
/// "foreign", "other".
[[nodiscard]] const char* tag_name(Tag tag) noexcept;

/// Why an operation was refused or failed.
struct [[nodiscard]] Error {
  ErrorCode code{ErrorCode::kInternal};
  Tag tag{Tag::kOther};
  int os_errno{0};
  std::int64_t requested_bytes{0};
  std::int64_t available_bytes{0};
  std::int64_t limit_bytes{0};                       ///< 0 unless kOverBudget.
  std::int64_t baseline_bytes{0};                    ///< Resident before anything was leased.
  std::int64_t orphan_bytes{0};                      ///< Leased under governors since closed.
  std::int64_t cap_bytes{0};                         ///< Not 0: the pool's cap refused.
  std::int64_t smallest_limit_bytes{0};              ///< Not 0: the limit that would have done.
  std::array<std::int64_t, kTagCount> held_bytes{};  ///< By tag: the larger of floor and leased.
  const char* advice{""};                            ///< Static text: which option to change.
  std::shared_ptr<const std::string> detail{};       ///< Empty for a refused lease.

  /// One line: what was asked, what was free, who holds the rest, and what to change.
  [[nodiscard]] std::string to_string() const;
};

/// Builds an Error whose text is `detail` (what failed, with the file) and `advice` (static); bytes
/// of `detail` that are not UTF-8 are told by their numbers.
[[nodiscard]] Error make_error(ErrorCode code, std::string detail, const char* advice = "");

/// Builds a kIo Error from an errno: "DETAIL: No space left on device".
[[nodiscard]] Error make_io_error(int os_errno, std::string detail, const char* advice = "");

/// An Error in flight. Thrown only by or_throw() and by PLIMSOLL_CHECK.
class Exception : public std::runtime_error {
 public:
  explicit Exception(Error error)
      : std::runtime_error(error.to_string()), error_(std::move(error)) {}
  [[nodiscard]] const Error& error() const noexcept { return error_; }

 private:
  Error error_;
};

/// Holds a T or an Error. Ignoring one is a compiler warning, and warnings are errors here.
template <class T>
class [[nodiscard]] Result : public tl::expected<T, Error> {
 public:
  using tl::expected<T, Error>::expected;

  /// Returns the value. Throws Exception if there is none.
  T or_throw() && {
    if (!this->has_value()) {
      throw Exception(std::move(*this).error());
    }
    if constexpr (!std::is_void_v<T>) {
      return *std::move(*this);
    }
  }
};

/// Shorthand for `tl::unexpected`: `return fail(ErrorCode::kNotFound, "ids.npy: no such file");`
[[nodiscard]] inline tl::unexpected<Error> fail(ErrorCode code, std::string detail,
                                                const char* advice = "") {
  return tl::unexpected<Error>(make_error(code, std::move(detail), advice));
}
[[nodiscard]] inline tl::unexpected<Error> fail_io(int os_errno, std::string detail,
                                                   const char* advice = "") {
  return tl::unexpected<Error>(make_io_error(os_errno, std::move(detail), advice));
}

}  // namespace plimsoll

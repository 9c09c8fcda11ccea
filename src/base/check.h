// SPDX-License-Identifier: Apache-2.0
//
// PLIMSOLL_TRY propagates an Error; PLIMSOLL_CHECK states an invariant.
//
//   PLIMSOLL_TRY(auto file, File::open_read(path));   // binds, or returns the Error
//   PLIMSOLL_TRY_VOID(file.sync());                   // for Result<void>
//   PLIMSOLL_CHECK(slot < slots_, "slot out of range");
//
// Threads: none of its own.   Memory: nothing on success.
#pragma once

#include <utility>

#include "plimsoll/result.h"

#define PLIMSOLL_JOIN_(a, b) a##b
#define PLIMSOLL_JOIN(a, b) PLIMSOLL_JOIN_(a, b)

#define PLIMSOLL_TRY(decl, ...) \
  PLIMSOLL_TRY_AS_(PLIMSOLL_JOIN(plimsoll_result_, __LINE__), decl, __VA_ARGS__)
#define PLIMSOLL_TRY_AS_(result, decl, ...)           \
  auto result = (__VA_ARGS__);                        \
  if (!result) {                                      \
    return tl::unexpected(std::move(result).error()); \
  }                                                   \
  decl = *std::move(result)

#define PLIMSOLL_TRY_VOID(...)                                    \
  do {                                                            \
    if (auto plimsoll_status = (__VA_ARGS__); !plimsoll_status) { \
      return tl::unexpected(std::move(plimsoll_status).error());  \
    }                                                             \
  } while (false)

namespace plimsoll {
/// Throws Exception(kInternal) naming the file, the line and the broken invariant.
[[noreturn]] void check_failed(const char* file, int line, const char* condition,
                               const char* message);
}  // namespace plimsoll

// Always on. A broken invariant is our bug: it throws kInternal, never aborts.
#define PLIMSOLL_CHECK(condition, message)                               \
  do {                                                                   \
    if (!(condition)) [[unlikely]] {                                     \
      ::plimsoll::check_failed(__FILE__, __LINE__, #condition, message); \
    }                                                                    \
  } while (false)

#ifdef NDEBUG
#define PLIMSOLL_DCHECK(condition, message) static_cast<void>(0)
#else
#define PLIMSOLL_DCHECK(condition, message) PLIMSOLL_CHECK(condition, message)
#endif

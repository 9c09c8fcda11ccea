// SPDX-License-Identifier: Apache-2.0
//
// What the binding files share: array types, the guard around single-owner objects, dictionaries.
//
// Reading order: this file, core.cpp, core_memory.cpp, core_stores.cpp, core_data.cpp, torch.cpp.
// These modules are thin: they take contiguous arrays of the exact type and write into memory the
// caller brought. Defaults, sizes as text and friendly names live in python/plimsoll/*.py.
// A docstring is the last argument of its .def(), a type that of the C++ function: nanobind writes
// _core.pyi and _torch.pyi from them (decision 0077).
//
// Threads: every call that may block runs without Python's lock; Guarded queues calls from several
//          Python threads on one object.
// Memory:  none of its own.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <utility>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/unique_ptr.h>

#include "os/fork.h"
#include "plimsoll/result.h"

namespace plimsoll {
struct Inside;
}

namespace plimsoll::python {

namespace nb = nanobind;

using IdsIn = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using IdsOut = nb::ndarray<std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatsIn = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using FloatsOut = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using BytesIn = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using BytesOut = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

/// A dict of Python's, as stubs and type checkers see it.
template <class Value>
using DictOf = nb::typed<nb::dict, nb::str, Value>;

template <class Array>
auto span_of(const Array& array) {
  return std::span(array.data(), array.size());
}
inline std::span<const std::byte> bytes_of(const BytesIn& array) {
  return std::as_bytes(std::span(array.data(), array.size()));
}
inline std::span<std::byte> bytes_of(const BytesOut& array) {
  return std::as_writable_bytes(std::span(array.data(), array.size()));
}

/// A single-owner object seen by many Python threads: their calls queue up. A call from inside a
/// callback of the same object, after close(), or in a child that was forked after it was opened,
/// is an error instead of a deadlock or a crash. In such a child the object is never destroyed.
template <class T>
class Guarded {
 public:
  explicit Guarded(T value, const char* name)
      : value_(std::make_unique<T>(std::move(value))), name_(name) {}
  ~Guarded() { destroy_if_own(value_, mark_); }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  /// Runs f(value) without Python's lock. Errors: kInvalidArgument when closed or re-entered.
  template <class F>
  auto use(F&& f) {
    nb::gil_scoped_release unlocked;
    if (mark_.forked()) {  // Its mutex may be held by a thread that is not there.
      throw Exception(make_error(
          ErrorCode::kInvalidArgument,
          std::string(name_) + ": used in a process that was forked after it was opened",
          "open it in this process, in a DataLoader's worker_init_fn (a table: with pinned=True)"));
    }
    const Entry entry(*this);
    if (value_ == nullptr) {
      throw Exception(make_error(ErrorCode::kInvalidArgument,
                                 std::string(name_) + ": it was closed", "open it again"));
    }
    return f(*value_);
  }

  /// Destroys the object; a second close does nothing.
  void close() {
    nb::gil_scoped_release unlocked;
    if (mark_.forked()) {
      return;  // It is the parent's to close.
    }
    const Entry entry(*this);
    value_.reset();
  }

 private:
  struct Entry {
    explicit Entry(Guarded& guarded) : owner(guarded) {
      if (owner.user_.load() == std::this_thread::get_id()) {
        throw Exception(
            make_error(ErrorCode::kInvalidArgument,
                       std::string(owner.name_) + ": called from inside one of its own callbacks",
                       "let the callback return first"));
      }
      owner.mutex_.lock();
      owner.user_.store(std::this_thread::get_id());
    }
    ~Entry() {
      owner.user_.store(std::thread::id{});
      owner.mutex_.unlock();
    }
    Entry(const Entry&) = delete;
    Entry& operator=(const Entry&) = delete;
    Guarded& owner;
  };

  const ForkMark mark_;
  std::unique_ptr<T> value_;             // Read and written under mutex_.
  const char* name_;                     // Static.
  std::mutex mutex_;                     // Held for a whole call; nothing else is taken above it.
  std::atomic<std::thread::id> user_{};  // Who holds mutex_; written by the holder only.
};

/// What the process says of its own memory, Python's arenas among it: counted from this call on,
/// which needs Python's lock; the function does not.
std::function<Inside()> counted_inside();

void bind_errors();
void bind_memory(nb::module_& m);
void bind_stores(nb::module_& m);
void bind_data(nb::module_& m);
void bind_graphs(nb::module_& m);
void bind_tokens(nb::module_& m);
void bind_images(nb::module_& m);
void bind_runs(nb::module_& m);
void bind_ranks(nb::module_& m);
void bind_watch(nb::module_& m);
void bind_search(nb::module_& m);
void bind_recipes(nb::module_& m);

}  // namespace plimsoll::python

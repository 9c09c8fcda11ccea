// SPDX-License-Identifier: Apache-2.0
//
// Features: a FeatureStore that Python, a Split and a Loader own together.
//
// Threads: get() and close() are called with Python's lock held; the store itself is thread-safe.
// Memory:  one pointer.
#pragma once

#include <memory>
#include <utility>

#include "bindings.h"
#include "plimsoll/feature_store.h"

namespace plimsoll::python {

class Features {
 public:
  explicit Features(FeatureStore store)
      : store_(std::make_shared<FeatureStore>(std::move(store))) {}

  /// The store. Errors: kInvalidArgument after close().
  [[nodiscard]] std::shared_ptr<FeatureStore> get() const;

  /// Lets go of the store; it ends when reads under way and loaders on it have ended too.
  void close() { store_.reset(); }

 private:
  std::shared_ptr<FeatureStore> store_;  // Shared: a Loader reads from it in its own threads.
};

}  // namespace plimsoll::python

// SPDX-License-Identifier: Apache-2.0
// A store owns its slab and its files: two handles on one slab can not exist.
#include <utility>

#include "plimsoll/embedding_store.h"

plimsoll::EmbeddingStore take(plimsoll::EmbeddingStore& store) {
#ifdef PLIMSOLL_MUST_FAIL
  return store;
#else
  return std::move(store);
#endif
}

// SPDX-License-Identifier: Apache-2.0
//
// Goal: what a library allocates is seen while the hooks are there, and not afterwards.
// Method: operator new, whose malloc() is libstdc++'s call and not this program's.
#include "watch/malloc_hooks.h"

#include <cstring>
#include <memory>
#include <vector>

#include <dlfcn.h>
#include <gtest/gtest.h>

#include "watch/samples.h"

namespace plimsoll {
namespace {

constexpr std::size_t kLarge = 1 << 20;

void somewhere(Place& place) noexcept {
  std::strcpy(place.file.data(), "somewhere");
  place.line = 1;
}

std::size_t large_alive() {
  std::size_t count = 0;
  for (const auto& one : Samples::alive(0, 10)) {
    count += one.bytes == kLarge ? 1 : 0;
  }
  return count;
}

TEST(MallocHooks, ShowWhatALibraryAllocatesAndFrees) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "AddressSanitizer has malloc()'s place";
#endif
  Samples::begin(1, somewhere);
  EXPECT_GT(MallocHooks::install(MallocHooks::Of::kHeap), 0);
  EXPECT_EQ(MallocHooks::install(MallocHooks::Of::kHeap), 0);  // They are there.
  auto kept = std::make_unique<char[]>(kLarge);
  EXPECT_EQ(large_alive(), 1U);
  std::make_unique<char[]>(kLarge)[0] = 1;
  EXPECT_EQ(large_alive(), 1U);
  kept.reset();
  EXPECT_EQ(large_alive(), 0U);
  MallocHooks::remove();
  kept = std::make_unique<char[]>(kLarge);
  EXPECT_EQ(large_alive(), 0U);
  EXPECT_GT(MallocHooks::install(MallocHooks::Of::kHeap), 0);
  MallocHooks::remove();
  Samples::end();
}

TEST(MallocHooks, TakeInWhatWasLoadedSince) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "AddressSanitizer has malloc()'s place";
#endif
  EXPECT_GT(MallocHooks::install(MallocHooks::Of::kHeap), 0);
  void* const library = ::dlopen("libresolv.so.2", RTLD_NOW);
  if (library == nullptr) {
    MallocHooks::remove();
    GTEST_SKIP() << ::dlerror();
  }
  EXPECT_GT(MallocHooks::install(MallocHooks::Of::kHeap), 0);
  EXPECT_EQ(MallocHooks::install(MallocHooks::Of::kHeap), 0);
  MallocHooks::remove();
  ::dlclose(library);
}

}  // namespace
}  // namespace plimsoll

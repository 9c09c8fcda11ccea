// SPDX-License-Identifier: Apache-2.0
//
// libFuzzer's entry to one target, PLIMSOLL_FUZZ_TARGET by name.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tests/fuzz/target.h"

namespace plimsoll::fuzz {

void contradiction(const char* target, const std::string& what) {
  std::fprintf(stderr, "%s: %s\n", target, what.c_str());
  std::abort();
}

namespace {

const Target& chosen() {
  static const Target target = [] {
    for (const Target& one : all_targets()) {
      if (std::strcmp(one.name, PLIMSOLL_FUZZ_TARGET) == 0) {
        return one;
      }
    }
    contradiction(PLIMSOLL_FUZZ_TARGET, "no such target");
  }();
  return target;
}

}  // namespace
}  // namespace plimsoll::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  plimsoll::fuzz::chosen().one_input({reinterpret_cast<const std::byte*>(data), size});
  return 0;
}

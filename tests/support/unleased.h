// SPDX-License-Identifier: Apache-2.0
//
// Resident memory that no lease explains, as a NumPy array would be.
//
// Threads: single-owner.   Memory: what is asked for, until destroyed.
#pragma once

#include <cstddef>
#include <cstdint>

#include <gtest/gtest.h>
#include <sys/mman.h>

namespace plimsoll::test {

class Unleased {
 public:
  explicit Unleased(std::int64_t bytes, bool shared = false)
      : bytes_(static_cast<std::size_t>(bytes)),
        memory_(::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                       (shared ? MAP_SHARED : MAP_PRIVATE) | MAP_ANONYMOUS | MAP_POPULATE, -1, 0)) {
    EXPECT_NE(memory_, MAP_FAILED);
  }
  ~Unleased() { ::munmap(memory_, bytes_); }
  Unleased(const Unleased&) = delete;
  Unleased& operator=(const Unleased&) = delete;

 private:
  std::size_t bytes_;
  void* memory_;
};

}  // namespace plimsoll::test

// SPDX-License-Identifier: Apache-2.0
//
// Functions for each instruction set, chosen at run time, from one body.
//
// Not target_clones: the resolvers it makes run before a sanitizer is ready for them.
//
// Threads: macros.   Memory: none.
#pragma once

#if defined(__x86_64__)
#define PLIMSOLL_WIDE __attribute__((target("avx2")))
#define PLIMSOLL_HAS_WIDE __builtin_cpu_supports("avx2")
#else
#define PLIMSOLL_WIDE
#define PLIMSOLL_HAS_WIDE false
#endif
#define PLIMSOLL_BODY __attribute__((always_inline)) inline

// SPDX-License-Identifier: Apache-2.0
//
// PLIMSOLL_CLONES: one version of a function per instruction set, chosen at load time.
//
// Sanitizers intercept too early for that. Nothing is fused (-ffp-contract=off), so all versions
// give the same bits.
//
// Threads: a macro.   Memory: none.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define PLIMSOLL_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define PLIMSOLL_CLONES
#endif

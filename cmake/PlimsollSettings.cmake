# SPDX-License-Identifier: Apache-2.0
# Language, warnings, sanitizers and output folders. `plimsoll_settings` is linked privately.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib)
set(CMAKE_ARCHIVE_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib)

# A compiler that has libstdc++.a alone puts a copy of it into each of our libraries; beside torch's, whose facets are
# others, the first stream that is read crashes.
execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=libstdc++.so
  OUTPUT_VARIABLE plimsoll_libstdcxx OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
if(plimsoll_libstdcxx STREQUAL "libstdc++.so")
  message(FATAL_ERROR "${CMAKE_CXX_COMPILER} has no shared C++ library (libstdc++.so), which Plimsoll and torch must "
    "have in common: name another compiler with CXX=… (and CC=…), g++ of your distribution say")
endif()

find_program(PLIMSOLL_CCACHE ccache)
if(PLIMSOLL_CCACHE)
  # Precompiled headers need these two kinds of slack; see ccache's manual, "Precompiled headers".
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env
    CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime
    ${PLIMSOLL_CCACHE})
endif()

add_library(plimsoll_settings INTERFACE)
# -ffp-contract=off: a fused multiply-add rounds once instead of twice, so a row would depend on
# the machine's instruction set. Results must not.
target_compile_options(plimsoll_settings INTERFACE -ffp-contract=off -fno-math-errno)
if(PLIMSOLL_DEVELOPER)
  target_compile_options(plimsoll_settings INTERFACE
    -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wno-sign-conversion -Werror)
  if(CMAKE_CXX_COMPILER_ID MATCHES Clang)
    target_compile_options(plimsoll_settings INTERFACE -Wthread-safety)
  endif()
endif()
if(PLIMSOLL_SANITIZE)
  add_compile_options(-fsanitize=${PLIMSOLL_SANITIZE} -fno-omit-frame-pointer
    -fno-sanitize-recover=all)
  add_link_options(-fsanitize=${PLIMSOLL_SANITIZE})
endif()

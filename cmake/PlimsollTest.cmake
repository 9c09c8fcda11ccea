# SPDX-License-Identifier: Apache-2.0
# plimsoll_test(NAME memory.lease SOURCES lease_test.cpp [LABELS unit threads] [TORCH] [LIBS …])
#   a GoogleTest program as one ctest; the name is FOLDER.WHAT.
# plimsoll_bench(NAME w3_update SOURCES w3_update.cpp [TORCH] [LIBS …])
#   a benchmark program, run through bench/run.
if(PLIMSOLL_DEVELOPER)
  enable_testing()
  find_package(GTest REQUIRED)

  # What tests are compiled with: GoogleTest's headers once, and little optimization, for they run code
  # of the libraries. An executable's position independence is not a library's.
  add_library(plimsoll_test_headers OBJECT tests/support/headers.cpp)
  target_link_libraries(plimsoll_test_headers PRIVATE plimsoll_settings plimsoll_fmt plimsoll_json
    Threads::Threads GTest::gtest)
  set_target_properties(plimsoll_test_headers PROPERTIES POSITION_INDEPENDENT_CODE OFF)
  target_compile_options(plimsoll_test_headers PRIVATE -fPIE -O1)
  target_precompile_headers(plimsoll_test_headers PRIVATE tests/support/headers.h)
endif()

# torch's headers for programs: plimsoll_torch's own are of a library with OpenMP.
if(PLIMSOLL_DEVELOPER AND PLIMSOLL_HAVE_TORCH)
  add_library(plimsoll_torch_headers OBJECT src/torch/headers.cpp)
  target_link_libraries(plimsoll_torch_headers PRIVATE plimsoll_settings plimsoll_fmt plimsoll_json
    plimsoll_libtorch)
  target_precompile_headers(plimsoll_torch_headers PRIVATE src/torch/headers.h)
endif()

# What `make tsan` builds: tests of several threads alone.
if(PLIMSOLL_DEVELOPER)
  add_custom_target(threads_tests)
endif()

# plimsoll_program(fuzz_replay SOURCES replay.cpp [TEST] [TORCH] [LIBS …]): TEST compiles it as tests without torch are.
function(plimsoll_program target)
  cmake_parse_arguments(arg "TEST;TORCH" "" "SOURCES;LIBS" ${ARGN})
  add_executable(${target} ${arg_SOURCES})
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR})
  target_link_libraries(${target} PRIVATE plimsoll_core plimsoll_settings plimsoll_fmt
    plimsoll_json Threads::Threads ${arg_LIBS})
  if(arg_TORCH)
    target_link_libraries(${target} PRIVATE plimsoll_torch)
    # Compiled as the precompiled headers are.
    set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
    target_compile_options(${target} PRIVATE -fPIC)
    target_precompile_headers(${target} REUSE_FROM plimsoll_torch_headers)
  elseif(arg_TEST)
    target_link_libraries(${target} PRIVATE GTest::gtest)
    target_compile_options(${target} PRIVATE -O1)
    target_precompile_headers(${target} REUSE_FROM plimsoll_test_headers)
  endif()
endfunction()

function(plimsoll_test)
  cmake_parse_arguments(arg "TORCH" "NAME;TIMEOUT" "SOURCES;LABELS;LIBS" ${ARGN})
  if(NOT PLIMSOLL_DEVELOPER OR (arg_TORCH AND NOT PLIMSOLL_HAVE_TORCH))
    return()
  endif()
  string(REPLACE "." "_" target ${arg_NAME}_test)
  set(torch "")
  if(arg_TORCH)
    set(torch TORCH)
  endif()
  plimsoll_program(${target} TEST ${torch} SOURCES ${arg_SOURCES} LIBS GTest::gtest_main ${arg_LIBS})
  if(NOT arg_LABELS)
    set(arg_LABELS unit)
  endif()
  if(threads IN_LIST arg_LABELS)
    add_dependencies(threads_tests ${target})
  endif()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 300)
  endif()
  add_test(NAME ${arg_NAME} COMMAND ${target})
  set_tests_properties(${arg_NAME} PROPERTIES LABELS "${arg_LABELS}" TIMEOUT ${arg_TIMEOUT}
    ENVIRONMENT "MKL_CBWR=AVX2,STRICT;PLIMSOLL_SOURCE_DIR=${PROJECT_SOURCE_DIR}")
endfunction()

function(plimsoll_bench)
  cmake_parse_arguments(arg "TORCH" "NAME" "SOURCES;LIBS" ${ARGN})
  if(NOT PLIMSOLL_DEVELOPER OR (arg_TORCH AND NOT PLIMSOLL_HAVE_TORCH))
    return()
  endif()
  set(torch "")
  if(arg_TORCH)
    set(torch TORCH)
  endif()
  plimsoll_program(bench_${arg_NAME} ${torch} SOURCES ${arg_SOURCES} LIBS bench_report ${arg_LIBS})
endfunction()

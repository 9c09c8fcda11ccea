# SPDX-License-Identifier: Apache-2.0
# PLIMSOLL_UNITY: sources of a folder are compiled several at a time, which reads what they include
# once and halves a build from nothing. So names in their unnamed namespaces differ within a folder.
option(PLIMSOLL_UNITY "Compile several sources of a folder at a time" OFF)

# plimsoll_unity(plimsoll_core …): once the targets have all their sources.
function(plimsoll_unity)
  if(NOT PLIMSOLL_UNITY)
    return()
  endif()
  set(at_a_time 8)
  foreach(target ${ARGN})
    get_target_property(base ${target} SOURCE_DIR)
    get_target_property(sources ${target} SOURCES)
    set(folders "")
    foreach(source ${sources})
      cmake_path(ABSOLUTE_PATH source BASE_DIRECTORY ${base})
      cmake_path(GET source PARENT_PATH folder)
      string(MAKE_C_IDENTIFIER ${folder} key)
      list(APPEND folders ${key})
      list(LENGTH of_${key} count)
      math(EXPR number "${count} / ${at_a_time}")
      list(APPEND of_${key} ${source})
      cmake_path(GET folder FILENAME name)
      set_source_files_properties(${source} TARGET_DIRECTORY ${target}
        PROPERTIES UNITY_GROUP ${name}_${number})
    endforeach()
    foreach(key ${folders})
      unset(of_${key})
    endforeach()
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
    if(CMAKE_CXX_COMPILER_ID STREQUAL GNU)
      # It takes a source that is included for a header, whose unnamed namespaces other sources would have.
      target_compile_options(${target} PRIVATE -Wno-subobject-linkage)
    endif()
  endforeach()
endfunction()

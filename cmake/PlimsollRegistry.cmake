# SPDX-License-Identifier: Apache-2.0
#
# plimsoll_registry(NAME PLACE FOLDER...): libraries that define add_recipes() (recipes/registry.h)
# for the recipes in the folders of PLACE, by which #include finds them. NAME_plain describes them;
# NAME, with LibTorch, also runs them.
function(plimsoll_registry name place)
  set(plain_function describe_@RECIPE@)
  set(plain_header @RECIPE@/config.h)
  set(torch_function @RECIPE@_recipe)
  set(torch_header @RECIPE@/@RECIPE@.h)
  foreach(kind plain torch)
    set(includes "")
    set(calls "")
    foreach(RECIPE ${ARGN})
      string(CONFIGURE "${${kind}_header}" header @ONLY)
      string(CONFIGURE "${${kind}_function}" function @ONLY)
      string(APPEND includes "#include \"${place}/${header}\"\n")
      string(APPEND calls "  add_recipe(${function}()).or_throw();\n")
    endforeach()
    file(CONFIGURE OUTPUT ${name}_${kind}.cpp CONTENT
"#include \"recipes/registry.h\"
@includes@
void plimsoll::add_recipes() {
@calls@}
" @ONLY)
  endforeach()
  add_library(${name}_plain STATIC ${CMAKE_CURRENT_BINARY_DIR}/${name}_plain.cpp)
  target_link_libraries(${name}_plain PUBLIC plimsoll_run)
  set(libraries ${name}_plain)
  if(PLIMSOLL_HAVE_TORCH)
    add_library(${name} STATIC ${CMAKE_CURRENT_BINARY_DIR}/${name}_torch.cpp)
    target_link_libraries(${name} PUBLIC plimsoll_torch)
    list(APPEND libraries ${name})
  else()
    add_library(${name} ALIAS ${name}_plain)
  endif()
  foreach(library ${libraries})
    target_include_directories(${library} PRIVATE ${PROJECT_SOURCE_DIR}/src
      ${PROJECT_SOURCE_DIR})
    target_link_libraries(${library} PRIVATE plimsoll_settings plimsoll_fmt)
  endforeach()
endfunction()

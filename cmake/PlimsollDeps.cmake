# SPDX-License-Identifier: Apache-2.0
# Finds the libraries that Plimsoll is built with. Without root, tools/setup.sh unpacks them into .deps.
if(EXISTS ${CMAKE_CURRENT_SOURCE_DIR}/.deps/usr)
  list(APPEND CMAKE_PREFIX_PATH ${CMAKE_CURRENT_SOURCE_DIR}/.deps/usr)
endif()
set(plimsoll_deps_hint "run tools/setup.sh, or point CMAKE_PREFIX_PATH at it")

find_package(Threads REQUIRED)
find_package(OpenSSL REQUIRED COMPONENTS Crypto)

# A header-only library as an interface target that raises no warnings of its own.
function(plimsoll_headers target header)
  find_path(${target}_INCLUDE ${header} PATH_SUFFIXES include)
  if(NOT ${target}_INCLUDE)
    message(FATAL_ERROR "${header} not found: ${plimsoll_deps_hint}")
  endif()
  add_library(${target} INTERFACE)
  target_include_directories(${target} SYSTEM INTERFACE ${${target}_INCLUDE})
endfunction()
plimsoll_headers(plimsoll_expected tl/expected.hpp)
plimsoll_headers(plimsoll_json nlohmann/json.hpp)
plimsoll_headers(plimsoll_toml toml++/toml.h)
plimsoll_headers(plimsoll_cli11 CLI/CLI.hpp)
plimsoll_headers(plimsoll_fmt fmt/core.h)
# fmt's own library would be one more file to ship. What it holds is compiled into ours, once (src/base):
# half of what a source costs to compile. Another major version defines it otherwise; there, header only.
file(STRINGS ${plimsoll_fmt_INCLUDE}/fmt/core.h plimsoll_fmt_9 REGEX "define FMT_VERSION 9")
if(plimsoll_fmt_9)
  target_link_libraries(plimsoll_fmt INTERFACE plimsoll_fmt_definitions)
else()
  target_compile_definitions(plimsoll_fmt INTERFACE FMT_HEADER_ONLY=1)
endif()

# LZ4 compresses the blocks of feature stores. Its Debian package brings no CMake package.
set(PLIMSOLL_HAVE_LZ4 OFF)
if(NOT PLIMSOLL_WITH_LZ4 STREQUAL OFF)
  find_path(PLIMSOLL_LZ4_INCLUDE lz4.h)
  find_library(PLIMSOLL_LZ4_LIBRARY lz4)
  if(PLIMSOLL_LZ4_INCLUDE AND PLIMSOLL_LZ4_LIBRARY)
    set(PLIMSOLL_HAVE_LZ4 ON)
    add_library(plimsoll_lz4 INTERFACE)
    target_include_directories(plimsoll_lz4 SYSTEM INTERFACE ${PLIMSOLL_LZ4_INCLUDE})
    target_link_libraries(plimsoll_lz4 INTERFACE ${PLIMSOLL_LZ4_LIBRARY})
    target_compile_definitions(plimsoll_lz4 INTERFACE PLIMSOLL_HAVE_LZ4=1)
  elseif(PLIMSOLL_WITH_LZ4 STREQUAL ON)
    message(FATAL_ERROR "PLIMSOLL_WITH_LZ4 is ON, but lz4.h or liblz4 was not found: "
      "${plimsoll_deps_hint}")
  else()
    message(STATUS "LZ4: none; feature stores cannot be compressed (liblz4-dev has it)")
  endif()
endif()

# zlib reads gzipped CSV.
set(PLIMSOLL_HAVE_ZLIB OFF)
if(NOT PLIMSOLL_WITH_ZLIB STREQUAL OFF)
  find_package(ZLIB QUIET)
  if(ZLIB_FOUND)
    set(PLIMSOLL_HAVE_ZLIB ON)
  elseif(PLIMSOLL_WITH_ZLIB STREQUAL ON)
    message(FATAL_ERROR "PLIMSOLL_WITH_ZLIB is ON, but zlib was not found: ${plimsoll_deps_hint}")
  else()
    message(STATUS "zlib: none; .csv.gz cannot be imported (zlib1g-dev has it)")
  endif()
endif()

# zstd reads chats that it packed. Its Debian package brings no CMake package.
set(PLIMSOLL_HAVE_ZSTD OFF)
if(NOT PLIMSOLL_WITH_ZSTD STREQUAL OFF)
  find_path(PLIMSOLL_ZSTD_INCLUDE zstd.h)
  find_library(PLIMSOLL_ZSTD_LIBRARY zstd)
  if(PLIMSOLL_ZSTD_INCLUDE AND PLIMSOLL_ZSTD_LIBRARY)
    set(PLIMSOLL_HAVE_ZSTD ON)
  elseif(PLIMSOLL_WITH_ZSTD STREQUAL ON)
    message(FATAL_ERROR "PLIMSOLL_WITH_ZSTD is ON, but zstd.h or libzstd was not found: "
      "${plimsoll_deps_hint}")
  else()
    message(STATUS "zstd: none; .zst cannot be imported (libzstd-dev has it)")
  endif()
endif()

# Decoders of images. A format without one is refused when an image of it is met.
function(plimsoll_images name header package)
  set(PLIMSOLL_HAVE_${name} OFF PARENT_SCOPE)
  if(PLIMSOLL_WITH_${name} STREQUAL OFF)
    return()
  endif()
  find_path(PLIMSOLL_${name}_INCLUDE ${header})
  set(libraries "")
  set(missing "")
  foreach(library ${ARGN})
    find_library(PLIMSOLL_${library}_LIBRARY ${library})
    list(APPEND libraries ${PLIMSOLL_${library}_LIBRARY})
    if(NOT PLIMSOLL_${library}_LIBRARY)
      set(missing ${library})
    endif()
  endforeach()
  if(PLIMSOLL_${name}_INCLUDE AND NOT missing)
    set(PLIMSOLL_HAVE_${name} ON PARENT_SCOPE)
    add_library(plimsoll_${name} INTERFACE)
    target_include_directories(plimsoll_${name} SYSTEM INTERFACE ${PLIMSOLL_${name}_INCLUDE})
    target_link_libraries(plimsoll_${name} INTERFACE ${libraries})
    target_compile_definitions(plimsoll_${name} INTERFACE PLIMSOLL_HAVE_${name}=1)
  elseif(PLIMSOLL_WITH_${name} STREQUAL ON)
    message(FATAL_ERROR "PLIMSOLL_WITH_${name} is ON, but ${header} or its library was not found: "
      "${plimsoll_deps_hint}")
  else()
    message(STATUS "${name}: none; images of this format cannot be decoded (${package} has it)")
  endif()
endfunction()
plimsoll_images(JPEG jpeglib.h libjpeg62-turbo-dev jpeg)
find_path(PLIMSOLL_JPEG_CONFIG jconfig.h)  # In a folder of its own where it is Debian's.
if(PLIMSOLL_HAVE_JPEG AND PLIMSOLL_JPEG_CONFIG)
  target_include_directories(plimsoll_JPEG SYSTEM INTERFACE ${PLIMSOLL_JPEG_CONFIG})
endif()
plimsoll_images(PNG png.h libpng-dev png z)
plimsoll_images(WEBP webp/demux.h libwebp-dev webpdemux webp)

# LibTorch is the one inside the torch wheel that the user already has.
set(PLIMSOLL_HAVE_TORCH OFF)
if(NOT PLIMSOLL_WITH_TORCH STREQUAL OFF)
  if(PLIMSOLL_PYTHON)
    set(plimsoll_python ${Python_EXECUTABLE})
  elseif(EXISTS ${CMAKE_CURRENT_SOURCE_DIR}/.venv/bin/python)
    set(plimsoll_python ${CMAKE_CURRENT_SOURCE_DIR}/.venv/bin/python)
  endif()
  if(NOT plimsoll_python)
    set(plimsoll_python python3)
  endif()
  # -I: pip builds with a PYTHONPATH that hides what is installed; torch is wanted from there.
  execute_process(
    COMMAND ${plimsoll_python} -I -c
      "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0])"
    OUTPUT_VARIABLE PLIMSOLL_TORCH_ROOT OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET
    RESULT_VARIABLE plimsoll_torch_status)
  if(plimsoll_torch_status EQUAL 0)
    set(PLIMSOLL_HAVE_TORCH ON)
  elseif(PLIMSOLL_WITH_TORCH STREQUAL ON)
    message(FATAL_ERROR "PLIMSOLL_WITH_TORCH is ON, but ${plimsoll_python} has no torch: "
      "${plimsoll_deps_hint}")
  endif()
endif()
if(PLIMSOLL_HAVE_TORCH)
  # As torch.__version__; another one in the same place is noticed.
  file(STRINGS ${PLIMSOLL_TORCH_ROOT}/version.py PLIMSOLL_TORCH_VERSION REGEX "^__version__ = ")
  string(REGEX REPLACE ".*'(.*)'.*" "\\1" PLIMSOLL_TORCH_VERSION "${PLIMSOLL_TORCH_VERSION}")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${PLIMSOLL_TORCH_ROOT}/version.py)
  message(STATUS "LibTorch ${PLIMSOLL_TORCH_VERSION}: ${PLIMSOLL_TORCH_ROOT}")
  # Named by file, not by find_package(Torch): that asks for CUDA toolkits we do not use.
  add_library(plimsoll_libtorch INTERFACE)
  target_include_directories(plimsoll_libtorch SYSTEM INTERFACE ${PLIMSOLL_TORCH_ROOT}/include
    ${PLIMSOLL_TORCH_ROOT}/include/torch/csrc/api/include)
  foreach(name torch torch_cpu c10)
    target_link_libraries(plimsoll_libtorch INTERFACE ${PLIMSOLL_TORCH_ROOT}/lib/lib${name}.so)
  endforeach()
  # The compiler's flags for torch's own headers: nothing of ours is promised about them.
  target_compile_definitions(plimsoll_libtorch INTERFACE _GLIBCXX_USE_CXX11_ABI=1)
  # torch's wheel brings headers of an fmt of its own, which come first.
  target_compile_definitions(plimsoll_libtorch INTERFACE FMT_HEADER_ONLY=1)
else()
  message(STATUS "LibTorch: none; building the torch-free core only")
endif()

# SPDX-License-Identifier: Apache-2.0
# Finds the Python that the extension modules are for, before PlimsollDeps looks for its torch.
if(PLIMSOLL_PYTHON)
  # pip (scikit-build-core) says which Python; otherwise it is the one in .venv, as for LibTorch.
  if(NOT SKBUILD AND NOT DEFINED Python_EXECUTABLE
      AND EXISTS ${CMAKE_CURRENT_SOURCE_DIR}/.venv/bin/python)
    set(Python_EXECUTABLE ${CMAKE_CURRENT_SOURCE_DIR}/.venv/bin/python)
  endif()
  find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)
  execute_process(COMMAND ${Python_EXECUTABLE} -m nanobind --cmake_dir
    OUTPUT_VARIABLE nanobind_ROOT OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  find_package(nanobind CONFIG REQUIRED)
endif()

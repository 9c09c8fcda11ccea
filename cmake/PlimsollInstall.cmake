# SPDX-License-Identifier: Apache-2.0
# cmake --install build/release --component cpp --prefix DIR
#   lib/libplimsoll_*.so, include/plimsoll/, lib/cmake/plimsoll/: what find_package(plimsoll) finds, wherever DIR is moved.
# The wheel has the component python (python/CMakeLists.txt), with the same libraries.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(plimsoll_cmake_folder ${CMAKE_INSTALL_LIBDIR}/cmake/plimsoll)
set(plimsoll_third_party ${CMAKE_INSTALL_INCLUDEDIR}/plimsoll/third_party)

# The wheel has these, too. Torch's libraries are beside the package there; a program in C++ has them from its own link.
set(plimsoll_libraries plimsoll_core plimsoll_run)
if(PLIMSOLL_HAVE_TORCH)
  list(APPEND plimsoll_libraries plimsoll_torch)
endif()
set_target_properties(${plimsoll_libraries} PROPERTIES INSTALL_RPATH "$ORIGIN;$ORIGIN/../torch/lib")

# plimsoll_install(plimsollTargets core …): libraries that a file of targets names, as plimsoll::core, ….
function(plimsoll_install export)
  list(TRANSFORM ARGN PREPEND plimsoll_ OUTPUT_VARIABLE targets)
  foreach(name ${ARGN})
    set_target_properties(plimsoll_${name} PROPERTIES EXPORT_NAME ${name})
    target_compile_features(plimsoll_${name} INTERFACE cxx_std_20)
  endforeach()
  install(TARGETS ${targets} EXPORT ${export} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT cpp
    INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} ${plimsoll_third_party})
  install(EXPORT ${export} NAMESPACE plimsoll:: DESTINATION ${plimsoll_cmake_folder} COMPONENT cpp)
endfunction()
plimsoll_install(plimsollTargets core)
set(plimsoll_left_out PATTERN torch.h EXCLUDE)
if(PLIMSOLL_HAVE_TORCH)
  plimsoll_install(plimsollTorchTargets run torch)
  set(plimsoll_left_out "")
endif()

install(DIRECTORY include/plimsoll DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT cpp
  FILES_MATCHING PATTERN *.h ${plimsoll_left_out})
# The one header of others that ours include, as these libraries were compiled with it.
install(FILES ${plimsoll_expected_INCLUDE}/tl/expected.hpp DESTINATION ${plimsoll_third_party}/tl COMPONENT cpp)

configure_package_config_file(cmake/plimsollConfig.cmake.in plimsollConfig.cmake
  INSTALL_DESTINATION ${plimsoll_cmake_folder} NO_SET_AND_CHECK_MACRO
  NO_CHECK_REQUIRED_COMPONENTS_MACRO)
write_basic_package_version_file(plimsollConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/plimsollConfig.cmake ${CMAKE_CURRENT_BINARY_DIR}/plimsollConfigVersion.cmake
  DESTINATION ${plimsoll_cmake_folder} COMPONENT cpp)

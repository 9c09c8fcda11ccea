# SPDX-License-Identifier: Apache-2.0
#
# plimsoll_presets(TARGET RECIPE NAME...): the text of presets/NAME.toml of the recipe in Python becomes
# part of TARGET, as RECIPE::presets() (run/config.h), so that the program finds it wherever it is
# installed.
function(plimsoll_presets target recipe)
  set(rows "")
  foreach(name ${ARGN})
    set(file ${PROJECT_SOURCE_DIR}/python/plimsoll/recipes/${recipe}/presets/${name}.toml)
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${file})
    file(READ ${file} text)
    string(APPEND rows "    {\"${name}\", R\"toml(${text})toml\"},\n")
  endforeach()
  file(CONFIGURE OUTPUT presets.cpp CONTENT
"#include \"recipes/@recipe@/config.h\"
std::span<const plimsoll::Preset> plimsoll::@recipe@::presets() noexcept {
  static constexpr Preset kPresets[] = {
@rows@  };
  return kPresets;
}
" @ONLY)
  target_sources(${target} PRIVATE ${CMAKE_CURRENT_BINARY_DIR}/presets.cpp)
endfunction()

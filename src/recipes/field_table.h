// SPDX-License-Identifier: Apache-2.0
//
// FieldTable: how a recipe writes the table of its options.
//
//   using F = FieldTable<CosirConfig>;
//   F::real<&CosirConfig::lr>("lr", 0, 1e3, "Learning rate of the combiner")
//   F::whole<&CanKdConfig::teacher, &CanKdSizes::gat_heads>("teacher_gat_heads", …)
//
// The path of members names a value of the kind's own type, or the table does not compile.
// Reading order: config.h, this file, cosir_config.cpp.
//
// Threads: constants.   Memory: none of its own.
#pragma once

#include <cstdint>
#include <string>

#include "recipes/config.h"

namespace plimsoll {

template <class Config>
struct FieldTable {
  static constexpr auto kIdentity = FieldRole::kIdentity;
  static constexpr auto kFree = FieldRole::kFree;

  template <class Object, class Member, class... Deeper>
  static auto& follow(Object& object, Member member, Deeper... deeper) {
    if constexpr (sizeof...(deeper) == 0) {
      return object.*member;
    } else {
      return follow(object.*member, deeper...);
    }
  }
  template <class Value, auto... Path>
  static FieldValue in(void* config) {
    Value& value = follow(*static_cast<Config*>(config), Path...);
    return &value;
  }

  template <auto... Path>
  static constexpr Field text(const char* name, FieldRole role, const char* help) {
    return {name, FieldKind::kText, role, &in<std::string, Path...>, help};
  }
  template <auto... Path>
  static constexpr Field limit(const char* name, const char* help) {
    return {name, FieldKind::kLimit, kFree, &in<std::string, Path...>, help};
  }
  template <auto... Path>
  static constexpr Field bytes(const char* name, const char* help, double least = 0) {
    constexpr double kBytesMax = 1e15;
    return {name, FieldKind::kBytes, kFree, &in<std::int64_t, Path...>, help, least, kBytesMax};
  }
  template <auto... Path>
  static constexpr Field whole(const char* name, FieldRole role, double least, double most,
                               const char* help) {
    return {name, FieldKind::kInteger, role, &in<std::int64_t, Path...>, help, least, most};
  }
  template <auto... Path>
  static constexpr Field whole_or_auto(const char* name, double least, double most,
                                       const char* help) {
    return {name, FieldKind::kAuto, kIdentity, &in<std::int64_t, Path...>, help, least, most};
  }
  template <auto... Path>
  static constexpr Field real(const char* name, double least, double most, const char* help) {
    return {name, FieldKind::kReal, kIdentity, &in<double, Path...>, help, least, most};
  }
  template <auto... Path>
  static constexpr Field on_off(const char* name, FieldRole role, const char* help) {
    return {name, FieldKind::kSwitch, role, &in<bool, Path...>, help};
  }
  template <auto... Path>
  static constexpr Field choice(const char* name, const char* choices, const char* help,
                                FieldRole role = kIdentity) {
    return {name, FieldKind::kChoice, role, &in<std::string, Path...>, help, 0, 0, choices};
  }
  template <auto... Path>
  static constexpr Field widths(const char* name, double least, double most, const char* help) {
    return {name, FieldKind::kWidths, kIdentity, &in<std::string, Path...>, help, least, most};
  }
};

}  // namespace plimsoll

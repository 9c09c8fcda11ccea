// SPDX-License-Identifier: Apache-2.0
//
// FieldTable: how a recipe writes the table of its options.
//
//   using F = FieldTable<CosirConfig>;
//   F::out(), F::seed(),
//   F::real<&Config::lr>("lr", 0, 1e3, "Learning rate")
//   F::whole<&Config::teacher, &Sizes::heads>("teacher_heads", …)
//
// The path of members names a value of the kind's own type, or the table does not compile.
// Reading order: config.h, this file.
//
// Threads: constants.   Memory: none of its own.
#pragma once

#include <cstdint>
#include <string>

#include "run/config.h"

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
  static FieldValue in(void* config, const Field& /*self*/) {
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

  // Those of RunConfig, which every run has.

  static constexpr Field data(const char* help) {
    return text<&Config::data>("data", FieldRole::kPlace, help);
  }
  static constexpr Field out() {
    return text<&Config::out>("out", FieldRole::kPlace, "Run folder to make: new or empty");
  }
  static constexpr Field memory_limit() {
    return limit<&Config::memory_limit>("memory_limit",
                                        "Memory limit of the whole process: 768MiB, 6GB, or 25% "
                                        "of the machine; empty: found by itself");
  }
  static constexpr Field disk_limit() {
    return limit<&Config::disk_limit>("disk_limit",
                                      "Disk limit of the run's tables and checkpoints: 20GiB, or "
                                      "25% of the free disk; empty: none");
  }
  static constexpr Field seed() {
    return whole<&Config::seed>("seed", kIdentity, 0, 9e15, "Seed of every random choice");
  }
  static constexpr Field checkpoint_every_n_steps() {
    return whole<&Config::checkpoint_every_n_steps>(
        "checkpoint_every_n_steps", kFree, 0, kCountMax,
        "Steps between checkpoints; 0: one at the end of each epoch");
  }
  static constexpr Field keep_checkpoints() {
    return whole<&Config::keep_checkpoints>(
        "keep_checkpoints", kFree, 1, 1e6,
        "Number of checkpoints kept, newest first; a table of rows keeps two commits");
  }
  static constexpr Field cleanup_every_n_steps() {
    return whole<&Config::cleanup_every_n_steps>(
        "cleanup_every_n_steps", kFree, 0, kCountMax,
        "Steps between returns of unused memory to the system; 0: after evaluations and under "
        "pressure only");
  }
  static constexpr Field foreign_bytes() {
    return bytes<&Config::foreign_bytes>(
        "foreign_bytes",
        "Memory set aside for what cannot be leased: code, and scratch of libraries");
  }
  static constexpr Field compute_threads(FieldRole role, const char* help) {
    return whole<&Config::compute_threads>("compute_threads", role, 0, 4096, help);
  }
  static constexpr Field tensorboard() {
    return on_off<&Config::tensorboard>("tensorboard", kFree,
                                        "TensorBoard event files are written under RUN/metrics");
  }

 private:
  static constexpr double kCountMax = 1e12;
};

}  // namespace plimsoll

// SPDX-License-Identifier: Apache-2.0
#include "run/sealed_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <span>
#include <string_view>

#include "base/check.h"
#include "base/crc32c.h"
#include "os/file.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;
constexpr std::size_t kDigits = 8;

// What stands before and after the digits.
struct Seal {
  std::string_view before;
  std::string_view after;
  std::string_view instead_of;  // The end of a text that has no seal yet.
};

Seal seal_of(const fs::path& path) {
  if (path.extension() == ".toml") {
    return {"# crc32c ", "\n", ""};
  }
  PLIMSOLL_CHECK(path.extension() == ".json", "a sealed file is .toml or .json");
  return {", \"crc32c\": \"", "\"}\n", "}\n"};
}

std::string digits_of(std::string_view text) {
  return fmt::format("{:08x}", crc32c(std::as_bytes(std::span(text.data(), text.size()))));
}

}  // namespace

Result<void> write_sealed(const fs::path& path, const std::string& text) {
  const Seal seal = seal_of(path);
  PLIMSOLL_CHECK(text.ends_with(seal.instead_of), "a JSON object and the end of its line");
  std::string sealed = text.substr(0, text.size() - seal.instead_of.size());
  sealed += fmt::format("{}{}{}", seal.before, digits_of(sealed), seal.after);
  return replace_file(path, sealed);
}

Result<std::string> read_sealed(const fs::path& path, std::int64_t bytes_max) {
  PLIMSOLL_TRY(std::string text, read_small_file(path, bytes_max));
  const Seal seal = seal_of(path);
  const std::size_t end = seal.before.size() + kDigits + seal.after.size();
  const std::string_view all = text;
  const std::string_view tail = all.substr(all.size() - std::min(all.size(), end));
  if (tail.size() != end || !tail.starts_with(seal.before) || !tail.ends_with(seal.after)) {
    return fail(
        ErrorCode::kCorrupt,
        fmt::format("{}: it does not end with its checksum: it was cut short, damaged, or "
                    "written by Plimsoll 0.1.0 (run format 1)",
                    path.string()),
        "restore the file from a copy, go on with the version that wrote it, or train anew");
  }
  const std::string_view body = all.substr(0, all.size() - end);
  if (tail.substr(seal.before.size(), kDigits) != digits_of(body)) {
    return fail(ErrorCode::kCorrupt,
                fmt::format("{}: its checksum does not match: it was damaged, or edited by hand",
                            path.string()),
                path.extension() == ".toml"
                    ? "restore the file; options change by `plimsoll resume RUN --set key=value`, "
                      "or in the program that the run is of"
                    : "restore the file from a copy, or train anew");
  }
  return text;
}

}  // namespace plimsoll

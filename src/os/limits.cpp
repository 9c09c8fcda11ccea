// SPDX-License-Identifier: Apache-2.0
#include "plimsoll/limits.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <optional>
#include <string_view>

#include <fmt/core.h>
#include <sys/resource.h>

#include "base/check.h"
#include "os/cgroup.h"
#include "plimsoll/bytes.h"

namespace plimsoll {

namespace {

// With no limit given, a fifth of what is there is left to the page cache and to other programs.
constexpr double kDefaultFraction = 0.8;
// cgroup v1 says "none" as the largest multiple of the page size below 2^63; nobody means this
// much.
constexpr std::int64_t kNoLimit = std::int64_t{1} << 60;

// The whole of a small text file; nothing when it cannot be read.
std::optional<std::string> text_of(const std::filesystem::path& path) {
  std::ifstream file(path);
  if (!file) {
    return std::nullopt;
  }
  std::string text(std::istreambuf_iterator<char>(file), {});
  return file.bad() ? std::nullopt : std::optional(std::move(text));
}

std::optional<std::int64_t> leading_integer(std::string_view text) {
  std::int64_t value = 0;
  const auto [stop, status] = std::from_chars(text.data(), text.data() + text.size(), value);
  return status == std::errc() && stop != text.data() ? std::optional(value) : std::nullopt;
}

// "MemTotal:   123 kB" of /proc/meminfo, in bytes.
std::optional<std::int64_t> meminfo_bytes(std::string_view meminfo, std::string_view name) {
  const std::size_t at = meminfo.find(name);
  if (at == std::string_view::npos) {
    return std::nullopt;
  }
  std::string_view rest = meminfo.substr(at + name.size());
  rest.remove_prefix(std::min(rest.find_first_not_of(" \t"), rest.size()));
  const auto kibibytes = leading_integer(rest);
  return kibibytes ? std::optional(*kibibytes << 10) : std::nullopt;
}

void add_file(const std::filesystem::path& file, const char* source, LimitReport& report) {
  const auto text = text_of(file);
  const auto bytes = text ? leading_integer(*text) : std::nullopt;  // "max" is no integer.
  if (bytes && *bytes >= 0 && *bytes < kNoLimit) {
    report.candidates.push_back({source, file.string(), *bytes});
  }
}

// Visits a cgroup and its ancestors up to the mount point. In a container the path seen from
// outside may not exist below the mount; its ancestors, the mount point at least, still do.
template <class Visit>
void for_each_ancestor(const std::filesystem::path& mount, std::string_view path, Visit visit) {
  std::filesystem::path relative = std::filesystem::path(path).relative_path();
  if (path.find("..") != std::string_view::npos) {
    relative.clear();  // Above the cgroup namespace's root: only the mount point can be seen.
  }
  for (;;) {
    visit(mount / relative);
    if (relative.empty()) {
      return;
    }
    relative = relative.parent_path();
  }
}

void add_cgroups(const LimitQuery& query, LimitReport& report) {
  for (const CgroupLine& line : read_cgroup_lines(query.proc_root, query.pid)) {
    const auto mount = cgroup_mount(line, query.cgroup_root);
    for_each_ancestor(mount, line.path, [&](const auto& directory) {
      if (line.version2) {
        add_file(directory / "memory.max", "cgroup v2 memory.max", report);
        add_file(directory / "memory.high", "cgroup v2 memory.high", report);
      } else {
        add_file(directory / "memory.limit_in_bytes", "cgroup v1 memory.limit_in_bytes", report);
      }
    });
  }
}

// SLURM writes mebibytes, or a number with a suffix. 0 means the whole node.
std::optional<std::int64_t> slurm_bytes(const char* text) {
  if (text == nullptr || *text == '\0') {
    return std::nullopt;
  }
  std::string size(text);
  if (size.find_first_not_of("0123456789") == std::string::npos) {
    size += 'M';
  }
  const auto bytes = parse_bytes(size);
  return bytes && *bytes > 0 ? std::optional(*bytes) : std::nullopt;
}

void add_slurm(const LimitQuery& query, LimitReport& report) {
  const auto variable = [&](const char* name) -> const char* {
    return query.getenv ? query.getenv(name) : std::getenv(name);
  };
  if (const auto bytes = slurm_bytes(variable("SLURM_MEM_PER_NODE")); bytes) {
    report.candidates.push_back({"SLURM_MEM_PER_NODE", "environment", *bytes});
  }
  const char* const cpus_text = variable("SLURM_CPUS_ON_NODE");
  const auto cpus = leading_integer(cpus_text == nullptr ? "" : cpus_text);
  const auto per_cpu = slurm_bytes(variable("SLURM_MEM_PER_CPU"));
  if (per_cpu && cpus && *cpus > 0 && *cpus < (1 << 20) && *per_cpu < kNoLimit / *cpus) {
    report.candidates.push_back(
        {fmt::format("SLURM_MEM_PER_CPU x {}", *cpus), "environment", *per_cpu * *cpus});
  }
}

}  // namespace

std::string LimitReport::explain() const {
  const LimitCandidate& held = candidates.at(winner);
  std::string text = fmt::format("{} ({}{}: {}", format_bytes(limit_bytes),
                                 defaulted ? "80 % of " : "", held.source, held.where);
  const LimitCandidate& first = candidates.front();
  if (first.source == "user" && winner != 0) {
    text += fmt::format("; below the {} of {}", format_bytes(first.bytes), first.where);
  }
  return text + ")";
}

Result<LimitReport> find_limit(const LimitQuery& query) {
  const auto meminfo_path = query.proc_root / "meminfo";
  const auto meminfo = text_of(meminfo_path);
  const auto total = meminfo ? meminfo_bytes(*meminfo, "MemTotal:") : std::nullopt;
  if (!total) {
    return fail(ErrorCode::kIo, fmt::format("{}: cannot be read", meminfo_path.string()),
                "is /proc mounted?");
  }
  LimitReport report;
  const bool by_user = !query.user_limit.empty();
  if (by_user) {
    auto bytes = parse_bytes(query.user_limit, *total);
    if (!bytes || *bytes == 0) {
      Error error = bytes ? make_error(ErrorCode::kInvalidArgument, "a limit of 0 bytes",
                                       "write a size such as 512MiB, 6GiB or 25%")
                          : std::move(bytes).error();
      error.detail = std::make_shared<const std::string>(query.user_source + ": " + *error.detail);
      return tl::unexpected(std::move(error));
    }
    report.candidates.push_back({"user", query.user_source, *bytes});
  }
  add_cgroups(query, report);
  add_slurm(query, report);
  // MemAvailable is missing before Linux 3.14 and in some sandboxes: free memory is the safe guess.
  const auto available = meminfo_bytes(*meminfo, "MemAvailable:");
  report.candidates.push_back(
      {"available", meminfo_path.string(),
       available.value_or(meminfo_bytes(*meminfo, "MemFree:").value_or(*total)) +
           query.resident_bytes});

  const auto smallest = std::ranges::min_element(report.candidates, {}, &LimitCandidate::bytes);
  report.winner = static_cast<std::size_t>(smallest - report.candidates.begin());
  report.defaulted = !by_user;
  report.limit_bytes = smallest->bytes;
  if (report.defaulted) {
    report.limit_bytes = static_cast<std::int64_t>(
        std::floor(static_cast<double>(smallest->bytes) * kDefaultFraction));
  }
  return report;
}

std::int64_t address_limit_bytes() noexcept {
  std::int64_t smallest = INT64_MAX;
  for (const auto which : {RLIMIT_AS, RLIMIT_DATA}) {
    rlimit limit{};
    if (::getrlimit(which, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
      smallest = std::min(smallest, static_cast<std::int64_t>(limit.rlim_cur));
    }
  }
  return smallest;
}

}  // namespace plimsoll

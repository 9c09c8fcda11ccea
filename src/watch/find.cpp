// SPDX-License-Identifier: Apache-2.0
#include "watch/find.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <fstream>
#include <string_view>
#include <system_error>
#include <utility>

#include <fmt/format.h>
#include <unistd.h>

#include "base/check.h"
#include "os/directories.h"
#include "os/process_tree.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kCommandBytes = 200;
constexpr std::size_t kWordsBytes = 4096;

struct Candidate {
  Trainer trainer{};
  std::uint64_t stack{0};  // Where it begins: one address for a process and what is forked from it.
  bool multiprocessing{false};
};

// The names of torch's own libraries, whatever folder they are in.
bool is_torch(std::string_view path) {
  constexpr std::array<std::string_view, 3> kLibraries{"libtorch_cpu.so", "libtorch_cuda.so",
                                                       "libc10.so"};
  const std::string_view name = path.substr(path.rfind('/') + 1);
  return std::ranges::any_of(kLibraries,
                             [&](std::string_view one) { return name.starts_with(one); });
}

bool maps_torch(const fs::path& process) {
  std::ifstream maps(process / "maps");
  for (std::string line; std::getline(maps, line);) {
    if (const std::size_t at = line.find('/');
        at != std::string::npos && is_torch(std::string_view(line).substr(at))) {
      return true;
    }
  }
  return false;
}

// The run whose .lock the process has open and wrote its pid into.
fs::path run_of(const fs::path& process, int pid) {
  std::error_code failed;
  for (fs::directory_iterator at(process / "fd", failed), end; !failed && at != end;
       at.increment(failed)) {
    std::error_code gone;
    const fs::path target = fs::read_symlink(at->path(), gone);
    if (gone || target.filename() != ".lock" ||
        !fs::is_regular_file(target.parent_path() / "run.toml", gone)) {
      continue;
    }
    int written = 0;
    if (std::ifstream(target) >> written && written == pid) {
      return target.parent_path();
    }
  }
  return {};
}

std::string words_of(const fs::path& process) {
  std::ifstream file(process / "cmdline");
  std::string text(kWordsBytes, '\0');
  file.read(text.data(), std::ssize(text));
  text.resize(static_cast<std::size_t>(file.gcount()));
  while (!text.empty() && text.back() == '\0') {
    text.pop_back();
  }
  std::ranges::replace_if(
      text, [](char c) { return std::iscntrl(static_cast<unsigned char>(c)) != 0; }, ' ');
  return text;
}

void read_trainer_status(const fs::path& process, Trainer& trainer) {
  std::ifstream status(process / "status");
  for (std::string line; std::getline(status, line);) {
    const std::size_t colon = line.find(':');
    const std::string_view key(line.data(), std::min(colon, line.size()));
    const std::string_view rest = std::string_view(line).substr(key.size());
    const std::size_t digit = rest.find_first_of("0123456789");
    std::int64_t value = 0;
    if (digit == std::string_view::npos ||
        std::from_chars(rest.data() + digit, rest.data() + rest.size(), value).ec != std::errc()) {
      continue;
    }
    if (key == "PPid") {
      trainer.parent = static_cast<int>(value);
    } else if (key == "RssAnon" || key == "RssShmem") {
      trainer.resident_bytes += value << 10;
    }
  }
}

// Whether its memory is another's: forked from one of `found`, or started for one of them.
bool is_worker(const Candidate& one, const std::vector<Candidate>& found, const fs::path& proc) {
  const auto at = [&](int pid) {
    return std::ranges::find(found, pid, [](const Candidate& it) { return it.trainer.pid; });
  };
  const auto parent = at(one.trainer.parent);
  if (parent != found.end() && parent->stack == one.stack) {
    return true;
  }
  for (int above = one.trainer.parent; one.multiprocessing && above > 1;) {
    if (at(above) != found.end()) {
      return true;
    }
    Trainer between;  // Such as the server that forks them.
    read_trainer_status(proc / std::to_string(above), between);
    above = between.parent;
  }
  return false;
}

}  // namespace

Result<std::vector<Trainer>> find_trainers(const fs::path& proc) {
  std::vector<Candidate> found;
  PLIMSOLL_TRY(const auto names, names_in(proc));
  for (const std::string& name : names) {
    Candidate candidate;
    Trainer& one = candidate.trainer;
    const auto [stop, status] = std::from_chars(name.data(), name.data() + name.size(), one.pid);
    if (status != std::errc() || stop != name.data() + name.size() || one.pid == ::getpid()) {
      continue;
    }
    const fs::path process = proc / name;
    one.torch = maps_torch(process);
    one.run = run_of(process, one.pid);
    if ((one.torch || !one.run.empty()) && found.size() < kTrainersMost) {
      one.command = words_of(process);
      candidate.multiprocessing =
          one.command.find("--multiprocessing-fork") != std::string::npos ||
          one.command.find("multiprocessing.forkserver") != std::string::npos;
      one.command.resize(std::min(one.command.size(), kCommandBytes));
      candidate.stack = process_stack(one.pid, proc);
      read_trainer_status(process, one);
      found.push_back(std::move(candidate));
    }
  }
  std::vector<Trainer> top;
  for (const Candidate& one : found) {
    // Who holds a run's folder is its process, whoever forked it.
    if (!one.trainer.run.empty() || !is_worker(one, found, proc)) {
      top.push_back(one.trainer);
    }
  }
  std::ranges::sort(top, std::ranges::greater{}, &Trainer::resident_bytes);
  return top;
}

}  // namespace plimsoll

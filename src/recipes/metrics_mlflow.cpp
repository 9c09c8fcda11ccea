// SPDX-License-Identifier: Apache-2.0
#include "recipes/metrics_mlflow.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <system_error>

#include "base/check.h"
#include "base/philox.h"
#include "os/file.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;
// RunStatus of MLflow's service.proto.
constexpr int kRunning = 1;
constexpr int kFinished = 3;
constexpr int kFailed = 4;
constexpr int kKilled = 5;
constexpr int kExperimentsMost = 4096;  // Looked through for the name; more are not expected.

Result<void> make_folder(const fs::path& folder) {
  std::error_code status;
  fs::create_directories(folder, status);
  if (status) {
    return fail_io(status.value(), folder.string(), "name a writable folder with --mlflow");
  }
  return {};
}

Result<void> put(const fs::path& path, std::string_view text, int how) {
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | how, 0644);
  if (file < 0) {
    return fail_io(errno, path.string());
  }
  const ssize_t written = ::write(file, text.data(), text.size());
  const int reason = written < 0 ? errno : ENOSPC;
  ::close(file);
  if (written != static_cast<ssize_t>(text.size())) {
    return fail_io(reason, path.string());
  }
  return {};
}

/// A YAML scalar in single quotes.
std::string yaml(std::string_view text) {
  std::string quoted{"'"};
  for (const char c : text) {
    quoted += c;
    if (c == '\'') {
      quoted += c;
    }
  }
  return quoted + "'";
}

/// The line "KEY: VALUE" of a flat YAML file, without quotes; "" when it has none.
std::string yaml_value(std::string_view text, std::string_view key) {
  const std::string wanted = fmt::format("{}: ", key);
  for (std::size_t at = 0; at < text.size();) {
    const auto end = std::min(text.find('\n', at), text.size());
    std::string_view line = text.substr(at, end - at);
    if (line.starts_with(wanted)) {
      line.remove_prefix(wanted.size());
      if (line.size() >= 2 && line.front() == '\'' && line.back() == '\'') {
        line = line.substr(1, line.size() - 2);
      }
      return std::string(line);
    }
    at = end + 1;
  }
  return "";
}

std::uint64_t hash_text(std::string_view text) {
  std::uint64_t hash = text.size();
  for (const char c : text) {
    hash = mix64(hash ^ static_cast<unsigned char>(c));
  }
  return hash;
}

std::int64_t wall_ms() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

std::string uri(const fs::path& path) {
  std::error_code status;
  const auto absolute = fs::absolute(path, status);
  return "file://" + (status ? path : absolute).string();
}

/// The id of the experiment called `name`, which is made when there is none.
Result<std::string> find_experiment(const fs::path& root, std::string_view name) {
  PLIMSOLL_TRY_VOID(make_folder(root));
  std::error_code status;
  int seen = 0;
  for (fs::directory_iterator entry(root, status); !status && entry != fs::directory_iterator();
       entry.increment(status)) {
    if (++seen > kExperimentsMost) {
      break;
    }
    if (const auto meta = read_small_file(entry->path() / "meta.yaml");
        meta && yaml_value(*meta, "name") == name &&
        yaml_value(*meta, "lifecycle_stage") == "active") {
      return entry->path().filename().string();
    }
  }
  // MLflow's ids are decimal numbers of up to eighteen digits.
  const auto id = fmt::format("{}", hash_text(name) % 1'000'000'000'000'000'000ULL);
  PLIMSOLL_TRY_VOID(make_folder(root / id));
  const auto now = wall_ms();
  PLIMSOLL_TRY_VOID(
      replace_file(root / id / "meta.yaml",
                   fmt::format("artifact_location: {}\ncreation_time: {}\nexperiment_id: '{}'\n"
                               "last_update_time: {}\nlifecycle_stage: active\nname: {}\n",
                               yaml(uri(root / id)), now, id, now, name)));
  return id;
}

}  // namespace

Result<MlflowRun> MlflowRun::open(const fs::path& root, std::string_view experiment,
                                  std::string_view run_name, const fs::path& id_file,
                                  std::span<const std::pair<std::string, std::string>> params) {
  MlflowRun run;
  PLIMSOLL_TRY(run.experiment_id_, find_experiment(root, experiment));
  run.run_name_ = run_name;
  const char* user = std::getenv("USER");
  run.user_ = user != nullptr ? user : "unknown";
  run.start_ms_ = wall_ms();
  if (const auto saved = read_small_file(id_file); saved && saved->size() >= 32) {
    run.run_id_ = saved->substr(0, 32);
  } else {
    const auto a = hash_text(id_file.string()) ^ static_cast<std::uint64_t>(run.start_ms_);
    const auto b = static_cast<std::uint64_t>(::getpid());
    run.run_id_ = fmt::format("{:016x}{:016x}", mix64(a), mix64(a ^ mix64(b)));
    PLIMSOLL_TRY_VOID(replace_file(id_file, run.run_id_ + "\n"));
  }
  run.directory_ = root / run.experiment_id_ / run.run_id_;
  if (const auto meta = read_small_file(run.directory_ / "meta.yaml"); meta) {
    const std::string start = yaml_value(*meta, "start_time");
    std::from_chars(start.data(), start.data() + start.size(), run.start_ms_);
  }
  for (const char* folder : {"params", "metrics", "tags", "artifacts"}) {
    PLIMSOLL_TRY_VOID(make_folder(run.directory_ / folder));
  }
  for (const auto& [key, value] : params) {
    PLIMSOLL_TRY_VOID(put(run.directory_ / "params" / key, value, O_TRUNC));
  }
  const std::array<std::pair<const char*, std::string>, 4> tags{{{"mlflow.runName", run.run_name_},
                                                                 {"mlflow.user", run.user_},
                                                                 {"mlflow.source.name", "plimsoll"},
                                                                 {"mlflow.source.type", "LOCAL"}}};
  for (const auto& [key, value] : tags) {
    PLIMSOLL_TRY_VOID(put(run.directory_ / "tags" / key, value, O_TRUNC));
  }
  PLIMSOLL_TRY_VOID(run.write_meta(kRunning, 0));
  return run;
}

Result<void> MlflowRun::metric(std::string_view key, double value, std::int64_t step,
                               std::int64_t wall) {
  const auto path = directory_ / "metrics" / key;
  const auto line = fmt::format("{} {} {}\n", wall, value, step);
  auto written = put(path, line, O_APPEND);
  if (!written && written.error().os_errno == ENOENT) {  // "loss/total" is a file in a folder.
    PLIMSOLL_TRY_VOID(make_folder(path.parent_path()));
    written = put(path, line, O_APPEND);
  }
  return written;
}

Result<void> MlflowRun::finish(std::string_view status, std::int64_t wall) {
  return write_meta(status == "finished"  ? kFinished
                    : status == "stopped" ? kKilled
                                          : kFailed,
                    wall);
}

Result<void> MlflowRun::write_meta(int status, std::int64_t end_ms) {
  return replace_file(
      directory_ / "meta.yaml",
      fmt::format("artifact_uri: {}\nend_time: {}\nentry_point_name: ''\nexperiment_id: '{}'\n"
                  "lifecycle_stage: active\nrun_id: {}\nrun_name: {}\nrun_uuid: {}\n"
                  "source_name: ''\nsource_type: 4\nsource_version: ''\nstart_time: {}\n"
                  "status: {}\ntags: []\nuser_id: {}\n",
                  yaml(uri(directory_ / "artifacts")),
                  end_ms == 0 ? "null" : fmt::format("{}", end_ms), experiment_id_, yaml(run_id_),
                  yaml(run_name_), yaml(run_id_), start_ms_, status, yaml(user_)));
}

}  // namespace plimsoll

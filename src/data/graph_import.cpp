// SPDX-License-Identifier: Apache-2.0
//
// Threads: see graph_import.h.   Memory: see graph_import.h.
#include "data/graph_import.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "base/check.h"
#include "base/crc32c.h"
#include "data/disk_room.h"
#include "data/graph_parts.h"
#include "data/graph_set_format.h"
#include "memory/slab.h"
#include "os/file.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;

constexpr const char* kMapping = "id_mapping.pkl";
constexpr std::int64_t kReadBytes = 256 << 10;

ReadSavedGraphs& reader() {
  static ReadSavedGraphs one;
  return one;
}

bool is_saved(const CanFile& file) {
  return file.path.extension() == ".pt";
}

tl::unexpected<Error> bad(const std::string& what, const char* advice) {
  return fail(ErrorCode::kInvalidArgument, what, advice);
}

Result<std::uint32_t> file_crc(const fs::path& path) {
  PLIMSOLL_TRY(const File file, File::open(path, FileMode::kRead));
  PLIMSOLL_TRY(const std::int64_t size, file.size());
  std::vector<std::byte> buffer(static_cast<std::size_t>(kReadBytes));
  std::uint32_t crc = 0;
  for (std::int64_t at = 0; at < size; at += kReadBytes) {
    const auto part = std::span<std::byte>(buffer).first(
        static_cast<std::size_t>(std::min(kReadBytes, size - at)));
    PLIMSOLL_TRY_VOID(file.read_at(at, part));
    crc = crc32c(part, crc);
  }
  return crc;
}

/// All files, one after another.
class SavedImport {
 public:
  SavedImport(Governor governor, const CanImportOptions& options, const fs::path& folder,
              const std::function<bool(std::int64_t, std::int64_t)>& progress, std::int64_t total)
      : governor_(std::move(governor)),
        options_(options),
        folder_(folder),
        progress_(progress),
        total_bytes_(total) {}

  /// Returns the ids that the file's mapping has.
  Result<std::vector<std::uint32_t>> add(std::size_t number, const CanFile& file,
                                         const GraphPart::Buffers& buffers, GraphSetInfo& info);
  [[nodiscard]] bool report(std::int64_t more = 0) const {
    return !progress_ || progress_(std::min(done_bytes_ + more, total_bytes_), total_bytes_);
  }

 private:
  Governor governor_;
  const CanImportOptions& options_;
  const fs::path& folder_;
  const std::function<bool(std::int64_t, std::int64_t)>& progress_;
  std::int64_t total_bytes_;
  std::int64_t done_bytes_{0};
};

Result<std::vector<std::uint32_t>> SavedImport::add(std::size_t number, const CanFile& file,
                                                    const GraphPart::Buffers& buffers,
                                                    GraphSetInfo& info) {
  PLIMSOLL_TRY(GraphPart part, GraphPart::create(folder_, number, buffers, options_.window));
  const SavedGraphs saved{
      .path = file.path,
      .window = options_.window,
      .ids_max = options_.ids_max,
      .take = [&part](const GraphRows& graph) { return part.append(graph); },
      .step =
          [&](double share) {
            return report(static_cast<std::int64_t>(share * static_cast<double>(file.bytes)));
          }};
  PLIMSOLL_TRY(auto ids, reader()(governor_, saved));
  PLIMSOLL_TRY_VOID(part.finish());
  GraphFileInfo& made = info.files.emplace_back();
  made.name = file.name;
  made.test = file.test;
  made.bytes = file.bytes;
  PLIMSOLL_TRY(made.crc32c, file_crc(file.path));
  made.graphs = part.graphs();
  made.attack_graphs = part.attack_graphs();
  info.graphs += part.graphs();
  info.nodes += part.nodes();
  info.edges += part.edges();
  done_bytes_ += file.bytes;
  return ids;
}

}  // namespace

void set_saved_graphs_reader(ReadSavedGraphs read) {
  reader() = std::move(read);
}

bool is_saved_graphs(const CanFiles& found) {
  return std::any_of(found.files.begin(), found.files.end(), is_saved);
}

Result<std::string> saved_graphs_text(const CanFiles& found) {
  std::string text = ";mappings=";
  for (const CanFile& file : found.files) {
    if (!is_saved(file)) {
      return bad(fmt::format("{}: among saved graphs (.pt)", file.path.string()),
                 "import CSV and .pt into folders of their own");
    }
    const fs::path mapping = file.path.parent_path() / kMapping;
    const auto crc = file_crc(mapping);
    if (!crc && crc.error().code == ErrorCode::kNotFound) {
      return fail(ErrorCode::kNotFound,
                  fmt::format("{}: not there; it says which id an index of {} stands for",
                              mapping.string(), file.path.filename().string()),
                  "put the id_mapping.pkl beside it that was saved with it");
    }
    PLIMSOLL_TRY(const std::uint32_t known, crc);
    text += fmt::format("{:08x}", known);
  }
  return text;
}

Result<void> import_saved_graphs(Governor governor, const CanImportOptions& options,
                                 const CanFiles& found, const fs::path& folder, GraphSetInfo& info,
                                 std::optional<std::vector<std::uint32_t>> vocabulary,
                                 const std::function<bool(std::int64_t, std::int64_t)>& progress) {
  if (!reader()) {
    return bad(options.out.string() + ": saved graphs are read in Python",
               "import them by plimsoll.import_graphs()");
  }
  const bool training = std::any_of(found.files.begin(), found.files.end(),
                                    [](const CanFile& file) { return !file.test; });
  std::int64_t total = 0;
  for (const CanFile& file : found.files) {
    total += file.bytes;
  }
  PLIMSOLL_TRY(Slab slab, Slab::create(governor, Tag::kOther,
                                       GraphPart::slab_bytes(options.window) +
                                           join_buffer_bytes(options.window) + 64));
  const auto buffers = GraphPart::take_buffers(slab, options.window);
  SavedImport import(governor, options, folder, progress, total);
  std::vector<std::uint32_t> known;
  for (std::size_t i = 0; i < found.files.size(); ++i) {
    PLIMSOLL_TRY(const auto ids, import.add(i, found.files[i], buffers, info));
    if (!training || !found.files[i].test) {
      known.insert(known.end(), ids.begin(), ids.end());
    }
  }
  std::sort(known.begin(), known.end());
  known.erase(std::unique(known.begin(), known.end()), known.end());
  if (info.graphs == 0) {
    return bad(options.out.string() + ": no file has a graph in it",
               "name files with graphs in them");
  }
  return join_graphs(governor, options, folder, vocabulary ? *vocabulary : known,
                     slab.take<std::byte>(join_buffer_bytes(options.window)), info,
                     [&import] { return import.report(); });
}

Result<void> join_graphs(Governor governor, const CanImportOptions& options, const fs::path& folder,
                         std::span<const std::uint32_t> vocabulary, std::span<std::byte> buffer,
                         GraphSetInfo& info, const std::function<bool()>& step) {
  info.ids = static_cast<std::int64_t>(vocabulary.size());
  info.fingerprint = graph_fingerprint(info.options, info.files);
  const std::int64_t node_bytes = info.nodes * kGraphFeatures * 4;
  PLIMSOLL_TRY_VOID(
      check_disk_room(governor, options.out,
                      node_bytes + info.edges * (kGraphFeatures * 4 + 8) + info.graphs * 40));
  return join_parts({.folder = folder,
                     .path = options.out / kGraphSetFile,
                     .vocabulary = vocabulary,
                     .buffer = buffer},
                    info, step);
}

}  // namespace plimsoll

// SPDX-License-Identifier: Apache-2.0
//
// Threads: see graph_import.h.   Memory: see graph_import.h.
#include "data/graph_import.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <map>
#include <utility>

#include <fmt/format.h>

#include "base/check.h"
#include "base/crc32c.h"
#include "data/disk_room.h"
#include "data/graph_parts.h"
#include "data/graph_set_format.h"
#include "data/pickle_reader.h"
#include "data/torch_archive.h"
#include "memory/slab.h"
#include "os/file.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;

constexpr const char* kMapping = "id_mapping.pkl";
constexpr const char* kAdvice = "restore the file, or import the CSV files it was made of";
constexpr std::int64_t kReadBytes = 256 << 10;
constexpr std::int64_t kGraphsBetweenReports = 512;
constexpr std::int64_t kLeaseStep = 1 << 20;

bool is_saved(const CanFile& file) {
  return file.path.extension() == ".pt";
}

tl::unexpected<Error> bad(const std::string& what, const char* advice = kAdvice) {
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

// ---- id_mapping.pkl ----

/// The arbitration id each index stands for; kUnknownKey for that of ids not known.
using IdOfIndex = std::map<std::int64_t, std::uint32_t>;

/// An id as a number, or as hexadecimal text. Empty for anything else.
std::optional<std::uint32_t> id_of(const PickleValue& key) {
  if (key.kind == PickleKind::kNumber && key.number >= 0 &&
      key.number < std::int64_t{kUnknownKey}) {
    return static_cast<std::uint32_t>(key.number);
  }
  if (key.kind != PickleKind::kText) {
    return std::nullopt;
  }
  std::string_view text = key.text();
  if (text == "OOV") {
    return kUnknownKey;
  }
  if (text.starts_with("0x") || text.starts_with("0X")) {
    text.remove_prefix(2);
  }
  std::uint32_t id = 0;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), id, 16);
  const bool whole = parsed.ec == std::errc{} && parsed.ptr == text.data() + text.size();
  return whole && id != kUnknownKey ? std::optional{id} : std::nullopt;
}

Result<IdOfIndex> read_mapping(Governor governor, const fs::path& graphs, std::int64_t ids_max) {
  const fs::path path = graphs.parent_path() / kMapping;
  PLIMSOLL_TRY(const File file, File::open(path, FileMode::kRead));
  PLIMSOLL_TRY(const std::int64_t size, file.size());
  PLIMSOLL_TRY(const Pickle pickle, Pickle::read(std::move(governor), file, 0, size,
                                                 {.name = path.string(),
                                                  .advice = kAdvice,
                                                  .is_record = {},
                                                  .on_record = {},
                                                  .step = {}}));
  const PickleValue& dict = pickle.value();
  const auto& items = dict.items();
  if (dict.kind != PickleKind::kDict || items.empty()) {
    return bad(path.string() + ": no dict of ids and their indices");
  }
  if (static_cast<std::int64_t>(items.size()) / 2 > ids_max + 1) {
    return bad(fmt::format("{}: more than {} different ids", path.string(), ids_max),
               "raise --ids-max (ids_max), if these are CAN ids at all");
  }
  IdOfIndex ids;
  std::vector<std::uint32_t> seen;
  for (std::size_t i = 0; i + 1 < items.size(); i += 2) {
    const auto id = id_of(items[i]);
    const PickleValue& index = items[i + 1];
    if (!id || index.kind != PickleKind::kNumber || !ids.emplace(index.number, *id).second) {
      return bad(fmt::format("{}: entry {} is not one id and its own index", path.string(), i / 2));
    }
    seen.push_back(*id);
  }
  std::sort(seen.begin(), seen.end());
  if (std::adjacent_find(seen.begin(), seen.end()) != seen.end()) {
    return bad(path.string() + ": an id with two indices");
  }
  return ids;
}

// ---- processed_graphs.pt ----

/// Where the elements of a matrix are; of a TorchTensor what a graph's can need.
struct SavedTensor {
  std::uint64_t storage{0};
  std::int64_t offset{0};
  std::uint32_t rows{0}, columns{0};
  std::uint32_t row_stride{0}, column_stride{0};
  TorchType type{TorchType::kFloat32};
  bool there{false};

  [[nodiscard]] TorchTensor whole() const {
    return {.storage = storage,
            .type = type,
            .dims = 2,
            .offset = offset,
            .shape = {rows, columns},
            .strides = {row_stride, column_stride}};
  }
};

struct SavedGraph {
  SavedTensor x{}, edge_index{}, edge_attr{}, y{};
};

/// `value` as a matrix, a vector being a row of it and a number one element; `there` is false when
/// it is no tensor, or larger than any graph's.
SavedTensor saved_tensor(const PickleValue* value) {
  SavedTensor out;
  if (value == nullptr || value->kind != PickleKind::kTensor || value->tensor().dims > 2) {
    return out;
  }
  const TorchTensor& t = value->tensor();
  const std::array<std::int64_t, 2> shape{t.dims < 2 ? 1 : t.shape[0],
                                          t.dims == 0 ? 1 : t.shape[t.dims - 1U]};
  const std::array<std::int64_t, 2> strides{t.dims < 2 ? 0 : t.strides[0],
                                            t.dims == 0 ? 0 : t.strides[t.dims - 1U]};
  for (const std::int64_t number : {shape[0], shape[1], strides[0], strides[1]}) {
    if (number > std::int64_t{UINT32_MAX}) {
      return out;
    }
  }
  out.storage = t.storage;
  out.offset = t.offset;
  out.rows = static_cast<std::uint32_t>(shape[0]);
  out.columns = static_cast<std::uint32_t>(shape[1]);
  out.row_stride = static_cast<std::uint32_t>(strides[0]);
  out.column_stride = static_cast<std::uint32_t>(strides[1]);
  out.type = t.type;
  out.there = true;
  return out;
}

// The classes of such a file; a dataset is an object that holds the list.
bool is_record(std::string_view module, std::string_view name) {
  const bool geometric = module.starts_with("torch_geometric.data");
  return (geometric && (name == "Data" || name == "GlobalStorage")) || name == "GraphDataset";
}

double element(std::span<const std::byte> bytes, TorchType type, std::size_t i) {
  const auto as = [&](auto value) {
    std::memcpy(&value, bytes.data() + i * sizeof(value), sizeof(value));
    return static_cast<double>(value);
  };
  switch (type) {
    case TorchType::kFloat32:
      return as(0.0F);
    case TorchType::kFloat64:
      return as(0.0);
    case TorchType::kInt64:
      return as(std::int64_t{0});
    case TorchType::kInt32:
      return as(std::int32_t{0});
    case TorchType::kInt16:
      return as(std::int16_t{0});
    case TorchType::kInt8:
      return as(std::int8_t{0});
    case TorchType::kUint8:
    case TorchType::kBool:
      return as(std::uint8_t{0});
    case TorchType::kFloat16:
    case TorchType::kBFloat16:
      break;
  }
  return std::nan("");  // Halves: no graph was ever saved so, and NaN is refused where it matters.
}

/// The graphs of one file, in the order of its list.
class SavedGraphs {
 public:
  static Result<SavedGraphs> open(Governor governor, const fs::path& path,
                                  const std::function<bool()>& step);
  [[nodiscard]] std::int64_t count() const noexcept {
    return static_cast<std::int64_t>(order_.size());
  }
  /// Graph `number` of the list, valid until the next. Errors: kInvalidArgument naming it.
  Result<GraphRows> read(std::int64_t number, const IdOfIndex& ids, std::int64_t window);

 private:
  SavedGraphs(TorchArchive archive, Lease lease)
      : archive_(std::move(archive)), lease_(std::move(lease)) {}
  Result<void> take_record(PickleNode& record);
  Result<void> take_list(const PickleValue& value);
  Result<void> read_x(const SavedGraph& graph, const IdOfIndex& ids, const std::string& name);
  Result<void> read_edges(const SavedGraph& graph, const std::string& name);

  TorchArchive archive_;
  Lease lease_;
  std::vector<SavedGraph> graphs_;    // In the order in which they were complete.
  std::vector<std::uint32_t> order_;  // Of graphs_, as in the list.
  std::vector<float> x_;              // Of the graph read last.
  std::vector<float> edge_attr_;
  std::vector<std::int32_t> ends_;
};

// A Data has its tensors in its _store's _mapping, or (torch_geometric 1) in its own attributes.
Result<void> SavedGraphs::take_record(PickleNode& record) {
  const PickleValue& state = record.items.front();
  if (record.text.ends_with(" GlobalStorage")) {
    const PickleValue* mapping = state.find("_mapping");
    if (mapping == nullptr || mapping->kind != PickleKind::kDict) {
      return bad(archive_.name() + ": a storage of no graph");
    }
    const PickleValue kept = *mapping;
    record.items.assign(1, kept);  // Without its _parent, which would hold itself.
    return {};
  }
  if (!record.text.ends_with(" Data")) {
    return {};
  }
  const PickleValue* store = state.find("_store");
  const PickleValue* mapping = &state;
  if (store != nullptr && store->items().size() == 1) {
    mapping = &store->items().front();
  }
  if (graphs_.size() == graphs_.capacity()) {
    const std::size_t room = std::max<std::size_t>(graphs_.size() * 3 / 2, 1024);
    const auto bytes = static_cast<std::int64_t>((room + graphs_.size()) * sizeof(SavedGraph) +
                                                 room * sizeof(std::uint32_t));
    PLIMSOLL_TRY_VOID(lease_.grow(kLeaseStep + bytes));
    graphs_.reserve(room);
  }
  record.handle = static_cast<std::int64_t>(graphs_.size());
  graphs_.push_back({.x = saved_tensor(mapping->find("x")),
                     .edge_index = saved_tensor(mapping->find("edge_index")),
                     .edge_attr = saved_tensor(mapping->find("edge_attr")),
                     .y = saved_tensor(mapping->find("y"))});
  record.items.clear();
  return {};
}

Result<void> SavedGraphs::take_list(const PickleValue& value) {
  const PickleValue* list = &value;
  if (value.kind == PickleKind::kRecord && value.node->handle < 0 && !value.items().empty()) {
    const auto& state = value.items().front().items();  // A dataset: key, value, …
    for (std::size_t i = 1; i < state.size(); i += 2) {
      if (state[i].kind == PickleKind::kList && !state[i].items().empty()) {
        list = &state[i];
        break;
      }
    }
  }
  if (list->kind != PickleKind::kList) {
    return bad(archive_.name() + ": no list of graphs");
  }
  order_.reserve(list->items().size());
  for (const PickleValue& item : list->items()) {
    if (item.kind != PickleKind::kRecord || item.node->handle < 0) {
      return bad(
          fmt::format("{}: item {} of its list is no graph", archive_.name(), order_.size()));
    }
    order_.push_back(static_cast<std::uint32_t>(item.node->handle));
  }
  return {};
}

Result<SavedGraphs> SavedGraphs::open(Governor governor, const fs::path& path,
                                      const std::function<bool()>& step) {
  PLIMSOLL_TRY(auto archive, TorchArchive::open(governor, path, kAdvice));
  PLIMSOLL_TRY(auto lease, governor.reserve(Tag::kOther, kLeaseStep));
  SavedGraphs graphs(std::move(archive), std::move(lease));
  PLIMSOLL_TRY(
      const Pickle pickle,
      graphs.archive_.pickle(
          governor, {.name = {},
                     .advice = {},
                     .is_record = is_record,
                     .on_record = [&](PickleNode& node) { return graphs.take_record(node); },
                     .step = step}));
  PLIMSOLL_TRY_VOID(graphs.take_list(pickle.value()));
  return graphs;
}

Result<void> SavedGraphs::read_x(const SavedGraph& graph, const IdOfIndex& ids,
                                 const std::string& name) {
  PLIMSOLL_TRY(const auto bytes, archive_.elements(graph.x.whole()));
  x_.resize(std::size_t{graph.x.rows} * kGraphFeatures);
  for (std::size_t i = 0; i < x_.size(); ++i) {
    const double value = element(bytes, graph.x.type, i);
    x_[i] = static_cast<float>(value);
    if (i % kGraphFeatures == 0) {
      const bool index = value >= 0 && value <= 1e9 && value == std::floor(value);
      const auto found = index ? ids.find(static_cast<std::int64_t>(value)) : ids.end();
      if (found == ids.end()) {
        return bad(fmt::format("{}: node {} has {} for an id, which {} does not know", name,
                               i / kGraphFeatures, value, kMapping),
                   "put the id_mapping.pkl beside it that was saved with it");
      }
      std::memcpy(&x_[i], &found->second, sizeof(found->second));
    }
  }
  return {};
}

Result<void> SavedGraphs::read_edges(const SavedGraph& graph, const std::string& name) {
  const std::size_t edges = graph.edge_index.columns;
  PLIMSOLL_TRY(const auto ends, archive_.elements(graph.edge_index.whole()));
  ends_.resize(2 * edges);
  for (std::size_t i = 0; i < 2 * edges; ++i) {
    const double place = element(ends, graph.edge_index.type, i);
    if (!(place >= 0 && place < graph.x.rows && place == std::floor(place))) {
      return bad(fmt::format("{}: edge {} is between nodes it does not have", name, i % edges));
    }
    ends_[i % edges * 2 + i / edges] = static_cast<std::int32_t>(place);
  }
  edge_attr_.assign(edges * kGraphFeatures, 0.0F);
  if (graph.edge_attr.there) {
    PLIMSOLL_TRY(const auto bytes, archive_.elements(graph.edge_attr.whole()));
    for (std::size_t i = 0; i < edge_attr_.size(); ++i) {
      edge_attr_[i] = static_cast<float>(element(bytes, graph.edge_attr.type, i));
    }
  }
  return {};
}

Result<GraphRows> SavedGraphs::read(std::int64_t number, const IdOfIndex& ids,
                                    std::int64_t window) {
  const SavedGraph& graph = graphs_[order_[static_cast<std::size_t>(number)]];
  const std::string name = fmt::format("{}: graph {}", archive_.name(), number);
  const auto halves = [](const SavedTensor& t) {
    return t.type == TorchType::kFloat16 || t.type == TorchType::kBFloat16;
  };
  if (!graph.x.there || graph.x.columns != kGraphFeatures || graph.x.rows == 0 || halves(graph.x)) {
    return bad(name + " has no x of 11 columns");
  }
  if (!graph.edge_index.there || graph.edge_index.rows != 2) {
    return bad(name + " has no edge_index of two rows");
  }
  if (graph.edge_attr.there &&
      (graph.edge_attr.columns != kGraphFeatures ||
       graph.edge_attr.rows != graph.edge_index.columns || halves(graph.edge_attr))) {
    return bad(name + " has an edge_attr that is not 11 columns for each edge");
  }
  if (!graph.y.there || graph.y.rows != 1 || graph.y.columns != 1) {
    return bad(name + " has no y of one number");
  }
  if (graph.x.rows > window + 1 || graph.edge_index.columns > window) {
    return bad(fmt::format("{} has {} nodes and {} edges, more than a window of {} frames can",
                           name, graph.x.rows, graph.edge_index.columns, window),
               "pass --window (window) as it was when the graphs were made");
  }
  PLIMSOLL_TRY_VOID(read_x(graph, ids, name));
  PLIMSOLL_TRY_VOID(read_edges(graph, name));
  PLIMSOLL_TRY(const auto label, archive_.elements(graph.y.whole()));
  return GraphRows{.x = x_,
                   .edge_attr = edge_attr_,
                   .ends = ends_,
                   .attack = element(label, graph.y.type, 0) != 0.0};
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

  Result<void> add(std::size_t number, const CanFile& file, const IdOfIndex& ids,
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

Result<void> SavedImport::add(std::size_t number, const CanFile& file, const IdOfIndex& ids,
                              const GraphPart::Buffers& buffers, GraphSetInfo& info) {
  const std::function<bool()> step = [this] { return report(); };
  PLIMSOLL_TRY(auto graphs, SavedGraphs::open(governor_, file.path, step));
  PLIMSOLL_TRY(GraphPart part, GraphPart::create(folder_, number, buffers, options_.window));
  for (std::int64_t g = 0; g < graphs.count(); ++g) {
    PLIMSOLL_TRY(const GraphRows rows, graphs.read(g, ids, options_.window));
    PLIMSOLL_TRY_VOID(part.append(rows));
    const double share = static_cast<double>(g) / static_cast<double>(graphs.count());
    if (g % kGraphsBetweenReports == 0 &&
        !report(static_cast<std::int64_t>(share * static_cast<double>(file.bytes)))) {
      return bad(options_.out.string() + ": import cancelled", "");
    }
  }
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
  return {};
}

}  // namespace

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
  const bool training = std::any_of(found.files.begin(), found.files.end(),
                                    [](const CanFile& file) { return !file.test; });
  std::vector<IdOfIndex> ids;
  std::vector<std::uint32_t> known;
  std::int64_t total = 0;
  for (const CanFile& file : found.files) {
    PLIMSOLL_TRY(ids.emplace_back(), read_mapping(governor, file.path, options.ids_max));
    for (const auto& [index, id] : ids.back()) {
      if (id != kUnknownKey && (!training || !file.test)) {
        known.push_back(id);
      }
    }
    total += file.bytes;
  }
  std::sort(known.begin(), known.end());
  known.erase(std::unique(known.begin(), known.end()), known.end());
  PLIMSOLL_TRY(Slab slab, Slab::create(governor, Tag::kOther,
                                       GraphPart::slab_bytes(options.window) +
                                           join_buffer_bytes(options.window) + 64));
  const auto buffers = GraphPart::take_buffers(slab, options.window);
  SavedImport import(governor, options, folder, progress, total);
  for (std::size_t i = 0; i < found.files.size(); ++i) {
    PLIMSOLL_TRY_VOID(import.add(i, found.files[i], ids[i], buffers, info));
  }
  if (info.graphs == 0) {
    return bad(options.out.string() + ": no file has a graph in it");
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

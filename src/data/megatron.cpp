// SPDX-License-Identifier: Apache-2.0
#include "data/megatron.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <optional>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "base/check.h"
#include "base/crc32c.h"
#include "data/buffered_file.h"
#include "memory/slab.h"
#include "os/directories.h"
#include "os/file.h"
#include "plimsoll/token_set.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;
static_assert(std::endian::native == std::endian::little);

constexpr std::array<char, 9> kMegatronMagic{'M', 'M', 'I', 'D', 'I', 'D', 'X', '\0', '\0'};
constexpr std::int64_t kIndexHeaderBytes = 34;
constexpr std::int64_t kMegatronBuffer = 64 << 10;
constexpr std::int64_t kWideFrom = 65500;  // Vocabularies from here on have ids of 4 bytes.
enum MegatronDtype : std::uint8_t { kU8 = 1, kI8, kI16, kI32, kI64, kF64, kF32, kU16 };

struct MegatronNames {
  fs::path index{};
  fs::path ids{};
};

MegatronNames names_of(const fs::path& prefix) {
  fs::path stem = prefix;
  if (stem.extension() == ".idx" || stem.extension() == ".bin") {
    stem.replace_extension();
  }
  MegatronNames names{.index = stem, .ids = stem};
  names.index += ".idx";
  names.ids += ".bin";
  return names;
}

template <class T>
std::span<const std::byte> bytes_of_value(const T& value) {
  return std::as_bytes(std::span(&value, 1));
}

// Two files under other names until both are whole; what is left of them is removed.
struct MegatronFiles {
  explicit MegatronFiles(MegatronNames wanted) : names(std::move(wanted)), partial(names) {
    partial.index += ".partial";
    partial.ids += ".partial";
  }
  MegatronFiles(const MegatronFiles&) = delete;
  MegatronFiles& operator=(const MegatronFiles&) = delete;
  ~MegatronFiles() {
    static_cast<void>(remove_file(partial.index));
    static_cast<void>(remove_file(partial.ids));
  }
  // The index last: a reader begins with it.
  Result<void> finish() {
    PLIMSOLL_TRY_VOID(index.sync());
    PLIMSOLL_TRY_VOID(ids.sync());
    PLIMSOLL_TRY_VOID(rename_durable(partial.ids, names.ids));
    return rename_durable(partial.index, names.index);
  }
  MegatronNames names;
  MegatronNames partial;
  File index{};
  File ids{};
};

template <class Id>
Result<void> put_row(BufferedFile& out, std::span<const std::int32_t> ids) {
  std::array<Id, 4096> some;
  while (!ids.empty()) {
    const std::size_t count = std::min(ids.size(), some.size());
    std::transform(ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(count), some.begin(),
                   [](std::int32_t id) { return static_cast<Id>(id); });
    PLIMSOLL_TRY_VOID(out.put(std::as_bytes(std::span(some).first(count))));
    ids = ids.subspan(count);
  }
  return {};
}

tl::unexpected<Error> megatron_cancelled(const fs::path& path) {
  return fail(ErrorCode::kInvalidArgument, path.string() + ": cancelled");
}

// ---- Reading ----

// MegatronArray of an array in a file, asked for in order.
template <class T>
class MegatronArray {
 public:
  MegatronArray(const File& file, std::int64_t at, std::int64_t count, std::span<std::byte> buffer)
      : file_(&file), at_(at), count_(count), buffer_(buffer) {}
  Result<T> operator[](std::int64_t index) {
    constexpr auto kSize = static_cast<std::int64_t>(sizeof(T));
    const auto room = static_cast<std::int64_t>(buffer_.size()) / kSize;
    if (index < first_ || index >= first_ + held_) {
      first_ = index;
      held_ = std::min(room, count_ - index);
      PLIMSOLL_TRY_VOID(file_->read_at(at_ + first_ * kSize,
                                       buffer_.first(static_cast<std::size_t>(held_ * kSize))));
    }
    T value{};
    std::memcpy(&value, buffer_.data() + (index - first_) * kSize, sizeof(T));
    return value;
  }

 private:
  const File* file_;
  std::int64_t at_;
  std::int64_t count_;
  std::span<std::byte> buffer_;
  std::int64_t first_{0};
  std::int64_t held_{0};
};

struct MegatronIndex {
  MegatronNames names{};
  File index{};
  File ids{};
  std::int64_t ids_bytes{0};
  MegatronDtype dtype{kU16};
  int id_bytes{2};
  std::int64_t sequences{0};
  std::int64_t documents{0};

  [[nodiscard]] tl::unexpected<Error> corrupt(const std::string& what) const {
    return fail(ErrorCode::kCorrupt, fmt::format("{}: {}", names.index.string(), what));
  }
  [[nodiscard]] tl::unexpected<Error> wrong(const std::string& what) const {
    return fail(ErrorCode::kInvalidArgument, fmt::format("{}: {}", names.ids.string(), what));
  }
};

Result<MegatronIndex> open_megatron(const fs::path& prefix) {
  MegatronIndex in{.names = names_of(prefix)};
  PLIMSOLL_TRY(in.index, File::open(in.names.index, FileMode::kRead));
  PLIMSOLL_TRY(in.ids, File::open(in.names.ids, FileMode::kRead));
  PLIMSOLL_TRY(in.ids_bytes, in.ids.size());
  PLIMSOLL_TRY(const std::int64_t bytes, in.index.size());
  std::array<std::byte, kIndexHeaderBytes> header{};
  if (bytes < kIndexHeaderBytes) {
    return in.corrupt("no index of Megatron's");
  }
  PLIMSOLL_TRY_VOID(in.index.read_at(0, header));
  const auto number = [&](std::size_t at) {
    std::uint64_t value = 0;
    std::memcpy(&value, header.data() + at, sizeof(value));
    return value;
  };
  if (std::memcmp(header.data(), kMegatronMagic.data(), kMegatronMagic.size()) != 0 ||
      number(9) != 1) {
    return in.corrupt("no index of Megatron's, or of another version than 1");
  }
  in.dtype = static_cast<MegatronDtype>(header[17]);
  constexpr std::array<int, 9> kSizes{0, 1, 1, 2, 4, 8, 0, 0, 2};
  in.id_bytes = in.dtype < kSizes.size() ? kSizes[in.dtype] : 0;
  if (in.id_bytes == 0) {
    return in.wrong(fmt::format("its ids are of type {}, which are no whole numbers",
                                static_cast<int>(in.dtype)));
  }
  const auto most = static_cast<std::uint64_t>(bytes);
  if (number(18) > most / 12 || number(26) > most / 8 || number(26) == 0) {
    return in.corrupt("it is shorter than what it says it holds");
  }
  in.sequences = static_cast<std::int64_t>(number(18));
  in.documents = static_cast<std::int64_t>(number(26)) - 1;
  // Behind it there may be i8 [S] of modes.
  if (bytes < kIndexHeaderBytes + 12 * in.sequences + 8 * (in.documents + 1)) {
    return in.corrupt("it is shorter than what it says it holds");
  }
  return in;
}

template <class T>
bool widen(std::span<const std::byte> bytes, std::vector<std::uint32_t>& out) {
  for (std::size_t at = 0; at < bytes.size(); at += sizeof(T)) {
    T value{};
    std::memcpy(&value, bytes.data() + at, sizeof(T));
    if constexpr (std::is_signed_v<T>) {
      if (value < 0 ||
          static_cast<std::int64_t>(value) > std::numeric_limits<std::int32_t>::max()) {
        return false;
      }
    }
    out.push_back(static_cast<std::uint32_t>(value));
  }
  return true;
}

// False for an id that is none.
bool widen(MegatronDtype dtype, std::span<const std::byte> bytes, std::vector<std::uint32_t>& out) {
  out.clear();
  switch (dtype) {
    case kU8:
      return widen<std::uint8_t>(bytes, out);
    case kI8:
      return widen<std::int8_t>(bytes, out);
    case kI16:
      return widen<std::int16_t>(bytes, out);
    case kI32:
      return widen<std::int32_t>(bytes, out);
    case kI64:
      return widen<std::int64_t>(bytes, out);
    default:
      return widen<std::uint16_t>(bytes, out);
  }
}

// Ids of a document, some at a time, and its end.
struct MegatronVisitor {
  std::function<Result<void>(std::span<const std::uint32_t>)> some{};
  std::function<Result<void>()> end{};
};

Result<void> visit_documents(const MegatronIndex& in, std::array<std::span<std::byte>, 4> buffers,
                             const MegatronVisitor& visitor, const MegatronProgress& progress) {
  MegatronArray<std::int32_t> lengths(in.index, kIndexHeaderBytes, in.sequences, buffers[0]);
  MegatronArray<std::int64_t> places(in.index, kIndexHeaderBytes + 4 * in.sequences, in.sequences,
                                     buffers[1]);
  MegatronArray<std::int64_t> begins(in.index, kIndexHeaderBytes + 12 * in.sequences,
                                     in.documents + 1, buffers[2]);
  std::vector<std::uint32_t> ids;
  ids.reserve(buffers[3].size());
  for (std::int64_t document = 0; document < in.documents; ++document) {
    PLIMSOLL_TRY(const std::int64_t begin, begins[document]);
    PLIMSOLL_TRY(const std::int64_t end, begins[document + 1]);
    if (begin < 0 || end < begin || end > in.sequences) {
      return in.corrupt(fmt::format("document {} is of sequences [{}, {}) of {}", document, begin,
                                    end, in.sequences));
    }
    for (std::int64_t k = begin; k < end; ++k) {
      PLIMSOLL_TRY(const std::int32_t length, lengths[k]);
      PLIMSOLL_TRY(std::int64_t at, places[k]);
      std::int64_t left = std::int64_t{length} * in.id_bytes;
      if (length < 0 || at < 0 || left > in.ids_bytes || at > in.ids_bytes - left) {
        return in.corrupt(fmt::format("sequence {} is not in {}", k, in.names.ids.string()));
      }
      while (left > 0) {
        const auto part = buffers[3].first(
            static_cast<std::size_t>(std::min(left, static_cast<std::int64_t>(buffers[3].size()))));
        PLIMSOLL_TRY_VOID(in.ids.read_at(at, part));
        if (!widen(in.dtype, part, ids)) {
          return in.wrong(fmt::format("an id of document {} is below 0, or too large", document));
        }
        PLIMSOLL_TRY_VOID(visitor.some(ids));
        at += static_cast<std::int64_t>(part.size());
        left -= static_cast<std::int64_t>(part.size());
      }
    }
    PLIMSOLL_TRY_VOID(visitor.end());
    if (document % 256 == 0 && progress && !progress(document, in.documents)) {
      return megatron_cancelled(in.names.index);
    }
  }
  return {};
}

// One above the largest id.
Result<std::int64_t> find_vocabulary(const MegatronIndex& in,
                                     std::array<std::span<std::byte>, 4> buffers,
                                     const MegatronProgress& progress) {
  std::int64_t vocabulary = 1;
  const auto look = [&](std::span<const std::uint32_t> ids) {
    for (const std::uint32_t id : ids) {
      vocabulary = std::max(vocabulary, std::int64_t{id} + 1);
    }
    return Result<void>{};
  };
  PLIMSOLL_TRY_VOID(visit_documents(in, buffers, {look, [] { return Result<void>{}; }}, progress));
  return vocabulary;
}

// Everything but the names.
Result<void> write_columns(const TokenSet& set, MegatronFiles& files, Slab& slab,
                           const MegatronProgress& progress) {
  const TokenSetInfo& info = set.info();
  const bool wide = info.vocabulary >= kWideFrom;
  const auto column = [&](File& file, std::int64_t at) {
    return BufferedFile{
        .file = &file, .buffer = slab.take<std::byte>(kMegatronBuffer), .written = at};
  };
  std::array columns{column(files.index, 0), column(files.index, kIndexHeaderBytes + 4 * info.rows),
                     column(files.index, kIndexHeaderBytes + 12 * info.rows), column(files.ids, 0)};
  auto& [lengths, places, documents, ids] = columns;
  PLIMSOLL_TRY_VOID(lengths.put(std::as_bytes(std::span(kMegatronMagic))));
  PLIMSOLL_TRY_VOID(lengths.put(bytes_of_value(std::uint64_t{1})));
  PLIMSOLL_TRY_VOID(lengths.put(bytes_of_value(wide ? kI32 : kU16)));
  PLIMSOLL_TRY_VOID(lengths.put(bytes_of_value(info.rows)));
  PLIMSOLL_TRY_VOID(lengths.put(bytes_of_value(info.rows + 1)));
  std::vector<std::int32_t> row;
  std::vector<std::uint8_t> trained;
  std::int64_t at = 0;
  for (std::int64_t k = 0; k < info.rows; ++k) {
    PLIMSOLL_TRY(const std::int64_t length, set.length(k));
    row.resize(static_cast<std::size_t>(length));
    trained.resize(row.size());
    PLIMSOLL_TRY_VOID(set.read(k, row, trained));
    PLIMSOLL_TRY_VOID(lengths.put(bytes_of_value(static_cast<std::int32_t>(length))));
    PLIMSOLL_TRY_VOID(places.put(bytes_of_value(at)));
    PLIMSOLL_TRY_VOID(documents.put(bytes_of_value(k)));
    PLIMSOLL_TRY_VOID(wide ? put_row<std::int32_t>(ids, row) : put_row<std::uint16_t>(ids, row));
    at += length * (wide ? 4 : 2);
    if (k % 256 == 0 && progress && !progress(k, info.rows)) {
      return megatron_cancelled(files.names.index);
    }
  }
  PLIMSOLL_TRY_VOID(documents.put(bytes_of_value(info.rows)));
  for (BufferedFile& one : columns) {
    PLIMSOLL_TRY_VOID(one.flush());
  }
  return {};
}

}  // namespace

Result<std::int64_t> export_megatron(Governor governor, const fs::path& tokens,
                                     const fs::path& prefix, const MegatronProgress& progress) {
  PLIMSOLL_TRY(const TokenSet set, TokenSet::open(tokens));
  const TokenSetInfo& info = set.info();
  PLIMSOLL_TRY(Slab slab, Slab::create(governor, Tag::kOther, 4 * kMegatronBuffer));
  // A row's bytes as they are read, its ids and which are trained on.
  PLIMSOLL_TRY(const Lease row_lease, governor.reserve(Tag::kOther, 10 * info.longest_row + 4096));
  MegatronFiles files(names_of(prefix));
  for (const fs::path& name : {files.names.index, files.names.ids}) {
    std::error_code status;
    if (fs::exists(name, status)) {
      return fail(ErrorCode::kInvalidArgument, name.string() + " exists",
                  "name new files with out (--out)");
    }
  }
  PLIMSOLL_TRY(files.index, File::open(files.partial.index, FileMode::kCreate));
  PLIMSOLL_TRY(files.ids, File::open(files.partial.ids, FileMode::kCreate));
  PLIMSOLL_TRY_VOID(write_columns(set, files, slab, progress));
  PLIMSOLL_TRY_VOID(files.finish());
  return info.rows;
}

Result<std::int64_t> import_megatron(Governor governor, const MegatronImport& options,
                                     const MegatronProgress& progress) {
  PLIMSOLL_TRY(const MegatronIndex in, open_megatron(options.prefix));
  PLIMSOLL_TRY(Slab slab, Slab::create(governor, Tag::kOther, 4 * kMegatronBuffer));
  PLIMSOLL_TRY(const Lease ids_lease, governor.reserve(Tag::kOther, 4 * kMegatronBuffer));
  std::array<std::span<std::byte>, 4> buffers;
  for (auto& buffer : buffers) {
    buffer = slab.take<std::byte>(kMegatronBuffer);
  }
  std::int64_t vocabulary = options.vocabulary;
  if (vocabulary == 0) {
    PLIMSOLL_TRY(vocabulary, find_vocabulary(in, buffers, progress));
  }
  PLIMSOLL_TRY(TokenWriter writer, TokenWriter::open(governor, {.path = options.out,
                                                                .vocabulary = vocabulary,
                                                                .fingerprint = "megatron",
                                                                .rebuild = true}));
  std::uint32_t crc = 0;
  std::int64_t document_tokens = 0;
  std::vector<TokenSpan> all(1);
  const auto append = [&](std::span<const std::uint32_t> ids) -> Result<void> {
    document_tokens += static_cast<std::int64_t>(ids.size());
    if (document_tokens > kRowTokensMost) {
      return in.wrong(fmt::format("a document of more than {} tokens", kRowTokensMost));
    }
    crc = crc32c(std::as_bytes(ids), crc);
    all[0] = {0, static_cast<std::int64_t>(ids.size())};
    return writer.append(ids, all);
  };
  const auto end = [&]() -> Result<void> {
    document_tokens = 0;
    PLIMSOLL_TRY_VOID(writer.end_row());
    return {};
  };
  PLIMSOLL_TRY_VOID(visit_documents(in, buffers, {append, end}, progress));
  const TokenSetInfo info = writer.info();
  const nlohmann::ordered_json about{
      {"format", "megatron"},
      {"inputs",
       {{{"name", in.names.ids.filename().string()}, {"bytes", in.ids_bytes}, {"crc32c", crc}}}},
      {"rows", info.rows}};
  PLIMSOLL_TRY_VOID(writer.finish(
      about.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace),
      fmt::format("megatron-{:08x}-{}-{}-{}", crc, info.rows, info.tokens, vocabulary)));
  return info.rows;
}

}  // namespace plimsoll

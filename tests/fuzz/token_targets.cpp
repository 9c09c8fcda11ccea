// SPDX-License-Identifier: Apache-2.0
//
// Targets for the file of a token set, for the journal of one that is being made, for lines of
// chats, and for Megatron's index.
#include <cstring>
#include <filesystem>

#include <fmt/format.h>

#include "base/crc32c.h"
#include "data/chat_reader.h"
#include "data/megatron.h"
#include "data/token_set_format.h"
#include "plimsoll/token_set.h"
#include "tests/fuzz/target.h"
#include "tests/support/array_files.h"
#include "tests/support/feature_set.h"

namespace plimsoll::fuzz {
namespace {

namespace fs = std::filesystem;
constexpr std::int64_t kVocabulary = 1000;
constexpr std::int64_t kRows = 20;

// A small set, and work under way with a commit.
class Tokens {
 public:
  static Tokens& get() {
    static Tokens tokens;
    return tokens;
  }
  // Rows from where it stands to the end; throws what fails.
  void work(const fs::path& path, std::int64_t until) {
    auto writer = TokenWriter::open(governor, {path, kVocabulary, "fuzz"}).or_throw();
    if (writer.whole()) {
      return;
    }
    for (std::int64_t row = writer.info().rows; row < until; ++row) {
      std::vector<std::uint32_t> ids;
      for (std::int64_t i = 0; i <= row * 3 % 50; ++i) {
        ids.push_back(static_cast<std::uint32_t>((row * 31 + i * 7) % kVocabulary));
      }
      writer.append(ids, std::array<TokenSpan, 1>{{{0, 1}}}).or_throw();
      static_cast<void>(writer.end_row().or_throw());
      writer.commit("here").or_throw();
    }
    if (until == kRows) {
      writer.finish("{}").or_throw();
    }
  }
  test::ScratchDirectory scratch{};
  Governor governor{process_governor()};
  std::string good{};
  std::string journal{};
  std::string rows{};
  std::string index{};
  std::string megatron_index{};
  std::string megatron_ids{};

 private:
  Tokens() {
    work(scratch / "good", kRows);
    good = test::slurp(scratch / "good");
    work(scratch / "half", kRows / 2);
    journal = test::slurp(scratch / "half.partial" / "journal");
    rows = test::slurp(scratch / "half.partial" / "rows");
    index = test::slurp(scratch / "half.partial" / "index");
    static_cast<void>(export_megatron(governor, scratch / "good", scratch / "seed", {}).or_throw());
    megatron_index = test::slurp(scratch / "seed.idx");
    megatron_ids = test::slurp(scratch / "seed.bin");
  }
};

// Whatever opens hands out ids of the vocabulary.
void read_set(const fs::path& path) {
  const auto set = TokenSet::open(path);
  if (!set) {
    if (set.error().code != ErrorCode::kCorrupt) {
      contradiction("token_set", set.error().to_string());
    }
    return;
  }
  for (std::int64_t row = 0; row < std::min<std::int64_t>(set->rows(), 100); ++row) {
    const auto length = set->length(row);
    if (!length) {
      if (length.error().code != ErrorCode::kCorrupt) {
        contradiction("token_set", length.error().to_string());
      }
      continue;
    }
    std::vector<std::int32_t> ids(static_cast<std::size_t>(*length));
    std::vector<std::uint8_t> trained(ids.size());
    const auto read = set->read(row, ids, trained);
    if (!read && read.error().code != ErrorCode::kCorrupt) {
      contradiction("token_set", read.error().to_string());
    }
    for (const std::int32_t id : ids) {
      if (read && (id < 0 || id >= set->info().vocabulary)) {
        contradiction("token_set", "an id beyond the vocabulary");
      }
    }
  }
}

// Makes the checksums sound again: of the header, of its text, and of every row that can be found.
void repair(std::string& text) {
  constexpr std::size_t kCrcAt = 84;
  constexpr std::size_t kAboutCrcAt = 80;
  if (text.size() < static_cast<std::size_t>(kRowFileHeaderBytes)) {
    return;
  }
  const auto bytes = std::as_writable_bytes(std::span(text));
  const auto number = [&](std::size_t at) {
    std::int64_t value = 0;
    std::memcpy(&value, text.data() + at, sizeof(value));
    return value;
  };
  const auto put = [&](std::size_t at, std::uint32_t crc) {
    std::memcpy(text.data() + at, &crc, sizeof(crc));
  };
  const auto size = static_cast<std::int64_t>(text.size());
  const std::int64_t about_at = number(64);
  if (about_at >= 0 && about_at <= size) {
    put(kAboutCrcAt, crc32c(bytes.subspan(static_cast<std::size_t>(about_at))));
  }
  put(kCrcAt, 0);
  put(kCrcAt, crc32c(bytes.first(static_cast<std::size_t>(kRowFileHeaderBytes))));
  const std::int64_t index_at = number(56);
  const int id_bytes = text[12];
  for (std::int64_t row = 0; index_at >= 0 && row < kRows && index_at + row * 16 + 16 <= size;
       ++row) {
    RowEntry entry;
    char* const at = text.data() + index_at + row * 16;
    std::memcpy(&entry, at, sizeof(entry));
    const std::int64_t most = token_row_bytes(entry.length, id_bytes == 4 ? 4 : 2);
    if (entry.offset >= 0 && entry.offset <= size && most <= size - entry.offset) {
      entry.crc = row_crc(row, entry,
                          crc32c(bytes.subspan(static_cast<std::size_t>(entry.offset),
                                               static_cast<std::size_t>(most))));
      std::memcpy(at, &entry, sizeof(entry));
    }
  }
}

void token_set(std::span<const std::byte> bytes) {
  Tokens& tokens = Tokens::get();
  const fs::path path = tokens.scratch / "fuzz";
  std::string text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  test::spill(path, text);
  read_set(path);
  repair(text);
  test::spill(path, text);
  read_set(path);
}

// Work with a damaged journal, its checksum sound or not, is gone on with or begun anew, and ends
// in a set that is whole.
void token_journal(std::span<const std::byte> bytes) {
  Tokens& tokens = Tokens::get();
  const fs::path path = tokens.scratch / "again";
  std::string text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  for (const bool repaired : {false, true}) {
    if (repaired && text.size() > 9) {
      const std::string crc =
          fmt::format("{:08x}", crc32c(std::as_bytes(std::span(text)).subspan(9)));
      text.replace(0, crc.size(), crc);
    }
    std::error_code ignored;
    fs::remove(path, ignored);
    fs::create_directories(path.string() + ".partial");
    test::spill(path.string() + ".partial/journal", text);
    test::spill(path.string() + ".partial/rows", tokens.rows);
    test::spill(path.string() + ".partial/index", tokens.index);
    try {
      tokens.work(path, kRows);
    } catch (const Exception& error) {
      contradiction("token_journal", error.what());
    }
    const auto made = TokenSet::inspect(path);
    if (!made || (!repaired && test::slurp(path) != tokens.good)) {
      contradiction("token_journal", "work that goes on ends in another set");
    }
  }
}

// ---- Lines of chats ----

ChatPieces chatml() {
  ChatPieces pieces{.stripped = {"user"}, .triggers = {"</think>"}};
  const std::vector<std::string> roles{"", "system", "user", "assistant"};
  for (const std::string& before : roles) {
    for (const std::string& behind : roles) {
      for (std::size_t k = 0; k <= 2; ++k) {
        for (std::size_t left = 0; left <= 2; ++left) {
          const std::string end = before.empty() ? "" : "<|im_end|>\n";
          const std::string begin = behind.empty() ? "" : "<|im_start|>" + behind + "\n";
          pieces.gaps[chat_gap_key(before, behind, k, k + left)] = {
              .text = end + begin,
              .after = before == "assistant" ? 10 : 0,
              .split = static_cast<std::int64_t>(end.size())};
        }
      }
    }
  }
  return pieces;
}

struct Texts {
  std::vector<std::string> all{};
  std::string report{};
  bool failed{false};
};

// All texts of a file; `again`: a reader for each piece, which goes on from the state of the last.
Texts read_chats(const fs::path& path, bool again) {
  Tokens& tokens = Tokens::get();
  const auto fresh = [&] {
    ChatReader reader =
        ChatReader::open(
            tokens.governor,
            {.files = {path}, .line_bytes_max = 400, .text_bytes_max = 200, .errors_max = 1 << 20})
            .or_throw();
    reader.set_pieces(chatml());
    return reader;
  };
  Texts texts;
  ChatReader reader = fresh();
  for (;;) {
    const auto some = reader.next(60, 2);
    if (!some) {
      // A zstd's window may be too wide.
      if (some.error().code != ErrorCode::kCorrupt &&
          some.error().code != ErrorCode::kInvalidArgument) {
        contradiction("chat_lines", some.error().to_string());
      }
      texts.failed = true;
      return texts;
    }
    if (some->empty()) {
      texts.report = reader.report();
      return texts;
    }
    for (const ChatText& text : *some) {
      std::string told = fmt::format("{} {} {}", static_cast<int>(text.kind), text.line, text.text);
      std::int64_t before = 0;
      for (const TokenSpan& span : text.trained) {
        if (span.begin < before || span.end <= span.begin ||
            span.end > static_cast<std::int64_t>(text.text.size())) {
          contradiction("chat_lines", "trained characters that are not there");
        }
        before = span.end;
        told += fmt::format(" {}-{}", span.begin, span.end);
      }
      texts.all.push_back(std::move(told));
    }
    if (again && reader.between_rows()) {
      const std::string state = reader.state();
      reader = fresh();
      if (!reader.go_on(state).or_throw()) {
        contradiction("chat_lines", "what was read has not changed");
      }
    }
  }
}

void chat_lines(std::span<const std::byte> bytes) {
  const fs::path path = Tokens::get().scratch / "chats.jsonl";
  test::spill(path, {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  const Texts whole = read_chats(path, false);
  const Texts again = read_chats(path, true);
  if (whole.failed != again.failed || whole.all != again.all || whole.report != again.report) {
    contradiction("chat_lines", "a reader that goes on reads something else");
  }
}

std::vector<std::string> chat_seeds() {
  return {R"({"messages":[{"role":"system","content":"s"},{"role":"user","content":" a\u00e9 "},)"
          R"({"role":"assistant","content":"b"},{"role":"user","content":"c"}]})"
          "\n\n"
          R"({"conversations":[{"from":"human","value":"a"},{"from":"gpt","value":"b</think>"}]})"
          "\r\n"
          R"({"instruction":"a","input":"","output":"b"})",
          "\xEF\xBB\xBF"
          R"({"prompt":"a","completion":"\ud83d\ude00b"})"
          "\n"
          R"({"text":"t","tools":[{"a":[1,null,{"b":true}]}]})"
          "\n"
          R"({"messages":[{"role":"tool","content":["x"]},)"
          R"({"role":"assistant","content":null,"n":1e9}]})"
          "\n{}\n[]\n7\n",
          "\xEF\xBB\xBF \n[ "
          R"({"prompt":"a, ]\"","completion":"\\"},)"
          "\n"
          R"({"messages":[{"role":"user","content":"[{"},)"
          R"({"role":"assistant","content":"b"}]},7,[[],{}] ])"
          "\n"};
}

// ---- Megatron's files ----

// A damaged index of the ids of a set makes a set that is whole, or says what is wrong.
void megatron_index(std::span<const std::byte> bytes) {
  Tokens& tokens = Tokens::get();
  const fs::path prefix = tokens.scratch / "megatron";
  test::spill(prefix.string() + ".idx",
              {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  test::spill(prefix.string() + ".bin", tokens.megatron_ids);
  const fs::path out = tokens.scratch / "from_megatron";
  const auto rows = import_megatron(tokens.governor, {.prefix = prefix, .out = out}, {});
  if (!rows) {
    if (rows.error().code != ErrorCode::kCorrupt &&
        rows.error().code != ErrorCode::kInvalidArgument) {
      contradiction("megatron_index", rows.error().to_string());
    }
    return;
  }
  const auto set = TokenSet::open(out);
  if (!set || set->rows() != *rows || !set->verify({})) {
    contradiction("megatron_index", "what was imported is no sound set");
  }
}

std::vector<std::string> megatron_seeds() {
  return {Tokens::get().megatron_index};
}

std::vector<std::string> set_seeds() {
  return {Tokens::get().good};
}
std::vector<std::string> journal_seeds() {
  return {Tokens::get().journal};
}

}  // namespace

std::vector<Target> token_targets() {
  return {{"token_set", set_seeds, token_set},
          {"token_journal", journal_seeds, token_journal},
          {"chat_lines", chat_seeds, chat_lines},
          {"megatron_index", megatron_seeds, megatron_index}};
}

}  // namespace plimsoll::fuzz

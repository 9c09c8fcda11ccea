// SPDX-License-Identifier: Apache-2.0
//
// plimsoll._core: TokenSet, TokenWriter, TokenBatches, TokenSpans and ChatReader. Tokens are copied
// into arrays the caller brings; texts to tokenize come as tuples.
//
// Reading order: bindings.h, plimsoll/token_set.h, plimsoll/token_batches.h, data/chat_reader.h,
// this file.
//
// Threads: calls on one object queue (Guarded); a TokenSet's run side by side.
// Memory:  the texts of one piece.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "data/chat_reader.h"
#include "data/token_spans.h"
#include "feed.h"
#include "plimsoll/token_batches.h"
#include "plimsoll/token_set.h"
#include "row_sets.h"
#include "run/progress.h"

namespace plimsoll::python {
namespace {

using TokensIn = nb::ndarray<const std::uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using TokensOut = nb::ndarray<std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

using Tokens = SharedSet<TokenSet>;

void bind_token_set(nb::module_& m) {
  bind_row_set<TokenSet>(m, "TokenSet", "Rows of token ids; see plimsoll.TokenSet.")
      .def_prop_ro(
          "counts",
          [](const Tokens& tokens) {
            const TokenSetInfo info = tokens.get()->info();
            return std::tuple(info.tokens, info.trained_tokens, info.longest_row, info.vocabulary,
                              info.id_bytes, info.fingerprint);
          },
          "Tokens, those trained on, tokens of the longest row, vocabulary, bytes of an id, "
          "fingerprint.")
      .def(
          "length",
          [](const Tokens& tokens, std::int64_t row) {
            return tokens.get()->length(row).or_throw();
          },
          nb::arg("row"), "Tokens of a row. Errors: ValueError, CorruptError.")
      .def(
          "read",
          [](const Tokens& tokens, std::int64_t row, const TokensOut& ids,
             const BytesOut& trained) {
            const auto set = tokens.get();
            const nb::gil_scoped_release unlocked;
            set->read(row, span_of(ids), span_of(trained)).or_throw();
          },
          nb::arg("row"), nb::arg("ids").noconvert(), nb::arg("trained").noconvert(),
          "Shape: int32 [tokens], uint8 [tokens]. Errors: ValueError, CorruptError naming the row, "
          "OSError.");
}

struct SharedTokenBatches {
  std::shared_ptr<TokenSet> set;
  TokenBatches batches;
};
using PyTokenBatches = Guarded<SharedTokenBatches>;
using PlaceTuple = std::tuple<std::int64_t, std::int64_t, std::int64_t>;

TokenPlace place_of(const PlaceTuple& place) {
  return {
      .epoch = std::get<0>(place), .position = std::get<1>(place), .sequence = std::get<2>(place)};
}
PlaceTuple tuple_of(const TokenPlace& place) {
  return {place.epoch, place.position, place.sequence};
}

void bind_token_batches(nb::module_& m) {
  nb::class_<PyTokenBatches>(m, "TokenBatches",
                             "Sequences of fixed length; see plimsoll.TokenBatches.")
      .def_static(
          "open",
          [](const Tokens& tokens, std::int64_t batch_size, std::int64_t sequence_length,
             bool packing, std::int64_t window, bool shuffle, std::uint64_t seed,
             std::int64_t pad_id, std::int64_t held_out, bool only_held_out,
             const PlaceTuple& place) {
            auto set = tokens.get();
            auto batches = TokenBatches::open(set.get(), {.batch_size = batch_size,
                                                          .sequence_length = sequence_length,
                                                          .packing = packing,
                                                          .window = window,
                                                          .shuffle = shuffle,
                                                          .seed = seed,
                                                          .pad_id = pad_id,
                                                          .held_out = held_out,
                                                          .only_held_out = only_held_out,
                                                          .place = place_of(place)})
                               .or_throw();
            return std::make_unique<PyTokenBatches>(
                SharedTokenBatches{std::move(set), std::move(batches)}, "TokenBatches");
          },
          nb::arg("set"), nb::arg("batch_size"), nb::arg("sequence_length"), nb::arg("packing"),
          nb::arg("window"), nb::arg("shuffle"), nb::arg("seed"), nb::arg("pad_id"),
          nb::arg("held_out"), nb::arg("only_held_out"), nb::arg("place"),
          "Errors: ValueError naming the option.")
      .def(
          "next",
          [](PyTokenBatches& batches, const IdsOut& input_ids, const IdsOut& labels,
             const IdsOut& position_ids, const IdsOut& documents) {
            const TokenBuffers out{.input_ids = span_of(input_ids),
                                   .labels = span_of(labels),
                                   .position_ids = span_of(position_ids),
                                   .documents = span_of(documents)};
            const TokenBatch batch = batches.use(
                [&](SharedTokenBatches& self) { return self.batches.next(out).or_throw(); });
            return std::tuple(tuple_of(batch.place), batch.sequences, batch.tokens, batch.trained,
                              batch.rows, batch.left_out, batch.ends_epoch);
          },
          nb::arg("input_ids").noconvert(), nb::arg("labels").noconvert(),
          nb::arg("position_ids").noconvert(), nb::arg("documents").noconvert(),
          "Place, sequences, tokens, trained, rows, left out, whether it ends the epoch.")
      .def(
          "seek",
          [](PyTokenBatches& batches, const PlaceTuple& place) {
            batches.use(
                [&](SharedTokenBatches& self) { self.batches.seek(place_of(place)).or_throw(); });
          },
          nb::arg("place"), "Errors: ValueError for a place that is none.")
      .def_prop_ro(
          "place",
          [](PyTokenBatches& batches) {
            return batches.use(
                [](SharedTokenBatches& self) { return tuple_of(self.batches.place()); });
          },
          "Epoch, position, sequence.")
      .def("close", &PyTokenBatches::close, "Lets go of the set.");
}

using PyTokenWriter = Guarded<TokenWriter>;
using Spans = std::vector<std::pair<std::int64_t, std::int64_t>>;

std::vector<TokenSpan> spans_from(const Spans& given) {
  std::vector<TokenSpan> spans;
  spans.reserve(given.size());
  for (const auto& [begin, end] : given) {
    spans.push_back({begin, end});
  }
  return spans;
}

template <typename Unit>
bool has_any(const nb::str& text, const nb::bytes& marked) {
  const auto* const units = static_cast<const Unit*>(PyUnicode_DATA(text.ptr()));
  const auto length = static_cast<std::size_t>(PyUnicode_GET_LENGTH(text.ptr()));
  const char* const marks = marked.c_str();
  const std::size_t count = marked.size();
  return std::any_of(units, units + length,
                     [&](Unit unit) { return unit >= count || marks[unit] != 0; });
}

void bind_spans(nb::module_& m) {
  m.def(
      "has_any",
      [](const nb::str& text, const nb::bytes& marked) {
        switch (PyUnicode_KIND(text.ptr())) {
          case PyUnicode_1BYTE_KIND:
            return has_any<Py_UCS1>(text, marked);
          case PyUnicode_2BYTE_KIND:
            return has_any<Py_UCS2>(text, marked);
          default:
            return has_any<Py_UCS4>(text, marked);
        }
      },
      nb::arg("text"), nb::arg("marked"),
      "Whether a text has a character whose byte is not 0; those that have no byte are marked, "
      "too.");
  nb::class_<TokenSpans>(
      m, "TokenSpans",
      "Which tokens have a character of a text's spans; src/data/token_spans.h has the contract.")
      .def(
          "__init__",
          [](TokenSpans* self, const std::vector<nb::bytes>& tokens, bool trimmed, bool prefixed) {
            std::vector<std::string> bytes;
            bytes.reserve(tokens.size());
            for (const nb::bytes& token : tokens) {
              bytes.emplace_back(token.c_str(), token.size());
            }
            new (self) TokenSpans(bytes, trimmed, prefixed);
          },
          nb::arg("tokens"), nb::arg("trimmed"), nb::arg("prefixed"))
      .def(
          "find",
          [](const TokenSpans& self, const TokensIn& ids, const nb::str& text,
             const Spans& characters) -> std::optional<Spans> {
            Py_ssize_t size = 0;
            const char* const bytes = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
            if (bytes == nullptr) {
              throw nb::python_error();
            }
            const auto found = self.find(span_of(ids), {bytes, static_cast<std::size_t>(size)},
                                         spans_from(characters));
            if (!found) {
              return std::nullopt;
            }
            Spans out;
            for (const TokenSpan& span : *found) {
              out.emplace_back(span.begin, span.end);
            }
            return out;
          },
          nb::arg("ids").noconvert(), nb::arg("text"), nb::arg("characters"),
          "Tokens; None where the ids are not those of the text. Shape: uint32 [tokens].");
}

void bind_writer(nb::module_& m) {
  bind_row_writer<TokenWriter, TokenSet>(
      m, "TokenWriter", "Makes a token set; include/plimsoll/token_set.h has the contract.")
      .def_static(
          "open",
          [](const Governor& governor, const std::string& path, std::int64_t vocabulary,
             const std::string& fingerprint, std::int64_t row_tokens_max, bool rebuild) {
            const nb::gil_scoped_release unlocked;
            return std::make_unique<PyTokenWriter>(
                TokenWriter::open(governor, {.path = path,
                                             .vocabulary = vocabulary,
                                             .fingerprint = fingerprint,
                                             .row_tokens_max = row_tokens_max,
                                             .rebuild = rebuild})
                    .or_throw(),
                "TokenWriter");
          },
          nb::arg("governor"), nb::arg("path"), nb::arg("vocabulary"), nb::arg("fingerprint"),
          nb::arg("row_tokens_max"), nb::arg("rebuild"),
          "Errors: ValueError, BudgetExceeded, OSError.")
      .def(
          "append",
          [](PyTokenWriter& writer, const TokensIn& ids, const Spans& trained) {
            const std::vector<TokenSpan> spans = spans_from(trained);
            writer.use([&](TokenWriter& self) { self.append(span_of(ids), spans).or_throw(); });
          },
          nb::arg("ids").noconvert(), nb::arg("trained"),
          "Shape: uint32 [tokens]. Errors: ValueError, OSError.")
      .def(
          "end_row",
          [](PyTokenWriter& writer) {
            const RowEnd row =
                writer.use([](TokenWriter& self) { return self.end_row().or_throw(); });
            return std::tuple(row.tokens, row.trained, row.cut);
          },
          "Tokens, those trained on, whether it was cut.")
      .def(
          "drop_row",
          [](PyTokenWriter& writer) { writer.use([](TokenWriter& self) { self.drop_row(); }); },
          "Forgets the row under way.");
}

using PyChatReader = Guarded<ChatReader>;

// Kind, file, line, text, trained characters, whether it ends its row, messages, what is odd.
using TextTuple = std::tuple<int, std::int64_t, std::int64_t, std::string, Spans, bool,
                             std::vector<std::pair<std::string, std::string>>, std::string>;

nb::typed<nb::list, TextTuple> as_list(const std::vector<ChatText>& texts) {
  nb::list out;
  for (const ChatText& text : texts) {
    nb::list trained;
    for (const TokenSpan& span : text.trained) {
      trained.append(nb::make_tuple(span.begin, span.end));
    }
    nb::list messages;
    for (const ChatMessage& message : text.messages) {
      messages.append(nb::make_tuple(message.role, message.content));
    }
    out.append(nb::make_tuple(static_cast<int>(text.kind), text.file, text.line, text.text, trained,
                              text.last, messages, chat_oddity_key(text.oddity)));
  }
  return out;
}

using GapTuple = std::tuple<std::string, std::int64_t, std::int64_t, std::int64_t>;

ChatPieces pieces_of(const std::vector<std::pair<std::string, GapTuple>>& gaps,
                     std::vector<std::string> stripped, std::vector<std::string> triggers) {
  ChatPieces pieces{.stripped = std::move(stripped), .triggers = std::move(triggers)};
  for (const auto& [key, gap] : gaps) {
    const auto& [text, after, before, split] = gap;
    pieces.gaps[key] = {.text = text, .after = after, .before = before, .split = split};
  }
  return pieces;
}

ChatOddity oddity_named(const std::string& key) {
  for (std::size_t i = 0; i < kChatOddities; ++i) {
    if (key == chat_oddity_key(static_cast<ChatOddity>(i))) {
      return static_cast<ChatOddity>(i);
    }
  }
  throw Exception(make_error(ErrorCode::kInvalidArgument, "nothing odd is called " + key));
}

void bind_reader(nb::module_& m) {
  m.def("chat_gap_key", &chat_gap_key, nb::arg("before"), nb::arg("behind"), nb::arg("k"),
        nb::arg("count"), "The key of a gap of a compiled template.");
  nb::class_<PyChatReader>(
      m, "ChatReader",
      "Files of chats as texts to tokenize; src/data/chat_reader.h has the contract.")
      .def_static(
          "open",
          [](const Governor& governor, const std::vector<std::string>& files, int training,
             std::int64_t line_bytes_max, std::int64_t text_bytes_max, std::int64_t errors_max,
             const nb::object& feed, const std::vector<std::string>& ignored,
             const std::vector<std::string>& ignored_of_messages) {
            return std::make_unique<PyChatReader>(
                ChatReader::open(governor, {.files = {files.begin(), files.end()},
                                            .feed = feed_of(feed),
                                            .training = static_cast<ChatTraining>(training),
                                            .line_bytes_max = line_bytes_max,
                                            .text_bytes_max = text_bytes_max,
                                            .errors_max = errors_max,
                                            .between = heed_signals,
                                            .keys = {ignored, ignored_of_messages}})
                    .or_throw(),
                "ChatReader");
          },
          nb::arg("governor"), nb::arg("files"), nb::arg("training"), nb::arg("line_bytes_max"),
          nb::arg("text_bytes_max"), nb::arg("errors_max"), nb::arg("feed").none(),
          nb::arg("ignored"), nb::arg("ignored_of_messages"), "Errors: BudgetExceeded.")
      .def(
          "set_pieces",
          [](PyChatReader& reader, const std::vector<std::pair<std::string, GapTuple>>& gaps,
             const std::vector<std::string>& stripped, const std::vector<std::string>& triggers) {
            reader.use(
                [&](ChatReader& self) { self.set_pieces(pieces_of(gaps, stripped, triggers)); });
          },
          nb::arg("gaps"), nb::arg("stripped"), nb::arg("triggers"), "The compiled template.")
      .def(
          "next",
          [](PyChatReader& reader, std::int64_t bytes, std::int64_t sample) {
            const auto texts =
                reader.use([&](ChatReader& self) { return self.next(bytes, sample).or_throw(); });
            return as_list(texts);
          },
          nb::arg("bytes"), nb::arg("sample"),
          "Kind, file, line, text, trained characters, whether it ends its row, messages, what is "
          "odd (of a bad line).")
      .def(
          "note",
          [](PyChatReader& reader, const std::string& key, std::int64_t file, std::int64_t line,
             const std::string& detail) {
            reader.use([&](ChatReader& self) {
              self.note(oddity_named(key), file, line, detail).or_throw();
            });
          },
          nb::arg("key"), nb::arg("file"), nb::arg("line"), nb::arg("detail"),
          "Errors: ValueError naming file and line, past errors_max.")
      .def(
          "count_row",
          [](PyChatReader& reader, std::int64_t used, std::int64_t refused,
             const std::vector<std::pair<std::string, std::int64_t>>& counted) {
            reader.use([&](ChatReader& self) { self.count_row(used, refused, counted); });
          },
          nb::arg("used"), nb::arg("refused"), nb::arg("counted"),
          "The keys of a row that was read in Python.")
      .def(
          "go_on",
          [](PyChatReader& reader, const std::string& state) {
            return reader.use([&](ChatReader& self) { return self.go_on(state).or_throw(); });
          },
          nb::arg("state"), "False where what was read has changed. Errors: ValueError, OSError.")
      .def(
          "skip_rest",
          [](PyChatReader& reader) {
            reader.use([](ChatReader& self) { self.skip_rest().or_throw(); });
          },
          "Reads the rest, no rows. Errors: CorruptError, OSError.")
      .def(
          "name_of",
          [](PyChatReader& reader, std::int64_t file, std::int64_t line) {
            return reader.use([&](ChatReader& self) { return self.name_of(file, line); });
          },
          nb::arg("file"), nb::arg("line"), "\"chats.jsonl:7\", or \"chats.json[6]\" of an array.")
      .def_prop_ro(
          "state",
          [](PyChatReader& reader) {
            return reader.use([](ChatReader& self) { return self.state(); });
          },
          "For go_on().")
      .def_prop_ro(
          "report",
          [](PyChatReader& reader) {
            return reader.use([](ChatReader& self) { return self.report(); });
          },
          "Lines, rows and what was odd, as JSON.")
      .def_prop_ro(
          "between_rows",
          [](PyChatReader& reader) {
            return reader.use([](ChatReader& self) { return self.between_rows(); });
          },
          "No row is under way.")
      .def_prop_ro(
          "done",
          [](PyChatReader& reader) {
            return reader.use([](ChatReader& self) { return self.done(); });
          },
          "Bytes of the files read, as they lie on disk; lines of a feed.")
      .def_prop_ro(
          "sums",
          [](PyChatReader& reader) {
            std::vector<std::pair<std::int64_t, std::uint32_t>> sums;
            reader.use([&](ChatReader& self) {
              for (const ChatSum& sum : self.sums()) {
                sums.emplace_back(sum.bytes, sum.crc);
              }
            });
            return sums;
          },
          "Bytes and CRC-32C of what was read of each file, unpacked.")
      .def("close", &PyChatReader::close, "Lets go of the files.");
}

}  // namespace

void heed_signals() {
  const nb::gil_scoped_acquire locked;
  if (PyErr_CheckSignals() != 0) {
    throw nb::python_error();
  }
}

ChatFeed feed_of(const nb::object& feed) {
  if (feed.is_none()) {
    return {};
  }
  // The last copy may go without Python's lock.
  const std::shared_ptr<nb::object> own(new nb::object(feed), [](nb::object* object) {
    const nb::gil_scoped_acquire locked;
    delete object;
  });
  ChatFeed made;
  made.begin = [own](std::int64_t file) {
    const nb::gil_scoped_acquire locked;
    return static_cast<ChatFeed::Kind>(nb::cast<int>(own->attr("begin")(file)));
  };
  made.read = [own](std::span<std::byte> out) -> Result<std::int64_t> {
    const nb::gil_scoped_acquire locked;
    const auto got = nb::cast<nb::bytes>(own->attr("read")(out.size()));
    if (got.size() > out.size()) {
      throw nb::value_error("more bytes were read than asked for");
    }
    std::memcpy(out.data(), got.c_str(), got.size());
    return static_cast<std::int64_t>(got.size());
  };
  made.done = [own] {
    const nb::gil_scoped_acquire locked;
    return nb::cast<std::int64_t>(own->attr("done")());
  };
  made.name = [own](std::int64_t file, std::int64_t line) {
    const nb::gil_scoped_acquire locked;
    return nb::cast<std::string>(own->attr("name")(file, line));
  };
  return made;
}

void bind_tokens(nb::module_& m) {
  bind_token_set(m);
  bind_token_batches(m);
  bind_writer(m);
  bind_spans(m);
  bind_reader(m);
  m.def("chat_roles", &chat_roles, "Names of roles as rows have them, and as templates do.");
  m.def(
      "chat_oddities",
      [] {
        std::vector<std::tuple<std::string, bool, std::string>> oddities;
        for (std::size_t i = 0; i < kChatOddities; ++i) {
          const auto oddity = static_cast<ChatOddity>(i);
          oddities.emplace_back(chat_oddity_key(oddity), is_chat_error(oddity),
                                chat_oddity_text(oddity));
        }
        return oddities;
      },
      "Keys of what is counted as odd, as a report has them in order; whether it is an error; in "
      "words.");
  nb::class_<WorkMeter>(m, "WorkMeter", "Progress of work that has an amount, on standard error.")
      .def(
          "__init__",
          [](WorkMeter* self, const std::string& label) { new (self) WorkMeter(label); },
          nb::arg("label"))
      .def("update", &WorkMeter::update, nb::arg("done"), nb::arg("total"),
           "A bar on a terminal; elsewhere a line every ten seconds.");
}

}  // namespace plimsoll::python

// SPDX-License-Identifier: Apache-2.0
//
// plimsoll._core: images, ImageSet, ImageWriter, and the lines of files or of a feed.
//
// Reading order: bindings.h, plimsoll/image.h, plimsoll/image_set.h, data/chat_lines.h, this file.
//
// Threads: calls on one object queue (Guarded); an ImageSet's run side by side.
// Memory:  what a call gives back.
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "data/can_bytes.h"
#include "data/file_kind.h"
#include "feed.h"
#include "plimsoll/image.h"
#include "plimsoll/image_batches.h"
#include "plimsoll/image_set.h"
#include "row_sets.h"

namespace plimsoll::python {
namespace {

using PlaceNumbers =
    std::tuple<std::int64_t, std::int64_t, std::uint32_t, std::int64_t, std::int64_t>;

using Images = SharedSet<ImageSet>;

void bind_decoding(nb::module_& m) {
  m.attr("image_pixels_max") = kImagePixelsMost;  // Pixels of an image at most, by default.
  m.def(
      "image_info",
      [](const BytesIn& encoded, std::int64_t pixels_max) {
        const ImageInfo info = read_image_info(bytes_of(encoded), pixels_max).or_throw();
        return std::tuple(image_format_name(info.format), info.width, info.height, info.orientation,
                          info.scratch_bytes);
      },
      nb::arg("encoded").noconvert(), nb::arg("pixels_max"),
      "Format, width, height (upright), orientation, bytes that decoding takes beside the "
      "pixels.\n\nErrors: ValueError, CorruptError.");
  m.def(
      "decode_image",
      [](const BytesIn& encoded, std::int64_t pixels_max, const BytesOut& pixels) {
        const nb::gil_scoped_release unlocked;
        const ImageInfo info = read_image_info(bytes_of(encoded), pixels_max).or_throw();
        decode_image(bytes_of(encoded), info, span_of(pixels)).or_throw();
      },
      nb::arg("encoded").noconvert(), nb::arg("pixels_max"), nb::arg("pixels").noconvert(),
      "Shape: pixels [height * width * 3]. Errors: ValueError, CorruptError.");
  m.def(
      "resize_image",
      [](const BytesIn& pixels, std::pair<std::int64_t, std::int64_t> from, const BytesOut& out,
         std::pair<std::int64_t, std::int64_t> to, int filter) {
        const nb::gil_scoped_release unlocked;
        resize_image(span_of(pixels), {from.first, from.second}, span_of(out),
                     {to.first, to.second}, static_cast<ImageFilter>(filter))
            .or_throw();
      },
      nb::arg("pixels").noconvert(), nb::arg("from_"), nb::arg("out").noconvert(), nb::arg("to"),
      nb::arg("filter"),
      "Shape: pixels, out [height * width * 3]; sizes as width and height. Errors: ValueError.");
}

void bind_scaling(nb::module_& m) {
  using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
  using FloatsTo = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
  m.def(
      "scale_image",
      [](const BytesIn& pixels, const Floats& table, const FloatsTo& out) {
        const nb::gil_scoped_release unlocked;
        scale_image(span_of(pixels), span_of(table), span_of(out)).or_throw();
      },
      nb::arg("pixels").noconvert(), nb::arg("table").noconvert(), nb::arg("out").noconvert(),
      "Shape: pixels [n * 3], table [3 * 256], out [3 * n]. Errors: ValueError.");
}

void bind_image_set(nb::module_& m) {
  bind_row_set<ImageSet>(m, "ImageSet", "Rows of messages and images; see plimsoll.ImageSet.")
      .def_prop_ro(
          "counts",
          [](const Images& images) {
            const ImageSetInfo info = images.get()->info();
            return std::tuple(info.images, info.encoded_bytes, info.decoded_bytes,
                              info.work_bytes_max, info.fingerprint);
          },
          "Images, their bytes encoded and decoded, bytes beside the pixels of one while it is "
          "decoded, fingerprint.")
      .def(
          "row",
          [](const Images& images, std::int64_t row) {
            const auto set = images.get();
            ImageRow found;
            {
              const nb::gil_scoped_release unlocked;
              found = set->row(row).or_throw();
            }
            std::vector<PlaceNumbers> places;
            for (const ImagePlace& place : found.images) {
              places.emplace_back(place.offset, place.bytes, place.crc, place.width, place.height);
            }
            return std::pair(std::move(found.messages), std::move(places));
          },
          nb::arg("row"),
          "Messages as JSON; of each image offset, bytes, CRC-32C, width, height. Errors: "
          "ValueError, CorruptError.")
      .def(
          "read",
          [](const Images& images, const PlaceNumbers& place, const BytesOut& out) {
            const auto set = images.get();
            const auto [offset, bytes, crc, width, height] = place;
            const nb::gil_scoped_release unlocked;
            set->read(
                   {.offset = offset, .bytes = bytes, .crc = crc, .width = width, .height = height},
                   bytes_of(out))
                .or_throw();
          },
          nb::arg("place"), nb::arg("out").noconvert(),
          "Shape: uint8 [bytes]. Errors: ValueError, CorruptError, OSError.");
}

using PyImageWriter = Guarded<ImageWriter>;

void bind_image_writer(nb::module_& m) {
  bind_row_writer<ImageWriter, ImageSet>(
      m, "ImageWriter", "Makes an image set; include/plimsoll/image_set.h has the contract.")
      .def_static(
          "open",
          [](const Governor& governor, const std::string& path, const std::string& fingerprint,
             std::int64_t pixels_max, bool rebuild) {
            const nb::gil_scoped_release unlocked;
            return std::make_unique<PyImageWriter>(
                ImageWriter::open(governor, {.path = path,
                                             .fingerprint = fingerprint,
                                             .pixels_max = pixels_max,
                                             .rebuild = rebuild})
                    .or_throw(),
                "ImageWriter");
          },
          nb::arg("governor"), nb::arg("path"), nb::arg("fingerprint"), nb::arg("pixels_max"),
          nb::arg("rebuild"), "Errors: ValueError, BudgetExceeded, OSError.")
      .def_prop_ro(
          "images",
          [](PyImageWriter& writer) {
            return writer.use([](ImageWriter& self) { return self.info().images; });
          },
          "Images written.")
      .def(
          "append",
          [](PyImageWriter& writer, const std::string& messages,
             const std::vector<nb::bytes>& images) {
            std::vector<std::span<const std::byte>> spans;
            for (const nb::bytes& image : images) {
              spans.emplace_back(reinterpret_cast<const std::byte*>(image.c_str()), image.size());
            }
            writer.use([&](ImageWriter& self) { self.append(messages, spans).or_throw(); });
          },
          nb::arg("messages"), nb::arg("images"),
          "Decodes the images, and adds the row. Errors: ValueError, CorruptError, BudgetExceeded, "
          "OSError.");
}

struct SharedImageBatches {
  std::shared_ptr<ImageSet> set;
  ImageBatches batches;
};
using PyImageBatches = Guarded<SharedImageBatches>;
using PlacePair = std::pair<std::int64_t, std::int64_t>;

// Rows as (row, messages, [pixels, …]): arrays over the batch's slab, which they hold.
using Pixels = nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<3>>;
using RowList = nb::typed<nb::list, std::tuple<std::int64_t, std::string, std::vector<Pixels>>>;

RowList rows_of(const ImageBatch& batch) {
  nb::list rows;
  for (const ImageBatchRow& row : batch.rows) {
    nb::list images;
    for (std::size_t i = 0; i < row.sizes.size(); ++i) {
      auto* const held = new std::shared_ptr<const void>(batch.pixels);
      const nb::capsule owner(
          held, [](void* one) noexcept { delete static_cast<std::shared_ptr<const void>*>(one); });
      const std::array<std::size_t, 3> shape{static_cast<std::size_t>(row.sizes[i].height),
                                             static_cast<std::size_t>(row.sizes[i].width), 3};
      // Nobody else has these bytes any more: they are the caller's to change.
      images.append(
          Pixels(const_cast<std::uint8_t*>(row.pixels[i].data()), 3, shape.data(), owner));
    }
    rows.append(nb::make_tuple(row.row, row.messages, images));
  }
  return rows;
}

void bind_image_batches(nb::module_& m) {
  nb::class_<PyImageBatches>(m, "ImageBatches",
                             "Rows with decoded images; see plimsoll.ImageBatches.")
      .def_static(
          "open",
          [](const Governor& governor, const Images& images, std::int64_t batch_size, bool shuffle,
             std::uint64_t seed, std::int64_t held_out, bool only_held_out, int threads,
             std::int64_t queue_bytes, PlacePair place) {
            auto set = images.get();
            auto batches =
                ImageBatches::open(governor, set.get(),
                                   {.batch_size = batch_size,
                                    .shuffle = shuffle,
                                    .seed = seed,
                                    .held_out = held_out,
                                    .only_held_out = only_held_out,
                                    .threads = threads,
                                    .queue_bytes = queue_bytes,
                                    .place = {.epoch = place.first, .position = place.second}})
                    .or_throw();
            return std::make_unique<PyImageBatches>(
                SharedImageBatches{std::move(set), std::move(batches)}, "ImageBatches");
          },
          nb::arg("governor"), nb::arg("set"), nb::arg("batch_size"), nb::arg("shuffle"),
          nb::arg("seed"), nb::arg("held_out"), nb::arg("only_held_out"), nb::arg("threads"),
          nb::arg("queue_bytes"), nb::arg("place"),
          "Errors: ValueError naming the option, BudgetExceeded.")
      .def(
          "next",
          [](PyImageBatches& batches) {
            const ImageBatch batch = batches.use(
                [](SharedImageBatches& self) { return self.batches.next().or_throw(); });
            return std::tuple(PlacePair(batch.place.epoch, batch.place.position), rows_of(batch),
                              batch.ends_epoch);
          },
          "Place; row, messages as JSON, and pixels [height, width, 3] of each; whether it ends "
          "the epoch.")
      .def(
          "seek",
          [](PyImageBatches& batches, PlacePair place) {
            batches.use([&](SharedImageBatches& self) {
              self.batches.seek({.epoch = place.first, .position = place.second}).or_throw();
            });
          },
          nb::arg("place"), "Errors: ValueError for a place that is none.")
      .def_prop_ro(
          "place",
          [](PyImageBatches& batches) {
            const ImagesPlace place =
                batches.use([](SharedImageBatches& self) { return self.batches.place(); });
            return PlacePair(place.epoch, place.position);
          },
          "Epoch and position.")
      .def("close", &PyImageBatches::close, "Ends the threads, and lets go of the set.");
}

using PyLines = Guarded<ChatLines>;
using LineTuple = std::tuple<std::int64_t, std::int64_t, std::optional<nb::bytes>>;
using SumNumbers = std::pair<std::int64_t, std::uint32_t>;

std::vector<SumNumbers> sums_of(PyLines& lines) {
  std::vector<SumNumbers> sums;
  lines.use([&](ChatLines& self) {
    for (const ChatSum& sum : self.sums()) {
      sums.emplace_back(sum.bytes, sum.crc);
    }
  });
  return sums;
}

// The unpacked bytes of a file, for readers in Python.
struct UnpackedFile {
  std::string path;
  std::vector<std::byte> packed;
  Lease lease;
  CanBytes bytes;
};
using PyUnpacked = Guarded<UnpackedFile>;

UnpackedFile open_unpacked(Governor governor, const std::string& path) {
  constexpr std::int64_t kBufferBytes = 64 << 10;
  std::vector<std::byte> packed(static_cast<std::size_t>(kBufferBytes));
  CanBytes bytes = CanBytes::open(path, packed, true).or_throw();
  Lease lease = governor.reserve(Tag::kOther, kBufferBytes + bytes.unpack_bytes()).or_throw();
  return {.path = path,
          .packed = std::move(packed),
          .lease = std::move(lease),
          .bytes = std::move(bytes)};
}

void bind_unpacked(nb::module_& m) {
  constexpr std::array<const char*, 15> kKinds{
      "text", "empty",   "utf-16",     "utf-32",       "gzip", "zstd",        "bzip2", "xz",
      "tar",  "parquet", "arrow-file", "arrow-stream", "npy",  "safetensors", "other"};
  m.def(
      "file_sort",
      [kKinds](const nb::bytes& head) {
        const FileSort sort =
            file_sort(std::span(reinterpret_cast<const std::byte*>(head.c_str()), head.size()));
        return std::tuple(kKinds[static_cast<std::size_t>(sort.kind)], sort.name, sort.advice);
      },
      nb::arg("head"),
      "Kind of a file by its first file_head bytes (src/data/file_kind.h), its name, and what to "
      "do about it.");
  m.attr("file_head") = kFileHead;
  nb::class_<PyUnpacked>(m, "Unpacked",
                         "The bytes of a file, unpacked where it is packed by gzip or zstd.")
      .def_static(
          "open",
          [](const Governor& governor, const std::string& path) {
            return std::make_unique<PyUnpacked>(open_unpacked(governor, path), "Unpacked");
          },
          nb::arg("governor"), nb::arg("path"), "Errors: NotFoundError, OSError, BudgetExceeded.")
      .def(
          "read",
          [](PyUnpacked& file, std::size_t size) {
            std::vector<std::byte> out(size);
            std::int64_t got = 0;
            file.use([&](UnpackedFile& self) {
              const auto read = self.bytes.read(out);
              if (!read) {
                const Error& error = read.error();
                throw Exception(make_error(
                    error.code, self.path + ": " + (error.detail ? *error.detail : std::string()),
                    error.code == ErrorCode::kInvalidArgument ? error.advice
                                                              : "get the file again"));
              }
              got = *read;
            });
            return nb::bytes(out.data(), static_cast<std::size_t>(got));
          },
          nb::arg("size"),
          "At most so many; none at the end. Errors: CorruptError, ValueError, OSError.")
      .def_prop_ro(
          "position",
          [](PyUnpacked& file) {
            return file.use([](UnpackedFile& self) { return self.bytes.position(); });
          },
          "Bytes of the file read so far, packed.")
      .def("close", &PyUnpacked::close, "Lets go of the file.");
}

void bind_lines(nb::module_& m) {
  nb::class_<PyLines>(
      m, "Lines",
      "Lines of files, or of a feed in their place; src/data/chat_lines.h has the contract.")
      .def_static(
          "open",
          [](const Governor& governor, const std::vector<std::string>& files,
             std::int64_t line_bytes_max, const nb::object& feed) {
            return std::make_unique<PyLines>(
                ChatLines::open(governor, {files.begin(), files.end()}, line_bytes_max,
                                feed_of(feed), heed_signals)
                    .or_throw(),
                "Lines");
          },
          nb::arg("governor"), nb::arg("files"), nb::arg("line_bytes_max"), nb::arg("feed").none(),
          "feed: a RowFeed (_row_files.py), or None. Errors: BudgetExceeded.")
      .def(
          "next",
          [](PyLines& lines) -> std::optional<LineTuple> {
            std::optional<std::string> text;
            std::int64_t file = 0;
            std::int64_t number = 0;
            bool too_long = false;
            lines.use([&](ChatLines& self) {
              text = self.next().or_throw();
              file = self.place().file;
              number = self.line();
              too_long = self.too_long();
            });
            if (!text) {
              return std::nullopt;
            }
            return LineTuple(
                file, number,
                too_long ? std::nullopt : std::optional(nb::bytes(text->data(), text->size())));
          },
          "File, line, and its bytes: None for one that is too long. None at the end. Errors: "
          "CorruptError, OSError.")
      .def(
          "name_of",
          [](PyLines& lines, std::int64_t file, std::int64_t line, bool brief) {
            return lines.use([&](ChatLines& self) { return self.name_of(file, line, brief); });
          },
          nb::arg("file"), nb::arg("line"), nb::arg("brief"),
          "\"rows.jsonl:7\", or \"rows.json[6]\" of an array.")
      .def_prop_ro(
          "place",
          [](PyLines& lines) {
            const ChatPlace at = lines.use([](ChatLines& self) { return self.place(); });
            return std::tuple(at.file, at.line, at.at);
          },
          "File, line and byte where the next line begins.")
      .def_prop_ro("sums", &sums_of, "Bytes and CRC-32C of what was read of each file, unpacked.")
      .def_prop_ro(
          "done",
          [](PyLines& lines) { return lines.use([](ChatLines& self) { return self.done(); }); },
          "Bytes read, as they lie on disk; of a feed, lines.")
      .def(
          "go_to",
          [](PyLines& lines, const std::tuple<std::int64_t, std::int64_t, std::int64_t>& place,
             const std::vector<SumNumbers>& sums) {
            std::vector<ChatSum> wanted;
            for (const auto& [bytes, crc] : sums) {
              wanted.push_back({.bytes = bytes, .crc = crc});
            }
            return lines.use([&](ChatLines& self) {
              return self
                  .go_to({.file = std::get<0>(place),
                          .line = std::get<1>(place),
                          .at = std::get<2>(place)},
                         wanted)
                  .or_throw();
            });
          },
          nb::arg("place"), nb::arg("sums"),
          "False where what was read has changed. Errors: ValueError, OSError.")
      .def("close", &PyLines::close, "Lets go of the files.");
}

}  // namespace

void bind_images(nb::module_& m) {
  bind_decoding(m);
  bind_scaling(m);
  bind_image_set(m);
  bind_image_writer(m);
  bind_image_batches(m);
  bind_unpacked(m);
  bind_lines(m);
}

}  // namespace plimsoll::python

// SPDX-License-Identifier: Apache-2.0
//
// Goal: .npy and .safetensors files are read to the byte, and whatever is wrong with one is an
// error with its name, never a crash or a large allocation.
// Method: files made by hand; seeded damage; hostile headers one by one.
#include <cstring>

#include <gtest/gtest.h>

#include "data/npy.h"
#include "data/safetensors.h"
#include "tests/support/array_files.h"
#include "tests/support/feature_set.h"

namespace plimsoll {
namespace {

using test::damage;
using test::ScratchDirectory;
namespace fs = std::filesystem;

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

template <class T>
std::vector<T> read_all(const TensorRows& rows) {
  std::vector<T> values(static_cast<std::size_t>(rows.rows() * rows.row_bytes()) / sizeof(T));
  rows.read(0, std::as_writable_bytes(std::span(values))).or_throw();
  return values;
}

TEST(NpyTest, ReadsRowsOfEveryType) {
  ScratchDirectory scratch;
  const std::vector<float> floats{1, 2, 3, 4, 5, 6};
  test::write_npy(scratch / "f4.npy", "<f4", {3, 2}, floats);
  const TensorRows rows = open_npy(scratch / "f4.npy").or_throw();
  EXPECT_EQ(rows.rows(), 3);
  EXPECT_EQ(rows.row_shape(), std::vector<std::int64_t>{2});
  EXPECT_EQ(read_all<float>(rows), floats);
  std::vector<float> last(2);
  ASSERT_TRUE(rows.read(2, std::as_writable_bytes(std::span(last))));
  EXPECT_EQ(last, (std::vector<float>{5, 6}));
  const std::vector<std::int64_t> ids{-7, 1LL << 60};
  test::write_npy(scratch / "i8.npy", "<i8", {2}, ids);
  EXPECT_EQ(read_all<std::int64_t>(open_npy(scratch / "i8.npy").or_throw()), ids);
  for (const auto& [descr, bytes] : {std::pair{"<f2", 2}, {"<f8", 8}, {"<i4", 4}, {"|u1", 1}}) {
    test::write_npy(scratch / "x.npy", descr, {4}, std::vector<char>(4 * bytes));
    EXPECT_EQ(open_npy(scratch / "x.npy").or_throw().row_bytes(), bytes);
  }
}

TEST(NpyTest, ReadsVersionTwoAndLongHeaders) {
  ScratchDirectory scratch;
  std::string dict = "{'shape': (2,), 'fortran_order': False, 'descr': '<i4'}";
  dict += std::string(9000, ' ') + "\n";
  std::string text("\x93NUMPY\x02\x00", 8);
  const auto length = static_cast<std::uint32_t>(dict.size());
  text += std::string(reinterpret_cast<const char*>(&length), 4) + dict + std::string(8, '\1');
  test::spill(scratch / "two.npy", text);
  EXPECT_EQ(read_all<std::int32_t>(open_npy(scratch / "two.npy").or_throw()),
            (std::vector<std::int32_t>{0x01010101, 0x01010101}));
}

TEST(NpyTest, NamesTheRowAtWhichATruncatedFileEnds) {
  ScratchDirectory scratch;
  const fs::path path = scratch / "short.npy";
  test::write_npy(path, "<f4", {10, 4}, std::vector<float>(31));
  const auto refused = open_npy(path);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kCorrupt);
  EXPECT_EQ(*refused.error().detail,
            path.string() + ": truncated: it promises 10 rows of 16 bytes and ends in row 7");
}

TEST(NpyTest, RefusesWhatItDoesNotRead) {
  const auto refusal = [](const std::string& dict) {
    std::string text("\x93NUMPY\x01\x00", 8);
    text += static_cast<char>(dict.size() & 0xFF);
    text += static_cast<char>(dict.size() >> 8);
    text += dict;
    const auto parsed = parse_npy_header(bytes_of(text), 1 << 20, "x.npy");
    return parsed ? std::string("read") : *parsed.error().detail;
  };
  const std::string tail = ", 'fortran_order': False, 'shape': (2, 3)}";
  EXPECT_EQ(refusal("{'descr': '<f4'" + tail), "read");
  EXPECT_NE(refusal("{'descr': '>f4'" + tail).find("\">f4\" is not an element type"),
            std::string::npos);
  EXPECT_NE(refusal("{'descr': '|O'" + tail).find("not an element type"), std::string::npos);
  EXPECT_EQ(refusal("{'descr': '<f4', 'fortran_order': True, 'shape': (2, 3)}"),
            "x.npy: Fortran order is not read");
  for (const std::string dict :
       {"", "{", "{}", "{'descr': '<f4'}", "{'descr': '<f4', 'descr': '<f4'}",
        "{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (2,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (-2,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), 'more': (1,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2,)} x"}) {
    EXPECT_EQ(refusal(dict), "x.npy: malformed .npy header") << dict;
  }
  EXPECT_EQ(refusal("{'descr': '<f4', 'fortran_order': False, 'shape': ()}"),
            "x.npy: shape [] cannot be read by rows");
  EXPECT_EQ(refusal("{'descr': '<f4', 'fortran_order': False, 'shape': (9223372036854775807, 2)}"),
            "x.npy: shape [9223372036854775807, 2] cannot be read by rows");
  EXPECT_FALSE(parse_npy_header(bytes_of("PK\3\4 a zip file, which .npz is"), 99, "x.npz"));
}

TEST(NpyTest, SurvivesAnyDamage) {
  const std::string good = test::npy_header("<f4", {5, 3});
  int read = 0;
  for (std::uint64_t seed = 0; seed < 20'000; ++seed) {
    std::mt19937_64 random(seed);
    const std::string bad = damage(good, random);
    const auto parsed = parse_npy_header(bytes_of(bad), 1000, "bad.npy");
    if (parsed) {
      ++read;
      const auto bytes = tensor_bytes(dtype_bytes(parsed->dtype), parsed->shape);
      ASSERT_TRUE(bytes && *bytes <= 1000 - parsed->data_offset) << "seed " << seed;
    } else {
      ASSERT_FALSE(parsed.error().to_string().empty()) << "seed " << seed;
    }
  }
  EXPECT_GT(read, 0);
}

TEST(SafetensorsTest, ReadsBackWhatItWrote) {
  ScratchDirectory scratch;
  const fs::path path = scratch / "model.safetensors";
  const std::vector<float> weights{1, 2, 3, 4, 5, 6};
  const std::vector<std::int64_t> steps{42};
  {
    auto writer = SafetensorsWriter::create(path,
                                            {{"w", DType::kFloat32, {2, 3}},
                                             {"empty", DType::kFloat16, {0, 8}},
                                             {"step", DType::kInt64, {}}},
                                            {{"format", "pt"}, {"quote", "a \"b\" \xC3\xA4"}})
                      .or_throw();
    ASSERT_TRUE(writer.write(std::as_bytes(std::span(weights)).first(5)));
    ASSERT_TRUE(writer.write(std::as_bytes(std::span(weights)).subspan(5)));
    ASSERT_TRUE(writer.write(std::as_bytes(std::span(steps))));
    EXPECT_EQ(test::names_in(scratch.path()),
              std::vector<std::string>{"model.safetensors.partial"});
    ASSERT_TRUE(writer.finish());
    EXPECT_FALSE(writer.finish());
  }
  EXPECT_EQ(test::names_in(scratch.path()), std::vector<std::string>{"model.safetensors"});
  const auto reader = SafetensorsReader::open(path).or_throw();
  EXPECT_EQ(reader.metadata().at("quote"), "a \"b\" \xC3\xA4");
  EXPECT_EQ(reader.entries().size(), 3U);
  const auto* entry = reader.find("w").or_throw();
  EXPECT_EQ(read_all<float>(reader.rows_of(*entry).or_throw()), weights);
  std::vector<std::int64_t> step(1);
  ASSERT_TRUE(
      reader.read(*reader.find("step").or_throw(), 0, std::as_writable_bytes(std::span(step))));
  EXPECT_EQ(step, steps);
  EXPECT_FALSE(reader.read(*entry, 20, std::as_writable_bytes(std::span(step))));
  EXPECT_EQ(*reader.find("v").error().detail, path.string() + ": there is no tensor \"v\"");
  EXPECT_FALSE(reader.rows_of(*reader.find("step").or_throw()));
  std::uint64_t length = 0;
  std::memcpy(&length, test::slurp(path).data(), 8);
  EXPECT_EQ((8 + length) % 64, 0U) << "data is 64-byte aligned";
}

TEST(SafetensorsTest, WriterRefusesWrongSizesAndLeavesNothing) {
  ScratchDirectory scratch;
  const std::vector<std::byte> bytes(13);
  {
    auto writer =
        SafetensorsWriter::create(scratch / "x", {{"a", DType::kFloat32, {3}}}).or_throw();
    EXPECT_FALSE(writer.write(bytes));
    ASSERT_TRUE(writer.write(std::span(bytes).first(8)));
    EXPECT_FALSE(writer.finish());
  }
  EXPECT_TRUE(test::names_in(scratch.path()).empty());
  EXPECT_FALSE(SafetensorsWriter::create(scratch / "x", {{"a"}, {"a"}}));
  EXPECT_FALSE(SafetensorsWriter::create(scratch / "x", {{"__metadata__"}}));
  EXPECT_FALSE(SafetensorsWriter::create(scratch / "x", {{"a", DType::kInt64, {1LL << 61}}}));
}

TEST(SafetensorsTest, RefusesHostileHeaders) {
  const auto refused = [](const std::string& json, std::int64_t data_bytes) {
    const auto parsed = parse_safetensors_header(json, data_bytes, "x");
    return !parsed && parsed.error().code == ErrorCode::kCorrupt;
  };
  const auto tensor = [](const std::string& type, const std::string& shape,
                         const std::string& offsets) {
    return "{\"dtype\":\"" + type + "\",\"shape\":" + shape + ",\"data_offsets\":" + offsets + "}";
  };
  const std::string good = tensor("F32", "[2]", "[0,8]");
  EXPECT_FALSE(refused("{\"a\":" + good + "}", 8));
  EXPECT_FALSE(refused("{}", 0));
  EXPECT_FALSE(refused("{\"a\":" + tensor("BOOL", "[8]", "[0,8]") + "}", 8)) << "known, not read";
  EXPECT_TRUE(refused("{\"a\":" + good + "}", 9)) << "a hole at the end";
  EXPECT_TRUE(refused("{\"a\":" + good + "}", 7)) << "truncated";
  EXPECT_TRUE(refused("{\"a\":" + good + ",\"a\":" + tensor("F32", "[2]", "[8,16]") + "}", 16));
  EXPECT_TRUE(refused("{\"a\":" + good + ",\"b\":" + good + "}", 8)) << "overlap";
  EXPECT_TRUE(refused("{\"a\":" + tensor("F32", "[2]", "[4,12]") + "}", 12)) << "a hole";
  EXPECT_TRUE(refused("{\"a\":" + tensor("F32", "[2]", "[8,0]") + "}", 8));
  EXPECT_TRUE(refused("{\"a\":" + tensor("F32", "[2]", "[-8,0]") + "}", 8));
  EXPECT_TRUE(refused("{\"a\":" + tensor("F32", "[4611686018427387904,4]", "[0,8]") + "}", 8));
  EXPECT_TRUE(refused("{\"a\":" + tensor("F32", "[2.0]", "[0,8]") + "}", 8));
  EXPECT_TRUE(refused("{\"a\":" + tensor("F9", "[2]", "[0,8]") + "}", 8));
  EXPECT_TRUE(refused("{\"a\":" + tensor("F32", "[[2]]", "[0,8]") + "}", 8));
  EXPECT_TRUE(refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[2]}}", 8));
  EXPECT_TRUE(refused("{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\",\"shape\":[2]}}", 8));
  EXPECT_TRUE(refused("{\"__metadata__\":{\"a\":1}}", 0));
  EXPECT_TRUE(refused("{\"__metadata__\":{\"a\":{}}}", 0));
  EXPECT_TRUE(refused("[" + good + "]", 8));
  EXPECT_TRUE(refused("\"a\"", 0));
  EXPECT_TRUE(refused("", 0));
  EXPECT_TRUE(refused(std::string(1 << 20, '['), 0)) << "deep nesting ends at once";
  EXPECT_TRUE(refused(std::string(1 << 20, '{'), 0));
}

TEST(SafetensorsTest, BoundsTheHeaderByTheFile) {
  ScratchDirectory scratch;
  const std::string huge("\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x7F{}", 10);
  test::spill(scratch / "huge", huge);
  EXPECT_FALSE(SafetensorsReader::open(scratch / "huge"));
  test::spill(scratch / "tiny", "abc");
  EXPECT_FALSE(SafetensorsReader::open(scratch / "tiny"));
}

TEST(SafetensorsTest, SurvivesAnyDamage) {
  ScratchDirectory scratch;
  {
    auto writer =
        SafetensorsWriter::create(
            scratch / "good",
            {{"image", DType::kFloat32, {4, 2}}, {"text", DType::kFloat16, {4, 4}}}, {{"k", "v"}})
            .or_throw();
    ASSERT_TRUE(writer.write(std::vector<std::byte>(64)));
    ASSERT_TRUE(writer.finish());
  }
  const std::string good = test::slurp(scratch / "good");
  const std::string header = good.substr(8, good.size() - 8 - 64);
  for (std::uint64_t seed = 0; seed < 20'000; ++seed) {
    std::mt19937_64 random(seed);
    const auto parsed = parse_safetensors_header(damage(header, random), 64, "bad");
    for (std::size_t i = 0; parsed && i < parsed->entries.size(); ++i) {
      ASSERT_LE(parsed->entries[i].end, 64) << "seed " << seed;
    }
  }
  int read = 0;
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    test::spill(scratch / "bad", damage(good, random));
    const auto reader = SafetensorsReader::open(scratch / "bad");
    if (!reader) {
      continue;
    }
    ++read;
    for (const auto& entry : reader->entries()) {
      ASSERT_LE(entry.end, 64 + 40);
      if (const auto rows = reader->rows_of(entry); rows && rows->row_bytes() > 0) {
        std::vector<std::byte> out(static_cast<std::size_t>(rows->rows() * rows->row_bytes()));
        EXPECT_TRUE(rows->read(0, out));
      }
    }
  }
  EXPECT_GT(read, 0);
}

}  // namespace
}  // namespace plimsoll

// SPDX-License-Identifier: Apache-2.0
//
// Goal: plots are well-formed documents whose marks lie on the canvas, for any name and any number.
// Method: a small reader of XML (elements, attributes, entities) and what it finds.
#include "recipes/can_kd/plots.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <sstream>

#include "recipes/can_kd/svg_canvas.h"
#include "tests/support/feature_set.h"

namespace plimsoll::can_kd {
namespace {

using test::ScratchDirectory;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Element {
  std::string name{};
  std::map<std::string, std::string> attributes{};
  std::string text{};
};

/// Replaces the five entities; fails on any other '&' and on a bare '<'.
std::optional<std::string> unescaped(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    if (text[0] == '<') {
      return std::nullopt;
    }
    if (text[0] != '&') {
      out += text[0];
      text.remove_prefix(1);
      continue;
    }
    bool known = false;
    for (const auto& [entity, letter] : std::map<std::string_view, char>{
             {"&lt;", '<'}, {"&gt;", '>'}, {"&amp;", '&'}, {"&quot;", '"'}}) {
      if (text.substr(0, entity.size()) == entity) {
        out += letter;
        text.remove_prefix(entity.size());
        known = true;
        break;
      }
    }
    if (!known) {
      return std::nullopt;
    }
  }
  return out;
}

/// One tag without its brackets: a name, then name="value" pairs, then perhaps a slash.
std::optional<Element> parsed_tag(std::string_view tag) {
  Element element;
  std::size_t at = tag.find_first_of(" /");
  element.name = std::string{tag.substr(0, at)};
  while (at < tag.size() && tag[at] == ' ') {
    const std::size_t equals = tag.find("=\"", at);
    const std::size_t end = equals == tag.npos ? tag.npos : tag.find('"', equals + 2);
    if (end == tag.npos) {
      return std::nullopt;
    }
    const auto value = unescaped(tag.substr(equals + 2, end - equals - 2));
    const std::string name{tag.substr(at + 1, equals - at - 1)};
    if (!value || name.empty() || !element.attributes.emplace(name, *value).second) {
      return std::nullopt;
    }
    at = end + 1;
  }
  return at >= tag.size() || tag.substr(at) == "/" ? std::optional{element} : std::nullopt;
}

/// Every element of a document in order; nothing when it is not well-formed.
std::optional<std::vector<Element>> parse(std::string_view svg) {
  constexpr std::string_view kDeclaration = "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n";
  if (svg.substr(0, kDeclaration.size()) != kDeclaration) {
    return std::nullopt;
  }
  svg.remove_prefix(kDeclaration.size());
  std::vector<Element> all;
  std::vector<std::size_t> open;
  while (!svg.empty()) {
    const std::size_t bracket = svg.find('<');
    const auto text = unescaped(svg.substr(0, bracket));
    if (!text || (open.empty() && text->find_first_not_of('\n') != text->npos)) {
      return std::nullopt;
    }
    if (!open.empty()) {
      all[open.back()].text += *text;
    }
    if (bracket == svg.npos) {
      break;
    }
    const std::size_t end = svg.find('>', bracket);
    if (end == svg.npos) {
      return std::nullopt;
    }
    const std::string_view tag = svg.substr(bracket + 1, end - bracket - 1);
    svg.remove_prefix(end + 1);
    if (!tag.empty() && tag[0] == '/') {
      if (open.empty() || all[open.back()].name != tag.substr(1)) {
        return std::nullopt;
      }
      open.pop_back();
      continue;
    }
    const auto element = parsed_tag(tag);
    if (!element) {
      return std::nullopt;
    }
    all.push_back(*element);
    if (tag.back() != '/') {
      open.push_back(all.size() - 1);
    }
  }
  return open.empty() ? std::optional{all} : std::nullopt;
}

double number(const Element& element, const char* name) {
  const auto found = element.attributes.find(name);
  EXPECT_NE(found, element.attributes.end()) << element.name << " " << name;
  return found == element.attributes.end() ? std::nan("") : std::stod(found->second);
}

std::vector<PlotPoint> points_of(const Element& element) {
  std::vector<PlotPoint> out;
  std::istringstream text{element.attributes.at("points")};
  for (std::string pair; text >> pair;) {
    const std::size_t comma = pair.find(',');
    out.push_back({std::stod(pair.substr(0, comma)), std::stod(pair.substr(comma + 1))});
  }
  return out;
}

/// The frame: the one rectangle that is not filled.
Element frame_of(const std::vector<Element>& all) {
  for (const Element& element : all) {
    if (element.name == "rect" && element.attributes.at("fill") == "none") {
      return element;
    }
  }
  ADD_FAILURE() << "no frame";
  return {};
}

std::vector<Element> elements(const std::string& svg) {
  auto all = parse(svg);
  EXPECT_TRUE(all) << svg;
  return all.value_or(std::vector<Element>{});
}

void expect_inside(const std::vector<Element>& all) {
  const double width = number(all[0], "width");
  const double height = number(all[0], "height");
  const auto on_canvas = [&](double x, double y) {
    EXPECT_TRUE(x >= 0 && x <= width && y >= 0 && y <= height) << x << " " << y;
  };
  for (const Element& element : all) {
    if (element.name == "text") {
      on_canvas(number(element, "x"), number(element, "y"));
    } else if (element.name == "line") {
      on_canvas(number(element, "x1"), number(element, "y1"));
      on_canvas(number(element, "x2"), number(element, "y2"));
    } else if (element.name == "rect") {
      on_canvas(number(element, "x"), number(element, "y"));
      on_canvas(number(element, "x") + number(element, "width"),
                number(element, "y") + number(element, "height"));
    } else if (element.name == "polyline") {
      const Element frame = frame_of(all);
      for (const PlotPoint& point : points_of(element)) {
        EXPECT_GE(point.x, number(frame, "x"));
        EXPECT_LE(point.x, number(frame, "x") + number(frame, "width"));
        EXPECT_GE(point.y, number(frame, "y"));
        EXPECT_LE(point.y, number(frame, "y") + number(frame, "height"));
      }
    }
  }
}

bool has_text(const std::vector<Element>& all, const std::string& wanted) {
  for (const Element& element : all) {
    if (element.text == wanted) {
      return true;
    }
  }
  return false;
}

TEST(CanKdPlotsTest, TheReaderOfTheseTestsRefusesWhatIsNotWellFormed) {
  const std::string head = "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n";
  EXPECT_TRUE(parse(head + "<svg a=\"1\"><b/>&lt;</svg>\n"));
  for (const char* bad : {"<svg>", "<svg></b>", "<svg a=1></svg>", "<svg>&</svg>", "<svg>a</svg>b",
                          "<svg a=\"1\" a=\"2\"></svg>", "<svg a=\"<\"></svg>", "</svg>"}) {
    EXPECT_FALSE(parse(head + bad)) << bad;
  }
}

TEST(CanKdPlotsTest, CurvesAreDrawnWhereTheirPointsAre) {
  const std::vector<NamedCurve> curves{{"teacher", {{0, 0, 9}, {0.25, 0.75, 1}, {1, 1, 0}}, 0.75},
                                       {"nothing scored", {}, std::nan("")},
                                       {"student <\"A&B\">", {{0, 0, 9}, {1, 1, 0}}, 0.5}};
  const auto all = elements(roc_plot("ROC & more", curves));
  expect_inside(all);
  const Element frame = frame_of(all);
  std::vector<Element> lines;
  for (const Element& element : all) {
    if (element.name == "polyline") {
      lines.push_back(element);
    }
  }
  ASSERT_EQ(lines.size(), 2U);
  const auto points = points_of(lines[0]);
  EXPECT_NEAR(points[0].x, number(frame, "x"), 1e-3);
  EXPECT_NEAR(points[0].y, number(frame, "y") + number(frame, "height"), 1e-3);
  EXPECT_NEAR(points[1].x, number(frame, "x") + 0.25 * number(frame, "width"), 1e-3);
  EXPECT_NEAR(points[1].y, number(frame, "y") + 0.25 * number(frame, "height"), 1e-3);
  EXPECT_NE(lines[0].attributes.at("stroke"), lines[1].attributes.at("stroke"));
  for (const char* words : {"ROC & more", "teacher (0.7500)", "nothing scored",
                            "student <\"A&B\"> (0.5000)", "false positive rate", "recall", "0.2"}) {
    EXPECT_TRUE(has_text(all, words)) << words;
  }
  const auto pr = elements(pr_plot("PR", curves));
  expect_inside(pr);
  EXPECT_TRUE(has_text(pr, "precision"));
}

TEST(CanKdPlotsTest, ManyCurvesHaveALegendThatFits) {
  std::vector<NamedCurve> curves;
  for (int i = 0; i < 60; ++i) {
    curves.push_back({fmt::format("{}{}", std::string(100, 'x'), i), {{0, 1, 0}, {1, 0.1, 0}}, 1});
  }
  const auto all = elements(pr_plot("many", curves));
  expect_inside(all);
  std::set<std::string> styles;
  for (const Element& element : all) {
    if (element.name == "polyline") {
      const auto dashes = element.attributes.find("stroke-dasharray");
      styles.insert(element.attributes.at("stroke") +
                    (dashes == element.attributes.end() ? "" : dashes->second));
    }
  }
  EXPECT_EQ(styles.size(), 21U);
}

TEST(CanKdPlotsTest, NamesOfAnyBytesLeaveAWellFormedDocument) {
  EXPECT_EQ(xml_text("a\x01\n\tb<c>&\"é…\x7F"), "ab&lt;c&gt;&amp;&quot;é…");
  EXPECT_EQ(xml_text("\xC3"), "");            // Cut short.
  EXPECT_EQ(xml_text("\xED\xA0\x80x"), "x");  // A surrogate.
  EXPECT_EQ(xml_text("\xC0\xAFx\xFF"), "x");  // Overlong; no UTF-8 at all.
  EXPECT_EQ(xml_text("\xF0\x9F\x9A\xA2"), "\xF0\x9F\x9A\xA2");
  std::string bytes;
  for (int i = 0; i < 256; ++i) {
    bytes += static_cast<char>(i);
  }
  expect_inside(elements(roc_plot(bytes, std::vector<NamedCurve>{{bytes, {{0, 0, 0}}, 0}})));
}

TEST(CanKdPlotsTest, AConfusionMatrixShowsCountsAndSharesOfItsRows) {
  BinaryScores s;
  s.graphs = 1000;
  s.tn = 880;
  s.fp = 20;
  s.fn = 25;
  s.tp = 75;
  s.threshold = 0.5;
  const auto all = elements(confusion_plot("fusion", s));
  expect_inside(all);
  for (const char* words : {"fusion", "880", "97.78 %", "20", "2.22 %", "25", "25.00 %", "75",
                            "75.00 %", "1000 graphs, threshold 0.5", "normal", "attack"}) {
    EXPECT_TRUE(has_text(all, words)) << words;
  }
  expect_inside(elements(confusion_plot("none", BinaryScores{})));
}

TEST(CanKdPlotsTest, DifficultyOverEpochsStaysInTheFrameWhateverTheNumbers) {
  std::vector<DifficultyPoint> points;
  for (int e = 0; e < 30; ++e) {
    const float x = 1.0F / static_cast<float>(e + 1);
    points.push_back({10 * e, {x, x * 2, x * 3, x * 4, x * 5}, x * 4.5F});
  }
  const auto all = elements(difficulty_plot("difficulty", points));
  expect_inside(all);
  EXPECT_TRUE(has_text(all, "median"));
  EXPECT_TRUE(has_text(all, "epoch"));
  EXPECT_TRUE(has_text(all, "200"));  // A tick.
  const float most = std::numeric_limits<float>::max();
  for (const auto& odd : std::vector<std::vector<DifficultyPoint>>{
           {},
           {{5, {1, 1, 1, 1, 1}, 1}},
           {{0, {0, 0, 0, 0, 0}, 0}, {1, {kNan, kNan, kNan, kNan, kNan}, kNan}},
           {{0, {-most, 0, 0, 0, most}, 0}, {1, {most, most, most, most, most}, most}},
           {{0, {most, most, most, most, most}, most}},
           {{0, {1e-30F, 2e-30F, 3e-30F, 4e-30F, 5e-30F}, 3e-30F}}}) {
    expect_inside(elements(difficulty_plot("odd", odd)));
  }
}

TEST(CanKdPlotsTest, TicksAreRoundAndCoverTheRange) {
  EXPECT_EQ(round_ticks(0, 1), (std::vector<double>{0, 0.2, 0.4, 0.6000000000000001, 0.8, 1}));
  EXPECT_EQ(round_ticks(0, 47), (std::vector<double>{0, 10, 20, 30, 40, 50}));
  for (const auto& [low, high] : std::vector<std::pair<double, double>>{
           {-3.2, 7.9}, {1e-12, 3e-12}, {-1e300, 1e300}, {99.9, 100.0}}) {
    const auto ticks = round_ticks(low, high);
    EXPECT_LE(ticks.front(), low);
    EXPECT_GE(ticks.back(), high);
    EXPECT_GE(ticks.size(), 3U);
    EXPECT_LE(ticks.size(), 9U);
  }
}

TEST(CanKdPlotsTest, AreWrittenBelowPlotsAndReplaced) {
  const ScratchDirectory scratch;
  write_plot(scratch / "", "roc", "one").or_throw();
  write_plot(scratch / "", "roc", "two").or_throw();
  std::ifstream file{scratch / "plots" / "roc.svg"};
  std::string text;
  file >> text;
  EXPECT_EQ(text, "two");
  std::ofstream(scratch / "file") << "no folder";
  const auto refused = write_plot(scratch / "file", "roc", "x");
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kIo);
}

}  // namespace
}  // namespace plimsoll::can_kd

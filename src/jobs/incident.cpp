// SPDX-License-Identifier: Apache-2.0
#define TOML_EXCEPTIONS 0
#include "jobs/incident.h"

#include <algorithm>
#include <array>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <toml++/toml.h>

#include "base/check.h"
#include "os/file.h"

namespace plimsoll {
namespace {

constexpr std::array kConsequences{"note", "retry", "fail"};
// As ending_name() of verdict.h says them, and what the runner of a queue adds.
constexpr std::array kEvents{"done",         "killed_for_limit", "killed_in_cgroup", "stopped",
                             "machine_full", "killed",           "timeout"};
// Of memory and time: found whatever a job prints.
constexpr const char* kUsual = R"(
[[rule]]
name = "killed at its memory limit"
event = ["killed_for_limit", "killed_in_cgroup", "stopped"]
[[rule]]
name = "killed because the machine was full"
event = ["machine_full"]
[[rule]]
name = "ran out of time"
event = ["timeout"]
then = "fail"
)";

tl::unexpected<Error> wrong(std::string text) {
  return fail(ErrorCode::kInvalidArgument, std::move(text));
}

// Words of a key that is one, or a list.
template <class T>
bool read_list(const toml::node& node, std::vector<T>& out) {
  if (const auto one = node.value_exact<T>()) {
    out.push_back(*one);
    return true;
  }
  const auto* list = node.as_array();
  if (list == nullptr || list->empty()) {
    return false;
  }
  for (const auto& member : *list) {
    const auto one = member.value_exact<T>();
    if (!one) {
      return false;
    }
    out.push_back(*one);
  }
  return true;
}

Result<void> read_key(std::string_view key, const toml::node& node, IncidentRule::Sources& rule) {
  std::vector<std::string> texts;
  std::vector<std::int64_t> numbers;
  if (key == "status") {
    if (!read_list(node, numbers) ||
        std::ranges::any_of(numbers, [](std::int64_t one) { return one < 0 || one > 255; })) {
      return wrong("status is a number from 0 to 255, or a list of them");
    }
    rule.statuses.assign(numbers.begin(), numbers.end());
    return {};
  }
  if (key != "name" && key != "pattern" && key != "then" && key != "event") {
    return wrong(
        fmt::format("no key of a rule: {}; there are name, pattern, status, event, then", key));
  }
  if (!read_list(node, texts) || (key != "event" && texts.size() != 1)) {
    return wrong(fmt::format("{} is a text in quotes", key));
  }
  if (key == "name") {
    rule.name = texts[0];
  } else if (key == "pattern") {
    rule.pattern = texts[0];
  } else if (key == "event") {
    rule.events = texts;
  } else {
    const auto* const found = std::ranges::find(kConsequences, texts[0]);
    if (found == kConsequences.end()) {
      return wrong(fmt::format("then is {}, not \"{}\"", fmt::join(kConsequences, ", "), texts[0]));
    }
    rule.then = static_cast<Consequence>(found - kConsequences.begin());
  }
  return {};
}

}  // namespace

const char* consequence_name(Consequence then) noexcept {
  return kConsequences[static_cast<std::size_t>(then)];
}

Result<IncidentRule> IncidentRule::make(Sources sources) {
  const int kinds = static_cast<int>(!sources.pattern.empty()) +
                    static_cast<int>(!sources.statuses.empty()) +
                    static_cast<int>(!sources.events.empty());
  if (sources.name.empty() || sources.name.size() > kPatternMost) {
    return wrong(fmt::format("a rule needs a name of at most {} bytes", kPatternMost));
  }
  if (kinds != 1) {
    return wrong("a rule has one of pattern, status and event");
  }
  for (const std::string& event : sources.events) {
    if (std::ranges::find(kEvents, event) == kEvents.end()) {
      return wrong(fmt::format("no event: \"{}\"; there are {}", event, fmt::join(kEvents, ", ")));
    }
  }
  IncidentRule rule;
  if (!sources.pattern.empty()) {
    if (sources.pattern.size() > kPatternMost) {
      return wrong(fmt::format("a pattern has at most {} bytes", kPatternMost));
    }
    auto compiled = std::make_unique<regex_t>();
    const std::string words = "(^|[^[:alnum:]_])(" + sources.pattern + ")($|[^[:alnum:]_])";
    if (const int problem = ::regcomp(compiled.get(), words.c_str(), REG_EXTENDED | REG_NOSUB);
        problem != 0) {
      std::array<char, 128> text{};
      ::regerror(problem, compiled.get(), text.data(), text.size());
      return wrong(fmt::format("pattern \"{}\": {}", sources.pattern, text.data()));
    }
    rule.compiled_ = std::shared_ptr<const regex_t>(compiled.release(), [](const regex_t* done) {
      const std::unique_ptr<regex_t> owned(const_cast<regex_t*>(done));
      ::regfree(owned.get());
    });
  }
  rule.sources_ = std::move(sources);
  return rule;
}

bool IncidentRule::matches_line(const std::string& line) const noexcept {
  return compiled_ && ::regexec(compiled_.get(), line.c_str(), 0, nullptr, 0) == 0;
}

std::optional<std::string> IncidentRule::matches_end(int status, std::string_view event) const {
  if (std::ranges::find(sources_.statuses, status) != sources_.statuses.end()) {
    return fmt::format("status {}", status);
  }
  if (std::ranges::find(sources_.events, event) != sources_.events.end()) {
    return fmt::format("event {}", event);
  }
  return std::nullopt;
}

Result<IncidentRules> IncidentRules::parse(const std::string& name, const std::string& text) {
  if (std::ranges::count(text, '.') > 10'000) {  // toml++ recurses along dotted names.
    return wrong(name + ": too many dots");
  }
  const auto parsed = toml::parse(text, name);
  if (!parsed) {
    return wrong(fmt::format("{}:{}: {}", name, parsed.error().source().begin.line,
                             parsed.error().description()));
  }
  IncidentRules rules;
  for (const auto& [key, node] : parsed.table()) {
    const auto* list = node.as_array();
    if (key.str() != "rule" || list == nullptr || !list->is_array_of_tables()) {
      return wrong(fmt::format("{}:{}: rules are tables [[rule]], and nothing else is there", name,
                               key.source().begin.line));
    }
    for (const auto& one : *list) {
      const toml::table& table = *one.as_table();
      const auto at = [&](const Error& error) {
        return wrong(fmt::format("{}:{}: {}", name, table.source().begin.line, *error.detail));
      };
      IncidentRule::Sources sources;
      for (const auto& [rule_key, rule_node] : table) {
        if (const auto read = read_key(rule_key.str(), rule_node, sources); !read) {
          return at(read.error());
        }
      }
      auto rule = IncidentRule::make(std::move(sources));
      if (!rule) {
        return at(rule.error());
      }
      rules.rules_.push_back(std::move(*rule));
    }
  }
  if (rules.rules_.size() > kRulesMost) {
    return wrong(
        fmt::format("{}: {} rules, and there may be {}", name, rules.rules_.size(), kRulesMost));
  }
  return rules;
}

IncidentRules IncidentRules::usual() {
  return parse("usual", kUsual).or_throw();
}

Result<IncidentRules> IncidentRules::read(const std::filesystem::path& file) {
  PLIMSOLL_TRY(const std::string text, read_small_file(file, kFileBytesMost));
  PLIMSOLL_TRY(IncidentRules rules, parse(file.string(), text));
  for (IncidentRule& rule : usual().rules_) {
    rules.rules_.push_back(std::move(rule));
  }
  return rules;
}

std::optional<Incident> IncidentRules::find(int status, std::string_view event,
                                            const std::vector<std::string>& lines) const {
  for (std::size_t at = 0; at < rules_.size(); ++at) {
    const IncidentRule& rule = rules_[at];
    auto evidence = rule.matches_end(status, event);
    if (!evidence && at < lines.size() && !lines[at].empty()) {
      evidence = lines[at];
    }
    if (evidence) {
      return Incident{rule.name(), *evidence, consequence_name(rule.then())};
    }
  }
  return std::nullopt;
}

}  // namespace plimsoll

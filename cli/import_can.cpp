// SPDX-License-Identifier: Apache-2.0
//
// import can: frames of a CAN bus become a set of graphs.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "plimsoll/can_import.h"
#include "recipes/control.h"
#include "recipes/describe.h"

namespace plimsoll {
namespace {

struct Typed {
  CanImportOptions options{};
  std::vector<std::string> inputs{};
  std::string out{};
  std::string vocabulary{};
  std::string memory_limit{};
  bool include_all{false};
  bool json{false};
  bool quiet{false};
};

int import_frames(const Typed& typed) {
  const StopSignals signals;
  CanImportOptions options = typed.options;
  options.inputs = {typed.inputs.begin(), typed.inputs.end()};
  options.out = typed.out;
  options.vocabulary = typed.vocabulary;
  if (typed.include_all) {
    options.exclude.clear();
  }
  auto governor = Governor::create({.memory_limit = typed.memory_limit});
  if (!governor) {
    const bool usage = governor.error().code == ErrorCode::kInvalidArgument;
    return report(governor.error(), usage ? kUsageStatus : kFailedStatus);
  }
  const auto meter =
      std::make_shared<WorkMeter>("import", ProgressOptions{.quiet = typed.quiet || typed.json});
  const auto made = import_can(*governor, options, metered(meter));
  if (!made) {
    return report(made.error());
  }
  const auto found = describe(typed.out);
  if (!found) {
    return report(found.error());
  }
  if (typed.json) {
    auto json = nlohmann::ordered_json::parse(found->json);
    json["reused"] = made->reused;
    print(json.dump());
  } else {
    print(found->text +
          (made->reused ? "  (as it was: neither inputs nor options have changed)\n" : ""));
  }
  return 0;
}

}  // namespace

void add_import_can(CLI::App& command, int& status) {
  auto typed = std::make_shared<Typed>();
  CanImportOptions& options = typed->options;
  auto* can =
      command.add_subcommand("can", "Frames of a CAN bus (.csv, .csv.gz), or saved graphs (.pt)");
  can->add_option("CSV", typed->inputs, "Files and folders; test_* are for testing")->required();
  can->add_option("--out", typed->out, "Folder to make, or made before")->required();
  can->add_option("--window", options.window, "Frames of a graph [100]");
  can->add_option("--stride", options.stride, "Frames from one window to the next [100]");
  can->add_option("--validation", options.validation,
                  "Share of the training graphs held out [0.2]");
  can->add_option("--seed", options.seed, "Chooses those [42]");
  can->add_option("--columns", options.columns, "Names of time, id, payload and label")
      ->delimiter(',')
      ->allow_extra_args(false);
  can->add_option("--vocabulary", typed->vocabulary, "Take the ids of this graph set");
  can->add_flag("--normal-ids", options.normal_ids,
                "Take ids of frames that are no attack; attacks' made-up ids are unknown");
  can->add_option("--exclude", options.exclude, "Leave out files so named [suppress,masquerade]")
      ->delimiter(',')
      ->allow_extra_args(false);
  can->add_flag("--include-all", typed->include_all, "Leave out no file for its name");
  can->add_flag("--skip-bad", options.skip_bad, "Leave out rows that cannot be read; count them");
  can->add_flag("--rebuild", options.rebuild, "Even when nothing has changed");
  can->add_option("--ids-max", options.ids_max, "Most different ids [65536]");
  can->add_option("--threads", options.threads, "Threads; the graphs do not depend on them [1]");
  can->add_option("--memory-limit", typed->memory_limit, "Memory the process may hold")
      ->type_name("SIZE");
  can->add_flag("--json", typed->json, "One line of JSON on standard output");
  can->add_flag("--quiet", typed->quiet, "No progress");
  can->footer(
      "\nExample:\n  plimsoll import can set_01/ --out graphs/ --window 100 --stride 100"
      "\n  plimsoll import can survival/ --out graphs/ --normal-ids"
      "\n  plimsoll import can processed_graphs.pt --out graphs/");
  can->callback([typed, &status] { status = import_frames(*typed); });
}

}  // namespace plimsoll

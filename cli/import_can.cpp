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
#include "run/control.h"
#include "tables/describe.h"

namespace plimsoll {
namespace {

struct TypedImport {
  CanImportOptions options{};
  std::vector<std::string> inputs{};
  std::string out{};
  std::string vocabulary{};
  std::string dialect{"auto"};
  std::string memory_limit{};
  bool include_all{false};
  bool json{false};
  bool quiet{false};
};

int import_frames(const TypedImport& typed) {
  const StopSignals signals;
  CanImportOptions options = typed.options;
  options.inputs = {typed.inputs.begin(), typed.inputs.end()};
  options.out = typed.out;
  options.vocabulary = typed.vocabulary;
  const auto dialect = can_dialect_named(typed.dialect);
  if (!dialect) {
    return report(dialect.error(), kUsageStatus);
  }
  options.dialect = *dialect;
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
  auto typed = std::make_shared<TypedImport>();
  CanImportOptions& options = typed->options;
  auto* can = command.add_subcommand("can",
                                     "Frames of a CAN bus (CSV, HCRL, candump, ROAD; .gz too), or "
                                     "saved graphs (.pt; need Python)");
  can->add_option("CSV", typed->inputs,
                  "Files and folders of frames; those named test_* are for testing")
      ->required();
  can->add_option("--out", typed->out, "Folder of the graph set, to make or made before")
      ->required();
  can->add_option("--window", options.window, "Number of frames of a graph [100]");
  can->add_option("--stride", options.stride, "Number of frames from one window to the next [100]");
  can->add_option("--validation", options.validation,
                  "Share of the training graphs held out [0.2]");
  can->add_option("--seed", options.seed, "Seed that chooses the graphs held out [42]");
  can->add_option("--dialect", typed->dialect,
                  "How lines are read: auto, csv, decimal, hcrl, candump or road [auto: as the "
                  "first line of a file shows]");
  can->add_option("--columns", options.columns,
                  "Names of time, id, payload and label; - for a time or label that is not there")
      ->delimiter(',')
      ->allow_extra_args(false);
  can->add_option("--vocabulary", typed->vocabulary,
                  "Graph set whose CAN ids are taken; others count as unknown");
  can->add_flag("--normal-ids", options.normal_ids,
                "CAN ids are those of normal frames; ids that only attacks use count as unknown");
  can->add_option("--exclude", options.exclude,
                  "Names of attacks whose files are left out [suppress,masquerade]")
      ->delimiter(',')
      ->allow_extra_args(false);
  can->add_flag("--include-all", typed->include_all, "Files are never left out for their names")
      ->excludes("--exclude");
  can->add_flag("--skip-bad", options.skip_bad,
                "Rows that cannot be read are left out and counted");
  can->add_flag("--rebuild", options.rebuild,
                "Graph set is made anew even when nothing has changed");
  can->add_option("--ids-max", options.ids_max, "Largest number of different CAN ids [65536]");
  can->add_option("--threads", options.threads,
                  "Number of threads; the graphs do not depend on it [1]");
  can->add_option("--memory-limit", typed->memory_limit,
                  "Memory limit of the process: 768MiB, 6GB, 25%")
      ->type_name("SIZE");
  can->add_flag("--json", typed->json, "Result as one line of JSON instead of text");
  can->add_flag("--quiet", typed->quiet, "Progress is not shown");
  can->footer(
      "\nExample:\n  plimsoll import can set_01/ --out graphs/ --window 100 --stride 100"
      "\n  plimsoll import can DoS_dataset.csv normal_run_data.txt --dialect hcrl --out graphs/"
      "\n  plimsoll import can survival/ --out graphs/ --normal-ids"
      "\n  plimsoll import can processed_graphs.pt --out graphs/");
  can->callback([typed, &status] { status = import_frames(*typed); });
}

}  // namespace plimsoll

// SPDX-License-Identifier: Apache-2.0
//
// stop, pause, continue, limit, status: what another shell asks of a run.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <memory>

#include "cli/commands.h"
#include "run/control.h"
#include "run/limit_requests.h"
#include "run/run_folder.h"

namespace plimsoll {
namespace {

using Ask = Result<bool> (*)(const std::filesystem::path&);

/// Says what became of a request; the exit status.
int answer(const std::string& run, bool somebody, const std::string& done) {
  print(fmt::format("{}: {}", run, somebody ? done : "no process trains there"));
  return somebody ? 0 : kNobodyStatus;
}

void add_request(CLI::App& app, int& status, const char* name, const char* help, Ask ask,
                 const char* done) {
  auto* command = app.add_subcommand(name, help);
  auto run = std::make_shared<std::string>();
  command->add_option("RUN", *run, "Folder of the run")->required();
  command->footer(
      fmt::format("\nExit status 4: no process trains there.\nExample:\n  plimsoll {} run/", name));
  command->callback([run, ask, done, &status] {
    const auto asked = ask(*run);
    if (!asked) {
      status = report(asked.error());
      return;
    }
    status = answer(*run, *asked, done);
  });
}

void add_limit(CLI::App& app, int& status) {
  auto* command = app.add_subcommand("limit", "Change the memory limit of a run while it trains");
  auto run = std::make_shared<std::string>();
  auto size = std::make_shared<std::string>();
  command->add_option("RUN", *run, "Folder of the run")->required();
  auto device = std::make_shared<std::string>();
  auto* of_host =
      command->add_option("SIZE", *size, "New memory limit: 6GiB, 512MiB, 25% (of the machine)");
  command
      ->add_option("--device-memory-limit", *device,
                   "New limit of the device's memory: 20GiB, 80% (of the device's)")
      ->excludes(of_host);
  command->footer(
      "\nCaches and queues follow within a second; what is computed does not change. Below what "
      "the\n"
      "run cannot do without it ends at its next step, with a checkpoint, and says which limit "
      "would\n"
      "do. The change is in `plimsoll status` and events.jsonl; a resumed run has its own limit.\n"
      "A device's limit changes at the next step, unless its tensors alone pass the new one.\n"
      "Exit status 4: no process trains there.\n"
      "\nExamples:\n  plimsoll limit run/ 6GiB\n"
      "  plimsoll limit run/ --device-memory-limit 20GiB");
  command->callback([run, size, device, &status] {
    if (size->empty() && device->empty()) {
      throw CLI::RequiredError("SIZE or --device-memory-limit");
    }
    const std::string& wanted = size->empty() ? *device : *size;
    const auto asked = ask_for_limit(*run, wanted, size->empty());
    if (!asked) {
      const bool unreadable = asked.error().code == ErrorCode::kInvalidArgument;
      status = report(asked.error(), unreadable ? kUsageStatus : kFailedStatus);
      return;
    }
    status = answer(*run, *asked, fmt::format("asked to keep within {}", wanted));
  });
}

}  // namespace

void add_run_commands(CLI::App& app, int& status) {
  auto* show = app.add_subcommand("status", "Show what a run is doing, from another shell");
  auto run = std::make_shared<std::string>();
  auto json = std::make_shared<bool>(false);
  show->add_option("RUN", *run, "Folder of the run")->required();
  show->add_flag("--json", *json, "Result as one line of JSON instead of text");
  show->footer("\nExample:\n  plimsoll status run/ --json");
  show->callback([run, json, &status] {
    const auto view = RunFolder::view(*run);
    if (!view) {
      status = report(view.error());
      return;
    }
    print(*json ? view->to_json() : view->to_text());
  });
  add_request(app, status, "stop", "End a run at its next step, with a checkpoint", ask_to_stop,
              "asked to stop at its next step");
  add_request(app, status, "pause", "Hold a run at its next step; its memory stays", ask_to_pause,
              "asked to pause at its next step");
  add_request(app, status, "continue", "Let a paused run go on", ask_to_continue, "goes on");
  add_limit(app, status);
}

}  // namespace plimsoll

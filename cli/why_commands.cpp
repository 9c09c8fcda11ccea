// SPDX-License-Identifier: Apache-2.0
//
// why, report: how a run ended, and who held the memory; the same as a page.
#include <memory>

#include <CLI/CLI.hpp>

#include "cli/commands.h"
#include "run/counter_track.h"
#include "run/page.h"
#include "run/why.h"

namespace plimsoll {

void add_why_commands(CLI::App& app, int& status) {
  auto* command = app.add_subcommand("why", "Say how a run ended, and who held the memory");
  auto run = std::make_shared<std::string>();
  auto json = std::make_shared<bool>(false);
  command->add_option("RUN", *run, "Folder of a run, or of `plimsoll run --record`")->required();
  command->add_flag("--json", *json, "Result as one line of JSON instead of text");
  command->footer(R"(
Told from the run's own last word, how `plimsoll run` saw its command end, the kernel's counters of
its cgroup and of the machine then and now, the kernel's log where it may be read, and the last
looks at its memory (looks.bin). What a program prints is never read.

Examples:
  plimsoll why run/
  plimsoll why run/ --json)");
  command->callback([run, json, &status] {
    const auto why = explain_end(*run);
    if (!why) {
      status = report(why.error());
      return;
    }
    print(*json ? why->to_json() : why->to_text());
  });

  auto* report_command = app.add_subcommand("report", "Draw a run as one page: RUN/report.html");
  auto out = std::make_shared<std::string>();
  report_command->add_option("RUN", *run, "Folder of a run, or of `plimsoll run --record`")
      ->required();
  report_command->add_option("--out", *out, "File of the page instead of RUN/report.html");
  auto trace = std::make_shared<std::string>();
  report_command->add_option(
      "--trace", *trace,
      "File to write the memory counters to, for Perfetto beside a trace of torch.profiler");
  report_command->footer(R"(
Memory by owner over time with phases and the limit, loss and throughput, what was refused and given
back, commits, verdicts, advice, environment. One file, below 1.5 MB, that loads nothing: it can be
sent. A run that ends writes it by itself; of one that runs or was killed this draws it.

Examples:
  plimsoll report run/
  plimsoll report run/ --out /tmp/run.html
  plimsoll report run/ --trace memory.json    # open it in Perfetto)");
  report_command->callback([run, out, trace, &status] {
    const auto written = write_report(*run, *out);
    if (!written) {
      status = report(written.error());
      return;
    }
    if (!trace->empty()) {
      if (const auto traced = write_counter_tracks(*run, *trace); !traced) {
        status = report(traced.error());
        return;
      }
    }
    print(written->string());
  });
}

}  // namespace plimsoll

# SPDX-License-Identifier: Apache-2.0
"""What a capture of memray has as leaked in a span of time: python leaked.py CAPTURE BEGIN END FOLDER, in seconds.

Prints JSON: [file, line, bytes] of each site, most first. A site is the innermost frame of a file in FOLDER, else the
innermost. In a process of its own, for it takes a core and much memory, and others look on meanwhile.
"""
import bisect
import json
import pathlib
import sys

from memray import FileReader


def site(stack: list, folder: pathlib.Path) -> tuple[str, int]:
    frames = [(file, line) for _, file, line in stack]
    return next((one for one in frames if pathlib.Path(one[0]).parent == folder), frames[0] if frames else ("", 0))


def main(capture: str, begin: float, end: float, folder: pathlib.Path) -> None:
    by_site: dict[tuple[str, int], int] = {}
    with FileReader(capture) as reader:
        times = [snapshot.time for snapshot in reader.get_memory_snapshots()]
        first, last = (bisect.bisect(times, 1e3 * when) for when in (begin, end))
        for record in reader.get_temporal_allocation_records(merge_threads=True):
            left = sum(one.n_bytes for one in record.intervals if first < one.allocated_before_snapshot <= last and (
                one.deallocated_before_snapshot is None or one.deallocated_before_snapshot > last))
            if left:
                at = site(record.stack_trace(), folder)
                by_site[at] = by_site.get(at, 0) + left
    print(json.dumps([[*at, by_site[at]] for at in sorted(by_site, key=by_site.get, reverse=True)]))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), float(sys.argv[3]), pathlib.Path(sys.argv[4]))

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The model of model.py beside real ranks: 1 to 8 processes, each with a network namespace of its own and a link of 100 or 200 Mbit/s
to one bridge. Constants are measured with two ranks on other links; what 1, 2, 4 and 8 send and how long they take is predicted from them.

Namespaces are those of processes that end with this one, however it ends; no name of them is made anywhere."""
import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from bench.scale import model

SEED, SECONDS_BAR, BYTES_BAR = 20250601, 2.0, 0.1
DENSE, TABLE, ROWS, DIM = 1024, 32768, 2048, 128  # Gradients of DENSE × DENSE floats; ids of a table, and those that a rank looks up in a step.
QUIET, MARGIN = 0.05, 0.2  # Seconds without a byte; and until all ranks have seen that.
NODES = (1, 8, 64, 1024)
BIG = {"dense_bytes": 40e6, "rows": 4096, "row_bytes": 512, "state_bytes": 120e6, "table_bytes": 100e9}
BIG_LINK, BIG_DISK, NODE_BETWEEN, RESTART = 12.5e9, 1e9, 6300 * 3600.0, 120.0
OF_PROCESSOR = ("message_seconds", "sum_seconds", "row_seconds")


# ---- The network ----


@contextlib.contextmanager
def network(count: int, mbit: int):
    """The places of `count` ranks: namespaces with a device eth0 each, on one bridge. mbit: of each link, each way; 0: as fast as it goes.

    Errors: OSError with what the kernel said.
    """
    with contextlib.ExitStack() as held:
        switch, *places = [held.enter_context(_namespace()) for _ in range(count + 1)]
        # Without IPv6's own messages, which would be counted.
        _tell(switch, "ip", "link", "add", "br0", "type", "bridge")
        _tell(switch, "ip", "link", "set", "br0", "addrgenmode", "none", "up")
        for rank, place in enumerate(places):
            _tell(switch, "ip", "link", "add", f"p{rank}", "type", "veth", "peer", "name", "eth0", "netns", place)
            _tell(switch, "ip", "link", "set", f"p{rank}", "master", "br0", "addrgenmode", "none", "up")
            _tell(place, "ip", "address", "add", f"10.77.0.{rank + 1}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _tell(place, "ip", "link", "set", device, "addrgenmode", "none", "up")
            for name, value in ("tcp_limit_output_bytes", 16384), ("tcp_slow_start_after_idle", 0):
                # Else acknowledgements wait behind data: on a link this slow, until the one way has ended.
                _tell(place, "sh", "-c", f"echo {value} >/proc/sys/net/ipv4/{name}")
            for where, device in ((place, "eth0"), (switch, f"p{rank}")) if mbit else ():
                # What a rank gets is what the bridge sends it. A queue that nothing is dropped from.
                _tell(where, "tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", f"{mbit}mbit", "burst", "6kb", "limit", "64mb")
        yield places


def said_by(places: list[str], what: str, folder: str, smoke: bool) -> list[dict]:
    """What the rank in each place says of `what`, in their order."""
    with contextlib.ExitStack() as stack:
        started = []
        for rank, place in enumerate(places):
            environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(len(places)), "MASTER_ADDR": "10.77.0.1",
                           "MASTER_PORT": "29511", "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
            one = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", "nsenter", "--target", place, "--net", sys.executable, __file__,
                                    "--rank", what, "--directory", folder, *(["--smoke"] if smoke else [])],
                                   stdout=subprocess.PIPE, text=True, env=environment)
            stack.callback(_end, one)
            started.append(one)
        said = [one.communicate()[0] for one in started]
    if any(one.returncode for one in started):
        sys.exit(f"scale: {what} of {len(started)} ranks failed")
    return [json.loads(text.splitlines()[-1]) for text in said]


@contextlib.contextmanager
def _namespace():
    """The id of a process in a network namespace of its own, which ends when its input does, and so with this process."""
    one = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        with contextlib.suppress(BrokenPipeError):
            one.stdin.write("there\n")
            one.stdin.flush()
        if not one.stdout.readline():
            raise OSError(one.stderr.read().strip())
        yield str(one.pid)
    finally:
        _end(one)


def _end(one: subprocess.Popen) -> None:
    one.kill()
    one.wait()


def _refused(place: str, *words: str) -> str:
    """What a command there failed with; "": it did not."""
    done = subprocess.run(["nsenter", "--target", place, "--net", *words], text=True, capture_output=True, check=False)
    return f"{' '.join(words)}: {done.stderr.strip()}" if done.returncode else ""


def _tell(place: str, *words: str) -> None:
    if refused := _refused(place, *words):
        raise OSError(refused)


# ---- A rank ----


def wire() -> tuple[int, int]:
    """(bytes sent, received) by eth0, once it is quiet."""
    before, since = None, time.monotonic()
    while True:
        line = next(line for line in pathlib.Path("/proc/net/dev").read_text().splitlines() if "eth0:" in line).split()
        now = int(line[9]), int(line[1])
        if now != before:
            before, since = now, time.monotonic()
        elif time.monotonic() - since > QUIET:
            time.sleep(MARGIN)
            return now
        time.sleep(QUIET / 5)


class Meter:
    """Bytes and seconds of pieces of work that all ranks do together."""

    def __init__(self, group) -> None:
        self._group = group
        self._barrier = (0.0, 0.0)
        self._barrier = tuple(self.of(20, lambda: None)[way] for way in ("sent", "received"))

    def of(self, rounds: int, work, times: int = 1) -> dict:
        """Bytes of a work, without the barrier before it, and its seconds in each round but the first, of so many one after another."""
        import torch.distributed as dist

        dist.barrier(group=self._group)
        before, took = wire(), []
        for _ in range(rounds):
            dist.barrier(group=self._group)
            began = time.perf_counter()
            for _ in range(times):
                work()
            took.append((time.perf_counter() - began) / times)
        after = wire()
        sent, received = (((b - a) / rounds - own) / times for a, b, own in zip(before, after, self._barrier))
        return {"sent": sent, "received": received, "seconds": took[1:]}


def constants(ranks, rounds: int) -> dict:
    """Of two ranks: bytes and seconds a message, as model.Link has them."""
    import torch
    import torch.distributed as dist

    meter, other, many = Meter(ranks.group), 1 - ranks.rank, 64
    ours = {"group": ranks.group, "tag": 7}  # Rank 0 waits for words, whose tag is 0, at all times.
    given, got = torch.zeros(2, many, 8, dtype=torch.uint8)

    def exchanged() -> None:
        works = [dist.irecv(one, other, **ours) for one in got]
        works += [dist.isend(one, other, **ours) for one in given]
        for work in works:
            work.wait()

    messages = meter.of(5 * rounds, exchanged)
    return {"message_seconds": statistics.median(messages["seconds"]) / many, "message_bytes": messages["sent"] / many - 8}


def parts(ranks, folder: str, rounds: int) -> dict:
    """The parts of a step, one after another, as plimsoll.Run makes them; each answer is looked at."""
    import numpy as np
    import torch

    import plimsoll
    from bench.rank_rows.run import rows_of
    from plimsoll.rows._rank_rows import DealtTable, LookedUp, owners_of

    meter, made = Meter(ranks.group), {}
    made["a word"] = meter.of(5 * rounds, lambda: ranks.say("run.step()", 1.0), times=10)  # More than a link lets through at once.
    parameter = torch.nn.Parameter(torch.zeros(DENSE, DENSE))

    def summed() -> None:
        parameter.grad = torch.full((DENSE, DENSE), float(ranks.rank + 1))
        ranks.sums.add_up([parameter.grad.view(-1)], ranks.sums.room([parameter]), [1.0] * ranks.count, False)
        if not torch.all(parameter.grad == (ranks.count + 1) / 2):
            sys.exit("scale: a sum is wrong")

    made["tree sums"] = meter.of(rounds, summed)
    ids = np.arange(TABLE)
    own = ids[owners_of(ids, ranks.count) == ranks.rank]
    random, looked_up = np.random.default_rng([SEED, ranks.rank]), []
    with plimsoll.Governor("1GiB") as governor, plimsoll.EmbeddingStore.open(
            governor, f"{folder}/parts-{ranks.count}-{ranks.rank}", ids=own, dim=DIM, optimizer=plimsoll.SGD(lr=1.0),
            store_bytes=8 * DIM * TABLE + (16 << 20), batch_rows=TABLE) as store:
        store.update(own, rows_of(own, DIM).numpy())
        table = DealtTable("items", store, TABLE, ranks)

        def found() -> None:
            asked = random.choice(TABLE, ROWS, replace=False)
            wanted, got = table.look_up(asked)
            looked_up[:] = [LookedUp(table, wanted, got)]
            looked_up[0].gradient = got
            if not torch.equal(got[torch.from_numpy(wanted.places)], rows_of(asked, DIM)):
                sys.exit("scale: a row is wrong")

        def given() -> None:
            owned = table.owned(looked_up, lambda _: 0.5)
            if not torch.equal(owned.tensor, 0.5 * rows_of(owned.ids, DIM)):
                sys.exit("scale: a gradient is wrong")

        made["look up"], made["row gradients"] = meter.of(rounds, found), meter.of(rounds, given)
    return made


def whole(folder: str, rounds: int) -> dict:
    """A plimsoll.Run of all ranks: its steps, and its commits."""
    import numpy as np
    import torch

    import plimsoll
    from plimsoll.ranks._ranks import Ranks

    rank, count, words, told = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), [0], Ranks._told
    at, commits = [], []

    def counted(*arguments):
        words[0] += 1
        return told(*arguments)

    Ranks._told = counted
    with plimsoll.Run(f"{folder}/run-{count}", memory_limit="12GiB", seed=SEED) as run:
        dense, items = torch.nn.Linear(DENSE, DENSE, bias=False), run.embedding("items", rows=TABLE, dim=DIM, store_bytes="64MiB")
        run.track(model=dense, optimizer=torch.optim.SGD(dense.parameters(), lr=0.1))
        random, commit = np.random.default_rng([SEED, rank]), run._life.commit

        def committed(*arguments, **options) -> None:
            before, began, said = wire(), time.perf_counter(), words[0]
            commit(*arguments, **options)
            took, said, after = time.perf_counter() - began, words[0] - said, wire()
            if run._life.saved_step > (commits[-1]["step"] if commits else 0):
                commits.append({"step": run._life.saved_step, "sent": after[0] - before[0], "received": after[1] - before[1],
                                "seconds": took, "words": said})

        run._life.commit = committed
        for every in (0, 1):
            data = run.loader([torch.ones(DENSE)] * (count * (rounds + 2)), batch_size=1)
            for k, batch in enumerate(run.steps(data, commit_every_steps=every, progress=False)):
                ids = torch.from_numpy(random.choice(TABLE, ROWS, replace=False))
                if every == 0 and k in (1, rounds + 1):
                    at.append((time.perf_counter(), wire(), words[0], time.perf_counter()))
                run.step(lambda x: dense(x).mean() + items(ids).mean(), batch)
    (_, begun, said, began), (ended, end, all_said, _) = at
    assert commits
    middle = {key: statistics.median(one[key] for one in commits) for key in ("sent", "received", "words")}
    return {"step": {"sent": (end[0] - begun[0]) / rounds, "received": (end[1] - begun[1]) / rounds, "seconds": [(ended - began) / rounds],
                     "words": (all_said - said) / rounds},
            "commit": {**middle, "seconds": [one["seconds"] for one in commits[1:]]}}


def as_rank(what: str, folder: str, smoke: bool) -> dict:
    import torch

    from plimsoll.ranks import _ranks
    from plimsoll.ranks._ranks import Ranks

    _ranks._THROUGH_MEMORY = False  # As ranks of several machines.
    torch.set_num_threads(1)
    rounds, made = 3 if smoke else 8, {}
    if int(os.environ["WORLD_SIZE"]) > 1:
        ranks = Ranks()
        if "constants" in what:
            made["constants"] = constants(ranks, rounds)
        if "parts" in what:
            made.update(parts(ranks, folder, rounds))
        ranks.close()
    return {**made, **(whole(folder, rounds) if "parts" in what else {})}


# ---- What is predicted, and what was ----


def medians(said: list[dict], part: str) -> float:
    """Seconds of a round's slowest rank."""
    return statistics.median(map(max, zip(*(one[part]["seconds"] for one in said))))


def predicted(part: str, run: model.Run, link: model.Link, rank: int = 0) -> tuple[float, float, float]:
    """(bytes that a rank sends, that it receives, seconds of exchanges)."""
    words = {"a word": 1, "look up": 2 * run.lookups, "row gradients": 3, "step": model.words_a_step(run),
             "commit": model.words_a_commit(run)}.get(part, 0)
    sums, found, given = (one(run) if part in ("step", name) else model.Traffic() for name, one in (
        ("tree sums", model.tree_sums), ("look up", model.look_ups), ("row gradients", model.row_gradients)))
    took = words * model.word_seconds(run, link) + model.row_seconds(run, link, found + given)
    return (*model.wire_bytes(run, link, sums + found + given + model.word(run, rank) * words),
            took + (model.sum_seconds(run, link) if sums.sent else 0.0))


def run_of(count: int) -> model.Run:
    """What parts() and whole() train. What a commit writes is of `commit beside exchanges`."""
    return model.Run(count, workers=count, dense_bytes=4 * DENSE**2, rows=ROWS, row_bytes=4 * DIM, table_bytes=1)


def link_of(fast: list[dict], slow: list[dict]) -> tuple[model.Link, dict[str, float]]:
    """(constants of two ranks, seconds that a step and a commit take beside exchanges): seconds from links that are as fast as they go,
    bytes from slow ones. A word of two is a message there and one back."""
    two, said = run_of(2), [one["constants"] for one in fast]
    link = model.Link(1e12, medians(fast, "a word") / 2, max(one["message_seconds"] for one in said),
                      statistics.mean(one["constants"]["message_bytes"] for one in slow))

    def beside(*some: str) -> float:
        return max(sum(medians(fast, part) - predicted(part, two, link)[2] for part in some), 0.0)

    rows = model.look_ups(two) + model.row_gradients(two)
    link = dataclasses.replace(link, sum_seconds=beside("tree sums") / model.tree_sums(two).sent,
                               row_seconds=beside("look up", "row gradients") / rows.sent)
    return link, {part: beside(part) for part in ("step", "commit")}


def compared(said: list[dict], mbit: int, link: model.Link, alone: dict[str, float]) -> tuple[dict, float, float]:
    """(lines of a table, the largest ratio of seconds, the largest error of bytes) of what so many ranks said."""
    count, run, lines, apart, wrong = len(said), run_of(len(said)), {}, 1.0, 0.0
    crowd = max(1.0, count / (os.cpu_count() or 1))  # All ranks are on this machine.
    link = dataclasses.replace(link, bandwidth=mbit * 125e3, **{name: crowd * getattr(link, name) for name in OF_PROCESSOR})
    for part, one in said[0].items():
        words = {"step": model.words_a_step(run), "commit": model.words_a_commit(run)}.get(part) if count > 1 else None
        if words is not None and one["words"] != words:
            sys.exit(f"scale: a {part} of {count} ranks has {one['words']} words, and {words} were expected")
        sent, _, seconds = predicted(part, run, link)
        errors = [abs(other[part][way] / bytes_ - 1) if bytes_ else float(other[part][way] > 1024) for rank, other in enumerate(said)
                  for way, bytes_ in zip(("sent", "received"), predicted(part, run, link, rank))]
        wrong = max(wrong, *errors)
        line = lines[f"{count} ranks, {mbit} Mbit/s: {part}"] = {
            "KB that rank 0 sends: model": sent / 1e3, "measured": one["sent"] / 1e3,
            "largest error of a rank, %": 100 * max(errors)}
        if count > 1:  # One rank has no part of a step that is between ranks.
            measured = medians(said, part)
            seconds += alone.get(part, 0.0) * (crowd if part == "step" else 1)  # A commit waits for the disk.
            apart = max(apart, measured / seconds, seconds / measured)
            line |= {"ms: model": 1e3 * seconds, "ms: measured": 1e3 * measured}
    return lines, apart, wrong


def scaled(link: model.Link, fixed: float) -> dict:
    """A line for each number of nodes, with one rank each, on links of 100 Gbit/s."""
    lines, link = {}, dataclasses.replace(link, bandwidth=BIG_LINK)
    for nodes in NODES:
        run = model.Run(nodes, workers=nodes, **BIG)
        rows, words = model.look_ups(run) + model.row_gradients(run), model.words_a_step(run)
        interval, lost = model.failures(run, link, BIG_DISK, NODE_BETWEEN, RESTART, fixed)
        lines[f"{nodes:,}"] = {
            "gradients, MB": model.tree_sums(run).sent / 1e6, "rows, MB": rows.sent / 1e6,
            "words of rank 0, MB": words * model.word(run).sent / 1e6,
            "gradients, ms": 1e3 * model.sum_seconds(run, link),
            "rows, ms": 1e3 * model.row_seconds(run, link, rows), "words, ms": 1e3 * words * model.word_seconds(run, link),
            "counts fit a word": int(model.counts_fit(run)), "commit: messages to rank 0": model.words_a_commit(run) * run.others,
            "commit: KB to rank 0": model.words_a_commit(run) * model.word(run).received / 1e3,
            "commit, s": model.commit_seconds(run, link, BIG_DISK, fixed), "best interval, min": interval / 60, "time lost, %": 100 * lost}
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="one rank and two, few rounds; bytes and answers count, seconds do not")
    parser.add_argument("--directory", help="where runs and tables are made; default: the system's folder for temporary files")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        print(json.dumps(as_rank(options.rank, options.directory, options.smoke)))
        return 0
    ways = [(count, 100) for count in (1, 2)] if options.smoke else [*((count, 100) for count in (1, 2, 4, 8)), (8, 200)]
    checked, apart, wrong = {}, 1.0, 0.0

    def run(count: int, mbit: int, what: str) -> list[dict]:
        with tempfile.TemporaryDirectory(dir=options.directory, prefix="scale-") as folder, network(count, mbit) as places:
            return said_by(places, what, folder, options.smoke)

    result = {"name": "scale", "value": 0, "unit": "x", "bar": SECONDS_BAR, "pass": options.smoke, "seed": SEED}
    try:
        with network(1, 100) as (place,):
            delays = _refused(place, "tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
    except OSError as error:
        print(f"scale: not measured: {error}", file=sys.stderr)
        print(json.dumps({**result, "peers": {"not measured": str(error)}}))
        return 0 if options.smoke else 1
    delays = f"not shaped, latency is the machine's own; {delays or 'netem is there, and not used yet'}"
    print(f"scale: delays: {delays}", file=sys.stderr)
    link, alone = link_of(run(2, 0, "constants, parts"), run(2, 400, "constants"))
    for count, mbit in ways:
        lines, some_apart, some_wrong = compared(run(count, mbit, "parts"), mbit, link, alone)
        checked, apart, wrong = checked | lines, max(apart, some_apart), max(wrong, some_wrong)
        for name, line in lines.items():
            print(name, {key: round(value, 2) for key, value in line.items()}, file=sys.stderr)
    constants = {name: value for name, value in vars(link).items() if name != "bandwidth"}
    constants |= {f"{part} beside exchanges": value for part, value in alone.items()}
    result |= {"value": round(apart, 3), "pass": wrong <= BYTES_BAR and (options.smoke or apart <= SECONDS_BAR),
               "peers": {"largest error of bytes, %": round(100 * wrong, 2), "bar of bytes, %": 100 * BYTES_BAR, "delays": delays,
                         "constants": constants, "tables": {"nodes": scaled(link, alone["commit"]), "checked": checked}}}
    print(json.dumps(result))
    return 0 if result["pass"] else 1


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""What a step and a commit of plimsoll.Run cost on many nodes: bytes, seconds, and what failures take. On paper: plain functions.

    a word          each rank 1,016 B to rank 0, which sends all of them to each          word()
    gradients       a tree sum: each rank a slice of each bucket, there and back          tree_sums()
    rows            ids to their owners and rows back; ids and gradients to the owners    look_ups(), row_gradients()
    a commit        words around what each rank writes                                    commit_seconds()
    failures        the best interval between commits, and the share of time lost         interval_seconds(), lost()

It follows python/plimsoll/ranks/_ranks.py, _rank_rows.py, _accumulation.py, _update.py and _run_commit.py as they are: one level,
every rank with every other over gloo (not through memory, as ranks of one machine do), nothing beside the computation. bench/scale/run.py
compares it with measured runs.

A link is Hockney's ("The communication challenge for MPP", 1994): latency + bytes / bandwidth; and each message beyond that
takes the processor a time, as in LogP (Culler et al., 1993).

Units: bytes and seconds. Ids hash evenly to ranks, so ranks are equal but for rank 0 in words.
Threads: none.   Memory: none.
"""
from __future__ import annotations

import dataclasses
import math

WORD = 1016  # Bytes of what a rank says, _ranks._ROW,
WORD_TEXT = 960  # and of its text: a lookup's counts of ids, one a rank, must fit.
BUCKET = 8 << 20  # Bytes of gradients that are added up at a time, _rank_sums._BUCKET_BYTES.
ID = 8
HEADERS, SEGMENT = 66, 1448  # Bytes of Ethernet, IPv4 and TCP with time stamps, and of the payload between.


@dataclasses.dataclass(frozen=True)
class Link:
    """A node's link to the others, full duplex, and what messages cost its ends. Source: measured by run.py, or assumed."""

    bandwidth: float  # Bytes a second, each way.
    latency: float = 0.0  # Seconds of a small message from one rank to another.
    message_seconds: float = 0.0  # Of a rank's processor, for a message sent and one received.
    message_bytes: float = 0.0  # On the wire each way beside the payload, for a message sent and one received.
    wire: float = 1 + HEADERS / SEGMENT  # Bytes on the wire for each of the payload.
    answer: float = HEADERS / (2 * SEGMENT)  # Bytes back for each: an acknowledgement of every second segment (RFC 5681, section 4.2).
    sum_seconds: float = 0.0  # Of a rank's processor, for each byte that it sends in a tree sum.
    row_seconds: float = 0.0  # The same for rows and their gradients.


@dataclasses.dataclass(frozen=True)
class Run:
    """What is trained, and on how many nodes. Errors: ValueError for ranks that virtual workers cannot be dealt to."""

    nodes: int
    ranks_a_node: int = 1
    workers: int = 1  # Virtual workers of the whole run, G.
    dense_bytes: float = 0.0  # Of gradients.
    rows: float = 0.0  # Distinct ids that a virtual worker looks up in a step, in one lookup of one table.
    row_bytes: int = 512
    state_bytes: float = 0.0  # What rank 0 writes at a commit: model and optimizer.
    table_bytes: float = 0.0  # What all ranks together write of their tables at a commit; the whole table at most.

    def __post_init__(self) -> None:
        if self.workers % self.ranks:
            raise ValueError(f"{self.workers} virtual workers cannot be dealt to {self.ranks} ranks")

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_a_node

    @property
    def lookups(self) -> int:
        """Of a rank in a step: one for each of its virtual workers."""
        return self.workers // self.ranks if self.rows else 0

    @property
    def others(self) -> int:
        return self.ranks - 1

    @property
    def away(self) -> float:
        """The share of a rank's messages that leave its node."""
        return (self.ranks - self.ranks_a_node) / self.others if self.others else 0.0


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Of the busiest rank, payload only, its own node's ranks included."""

    sent: float = 0.0
    received: float = 0.0
    messages: float = 0.0  # Sent, and as many received.
    turns: float = 0.0  # Times that ranks wait for what others send.

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other))))

    def __mul__(self, times: float) -> Traffic:
        return Traffic(*(times * one for one in dataclasses.astuple(self)))


def word(run: Run, rank: int = 0) -> Traffic:
    """One word of all ranks (Ranks._pass_on): rows to rank 0, and the board of all of them to each. Rank 0 sends ranks² of them."""
    board = run.ranks * WORD
    if not run.others:
        return Traffic()
    if rank:
        return Traffic(WORD, board, 1, 2)
    return Traffic(run.others * board, run.others * WORD, run.others, 2)


def tree_sums(run: Run) -> Traffic:
    """Gradients of a step (RankSums._by_sockets): of each bucket each rank sends and gets slices, twice. A slice is one message, as
    where it lies in one tensor."""
    even = 16 * run.ranks
    buckets = math.ceil(run.dense_bytes / min(BUCKET // even * even, max(math.ceil(run.dense_bytes / even), 1) * even))
    moved = 2 * run.dense_bytes * run.others / run.ranks
    return Traffic(moved, moved, 2 * buckets * run.others, 2 * buckets) if run.others else Traffic()


def look_ups(run: Run) -> Traffic:
    """A step's (DealtTable.exchanged), without words: ids there, rows back, an exchange of all with all each."""
    rows = run.rows * run.others / run.ranks
    return Traffic(rows * (ID + run.row_bytes), rows * (ID + run.row_bytes), 2 * run.others, 2 if run.others else 0) * run.lookups


def row_gradients(run: Run) -> Traffic:
    """A step's (DealtTable.owned), without words: all workers' ids and gradients in one exchange."""
    moved = run.lookups * run.rows * run.others / run.ranks * (ID + run.row_bytes + run.row_bytes % 8)
    return Traffic(moved, moved, run.others, 1) if run.others and run.lookups else Traffic()


def words_a_step(run: Run) -> int:
    """Next batch, gradients, update and boundary; of rows two a lookup, three for their gradients, one for their update."""
    return 4 + (2 * run.lookups + 4 if run.rows else 0)


def words_a_commit(run: Run) -> int:
    """Parts that must be the same and others (up to five names each), folder, files, tables, manifest."""
    return 5 + (run.table_bytes > 0)


def counts_fit(run: Run) -> bool:
    """Whether a lookup's counts of ids, one for each rank and a comma between, fit the text of a word. Where they do not, a
    lookup is refused (Ranks.counts_as_text)."""
    digits = len(str(math.ceil(run.lookups * run.rows / run.ranks)))
    return run.ranks * (digits + 1) - 1 <= WORD_TEXT


def wire_bytes(run: Run, link: Link, traffic: Traffic) -> tuple[float, float]:
    """(sent, received) by one rank over its node's link."""
    ways, beside = (traffic.sent, traffic.received), traffic.messages * link.message_bytes
    sent, received = (run.away * (one * link.wire + other * link.answer + beside) for one, other in (ways, ways[::-1]))
    return sent, received


def seconds(run: Run, link: Link, traffic: Traffic, sharing: int, host_seconds: float = 0.0) -> float:
    """Until the slowest rank has it all. sharing: ranks of a node that send so much; host_seconds: of the processor, a byte sent."""
    over_link = sharing * max(wire_bytes(run, link, traffic)) / link.bandwidth
    of_messages = (traffic.messages - traffic.turns / 2) * link.message_seconds  # Of each turn the latency has one, sent or received.
    return traffic.turns * link.latency + of_messages + traffic.sent * host_seconds + over_link


def word_seconds(run: Run, link: Link) -> float:
    """Rank 0's, which is the busiest of its node by far."""
    return seconds(run, link, word(run), 1)


def sum_seconds(run: Run, link: Link) -> float:
    return seconds(run, link, tree_sums(run), run.ranks_a_node, link.sum_seconds)


def row_seconds(run: Run, link: Link, traffic: Traffic) -> float:
    """Of look_ups() or row_gradients(). gloo's all_to_all_single tells a sender that it may send behind what it sends itself, so that two
    ranks send one after the other (measured: 44 ms, and 23 with receives posted first); of many, others are sent to meanwhile."""
    took = seconds(run, link, traffic, run.ranks_a_node, link.row_seconds)
    return took + max(wire_bytes(run, link, traffic)) * run.ranks_a_node / link.bandwidth / max(run.others, 1)


def step_traffic(run: Run, rank: int = 0) -> Traffic:
    return tree_sums(run) + look_ups(run) + row_gradients(run) + word(run, rank) * words_a_step(run)


def step_seconds(run: Run, link: Link) -> float:
    """Of exchanges, which the computation of a step comes on top of: nothing is beside it."""
    return (sum_seconds(run, link) + row_seconds(run, link, look_ups(run) + row_gradients(run))
            + words_a_step(run) * word_seconds(run, link))


def commit_seconds(run: Run, link: Link, disk: float, fixed: float = 0.0) -> float:
    """While it holds the loop, as it does of several ranks. disk: bytes a second that a node writes; fixed: seconds of an empty commit's
    syncs. Tables are written by all nodes at once, after rank 0 has written the state."""
    return fixed + words_a_commit(run) * word_seconds(run, link) + run.state_bytes / disk + run.table_bytes / run.nodes / disk


# ---- Failures: of any node, which ends all ranks, at times without memory ----


def interval_seconds(commit: float, between: float) -> float:
    """The best time of training between two commits of `commit` seconds, where failures are `between` seconds apart on average.

    Source: Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps" (2006), equation 37; its first term is
    Young's, "A first order approximation to the optimum checkpoint interval" (1974).
    """
    if commit >= 2 * between:
        return between
    half = commit / (2 * between)
    return math.sqrt(2 * commit * between) * (1 + math.sqrt(half) / 3 + half / 9) - commit


def lost(interval: float, commit: float, between: float, restart: float) -> float:
    """The share of time that is neither training nor, after a failure, training for the last time: commits, steps made again, restarts.

    Source: Daly (2006), section 3: an exponential time between failures, which restarts and commits meet too.
    """
    try:
        return 1 - interval / (between * math.exp(restart / between) * math.expm1((interval + commit) / between))
    except OverflowError:
        return 1.0


def failures(run: Run, link: Link, disk: float, node_between: float, restart: float, fixed: float = 0.0) -> tuple[float, float]:
    """(best interval in seconds, share of time lost with it). node_between: seconds between failures of one node, on average."""
    between, commit = node_between / run.nodes, commit_seconds(run, link, disk, fixed)
    interval = interval_seconds(commit, between)
    return interval, lost(interval, commit, between, restart)

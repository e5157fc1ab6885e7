"""The doctor's parts as one process goes through them, from the roll call to the last pair.

What a process finds it puts into the store at once, so that whatever happens later, the first
process knows it. A part that fails is told of and left; only a process that is not at a meeting in
time drops out.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from typing import TYPE_CHECKING, TypeVar

from sm_train.entrypoints.doctor.barrier import StoreBarrier
from sm_train.entrypoints.doctor.bus_bandwidth import Collective, Point, busbw
from sm_train.entrypoints.doctor.measurements import NodeSpeeds, PairResult, RankFacts
from sm_train.entrypoints.doctor.process_group import Group
from sm_train.entrypoints.doctor.round_robin import (
    SLOW_SHARE,
    Pair,
    find_slow_links,
    pack,
    schedule,
)
from sm_train.entrypoints.doctor.sweep import sweeps

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

OPERATION_SHARE, LEAST_OPERATION_SECONDS = 1 / 12, 5.0
"""Of the limit: nothing is tried that should take half of this, so one that takes so long hangs."""

RESERVE_SECONDS = 6.0
"""Kept for the verdict."""

WORLD_SHARE, INSIDE_SHARE, BETWEEN_SHARE = 0.1, 0.075, 0.1
"""Of the limit, what three sweeps may take together: over all ranks, inside nodes, between them."""

ROUND_SECONDS = 2.0
PAIR_BYTES = (2**16, 2**19, 2**22, 2**25, 2**27)
ENOUGH_SECONDS = 0.03
"""A message that takes so long is long enough to tell a bandwidth."""

PAIR_REPEATS = 3
SMALL_BYTES = 8
LATENCY_REPEATS = 20
CLOCK_REPEATS = 10


class ClusterBenchmark:
    """One process's way through the parts, ``limit`` seconds until ``deadline`` (monotonic)."""

    def __init__(
        self,
        meeting: StoreBarrier,
        member: RankFacts,
        device: torch.device,
        *,
        limit: float,
        deadline: float,
    ) -> None:
        self._meeting, self._member, self._device = meeting, member, device
        self._limit, self._deadline = limit, deadline
        self._operation = max(LEAST_OPERATION_SECONDS, OPERATION_SHARE * limit)
        self._last_budget = 0.0
        self._present: tuple[int, ...] = tuple(range(meeting.size))
        self._seats: dict[int, tuple[int, int]] = {}
        self._most_bytes = 0

    @property
    def left(self) -> float:
        """Seconds for measuring."""
        return self._deadline - RESERVE_SECONDS - time.monotonic()

    # ------------------------------------------------------------------ meetings

    def join(self, patience: float, most_bytes: int) -> None:
        """Say who this is and learn who else is there.

        Raises:
            AbsentError: too late, or the first process says nothing.
        """
        meeting, member = self._meeting, self._member
        meeting.put(f"facts/{member.rank}", asdict(member) | {"most_bytes": most_bytes})
        wait = self._followers_wait
        roll = meeting.call("join", patience, lambda: self.left, followers_wait=wait)
        self._present = roll.members
        facts = [meeting.wait(f"facts/{rank}", self._operation) for rank in roll.members]
        self._seats = {one["rank"]: (one["node"], one["lane"]) for one in facts}
        self._most_bytes = min(one["most_bytes"] for one in facts)
        self._last_budget = 30.0  # the nodes measure themselves next, at their own pace

    def _meet(self, part: str, most: float, without: Sequence[int] = ()) -> float:
        """Everybody's budget for ``part``: ``most`` seconds, less where time is short."""
        patience = min(self._bound(self._last_budget) + 2.0, max(1.0, self.left))
        roll = self._meeting.call(
            part,
            patience,
            lambda: min(most, self.left),
            expected=tuple(rank for rank in self._present if rank not in without),
            followers_wait=self._followers_wait,
        )
        if self._meeting.rank == 0:
            for rank in set(self._present) - set(roll.members):
                self._meeting.put(f"gone/{rank}", part)
        self._present, self._last_budget = roll.members, roll.budget
        return roll.budget

    @property
    def _followers_wait(self) -> float:
        return max(1.0, self._deadline - time.monotonic())

    def _bound(self, budget: float) -> float:
        """When a part of so many seconds is given up: its last operation may hang."""
        return budget + self._operation + 1.0

    # ------------------------------------------------------------------ parts

    def measure_node(self, measure: Callable[[bool], NodeSpeeds]) -> None:
        """This process by itself; ``measure`` is told whether it is its node's first."""
        first = min(lane for node, lane in self._seats.values() if node == self._member.node)
        speeds = measure(self._member.lane == first)
        self._meeting.put(f"speeds/{self._member.rank}", asdict(speeds))

    def sweep_all(self) -> None:
        """Over all ranks, then inside nodes, then between them, where these are not the same."""
        nodes = {node for node, _ in self._seats.values()}
        lanes = {lane for _, lane in self._seats.values()}
        node, lane = self._member.node, self._member.lane
        if len(self._seats) > 1:
            self._sweep("world", "all", self._present, WORLD_SHARE)
        if len(nodes) > 1 and len(lanes) > 1:
            self._sweep("intra", str(node), self._on(node=node), INSIDE_SHARE)
            self._sweep("inter", str(lane), self._on(lane=lane), BETWEEN_SHARE)

    def _on(self, node: int | None = None, lane: int | None = None) -> tuple[int, ...]:
        return tuple(
            rank
            for rank in self._present
            if node in (None, self._seats[rank][0]) and lane in (None, self._seats[rank][1])
        )

    def _sweep(self, part: str, name: str, ranks: tuple[int, ...], share: float) -> None:
        budget = self._meet(part, share * self._limit)
        ranks = tuple(rank for rank in ranks if rank in self._present)
        if not budget or len(ranks) < 2:
            return
        found: dict[Collective, list[tuple[int, float]]] = {}

        def measure() -> None:
            group = self._group(f"{part}/{name}", ranks)
            for one, point in sweeps(group.measure, budget=budget, most_bytes=self._most_bytes):
                found.setdefault(one, []).append((point.bytes, point.seconds))

        try:
            bounded(measure, self._bound(budget))
        except RuntimeError as error:
            self._meeting.put(f"failed/{part}/{self._member.rank}", _line(error))
        # What was measured until then counts.
        if ranks[0] == self._member.rank and found:
            self._meeting.put(f"{part}/timed/{name}", {"ranks": len(ranks), "sweeps": found})

    def _group(self, name: str, ranks: Sequence[int]) -> Group:
        return Group(
            self._meeting.store, name, ranks, self._member.rank, self._device, self._operation
        )

    def play_tournament(self) -> None:
        """Every node against every other, and those once more that seemed slow."""
        nodes = sorted({node for node, _ in self._seats.values()})
        played = [
            [(nodes[a], nodes[b]) for a, b in pairs] for pairs in schedule(len(nodes)) if pairs
        ]
        results = self._play("pairs", played)
        if self._meeting.rank == 0:
            accused = find_slow_links(results, share=SLOW_SHARE)
            slow = accused.slow if accused else ()
            self._meeting.put("again", pack(pair for pair in slow if results[pair] > 0))
        again = self._meeting.wait("again", self._followers_wait)
        self._play("again", [[(a, b) for a, b in pairs] for pairs in again])

    def finish(self) -> None:
        """Wait until everybody has said all."""
        self._meet("finish", 1.0)

    def _play(self, part: str, schedule: Sequence[Sequence[Pair]]) -> dict[Pair, float]:
        """The first process returns what the pairs came to; the others do not look."""
        results: dict[Pair, float] = {}
        for number, pairs in enumerate(schedule):
            most = min(ROUND_SECONDS, max(0.0, self.left) / (len(schedule) - number))
            budget = self._meet(f"{part}-{number}", most, without=self._hopeless(results))
            # All that met here have ended the round before.
            results |= self._results(part, schedule[number - 1] if number else ())
            mine = [pair for pair in pairs if self._member.node in pair]
            if budget and mine:
                self._meet_pair(part, number, mine[0], budget)
        if schedule:
            self._meet(f"{part}-ended", 1.0)
            results |= self._results(part, schedule[-1])
        return results

    def _results(self, part: str, pairs: Sequence[Pair]) -> dict[Pair, float]:
        if self._meeting.rank != 0:
            return {}
        lanes = sorted({lane for _, lane in self._seats.values()})
        found: dict[Pair, float] = {}
        for a, b in pairs:
            answers = [self._meeting.get(f"{part}/{a}-{b}/{lane}") for lane in lanes]
            known = [one for one in answers if one is not None]
            if known:
                whole = not any(one["failed"] for one in known)
                found[a, b] = sum(one["bandwidth"] for one in known) * whole
        return found

    def _hopeless(self, results: dict[Pair, float]) -> list[int]:
        """Ranks of nodes that failed twice and never answered: waiting for them costs too much."""
        failures: dict[int, list[bool]] = {}
        for pair, value in results.items():
            for node in pair:
                failures.setdefault(node, []).append(value <= 0)
        hopeless = {node for node, bad in failures.items() if len(bad) > 1 and all(bad)}
        return [rank for rank in self._present if self._seats[rank][0] in hopeless and rank]

    def _meet_pair(self, part: str, number: int, pair: Pair, budget: float) -> None:
        me = self._member
        other = pair[0] if pair[1] == me.node else pair[1]
        partner = self._on(node=other, lane=me.lane)
        if not partner:
            return
        ranks = sorted((me.rank, partner[0]), key=lambda rank: self._seats[rank][0])
        key = f"{part}/{pair[0]}-{pair[1]}/{me.lane}"
        try:
            result = bounded(
                lambda: measure_pair(
                    self._group(f"{part}-{number}/{pair[0]}-{pair[1]}/{me.lane}", ranks),
                    pair,
                    me.lane,
                    budget,
                    self._most_bytes,
                ),
                self._bound(budget),
            )
        except RuntimeError as error:
            self._meeting.put(key, asdict(PairResult(pair, me.lane, failed=_line(error))))
            return
        if ranks[0] == me.rank:
            self._meeting.put(key, asdict(result))


def measure_pair(group: Group, pair: Pair, lane: int, budget: float, most_bytes: int) -> PairResult:
    """Clock, latency and bandwidth of a group of two, in about ``budget`` seconds."""
    offset, uncertainty = _clock(group)
    small = group.measure("all_gather", SMALL_BYTES, LATENCY_REPEATS)
    size, seconds = PAIR_BYTES[0], small
    for size in PAIR_BYTES:
        seconds = group.measure("all_gather", size, 1)
        growing = 8 * seconds * (1 + PAIR_REPEATS)
        if seconds >= ENOUGH_SECONDS or growing > budget or 8 * size > most_bytes:
            break
    # Chance only slows, so the best of several is the truest, where there is time for them.
    repeats = min(PAIR_REPEATS, int(budget / seconds) - 1)
    best = min([seconds, *(group.measure("all_gather", size, 1) for _ in range(repeats))])
    return PairResult(
        pair,
        lane,
        bandwidth=busbw("all_gather", 2, Point(size, best)),
        latency=small,
        offset=offset,
        uncertainty=uncertainty,
    )


def _clock(group: Group) -> tuple[float, float]:
    """How far the second one's clock is ahead, and how sure that is.

    Both exchange what their clocks show; the quickest of several exchanges is the surest
    (Cristian 1989). The other's clock was read at most the exchange before this one's end.
    """
    best: tuple[float, float] | None = None
    for _ in range(CLOCK_REPEATS):
        before = time.time()
        shown = group.exchange(before)
        took = time.time() - before
        offset = shown[1 - group.place] - before
        if best is None or took < best[1]:
            best = (offset, took)
    assert best is not None
    offset, took = best
    return (offset if group.place == 0 else -offset), took


def bounded(call: Callable[[], T], seconds: float) -> T:
    """What ``call`` returns or raises; it is left to itself if it takes longer.

    Gloo tries five times as long to connect as it is told, and NCCL may wait for ever.

    Raises:
        RuntimeError: it did not end within ``seconds``.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return future.result(seconds)
    except TimeoutError:
        raise RuntimeError(f"no answer within {seconds:.0f} s") from None


def _line(error: BaseException) -> str:
    """The first line of what a library says, without the place in its source."""
    text = re.sub(r"^\[[^\]]*\]\s*", "", str(error).strip()) or type(error).__name__
    return text.splitlines()[0][:300]

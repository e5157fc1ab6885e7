"""Runs the parts of the doctor's benchmark in one rank, from the join to the last pair of nodes.

A rank puts every result into the store at once, so rank 0 knows it whatever happens later. A part
that fails is recorded and left; only a rank that misses a barrier drops out.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from typing import TYPE_CHECKING, TypeVar

from sm_train.cost.network import Collective
from sm_train.entrypoints.probes.barrier import StoreBarrier
from sm_train.entrypoints.probes.bus_bandwidth import SweepPoint, busbw, sweeps
from sm_train.entrypoints.probes.measurements import NodeSpeeds, PairResult, RankFacts
from sm_train.entrypoints.probes.process_group import BenchmarkGroup
from sm_train.entrypoints.probes.round_robin import RETESTS, Pair, retest_rounds, schedule

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

OPERATION_SHARE, MIN_OPERATION_SECONDS = 1 / 12, 5.0
"""Timeout of one collective, as a share of the doctor's. Nothing is started that should take half
of it, so an operation that reaches it hangs."""

RESERVE_SECONDS = 6.0
"""Kept for the verdict."""

WORLD_SHARE, INTRA_NODE_SHARE, INTER_NODE_SHARE = 0.1, 0.075, 0.1
"""Shares of the timeout for the sweeps over all ranks, inside nodes and between nodes."""

ROUND_SECONDS = 2.0
PAIR_BYTES = (2**16, 2**19, 2**22, 2**25, 2**27)
MIN_TRANSFER_SECONDS = 0.03
"""A transfer that takes this long measures bandwidth, not latency."""

PAIR_REPEATS, RETEST_REPEATS = 3, 10
"""Transfers of a pair in the first pass and in a retest; the best one counts."""

SMALL_BYTES = 8
LATENCY_REPEATS = 20
CLOCK_REPEATS = 10

PASSES = ("pairs", *(f"retest-{number}" for number in range(RETESTS)))
"""Store prefixes of the passes over pairs of nodes: the round robin, then the retests."""


class ClusterBenchmark:
    """One rank's way through the parts: ``timeout`` seconds, until ``deadline`` (monotonic)."""

    def __init__(
        self,
        barrier: StoreBarrier,
        rank: RankFacts,
        device: torch.device,
        *,
        timeout: float,
        deadline: float,
    ) -> None:
        self._barrier, self._rank, self._device = barrier, rank, device
        self._timeout, self._deadline = timeout, deadline
        self._operation_timeout = max(MIN_OPERATION_SECONDS, OPERATION_SHARE * timeout)
        self._last_budget = 0.0
        self._present: tuple[int, ...] = tuple(range(barrier.size))
        # rank → (node, local_rank)
        self._rank_positions: dict[int, tuple[int, int]] = {}
        self._max_bytes = 0

    @property
    def remaining(self) -> float:
        """Seconds left for measuring."""
        return self._deadline - RESERVE_SECONDS - time.monotonic()

    # ------------------------------------------------------------------ barriers

    def join(self, timeout: float, max_bytes: int) -> None:
        """Publish this rank's facts and learn which ranks are present.

        Raises:
            MissingNodeError: this rank came too late, or rank 0 does not answer.
        """
        barrier, rank = self._barrier, self._rank
        barrier.put(f"facts/{rank.rank}", asdict(rank) | {"max_bytes": max_bytes})
        joined = barrier.meet(
            "join", timeout, lambda: self.remaining, result_timeout=self._result_timeout
        )
        self._present = joined.ranks
        facts = [
            barrier.wait(f"facts/{member}", self._operation_timeout) for member in joined.ranks
        ]
        self._rank_positions = {fact["rank"]: (fact["node"], fact["local_rank"]) for fact in facts}
        # All ranks use the same sizes: those that the one with the least memory can hold.
        self._max_bytes = min(fact["max_bytes"] for fact in facts)
        self._last_budget = 30.0  # next, each node measures itself, at its own pace

    def _meet(self, part: str, max_seconds: float, without: Sequence[int] = ()) -> float:
        """Meet before ``part``; returns its budget: ``max_seconds``, or less if time is short."""
        timeout = min(self._time_limit(self._last_budget) + 2.0, max(1.0, self.remaining))
        result = self._barrier.meet(
            part,
            timeout,
            lambda: min(max_seconds, self.remaining),
            expected=tuple(rank for rank in self._present if rank not in without),
            result_timeout=self._result_timeout,
        )
        if self._barrier.rank == 0:
            for rank in set(self._present) - set(result.ranks):
                self._barrier.put(f"lost/{rank}", part)
        self._present, self._last_budget = result.ranks, result.budget
        return result.budget

    @property
    def _result_timeout(self) -> float:
        return max(1.0, self._deadline - time.monotonic())

    def _time_limit(self, budget: float) -> float:
        """Return when a part with ``budget`` seconds is given up: its last operation may hang."""
        return budget + self._operation_timeout + 1.0

    # ------------------------------------------------------------------ parts

    def measure_node(self, measure: Callable[[bool], NodeSpeeds]) -> None:
        """Measure this rank alone; calls ``measure`` with whether it is its node's first rank."""
        rank = self._rank
        first = min(local for node, local in self._rank_positions.values() if node == rank.node)
        speeds = measure(rank.local_rank == first)
        self._barrier.put(f"speeds/{rank.rank}", asdict(speeds))

    def sweep_all(self) -> None:
        """Sweep collectives over all ranks, then inside nodes and between nodes if these differ."""
        nodes = {node for node, _ in self._rank_positions.values()}
        local_ranks = {local for _, local in self._rank_positions.values()}
        node, local_rank = self._rank.node, self._rank.local_rank
        if len(self._rank_positions) > 1:
            self._sweep("world", "all", self._present, WORLD_SHARE)
        if len(nodes) > 1 and len(local_ranks) > 1:
            self._sweep("intra", str(node), self._ranks_at(node=node), INTRA_NODE_SHARE)
            ranks = self._ranks_at(local_rank=local_rank)
            self._sweep("inter", str(local_rank), ranks, INTER_NODE_SHARE)

    def _ranks_at(self, node: int | None = None, local_rank: int | None = None) -> tuple[int, ...]:
        return tuple(
            rank
            for rank in self._present
            if node in (None, self._rank_positions[rank][0])
            and local_rank in (None, self._rank_positions[rank][1])
        )

    def _sweep(self, part: str, name: str, ranks: tuple[int, ...], share: float) -> None:
        budget = self._meet(part, share * self._timeout)
        ranks = tuple(rank for rank in ranks if rank in self._present)
        if not budget or len(ranks) < 2:
            return
        # collective → (bytes, seconds)
        points: dict[Collective, list[tuple[int, float]]] = {}

        def measure() -> None:
            group = self._group(f"{part}/{name}", ranks)
            for collective, point in sweeps(
                group.measure, budget=budget, max_bytes=self._max_bytes
            ):
                points.setdefault(collective, []).append((point.bytes, point.seconds))

        try:
            call_bounded(measure, self._time_limit(budget))
        except RuntimeError as error:
            self._barrier.put(f"error/{part}/{self._rank.rank}", _first_line(error))
        # What was measured before an error counts.
        if ranks[0] == self._rank.rank and points:
            self._barrier.put(f"{part}/sweeps/{name}", {"ranks": len(ranks), "sweeps": points})

    def _group(self, name: str, ranks: Sequence[int]) -> BenchmarkGroup:
        return BenchmarkGroup(
            self._barrier.messages.store,
            name,
            ranks,
            self._rank.rank,
            self._device,
            self._operation_timeout,
        )

    def run_pairwise(self) -> None:
        """Measure every pair of nodes, then repeatedly those that seemed slow with control pairs.

        Rank 0 decides after each pass what the next one measures.
        """
        nodes = sorted({node for node, _ in self._rank_positions.values()})
        rounds: list[list[Pair]] = [
            [(nodes[a], nodes[b]) for a, b in pairs] for pairs in schedule(len(nodes)) if pairs
        ]
        passes: list[dict[Pair, float]] = []
        for number, name in enumerate(PASSES):
            if number:
                if self._barrier.rank == 0:
                    self._barrier.put(f"{name}/rounds", retest_rounds(passes))
                chosen = self._barrier.wait(f"{name}/rounds", self._result_timeout)
                rounds = [[(a, b) for a, b in pairs] for pairs in chosen]
            if not rounds:
                return
            # Leaves time for as many rounds in each retest that may follow.
            later_rounds = (RETESTS - number) * len(rounds) if number else 0
            passes.append(self._run_pass(name, rounds, later_rounds))

    def finish(self) -> None:
        """Wait until all ranks have stored everything."""
        self._meet("finish", 1.0)

    def _run_pass(
        self, name: str, rounds: Sequence[Sequence[Pair]], later_rounds: int
    ) -> dict[Pair, float]:
        """Measure all pairs of ``rounds``; rank 0 returns the bandwidths, the others nothing."""
        results: dict[Pair, float] = {}
        for number, pairs in enumerate(rounds):
            share = max(0.0, self.remaining) / (len(rounds) - number + later_rounds)
            budget = self._meet(
                f"{name}-{number}",
                min(ROUND_SECONDS, share),
                without=self._unreachable_ranks(results),
            )
            # All ranks at this barrier have stored the previous round's results.
            results |= self._results(name, rounds[number - 1] if number else ())
            own_pairs = [pair for pair in pairs if self._rank.node in pair]
            if budget and own_pairs:
                self._run_pair(name, number, own_pairs[0], budget)
        self._meet(f"{name}-end", 1.0)
        return results | self._results(name, rounds[-1])

    def _results(self, name: str, pairs: Sequence[Pair]) -> dict[Pair, float]:
        if self._barrier.rank != 0:
            return {}
        local_ranks = sorted({local for _, local in self._rank_positions.values()})
        results: dict[Pair, float] = {}
        for a, b in pairs:
            stored = [self._barrier.get(f"{name}/{a}-{b}/{local}") for local in local_ranks]
            known = [result for result in stored if result is not None]
            if known:
                complete = not any(result["error"] for result in known)
                results[a, b] = sum(result["bandwidth"] for result in known) if complete else 0.0
        return results

    def _unreachable_ranks(self, results: dict[Pair, float]) -> list[int]:
        """Return ranks of nodes whose pairs all failed, at least two: waiting costs too much."""
        failures: dict[int, list[bool]] = {}
        for pair, value in results.items():
            for node in pair:
                failures.setdefault(node, []).append(value <= 0)
        nodes = {node for node, failed in failures.items() if len(failed) > 1 and all(failed)}
        # Rank 0 stays: it runs the barrier.
        return [rank for rank in self._present if self._rank_positions[rank][0] in nodes and rank]

    def _run_pair(self, name: str, number: int, pair: Pair, budget: float) -> None:
        rank = self._rank
        other_node = pair[0] if pair[1] == rank.node else pair[1]
        partner = self._ranks_at(node=other_node, local_rank=rank.local_rank)
        if not partner:
            return
        ranks = sorted((rank.rank, partner[0]), key=lambda member: self._rank_positions[member][0])
        nodes = f"{pair[0]}-{pair[1]}/{rank.local_rank}"
        try:
            result = call_bounded(
                lambda: measure_pair(
                    self._group(f"{name}-{number}/{nodes}", ranks),
                    pair,
                    rank.local_rank,
                    budget,
                    self._max_bytes,
                    PAIR_REPEATS if name == PASSES[0] else RETEST_REPEATS,
                ),
                self._time_limit(budget),
            )
        except RuntimeError as error:
            result = PairResult(pair, rank.local_rank, error=_first_line(error))
        # Either end reports an error, the first one alone reports a result.
        if result.error or ranks[0] == rank.rank:
            self._barrier.put(f"{name}/{nodes}", asdict(result))


def measure_pair(
    group: BenchmarkGroup, pair: Pair, local_rank: int, budget: float, max_bytes: int, repeats: int
) -> PairResult:
    """Measure clock offset, latency and bandwidth of two ranks, in about ``budget`` seconds."""
    offset, uncertainty = _clock_offset(group)
    latency = group.measure("all_gather", SMALL_BYTES, LATENCY_REPEATS)
    size, best = _best_transfer(group, budget, max_bytes, repeats)
    return PairResult(
        pair,
        local_rank,
        bandwidth=busbw("all_gather", 2, SweepPoint(size, best)),
        latency=latency,
        clock_offset=offset,
        clock_uncertainty=uncertainty,
    )


def _best_transfer(
    group: BenchmarkGroup, budget: float, max_bytes: int, repeats: int
) -> tuple[int, float]:
    """Return the bytes and seconds of the best transfer; noise only slows a transfer.

    Sizes grow until a transfer takes :data:`MIN_TRANSFER_SECONDS`: a shorter one mostly fills
    buffers, which looks faster than the network is. A size is repeated before the search ends with
    it, because a late process can make a short transfer seem long enough.
    """
    spent, seconds = 0.0, [0.0]
    for size in PAIR_BYTES:
        seconds = [group.measure("all_gather", size, 1)]
        while (
            min(seconds) >= MIN_TRANSFER_SECONDS
            and len(seconds) <= repeats
            and spent + sum(seconds) + min(seconds) <= budget
        ):
            seconds.append(group.measure("all_gather", size, 1))
        spent += sum(seconds)
        # The next size is at most 8 times as large and is measured several times.
        next_seconds = 8 * min(seconds) * (1 + PAIR_REPEATS)
        if (
            min(seconds) >= MIN_TRANSFER_SECONDS
            or spent + next_seconds > budget
            or 8 * size > max_bytes
        ):
            break
    while len(seconds) <= repeats and spent + min(seconds) <= budget:
        seconds.append(group.measure("all_gather", size, 1))
        spent += seconds[-1]
    return size, min(seconds)


def _clock_offset(group: BenchmarkGroup) -> tuple[float, float]:
    """Return the seconds that the second rank's clock is ahead, and the uncertainty of that.

    Both ranks exchange their clocks' times; the quickest of several exchanges is the most exact
    (Cristian 1989): the other clock was read at most one exchange before it ended.
    """
    best: tuple[float, float] | None = None
    for _ in range(CLOCK_REPEATS):
        before = time.time()
        times = group.exchange(before)
        duration = time.time() - before
        if best is None or duration < best[1]:
            best = (times[1 - group.group_rank] - before, duration)
    assert best is not None
    offset, uncertainty = best
    return (offset if group.group_rank == 0 else -offset), uncertainty


def call_bounded(call: Callable[[], T], seconds: float) -> T:
    """Return or raise what ``call`` does; if it takes longer, leave its thread behind.

    Gloo waits five times its timeout to connect, and NCCL may wait forever.

    Raises:
        RuntimeError: ``call`` did not end within ``seconds``.
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


def _first_line(error: BaseException) -> str:
    """Return the first line of a library's message, without the ``[file:line]`` in front."""
    text = re.sub(r"^\[[^\]]*\]\s*", "", str(error).strip()) or type(error).__name__
    return text.splitlines()[0][:300]

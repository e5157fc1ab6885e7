"""Schedules bandwidth measurements between pairs of nodes and finds slow nodes and links. Pure.

The first pass is a round robin by the circle method: n − 1 rounds (n for an odd n), in each of
which every node has at most one partner, so all pairs of a round are measured at the same time
without sharing a node's network.

Other programs on a node, a busy switch or a late process can only lower a measured bandwidth, so
one slow measurement proves nothing. Each suspect pair is therefore measured again in up to
:data:`RETESTS` further passes, together with control pairs that were fast in the first pass, and
the best of its measurements counts. A pair is slow only if it stays far below the control pairs
that had the same chances. A pair that failed is measured once more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

Pair = tuple[int, int]
Pass = Mapping[Pair, float]
"""Bandwidth by pair of nodes in one pass over (some of) the pairs; 0 if the pair failed."""

SUSPECT_SHARE = 0.7
"""A pair below this share of the typical bandwidth is measured again."""

SLOW_SHARE = 0.5
"""A pair whose best measurement is below this share of the control pairs' best is slow."""

READABLE_SHARE = 0.25
"""A retest in which the control pairs fall below this share of the typical bandwidth shows nothing:
the machines were too busy to send."""

RETESTS = 6
"""Maximum number of passes that measure suspect pairs again; a pair that was fast once is done."""

RETESTS_PER_NODE = 3
"""Links measured again for a node that seems slow as a whole: a sample is enough cluster, and all
n − 1 links would need as many rounds as the first pass."""


HIGH_CONFIDENCE_SHARE = SLOW_SHARE / 2
"""A confirmed pair below this share of the control pairs' best is slow with high confidence: noise
would have had to halve every one of its measurements once more."""

Confidence = Literal["high", "medium"]


@dataclass(frozen=True)
class SlowLinks:
    """Slow nodes, and slow links between nodes that are not slow themselves.

    ``typical`` is the median of the faster half of all pairs, in the unit of the measurements.
    ``unconfirmed`` are links that were slow once and could not be measured again: not enough time,
    or the control pairs were slow as well. ``confidence`` has an entry for each slow node ``(n,)``
    and each slow link.
    """

    typical: float
    nodes: tuple[int, ...]
    links: tuple[Pair, ...]
    unconfirmed: tuple[Pair, ...] = ()
    confidence: Mapping[tuple[int, ...], Confidence] = field(default_factory=dict)


def schedule(num_nodes: int) -> tuple[tuple[Pair, ...], ...]:
    """Return rounds that hold every pair ``(low, high)`` of ``num_nodes`` nodes exactly once.

    Raises:
        ValueError: ``num_nodes`` is negative.
    """
    if num_nodes < 0:
        raise ValueError(f"num_nodes: {num_nodes} must not be negative")
    # An odd count gets an empty position: its partner pauses in that round.
    circle: list[int | None] = [*range(num_nodes), *([None] if num_nodes % 2 else [])]
    rounds = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        facing = zip(circle[:half], reversed(circle[half:]), strict=True)
        pairs = [(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None]
        rounds.append(tuple(sorted(pairs)))
        # The first position is fixed, all others rotate by one.
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return tuple(rounds)


def pack(pairs: Iterable[Pair]) -> list[list[Pair]]:
    """Distribute ``pairs`` first-fit over rounds in which every node has at most one partner."""
    rounds: list[list[Pair]] = []
    for pair in pairs:
        for packed in rounds:
            if not _nodes_of(packed) & set(pair):
                packed.append(pair)
                break
        else:
            rounds.append([pair])
    return rounds


def retest_rounds(passes: Sequence[Pass]) -> list[list[Pair]]:
    """Return the rounds of the next pass: open suspects with control pairs; empty if none is left.

    ``passes`` are the passes so far, the first one over all pairs. Pairs that failed are measured
    again in the first retest only: each costs a timeout of several seconds, and load slows a
    transfer but does not end it.
    """
    first = passes[0]
    if len(passes) > RETESTS:
        return []
    best, reference = best_bandwidths(passes), _reference(passes)
    suspects = _suspects(first)
    still_open = {pair for pair in suspects if best[pair] < SUSPECT_SHARE * reference}
    if len(passes) == 1:
        still_open |= _failed(passes)
    if not still_open:
        return []
    rounds = pack(_sample(still_open, first))
    controls = sorted(
        (pair for pair, value in first.items() if value > 0 and pair not in suspects),
        key=lambda pair: (-first[pair], pair),
    )
    complete = True
    for pairs in rounds:
        without_control = len(pairs)
        for control in controls:
            if not _nodes_of(pairs) & set(control):
                pairs.append(control)
        complete = complete and len(pairs) > without_control
    if not complete:
        # With three nodes, for example, every control pair shares a node with the suspect.
        rounds.append(pack(controls)[0])
    return rounds


def find_slow_links(passes: Sequence[Pass]) -> SlowLinks | None:
    """Return slow nodes and links; None if no pair was measured.

    The fewest causes explain the slow pairs. One slow node stands for several slow links if that
    saves more causes than the node has fast links, which contradict it. The node whose links are
    slowest in sum is taken first; its links then no longer count against their other ends. Two
    nodes have one link and nothing to compare it with: unless it failed, it is never slow.
    """
    if not passes or not passes[0]:
        return None
    first, best, reference = passes[0], best_bandwidths(passes), _reference(passes)
    failed = _failed(passes)
    suspects = _suspects(first) | _failed([first])
    slow = {pair for pair in suspects - failed if best[pair] < SLOW_SHARE * reference}
    tested = {pair for pair in suspects - failed if _is_proven(pair, passes)}
    confirmed = slow & tested
    # Only a sample of a slow node's links is measured again; it stands for the others.
    represented = {
        pair
        for pair in slow - tested
        if any(_is_sample_slow(node, tested, confirmed) for node in pair)
    }
    severity = {pair: 1 - best[pair] / reference if reference else 1.0 for pair in best}
    explained = failed | confirmed | represented
    nodes = _slow_nodes(first, {pair: severity[pair] for pair in explained})

    def between_other_nodes(pairs: Iterable[Pair]) -> tuple[Pair, ...]:
        return tuple(sorted(pair for pair in pairs if not set(pair) & set(nodes)))

    links = between_other_nodes(failed | confirmed)
    confidence: dict[tuple[int, ...], Confidence] = {}
    for cause in [*((node,) for node in nodes), *links]:
        pairs = [pair for pair in explained if set(cause) <= set(pair)]
        confidence[cause] = _confidence(pairs, passes, severity)
    return SlowLinks(
        _typical(best.values()),
        tuple(sorted(nodes)),
        links,
        between_other_nodes(slow - tested),
        confidence,
    )


def _confidence(
    pairs: Sequence[Pair], passes: Sequence[Pass], severity: Mapping[Pair, float]
) -> Confidence:
    """Return how sure it is that these pairs, which one cause explains, are slow."""
    was_repeated = any(pair in measured for pair in pairs for measured in passes[1:])
    is_severe = median([severity[pair] for pair in pairs]) > 1 - HIGH_CONFIDENCE_SHARE
    return "high" if was_repeated and is_severe else "medium"


def best_bandwidths(passes: Sequence[Pass]) -> dict[Pair, float]:
    """Return each pair's best bandwidth over all passes: noise only lowers a measurement."""
    return {
        pair: max(measured[pair] for measured in passes if pair in measured) for pair in passes[0]
    }


def _failed(passes: Sequence[Pass]) -> set[Pair]:
    return {pair for pair, value in best_bandwidths(passes).items() if value <= 0}


def _suspects(first: Pass) -> set[Pair]:
    threshold = SUSPECT_SHARE * _typical(first.values())
    return {pair for pair, value in first.items() if 0 < value < threshold}


def _controls(retest: Pass, first: Pass) -> list[Pair]:
    suspects = _suspects(first)
    return [pair for pair in retest if first.get(pair, 0.0) > 0 and pair not in suspects]


def _is_proven(pair: Pair, passes: Sequence[Pass]) -> bool:
    """Return whether the retests of ``pair`` show something about it.

    One retest does if the control pairs were as fast as in the first pass. If they were slow as
    well, the pair must have been far slower than they were, in two retests: noise that lowers all
    of them does not hide how they compare, but if it leaves next to nothing, chance decides.
    """
    first, noisy = passes[0], 0
    typical = _typical(first.values())
    for retest in (later for later in passes[1:] if pair in later):
        values = [retest[control] for control in _controls(retest, first)]
        control = median(values) if values else 0.0
        if control >= SUSPECT_SHARE * typical:
            return True
        is_readable = control >= READABLE_SHARE * typical
        noisy += is_readable and retest[pair] < SLOW_SHARE * control
    return noisy >= 2


def _reference(passes: Sequence[Pass]) -> float:
    """Return the bandwidth that suspects are compared with.

    After a retest these are the control pairs' best measurements: like the suspects', the best of
    several. Before, it is the typical bandwidth of the first pass.
    """
    first, best = passes[0], best_bandwidths(passes)
    controls = {pair for later in passes[1:] for pair in _controls(later, first)}
    return median([best[pair] for pair in controls]) if controls else _typical(first.values())


def _sample(suspects: Collection[Pair], first: Pass) -> list[Pair]:
    """Select the suspects to measure again: a few for each node that seems slow, else all."""
    slow_nodes = _slow_nodes(first, dict.fromkeys({*suspects, *_failed([first])}, 1.0))
    chosen: list[Pair] = [pair for pair in suspects if not set(pair) & set(slow_nodes)]
    for node in slow_nodes:
        # Links to healthy nodes first: a link between two slow nodes does not show which is slow.
        links = sorted(
            (pair for pair in suspects if node in pair),
            key=lambda pair: (set(pair) <= set(slow_nodes), pair),
        )
        chosen += [pair for pair in links[:RETESTS_PER_NODE] if pair not in chosen]
    return sorted(chosen)


def _is_sample_slow(node: int, tested: set[Pair], confirmed: set[Pair]) -> bool:
    links = {pair for pair in tested if node in pair}
    return len(links) >= 2 and links <= confirmed


def _typical(values: Iterable[float]) -> float:
    """Return the median of the faster half: with one bad node of four, half of the pairs are slow.

    Failed pairs (0) are left out.
    """
    ordered = sorted(value for value in values if value > 0)
    return float(median(ordered[len(ordered) // 2 :])) if ordered else 0.0


def _slow_nodes(pairs: Iterable[Pair], slow: Mapping[Pair, float]) -> list[int]:
    """Return the nodes that explain several of the ``slow`` pairs, the worst first.

    ``slow`` maps pairs to how slow they are, from 0 to 1.
    """
    nodes: list[int] = []
    remaining = set(pairs)
    while (node := _slowest_node(remaining, slow)) is not None:
        nodes.append(node)
        remaining = {pair for pair in remaining if node not in pair}
    return nodes


def _slowest_node(pairs: Collection[Pair], slow: Mapping[Pair, float]) -> int | None:
    """Return the node that explains the most severe pairs; None if links explain them better."""
    candidates = []
    for node in _nodes_of(pairs):
        links = [pair for pair in pairs if node in pair]
        severities = [slow[pair] for pair in links if pair in slow]
        # One cause instead of several saves all but one of them. A single slow link does not show
        # which of its two ends is slow.
        if len(severities) - 1 > len(links) - len(severities):
            candidates.append((sum(severities), -node))
    return -max(candidates)[1] if candidates else None


def _nodes_of(pairs: Iterable[Pair]) -> set[int]:
    return {node for pair in pairs for node in pair}

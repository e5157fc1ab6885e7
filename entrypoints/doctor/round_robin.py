"""Which nodes are measured against each other, and whom the results accuse. Pure.

A round robin by the circle method: n − 1 rounds (n for an odd n), in each of which every node has
at most one partner, so that all pairs of a round are measured at the same time without sharing a
node's network.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

Pair = tuple[int, int]

SLOW_SHARE = 0.7
"""A link below this share of the others' is slow."""


def schedule(nodes: int) -> tuple[tuple[Pair, ...], ...]:
    """All pairs ``(low, high)`` of ``nodes``, each once, by rounds.

    Raises:
        ValueError: a negative number of nodes.
    """
    if nodes < 0:
        raise ValueError(f"nodes: {nodes} must not be negative")
    seats: list[int | None] = [*range(nodes), *([None] if nodes % 2 else [])]
    result = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        facing = zip(seats[:half], reversed(seats[half:]), strict=True)
        pairs = [(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None]
        result.append(tuple(sorted(pairs)))
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return tuple(result)


@dataclass(frozen=True)
class SlowLinks:
    """Nodes all of whose links are slow, and slow links between nodes that are not.

    ``typical`` is the median of the faster half, in the matrix's own unit; ``slow`` are all slow
    links, those of accused nodes among them. A pair that did not answer counts as 0.
    """

    typical: float
    nodes: tuple[int, ...]
    links: tuple[Pair, ...]
    slow: tuple[Pair, ...]


def find_slow_links(bandwidths: Mapping[Pair, float], *, share: float) -> SlowLinks | None:
    """Whom to accuse, where a pair is slow below ``share`` of the typical one; None without pairs.

    A node is accused if more than half of its links are slow; of several, the one with the most
    slow links first, and its links then speak no longer against their other ends. With two nodes
    there is one link and nothing to compare it with: nobody is accused.
    """
    answered = [value for value in bandwidths.values() if value > 0]
    if not bandwidths:
        return None
    typical = _typical(answered)
    slow = {pair for pair, value in bandwidths.items() if value < share * typical or value <= 0}
    nodes: list[int] = []
    left = dict(bandwidths)
    while accused := _worst(left, slow):
        nodes.append(accused[0])
        left = {pair: value for pair, value in left.items() if accused[0] not in pair}
    links = tuple(sorted(slow & left.keys()))
    return SlowLinks(typical, tuple(sorted(nodes)), links, tuple(sorted(slow)))


def pack(pairs: Iterable[Pair]) -> list[list[Pair]]:
    """``pairs`` by rounds in each of which a node has one partner at most: first fit."""
    packed: list[list[Pair]] = []
    for pair in pairs:
        for one in packed:
            if not {node for other in one for node in other} & set(pair):
                one.append(pair)
                break
        else:
            packed.append([pair])
    return packed


def _typical(values: list[float]) -> float:
    """The faster half's median: with one bad node of four, half of the pairs are slow."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return float(median(ordered[len(ordered) // 2 :]))


def _worst(left: Mapping[Pair, float], slow: set[Pair]) -> tuple[int, int] | None:
    """The node with the most slow links, if more than half of its links, and two at least, are."""
    counts: dict[int, list[int]] = {}
    for pair in left:
        for node in pair:
            count = counts.setdefault(node, [0, 0])
            count[0] += pair in slow
            count[1] += 1
    guilty = [(bad, -node) for node, (bad, all_) in counts.items() if bad >= 2 and 2 * bad > all_]
    if not guilty:
        return None
    bad, node = max(guilty)
    return -node, bad

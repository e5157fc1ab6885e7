"""Schedule of pairwise measurements, and detection of slow nodes and links under noise."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sm_train.entrypoints.probes.round_robin import (
    RETESTS,
    RETESTS_PER_NODE,
    Pair,
    SlowLinks,
    find_slow_links,
    pack,
    retest_rounds,
    schedule,
)

Noise = Callable[[int, Pair], float]
"""(pass number, pair) → factor on the pair's true bandwidth."""


def all_pairs(num_nodes: int) -> list[Pair]:
    return [pair for pairs in schedule(num_nodes) for pair in pairs]


def measure(
    bandwidths: dict[Pair, float], noise: Noise = lambda number, pair: 1.0
) -> list[dict[Pair, float]]:
    """Run the first pass over all pairs and the retests that follow from it."""
    passes = [{pair: value * noise(0, pair) for pair, value in bandwidths.items()}]
    while rounds := retest_rounds(passes):
        number = len(passes)
        pairs = [pair for pairs in rounds for pair in pairs]
        passes.append({pair: bandwidths[pair] * noise(number, pair) for pair in pairs})
    return passes


def found_in(bandwidths: dict[Pair, float], noise: Noise = lambda number, pair: 1.0) -> SlowLinks:
    found = find_slow_links(measure(bandwidths, noise))
    assert found is not None
    return found


def disturbed_pass(seed: int, worst: float, disturbed: int) -> Noise:
    """Return noise down to ``worst`` on random pairs of one pass, and of at most 10 % elsewhere."""

    def noise(number: int, pair: Pair) -> float:
        chance = random.Random(f"{seed} {number} {pair}")
        if number == disturbed and chance.random() < 0.5:
            return chance.uniform(worst, 1.0)
        return chance.uniform(0.9, 1.0)

    return noise


# ------------------------------------------------------------------ the schedule


@given(st.integers(0, 40))
def test_round_robin_holds_every_pair_once_and_no_node_twice_per_round(num_nodes: int) -> None:
    rounds = schedule(num_nodes)
    assert sorted(pair for pairs in rounds for pair in pairs) == [
        (a, b) for a in range(num_nodes) for b in range(a + 1, num_nodes)
    ]
    for pairs in rounds:
        nodes = [node for pair in pairs for node in pair]
        assert len(nodes) == len(set(nodes))


def test_negative_number_of_nodes_is_rejected() -> None:
    with pytest.raises(ValueError, match="num_nodes: -1 must not be negative"):
        schedule(-1)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(10, 19)), unique=True))
def test_packed_rounds_hold_no_node_twice(pairs: list[Pair]) -> None:
    rounds = pack(pairs)
    assert sorted(pair for packed in rounds for pair in packed) == sorted(pairs)
    for packed in rounds:
        nodes = [node for pair in packed for node in pair]
        assert len(nodes) == len(set(nodes))


# ------------------------------------------------------------------ noise


@settings(deadline=None)
@given(
    num_nodes=st.integers(3, 12),
    seed=st.integers(0, 2**32),
    disturbed=st.integers(0, RETESTS),
    worst=st.floats(0.1, 0.9),
)
def test_noise_on_random_pairs_of_one_pass_reports_nothing(
    num_nodes: int, seed: int, disturbed: int, worst: float
) -> None:
    bandwidths = dict.fromkeys(all_pairs(num_nodes), 100.0)
    found = found_in(bandwidths, disturbed_pass(seed, worst, disturbed))
    assert (found.nodes, found.links, found.unconfirmed) == ((), (), ())


@settings(deadline=None)
@given(st.integers(3, 12), st.integers(0, 2**32))
def test_noise_down_to_60_percent_in_every_pass_reports_nothing(num_nodes: int, seed: int) -> None:
    def noise(number: int, pair: Pair) -> float:
        return random.Random(f"{seed} {number} {pair}").uniform(0.6, 1.0)

    found = found_in(dict.fromkeys(all_pairs(num_nodes), 100.0), noise)
    assert (found.nodes, found.links) == ((), ())


@settings(deadline=None)
@given(
    num_nodes=st.integers(3, 12),
    seed=st.integers(0, 2**32),
    disturbed=st.integers(0, RETESTS),
    share=st.floats(0.01, 0.3),
    data=st.data(),
)
def test_a_slow_link_is_found_despite_noise_in_one_pass(
    num_nodes: int, seed: int, disturbed: int, share: float, data: st.DataObject
) -> None:
    link = data.draw(st.sampled_from(all_pairs(num_nodes)))
    bandwidths = dict.fromkeys(all_pairs(num_nodes), 100.0) | {link: 100.0 * share}
    found = found_in(bandwidths, disturbed_pass(seed, 0.6, disturbed))
    assert (found.nodes, found.links) == ((), (link,))
    assert found.confidence.keys() == {link}
    assert found.confidence[link] == "high" or share > 0.2


@settings(deadline=None)
@given(
    num_nodes=st.integers(4, 12),
    seed=st.integers(0, 2**32),
    disturbed=st.integers(0, RETESTS),
    share=st.floats(0.01, 0.3),
    data=st.data(),
)
def test_a_slow_node_is_found_despite_noise_in_one_pass(
    num_nodes: int, seed: int, disturbed: int, share: float, data: st.DataObject
) -> None:
    node = data.draw(st.integers(0, num_nodes - 1))
    bandwidths = {pair: 100.0 * (share if node in pair else 1.0) for pair in all_pairs(num_nodes)}
    found = found_in(bandwidths, disturbed_pass(seed, 0.6, disturbed))
    assert (found.nodes, found.links) == ((node,), ())


def test_suspects_are_not_reported_as_slow_if_the_control_pairs_are_slow_as_well() -> None:
    bandwidths = dict.fromkeys(all_pairs(4), 100.0) | {(1, 3): 20.0}

    def noise(number: int, pair: Pair) -> float:
        return 0.3 if number > 0 and pair != (1, 3) else 1.0

    found = found_in(bandwidths, noise)
    assert (found.nodes, found.links, found.unconfirmed) == ((), (), ((1, 3),))


def test_link_far_below_the_control_pairs_is_slow_even_if_a_busy_computer_slows_all() -> None:
    bandwidths = dict.fromkeys(all_pairs(4), 100.0) | {(1, 3): 12.0}
    found = found_in(bandwidths, lambda number, pair: 1.0 if number == 0 else 0.5)
    assert (found.nodes, found.links, found.unconfirmed) == ((), ((1, 3),), ())


@settings(deadline=None, max_examples=200)
@given(seed=st.integers(0, 2**32), is_slow=st.booleans())
def test_the_slow_link_of_four_hosts_is_found_on_a_busy_computer(seed: int, is_slow: bool) -> None:
    """One measurement of six is disturbed, and one pass of six as a whole."""

    def noise(number: int, pair: Pair) -> float:
        of_pair, all_of_pass = (
            random.Random(f"{seed} {number} {pair}"),
            random.Random(f"{seed}{number}"),
        )
        level = all_of_pass.uniform(0.12, 1.0) if all_of_pass.random() < 1 / 6 else 1.0
        return level * (of_pair.uniform(0.1, 0.9) if of_pair.random() < 1 / 6 else 1.0)

    bandwidths = dict.fromkeys(all_pairs(4), 100.0) | ({(1, 3): 12.0} if is_slow else {})
    found = found_in(bandwidths, noise)
    assert (found.nodes, found.links) == ((), ((1, 3),) if is_slow else ())


def test_suspects_without_a_retest_are_unconfirmed() -> None:
    first = dict.fromkeys(all_pairs(4), 100.0) | {(1, 3): 20.0}
    found = find_slow_links([first])
    assert found is not None
    assert (found.nodes, found.links, found.unconfirmed) == ((), (), ((1, 3),))


def test_a_pair_at_60_percent_is_measured_again_but_not_slow() -> None:
    bandwidths = dict.fromkeys(all_pairs(4), 100.0) | {(1, 3): 60.0}
    passes = measure(bandwidths)
    assert len(passes) == 1 + RETESTS
    assert (1, 3) in passes[-1]
    found = find_slow_links(passes)
    assert found is not None
    assert (found.nodes, found.links, found.unconfirmed) == ((), (), ())


# ------------------------------------------------------------------ retests


def test_no_pair_is_measured_again_if_none_is_suspect() -> None:
    assert retest_rounds([dict.fromkeys(all_pairs(5), 100.0)]) == []
    assert retest_rounds([{}]) == []


@pytest.mark.parametrize("num_nodes", [3, 4, 5, 8])
def test_every_retest_has_a_control_pair(num_nodes: int) -> None:
    first = dict.fromkeys(all_pairs(num_nodes), 100.0) | {(0, 1): 10.0}
    rounds = retest_rounds([first])
    pairs = [pair for packed in rounds for pair in packed]
    assert (0, 1) in pairs
    assert len(pairs) > 1
    if num_nodes >= 4:
        [together] = [packed for packed in rounds if (0, 1) in packed]
        assert len(together) > 1, "a control pair is measured at the same time"


def test_a_suspect_that_was_fast_once_is_not_measured_again() -> None:
    first = dict.fromkeys(all_pairs(6), 100.0) | {(0, 1): 10.0, (2, 3): 10.0}
    second = {(0, 1): 99.0, (2, 3): 10.0, (4, 5): 100.0}
    pairs = [pair for packed in retest_rounds([first, second]) for pair in packed]
    assert (2, 3) in pairs
    assert (0, 1) not in pairs


def test_only_a_sample_of_a_slow_nodes_links_is_measured_again() -> None:
    first = {pair: 10.0 if 7 in pair else 100.0 for pair in all_pairs(16)}
    pairs = [pair for packed in retest_rounds([first]) for pair in packed]
    assert sum(7 in pair for pair in pairs) == RETESTS_PER_NODE


def test_failed_pairs_are_measured_again_once() -> None:
    first = dict.fromkeys(all_pairs(4), 100.0) | {(1, 3): 0.0}
    [pairs] = retest_rounds([first])
    assert (1, 3) in pairs
    second = dict.fromkeys(pairs, 100.0) | {(1, 3): 0.0}
    assert retest_rounds([first, second]) == []
    found = find_slow_links([first, second])
    assert found is not None
    assert (found.nodes, found.links) == ((), ((1, 3),))
    assert found.confidence == {(1, 3): "high"}
    # Without time for a retest it is reported all the same: load does not end a transfer.
    found = find_slow_links([first])
    assert found is not None
    assert (found.links, found.confidence) == (((1, 3),), {(1, 3): "medium"})


def test_one_retest_in_which_hardly_anything_is_sent_accuses_nobody() -> None:
    """Measured on two cores at load 36, in Mbit/s: all six links can send 400."""
    first = {(0, 1): 0.4, (0, 2): 7.0, (0, 3): 227.0, (1, 2): 231.0, (1, 3): 0.3, (2, 3): 0.4}
    retest = {(0, 1): 4.0, (0, 2): 1.0, (0, 3): 8.0, (1, 2): 6.0, (1, 3): 3.0, (2, 3): 1.0}
    found = find_slow_links([first, retest])
    assert found is not None
    assert (found.nodes, found.links) == ((), ())
    assert set(found.unconfirmed) == {(0, 1), (0, 2), (1, 3), (2, 3)}


def test_a_busy_machine_needs_two_retests_for_proof() -> None:
    first = dict.fromkeys(all_pairs(4), 100.0) | {(1, 3): 10.0}
    noisy = {(1, 3): 5.0, (0, 2): 40.0}
    once, twice = find_slow_links([first, noisy]), find_slow_links([first, noisy, noisy])
    assert once is not None
    assert twice is not None
    assert (once.links, once.unconfirmed) == ((), ((1, 3),))
    assert (twice.links, twice.unconfirmed) == (((1, 3),), ())


def test_a_pair_that_failed_once_and_then_was_fast_is_not_reported() -> None:
    first = dict.fromkeys(all_pairs(4), 100.0) | {(1, 3): 0.0}
    found = find_slow_links([first, {(1, 3): 99.0, (0, 2): 100.0}])
    assert found is not None
    assert (found.nodes, found.links, found.unconfirmed) == ((), (), ())


# ------------------------------------------------------------------ nodes and links


def test_a_slow_node_and_a_slow_link_are_distinguished() -> None:
    bandwidths = {pair: 10.0 if 2 in pair or pair == (0, 5) else 100.0 for pair in all_pairs(6)}
    found = found_in(bandwidths)
    assert (found.nodes, found.links) == ((2,), ((0, 5),))


def test_one_slow_link_never_makes_a_node_slow() -> None:
    # With two nodes, or after a slow node's links are left out, one link is all that a node
    # has: more than half of its links are slow, but nothing shows which end is slow.
    found = find_slow_links([{(0, 1): 0.0}])
    assert found is not None
    assert (found.nodes, found.links) == ((), ((0, 1),))
    first = dict.fromkeys(all_pairs(4), 0.0) | {(1, 2): 100.0, (1, 3): 100.0}
    found = find_slow_links([first])
    assert found is not None
    assert (found.nodes, found.links) == ((0,), ((2, 3),))
    assert found.confidence.keys() == {(0,), (2, 3)}


def test_a_node_with_exactly_half_of_its_links_slow_is_not_slow() -> None:
    first = dict.fromkeys(all_pairs(5), 100.0) | {(0, 1): 0.0, (0, 2): 0.0}
    found = find_slow_links([first])
    assert found is not None
    assert (found.nodes, found.links) == ((), ((0, 1), (0, 2)))


def test_one_healthy_link_contradicts_two_slow_ones() -> None:
    """One fast link shows that the node itself is fast: its two slow links are two causes."""
    bandwidths = dict.fromkeys(all_pairs(4), 100.0) | {(1, 3): 13.0, (1, 2): 40.0}
    found = found_in(bandwidths)
    assert (found.nodes, found.links) == ((), ((1, 2), (1, 3)))
    assert found.confidence == {(1, 2): "medium", (1, 3): "high"}


@pytest.mark.parametrize("healthy", [0, 1])
def test_one_slow_node_explains_nearly_all_of_its_links(healthy: int) -> None:
    slow = [pair for pair in all_pairs(6) if 2 in pair][healthy:]
    found = found_in(dict.fromkeys(all_pairs(6), 100.0) | dict.fromkeys(slow, 10.0))
    assert (found.nodes, found.links) == ((2,), ())
    assert found.confidence == {(2,): "high"}


# Bandwidths in MB/s that two CPU cores at load 2 to 3 measured on four network namespaces: the link
# of 1 and 3 is limited to 40 Mbit/s, all others to 400 Mbit/s. Noise put two healthy pairs below
# the threshold in the first pass.
RECORDED = {(0, 1): 45.6, (0, 2): 31.5, (0, 3): 47.1, (1, 2): 31.4, (1, 3): 5.9, (2, 3): 45.4}


@settings(deadline=None)
@given(st.lists(st.floats(0.5, 1.0), min_size=30, max_size=30))
def test_recorded_noise_accuses_the_slow_link_alone(factors: list[float]) -> None:
    """Whatever the retests measure of the healthy pairs, down to half."""
    pairs = list(RECORDED)

    def noise(number: int, pair: Pair) -> float:
        if number == 0 or pair == (1, 3):
            return 1.0
        return factors[(6 * number + pairs.index(pair)) % 30] * 45.0 / RECORDED[pair]

    found = found_in(RECORDED, noise)
    assert found.nodes == ()
    assert set(found.links) | set(found.unconfirmed) == {(1, 3)}


def test_two_nodes_have_nothing_to_compare_with() -> None:
    assert find_slow_links([]) is None
    assert find_slow_links([{}]) is None
    found = find_slow_links([{(0, 1): 3.0}])
    assert found is not None
    assert (found.nodes, found.links, found.unconfirmed) == ((), (), ())

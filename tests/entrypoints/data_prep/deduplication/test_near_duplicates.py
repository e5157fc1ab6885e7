"""Near-duplicates equal those of visiting the images one by one, for every distribution."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sm_train.entrypoints.data_prep.deduplication import (
    color_division,
    compared_images,
    hamming,
    near_duplicates,
    near_search,
)
from sm_train.entrypoints.data_prep.deduplication.color_division import first_by_color
from sm_train.entrypoints.data_prep.deduplication.colors import (
    SIGNATURE_BYTES,
    ColorBounds,
    ColorRanges,
    Signatures,
    are_alike,
)
from sm_train.entrypoints.data_prep.deduplication.compared_images import (
    NONE,
    HashDistance,
    Hashes,
    Images,
    Positions,
    count_bits,
)
from sm_train.entrypoints.data_prep.deduplication.hamming import KeyTable, choose_tables
from sm_train.entrypoints.data_prep.deduplication.near_duplicates import (
    near_duplicates as find_near_duplicates,
)
from sm_train.entrypoints.data_prep.deduplication.near_search import Search


def images_of(hashes: Sequence[int] | Hashes, palettes: Sequence[int] | None = None) -> Images:
    """Return images of one palette each; images of different palettes are not alike."""
    colors = np.full((len(hashes), SIGNATURE_BYTES), 200, np.uint8)
    for row, palette in enumerate(palettes or ()):
        colors[row, 15:33] = 60 * palette
    return Images(np.array(hashes, np.uint64), colors)


def one_by_one(images: Images, bits: int) -> dict[int, int]:
    """Return the definition: dropped image → first kept image that is near."""
    kept: list[int] = []
    dropped = {}
    for number, value in enumerate(images.hashes.tolist()):
        own = images.colors[number : number + 1]
        near = (
            other
            for other in kept
            if (value ^ int(images.hashes[other])).bit_count() <= bits
            and are_alike(images.colors[other : other + 1], own)[0]
        )
        if (first := next(near, None)) is None:
            kept.append(number)
        else:
            dropped[number] = first
    return dropped


def as_dict(result: Positions) -> dict[int, int]:
    return {row: int(result[row]) for row in np.flatnonzero(result != NONE).tolist()}


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take every path with few hashes: tables, tables in large buckets, halves."""
    monkeypatch.setattr(near_search, "_BRUTE_FORCE_ROWS", 4)
    monkeypatch.setattr(near_search, "_MAX_BUCKET_ROWS", 8)
    monkeypatch.setattr(hamming, "_SORT_COST", 0.1)
    monkeypatch.setattr(near_duplicates, "_LEAF_ROWS", 3)


HASHES = st.one_of(
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1).map(lambda value: value & 0xF0000000000000FF),  # skewed bits
    st.integers(0, 63).map(lambda bit: 1 << bit),  # a small ball
)


@st.composite
def clusters(draw: st.DrawFn) -> tuple[Images, int]:
    """Draw images of some palettes, with copies that differ in about as many bits as they may."""
    bits = draw(st.sampled_from([0, 1, 2, 3, 3, 3, 5, 8, 12, 16]))
    hashes = draw(st.lists(HASHES, max_size=30))
    for number in draw(st.lists(st.integers(0, max(0, len(hashes) - 1)), max_size=40)):
        if hashes:
            copy = hashes[number]
            for flip in draw(st.lists(st.integers(0, 63), max_size=bits + 2)):
                copy ^= 1 << flip
            hashes.append(copy)
    palettes = [draw(st.sampled_from([0, 0, 0, 1, 2])) for _ in hashes]
    return images_of(draw(st.permutations(hashes)), palettes), bits


@settings(max_examples=60, deadline=None)
@given(clusters())
def test_near_duplicates_are_those_of_the_definition(drawn: tuple[Images, int]) -> None:
    images, bits = drawn
    assert as_dict(find_near_duplicates(images, bits)) == one_by_one(images, bits)


def flipped(rng: np.random.Generator, hashes: Hashes, flips: int) -> Hashes:
    for _ in range(flips):
        hashes = hashes ^ (np.uint64(1) << rng.integers(0, 64, len(hashes)).astype(np.uint64))
    return hashes


def chain(rng: np.random.Generator, count: int) -> Hashes:
    """Return the frames of a video: each is near the one before it."""
    flips = np.uint64(1) << rng.integers(0, 64, count).astype(np.uint64)
    return np.bitwise_xor.accumulate(flips)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [0, 3, 6])
def test_distributions_with_clusters(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near_search, "_BRUTE_FORCE_ROWS", 30)
    monkeypatch.setattr(near_search, "_MAX_BUCKET_ROWS", 40)
    monkeypatch.setattr(near_duplicates, "_LEAF_ROWS", 20)
    rng = np.random.default_rng(bits)
    random = rng.integers(0, 2**64, 120, np.uint64)
    hashes = np.concatenate(
        [
            random,
            flipped(rng, random, 2),
            np.full(120, 7, np.uint64),  # blank images
            flipped(rng, np.full(120, 99, np.uint64), 3),  # a small ball
            rng.integers(0, 2**64, 120, np.uint64) & np.uint64(0xFFF),  # most bits are constant
            chain(rng, 120),
        ]
    )
    palettes = rng.choice([0, 0, 1], len(hashes)).tolist()
    for ordered in (hashes, rng.permutation(hashes)):
        for images in (images_of(ordered), images_of(ordered, palettes)):
            assert as_dict(find_near_duplicates(images, bits)) == one_by_one(images, bits)


def test_no_hash_and_one_hash() -> None:
    assert as_dict(find_near_duplicates(images_of([]), 3)) == {}
    assert as_dict(find_near_duplicates(images_of([0]), 3)) == {}


def test_bits_are_counted_alike_with_every_version_of_numpy() -> None:
    values = np.random.default_rng(0).integers(0, 2**64, 1000, np.uint64)
    values[:2] = 0, 2**64 - 1
    expected = [int(value).bit_count() for value in values]
    assert count_bits(values).tolist() == expected
    assert compared_images._count_bits_portably(values).tolist() == expected


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize("bits", [1, 3, 8])
def test_parts_of_the_tables_together_find_what_all_find(bits: int) -> None:
    """Nodes share the tables: any split of a table by key gives the same result."""
    rng = np.random.default_rng(bits)
    hashes = np.unique(flipped(rng, np.repeat(rng.integers(0, 2**64, 50, np.uint64), 20), 4))
    rng.shuffle(hashes)
    every = np.ones(len(hashes), np.bool_)
    images = images_of(hashes, rng.choice([0, 0, 1], len(hashes)).tolist())
    whole = Search(images, every, every, HashDistance(bits)).first_earlier()
    first = np.full(len(hashes), NONE, np.int32)
    for number, table in enumerate(choose_tables(hashes, bits)):
        keys = table.keys(hashes)
        for part in range(3):
            rows = np.flatnonzero(keys % np.uint64(3) == part)
            found = np.full(len(rows), NONE, np.int32)
            Search(images, every, every, HashDistance(bits)).subset(rows).search_table(
                table, found, number
            )
            has_found = found != NONE
            queries = rows[has_found]
            first[queries] = np.minimum(first[queries], rows[found[has_found]])
    assert first.tolist() == whole.tolist()


def test_the_key_of_a_table_consists_of_its_bits() -> None:
    hashes = np.array([0b1011, 1 << 63], np.uint64)
    assert KeyTable((1, 63, 3)).keys(hashes).tolist() == [0b101, 0b010]


def recolored(rng: np.random.Generator, count: int) -> Signatures:
    """Return signatures of plain images, of one icon on white, and of noise."""
    cover = rng.choice([0.0, 0.3, 0.9], 16)[:, None]
    icons = 255 * (1 - cover) + cover * rng.integers(0, 220, (count, 1, 3))
    plain = np.repeat(rng.integers(0, 40, (count, 1, 3)), 16, axis=1)
    noise = rng.integers(0, 256, (count, 16, 3))
    kinds = np.stack([icons, plain, noise])[rng.integers(0, 3, count), np.arange(count)]
    return np.rint(kinds).astype(np.uint8).reshape(count, SIGNATURE_BYTES)


@pytest.mark.parametrize("seed", range(3))
def test_images_of_one_hash_are_divided_by_color(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(color_division, "LEAF_ROWS", 8)
    monkeypatch.setattr(color_division, "_FIRST_BLOCK", 3)
    monkeypatch.setattr(color_division, "_QUERIES", 16)
    monkeypatch.setattr(color_division, "_DIVIDED_ROWS", 32)
    rng = np.random.default_rng(seed)
    hashes = np.where(rng.random(300) < 0.9, 7, rng.integers(0, 64, 300)).astype(np.uint64)
    images = Images(hashes, recolored(rng, 300))
    near = near_search.all_near(images, 3) & np.tri(300, k=-1, dtype=np.bool_)
    kept = np.zeros(300, np.bool_)
    for row in range(300):
        kept[row] = not (near[row] & kept).any()
    expected = {row: int((near[row] & kept).argmax()) for row in np.flatnonzero(~kept).tolist()}
    assert as_dict(find_near_duplicates(images, 3)) == expected
    assert 10 < len(expected) < 270
    every = np.ones(300, np.bool_)
    divided = first_by_color(images, every, every, HashDistance(3))
    assert divided.tolist() == np.where(near.any(1), near.argmax(1), NONE).tolist()
    # Equal hashes are left to another table.
    near &= hashes[:, None] != hashes
    divided = first_by_color(images, every, every, HashDistance(3, skips_equal=True))
    assert divided.tolist() == np.where(near.any(1), near.argmax(1), NONE).tolist()


def test_images_that_are_alike_are_within_the_bounds() -> None:
    """Copies with noise are on both sides of what is alike."""
    rng = np.random.default_rng(0)
    originals = recolored(rng, 600)
    noise = rng.normal(0, 1, originals.shape) * rng.uniform(0, 40, (600, 1))
    copies = np.clip(originals + noise, 0, 255).astype(np.uint8)
    alike = are_alike(originals, copies)
    assert 100 < alike.sum() < 500
    left, right = (
        ColorBounds.of(values, ColorRanges.of(values).contrasts) for values in (originals, copies)
    )
    assert np.diagonal(left.may_be_alike(right))[alike].all()
    differences = np.abs(left.extremes - right.extremes).max(axis=1)
    assert (differences <= np.minimum(left.reach, right.reach))[alike].all()

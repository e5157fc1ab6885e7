"""Duplicates among stored digests: any split of the search gives the result of the definition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sm_train.entrypoints.data_prep.deduplication import near_duplicates, near_search
from sm_train.entrypoints.data_prep.deduplication.colors import are_alike
from sm_train.entrypoints.data_prep.packing import deduplicate
from sm_train.entrypoints.data_prep.packing.deduplicate import (
    DIGEST,
    DROPPED_NAME,
    DroppedInputs,
    DuplicateSearch,
)
from sm_train.entrypoints.data_prep.packing.plan import (
    PackInput,
    PackOptions,
    ShardPlan,
    shard_name,
)
from sm_train.entrypoints.data_prep.work.plan_documents import PlanError
from sm_train.entrypoints.images.decoder_pool import InProcessDecoders
from sm_train.entrypoints.storage.storage import LocalFolder

BITS = 3
SHARD_INPUTS = 40


def random_digests(count: int) -> Any:
    """Return digests with equal bytes, near and equal hashes, unreadable and unhashed images."""
    rng = np.random.default_rng(0)
    digests = np.zeros(count, DIGEST)
    digests["sha256"] = rng.integers(0, 2**64, (count, 4), np.uint64)
    digests["phash"] = rng.choice(rng.integers(0, 2**64, count // 4, np.uint64), count)
    for _ in range(3):
        flips = np.uint64(1) << rng.integers(0, 64, count).astype(np.uint64)
        digests["phash"] ^= np.where(rng.random(count) < 0.5, flips, np.uint64(0))
    digests["colors"] = 200
    digests["colors"][:, :24] = rng.choice([0, 100], count)[:, None]
    digests["is_readable"] = digests["has_phash"] = rng.random(count) < 0.9
    digests["has_phash"] &= rng.random(count) < 0.9
    copies = rng.integers(0, count, count // 5)
    digests[copies] = digests[rng.integers(0, count, len(copies))]
    # SHA-256 digests that differ in their last word alone.
    digests["sha256"][-2:] = [[1, 2, 3, 4], [1, 2, 3, 5]]
    return digests


def by_definition(digests: Any) -> list[tuple[int, int, bool]]:
    """Return the dropped images, what each duplicates, and whether by its bytes."""
    dropped, first_of, kept = [], dict[bytes, int](), list[int]()
    for row, digest in enumerate(digests):
        if not digest["is_readable"]:
            continue
        if (first := first_of.setdefault(digest["sha256"].tobytes(), row)) != row:
            dropped.append((row, first, True))
        elif digest["has_phash"]:
            value = int(digest["phash"])
            near = (
                other
                for other in kept
                if (value ^ int(digests[other]["phash"])).bit_count() <= BITS
                and are_alike(digests["colors"][[other]], digests["colors"][[row]])[0]
            )
            if (first := next(near, row)) != row:
                dropped.append((row, first, False))
            else:
                kept.append(row)
    return dropped


@pytest.mark.parametrize("part_rows", [10**6, 150])
def test_duplicates_are_those_of_the_definition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_rows: int
) -> None:
    for module in (deduplicate, near_search, near_duplicates):
        monkeypatch.setattr(module, "PART_ROWS", part_rows)
    digests, destination = random_digests(400), LocalFolder(tmp_path)
    options = PackOptions(duplicates=True, near_bits=BITS)
    plans = []
    for number in range(len(digests) // SHARD_INPUTS):
        rows = range(number * SHARD_INPUTS, (number + 1) * SHARD_INPUTS)
        inputs = [PackInput(row, f"{row}.jpg", "", 0) for row in rows]
        name = shard_name(number)
        plans.append(ShardPlan(number, name, inputs, options, rows.start, f"{name}.npy"))
        with destination.atomic_writer(plans[-1].digests) as sink:
            np.save(tmp_path / "digests.npy", digests[rows.start : rows.stop])
            sink.write((tmp_path / "digests.npy").read_bytes())
    search = DuplicateSearch.of(plans, destination, BITS)
    assert bool(search.part_names()) is (part_rows == 150)
    for name in search.part_names():
        search.search_part(name, lambda *_: None, InProcessDecoders())
    search.find_dropped(DROPPED_NAME, lambda *_: None, InProcessDecoders())
    expected = by_definition(digests)
    assert np.load(tmp_path / DROPPED_NAME).tolist() == expected
    dropped = DroppedInputs(plans, destination)
    found = [
        (number, rejected.source, rejected.reason, rejected.detail)
        for plan in plans
        for number, rejected in dropped.of_shard(plan).items()
    ]
    assert found == [
        (row, f"{row}.jpg", "duplicate", f"has the same bytes as {first}.jpg")
        if is_equal
        else (row, f"{row}.jpg", "near-duplicate", f"looks like {first}.jpg")
        for row, first, is_equal in expected
    ]


def test_digests_of_another_version_are_refused_in_one_line(tmp_path: Path) -> None:
    np.save(tmp_path / "0.npy", np.zeros(1, [("phash", "<u8")]))
    inputs = [PackInput(0, "0.jpg", "", 0)]
    plan = ShardPlan(0, "0.tar", inputs, PackOptions(duplicates=True), 0, "0.npy")
    search = DuplicateSearch.of([plan], LocalFolder(tmp_path), BITS)
    with pytest.raises(PlanError, match=r"0\.npy: of another version .* packs all images again$"):
        search.find_dropped(DROPPED_NAME, lambda *_: None, InProcessDecoders())

"""`ShardDataset` in a loop of the user's own: bad samples are counted, reported and limited."""

from __future__ import annotations

import warnings
from itertools import islice
from pathlib import Path

import pytest
from sm_train import ShardDataset
from sm_train.entrypoints.data.shard_format import DataError

from tests.support.cluster.training_jobs import sample, write_shard


def dataset(folder: Path, *, good: int, bad: int, damage: str = "png") -> ShardDataset:
    """Return batches of 4 from a shard with samples whose image or caption cannot be used."""
    samples = {f"{number:04}": sample(number) for number in range(good + bad)}
    for number in range(bad):
        content = b"not an image" if damage == "png" else b"\xff\xfe not UTF-8"
        samples[f"{number * (good + bad) // bad:04}"][damage] = content
    (folder / "shards").mkdir()
    write_shard(folder / "shards" / "a.tar", samples)
    return ShardDataset(folder / "shards", batch_size=4, resolution=8, seed=0, decode_workers=0)


@pytest.mark.parametrize("damage", ["png", "txt"])
def test_loop_stops_if_most_samples_cannot_be_used(tmp_path: Path, damage: str) -> None:
    """Before, it repeated the few readable pictures without end."""
    shards = dataset(tmp_path, good=10, bad=50, damage=damage)
    with (
        pytest.warns(UserWarning, match=r"skipped .* samples .*a\.tar"),
        pytest.raises(DataError, match=r"samples cannot be used .*, in a\.tar; .*max_bad_fraction"),
    ):
        for _ in islice(shards, 60):
            pass
    assert sum(shards.bad_samples.values()) > 10


def test_few_bad_samples_are_counted_and_reported_at_each_doubling(tmp_path: Path) -> None:
    shards = dataset(tmp_path, good=116, bad=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batches = list(islice(shards, 30))
    assert all(len(batch["captions"]) == 4 for batch in batches)
    assert shards.bad_samples == {"image-corrupt": 4}
    messages = [str(warning.message) for warning in caught if "skipped" in str(warning.message)]
    assert 1 <= len(messages) <= 3
    assert messages[0].startswith("skipped 1 samples (image-corrupt 1): a.tar ")

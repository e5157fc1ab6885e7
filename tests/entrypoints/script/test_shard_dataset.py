"""`ShardDataset` in a loop of the user's own: bad samples are counted, reported and limited."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import sm_train
from sm_train import ShardDataset
from sm_train.entrypoints.shards.shard_format import DataError

from tests.support.cluster.training_jobs import sample, write_shard
from tests.support.image_files import image_bytes


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


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """Return shards of 32 images, half of them by each of two contributors."""
    lines = ["image,caption,author\n"]
    for number in range(32):
        (tmp_path / f"{number:03}.png").write_bytes(image_bytes(number))
        lines.append(f"{number:03}.png,{number},{('ada', 'bob')[number % 2]}\n")
    (tmp_path / "t.csv").write_text("".join(lines))
    sm_train.pack(tmp_path / "t.csv", tmp_path / "out", index_column="author", shard_size="20KB")
    return tmp_path / "out" / "shards"


def captions(dataset: ShardDataset, batches: int) -> list[list[str]]:
    return [batch["captions"] for batch in islice(dataset, batches)]


OPTIONS: dict[str, Any] = {"resolution": 8, "seed": 3, "decode_workers": 0}


def test_a_folder_takes_what_the_run_files_data_section_takes(packed: Path) -> None:
    selected = ShardDataset(packed, batch_size=4, where="author = 'ada'", **OPTIONS)
    numbers = {int(text) for batch in captions(selected, 4) for text in batch}
    assert numbers == set(range(0, 32, 2))
    field = {"json": [{"field": "columns.author", "weight": 1}]}
    described = ShardDataset(packed, batch_size=8, caption=field, crop="random", **OPTIONS)
    assert {text for batch in captions(described, 4) for text in batch} == {"ada", "bob"}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"wher": "true"}, "wher: not a key of `data` for a folder; did you mean where?"),
        ({"crop": "middle"}, "crop: 'middle' is neither 'center' or 'random'"),
        ({"flip": "yes"}, "flip: 'yes' is not true or false"),
        ({"max_bad_fraction": "1 %"}, "max_bad_fraction: '1 %' is not a number"),
        ({"caption": "txt"}, "caption: 'txt'; write {'txt': 1}"),
        ({"icc_profile": None}, "icc_profile: None is neither 'ignore' or 'srgb'"),
    ],
)
def test_wrong_keys_are_named(packed: Path, data: dict[str, Any], message: str) -> None:
    with pytest.raises(sm_train.Error) as raised:
        ShardDataset(packed, batch_size=4, **OPTIONS, **data)
    assert message in str(raised.value)


PROGRAM = """
import json, os, sys
from itertools import islice
import torch.distributed
from sm_train import ShardDataset
torch.distributed.init_process_group("gloo")
dataset = ShardDataset(sys.argv[1], batch_size=8, resolution=8, seed=3, decode_workers=0)
batches = [batch["captions"] for batch in islice(dataset, 2)]
with open(f"rank-{os.environ['RANK']}.json", "w") as file:
    json.dump(batches, file)
"""


@pytest.mark.integration
def test_on_one_instance_the_order_does_not_depend_on_the_ranks(packed: Path) -> None:
    alone = captions(ShardDataset(packed, batch_size=16, **OPTIONS), 2)
    folder = packed.parent
    (folder / "program.py").write_text(PROGRAM)
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "program.py"]
    subprocess.run([sys.executable, "-m", *command, str(packed)], cwd=folder, check=True)
    shares = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]
    for step in range(2):
        assert {*alone[step]} == {*shares[0][step], *shares[1][step]}


def test_a_saved_state_keeps_its_color_policy(packed: Path) -> None:
    dataset = ShardDataset(packed, batch_size=4, icc_profile="ignore", hdr="keep", **OPTIONS)
    captions(dataset, 1)
    state = dataset.state_dict()
    assert (state["icc_profile"], state["hdr"]) == ("ignore", "keep")
    again = ShardDataset(packed, batch_size=4, **OPTIONS)
    with pytest.warns(UserWarning, match="began with icc_profile: ignore, hdr: keep and keeps it"):
        again.load_state_dict(state)
    captions(again, 1)
    assert again.state_dict()["icc_profile"] == "ignore"

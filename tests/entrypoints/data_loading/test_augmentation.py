"""Captions, flips and offset noise are functions of the seed, the epoch and the sample."""

from __future__ import annotations

import io
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from sm_train.entrypoints.data_loading.batches import Batch
from sm_train.entrypoints.data_loading.loader import Loader, open_loader
from sm_train.entrypoints.data_loading.shard_catalog import DataRank, build_catalog
from sm_train.entrypoints.images.image_decoder import DecodeSpec
from sm_train.entrypoints.job_interface.job_config import CaptionSource
from sm_train.entrypoints.sample_metadata.captions import choose_caption
from sm_train.entrypoints.sample_metadata.sample_rng import SampleRng
from sm_train.entrypoints.shards.shard_format import DataError

from tests.support.cluster.training_jobs import write_shard
from tests.support.data_channels import DATA_CONFIG, Cluster, rest_of_epoch, take_batches

SAMPLES = 48
TEXT = CaptionSource("txt", None, 1.0)
AUGMENTED = replace(
    DATA_CONFIG,
    caption=(TEXT, CaptionSource("json", "alt", 2.0), CaptionSource("json", "tags", 1.0)),
    flip=True,
)


@pytest.fixture(scope="module")
def channel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images that are dark on the left and bright on the right, with captions of three kinds."""
    folder = tmp_path_factory.mktemp("channel")
    pixels = np.tile(np.linspace(0, 255, 8).astype(np.uint8)[None, :, None], (8, 1, 3))
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "PNG")
    for shard in range(2):
        samples = {}
        for number in range(SAMPLES // 2):
            name = f"{shard}-{number}"
            fields = {"alt": f"alt {name}", "tags": [f"a {name}", f"b {name}"]}
            text, document = f"text {name}".encode(), json.dumps(fields).encode()
            samples[name] = {"png": content.getvalue(), "txt": text, "json": document}
        write_shard(folder / f"{shard}.tar", samples)
    return folder


def loaders(channel: Path, folder: Path, nodes: int, ranks: int, **options: Any) -> list[Loader]:
    batch = 8 // (nodes * ranks)
    cluster = Cluster([channel] * nodes, ranks, folder / f"scan-{nodes}-{ranks}")
    return cluster.loaders(AUGMENTED, batch_size=batch, gradient_accumulation_steps=1, **options)


def drawn(batches: list[Batch]) -> dict[tuple[int, int], tuple[str, bool]]:
    """Return the caption of each sample, and whether its image was mirrored."""
    return {
        origin: (caption, bool(pixels[0, 0, 0] > pixels[0, -1, 0]))
        for batch in batches
        for origin, caption, pixels in zip(batch.origins, batch.captions, batch.pixels, strict=True)
    }


def test_draws_are_equal_on_any_number_of_ranks_and_differ_between_epochs(
    channel: Path, tmp_path: Path
) -> None:
    [alone] = loaders(channel, tmp_path, 1, 1)
    expected = drawn(rest_of_epoch(alone))
    assert len(expected) == SAMPLES
    several = [rest_of_epoch(loader) for loader in loaders(channel, tmp_path, 2, 2)]
    assert drawn([batch for batches in several for batch in batches]) == expected
    kinds = Counter(caption.split()[0] for caption, _ in expected.values())
    assert set(kinds) == {"text", "alt", "a", "b"}
    assert kinds["alt"] > kinds["a"]
    flips = sum(flipped for _, flipped in expected.values())
    assert SAMPLES / 4 < flips < SAMPLES * 3 / 4
    both = take_batches(loaders(channel, tmp_path, 1, 1)[0], 2 * SAMPLES // 8)
    assert drawn(both[SAMPLES // 8 :]) != expected


def test_resumed_loader_draws_the_same(channel: Path, tmp_path: Path) -> None:
    [whole] = loaders(channel, tmp_path, 1, 1)
    expected = take_batches(whole, 4)
    [first] = loaders(channel, tmp_path, 1, 1)
    take_batches(first, 2)
    [second] = loaders(channel, tmp_path, 1, 1, state=first.state_bytes())
    assert drawn(take_batches(second, 2)) == drawn(expected[2:])


def test_latents_cannot_be_augmented(channel: Path, tmp_path: Path) -> None:
    rank = DataRank(("algo-1",), 0, 0, 1)
    catalog = build_catalog(channel, None, rank, lambda value: [value], tmp_path / "scan")
    latents = {"resolution": 8, "model": "m", "moments": [8, 1, 1]}
    packed = replace(catalog, options={"latents": latents})
    options: dict[str, Any] = {"batch_size": 2, "seed": 0, "decode_workers": 0}
    for config, key in (
        (AUGMENTED, "flip"),
        (replace(AUGMENTED, flip=False), "caption"),
    ):
        with pytest.raises(DataError, match=rf"^data\.{key}: the shards hold latents of 8 px"):
            open_loader(packed, rank, config, resolution=8, **options)
        open_loader(packed, rank, config, resolution=16, **options)


def test_flipped_crop_is_in_the_mirrored_image() -> None:
    content = io.BytesIO()
    Image.new("RGB", (40, 20)).save(content, "PNG")
    spec = DecodeSpec(10, 10, "random", 3, "exact", "ignore")
    plain = spec.sizes(content.getvalue(), 1, 2)
    flipped = spec.sizes(content.getvalue(), 1, 2, flipped=True)
    assert plain[:3] == flipped[:3] == (20, 40, 0)
    # The image is 20 pixels wide at the crop's scale, the crop 10.
    assert flipped[3] == pytest.approx(20 - 10 - plain[3], abs=1)


def test_offset_noise_is_constant_in_each_channel_of_the_noise() -> None:
    rng = SampleRng(seed=5, num_noises=2, channels=3, scale=1)
    noises = []
    for strength in (0.0, 0.1):
        noise = torch.empty(rng.shape(1, 4, 4))[:, 0]
        replace(rng, offset_noise=strength).fill_normal(noise, 1, 2, 3)
        noises.append(noise)
    offset = noises[1] - noises[0]
    assert offset[1].abs().max() == 0  # the latent's own noise
    assert offset[0].std(dim=(1, 2)).max() < 1e-6
    assert offset[0].abs().min() > 0


FIELDS = st.dictionaries(
    st.sampled_from(["a", "b", "c"]), st.none() | st.text() | st.lists(st.text() | st.none())
)


@given(
    FIELDS,
    st.lists(
        st.builds(
            CaptionSource,
            st.just("json"),
            st.sampled_from([None, "a", "b", "c.d", "c[0]"]),
            st.floats(0.01, 10),
        ).map(lambda source: source if source.field else replace(source, member="txt")),
        min_size=1,
    ),
    st.floats(0.001, 0.999),
)
def test_chosen_caption_is_one_of_those_present(
    fields: dict[str, Any], sources: list[CaptionSource], uniform: float
) -> None:
    members = {"json": memoryview(json.dumps(fields).encode()), "txt": memoryview(b"text")}
    chosen = choose_caption(members, sources, uniform)
    names = {source.field for source in sources}
    present = {"text"} if None in names else set()
    for field in {"a", "b", "c[0]"} & names:
        value = fields.get(field[0])
        if field == "c[0]":
            value = value[0] if isinstance(value, list) and value else None
        values = value if isinstance(value, list) else [value]
        present |= {text for text in values if text and text.strip()}
    assert (chosen in present) if present else chosen is None


def test_captions_are_chosen_by_weight() -> None:
    document = b'{"x": {"y": ["", "n"]}, "l": ["1", "2"]}'
    members = {"txt": memoryview(b"t"), "json": memoryview(document)}
    fields = [("x.y[1]", 1.0), ("l", 2.0), ("none", 5.0), ("l[2]", 5.0)]
    sources = [TEXT, *(CaptionSource("json", field, weight) for field, weight in fields)]
    uniforms = (np.arange(400) + 0.5) / 400
    counts = Counter(choose_caption(members, sources, float(value)) for value in uniforms)
    assert counts == {"t": 100, "n": 100, "1": 100, "2": 100}

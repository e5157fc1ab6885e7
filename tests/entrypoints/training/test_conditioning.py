"""Conditions of networks other than the noisy image: sizes, crops and unpadded captions."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sm_train.entrypoints.data_prep.packing.latent_encoder import LatentEncoder
from sm_train.entrypoints.images.decoder_pool import InProcessDecoders
from sm_train.entrypoints.images.image_decoder import DecodeSpec
from sm_train.entrypoints.job_interface.job_config import DEFAULT_COLOR as SRGB
from sm_train.entrypoints.job_interface.job_config import read_job_config
from sm_train.entrypoints.models.builder import ModelComponents, build_components
from sm_train.entrypoints.models.components import describe_latents
from sm_train.entrypoints.models.model_folders import save_components
from sm_train.entrypoints.models.pipeline import Text, predict
from sm_train.entrypoints.shards.shard_index import write_index
from sm_train.entrypoints.shards.shard_verification import scan_shard
from sm_train.entrypoints.training.model_inputs import ModelInputs

from tests.support.cluster.training_jobs import tiny_run, write_shard
from tests.support.data_channels import DATA_CONFIG, Cluster, rest_of_epoch
from tests.support.models import record
from tests.support.run_documents import write_job_file

SIZES = [(8, 8), (24, 16), (16, 40), (9, 31)]
"""Height and width of the images."""


def picture(height: int, width: int) -> bytes:
    """Return an image whose red rises with the column and whose green rises with the row."""
    rows, columns = np.mgrid[:height, :width].astype(np.uint8)
    content = io.BytesIO()
    Image.fromarray(np.stack([columns, rows, rows], axis=-1)).save(content, "PNG")
    return content.getvalue()


def expected_sizes(height: int, width: int) -> list[int]:
    """Return what diffusers' SDXL script computes with a center crop, for 8 pixels."""
    scale = 8 / min(height, width)
    top, left = ((side - min(height, width)) // 2 * scale for side in (height, width))
    return [height, width, round(top), round(left)]


@pytest.mark.parametrize("crop", ["center", "random"])
@pytest.mark.parametrize("size", SIZES)
def test_sizes_are_those_of_the_original_image_and_of_the_crop(
    size: tuple[int, int], crop: Any
) -> None:
    spec = DecodeSpec(min(size), min(size), crop, seed=3)
    for key in range(5):
        pixels = torch.empty(spec.height, spec.width, 3, dtype=torch.uint8)
        spec.decode(picture(*size), pixels, key)
        height, width, top, left = spec.sizes(picture(*size), key)
        assert (height, width) == size
        # Nothing is scaled, so the first pixel names its place.
        assert pixels[0, 0].tolist() == [left, top, top]


def test_sizes_are_of_the_upright_image() -> None:
    content, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    Image.open(io.BytesIO(picture(16, 40))).save(content, "JPEG", exif=exif)
    assert DecodeSpec(8, 8).sizes(content.getvalue()) == (40, 16, 6, 0)


def components_of(folder: Path, preset: str) -> ModelComponents:
    config = read_job_config(write_job_file(folder, tiny_run(max_steps=1, preset=preset)), "8px")
    torch.manual_seed(0)
    built = build_components(config.model, 8, components=None, previous=None)
    built.network_init.materialize(torch.device("cpu"), 0)
    return built


@pytest.fixture(params=[False, True], ids=["images", "precomputed"])
def loaded(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[ModelComponents, list[Any]]:
    """The components of a small SDXL, and the batches of an epoch."""
    components = components_of(tmp_path, "tiny-sdxl")
    samples = {
        str(number): {"png": picture(*size), "txt": b"a grey"} for number, size in enumerate(SIZES)
    }
    options = {}
    if request.param:
        save_components(components, None, record(), tmp_path / "components")
        encoder = LatentEncoder(tmp_path / "components", 8, SRGB)
        for members in samples.values():
            members |= encoder.encode(members["png"], "a grey", InProcessDecoders())
        options = {"latents": describe_latents(tmp_path / "components", 8)}
    (tmp_path / "shards").mkdir()
    write_shard(tmp_path / "shards" / "a.tar", samples)
    write_index(
        tmp_path / "a.parquet", [scan_shard(tmp_path / "shards" / "a.tar")], options=options
    )
    node = Cluster([tmp_path / "shards"], 1, tmp_path / "scan", tmp_path / "a.parquet")
    [loader] = node.loaders(
        replace(DATA_CONFIG, crop="center"),
        rng=components.sample_rng(0),
        tokenize=components.text_encoders.tokenize,
    )
    batches = rest_of_epoch(loader)
    assert all((batch.moments is not None) == request.param for batch in batches)
    return components, batches


@pytest.mark.slow
def test_sdxl_gets_the_size_and_the_crop_of_each_sample(
    loaded: tuple[ModelComponents, list[Any]],
) -> None:
    components, batches = loaded
    given: list[list[int]] = []
    components.network.add_time_proj.register_forward_hook(
        lambda _, inputs, __: given.extend(inputs[0].reshape(-1, 6).tolist())
    )
    inputs = ModelInputs(components, torch.device("cpu"), caption_dropout=0.0)
    module, samples = components.trained_module(), []
    for batch in batches:
        target, text = inputs.prepare(batch)
        module(target.noisy, target.timesteps, *text)
        samples += [number for _, number in batch.origins]
    assert sorted(samples) == [0, 1, 2, 3]
    assert given == [[*expected_sizes(*SIZES[number]), 8, 8] for number in samples]


def test_pixart_masks_the_padding_of_captions(tmp_path: Path) -> None:
    """As diffusers' PixArt pipeline: by masks of the tokenizer, in encoder and network."""
    components = components_of(tmp_path, "tiny-dit")
    [encoder], [tokenizer] = components.text_encoders.encoders, components.text_encoders.tokenizers
    network = components.network.eval()
    torch.nn.init.normal_(network.proj_out.weight)
    captions = ["a grey of 3", ""]
    text = components.text_encoders.encode(components.text_encoders.tokenize(captions))
    noisy, timesteps = torch.randn(2, 4, 4, 4), torch.tensor([10, 900])
    length = text.states.shape[1]
    tokens = tokenizer(captions, padding="max_length", max_length=length, return_tensors="pt")
    with torch.no_grad():
        states = encoder(tokens.input_ids, attention_mask=tokens.attention_mask)[0]
        expected = network(
            noisy,
            states,
            timesteps,
            added_cond_kwargs={"resolution": None, "aspect_ratio": None},
            encoder_attention_mask=tokens.attention_mask,
        ).sample
        assert expected.std() > 1e-3
        torch.testing.assert_close(predict(network, noisy, timesteps, text, 2), expected)
        # The length of the padding is of no consequence.
        short = Text(text.states[:, : length // 2])
        torch.testing.assert_close(predict(network, noisy, timesteps, short, 2), expected)


@pytest.mark.parametrize(
    ("vae_fp32", "precision"), [(True, torch.float32), (False, torch.bfloat16)]
)
def test_autoencoder_has_its_own_precision_within_autocast(
    tmp_path: Path, precision: torch.dtype, *, vae_fp32: bool
) -> None:
    components = components_of(tmp_path, "tiny-sd2")
    inputs = ModelInputs(components, torch.device("cpu"), 0.0, vae_fp32=vae_fp32)
    found: list[torch.dtype] = []
    components.vae.quant_conv.register_forward_hook(
        lambda _, __, output: found.append(output.dtype)
    )
    pixels = torch.zeros(1, 8, 8, 3, dtype=torch.uint8)
    noise = torch.zeros(2, 1, 4, 4, 4)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        inputs._images(pixels, noise)
    with torch.no_grad():
        inputs._images(pixels, noise)
    assert found == [precision, precision]

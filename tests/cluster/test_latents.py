"""Latents computed by packing equal those that training computes, and training uses them."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset
from sm_train.entrypoints.shards.shard_index import ShardIndex
from sm_train.entrypoints.shards.tar_reader import sample_members

from tests.conftest import Aws, Cli
from tests.support.cluster import latents_support
from tests.support.cluster.latents_support import latent_channels, latent_job, pack
from tests.support.deadline import DEADLINE
from tests.support.image_files import read_tree
from tests.support.moto_server import ACCOUNT
from tests.support.run_files import write_run
from tests.toolkit.data_prep.packing.on_sagemaker_support import start_node
from tests.toolkit.data_prep.packing.pack_options_support import read_objects, upload_folder

components = latents_support.components

pytestmark = pytest.mark.integration


@pytest.mark.slow
def test_training_uses_latents_that_packing_computed(
    cli: Cli, tmp_path: Path, components: Path
) -> None:
    run = pack(cli, tmp_path, components)
    assert run.returncode == 0, run.stderr
    header = ShardIndex(tmp_path / "out/index.parquet").header
    assert header.options["latents"]["moments"] == [8, 4, 4]
    [first, *_] = webdataset.WebDataset(
        str(tmp_path / "out/shards/shard-000000.tar"), shardshuffle=False
    )
    expected = encode_with_diffusers(components, first["png"], first["txt"].decode())
    for name, array in zip(("moments.npy", "text.npy"), expected, strict=True):
        stored = np.load(io.BytesIO(first[name]))
        assert stored.dtype == np.float16
        # Half precision has eleven significant bits.
        np.testing.assert_allclose(stored, array, rtol=2**-10, atol=1e-3)

    job = latent_job(tmp_path / "job", max_steps=3, caption_dropout=0.5)
    latent_channels(job, tmp_path / "out", components)
    code, events, text = job.run()
    assert code == 0, text
    start = next(event for event in events if event["kind"] == "start")
    assert start["input_kind"] == "precomputed latents"


@pytest.mark.slow
def test_packing_on_sagemaker_uses_the_uploaded_components(
    cli: Cli, aws: Aws, tmp_path: Path, components: Path
) -> None:
    """Two instances of a job produce what a local run produces, from the uploaded files alone."""
    # A job expects the buckets of its role's account, which is moto's.
    run = write_run(tmp_path, bucket="ai-bucket", role=f"arn:aws:iam::{ACCOUNT}:role/own")
    size = ("--shard-size", "10KB")
    assert pack(cli, tmp_path, components, *size, "--for", str(run)).returncode == 0
    for bucket in ("raw", "packed", "ai-bucket"):
        aws.make_bucket(bucket)
    upload_folder(aws, tmp_path / "in", "photos/")
    sent = cli(
        "--region",
        "us-east-1",
        "pack",
        "s3://raw/photos/",
        "s3://packed/set",
        *size,
        "--latents",
        components,
        "--resolution",
        "8",
        "--on",
        "sagemaker",
        "--for",
        run,
        "--instances",
        "2",
        "--yes",
        network="loopback",
        env=aws.environment,
    )
    assert sent.returncode == 0, sent.stderr
    assert "ml.g5.2xlarge" in sent.stderr
    [body] = aws.bodies("CreateProcessingJob")
    nodes = [start_node(tmp_path, aws, body, rank) for rank in (0, 1)]
    outputs = [node.communicate(timeout=DEADLINE)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    local = {name: content for name, content in read_tree(tmp_path / "out").items() if "." in name}
    assert read_objects(aws, "packed", "set/") == local


def encode_with_diffusers(components: Path, image: bytes, caption: str) -> tuple[Any, Any]:
    """Return moments and text states, computed with diffusers and transformers alone."""
    from diffusers import AutoencoderKL
    from PIL import Image
    from transformers import AutoTokenizer, CLIPTextModel

    vae = AutoencoderKL.from_pretrained(components / "vae")
    text = CLIPTextModel.from_pretrained(components / "text_encoder")
    tokenizer = AutoTokenizer.from_pretrained(components / "tokenizer")
    pixels = torch.from_numpy(np.array(Image.open(io.BytesIO(image)).convert("RGB")))
    length = min(text.config.max_position_embeddings, tokenizer.model_max_length)
    tokens = tokenizer(
        [caption], padding="max_length", truncation=True, max_length=length, return_tensors="pt"
    ).input_ids
    with torch.no_grad():
        images = pixels.permute(2, 0, 1)[None].float() / 127.5 - 1.0
        return vae.encode(images).latent_dist.parameters[0].numpy(), text(tokens)[0][0].numpy()


@pytest.mark.slow
def test_latents_of_another_model_are_ignored(cli: Cli, tmp_path: Path, components: Path) -> None:
    assert pack(cli, tmp_path, components).returncode == 0
    job = latent_job(tmp_path / "job", max_steps=1)
    channels = job.base / "input" / "data"
    shutil.copytree(tmp_path / "out/shards", channels / "train")
    (channels / "index").mkdir()
    shutil.copy(tmp_path / "out/index.parquet", channels / "index")
    code, events, text = job.run()
    assert code == 0, text
    assert "latents-model-mismatch" in {event.get("code") for event in events}
    start = next(event for event in events if event["kind"] == "start")
    assert start["input_kind"] == "images"


def make_nan(channel: Path, index: Path, keys: set[str] | None = None) -> None:
    """Overwrite the moments of the samples ``keys``, or of all, with NaN in the shards."""
    shard_index = ShardIndex(index)
    for number, name in enumerate(shard_index.names):
        content = bytearray((channel / name).read_bytes())
        offsets = shard_index.offsets(number).tolist()
        for key, start, stop in zip(shard_index.keys(number), offsets, offsets[1:], strict=False):
            if keys is None or key in keys:
                _, members = sample_members(memoryview(content)[start:stop])
                np.frombuffer(members["moments.npy"], np.float16, offset=128)[:] = np.nan
        (channel / name).write_bytes(content)


@pytest.mark.slow
def test_nonfinite_loss_skips_its_step_and_names_its_samples(
    cli: Cli, tmp_path: Path, components: Path
) -> None:
    assert pack(cli, tmp_path, components).returncode == 0
    job = latent_job(tmp_path / "job", max_steps=6, per_device_batch_size=2, checkpoint_every=6)
    channel = latent_channels(job, tmp_path / "out", components)
    make_nan(channel, tmp_path / "out/index.parquet", {"000000007"})
    code, events, text = job.run(processes=2)
    assert code == 0, text
    # Twelve samples are three steps of two processes: six steps are two epochs.
    skipped = [event for event in events if event.get("code") == "step-skipped"]
    assert len(skipped) == 2
    reported = [event for event in events if event.get("code") == "loss-non-finite"]
    assert [event["step"] for event in reported] == [event["steps"][0] for event in skipped]
    assert all("shard-000000.tar 000000007" in event["samples"] for event in reported)
    # One of two processes had the sample; both skip the step.
    assert all(len(event["samples"]) == 2 for event in reported)
    nonfinite = {event["step"] for event in reported}
    steps = {event["step"]: event["loss"] for event in events if event["kind"] == "step"}
    assert {step for step, loss in steps.items() if loss is None} == nonfinite
    assert len(steps) == 6


@pytest.mark.slow
def test_repeated_nonfinite_gradients_roll_back_and_then_fail(
    cli: Cli, tmp_path: Path, components: Path
) -> None:
    assert pack(cli, tmp_path, components).returncode == 0
    job = latent_job(
        tmp_path / "job",
        max_steps=100_000,
        checkpoint_every=5,
        max_nonfinite_steps=3,
        max_rollbacks=1,
    )
    channel = latent_channels(job, tmp_path / "out", components)
    with job.start() as running:
        running.wait_for("checkpoint")
        make_nan(channel, tmp_path / "out/index.parquet")
        rollback = running.wait_for("warning", code="rolled-back")
        error = running.wait_for("error")
        assert running.process.wait(DEADLINE) == 1
    assert rollback["step"] % 5 == 0
    assert "steps in a row had no finite gradient" in error["message"]
    assert "shard-000000.tar 0000000" in error["message"]
    [newest, *_] = sorted(job.checkpoints.glob("step-*"), reverse=True)
    assert (newest / "complete.json").exists()
    assert newest.name == f"step-{rollback['step']:08d}"


def test_unusable_latent_options_are_one_line_errors(
    cli: Cli, tmp_path: Path, components: Path
) -> None:
    (tmp_path / "empty").mkdir()
    empty = cli("pack", "in", "out", "--latents", "empty", "--resolution", "8")
    assert (empty.returncode, empty.stderr) == (
        2,
        "sm-train: --latents: empty: not a components folder: no readable vae/config.json\n",
    )
    odd = cli("pack", "in", "out", "--latents", components, "--resolution", "9")
    assert "resolution: 9 must be a multiple of 2" in odd.stderr
    alone = cli("pack", "in", "out", "--latents", components)
    assert "--latents: requires --resolution" in alone.stderr

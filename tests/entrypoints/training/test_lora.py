"""A killed run of a LoRA adapter resumes bit for bit; its checkpoints hold only the adapter."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from sm_train.entrypoints.job_interface.checkpoint_layout import FINAL_MODEL, step_folder_name

from tests.support.capabilities import link_optional_package
from tests.support.cluster.training_jobs import Job, shard_digests, tiny_run, write_shards
from tests.support.models import build, save

pytestmark = pytest.mark.integration


def job(folder: Path, base: Path, lora: dict[str, Any], **settings: Any) -> Job:
    """Return a job that trains an adapter of the model in ``base``."""
    config = tiny_run(
        **({"preset": "tiny-mmdit", "model": {"lora": lora}} | settings),
        max_steps=12,
        checkpoint_every=4,
        caption_dropout=0.3,
    )
    created = Job(folder, config)
    link_optional_package("peft", created.bundle)
    write_shards(created.train_channel, shards=2, each=12)
    shutil.copytree(base, folder / "input" / "data" / "model")
    return created


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "processes", "lora", "settings"),
    [
        ("tiny-mmdit", 2, {"rank": 4, "alpha": 6, "dropout": 0.2}, {}),
        ("tiny-dit", 2, {"rank": 4}, {"sharding": "full_shard"}),
        ("tiny-sdxl", 2, {"rank": 4}, {"sharding": "full_shard"}),
        ("tiny-sd2", 3, {"rank": 3}, {}),
        (
            "tiny-dit",
            2,
            {"rank": 4, "targets": ["ff.net.2", "proj_out"]},
            {"sharding": "shard_grad_op", "activation_checkpointing": True},
        ),
        (
            "tiny-sd2",
            2,
            {"rank": 4, "targets": ["to_k", "conv1"], "dropout": 0.1},
            {
                "sharding": "hybrid_shard",
                "gradient_accumulation_steps": 2,
                "activation_checkpointing": True,
            },
        ),
        ("tiny-mmdit", 2, {"rank": 4}, {"optimizer": "adamw8bit"}),
        ("tiny-mmdit", 2, {"rank": 4}, {"optimizer": "adafactor"}),
    ],
)
def test_killed_adapter_resumes_bit_for_bit(
    tmp_path: Path, preset: str, processes: int, lora: dict[str, Any], settings: dict[str, Any]
) -> None:
    base = save(build(preset), tmp_path / "base")

    def created(name: str) -> Job:
        result = job(tmp_path / name, base, lora, preset=preset, **settings)
        if settings.get("optimizer") == "adamw8bit":
            link_optional_package("bitsandbytes", result.bundle)
        return result

    uninterrupted = created("uninterrupted")
    with uninterrupted.start(processes) as running:
        running.wait_for("end", reason="done")
        assert running.process.wait() == 0
    killed = created("killed")
    with killed.start(processes) as running:
        running.wait_for("checkpoint", step=4)
        os.kill(running.workers()[1], signal.SIGKILL)
    with killed.start(processes) as running:
        assert running.wait_for("start")["resumed_from_step"] >= 4
        running.wait_for("end", reason="done")
        assert running.process.wait() == 0
    assert shard_digests(killed, 12) == shard_digests(uninterrupted, 12)
    folder = killed.checkpoints / step_folder_name(12)
    names = {name for path in folder.glob("tensors-*") for name in load_file(path)}
    assert names
    weights = [key for key in names if key.startswith(("model.", "ema."))]
    assert all(".lora_A." in weight or ".lora_B." in weight for weight in weights)
    final = killed.checkpoints / FINAL_MODEL
    assert sum(path.stat().st_size for path in final.iterdir()) < 500_000


@pytest.mark.slow
def test_another_base_is_refused(tmp_path: Path) -> None:
    base = save(build("tiny-dit"), tmp_path / "base")
    first = job(tmp_path / "job", base, {"rank": 2}, preset="tiny-dit")
    code, _, text = first.run()
    assert code == 0, text
    weights = base / "transformer" / "diffusion_pytorch_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    channel = tmp_path / "job" / "input" / "data" / "model" / weights.relative_to(base)
    channel.write_bytes(content)
    code, _, text = first.run()
    assert code != 0
    assert "is of another model" in first.failure

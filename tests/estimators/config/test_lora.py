"""What the run file accepts as a LoRA adapter, and what it counts in memory, network and cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from sm_train.cost.network import GpuNetwork, step_collectives
from sm_train.entrypoints.job_interface.job_config import LoraConfig
from sm_train.entrypoints.planning.memory import plan_preset
from sm_train.estimators.bundle.bundle import job_requirements
from sm_train.estimators.config.load import RunFileError, load_run
from sm_train.toolkit.checks.components import base_findings, components_findings

from tests.support.models.components import published
from tests.support.run_documents import config, run

LORA = LoraConfig(rank=16, alpha=16.0, targets=None, dropout=0.0)


@pytest.mark.parametrize(
    ("model", "training", "message"),
    [
        ({"lora": {"targets": ["to_x"]}}, {}, "model.lora: targets: 'to_x' is no layer of UNet"),
        ({"lora": {"targets": []}}, {}, "model.lora.targets: "),
        ({"lora": {"targets": ["to_.*"]}}, {}, "model.lora.targets[0]: 'to_.*': "),
        ({"license": "My License"}, {}, "model.license: 'My License': must be an identifier"),
        ({"lora": {"rank": 0}}, {}, "model.lora.rank: 0: "),
        ({"lora": {"dropout": 1}}, {}, "model.lora.dropout: 1: "),
        ({"lora": {"r": 4}}, {}, "model.lora.r: unknown key"),
        ({"preset": "digits", "lora": {}}, {}, "model.lora: the preset trains its text encoder"),
        ({"lora": {}}, {"optimizer": "muon"}, "'muon': orthogonalizes each factor"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path, model: dict[str, Any], training: dict[str, Any], message: str
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(run(model={"preset": "sd2"} | model, training=training)))
    with pytest.raises(RunFileError) as error:
        load_run(path)
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_defaults_and_requirements() -> None:
    adapter = config(model={"preset": "mmdit-2b", "lora": {}})
    assert adapter.model.job_config().lora == LORA
    assert "peft==" in job_requirements(adapter, None)
    assert "peft" not in job_requirements(config(), None)


def test_a_random_base_is_reported() -> None:
    model = {"preset": "sd2", "lora": {}}
    [found] = base_findings(config(model=model), None)
    assert (found.code, found.level, found.where) == ("lora-random-base", "warning", "model.lora")
    assert not [*base_findings(config(model=model), "org/model")]
    assert not [*base_findings(config(model={"preset": "sd2"}), None)]


class Folder:
    """A model folder in memory."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.location = "folder"
        self._contents = files
        self.files = {path: len(content) for path, content in files.items()}

    def read(self, path: str, start: int, length: int) -> bytes:
        return self._contents[path][start : start + length]


def test_components_without_a_network_are_reported() -> None:
    files = {
        name: content for name, content in published("sd2").items() if not name.startswith("unet/")
    }
    files.pop("model_index.json", None)
    model = {"preset": "sd2", "lora": {}}
    found = components_findings(config(model=model), "model.components", Folder(files))
    assert [finding.code for finding in found] == ["lora-random-base"]


@pytest.mark.parametrize("strategy", ["none", "full_shard"])
@pytest.mark.parametrize("preset", ["sd2", "sdxl", "dit-xl", "mmdit-8b"])
def test_plans_count_gradients_optimizer_and_checkpoints_of_the_adapter(
    preset: str, strategy: str
) -> None:
    whole = plan_preset(preset, 512, precision="bf16")
    adapter = plan_preset(preset, 512, precision="bf16", lora=LORA)
    assert 0 < adapter.trained_parameters < 0.02 * whole.parameters
    assert adapter.parameters == whole.parameters + adapter.trained_parameters
    options: dict[str, Any] = {"strategy": strategy, "world_size": 8, "per_node": 8}
    states = adapter.state_bytes(ema=True, **options)
    full = whole.state_bytes(ema=True, **options)
    for part in ("gradients", "optimizer", "ema"):
        assert getattr(states, part) < 0.02 * getattr(full, part)
    assert states.total < 0.6 * full.total
    size = adapter.checkpoint_bytes(ema=True, optimizer="adamw")
    assert size == 16 * adapter.trained_parameters
    assert adapter.training_flops_per_image < whole.training_flops_per_image
    assert adapter.ddp_buckets < whole.ddp_buckets


def test_only_the_adapters_gradients_are_reduced() -> None:
    network = GpuNetwork(2, 8, 1e9, 1e9)
    [reduced] = step_collectives("none", 10**9, network, trained=10**6, units=1)
    assert reduced.bytes == 4 * 10**6
    calls = step_collectives("full_shard", 10**9, network, trained=10**6, units=10)
    sizes = {call.collective: call.bytes * call.count for call in calls}
    assert sizes == {"all_gather": 2 * 10**9, "reduce_scatter": 4 * 10**6}

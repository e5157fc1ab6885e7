"""``training.precision: fp8``: which layers compute in it, how near they stay, and the price."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from sm_train.cost.accelerators import accelerator
from sm_train.cost.instances import instance_types
from sm_train.entrypoints.models.fp8_layers import fp8_layers, use_fp8
from sm_train.entrypoints.planning.memory import plan_preset
from sm_train.entrypoints.training.compilation import compile_repeated
from sm_train.estimators.bundle.bundle import job_requirements
from sm_train.estimators.cost_stages import cost_stages
from sm_train.toolkit.planning.run_price import with_model_figures
from torch import nn
from torch.nn import functional as F  # noqa: N812  the usual name

from tests.entrypoints.training.compiled_layers_support import FAMILIES, output_and_gradients
from tests.support.capabilities import link_optional_package
from tests.support.models import build
from tests.support.run_documents import config, stage

pytestmark = pytest.mark.integration

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def torchao(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link_optional_package("torchao", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("preset", FAMILIES)
def test_layers_of_tokens_compute_in_fp8(preset: str) -> None:
    network = build(preset).network.train()
    layers = fp8_layers(network)
    counted = sum(weight.numel() for layer in layers.values() for weight in layer.parameters())
    assert counted == plan_preset(preset, 64, precision="bf16").fp8.parameters
    assert not [name for name in layers if "norm1.linear" in name or "time_emb" in name]
    for layer in layers.values():
        # Each image has a row for each of its tokens, not one.
        layer.register_forward_pre_hook(lambda _, inputs: rows.append(inputs[0].shape[1]))
    rows: list[int] = []
    output_and_gradients(network, preset)
    assert len(rows) >= len(layers)
    assert min(rows, default=2) > 1


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["tiny-mmdit", "tiny-dit", "tiny-sdxl"])
def test_fp8_is_near_bf16_and_keeps_names(preset: str) -> None:
    network = build(preset).network.train()
    converted = copy.deepcopy(network)
    use_fp8(converted, CPU)
    assert list(converted.state_dict()) == list(network.state_dict())
    assert sum("Float8" in type(layer).__name__ for layer in converted.modules()) == len(
        fp8_layers(network)
    )
    with torch.autocast("cpu", torch.bfloat16):
        (expected, gradients), (actual, others) = (
            output_and_gradients(each, preset) for each in (network, converted)
        )
    # e4m3 has 3 bits of mantissa: a relative error of up to 1/16 for each factor.
    error = (actual - expected).norm() / expected.norm()
    assert 1e-4 < error < 0.1
    cosines = [
        F.cosine_similarity(*(gradient.flatten().double() for gradient in pair), dim=0)
        for pair in zip(gradients, others, strict=True)
        if pair[0].norm() > 1e-6
    ]
    assert torch.stack(cosines).median() > 0.99


@pytest.mark.slow
def test_compiled_layers_in_fp8_are_one_graph() -> None:
    network = build("tiny-mmdit").network.train()
    use_fp8(network, CPU)
    expected, _ = output_and_gradients(copy.deepcopy(network), "tiny-mmdit")
    torch._dynamo.reset()
    compile_repeated(network, one_shape=True, fullgraph=True, backend="aot_eager")
    output, _ = output_and_gradients(network, "tiny-mmdit")
    torch.testing.assert_close(output, expected)


def test_network_without_such_layers_is_refused() -> None:
    from sm_train.entrypoints.job_interface.job_config import JobConfigError

    with pytest.raises(JobConfigError, match="no layer of the network can use it; write bf16"):
        use_fp8(nn.Sequential(nn.Linear(64, 64)), CPU)


@pytest.mark.parametrize(
    "kind", [kind.name for kind in instance_types() if accelerator(kind.accelerator).has_fp8]
)
def test_predictions_in_fp8_are_faster(kind: str) -> None:
    run = config(
        model={"preset": "mmdit-8b"},
        cluster={"instance_type": kind},
        stages=[stage(resolution=1024, steps_per_second=None, sharding="full_shard")],
    )
    [bf16] = [with_model_figures(priced, run) for priced in cost_stages(run)]
    in_fp8 = config(**run.model_dump(mode="json") | {"training": {"precision": "fp8"}})
    [fp8] = [with_model_figures(priced, in_fp8) for priced in cost_stages(in_fp8)]
    gpu = accelerator(bf16.instance.accelerator)
    if gpu.fp8_tflops is None:
        assert fp8.predicted_images_per_second is None
        return
    assert bf16.predicted_images_per_second is not None
    assert fp8.predicted_images_per_second is not None
    assert 1 <= fp8.predicted_images_per_second / bf16.predicted_images_per_second < 2


def test_jobs_in_fp8_install_torchao() -> None:
    cluster = {"instance_type": "ml.p5.48xlarge"}
    run = config(training={"precision": "fp8"}, cluster=cluster)
    assert "\ntorchao==" in job_requirements(run, "2.13.0")
    assert "torchao" not in job_requirements(config(cluster=cluster), "2.13.0")

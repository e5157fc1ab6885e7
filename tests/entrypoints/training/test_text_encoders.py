"""Where frozen text encoders are: the choice, its memory and its price."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sm_train.cost.instances import USABLE_MEMORY
from sm_train.entrypoints.job_interface.job_config import read_job_config
from sm_train.entrypoints.planning.memory import (
    StageLayout,
    choose_text_encoders,
    plan_job,
    plan_preset,
)
from sm_train.entrypoints.training.frozen_encoders import WeightsOnHost
from sm_train.toolkit.memory.memory_fit import memory_fit
from sm_train.toolkit.planning.run_price import with_model_figures
from torch import nn

from tests.support.run_documents import config, stage, write_job_file

GIB = 2**30
LAYOUT = StageLayout(True, "adamw", "none", 32, 8, 8, checkpointing=False)


@given(
    preset=st.sampled_from(["sd2", "mmdit-2b", "mmdit-8b"]),
    gib=st.floats(1, 300),
    per_node=st.sampled_from([1, 8]),
    pytorch=st.sampled_from(["2.5.1", "2.13.0+cu130", None]),
)
def test_encoders_are_replicated_if_the_stage_then_fits(
    preset: str, gib: float, per_node: int, pytorch: str | None
) -> None:
    plan, layout = plan_preset(preset, 512, precision="bf16"), replace(LAYOUT, per_node=per_node)
    chosen = choose_text_encoders("auto", plan, layout, gpu_memory=gib * GIB, pytorch=pytorch)
    fits = plan.memory(layout, "replicated").bytes <= USABLE_MEMORY * gib * GIB
    can_shard = per_node > 1 and pytorch == "2.13.0+cu130"
    assert chosen.placement == ("replicated" if fits else "sharded" if can_shard else "cpu")


@pytest.mark.parametrize(("kind", "placement"), [("ml.p4de", "replicated"), ("ml.p4d", "sharded")])
def test_laptop_and_job_choose_alike(tmp_path: Path, kind: str, placement: str) -> None:
    run = config(
        model={"preset": "mmdit-2b"},
        cluster={"instance_type": f"{kind}.24xlarge"},
        stages=[stage(resolution=512, steps_per_second=None, sharding="hybrid_shard")],
    )
    need = memory_fit(run, run.stages[0])
    assert need is not None
    assert need.text_encoders == placement
    job = read_job_config(write_job_file(tmp_path, run), "256px")
    memory = (80 if kind == "ml.p4de" else 40) * GIB
    assert plan_job(job, 32, 8, memory, "2.13.0").text_encoders.placement == placement


def test_transfers_are_priced() -> None:
    def seconds(placement: str, **data: Any) -> float:
        run = config(
            model={"preset": "mmdit-2b"},
            data={"uri": "s3://ai-bucket/shards/"} | data,
            training={"text_encoders": placement},
            stages=[stage(resolution=512, steps_per_second=None)],
        )
        from sm_train.estimators.cost_stages import cost_stages

        [priced] = cost_stages(run)
        figures = with_model_figures(priced, run)
        assert figures.predicted_images_per_second is not None
        return (figures.effective_batch_size or 0) / figures.predicted_images_per_second

    passes, text_bytes = 2, plan_preset("mmdit-2b", 512, precision="bf16").text_bytes
    copied = passes * text_bytes / 20e9
    assert seconds("cpu") - seconds("replicated") == pytest.approx(copied)
    assert seconds("replicated") < seconds("sharded") < seconds("cpu")
    # Precomputed latents come with encoded captions.
    assert seconds("cpu", latents=512) == seconds("replicated", latents=512)


class Doubled(nn.Module):
    """A module with one weight, whose forward pass fails for the factor 0."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(4.0), requires_grad=False)

    def forward(self, factor: float) -> torch.Tensor:
        if not factor:
            raise ValueError("no factor")
        return self.weight * factor


def test_weights_on_the_host_take_no_memory_between_passes() -> None:
    module = Doubled()
    WeightsOnHost(module, torch.device("cpu"))
    for factor in (2.0, 0.0, 3.0):
        if factor:
            assert module(factor).tolist() == [0.0, factor, 2 * factor, 3 * factor]
        else:
            with pytest.raises(ValueError, match="no factor"):
                module(factor)
        assert module.weight.untyped_storage().nbytes() == 0
        assert module.weight.shape == (4,)

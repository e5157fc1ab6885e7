"""Checks whether a node's disk holds the checkpoints that it restores and writes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from sm_train.cost.instances import instance_type
from sm_train.cost.stage import CostStage
from sm_train.estimators.config.fields import quantity_bytes
from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.checks.finding import Check, Finding

DISK_SHORT = Check("disk-short", ("error",))

_GIB = 2**30


def disk_findings(config: RunConfig, stages: Iterable[CostStage]) -> Iterator[Finding]:
    """Compare the checkpoints on a node with its disk, on SageMaker and on Kubernetes.

    Only the newest checkpoint is restored on Kubernetes, and the whole prefix on SageMaker. Then
    each node writes its share of new ones: one more than is kept, while its upload takes time.
    """
    if not config.checkpoint.save:
        return
    kept = config.checkpoint.keep_last + 1
    for index, stage in enumerate(stages):
        if stage.checkpoint_bytes is None:
            continue
        share = stage.checkpoint_bytes / stage.instances
        on_sagemaker = kept * stage.checkpoint_bytes + share
        if not instance_type(stage.instance_type).is_own:
            yield from _sagemaker_findings(config, index, stage, on_sagemaker)
        yield from _pod_findings(config, index, stage, stage.checkpoint_bytes + kept * share)


def _sagemaker_findings(
    config: RunConfig, index: int, stage: CostStage, need: float
) -> Iterator[Finding]:
    nvme = instance_type(stage.instance_type).local_nvme_gb
    size = (nvme or config.cluster.volume_gb) * 1e9
    if need <= size:
        return
    yield DISK_SHORT.found(
        "error",
        f"stages[{index}]" if nvme else "cluster.volume_gb",
        f"{stage.name} needs about {need / 1e9:,.0f} GB for checkpoints on each instance, whose "
        f"{'drives have' if nvme else 'volume has'} {size / 1e9:,.0f}: a job that resumes gets all "
        f"{config.checkpoint.keep_last + 1} of {_size(stage)} GB",
        "lower checkpoint.keep_last, or use an instance type with larger drives"
        if nvme
        else f"set volume_gb: {math.ceil(1.2 * need / 1e9)}",
    )


def _pod_findings(
    config: RunConfig, index: int, stage: CostStage, need: float
) -> Iterator[Finding]:
    volume = config.kubernetes.work_volume
    if volume is None or volume.size is None or config.kubernetes.checkpoints != "sync":
        return
    if need <= quantity_bytes(volume.size):
        return
    yield DISK_SHORT.found(
        "error",
        "kubernetes.work_volume.size",
        f"{stage.name} needs about {need / _GIB:,.0f} GiB for checkpoints in each pod, whose "
        f"volume has {volume.size}: a pod that starts restores the newest one, of {_size(stage)} "
        "GB, and writes its share of others",
        f"set size: {math.ceil(1.2 * need / _GIB)}Gi",
    )


def _size(stage: CostStage) -> str:
    assert stage.checkpoint_bytes is not None
    return f"{stage.checkpoint_bytes / 1e9:,.3g}"

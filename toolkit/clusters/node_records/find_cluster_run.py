"""Finds runs on Kubernetes or Slurm by what their nodes stored next to their checkpoints.

The place is a folder that the nodes share, or a prefix in S3, with a folder for each stage:
``…/RUN/checkpoints/STAGE/job-records``. SageMaker is not asked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from sm_train.entrypoints.clusters.node_record import FOLDER, RUN_FILE
from sm_train.entrypoints.storage.storage import open_storage, read_document
from sm_train.entrypoints.storage.store import S3Access, open_store
from sm_train.estimators.config.naming import ROLE_NOT_SET, checkpoint_uri, staging_bucket
from sm_train.estimators.config.platforms import KubernetesSection, SlurmSection
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.regions import DEFAULT_REGION
from sm_train.toolkit.aws.session import account_of, open_session, resolve_region
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.clusters.node_records.cluster_run import ClusterRun, readable
from sm_train.toolkit.memory.sharding_choice import with_sharding
from sm_train.toolkit.platforms.adapters import Adapter
from sm_train.toolkit.platforms.placed_run import PlacedRun
from sm_train.toolkit.platforms.target import Kind, RunPlace, Target
from sm_train.toolkit.run_file.run_file import load

_STAGE = re.compile(r"[A-Za-z0-9-]+")
_REQUESTS = 16


def may_be_on_cluster(config: RunConfig) -> bool:
    """Return whether the run file describes another platform than SageMaker."""
    sections = (config.kubernetes, config.slurm)
    return sections != (KubernetesSection(), SlurmSection()) or config.cluster.is_own_machine


class _NodeRecords(Adapter):
    """Finds runs on clusters."""

    def claim(self, path: Path) -> RunPlace | None:
        """It may be a stage's checkpoint folder, the folder above it, or that of the run."""
        if (path / FOLDER).is_dir():
            return RunPlace(str(path.parent), path.name)
        roots = (path, path / "checkpoints")
        found = (root for root in roots if any(root.glob(f"*/{FOLDER}")))
        return next((RunPlace(str(root)) for root in found), None)

    def find(self, target: Target, options: dict[str, Any]) -> PlacedRun | None:
        place = target.place
        if place is not None and not place.holds_logs:
            found = cluster_run_at(target.text, place.root, options, place.stage)
            return None if found is None else replace(found, named_by_place=True)
        if target.kind is Kind.RUN_FILE:
            return cluster_run_of(target.text, with_sharding(load(target.path)), options)
        return None

    def find_related(
        self, target: Target, options: dict[str, Any], found: PlacedRun | None
    ) -> PlacedRun | None:
        """Look where another platform's run, or one of its name, stores checkpoints."""
        if target.kind is not Kind.NAME or target.place is not None:
            return None
        if found is not None:
            return cluster_run_of(target.text, found.config, options, found.bucket)
        run, _, stage = target.text.partition("--")
        try:
            region = resolve_region(options["region"], None, options["profile"])
            account = account_of(open_session(options["profile"], region))
            root = f"s3://sagemaker-{region}-{account}/{run}/checkpoints"
            return cluster_run_at(target.text, root, options, stage or None)
        except UserError:
            return None  # the error of the request to SageMaker says why

    def runs_in(self, place: str, options: dict[str, Any]) -> list[PlacedRun]:
        if _in_s3(place):
            with readable(place):
                roots = _roots_in_s3(place, _access(place, options))
        else:
            roots = sorted({str(path.parents[1]) for path in Path(place).glob(f"*/*/*/{FOLDER}")})
        runs = (cluster_run_at(root, root, options) for root in roots)
        return [run for run in runs if run is not None]


ADAPTER = _NodeRecords()


def cluster_run_at(
    target: str, root: str, options: dict[str, Any], stage: str | None = None
) -> ClusterRun | None:
    """Return the run whose nodes stored records below ``root``, a folder or an S3 prefix.

    ``options`` are the global ones. None if there are no records.

    Raises:
        UserError: the place cannot be read, or the stored run file is damaged.
    """
    access = _access(root, options)
    with readable(root):
        found = _stages_with_records(root, access)
        if not found or (stage is not None and stage not in found):
            return None
        documents = {
            name: document
            for name in found
            if (document := read_document(open_storage(f"{root}/{name}", access), RUN_FILE))
        }
    if not documents:
        raise UserError(f"{root}: {found[0]}/{RUN_FILE} is missing or damaged; name the run file")
    config = _parse(documents.get(stage or "") or next(iter(documents.values())), root)
    stages = tuple(planned.name for planned in config.stages if planned.name in found)
    if stage is None and stages and stages[-1] in documents:
        config = _parse(documents[stages[-1]], root)  # what the newest stage trains with
    return ClusterRun(
        target=target,
        root=root,
        config=config,
        region=_region_of(config, options),
        stages=stages,
        access=access,
        stage=stage,
    )


def cluster_run_of(
    target: str, config: RunConfig, options: dict[str, Any], bucket: str | None = None
) -> ClusterRun | None:
    """Return the run of a run file, if nodes of a cluster stored records of it.

    A folder that the nodes of Slurm share counts if it is on this machine, too. ``bucket`` is known
    for a run that also has jobs on SageMaker.

    Raises:
        UserError: the place cannot be read.
    """
    if not may_be_on_cluster(config):
        return None
    region = _region_of(config, options)
    for root in _roots(config, region, bucket):
        access = S3Access(options["profile"], region if _in_s3(root) else None)
        with readable(root):
            stages = tuple(
                stage.name
                for stage in config.stages
                if open_storage(f"{root}/{stage.name}", access).has_files(FOLDER)
            )
        if stages:
            return ClusterRun(
                target=target,
                root=root,
                config=config,
                region=region,
                stages=stages,
                access=access,
            )
    return None


def _roots_in_s3(place: str, access: S3Access) -> list[str]:
    """Return the prefixes of the checkpoints of runs with records below a bucket or a prefix."""
    bucket, _, prefix = place.removeprefix("s3://").partition("/")
    prefix = f"{prefix.rstrip('/')}/" if prefix.rstrip("/") else ""
    store = open_store(access)
    folders = [f"{folder}checkpoints" for folder in store.folders(bucket, prefix)]
    roots = [f"s3://{bucket}/{folder}" for folder in folders]
    with ThreadPoolExecutor(_REQUESTS) as pool:
        found = pool.map(lambda root: _stages_with_records(root, access), roots)
        return [root for root, stages in zip(roots, found, strict=True) if stages]


def _roots(config: RunConfig, region: str, bucket: str | None) -> Iterator[str]:
    folder = config.slurm.shared_folder
    if folder is not None:
        shared = Path(folder) / config.name / "checkpoints"
        if shared.is_dir():
            yield str(shared)
    if bucket is None and (config.bucket or (config.role or ROLE_NOT_SET) != ROLE_NOT_SET):
        bucket = staging_bucket(config, region)
    if bucket is not None:
        yield checkpoint_uri(config, config.stages[0], bucket).rpartition("/")[0]


def _stages_with_records(root: str, access: S3Access) -> list[str]:
    """Return the names of the stages with records."""
    if _in_s3(root):
        bucket, _, key = root.removeprefix("s3://").partition("/")
        folders = open_store(access).folders(bucket, f"{key}/")
        names = [folder.rstrip("/").rpartition("/")[2] for folder in folders]
    else:
        names = [path.parent.name for path in Path(root).glob(f"*/{FOLDER}")]
    return [
        name
        for name in names
        if _STAGE.fullmatch(name) and open_storage(f"{root}/{name}", access).has_files(FOLDER)
    ]


def _in_s3(root: str) -> bool:
    return root.startswith("s3://")


def _region_of(config: RunConfig, options: dict[str, Any]) -> str:
    """Return the region whose prices apply; the user's own machines have the same in each."""
    try:
        return resolve_region(options["region"], config.region, options["profile"])
    except UserError:
        if config.cluster.is_own_machine:
            return DEFAULT_REGION
        raise


def _access(root: str, options: dict[str, Any]) -> S3Access:
    """Return how S3 is reached; an S3-compatible store may ignore the region, which S3 needs."""
    if not _in_s3(root):
        return S3Access()
    try:
        region = resolve_region(options["region"], None, options["profile"])
    except UserError:
        region = DEFAULT_REGION
    return S3Access(options["profile"], region)


def _parse(document: dict[str, Any], root: str) -> RunConfig:
    try:
        return RunConfig.model_validate(document)
    except ValueError:
        raise UserError(
            f"{root}: the run file that the nodes stored is not one of this version; name the run "
            "file"
        ) from None

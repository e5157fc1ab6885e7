"""Builds a manifest for another cluster, and stages the code that it names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sm_train.entrypoints.storage.store import store_of
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.manifests.manifest import Manifest, build_manifest
from sm_train.estimators.manifests.problem import ManifestError
from sm_train.estimators.manifests.stage_job import Target, off_sagemaker
from sm_train.toolkit.aws.aws_errors import translate_aws_errors
from sm_train.toolkit.aws.s3 import split_uri
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.planning.history import History
from sm_train.toolkit.planning.run_price import estimate_run
from sm_train.toolkit.submit.plan_view import run_warnings
from sm_train.toolkit.submit.run_bundle import bundle_of, commit_of
from sm_train.toolkit.submit.submission import choose_stages
from sm_train.toolkit.submit.submit import check_budget, require_own_values

if TYPE_CHECKING:
    import boto3
    from sm_train.estimators.bundle.bundle import Bundle


@dataclass(frozen=True)
class CheckedManifest:
    """A manifest of ``config`` with its bundle, and what is unusual about the run."""

    config: RunConfig
    region: str
    manifest: Manifest
    bundle: Bundle
    warnings: tuple[str, ...]


def checked_manifest(
    config: RunConfig,
    base: Path,
    stage: str | None,
    target: Target,
    region: str,
    file: str | None,
    history: History | None,
    *,
    take_over: bool = False,
) -> CheckedManifest:
    """Return the manifest of a run that `submit` would accept; see :func:`manifest_of`.

    Raises:
        UserError: the run file holds values of documentation, the run costs more than its budget,
            or the run file does not fit the target.
    """
    require_own_values(config)
    warnings = check_budget(config, region, history)
    manifest, bundle = manifest_of(config, base, stage, target, region, file, take_over=take_over)
    warnings += run_warnings(config, estimate_run(config, region, history=history), bundle)
    if config.cluster.backend == "smddp":
        warnings.append("cluster.backend: smddp exists in training jobs only; these jobs use NCCL")
    return CheckedManifest(config, region, manifest, bundle, tuple(warnings))


def manifest_of(
    config: RunConfig,
    base: Path,
    stage: str | None,
    target: Target,
    region: str,
    file: str | None,
    *,
    take_over: bool = False,
) -> tuple[Manifest, Bundle]:
    """Return the manifest of ``stage`` (default: the first), and the bundle that it names.

    With ``take_over`` the job continues from checkpoints that another platform wrote.

    Raises:
        UserError: there is no such stage, or the run file does not fit the target.
    """
    chosen = choose_stages(config, stage)[0]
    # The price of a node, by which the run's watcher knows its cost, is that of the region.
    config = off_sagemaker(config).model_copy(update={"region": region})
    bundle = bundle_of(config, base)
    try:
        manifest = build_manifest(
            config,
            chosen,
            target,
            bundle,
            region=region,
            file=file,
            commit=commit_of(base),
            take_over=take_over,
        )
    except ManifestError as error:
        raise UserError(str(error)) from None
    return manifest, bundle


def stage_code(session: boto3.Session, manifest: Manifest, bundle: Bundle) -> None:
    """Upload the bundle to where ``manifest`` expects it.

    Raises:
        UserError: S3 refuses it.
    """
    bucket, key = split_uri(manifest.code_uri)
    with translate_aws_errors(f"--stage-code: {manifest.code_uri}"):
        store_of(session).put(bucket, key, bundle.archive)

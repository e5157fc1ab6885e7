"""Turn a stage of a run file into a manifest for another cluster: a pure function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import yaml
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection
from sm_train.estimators.manifests.kubernetes import hyperpod_job, pytorchjob, trainjob
from sm_train.estimators.manifests.slurm import batch_script
from sm_train.estimators.manifests.stage_job import StageJob, Target, check_job
from sm_train.estimators.manifests.watch_cron_job import watcher_name
from sm_train.estimators.request.training_request import SourceBundle

_KUBERNETES: dict[Target, Callable[[StageJob], list[dict[str, Any]]]] = {
    "trainjob": trainjob,
    "pytorchjob": pytorchjob,
    "hyperpod-eks": hyperpod_job,
}

_RESOURCES: dict[Target, str] = {
    "trainjob": "trainjob",
    "pytorchjob": "pytorchjob",
    "hyperpod-eks": "hyperpodpytorchjob",
}
"""Target → the kind of its job, as kubectl takes it."""


@dataclass(frozen=True)
class Manifest:
    """A manifest: its ``text``, and its ``objects``, of which a Slurm script has none.

    ``code_uri`` is where the cluster expects the bundle. ``commands`` are those that take the place
    of `submit` and `resume`, and others of the platform: purpose → command line.
    """

    target: Target
    name: str
    text: str
    objects: tuple[dict[str, Any], ...]
    code_uri: str
    commands: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        """Return the document of ``manifest --json``."""
        return {
            "target": self.target,
            "name": self.name,
            "objects": list(self.objects),
            "script": self.text if self.target == "slurm" else None,
            "code_uri": self.code_uri,
            "commands": self.commands,
        }


def build_manifest(
    config: RunConfig,
    stage: StageSection,
    target: Target,
    bundle: SourceBundle,
    *,
    region: str,
    file: str | None,
    commit: str | None = None,
    take_over: bool = False,
) -> Manifest:
    """Return the manifest of ``stage`` for ``target``; ``file`` is its name in the commands.

    With ``take_over`` the job continues from checkpoints that another platform wrote.

    Raises:
        ManifestError: the run file does not fit the target; one line.
    """
    job = StageJob(config, stage, bundle, region, commit, take_over=take_over)
    check_job(job)
    if target == "slurm":
        commands = _slurm_commands(job, file)
        text = batch_script(replace(job, platform="slurm", commands=commands))
        return Manifest(target, job.name, text, (), job.code_uri, commands)
    commands = _kubectl_commands(job, _RESOURCES[target], file)
    objects = tuple(_KUBERNETES[target](replace(job, commands=commands)))
    text = "---\n".join(_yaml(kubernetes_object) for kubernetes_object in objects)
    return Manifest(target, job.name, text, objects, job.code_uri, commands)


class _Dumper(yaml.SafeDumper):
    """Writes equal values in full: anchors are hard to read."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _yaml(document: dict[str, Any]) -> str:
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=10_000, allow_unicode=True)


def _kubectl_commands(job: StageJob, resource: str, file: str | None) -> dict[str, str]:
    source = file or f"{job.name}.yaml"
    namespaced = f"-n {job.config.kubernetes.namespace}"
    pods = f"-l app.kubernetes.io/instance={job.name}"
    watcher = watcher_name(job)
    objects = [f"{resource}/{job.name}", *([f"cronjob/{watcher}"] if watcher else [])]
    delete = f"kubectl delete {namespaced} {' '.join(objects)}"
    logs = f"kubectl logs {namespaced} {pods} --prefix --tail=-1 --max-log-requests={job.nodes + 1}"
    return {
        "start": f"kubectl apply -f {source}",
        "status": f"kubectl get {namespaced} {resource},pods {pods}",
        "logs": f"{logs} -f",
        "stop": delete,
        # A job that has ended is not started again by `apply`.
        "resume": f"{delete} --ignore-not-found && kubectl apply -f {source}",
        "diagnose": f"{logs} > {job.name}.log; sm-train diagnose {job.name}.log",
        # Of a volume, only the user knows where it is mounted outside of the pods.
        **({"watch": f"sm-train watch {_run_place(job)}"} if _copies_checkpoints(job) else {}),
    }


def _copies_checkpoints(job: StageJob) -> bool:
    return job.config.kubernetes.checkpoints == "sync"


def _run_place(job: StageJob) -> str:
    """Return the prefix of the checkpoints of all stages."""
    return job.checkpoint_uri.rpartition("/")[0]


def _slurm_commands(job: StageJob, file: str | None) -> dict[str, str]:
    source = file or f"{job.name}.sbatch"
    place = f"{(job.config.slurm.shared_folder or '').rstrip('/')}/{job.config.name}"
    folder = f"{place}/logs"
    log = f"{folder}/{job.name}-JOB.log"
    return {
        "start": f"mkdir -p {folder} && sbatch {source}",
        "status": f"squeue --name={job.name}",
        "logs": f"tail -f {log}",
        # Without --signal, Slurm kills the ranks 30 s after SIGTERM (KillWait of slurm.conf).
        "stop": f"scancel --name={job.name} --signal=TERM",
        # The signal does not end a job that waits.
        "cancel": f"scancel --name={job.name} --state=PENDING",
        "resume": f"sbatch {source}",
        "diagnose": f"sm-train diagnose {log}",
        "watch": f"sm-train watch {place}",
    }

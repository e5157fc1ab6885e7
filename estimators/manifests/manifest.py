"""Turn a stage of a run file into a manifest for another cluster: a pure function."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import yaml
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection
from sm_train.estimators.manifests.kubernetes import hyperpod_job, pytorchjob, trainjob
from sm_train.estimators.manifests.slurm import batch_script, run_folder, watch_entry
from sm_train.estimators.manifests.stage_job import StageJob, Target, check_job, is_watched
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
    of `submit` and `resume`, and others of the platform: purpose → command line. ``queue_query`` is
    one whose output is empty if no such job waits or runs. ``watch_schedule`` is that of its
    watcher outside of the nodes, None if it has none. ``checkpoints`` is the address of the stage's
    checkpoints outside of the nodes, None if only the user knows it.
    """

    target: Target
    name: str
    text: str
    objects: tuple[dict[str, Any], ...]
    code_uri: str
    commands: dict[str, str]
    queue_query: str
    watch_schedule: str | None
    checkpoints: str | None

    @property
    def has_partitions(self) -> bool:
        """Whether its job goes to a partition of nodes, and its nodes share a folder."""
        return self.target == "slurm"

    @property
    def section(self) -> str:
        """The section of the run file that describes the platform."""
        return "slurm" if self.has_partitions else "kubernetes"

    @property
    def program(self) -> str:
        """The program that starts the job."""
        return "sbatch" if self.has_partitions else "kubectl"

    @property
    def title(self) -> str:
        """The platform, in messages."""
        return "Slurm" if self.has_partitions else "Kubernetes"

    def dry_run(self, file: str) -> str:
        """Return the command with which the scheduler checks it, and starts nothing."""
        quoted = shlex.quote(file)
        if self.has_partitions:
            return f"sbatch --test-only {quoted}"
        return f"kubectl apply --dry-run=server -f {quoted}"

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
    file = file or file_name(config, stage, target)
    if target == "slurm":
        commands = _slurm_commands(job, file)
        text = batch_script(replace(job, platform="slurm", commands=commands))
        query = f"squeue --noheader --me --name={job.name} --format='%i %T'"
        schedule = config.slurm.watch_schedule if _has_watcher(job) else None
        place = f"{run_folder(job.config)}/checkpoints/{stage.name}"
        return Manifest(target, job.name, text, (), job.code_uri, commands, query, schedule, place)
    commands = _kubectl_commands(job, _RESOURCES[target], file)
    objects = tuple(_KUBERNETES[target](replace(job, commands=commands)))
    text = "---\n".join(_yaml(kubernetes_object) for kubernetes_object in objects)
    query = f"kubectl get -n {config.kubernetes.namespace} {_RESOURCES[target]}/{job.name}"
    query += " --ignore-not-found -o name"
    schedule = config.kubernetes.watch_schedule if watcher_name(job) else None
    return Manifest(
        target,
        job.name,
        text,
        objects,
        job.code_uri,
        commands,
        query,
        schedule,
        job.checkpoint_uri if _copies_checkpoints(job) else None,
    )


def queue_commands(run: str, stage: str, namespace: str, stop: str) -> str | None:
    """Return the command that takes a job out of its platform's queue; None if it is unknown.

    ``stop`` is the one that its nodes stored: anybody who can write there could have, so it only
    selects among those that are made here.
    """
    name = f"{run}-{stage}".lower()
    if stop == _scancel(name)["stop"]:
        return _scancel(name)["cancel"]
    deletions = (
        _delete(namespace, resource, name, watcher)
        for resource in _RESOURCES.values()
        for watcher in (None, f"{name}-watch")
    )
    return stop if stop in deletions else None


def _delete(namespace: str, resource: str, name: str, watcher: str | None) -> str:
    objects = [f"{resource}/{name}", *([f"cronjob/{watcher}"] if watcher else [])]
    return f"kubectl delete -n {namespace} {' '.join(objects)}"


def _scancel(name: str) -> dict[str, str]:
    return {
        # Without --signal, Slurm kills the ranks 30 s after SIGTERM (KillWait of slurm.conf).
        "stop": f"scancel --name={name} --signal=TERM",
        # The signal does not end a job that waits.
        "cancel": f"scancel --name={name} --state=PENDING",
    }


def file_name(config: RunConfig, stage: StageSection, target: Target) -> str:
    """Return the name of a manifest's file, unless the user chooses one."""
    ending = "sbatch" if target == "slurm" else "yaml"
    return f"{config.name}-{stage.name}.{ending}".lower()


class _Dumper(yaml.SafeDumper):
    """Writes equal values in full: anchors are hard to read."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _yaml(document: dict[str, Any]) -> str:
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=10_000, allow_unicode=True)


def _kubectl_commands(job: StageJob, resource: str, file: str) -> dict[str, str]:
    source = shlex.quote(file)
    namespaced = f"-n {job.config.kubernetes.namespace}"
    pods = f"-l app.kubernetes.io/instance={job.name}"
    delete = _delete(job.config.kubernetes.namespace, resource, job.name, watcher_name(job))
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


def _slurm_commands(job: StageJob, file: str) -> dict[str, str]:
    source = shlex.quote(file)
    place = run_folder(job.config)
    folder = f"{place}/logs"
    kept = f"{place}/{job.name}.sbatch"
    log = f"{folder}/{job.name}-JOB.log"
    return {
        "start": f"mkdir -p {folder} && sbatch {source}",
        "status": f"squeue --name={job.name}",
        "logs": f"tail -f {log}",
        **_scancel(job.name),
        "resume": f"sbatch {source}",
        "diagnose": f"sm-train diagnose {log}",
        "watch": f"sm-train watch {place}",
        **(_crontab_commands(job, source, kept) if _has_watcher(job) else {}),
    }


def _has_watcher(job: StageJob) -> bool:
    return is_watched(job.config, job.config.slurm.watch_schedule)


def _crontab_commands(job: StageJob, source: str, kept: str) -> dict[str, str]:
    """Return the commands that add the watcher to Slurm's crontab, and that remove it."""
    entry = shlex.quote(watch_entry(job, kept))
    others = f"scrontab -l 2>/dev/null | grep -v -e '^#SCRON --job-name={job.name}-watch ' "
    others += f"-e ' {kept} watch$'"
    return {
        "watch-on": f"mkdir -p {kept.rpartition('/')[0]}/logs && cp {source} {kept} && "
        f"({others}; echo {entry}) | scrontab -",
        "watch-off": f"({others}; true) | scrontab -",
    }

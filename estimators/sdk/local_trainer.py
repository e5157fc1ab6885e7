"""Run a stage's request as containers on this machine, with the SDK's local container mode.

It runs in its own process (``python -m sm_train.estimators.sdk.local_trainer JOB.json``): the SDK
prints the containers' output on standard output, and Ctrl-C in the parent command must not
interrupt a checkpoint.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sm_train.estimators.bundle.user_code import REQUIREMENTS
from sm_train.estimators.request.training_request import TrainingRequest, stage_name
from sm_train.estimators.sdk.model_trainer import launch_command, pinned_trainer_class, quiet_sdk


@dataclass(frozen=True)
class LocalJob:
    """A request, and the local folders that replace its S3 locations.

    ``nodes`` containers run ``processes`` processes each. ``channels`` (name → folder) are mounted
    in every container, read-only except those in ``writable``. ``root`` is the SDK's working
    folder.
    """

    request: TrainingRequest
    nodes: int
    processes: int
    channels: dict[str, str]
    environment: dict[str, str]
    bundle: str
    entry: str
    root: str
    writable: tuple[str, ...] = ()

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2), encoding="utf-8")


def train(job: LocalJob) -> None:
    """Run the containers until they exit.

    Raises:
        RuntimeError: a container or docker compose failed.
    """
    from sagemaker.core.training.configs import Compute, InputData, SourceCode
    from sagemaker.train.model_trainer import Mode

    request = job.request
    _mount_read_only(sorted(job.channels.keys() - set(job.writable)))
    # The start script would start one process per GPU; there are none on this machine.
    command = f"SM_NUM_GPUS={job.processes} {launch_command(job.entry)}"
    has_requirements = (Path(job.bundle) / REQUIREMENTS).exists()
    pinned_trainer_class(request)(
        training_mode=Mode.LOCAL_CONTAINER,
        base_job_name=stage_name(request),
        training_image=request["AlgorithmSpecification"]["TrainingImage"],
        compute=Compute(instance_type="local_cpu", instance_count=job.nodes),
        # A folder, because the SDK mounts an archive to a path that it then expects to be a folder.
        source_code=SourceCode(
            source_dir=job.bundle,
            command=command,
            requirements=REQUIREMENTS if has_requirements else None,
        ),
        environment={**request["Environment"], **job.environment},
        hyperparameters=request["HyperParameters"],
        input_data_config=[
            InputData(channel_name=name, data_source=path) for name, path in job.channels.items()
        ],
        local_container_root=job.root,
    ).train(wait=True)


def _mount_read_only(channels: Sequence[str]) -> None:
    """Let the SDK's containers mount ``channels`` read-only; the SDK has no option for it."""
    import yaml
    from sagemaker.train.local import local_container

    compose = local_container._LocalContainer._generate_compose_file
    ends = tuple(f":/opt/ml/input/data/{name}" for name in channels)

    def with_read_only_channels(self: Any, *arguments: Any) -> Any:
        document = compose(self, *arguments)
        path = Path(self.container_root, local_container.DOCKER_COMPOSE_FILENAME)
        # Only in the file: the SDK parses the volumes of the document.
        written = yaml.safe_load(path.read_text(encoding="utf-8"))
        for service in written["services"].values():
            service["volumes"] = [
                _read_only(volume) if volume.removesuffix(":z").endswith(ends) else volume
                for volume in service["volumes"]
            ]
        path.write_text(yaml.safe_dump(written), encoding="utf-8")
        return document

    local_container._LocalContainer._generate_compose_file = with_read_only_channels


def _read_only(volume: str) -> str:
    # The SDK adds ":z" on hosts with SELinux.
    return f"{volume},ro" if volume.endswith(":z") else f"{volume}:ro"


def main() -> None:
    """Run the job in the file that the first argument names; exit with 1 if it fails."""
    job = LocalJob(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    with quiet_sdk():
        try:
            train(job)
        except RuntimeError as error:
            sys.exit(str(error))


if __name__ == "__main__":
    main()

"""The SDK's local container mode: a stage's request as containers on this machine.

Run as a program of its own (``python -m sm_train.estimators.sdk.local_trainer JOB.json``): the SDK
prints what the containers say on its standard output, and a Ctrl-C for the command that follows
it must not break off a checkpoint.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from sm_train.estimators.bundle.user_code import REQUIREMENTS
from sm_train.estimators.request.training import TrainingRequest
from sm_train.estimators.sdk.model_trainer import launch_command, pinned_trainer_class, quiet_sdk


@dataclass(frozen=True)
class LocalJob:
    """A request and what stands in for its cloud: folders of this machine.

    ``channels`` are mounted, writable, under their names in every container. ``root`` is the
    SDK's working folder.
    """

    request: TrainingRequest
    nodes: int
    processes: int
    channels: dict[str, str]
    environment: dict[str, str]
    bundle: str
    entry: str
    root: str

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2), encoding="utf-8")


def train(job: LocalJob) -> None:
    """Run the containers to their end.

    Raises:
        RuntimeError: a container failed, or docker compose did.
    """
    from sagemaker.core.training.configs import Compute, InputData, SourceCode
    from sagemaker.train.model_trainer import Mode

    request = job.request
    # The start script finds no GPU here; it is told how many processes to start instead.
    command = f"SM_NUM_GPUS={job.processes} {launch_command(job.entry)}"
    packages = (Path(job.bundle) / REQUIREMENTS).exists()
    pinned_trainer_class(request)(
        training_mode=Mode.LOCAL_CONTAINER,
        base_job_name=request["HyperParameters"]["stage"],
        training_image=request["AlgorithmSpecification"]["TrainingImage"],
        compute=Compute(instance_type="local_cpu", instance_count=job.nodes),
        # A folder: the SDK mounts an archive where it then looks for a folder with the archive.
        source_code=SourceCode(
            source_dir=job.bundle,
            command=command,
            requirements=REQUIREMENTS if packages else None,
        ),
        environment=request["Environment"] | job.environment,
        hyperparameters=request["HyperParameters"],
        input_data_config=[
            InputData(channel_name=name, data_source=path) for name, path in job.channels.items()
        ],
        local_container_root=job.root,
    ).train(wait=True)


def main() -> None:
    """Run the job that the first argument describes; exit 1 where it failed."""
    job = LocalJob(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    with quiet_sdk():
        try:
            train(job)
        except RuntimeError as error:
            sys.exit(str(error))


if __name__ == "__main__":
    main()

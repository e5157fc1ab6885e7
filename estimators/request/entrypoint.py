"""The first process of a job's container, which gets SageMaker's SIGTERM.

SageMaker sends SIGTERM to process 1 only: a stop, a spot interruption, the maximum runtime. In
AWS's images that process is bash, running a script (``start_with_right_hostname.sh``, or the SDK's
``sm_train.sh``). The kernel does not deliver SIGTERM to a process 1 without a handler, so training
would not see it. MPI's processes are not even its descendants on every node.

So process 1 is a shell that turns SIGTERM into a file, which the ranks look for (StopSignal). It
runs the image's or the SDK's script as its child and exits with that script's code.
"""

from __future__ import annotations

from sm_train.entrypoints.base.sagemaker_paths import STOP_REQUEST
from sm_train.estimators.request.launch_plan import Route

_STOP = f"/opt/ml/{STOP_REQUEST}"

# An element may have 256 characters (botocore 1.44, TrainingContainerArgument). SIGTERM interrupts
# `wait`, whose status is then not the script's; the last `wait` returns that.
_SUPERVISE = (
    f'rm -f {_STOP}; trap "touch {_STOP}" TERM; '
    '"$@" & while kill -0 $! 2>/dev/null; do wait $!; done; wait $!'
)

CHANNELS = "/opt/ml/input/data"
_SDK_SCRIPT = f"{CHANNELS}/sm_drivers/sm_train.sh"
"""The SDK's start script, staged in the channel sm_drivers (sagemaker 3.27, training.constants)."""

SDK_ARGUMENTS = ["-c", f"chmod +x {_SDK_SCRIPT} && {_SDK_SCRIPT}"]
"""The arguments that the SDK sends with its own start script (sagemaker 3.27)."""

ENTRYPOINT = ["/bin/bash"]

_SCRIPTS: dict[Route, list[str]] = {
    "torchrun": ["/bin/bash", _SDK_SCRIPT],
    # ENTRYPOINT of AWS's images, and SageMaker's argument (aws/deep-learning-containers,
    # pytorch/training/docker/2.5/py3/cu124/Dockerfile.gpu, 2025-03).
    "smddp": ["bash", "-m", "start_with_right_hostname.sh", "train"],
}


def container_arguments(route: Route) -> list[str]:
    """Return the arguments of :data:`ENTRYPOINT` that supervise the start script of ``route``."""
    return ["-c", _SUPERVISE, "sm-train", *_SCRIPTS[route]]

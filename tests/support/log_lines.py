"""Builds log streams for tests, from given lines and from those of a healthy job."""

from __future__ import annotations

from collections.abc import Iterable

from sm_train.toolkit.analysis.diagnose.diagnosis import NO_FAILURE, UNKNOWN, Diagnosis, diagnose
from sm_train.toolkit.records.job_logs import LogStream

WRITTEN = 1795300000.0
"""2026-11-21: the time at which the logs were written."""


def stream(
    lines: Iterable[str], name: str = "algo-1.log", node: str | None = "algo-1"
) -> LogStream:
    content = "".join(f"{line}\n" for line in lines).encode()
    return LogStream(name, lambda: [content], node, WRITTEN)


def diagnosed(*nodes: Iterable[str]) -> Diagnosis:
    """Diagnose one log per node."""
    return diagnose(
        [
            stream(lines, f"algo-{number}.log", f"algo-{number}")
            for number, lines in enumerate(nodes, 1)
        ]
    )


def is_left_alone(found: Diagnosis) -> bool:
    """Return whether ``found`` accuses nothing: the log shows no failure, or not its end."""
    return found.cause in (NO_FAILURE, UNKNOWN) and found.first is None


def step(number: int, time: float, *, rank: int = 0, node: int = 0) -> str:
    """Return a ``step`` event of this project."""
    return (
        f'SMT {{"kind": "step", "time": {time}, "node": {node}, "rank": {rank}, "step": {number}, '
        '"epoch": 0, "loss": 0.123, "learning_rate": 0.0001, "gradient_norm": 1.0, '
        '"steps_per_second": 1.8, "images_per_second": 3686.4, "data_wait_share": 0.01, '
        '"mfu": 0.2}'
    )


DONE = (
    'SMT {"kind": "end", "time": 1795300000.0, "node": 0, "rank": 0, "step": 9, "reason": "done", '
    '"training_seconds": 1, "images": 1, "steps_per_second": 1}'
)
"""The event at the end of a completed run."""

HEALTHY = """\
bash: cannot set terminal process group (-1): Inappropriate ioctl for device
2026-11-21 10:00:00,123 sagemaker-training-toolkit INFO     Imported framework sagemaker_pytorch_container.training
2026-11-21 10:00:01,123 sagemaker-training-toolkit INFO     Invoking user script
SM_HPS={"caption":"CUDA out of memory. Tried to allocate 2.00 GiB","batch":8,"on_error":"RuntimeError: CUDA error: uncorrectable ECC error encountered"}
SM_TRAINING_ENV={"additional_framework_parameters":{},"hyperparameters":{"note":"OSError: [Errno 28] No space left on device"}}
SM_USER_ARGS=["--timeout","1800","--help-text","NVRM: Xid (PCI:0000:06:00): 79, GPU has fallen off the bus."]
Namespace(nccl_timeout=1800, oom_retry=True, detect_nan=False, ecc=True, note='Killed process 123 (python) total-vm:1kB')
NCCL_TIMEOUT=1800 TORCH_NCCL_ASYNC_ERROR_HANDLING=1 NCCL_DEBUG=INFO
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 550.54.15              Driver Version: 550.54.15      CUDA Version: 12.4     |
|-----------------------------------------+------------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
|   0  NVIDIA A100-SXM4-80GB          On  |   00000000:10:1C.0 Off |                    0 |
Remapped Rows: Correctable Error: 0  Uncorrectable Error: 0  Pending: No  Remapping Failure Occurred: No
Collecting torch==2.13.0
  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (915.3 MB)
WARNING: Retrying (Retry(total=4, connect=None, read=None)) after connection broken by 'ConnectionResetError(104, 'Connection reset by peer')': /simple/torch/
ERROR: pip's dependency resolver does not currently take into account all the packages that are installed. This behaviour is the source of the following dependency conflicts.
Requirement already satisfied: tenacity in /opt/conda/lib/python3.11/site-packages (9.0.0)
algo-1:101:101 [0] NCCL INFO Bootstrap : Using eth0:10.0.1.5<0>
algo-1:101:101 [0] NCCL INFO NET/Plugin: Failed to find ncclCollNetPlugin_v4 symbol.
algo-1:101:101 [0] NCCL INFO NCCL_TIMEOUT set by environment to 1800.
algo-1:101:400 [0] NCCL INFO NET/OFI Selected Provider is efa (found 4 nics)
algo-1:101:400 [0] NCCL INFO Using network AWS Libfabric
libfabric:101:1673041636:efa:core:rxr_info_to_rxr():506<warn> FI_HMEM capability requires RDMA, which this device does not support.
algo-1:101:400 [0] NCCL INFO comm 0x55d0 rank 0 nranks 16 cudaDev 0 busId 101c0 - Init COMPLETE
[rank0]:[W1121 10:00:20.123456789 ProcessGroupNCCL.cpp:4561] [PG ID 0 PG GUID 0 Rank 0]  using GPU 0 to perform barrier as devices used by this process are currently unknown.
[W1121 10:00:21.412354 socket.cpp:601] [c10d] The IPv6 network addresses of (algo-1, 7777) cannot be retrieved (gai error: -2 - Name or service not known).
[W1121 10:00:21.512354 socket.cpp:697] [c10d] The client socket has failed to connect to [algo-1]:7777 (errno: 111 - Connection refused).
/opt/conda/lib/python3.11/site-packages/torch/utils/data/dataloader.py:557: UserWarning: This DataLoader will create 8 worker processes in total. Getting DataLoader worker killed by signal: Bus error is possible.
UserWarning: CUDA initialization: The NVIDIA driver on your system is too old (found version 11040).
usage: train.py [-h] [--on-oom {retry,stop}] Xid 79 means that the GPU has fallen off the bus
  --nan-policy  stop when the loss is nan, stopping training otherwise is up to you
sampled prompt: "a t-shirt that says RuntimeError: CUDA error: device-side assert triggered"
caption='FloatingPointError: loss is nan' key=000017
loss 0.123 nan_count=0 inf_count=0 grad_norm 1.0 timeout 0 oom 0
INFO: could not import apex: ModuleNotFoundError: No module named 'apex'
DEBUG retry 1 after botocore.exceptions.ClientError: An error occurred (SlowDown) when calling the GetObject operation: Please reduce your request rate.
checkpoint saved; 120 GB left on device, no errors""".splitlines()  # noqa: E501
"""Lines that contain words of failures although nothing failed."""


def haystack(line: str, *, steps: int = 12) -> list[str]:
    """Return a healthy log that ends with ``line``."""
    return [*HEALTHY, *(step(number, WRITTEN - 1000 + number) for number in range(steps)), line]

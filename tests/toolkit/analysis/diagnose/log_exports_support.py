"""Helpers of the tests of log exports, which other tests use as well."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

from tests.support.log_lines import WRITTEN

SECOND = WRITTEN - 100


def iso(number: int) -> str:
    at = datetime.fromtimestamp(SECOND + number / 10, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "")


STREAM = "my-job/algo-2-1700000000"


PREFIXES: dict[str, Callable[[int], str]] = {
    "aws logs tail": lambda n: f"{iso(n)}+00:00 {STREAM} ",
    "aws logs tail short": lambda n: f"{iso(n)[:19]} ",
    "S3 export task": lambda n: f"{iso(n)}Z ",
    "CRI": lambda n: f"{iso(n)}123456Z stderr F ",
    "kubectl logs --prefix": lambda n: "[pod/train-worker-1/pytorch] ",
    "kubectl logs --prefix --timestamps": lambda n: (
        f"[pod/train-worker-1/pytorch] {iso(n)}123456Z "
    ),
    "stern": lambda n: "train-worker-1 pytorch ",
    "stern with time": lambda n: f"train-worker-1 pytorch {iso(n)}Z ",
    "docker compose": lambda n: "trainer-1  | ",
    "journald": lambda n: f"Nov 21 10:00:{n:02} ip-10-0-1-5 python[4123]: ",
    "syslog": lambda n: f"Nov 21 10:00:{n:02} ip-10-0-1-5 trainer: ",
    "srun -l": lambda n: " 5: ",
    "srun -l with rank": lambda n: "105: [rank105]: ",
    "pdsh": lambda n: "ip-10-0-1-5: ",
    "pdsh address": lambda n: "10.0.1.5: ",
    "torchrun role": lambda n: "[trainer3]:",
    "torchrun default role": lambda n: "[default3]:",
    "PyTorch rank": lambda n: "[rank3]: ",
    "mpirun on SageMaker": lambda n: "[1,mpirank:3,algo-2]<stderr>:",
    "mpirun --tag-output": lambda n: "[1,15]<stderr>:",
    "Open MPI 5": lambda n: "[prterun-host-4123@1,15]<stderr>: ",
    "mpirun --timestamp-output": lambda n: f"Sat Nov 21 10:00:{n:02} 2026[1,15]<stderr>:",
    "Ray": lambda n: "(RayTrainWorker pid=1203, ip=10.0.1.5) ",
    "Ray colors": lambda n: "\x1b[36m(RayTrainWorker pid=1203)\x1b[0m ",
    "Lightning": lambda n: "[rank: 3] ",
    "loguru": lambda n: f"{iso(n).replace('T', ' ')} | ERROR    | __main__:train:{n} - ",
    "loguru info": lambda n: f"{iso(n).replace('T', ' ')} | INFO     | __main__:train:{n} - ",
    "logging": lambda n: f"{iso(n).replace('T', ' ').replace('.', ',')} - trainer - ERROR - ",
    "logging info": lambda n: f"{iso(n).replace('T', ' ').replace('.', ',')} - tuner - INFO - ",
    "logging default": lambda n: "ERROR:root:",
    "logging clock": lambda n: f"10:00:{n:02} WARNING trainer.loop: ",
    "DeepSpeed": lambda n: (
        f"[{iso(n).replace('T', ' ').replace('.', ',')}] [ERROR] [launch.py:3:m] "
    ),
    "SkyPilot": lambda n: "(worker1, rank=1, pid=4123, ip=10.0.1.5) ",
    "HyperPod": lambda n: f"[hyperpod-pod-3] [{iso(n)}] ",
    "worker": lambda n: "(worker_7) : ",
    "determined": lambda n: f"[{iso(n)}123Z] fa88a9df || ",
    "databricks": lambda n: f"{iso(n)} [177/train/578 (pid 28936)] [09c561ee-a44c-4795] ",
    "milabench": lambda n: "dinov2-giant.cn-d004 [stderr] ",
    "tab": lambda n: "train-7\t",
}

"""Everything that only a GPU exercises, in one command of at most eight minutes on one H100.

The parts run in the order of their value, each in a process of its own with a limit in seconds: a
run that is cut short has the important parts, and a part that fails or hangs ends no other one.
Each prints one line as soon as it has ended, and its figures are in the JSON file from then on:

    ok              2.0 s  nan                 a step with a NaN changes none of 298 tensors
    failed        120.3 s  sd2-compile         ended after its limit of 120 s
    not installed   0.0 s  adamw8bit           bitsandbytes, below --optional, for a GPU

    python benchmarks/gpu.py [--device cpu --quick] [--part NAME …] [--seconds 480]

With ``--quick`` the networks are tiny, so that the same code runs on two CPU cores. gpu_parts.py
describes the parts.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from sm_train.entrypoints.training.gpu_settings import set_allocator

PACKAGES = ("torch", "diffusers", "transformers", "accelerate", "bitsandbytes", "torchao", "peft")

Figures = dict[str, Any]


def main(arguments: list[str] | None = None) -> int:
    """Run the parts; return 1 if one of them failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny networks and few steps")
    parser.add_argument("--part", action="append", help="only these parts, in this order")
    parser.add_argument("--seconds", type=float, default=480, help="limit of the whole run")
    parser.add_argument(
        "--optional", type=Path, help="folder of packages that start CUDA when they are imported"
    )
    parser.add_argument("--output", type=Path, default=Path("build/gpu.json"))
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + options.seconds
    _prepare_environment(options.device)
    # Imported once, before any part is forked. Nothing in it creates a CUDA context.
    from gpu_parts import PARTS, PartRun

    unknown = set(options.part or ()) - {part.name for part in PARTS}
    if unknown:
        names = ", ".join(part.name for part in PARTS)
        parser.error(f"--part: {', '.join(sorted(unknown))}: unknown; use one of {names}")
    by_name = {part.name: part for part in PARTS}
    chosen = [by_name[name] for name in options.part or by_name]
    document: Figures = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": options.device,
        "quick": options.quick,
        "versions": {name: _version(name) for name in PACKAGES},
        "parts": {},
    }
    for part in chosen:
        left = deadline - time.monotonic()
        if left < 5:
            result: Figures = {"outcome": "not run", "line": "the time is over", "seconds": 0.0}
        else:
            with tempfile.TemporaryDirectory(prefix=f"gpu-{part.name}-") as folder:
                run = PartRun(options.device, options.quick, Path(folder), options.optional)
                # Two busy cores take several times as long as a GPU's node.
                limit = part.limit * (4 if options.device == "cpu" else 1)
                result = run_part(part.run, run, min(left, limit))
        document["parts"][part.name] = result
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(document, indent=1))
        outcome, seconds = result["outcome"], result["seconds"]
        print(f"{outcome:<14}{seconds:>6.1f} s  {part.name:<20}{result['line']}", flush=True)
    outcomes = [result["outcome"] for result in document["parts"].values()]
    print(f"{outcomes.count('ok')} of {len(outcomes)} parts are ok; figures: {options.output}")
    return 1 if "failed" in outcomes else 0


def _prepare_environment(device: str) -> None:
    """Set what must be set before PyTorch is imported or CUDA starts."""
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Otherwise a question for a GPU would start CUDA here, and no forked process could use it.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    set_allocator()
    # cuBLAS is deterministic with it only; parts that compare bits turn the rest on themselves.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Processes that a job starts import the modules that this process imports.
    paths = [*filter(None, sys.path), str(Path.cwd())]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def run_part(part: Callable[[Any], str], run: Any, limit: float) -> Figures:
    """Run a part in a forked process for at most ``limit`` seconds; return its result.

    Figures that it reported before it failed or was ended are part of the result, and its stack
    where its limit was almost reached.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    stack = run.folder / "stack.txt"
    process = context.Process(target=_part_process, args=(part, run, sender, stack, limit - 1))
    started = time.monotonic()
    process.start()
    sender.close()
    figures: Figures = {}
    result: Figures = {"outcome": "failed", "line": f"ended after its limit of {limit:.0f} s"}
    try:
        while receiver.poll(max(0.0, started + limit - time.monotonic())):
            kind, value = receiver.recv()
            if kind == "figures":
                figures |= value
            else:
                result = value
                break
    except EOFError:
        process.join()
        result["line"] = f"the process ended with {process.exitcode}"
    # Also what the part has started, such as a job and its watchdog.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()
    if result["outcome"] == "failed" and stack.exists():
        result.setdefault("trace", stack.read_text())
    return {**result, "seconds": round(time.monotonic() - started, 1), "figures": figures}


def _part_process(
    part: Callable[[Any], str], run: Any, sender: Connection, stack: Path, stack_after: float
) -> None:
    from gpu_parts import NotInstalledError

    os.setsid()
    stack_file = stack.open("w")
    faulthandler.dump_traceback_later(stack_after, file=stack_file)
    run.report = lambda **figures: sender.send(("figures", figures))
    outcome, trace = "ok", None
    try:
        line = part(run)
    except NotInstalledError as error:
        outcome, line = "not installed", str(error)
    except Exception as error:
        outcome, trace = "failed", traceback.format_exc()
        first, *_ = str(error).splitlines() or [""]
        line = f"{type(error).__name__}: {first}"
    sender.send(("result", {"outcome": outcome, "line": line, "trace": trace}))
    sender.close()
    # Threads of a failed part may hang.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())

"""Creates a process group with SMDDP, after a self-test on all ranks.

SMDDP is closed-source and supports few versions of PyTorch, instance types and operations. A job
that finds out at its first step has paid for the start of all instances.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from sm_train.entrypoints.distributed.messages import Messages, job_key
from sm_train.entrypoints.distributed.object_exchange import ObjectExchange

SELF_TEST_SECONDS = 180.0
"""The first collective opens all connections: about a minute for NCCL on 128 GPUs."""

_FAILED = "SMDDP's self-test does not end within {seconds:.0f} s; set cluster.backend: nccl"


def join_smddp(timeout: timedelta, on_hang: Callable[[str], None]) -> str | None:
    """Create the default process group: with SMDDP if it works on all ranks, else with NCCL.

    Return None, or why SMDDP does not work. ``on_hang`` gets a line if the test does not end.
    """
    # Unlike a collective, an exchange through the store works whatever the backend does.
    distributed: Any = dist
    store, rank, world_size = next(distributed.rendezvous("env://", timeout=timeout))
    own_store = distributed.PrefixStore("self-test", store)
    exchange = ObjectExchange(Messages(own_store, job_key()), rank, world_size)
    message = _FAILED.format(seconds=SELF_TEST_SECONDS)
    timer = threading.Timer(SELF_TEST_SECONDS, on_hang, [message])
    timer.daemon = True
    timer.start()
    try:
        problem = _first(exchange.all_gather(_catch(_register)))
        if problem is None:

            def create_and_test() -> None:
                _create_group("smddp", store, rank, world_size, timeout)
                _self_test(rank, world_size)

            problem = _first(exchange.all_gather(_catch(create_and_test)))
        if problem is not None and dist.is_initialized():
            dist.destroy_process_group()
    finally:
        timer.cancel()
    if problem is not None:
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        _create_group(backend, store, rank, world_size, timeout)
    return problem


def _catch(call: Callable[[], None]) -> str | None:
    """Return in one line what ``call`` raises; None if nothing."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return None


def _first(problems: list[str | None]) -> str | None:
    """Return the problem of the lowest rank that has one."""
    return next(
        (f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem), None
    )


def _register() -> None:
    import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401  registers the backend


def _create_group(backend: str, store: Any, rank: int, world_size: int, timeout: timedelta) -> None:
    distributed: Any = dist
    distributed.init_process_group(
        backend=backend,
        store=distributed.PrefixStore(backend, store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )


def _self_test(rank: int, world_size: int) -> None:
    """Call each collective that training calls, on small tensors, and check the results.

    Raises:
        RuntimeError: a result is wrong.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ranks = list(range(world_size))
    # Gradients and metrics are summed; DDP gathers the shapes and broadcasts the weights.
    total = torch.full((1024,), float(rank), device=device)
    dist.all_reduce(total)
    gathered = [torch.zeros(1, dtype=torch.int64, device=device) for _ in ranks]
    dist.all_gather(gathered, torch.tensor([rank], device=device))
    first = torch.full((1024,), float(rank), device=device)
    dist.broadcast(first, 0)
    dist.barrier()
    results = {
        "all_reduce": bool((total == sum(ranks)).all()),
        "all_gather": [int(value) for value in gathered] == ranks,
        "broadcast": not first.any(),
    }
    wrong = [name for name, is_right in results.items() if not is_right]
    if wrong:
        raise RuntimeError(f"wrong result of {', '.join(wrong)}")

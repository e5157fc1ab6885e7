"""Logs of jobs on Kubernetes, Slurm and Ray, with their prefixes, and of kernels of Triton."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Cli
from tests.support.job_log_lines import SimulatedJob, line
from tests.support.log_lines import diagnosed, is_left_alone

PODS = ("demo-256px-node-0-0-x7k2p", "demo-256px-node-0-1-9qwrt")
HOSTS = ("ip-10-1-8", "ip-10-1-9")
PREFIXES: dict[str, tuple[Callable[[int], str], tuple[str, str]]] = {
    "kubectl": (lambda node: f"[pod/{PODS[node]}/node] ", PODS),
    "srun": (lambda node: f"{node}: ", HOSTS),
}

TRACEBACK = """\
Traceback (most recent call last):
  File "/opt/ml/input/data/code/sm_train/entrypoints/train.py", line 120, in _train
    loss.backward()
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."""


def write_log(path: Path, prefix: Callable[[int], str], *, fails: bool) -> Path:
    """Write the log of a job of two nodes, of which the second runs out of memory."""
    lines = [
        (node, f"sm-train start: node {node} of 2 ({host}; SLURM_NODEID), first node {HOSTS[0]}:1")
        for node, host in enumerate(HOSTS)
    ]
    lines += [(0, text) for _, text in SimulatedJob(nodes=2, intervals=30).lines() if text]
    if fails:
        lines = [(node, text) for node, text in lines if '"kind": "end"' not in text]
        lines += [(1, text) for text in TRACEBACK.splitlines()]
        message = "CUDA out of memory. Tried to allocate 2.00 GiB"
        lines.append((1, line("error", 2000, 1, code="OutOfMemoryError", message=message)))
    path.write_text("".join(f"{prefix(node)}{text}\n" for node, text in lines))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("platform", PREFIXES)
def test_diagnose_names_the_node_of_a_pod_or_task(cli: Cli, tmp_path: Path, platform: str) -> None:
    prefix, names = PREFIXES[platform]
    log = write_log(tmp_path / "job.log", prefix, fails=True)
    found = json.loads(cli("diagnose", log, "--json").stdout)
    assert found["cause"] == "gpu-out-of-memory"
    assert found["first_failure"]["node"] == names[1]
    # The task of `srun` is a node's, and no rank.
    assert found["first_failure"]["rank"] != 1
    assert "algo-" not in cli("diagnose", log).stdout


@pytest.mark.parametrize("platform", PREFIXES)
def test_review_reads_the_events_behind_the_prefix(cli: Cli, tmp_path: Path, platform: str) -> None:
    log = write_log(tmp_path / "job.log", PREFIXES[platform][0], fails=False)
    plain = write_log(tmp_path / "plain.log", lambda node: "", fails=False)
    verdicts = []
    for file in (log, plain):
        result = cli("review", file, "--json")
        assert result.returncode == 0, result.stderr
        document = json.loads(result.stdout)
        verdicts.append(json.dumps(document).replace(str(file), "FILE").replace(file.name, "FILE"))
    assert verdicts[0] == verdicts[1]


SUMMARY = """\
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Root Cause (first observed failure):
[0]:
  time      : 2026-11-23_00:38:29
  host      : gpu-0
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 10965)
============================================================"""


def test_torchruns_summary_of_another_node_provides_no_rank(cli: Cli, tmp_path: Path) -> None:
    """The launcher of the first node reports its own rank, which the killed one has disturbed."""
    lines = [f"{node}: sm-train start: node {node} of 2 (gpu-{node}; SLURM)" for node in (0, 1)]
    lines += [f"0: {text}" for text in SUMMARY.splitlines()]
    lines += ["srun: error: gpu-1: task 1: Killed"]
    (tmp_path / "job.log").write_text("\n".join(lines) + "\n")
    found = json.loads(cli("diagnose", "job.log", "--json").stdout)
    assert found["cause"] == "process-killed"
    assert found["first_failure"]["node"] == "gpu-1"
    assert found["first_failure"]["rank"] != 0


@pytest.mark.parametrize("platform", PREFIXES)
def test_review_shows_the_doctors_findings(cli: Cli, tmp_path: Path, platform: str) -> None:
    log = write_log(tmp_path / "job.log", PREFIXES[platform][0], fails=False)
    sentence = "the link between two nodes is slow"
    event = line("doctor", 1, 0, level="warn", sentence=sentence, seconds=12.0, slowdown=1.5)
    log.write_text(f"{PREFIXES[platform][0](0)}{event}\n" + log.read_text())
    result = cli("review", log, "--json")
    assert sentence in result.stdout, result.stderr


# The sources that log in raylet, gcs_server and _raylet.so (names in the wheel of Ray 2.49.2).
RAY_SOURCES = """
    accessor actor_manager actor_scheduling_queue actor_task_submitter
    affinity_with_bundle_scheduling_policy agent_manager asio_chaos bundle_scheduling_policy
    bundle_spec chunk_object_reader client client_connection cluster_resource_data
    cluster_resource_manager cluster_resource_scheduler cluster_task_manager cmd_line_utils
    common composite_scheduling_policy concurrency_group_manager connection context core_worker
    core_worker_client core_worker_client_pool core_worker_process create_request_queue
    dependency_manager dependency_resolver dlmalloc event event_stats eviction_policy
    experimental_mutable_object_manager experimental_mutable_object_provider file_system_monitor
    fling function_descriptor future_resolver gcs_actor_manager gcs_actor_scheduler
    gcs_autoscaler_state_manager gcs_client gcs_health_check_manager gcs_init_data
    gcs_job_manager gcs_node_manager gcs_placement_group_mgr gcs_placement_group_scheduler
    gcs_pub_sub gcs_redis_failure_detector gcs_resource_manager gcs_server gcs_server_main
    gcs_task_manager gcs_worker_manager generator_waiter get_request_queue global_state_accessor
    grpc_server hybrid_scheduling_policy id instrumented_io_context internal io_service_pool
    lease_policy local_object_manager local_resource_manager local_task_manager logging main
    memory_monitor memory_store metric metric_exporter node_affinity_scheduling_policy
    node_label_scheduling_policy node_manager node_state normal_scheduling_queue
    normal_task_submitter obj_lifecycle_mgr object_buffer_pool object_manager
    object_recovery_manager object_store open_telemetry_metric_recorder
    out_of_order_actor_scheduling_queue out_of_order_actor_submit_queue
    ownership_object_directory periodical_runner pipe_logger placement_group_resource_manager
    plasma_allocator plasma_store_provider process protocol publisher pubsub_handler
    pull_manager push_manager random_scheduling_policy ray_config ray_object ray_syncer
    ray_syncer_server raylet raylet_client raylet_client_pool raylet_ipc_client
    redis_async_context redis_client redis_context redis_store_client reference_count
    resource_instance_set retryable_grpc_client rpc_chaos runtime_env_agent_client
    runtime_env_handler runtime_env_manager scheduler_resource_reporter scheduler_stats
    scheduling_ids scheduling_util scoped_dup2_wrapper scorer sequential_actor_submit_queue
    shared_memory spilled_object_reader spread_scheduling_policy stats_collector store
    store_client_kv store_runner stream_redirection subreaper subscriber task_event_buffer
    task_manager task_receiver task_spec thread_pool usage_stats_client util wait_manager worker
    worker_killing_policy worker_killing_policy_group_by_owner
    worker_killing_policy_retriable_fifo worker_pool
""".split()


@pytest.mark.parametrize("component", ["", "(raylet) ", "(gcs_server) "])
def test_fatal_line_of_every_source_of_ray_is_a_lost_worker(component: str) -> None:
    """RAY_LOG(FATAL) and RAY_CHECK write the level C and end their process."""
    for name in RAY_SOURCES:
        stamp = "2026-11-21 10:00:00,117"
        line = f"[{stamp} C 4121 4129] {component}{name}.cc:483: Any reason at all."
        assert diagnosed([line]).cause == "ray-worker-died", line
        assert is_left_alone(diagnosed([line.replace(" C ", " I ")]))


@pytest.mark.parametrize(
    "text",
    [
        *("an illegal memory access was encountered", "out of memory", "invalid argument"),
        *("device kernel image is invalid", "unspecified launch failure", "unknown error"),
        *("the provided PTX was compiled with an unsupported toolchain.", "context is destroyed"),
        *("no kernel image is available for execution on the device", "misaligned address"),
        *("too many resources requested for launch", "system not yet initialized"),
        *("uncorrectable ECC error encountered", "device-side assert triggered"),
    ],
)
def test_errors_of_cuda_mean_the_same_in_triton_as_in_pytorch(text: str) -> None:
    expected = diagnosed(traceback(f"RuntimeError: CUDA error: {text}"))
    for prefix in ("[CUDA]: ", "[HIP]:  Code: 1, Messsage: "):
        found = diagnosed(traceback(f"RuntimeError: Triton Error {prefix}{text}"))
        assert found.cause == expected.cause


def traceback(line: str) -> list[str]:
    frame = (
        '  File "/opt/conda/lib/python3.11/site-packages/triton/runtime/jit.py", line 607, in run'
    )
    return ["Traceback (most recent call last):", frame, "    kernel.run(grid)", line]

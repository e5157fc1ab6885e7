"""Verdicts on simulated clusters: one fault each, and its effect on the run."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from sm_train.cost.network import GpuNetwork
from sm_train.entrypoints.base.sagemaker_paths import ResourceConfig, SageMakerPaths
from sm_train.entrypoints.job_interface.events import EventLog
from sm_train.entrypoints.job_interface.job_config import (
    DoctorConfig,
    ExpectedPerformance,
    JobConfig,
)
from sm_train.entrypoints.launcher.start_doctor import effective_mode
from sm_train.entrypoints.probes.doctor_history import EarlierResult, parse_results
from sm_train.entrypoints.probes.doctor_report import conclude, report_transport, result_document
from sm_train.entrypoints.probes.measurements import (
    ClusterMeasurements,
)
from sm_train.entrypoints.probes.verdict import DoctorVerdict, judge
from sm_train.entrypoints.records.doctor_results import (
    FOLDER,
    read_results,
    unfit_nodes,
    write_result,
)
from sm_train.estimators.bundle.job_configs import job_configs

from tests.entrypoints.probes.verdict_support import GPU, LOG, TYPICAL, cluster_of, group
from tests.support.run_documents import config, stage

P4D = ExpectedPerformance("ml.p4d.24xlarge", 1.8, "stated", 30.0)


def job_config(**doctor: Any) -> JobConfig:
    """A stage of 32 × 2 images of 256 px per GPU, on p4d instances."""
    settings = {"per_device_batch_size": 32, "gradient_accumulation_steps": 2, "max_steps": 10_000}
    run = config(stages=[stage("s", **settings)])
    section = DoctorConfig(**{"mode": "auto", "timeout": 120, "max_slowdown": 1.5} | doctor)
    return replace(job_configs(run)["s"], doctor=section, expected=P4D)


def codes(verdict: DoctorVerdict) -> set[str]:
    return {finding.code for finding in verdict.findings}


def changed(cluster: ClusterMeasurements, node: int, **fields: Any) -> ClusterMeasurements:
    ranks = tuple(replace(rank, **fields) if rank.node == node else rank for rank in cluster.ranks)
    return replace(cluster, ranks=ranks)


def test_healthy_cluster_is_ok_and_costs_what_was_planned() -> None:
    verdict = judge(job_config(), cluster_of())
    assert (verdict.level, codes(verdict)) == ("ok", set())
    assert verdict.prediction is not None
    assert verdict.prediction.expected_steps_per_second == pytest.approx(1.8, rel=1e-3)
    assert verdict.prediction.slowdown == 1.0
    assert verdict.prediction.expected_usd == pytest.approx(10_000 / 1.8 / 3600 * 4 * 30, rel=1e-3)
    assert verdict.sentence == "network at 100% of expected → no slower than expected → $185"


def test_slow_network_gives_a_sentence_with_its_cost() -> None:
    verdict = judge(job_config(), cluster_of(rate=0.04 * TYPICAL))
    prediction = verdict.prediction
    assert prediction is not None
    assert prediction.slowdown is not None
    assert prediction.expected_usd is not None
    assert prediction.predicted_usd == pytest.approx(
        prediction.expected_usd * prediction.slowdown, rel=1e-6
    )
    # 3.5 GB of gradients at 1.2 GB/s, twice 31/32 of them, over 0.56 s a step.
    assert prediction.slowdown == pytest.approx(10.5, rel=0.05)
    assert verdict.level == "fail"
    assert {"network-slow", "too-slow"} <= codes(verdict)
    assert verdict.sentence.startswith("network at 4% of expected → ")
    assert "× slower → $" in verdict.sentence
    assert " instead of $185" in verdict.sentence
    tolerant = judge(job_config(max_slowdown=100.0), cluster_of(rate=0.04 * TYPICAL))
    assert tolerant.level == "warn"


def test_figures_of_another_instance_type_are_not_used() -> None:
    verdict = judge(job_config(), cluster_of(rate=0.04 * TYPICAL, instance_type=None))
    assert "too-slow" not in codes(verdict)
    assert verdict.prediction is None or verdict.prediction.expected_usd is None


def test_missing_node_is_named_with_advice() -> None:
    healthy = cluster_of()
    ranks = tuple(rank for rank in healthy.ranks if rank.node != 2)
    verdict = judge(job_config(), replace(healthy, ranks=ranks, missing_ranks=tuple(range(16, 24))))
    [finding] = [missing for missing in verdict.findings if missing.code == "node-missing"]
    assert finding.level == "fail"
    assert finding.message.startswith("algo-3 never joined: ranks 16–23 ")
    assert "within 40 s" in finding.message
    assert "security group" in finding.advice
    assert "algo-3 never joined" in verdict.sentence
    late = replace(healthy, ranks=ranks, missing_ranks=tuple(range(16, 24)), late_ranks=(16,))
    assert "algo-3 came too late" in judge(job_config(), late).sentence


@pytest.mark.parametrize(
    ("code", "level", "fields"),
    [
        ("node-late", "warn", {"join_delay": 31.0}),
        ("gpus-missing", "fail", {"gpus": 7}),
        ("world-size", "fail", {"world_size": 24}),
        ("versions-differ", "warn", {"versions": {"torch": "2.5"}}),
    ],
)
def test_node_that_differs_is_named(code: str, level: str, fields: dict[str, Any]) -> None:
    verdict = judge(job_config(), changed(cluster_of(), 1, **fields))
    [finding] = verdict.findings
    assert (finding.code, finding.level, finding.nodes) == (code, level, (1,))
    assert "algo-2 (i-00000001)" in finding.message


def test_world_size_that_does_not_match_the_gpus_is_a_finding() -> None:
    healthy = cluster_of()
    fewer = tuple(replace(rank, world_size=28) for rank in healthy.ranks if rank.local_rank != 7)
    verdict = judge(job_config(), replace(healthy, ranks=fewer, world_size=28))
    assert "world-size" in codes(verdict)


def test_node_without_a_process_is_named() -> None:
    healthy = cluster_of()
    fewer = tuple(replace(rank, world_size=24) for rank in healthy.ranks if rank.node != 3)
    verdict = judge(job_config(), replace(healthy, ranks=fewer, world_size=24))
    [idle] = [
        finding for finding in verdict.findings if finding.code == "world-size" and finding.nodes
    ]
    assert idle.message.startswith("algo-4: without a process of the 24")


@pytest.mark.parametrize(
    ("code", "level", "gpu"),
    [
        ("ecc-errors", "fail", {"ecc_errors": 3}),
        ("ecc-off", "warn", {"ecc": False}),
        ("nvlink-down", "fail", {"links_inactive": 2}),
        ("gpu-throttled", "warn", {"slowdown": True}),
        ("gpu-differs", "warn", {"memory_mib": 40000}),
    ],
)
def test_faulty_gpu_is_named(code: str, level: str, gpu: dict[str, Any]) -> None:
    healthy = cluster_of()
    bad = replace(healthy.speeds[8], gpus=(*(GPU,) * 5, GPU | gpu, GPU, GPU))
    verdict = judge(job_config(), replace(healthy, speeds={**healthy.speeds, 8: bad}))
    [finding] = verdict.findings
    assert (finding.code, finding.level) == (code, level)
    assert "algo-2 (i-00000001), GPU 5" in finding.message


def test_slow_cpu_is_not_accused() -> None:
    cpus = replace(cluster_of(), backend="gloo")
    slow = replace(cpus.speeds[9], matmul_tflops=1.0)
    verdict = judge(job_config(), replace(cpus, speeds={**cpus.speeds, 9: slow}))
    assert "gpu-slow" not in codes(verdict)


def test_slow_gpu_slows_the_whole_run() -> None:
    healthy = cluster_of()
    slow = replace(healthy.speeds[9], matmul_tflops=110.0)
    verdict = judge(job_config(), replace(healthy, speeds={**healthy.speeds, 9: slow}))
    assert "gpu-slow" in codes(verdict)
    assert verdict.prediction is not None
    assert verdict.prediction.slowdown is not None
    # Half the speed, but more of the communication hides behind twice the compute.
    assert 1.5 < verdict.prediction.slowdown < 2.0


@pytest.mark.parametrize(
    ("log", "code"),
    [
        ({"fabric": "sockets"}, "transport-sockets"),
        ({"rdma_channels": 0}, "transport-no-rdma"),
        ({"rdma_channels": 7}, "transport-no-rdma"),
        ({"fabric": "infiniband", "rdma_channels": 0}, "transport-no-rdma"),
        ({"adapters": 3}, "adapters-missing"),
    ],
)
def test_wrong_transport_is_named(log: dict[str, Any], code: str) -> None:
    verdict = judge(job_config(), cluster_of(nccl_logs={0: LOG, 1: LOG | log, 2: LOG, 3: LOG}))
    [finding] = verdict.findings
    assert (finding.code, finding.nodes) == (code, (1,))


@pytest.mark.parametrize(
    ("rdma", "level", "sentence"),
    [
        (("mlx5_0", "mlx5_1"), "fail", "sockets, although the node has mlx5_0, mlx5_1"),
        (("rdmap16s27",), "fail", "sockets: EFA is not used"),
        ((), "warn", "sockets: EFA is not used"),
        (None, "warn", "sockets: EFA is not used"),
    ],
)
def test_sockets_fail_a_node_only_if_its_devices_were_found(
    rdma: tuple[str, ...] | None, level: str, sentence: str
) -> None:
    logs = {0: LOG, 1: LOG | {"fabric": "sockets"}, 2: LOG, 3: LOG}
    cluster = changed(cluster_of(rate=0.04 * TYPICAL, nccl_logs=logs), 1, rdma=rdma)
    verdict = judge(job_config(max_slowdown=100.0), cluster)
    [finding] = [finding for finding in verdict.findings if finding.is_transport]
    assert (finding.level, verdict.level) == (level, level)
    assert finding.message == (
        f"algo-2 (i-00000001): {sentence}; this run is predicted to be 11× slower than expected"
    )


def test_bad_transport_is_logged_before_the_pairs_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = dict.fromkeys(range(4), LOG | {"fabric": "sockets"})
    cluster = cluster_of(rate=0.04 * TYPICAL, nccl_logs=logs)
    events = EventLog(node=0, rank=0)
    reported = report_transport(job_config(), replace(cluster, pairs=()), events)
    early = capsys.readouterr().out
    assert early.count("doctor-transport-sockets") == 4
    assert "11× slower" in early
    (tmp_path / "checkpoints").mkdir()
    conclude(job_config(), cluster, SageMakerPaths(tmp_path), events, reported=reported)
    assert "doctor-transport-sockets" not in capsys.readouterr().out
    [stored] = read_results([tmp_path / "checkpoints" / FOLDER])
    assert "transport-sockets" in {found["code"] for found in stored["verdict"]["findings"]}


def pair_changed(
    cluster: ClusterMeasurements, nodes: set[int], **fields: Any
) -> ClusterMeasurements:
    """Change the pairs that contain ``nodes``; both of their passes measure the bandwidth."""
    if "bandwidth" in fields:
        fields["passes"] = (fields["bandwidth"],) * 2
    pairs = tuple(
        replace(pair, **fields) if nodes <= set(pair.nodes) else pair for pair in cluster.pairs
    )
    return replace(cluster, pairs=pairs)


def test_slow_and_cut_links_and_nodes_are_distinguished() -> None:
    healthy = cluster_of()
    for nodes, fields, code in (
        ({1, 3}, {"bandwidth": TYPICAL / 80}, "link-slow"),
        ({2}, {"bandwidth": TYPICAL / 80}, "node-slow"),
        ({1, 3}, {"bandwidth": 0.0, "error": "timed out"}, "link-cut"),
        ({2}, {"bandwidth": 0.0, "error": "timed out"}, "node-unreachable"),
    ):
        verdict = judge(job_config(), pair_changed(healthy, nodes, **fields))
        [finding] = verdict.findings
        assert (finding.code, set(finding.nodes)) == (code, nodes)
        assert "exclude" in finding.advice


def test_lost_node_is_named_and_not_its_links() -> None:
    cut = pair_changed(cluster_of(), {1, 3}, bandwidth=0.0, error="timed out")
    verdict = judge(job_config(), replace(cut, lost_ranks={24: "pairs-1"}))
    [finding] = verdict.findings
    assert (finding.code, finding.nodes) == ("node-lost", (3,))


def test_clock_that_is_ahead_is_named() -> None:
    skewed = pair_changed(cluster_of(), {0, 2}, clock_offset=4.2)
    [finding] = judge(job_config(), skewed).findings
    assert (finding.code, finding.nodes) == ("clock-skew", (2,))
    assert "4.2 s ahead" in finding.message


def test_loader_that_cannot_keep_up_is_named() -> None:
    healthy = cluster_of()
    slow = replace(healthy.speeds[0], decoded_images=100.0)
    verdict = judge(job_config(), replace(healthy, speeds={**healthy.speeds, 0: slow}))
    [finding] = verdict.findings
    assert finding.code == "loader-slow"
    # 1.8 it/s × 32 × 2 × 8 processes
    assert "100 images/s and training needs 922" in finding.message


def test_unfinished_parts_are_findings_and_the_rest_is_kept() -> None:
    cut = cluster_of(
        world=None, timed_out=True, errors={"world": "rank 3: timed out"}, lost_ranks={3: "pairs-2"}
    )
    verdict = judge(job_config(), cut)
    assert {"part-failed", "timed-out", "node-lost"} <= codes(verdict)
    assert "algo-1 (i-00000000) was lost before pairs-2: rank 3" in verdict.sentence
    assert verdict.level == "fail"
    assert verdict.prediction is None
    assert any(part.name == "matrix products" for part in verdict.figures)


def test_single_node_is_judged_by_its_own_links() -> None:
    alone = cluster_of(nodes=1)
    world = group(GpuNetwork(1, 8, 50e9, 50e9), "world")
    verdict = judge(
        job_config(), replace(alone, world=world, intra_node={}, inter_node={}, pairs=())
    )
    assert "within-nodes-slow" in codes(verdict)
    assert verdict.sentence.startswith("within nodes at 22% of expected")


def test_later_result_is_compared_and_flagged_nodes_are_remembered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = job_config()
    paths = SageMakerPaths(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    bad = pair_changed(cluster_of(), {2}, bandwidth=TYPICAL / 80)
    conclude(settings, bad, paths, EventLog(node=0, rank=0))
    conclude(settings, cluster_of(rate=0.69 * TYPICAL), paths, EventLog(node=0, rank=0))
    printed = capsys.readouterr().out
    assert "31% slower than in the last result" in printed
    assert "algo-3 (i-00000002) was flagged before: node-slow" in printed
    first, second = read_results([tmp_path / "checkpoints" / FOLDER])
    assert first["flagged_nodes"] == [
        {
            "node": "algo-3 (i-00000002)",
            "instance_id": "i-00000002",
            "code": "node-slow",
            "level": "warn",
        }
    ]
    assert second["verdict"]["level"] == "warn"
    point = second["measurements"]["world"]["all_reduce"][-1]
    assert point["busbw"] == pytest.approx(point["algbw"] * 2 * 31 / 32)


def test_results_of_other_clusters_and_damaged_ones_are_ignored(tmp_path: Path) -> None:
    document = result_document(job_config(), cluster_of(), judge(job_config(), cluster_of()))
    write_result(tmp_path, document)
    (tmp_path / "damaged.json").write_text("{")
    (tmp_path / "other.json").write_text('{"version": 99}')
    known = parse_results(read_results([tmp_path, tmp_path / "missing"]))
    assert [workload.nodes for workload in known] == [4]
    other = EarlierResult(**asdict(known[0]) | {"nodes": 8, "flagged": ()})
    slow = cluster_of(rate=0.5 * TYPICAL)
    assert codes(judge(job_config(), slow, [other])) == codes(judge(job_config(), slow))


@pytest.mark.parametrize(
    ("mode", "hosts", "instance_type", "effective"),
    [
        ("auto", 4, "ml.p4d.24xlarge", "warn"),
        ("auto", 1, "ml.p4d.24xlarge", "off"),
        ("auto", 4, None, "off"),
        ("fail", 1, None, "fail"),
        ("off", 4, "ml.p4d.24xlarge", "off"),
    ],
)
def test_auto_mode_warns_on_several_instances(
    mode: str, hosts: int, instance_type: str | None, effective: str
) -> None:
    names = tuple(f"algo-{number + 1}" for number in range(hosts))
    resources = ResourceConfig(names[0], names, instance_type)
    assert effective_mode(job_config(mode=mode), resources) == effective


def test_unfit_nodes_have_the_names_of_their_machines() -> None:
    def flagged(node: str, machine: str | None, level: str) -> dict[str, str | None]:
        return {"node": node, "instance_id": machine, "code": "ecc-errors", "level": level}

    nodes = [
        flagged("gpu-0 (gpu-0)", "gpu-0", "fail"),
        flagged("gpu-1", None, "fail"),
        flagged("gpu-2", "gpu-2", "warn"),
    ]
    documents = [
        {"time": "2026-11-01T00:00:00Z", "flagged_nodes": [flagged("old", "old", "fail")]},
        {"time": "2026-11-02T00:00:00Z", "flagged_nodes": nodes},
    ]
    assert unfit_nodes(documents, "2026-11-02T00:00:00Z") == ["gpu-0", "gpu-1"]

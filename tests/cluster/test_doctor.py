"""Real doctor processes over real connections: what they find, and that they always end."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
from sm_train.entrypoints.records.doctor_results import FOLDER, read_results

from tests.support.cluster.doctor_cluster import DoctorCluster, codes
from tests.support.cluster.doctor_support import cluster_on, tiny_job
from tests.support.cluster.network_namespaces import (
    network_namespaces,
    unavailable_reason,
)
from tests.support.cluster.training_jobs import write_shards
from tests.support.deadline import DEADLINE

pytestmark = pytest.mark.integration


@pytest.mark.slow
def test_the_one_slow_link_of_four_hosts_is_found(tmp_path: Path) -> None:
    if reason := unavailable_reason():
        pytest.skip(reason)
    with network_namespaces(4) as hosts:
        for host in range(4):
            hosts.limit_egress(host, 400)
        hosts.limit_link(1, 3, 40)
        result, output = cluster_on(tmp_path, hosts).run()
    pairs = {tuple(pair["nodes"]): pair for pair in result["measurements"]["pairs"]}
    passes = {nodes: pair["passes"] for nodes, pair in pairs.items()}
    findings = [(finding["code"], finding["nodes"]) for finding in result["verdict"]["findings"]]
    network_findings = [
        finding for finding in findings if finding[0].startswith(("link", "node-slow", "pairs"))
    ]
    assert network_findings == [("link-slow", ["algo-2", "algo-4"])], passes
    assert "algo-2 and algo-4" in output
    assert len(pairs) == 6
    mbit = {nodes: pair["bandwidth"] * 8 / 1e6 for nodes, pair in pairs.items()}
    # Token buckets and socket buffers hold a part of a short message.
    assert mbit.pop((1, 3)) < 100, passes
    assert min(mbit.values()) > 120, passes
    assert max(mbit.values()) < 600, passes
    measurements = [value for value in passes[1, 3] if value is not None]
    assert len(measurements) > 1, "the slow link was measured again"
    points = result["measurements"]["world"]["all_reduce"]
    assert points[0]["bytes"] == 1024
    for point in points:
        assert point["busbw"] == pytest.approx(point["algbw"] * 2 * 3 / 4)


@pytest.mark.slow
def test_a_link_cut_during_a_sweep_ends_with_partial_results(tmp_path: Path) -> None:
    if reason := unavailable_reason():
        pytest.skip(reason)
    with network_namespaces(3) as hosts:
        hosts.limit_link(1, 2, 80)
        finished = threading.Event()

        def cut_when_busy() -> None:
            """Cut it once a megabyte was sent, which only the sweep over all ranks does."""
            while not finished.is_set() and hosts.sent_bytes(1, "to2") < 2**20:
                time.sleep(0.02)
            hosts.cut_link(1, 2)

        cutter = threading.Thread(target=cut_when_busy)
        cutter.start()
        try:
            result, _ = cluster_on(tmp_path, hosts, timeout=45).run(timeout=DEADLINE)
        finally:
            finished.set()
            cutter.join()
    assert result["measurements"]["seconds"] <= 50
    assert result["verdict"]["level"] == "fail"
    findings = {finding["code"]: finding for finding in result["verdict"]["findings"]}
    assert "part-failed" in findings
    assert findings["link-cut"]["nodes"] == ["algo-2", "algo-3"]
    measured = {
        tuple(pair["nodes"]) for pair in result["measurements"]["pairs"] if not pair["error"]
    }
    assert {(0, 1), (0, 2)} <= measured
    assert len(result["measurements"]["speeds"]) == 3
    # The sizes before the cut.
    assert result["measurements"]["world"]["all_reduce"][0]["bytes"] == 1024


@pytest.mark.slow
def test_a_missing_node_and_one_with_another_world_size_are_named(tmp_path: Path) -> None:
    cluster = DoctorCluster(
        tmp_path / "cluster",
        tiny_job(tmp_path / "job", timeout=30),
        3,
        missing_nodes=[2],
        variables={1: {"WORLD_SIZE": "4"}},
    )
    result, output = cluster.run()
    assert {"node-missing", "world-size"} <= codes(result)
    assert "algo-3 never joined: rank 2 did not answer within 10 s" in output
    assert "security group" in output
    assert "algo-2: started for 4 processes, rank 0 for 3" in output
    # The nodes that joined are measured all the same, and get the verdict.
    assert result["measurements"]["world"]["ranks"] == 2
    verdicts = [json.loads(cluster.verdict(node).read_text()) for node in (0, 1)]
    assert verdicts[0] == verdicts[1]
    assert verdicts[0]["level"] == "fail"


@pytest.mark.slow
def test_without_the_first_node_the_others_end_and_report_it(tmp_path: Path) -> None:
    cluster = DoctorCluster(
        tmp_path / "cluster", tiny_job(tmp_path / "job", timeout=30), 2, missing_nodes=[0]
    )
    output = cluster.start(1).communicate(timeout=DEADLINE)[0]
    verdict = json.loads(cluster.verdict(1).read_text())
    assert verdict["level"] == "fail"
    assert "algo-2 did not reach algo-1" in verdict["sentence"]
    assert "security group" in output
    assert '"code": "rendezvous-failed"' in output


def test_training_does_not_start_on_an_unfit_cluster(tmp_path: Path) -> None:
    """Run two processes where the instance has eight GPUs; torchrun's own store is used."""
    job = tiny_job(tmp_path, timeout=30, mode="fail")
    write_shards(job.train_channel, shards=1, each=10)
    config = tmp_path / "input" / "config"
    config.mkdir(parents=True)
    resources = {"current_host": "algo-1", "hosts": ["algo-1"]}
    resources["current_instance_type"] = "ml.p4d.24xlarge"
    (config / "resourceconfig.json").write_text(json.dumps(resources))
    expected = {
        "instance_type": "ml.p4d.24xlarge",
        "steps_per_second": 2000.0,
        "speed_source": "stated",
        "usd_per_instance_hour": 30.0,
        "model_plan": None,
    }
    document = json.loads((job.bundle / "job.json").read_text())
    document["8px"]["expected"] = expected
    (job.bundle / "job.json").write_text(json.dumps(document))
    code, events, output = job.run(processes=2)
    assert code == 1
    [doctor] = [event for event in events if event["kind"] == "doctor"]
    assert doctor["level"] == "fail"
    assert {"world-size", "gpus-missing", "too-slow"} <= set(doctor["findings"])
    assert "× slower → $" in doctor["sentence"]
    assert "the doctor finds the cluster unfit: " in job.failure
    assert not [event for event in events if event["kind"] in ("start", "step")], output
    [stored] = read_results([job.checkpoints / FOLDER])
    assert stored["verdict"]["sentence"] == doctor["sentence"]

"""Real doctor processes over real connections: what they find, and that they always end."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
from sm_train.entrypoints.doctor.history import FOLDER, results

from tests.support.cluster.doctor_cluster import Cluster, codes
from tests.support.cluster.network_namespaces import INTERFACE, Hosts, hosts, why_not
from tests.support.cluster.training_jobs import Job, tiny_run, write_shards


def tiny_job(folder: Path, limit: int = 60, mode: str = "auto") -> Job:
    config = tiny_run(max_steps=2)
    doctor = config.doctor.model_copy(update={"timeout": limit, "mode": mode})
    return Job(folder, config.model_copy(update={"doctor": doctor}))


def over(folder: Path, here: Hosts, limit: int = 60) -> Cluster:
    """A cluster with a node on each host."""
    count = len(here.names)
    prefixes = [here.prefix(host) for host in range(count)]
    return Cluster(
        folder / "cluster",
        tiny_job(folder / "job", limit),
        count,
        master=here.address(0),
        prefixes=prefixes,
        interface=INTERFACE,
    )


def test_the_one_slow_link_of_four_hosts_is_found(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    with hosts(4) as here:
        for host in range(4):
            here.limit(host, 400)
        here.limit_link(1, 3, 40)
        result, text = over(tmp_path, here).run()
    [finding] = [one for one in result["verdict"]["findings"] if "link" in one["code"]]
    assert (finding["code"], finding["nodes"]) == ("link-slow", ["algo-2", "algo-4"])
    assert "algo-2 and algo-4" in text
    rates = {tuple(one["nodes"]): one["bandwidth"] * 8 / 1e6 for one in result["evidence"]["pairs"]}
    assert len(rates) == 6
    # Buckets and buffers hold a part of a short message.
    assert rates.pop((1, 3)) < 100
    assert min(rates.values()) > 120
    assert max(rates.values()) < 600
    points = result["evidence"]["world"]["all_reduce"]
    assert points[0]["bytes"] == 1024
    for one in points:
        assert one["busbw"] == pytest.approx(one["algbw"] * 2 * 3 / 4)


def test_a_link_cut_in_mid_sweep_ends_with_what_is_known(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    with hosts(3) as here:
        here.limit_link(1, 2, 80)
        done = threading.Event()

        def cut_when_busy() -> None:
            """Once a megabyte went over the link, which only the sweep over all ranks sends."""
            while not done.is_set() and here.sent(1, "to2") < 2**20:
                time.sleep(0.02)
            here.cut_link(1, 2)

        cutter = threading.Thread(target=cut_when_busy)
        cutter.start()
        try:
            result, _ = over(tmp_path, here, limit=45).run(timeout=120)
        finally:
            done.set()
            cutter.join()
    assert result["evidence"]["seconds"] <= 50
    assert result["verdict"]["level"] == "fail"
    found = {one["code"]: one for one in result["verdict"]["findings"]}
    assert "part-failed" in found
    assert found["link-cut"]["nodes"] == ["algo-2", "algo-3"]
    known = {tuple(one["nodes"]) for one in result["evidence"]["pairs"] if not one["failed"]}
    assert {(0, 1), (0, 2)} <= known
    assert len(result["evidence"]["speeds"]) == 3
    # The sizes before the cut.
    assert result["evidence"]["world"]["all_reduce"][0]["bytes"] == 1024


@pytest.mark.slow
def test_a_node_that_never_joins_and_one_for_another_world_are_named(tmp_path: Path) -> None:
    cluster = Cluster(
        tmp_path / "cluster",
        tiny_job(tmp_path / "job", limit=30),
        3,
        absent=[2],
        variables={1: {"WORLD_SIZE": "4"}},
    )
    result, text = cluster.run()
    assert {"node-absent", "world-size"} <= codes(result)
    assert "algo-3 never joined: rank 2 did not answer within 10 s" in text
    assert "security group" in text
    assert "algo-2: started for 4 processes, rank 0 for 3" in text
    # Those who came are measured all the same, and hear the verdict.
    assert result["evidence"]["world"]["ranks"] == 2
    verdicts = [json.loads(cluster.verdict(node).read_text()) for node in (0, 1)]
    assert verdicts[0] == verdicts[1]
    assert verdicts[0]["level"] == "fail"


@pytest.mark.slow
def test_without_the_first_node_the_others_end_and_say_so(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "cluster", tiny_job(tmp_path / "job", limit=30), 2, absent=[0])
    alone = cluster.start(1)
    text = alone.communicate(timeout=90)[0]
    verdict = json.loads(cluster.verdict(1).read_text())
    assert verdict["level"] == "fail"
    assert "algo-2 did not reach algo-1" in verdict["sentence"]
    assert "security group" in text


def test_an_unfit_cluster_is_not_trained_on(tmp_path: Path) -> None:
    """Two processes where the machine has eight GPUs; by the launcher's own store."""
    job = tiny_job(tmp_path, limit=30, mode="fail")
    write_shards(job.train_channel, shards=1, each=10)
    config = tmp_path / "input" / "config"
    config.mkdir(parents=True)
    hosts_file = {"current_host": "algo-1", "hosts": ["algo-1"]}
    hosts_file["current_instance_type"] = "ml.p4d.24xlarge"
    (config / "resourceconfig.json").write_text(json.dumps(hosts_file))
    expected = {
        "instance_type": "ml.p4d.24xlarge",
        "accelerators": 8,
        "efa": True,
        "network_gbps": 400,
        "nvlink_gbytes": 300,
        "bf16_tflops": 312,
        "steps_per_second": 2000.0,
        "speed_source": "stated",
        "usd_per_instance_hour": 30.0,
    }
    document = json.loads((job.bundle / "job.json").read_text())
    document["8px"]["expected"] = expected
    (job.bundle / "job.json").write_text(json.dumps(document))
    code, events, text = job.run(processes=2)
    assert code == 1
    [told] = [event for event in events if event["kind"] == "doctor"]
    assert told["level"] == "fail"
    assert {"world-size", "gpus-missing", "too-slow"} <= set(told["findings"])
    assert "× slower → $" in told["sentence"]
    assert "the doctor finds the cluster unfit: " in job.failure
    assert not [event for event in events if event["kind"] in ("start", "step")], text
    [kept] = results([job.checkpoints / FOLDER])
    assert kept["verdict"]["sentence"] == told["sentence"]

"""What a manifest says, compared with golden files, and one-line errors."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml
from sm_train.entrypoints.job_interface.node_description import (
    FAILED_AFTER_PROGRESS,
    JOB_VARIABLE,
    MACHINE_VARIABLE,
    NODE_VARIABLE,
    NodeDescription,
)
from sm_train.estimators.config.load import RunFileError, load_run
from sm_train.estimators.manifests.problem import ManifestError
from sm_train.estimators.manifests.stage_job import Target
from sm_train.toolkit.checks.finding import Finding, Subject
from sm_train.toolkit.checks.preflight import offline_findings
from sm_train.toolkit.planning.run_price import estimate_run
from sm_train.toolkit.run_file.placeholders import find_placeholders

from tests.estimators.manifests.documents import (
    IMAGE,
    INFINIBAND,
    TARGETS,
    FixedBundle,
    config,
    environment,
    infiniband_20b,
    manifest,
    only,
    pods,
    preset,
)
from tests.support import run_documents

GOLDEN = Path(__file__).parent / "golden"
KUBERNETES: tuple[Target, ...] = tuple(target for target in TARGETS if target != "slurm")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["bria-2.0", "default", "demo", "tiny-pixels"])
def test_manifests_of_presets_equal_their_golden_files(name: str, target: Target) -> None:
    """UPDATE_GOLDEN=1 writes them again; `git diff` shows what changed."""
    text = manifest(preset(name), target).text
    file = GOLDEN / f"{name}.{target}.{'sh' if target == 'slurm' else 'yaml'}"
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text()


@pytest.mark.parametrize("target", KUBERNETES)
def test_yaml_holds_the_objects(target: Target) -> None:
    found = manifest(config(), target)
    assert tuple(yaml.safe_load_all(found.text)) == found.objects
    assert found.text == manifest(config(), target).text


@pytest.mark.parametrize("target", KUBERNETES)
def test_pods_fetch_and_verify_the_bundle_and_identify_the_run(target: Target) -> None:
    for pod in pods(manifest(config(), target, "512px")):
        [fetch] = pod["spec"]["initContainers"]
        values = {variable["name"]: variable["value"] for variable in fetch["env"]}
        assert values["BUNDLE_SHA256"] == FixedBundle().sha256
        assert values["BUNDLE_URI"].startswith("s3://ai-bucket/demo/code/")
        assert "sha256sum -c" in fetch["command"][-1]
        annotations = pod["metadata"]["annotations"]
        assert annotations["sm-train/run"] == "demo"
        assert annotations["sm-train/stage"] == "512px"
        assert annotations["sm-train/bundle"] == FixedBundle().sha256
        assert pod["spec"]["terminationGracePeriodSeconds"] == 120
        assert pod["spec"]["containers"][0]["image"] == IMAGE


@pytest.mark.parametrize("target", KUBERNETES)
def test_pods_request_gpus_efa_and_huge_pages(target: Target) -> None:
    for pod in pods(manifest(config(), target)):
        resources = pod["spec"]["containers"][0]["resources"]
        assert resources["limits"] == {
            "nvidia.com/gpu": "8",
            "vpc.amazonaws.com/efa": "4",
            "hugepages-2Mi": "5120Mi",
        }
        # Kubernetes refuses huge pages without a request for CPU or memory.
        assert resources["requests"].keys() == {"cpu", "memory", *resources["limits"]}
        [shm] = [volume for volume in pod["spec"]["volumes"] if volume["name"] == "dshm"]
        assert shm["emptyDir"] == {"medium": "Memory"}
    single = config(stages=[run_documents.stage(instances=1)])
    [pod] = pods(manifest(single, target))
    assert "vpc.amazonaws.com/efa" not in pod["spec"]["containers"][0]["resources"]["limits"]


def test_operators_keys() -> None:
    run = config(kubernetes={"image": IMAGE, "max_restarts": 7, "queue": "team-a"})
    train = only(manifest(run, "trainjob"), "TrainJob")
    assert train["spec"]["trainer"]["numNodes"] == 4
    assert train["spec"]["trainer"]["numProcPerNode"] == 8
    assert train["spec"]["runtimeRef"]["name"] == "demo-256px"
    assert train["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    torch = only(manifest(run, "pytorchjob"), "PyTorchJob")["spec"]
    assert torch["runPolicy"]["backoffLimit"] == 7
    replicas = torch["pytorchReplicaSpecs"]
    assert (replicas["Master"]["replicas"], replicas["Worker"]["replicas"]) == (1, 3)
    assert replicas["Worker"]["restartPolicy"] == "OnFailure"
    hyperpod = only(manifest(run, "hyperpod-eks"), "HyperPodPyTorchJob")
    annotations = hyperpod["metadata"]["annotations"]
    assert annotations["sagemaker.amazonaws.com/enable-job-auto-resume"] == "true"
    assert annotations["sagemaker.amazonaws.com/job-max-retry-count"] == "7"
    assert hyperpod["spec"]["runPolicy"]["jobMaxRetryCount"] == 7
    [pod] = pods(manifest(run, "hyperpod-eks"))
    assert pod["spec"]["nodeSelector"] == {"node.kubernetes.io/instance-type": "ml.p4de.24xlarge"}
    assert "Schedulable" in json.dumps(pod["spec"]["affinity"])
    assert NodeDescription.from_json(environment(pod)[NODE_VARIABLE]).launcher == "hyperpodrun"


def description(run: Any, target: Target, stage: str | None = None) -> NodeDescription:
    return NodeDescription.from_json(
        environment(pods(manifest(run, target, stage))[0])[NODE_VARIABLE]
    )


def test_channels_are_those_of_the_training_job() -> None:
    found = description(config(), "trainjob", "512px")
    assert [(channel.name, channel.path, channel.sharded) for channel in found.channels] == [
        ("train", "/mnt/s3/ai-bucket/shards", True),
        ("index", None, False),
        ("previous", None, False),
    ]
    assert found.checkpoints == "s3://ai-bucket/demo/checkpoints/512px"
    shared = config(
        kubernetes={
            "image": IMAGE,
            "data": "file-system",
            "file_system": {"claim": "fsx", "s3": "s3://ai-bucket/"},
            "checkpoints": "volume",
            "checkpoint_volume": {"claim": "fsx"},
        }
    )
    found = description(shared, "pytorchjob", "512px")
    assert [channel.path for channel in found.channels] == [
        "/mnt/data/shards",
        "/mnt/data/index.parquet",
        "/mnt/checkpoints/demo/256px/final",
    ]
    assert found.checkpoints == "/mnt/checkpoints/demo/512px"


def test_pods_know_the_name_of_their_machine() -> None:
    for target in KUBERNETES:
        for pod in pods(manifest(config(), target)):
            [machine] = [
                variable
                for variable in pod["spec"]["containers"][0]["env"]
                if variable["name"] == MACHINE_VARIABLE
            ]
            assert machine["valueFrom"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}


def test_secrets_are_references() -> None:
    run = config(kubernetes={"image": IMAGE, "secrets": {"SM_TRAIN_WEBHOOK": "alerts/hook"}})
    [pod] = pods(manifest(run, "trainjob"))
    secret = {"secretKeyRef": {"name": "alerts", "key": "hook"}}
    assert {"name": "SM_TRAIN_WEBHOOK", "valueFrom": secret} in pod["spec"]["containers"][0]["env"]


@pytest.mark.parametrize("target", KUBERNETES)
def test_infiniband_needs_no_edit_of_the_pods(target: Target) -> None:
    run = config(kubernetes={"image": IMAGE, "network": INFINIBAND, "memory": "1800Gi"})
    for pod in pods(manifest(run, target)):
        container = pod["spec"]["containers"][0]
        devices = {"nvidia.com/gpu": "8", "rdma/hca_shared_devices_a": "8", "memory": "1800Gi"}
        assert container["resources"]["limits"] == devices
        assert container["resources"]["requests"].items() >= devices.items()
        assert container["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
        assert (
            environment(pod).items()
            >= {
                "NCCL_SOCKET_IFNAME": "=eth0",
                "GLOO_SOCKET_IFNAME": "eth0",
                "NCCL_IB_HCA": "=mlx5_0,mlx5_3",
                "NCCL_IB_TC": "106",
            }.items()
        )
        networks = pod["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"]
        assert networks == "research/ib0, ib1"
        assert "hostNetwork" not in pod["spec"]


@pytest.mark.parametrize("target", KUBERNETES)
@pytest.mark.parametrize("stage", ["256px", "512px", "1024px"])
def test_preset_of_20_b_needs_no_edit_of_its_manifest(target: Target, stage: str) -> None:
    """Beyond the values that `init` asks for: 16 nodes of 8 GPUs with RDMA, and a disk."""
    run = infiniband_20b()
    assert find_placeholders(run) == []
    found = manifest(run, target, stage)
    for pod in pods(found):
        container = pod["spec"]["containers"][0]
        limits = container["resources"]["limits"]
        assert limits["nvidia.com/gpu"] == "8"
        assert limits["rdma/ib"] == "1"
        assert container["image"] == "ghcr.io/team/train:1"
        assert container["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
        assert not pod["spec"]["nodeSelector"]
        assert pod["spec"]["serviceAccountName"] == "default"
        [work] = [volume for volume in pod["spec"]["volumes"] if volume["name"] == "work"]
        assert work["emptyDir"] == {"sizeLimit": "4Ti"}
        node = NodeDescription.from_json(environment(pod)[NODE_VARIABLE])
        assert (node.nodes, node.processes) == (16, 8)
    assert "vpc.amazonaws.com/efa" not in found.text
    assert "example.com" not in found.text
    assert "my-bucket" not in found.text


def test_preset_of_20_b_fits_into_its_gpus_and_disks(tmp_path: Path) -> None:
    run = infiniband_20b()
    subject = Subject(run, "us-east-1", estimate_run(run, "us-east-1"), tmp_path)
    errors = [found for found in offline_findings(subject, date(2026, 11, 1)) if is_error(found)]
    assert errors == []


def is_error(found: Finding) -> bool:
    # There are no shards on this machine.
    return found.level == "error" and found.code != "no-shards"


def test_variables_of_the_run_file_replace_those_of_the_network() -> None:
    cluster = {
        "instance_type": "ml.p4de.24xlarge",
        "environment": {"NCCL_SOCKET_IFNAME": "bond0"},
    }
    run = config(kubernetes={"image": IMAGE, "network": INFINIBAND}, cluster=cluster)
    [pod] = pods(manifest(run, "trainjob"))
    assert environment(pod)["NCCL_SOCKET_IFNAME"] == "bond0"


def test_pods_in_the_network_of_their_node_find_services() -> None:
    network = {"kind": "roce", "resources": {"rdma/roce": 1}, "host_network": True, "gid_index": 3}
    run = config(kubernetes={"image": IMAGE, "network": network | {"ipc_lock": False}})
    [pod] = pods(manifest(run, "hyperpod-eks"))
    assert pod["spec"]["hostNetwork"] is True
    assert pod["spec"]["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert environment(pod)["NCCL_IB_GID_INDEX"] == "3"
    assert "securityContext" not in pod["spec"]["containers"][0]


def test_the_init_container_reaches_the_same_store_as_the_training() -> None:
    """An S3-compatible store needs its endpoint and keys for the code, too."""
    cluster = {
        "instance_type": "ml.p4de.24xlarge",
        "environment": {"AWS_ENDPOINT_URL_S3": "https://s3.example.com"},
    }
    secrets = {"AWS_SECRET_ACCESS_KEY": "store/secret"}
    run = config(kubernetes={"image": IMAGE, "secrets": secrets}, cluster=cluster)
    [pod] = pods(manifest(run, "trainjob"))
    [fetch] = pod["spec"]["initContainers"]
    variables = {variable["name"]: variable for variable in fetch["env"]}
    assert variables["AWS_ENDPOINT_URL_S3"]["value"] == "https://s3.example.com"
    reference = {"secretKeyRef": {"name": "store", "key": "secret"}}
    assert variables["AWS_SECRET_ACCESS_KEY"]["valueFrom"] == reference
    assert variables["BUNDLE_URI"]["value"].startswith("s3://ai-bucket/demo/code/")


def work_volume(**volume: str) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Return the source of the work volume, the limits, and the init container's command."""
    [pod] = pods(manifest(config(kubernetes={"image": IMAGE, "work_volume": volume}), "trainjob"))
    [found] = [volume for volume in pod["spec"]["volumes"] if volume.pop("name") == "work"]
    [fetch] = pod["spec"]["initContainers"]
    return found, pod["spec"]["containers"][0]["resources"]["limits"], fetch["command"][-1]


def test_the_pods_own_disk_has_a_size() -> None:
    source, limits, command = work_volume(size="8Ti")
    assert source == {"emptyDir": {"sizeLimit": "8Ti"}}
    assert limits["ephemeral-storage"] == "8Ti"
    assert command.startswith("aws s3 cp")
    source, limits, command = work_volume(size="8Ti", storage_class="nvme")
    claim = source["ephemeral"]["volumeClaimTemplate"]["spec"]
    assert claim["storageClassName"] == "nvme"
    assert claim["resources"] == {"requests": {"storage": "8Ti"}}
    assert "ephemeral-storage" not in limits
    source, limits, command = work_volume(host_path="/mnt/nvme/")
    assert source["hostPath"] == {"path": "/mnt/nvme/demo-256px", "type": "DirectoryOrCreate"}
    assert command.startswith("rm -rf /opt/ml/* ")


def test_pods_are_scheduled_as_the_run_file_says() -> None:
    kubernetes = {
        "image": IMAGE,
        "scheduler": "volcano",
        "priority": "high",
        "topology": {"label": "rack"},
        "node_labels": {"gpu": "h100"},
    }
    [pod] = pods(manifest(config(kubernetes=kubernetes), "hyperpod-eks"))
    assert pod["spec"]["schedulerName"] == "volcano"
    assert pod["spec"]["priorityClassName"] == "high"
    assert pod["spec"]["nodeSelector"] == {"gpu": "h100"}
    assert pod["spec"]["affinity"].keys() == {"nodeAffinity", "podAffinity"}
    [term] = pod["spec"]["affinity"]["podAffinity"].popitem()[1]
    assert term["topologyKey"] == "rack"
    assert term["labelSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    [queued] = pods(manifest(config(kubernetes=kubernetes | {"queue": "team-a"}), "trainjob"))
    annotations = queued["metadata"]["annotations"]
    assert annotations["kueue.x-k8s.io/podset-required-topology"] == "rack"
    assert "affinity" not in queued["spec"]


def test_drains_and_preemptions_are_not_counted_as_restarts() -> None:
    """JobSet counts a job that its pod failure policy has failed apart from others."""
    runtime = only(manifest(config(), "trainjob"), "TrainingRuntime")
    spec = runtime["spec"]["template"]["spec"]
    [rule] = spec["failurePolicy"]["rules"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    [job] = spec["replicatedJobs"]
    disruption, stopped = job["template"]["spec"]["podFailurePolicy"]["rules"]
    assert disruption["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    # An attempt that stored a checkpoint before it failed is not counted either.
    assert stopped["onExitCodes"]["values"] == [FAILED_AFTER_PROGRESS, 143]
    # A policy needs pods that are not restarted in place.
    assert job["template"]["spec"]["template"]["spec"]["restartPolicy"] == "Never"


def test_batch_script_is_valid_bash(tmp_path: Path) -> None:
    text = manifest(config(), "slurm").text
    script = tmp_path / "job.sbatch"
    script.write_text(text)
    subprocess.run(["bash", "-n", script], check=True)
    # Only HyperPod's srun has the option.
    assert "if [ -d /opt/sagemaker_cluster ]; then resume=(--auto-resume=1); fi" in text
    assert 'srun "${resume[@]}" ' in text
    assert "#SBATCH --nodes=4" in text
    assert "#SBATCH --signal=TERM@120" in text
    own = config(slurm={"shared_folder": "/home/x", "container": False})
    assert "container" not in manifest(own, "slurm").text


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        ("example.com/own:1", "example.com#own:1"),
        ("nvcr.io/nvidia/pytorch:26.01-py3", "nvcr.io#nvidia/pytorch:26.01-py3"),
        ("localhost/own", "localhost#own"),
        ("registry:5000/own:1", "registry:5000#own:1"),
        ("pytorch/pytorch:2.13", "pytorch/pytorch:2.13"),
        ("ubuntu", "ubuntu"),
        ("nvcr.io#nvidia/pytorch", "nvcr.io#nvidia/pytorch"),
        ("/fsx/images/train.sqsh", "/fsx/images/train.sqsh"),
    ],
)
def test_images_are_written_as_enroot_reads_them(image: str, expected: str) -> None:
    own = config(slurm={"shared_folder": "/fsx", "image": image})
    lines = manifest(own, "slurm").text.splitlines()
    words = shlex.split(next(line for line in lines if line.startswith("srun ")))
    found = next(word for word in words if word.startswith("--container-image="))
    assert found == f"--container-image={expected}"


def test_variables_are_set_before_the_first_command() -> None:
    """So that an S3-compatible store is reached by the command that fetches the code, too."""
    cluster = {
        "instance_type": "ml.p4de.24xlarge",
        "environment": {"AWS_ENDPOINT_URL_S3": "https://s3.example.com"},
    }
    text = manifest(config(cluster=cluster), "slurm").text
    assert text.index("export AWS_ENDPOINT_URL_S3=") < text.index("boto3.client")


SYNCED = {"image": IMAGE, "data": "sync"}
MISTAKES: dict[str, tuple[Target, dict[str, Any], str]] = {
    "no image": ("trainjob", {"kubernetes": {}}, "kubernetes.image: not set"),
    "no image on slurm": (
        "slurm",
        {"kubernetes": {}, "slurm": {"shared_folder": "/fsx"}},
        "slurm.image: not set",
    ),
    "no volume": (
        "pytorchjob",
        {"kubernetes": {"image": IMAGE, "checkpoints": "volume"}},
        "kubernetes.checkpoint_volume: not set",
    ),
    "no file system": (
        "pytorchjob",
        {"kubernetes": {"image": IMAGE, "data": "file-system"}},
        "kubernetes.file_system: not set",
    ),
    "data elsewhere": (
        "pytorchjob",
        {
            "kubernetes": {
                "image": IMAGE,
                "data": "file-system",
                "file_system": {"claim": "fsx", "s3": "s3://other/"},
            }
        },
        "kubernetes.file_system.s3: s3://other/: does not contain channel train",
    ),
    "efa on a type without it": (
        "trainjob",
        {
            "kubernetes": SYNCED | {"efa": 1},
            "cluster": {"instance_type": "ml.g5.xlarge"},
        },
        "kubernetes.efa: 1: ml.g5.xlarge has no EFA",
    ),
    "too many interfaces": (
        "trainjob",
        {"kubernetes": SYNCED | {"efa": 5}},
        "kubernetes.efa: 5: ml.p4de.24xlarge has 4 EFA interfaces",
    ),
    "infiniband without devices": (
        "trainjob",
        {"kubernetes": SYNCED | {"network": {"kind": "infiniband"}}},
        "kubernetes.network.resources: not set; infiniband needs the RDMA resource",
    ),
    "long name": ("trainjob", {"name": "r" * 49}, "-node-0-3 has 64 characters"),
    "digit": ("trainjob", {"name": "2d"}, "name: 2d: starts with a digit"),
    "trainium": (
        "trainjob",
        {"cluster": {"instance_type": "ml.trn1.32xlarge"}},
        "cluster.instance_type: ml.trn1.32xlarge: has no GPU",
    ),
    "no bucket": ("trainjob", {"bucket": None, "role": None}, "bucket: not set"),
    "no shared folder": ("slurm", {"slurm": {}}, "slurm.shared_folder: not set"),
    "secret and variable": (
        "trainjob",
        {"kubernetes": SYNCED | {"secrets": {"NCCL_DEBUG": "a/b"}}},
        "kubernetes.secrets.NCCL_DEBUG: is also a variable",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_run_that_does_not_fit_is_a_one_line_error(mistake: str) -> None:
    target, changes, expected = MISTAKES[mistake]
    with pytest.raises(ManifestError) as caught:
        manifest(config(**changes), target)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


RUN_FILE_MISTAKES = {
    "kubernetes: {imge: x}": "kubernetes.imge: unknown key; did you mean image?",
    "slurm: {option: {}}": "slurm.option: unknown key; did you mean options?",
    "slurm: {options: {qos: 'a; b'}}": "slurm.options.qos: 'a; b': must be letters",
    "kubernetes: {labels: {team: 'a b'}}": "kubernetes.labels.team: 'a b': must be letters",
    "kubernetes: {namespace: Team_A}": "kubernetes.namespace: 'Team_A': must be a Kubernetes name",
    "kubernetes: {namespace: " + "a" * 64 + "}": "has 64 characters, and Kubernetes allows 63",
    "kubernetes: {checkpoint_volume: {storage_class: a, size: 64 GB}}": (
        "kubernetes.checkpoint_volume.size: '64 GB': must be a Kubernetes quantity"
    ),
    "kubernetes: {work_volume: {storage_class: nvme}}": (
        "kubernetes.work_volume.size: is required by storage_class"
    ),
    "kubernetes: {work_volume: {size: 1Ti, host_path: /mnt}}": (
        "kubernetes.work_volume.size: write a size, or else a host_path"
    ),
    "kubernetes: {network: {adapters: ['mlx5 0']}}": "kubernetes.network.adapters[0]: 'mlx5 0'",
    "kubernetes: {checkpoint_volume: {}}": "kubernetes.checkpoint_volume.claim: write the name",
    "slurm: {data: shared}": "slurm.data_folder: is required by data: shared",
    "slurm: {shared_folder: '/fsx/$HOME'}": "must be a path of letters, digits",
}


@pytest.mark.parametrize("section", RUN_FILE_MISTAKES)
def test_mistakes_of_the_sections_name_key_and_fix(tmp_path: Path, section: str) -> None:
    document = {**run_documents.run(), **yaml.safe_load(section)}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(document))
    with pytest.raises(RunFileError) as caught:
        load_run(file)
    [problem] = caught.value.problems
    assert RUN_FILE_MISTAKES[section] in str(caught.value)
    assert "\n" not in str(caught.value)
    assert problem.path[0] in ("kubernetes", "slurm")


def test_a_secret_by_value_is_refused_and_not_shown(tmp_path: Path) -> None:
    value = "https://hooks.slack.com/services/T00000000/B00000000/" + "X" * 24
    document = run_documents.run(kubernetes={"secrets": {"HOOK": value}})
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(document))
    with pytest.raises(RunFileError) as caught:
        load_run(file)
    assert "must be SECRET/KEY" in str(caught.value)
    assert value not in str(caught.value)


def test_options_of_sbatch_are_added_replaced_and_left_out() -> None:
    options = {"partition": "gpu", "gres": "gpu:h100:4", "exclusive": False, "requeue": True}
    own = config(slurm={"shared_folder": "/home/x", "options": options})
    lines = manifest(own, "slurm").text.splitlines()
    for line in ("--partition=gpu", "--gres=gpu:h100:4", "--requeue", "--nodes=4"):
        assert f"#SBATCH {line}" in lines
    assert not any("exclusive" in line or "gres=gpu:8" in line for line in lines)
    assert "#SBATCH --exclusive" in manifest(config(), "slurm").text.splitlines()


PATCH = {
    "metadata": {"annotations": {"owner": "someone"}},
    "spec": {
        "nodeSelector": {"pool": "h100", "node.kubernetes.io/instance-type": None},
        "tolerations": [{"operator": "Exists"}],
        "initContainers": [{"name": "fetch-code", "image": "registry/aws-cli:2"}],
        "containers": [
            {
                "name": "node",
                "resources": {"requests": {"memory": "512Gi"}, "limits": {"memory": "1Ti"}},
                "env": [{"name": "NCCL_DEBUG", "value": "WARN"}],
            },
            {"name": "agent", "image": "registry/agent:1"},
        ],
        "volumes": [{"name": "work", "emptyDir": {"sizeLimit": "2Ti"}}],
    },
}


def test_a_patch_changes_what_it_names_and_keeps_the_rest() -> None:
    patched = config(kubernetes={"image": IMAGE, "pod_patch": PATCH})
    [before], [pod] = pods(manifest(config(), "trainjob")), pods(manifest(patched, "trainjob"))
    spec = pod["spec"]
    assert pod["metadata"]["annotations"].items() > before["metadata"]["annotations"].items()
    assert spec["nodeSelector"] == {"pool": "h100"}
    assert spec["tolerations"] == [{"operator": "Exists"}]
    [fetch] = spec["initContainers"]
    assert fetch["image"] == "registry/aws-cli:2"
    assert fetch["command"] == before["spec"]["initContainers"][0]["command"]
    node, agent = spec["containers"]
    assert agent["name"] == "agent"
    assert node["resources"]["requests"]["memory"] == "512Gi"
    assert node["resources"]["limits"] == {
        **before["spec"]["containers"][0]["resources"]["limits"],
        "memory": "1Ti",
    }
    variables = {variable["name"]: variable.get("value") for variable in node["env"]}
    assert variables["NCCL_DEBUG"] == "WARN"
    assert variables.keys() == environment(before).keys() | {
        "NCCL_DEBUG",
        JOB_VARIABLE,
        MACHINE_VARIABLE,
    }
    [work] = [volume for volume in spec["volumes"] if volume["name"] == "work"]
    assert work["emptyDir"] == {"sizeLimit": "2Ti"}
    # A TrainJob states command, variables and resources itself, and no container twice.
    runtime = only(manifest(patched, "trainjob"), "TrainingRuntime")
    [replicated] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    first = replicated["template"]["spec"]["template"]["spec"]["containers"][0]
    assert first.keys() == {"name", "image", "volumeMounts"}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            {"priorityClass": "high"},
            "spec.priorityClass: Kubernetes has no such field; did you mean priorityClassName?",
        ),
        (
            {"containers": [{"name": "node", "resource": {"limits": {"cpu": "1"}}}]},
            "spec.containers[0].resource: Kubernetes has no such field; did you mean resources?",
        ),
        ({"hostNetwork": "maybe"}, "hostNetwork: input should be a valid boolean"),
        ({"tolerations": [{"operators": "Exists"}]}, "spec.tolerations[0].operators: "),
    ],
)
def test_a_patch_is_read_as_kubernetes_reads_it(spec: dict[str, Any], message: str) -> None:
    patched = config(kubernetes={"image": IMAGE, "pod_patch": {"spec": spec}})
    with pytest.raises(ManifestError, match=re.escape(f"kubernetes.pod_patch: {message}")):
        manifest(patched, "trainjob")


def test_a_patch_may_hold_affinity_and_ephemeral_volumes() -> None:
    term = {"labelSelector": {"matchLabels": {"a": "b"}}, "topologyKey": "rack"}
    weighted = {"weight": 1, "podAffinityTerm": term}
    affinity = {
        "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]},
        "podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [weighted]},
    }
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    volume = {"name": "fast", "ephemeral": {"volumeClaimTemplate": {"spec": claim}}}
    spec = {"affinity": affinity, "priorityClassName": "high", "volumes": [volume]}
    patched = config(kubernetes={"image": IMAGE, "pod_patch": {"spec": spec}})
    [pod] = pods(manifest(patched, "trainjob"))
    assert pod["spec"]["affinity"] == affinity
    assert volume in pod["spec"]["volumes"]


def test_an_element_of_a_patch_can_be_removed_and_needs_its_key() -> None:
    removed = {"spec": {"volumes": [{"name": "dshm", "$patch": "delete"}]}}
    [pod] = pods(manifest(config(kubernetes={"image": IMAGE, "pod_patch": removed}), "trainjob"))
    assert [volume["name"] for volume in pod["spec"]["volumes"] if volume["name"] == "dshm"] == []
    unnamed = {"spec": {"containers": [{"image": "other"}]}}
    with pytest.raises(ManifestError, match="an element of containers has no name"):
        manifest(config(kubernetes={"image": IMAGE, "pod_patch": unnamed}), "pytorchjob")

"""``check`` looks at a run's VPC: routes to a package index, and file systems."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from sm_train.toolkit.checks.account.vpc import file_system_findings, vpc_findings

from tests.conftest import Aws
from tests.support.fake_services import FakeRequest, FakeResponse, fake_server
from tests.support.moto_server import aws_session
from tests.support.run_documents import config

REGION = "us-east-1"
REPOSITORY = "arn:aws:codeartifact:us-east-1:210987654321:repository/own/packages"
IMAGE = "210987654321.dkr.ecr.us-east-1.amazonaws.com/own:1"


@pytest.fixture
def network(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A VPC with a private subnet and one behind an internet gateway."""
    for name, value in aws.environment.items():
        monkeypatch.setenv(name, value)
    ec2 = aws.client("ec2")
    vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    ids = {"vpc": vpc}
    for number, name in enumerate(("private", "public")):
        block = f"10.0.{number}.0/24"
        ids[name] = ec2.create_subnet(VpcId=vpc, CidrBlock=block)["Subnet"]["SubnetId"]
    gateway = ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
    ec2.attach_internet_gateway(VpcId=vpc, InternetGatewayId=gateway)
    table = ec2.create_route_table(VpcId=vpc)["RouteTable"]["RouteTableId"]
    ec2.create_route(RouteTableId=table, DestinationCidrBlock="0.0.0.0/0", GatewayId=gateway)
    ec2.associate_route_table(RouteTableId=table, SubnetId=ids["public"])
    return ids


def section(*subnets: str) -> dict[str, Any]:
    return {"subnets": list(subnets), "security_groups": ["sg-1"]}


def found(*subnets: str, **cluster: Any) -> list[tuple[str, str, str]]:
    run = config(cluster={"instance_type": "ml.p5.48xlarge", "vpc": section(*subnets)} | cluster)
    findings = vpc_findings(run, aws_session(), REGION)
    return [
        (finding.level, finding.code, finding.message)
        for finding in findings
        if finding.code != "vpc-endpoints"
    ]


def missing_endpoints(*subnets: str, **cluster: Any) -> list[str]:
    run = config(cluster={"instance_type": "ml.p5.48xlarge", "vpc": section(*subnets)} | cluster)
    findings = vpc_findings(run, aws_session(), REGION)
    messages = [finding.message for finding in findings if finding.code == "vpc-endpoints"]
    return [name for message in messages for name in message.partition(" for ")[2].split(", ")]


def test_services_without_a_route_or_an_endpoint_are_named(
    aws: Aws, network: dict[str, str]
) -> None:
    private = network["private"]
    every = ["s3", "ecr.api", "ecr.dkr", "sts", "logs", "monitoring", "sagemaker.api"]
    assert missing_endpoints(private) == every
    assert missing_endpoints(private, image=IMAGE, network_isolation=True) == ["s3"]
    kinds = dict.fromkeys(every, "Interface") | {"s3": "Gateway"}
    for name, kind in kinds.items():
        aws.client("ec2").create_vpc_endpoint(
            VpcId=network["vpc"],
            ServiceName=f"com.amazonaws.{REGION}.{name}",
            VpcEndpointType=kind,
        )
    assert missing_endpoints(private) == []


@pytest.mark.slow
def test_vpc_without_a_package_index_is_reported(aws: Aws, network: dict[str, str]) -> None:
    private, public = network["private"], network["public"]
    [(level, code, message)] = found(private, public)
    assert (level, code) == ("warning", "package-index")
    # An internet gateway does not serve a job, whose interfaces have no public address.
    assert message.startswith(f"{private}, {public}: no route to the internet")
    [(level, _, message)] = found(private, image=IMAGE)
    assert (level, "that the image lacks" in message) == ("info", True)
    assert found(private, image=IMAGE, network_isolation=True) == []
    assert found(private, package_index="https://packages.example.com/simple/") == []

    ec2 = aws.client("ec2")
    allocation = ec2.allocate_address(Domain="vpc")["AllocationId"]
    nat = ec2.create_nat_gateway(SubnetId=public, AllocationId=allocation)["NatGateway"]
    [table] = ec2.describe_route_tables(
        Filters=[
            {"Name": "vpc-id", "Values": [network["vpc"]]},
            {"Name": "association.main", "Values": ["true"]},
        ]
    )["RouteTables"]
    ec2.create_route(
        RouteTableId=table["RouteTableId"],
        DestinationCidrBlock="0.0.0.0/0",
        NatGatewayId=nat["NatGatewayId"],
    )
    assert found(private) == []


def test_codeartifact_needs_its_endpoints(aws: Aws, network: dict[str, str]) -> None:
    private = network["private"]
    api, packages = (
        f"com.amazonaws.{REGION}.codeartifact.{name}" for name in ("api", "repositories")
    )
    [(level, code, message)] = found(private, package_index=REPOSITORY)
    assert (level, code) == ("warning", "package-index")
    assert message.endswith(f"no endpoint {api} and no {packages}")
    for service in (api, packages):
        aws.client("ec2").create_vpc_endpoint(
            VpcId=network["vpc"],
            ServiceName=service,
            VpcEndpointType="Interface",
            SubnetIds=[private],
        )
    assert found(private, package_index=REPOSITORY) == []


def test_subnets_of_another_region_are_errors(network: dict[str, str]) -> None:
    assert found(network["private"], "subnet-0absent") == [
        ("error", "subnet-absent", "subnet-0absent do not exist in us-east-1")
    ]


def mounted(network: dict[str, str], **file_system: str) -> list[tuple[str, str, str]]:
    run = config(
        cluster={"instance_type": "ml.p5.48xlarge", "vpc": section(network["private"])},
        data={"uri": "s3://ai-bucket/shards/", "file_system": file_system},
    )
    findings = file_system_findings(run, aws_session(), REGION)
    return [(finding.level, finding.where, finding.message) for finding in findings]


def fake_fsx(vpc: str) -> Callable[[FakeRequest], FakeResponse]:
    """Answer DescribeFileSystems; moto's has neither a state nor a mount name."""
    systems = {
        "fs-0000000000000000a": {"Lifecycle": "AVAILABLE", "FileSystemType": "LUSTRE"},
        "fs-0000000000000000b": {"Lifecycle": "CREATING", "FileSystemType": "LUSTRE"},
        "fs-0000000000000000c": {"Lifecycle": "AVAILABLE", "FileSystemType": "ONTAP"},
    }

    def respond(request: FakeRequest) -> FakeResponse:
        [name] = json.loads(request.body)["FileSystemIds"]
        if name not in systems:
            error = {"__type": "FileSystemNotFound", "Message": name}
            return FakeResponse(400, json.dumps(error).encode())
        described = {
            "FileSystemId": name,
            "VpcId": vpc,
            "LustreConfiguration": {"MountName": "abcdbev4"},
            **systems[name],
        }
        return FakeResponse(content=json.dumps({"FileSystems": [described]}).encode())

    return respond


@pytest.mark.slow
@pytest.mark.parametrize(
    ("letter", "directory", "level", "message"),
    [
        ("a", "/abcdbev4/shards", None, ""),
        ("a", "/abcdbev4", None, ""),
        ("a", "/shards", "error", "/shards does not start with the mount name of"),
        ("b", "/abcdbev4/shards", "error", "is CREATING"),
        ("c", "/abcdbev4/shards", "error", "is a file system of type ONTAP"),
        ("d", "/abcdbev4/shards", "error", "does not exist in us-east-1"),
    ],
)
def test_file_system_of_lustre_is_ready_and_its_directory_has_the_mount_name(
    network: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    letter: str,
    directory: str,
    level: str | None,
    message: str,
) -> None:
    name = f"fs-0000000000000000{letter}"
    with fake_server(fake_fsx(network["vpc"])) as fsx:
        monkeypatch.setenv("AWS_ENDPOINT_URL_FSX", fsx.url)
        problems = mounted(network, id=name, type="FSxLustre", directory=directory)
    assert [problem[0] for problem in problems] == ([level] if level else [])
    assert all(message in problem[2] for problem in problems)


def test_file_system_in_another_vpc_is_a_warning(
    network: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_server(fake_fsx("vpc-other")) as fsx:
        monkeypatch.setenv("AWS_ENDPOINT_URL_FSX", fsx.url)
        [(level, _, message)] = mounted(
            network, id="fs-0000000000000000a", type="FSxLustre", directory="/abcdbev4"
        )
    assert level == "warning"
    assert f"reachable in vpc-other, and the job runs in {network['vpc']}" in message


def test_efs_needs_a_mount_target_in_the_vpc(aws: Aws, network: dict[str, str]) -> None:
    efs = aws.client("efs")
    name = efs.create_file_system(CreationToken="own")["FileSystemId"]
    [(level, where, message)] = mounted(network, id=name, type="EFS", directory="/shards")
    assert (level, where) == ("warning", "data.file_system.id")
    assert message == f"{name} is reachable in no VPC, and the job runs in {network['vpc']}"
    efs.create_mount_target(FileSystemId=name, SubnetId=network["private"])
    assert mounted(network, id=name, type="EFS", directory="/shards") == []
    [(level, _, message)] = mounted(
        network, id="fs-0123456789abcdef0", type="EFS", directory="/shards"
    )
    assert (level, message) == ("error", "fs-0123456789abcdef0 (EFS) does not exist in us-east-1")

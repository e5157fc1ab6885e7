"""Checks the VPC of a run: whether pip reaches packages from it, and its file systems."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sm_train.estimators.config.data import FileSystemInputSection
from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.checks.finding import Check, Finding

if TYPE_CHECKING:
    import boto3

SUBNET_ABSENT = Check("subnet-absent", ("error",))
PACKAGE_INDEX = Check("package-index", ("warning", "info"))
FILE_SYSTEM = Check("file-system", ("error", "warning"))

VPC_ENDPOINTS = Check("vpc-endpoints", ("warning",))

_CODEARTIFACT_ENDPOINTS = ("codeartifact.api", "codeartifact.repositories")
_ENDPOINTS = ("s3", "ecr.api", "ecr.dkr", "sts", "logs", "monitoring", "sagemaker.api")
"""Services that a job in a VPC may call, by the names of their endpoints: data and checkpoints, its
image, its account, its log and metrics, and SageMaker itself."""


def vpc_findings(config: RunConfig, session: boto3.Session, region: str) -> Iterator[Finding]:
    """Check the subnets of the run, and the routes from them to its package index.

    Raises:
        ClientError: EC2 rejects a request.
    """
    vpc = config.cluster.vpc
    if vpc is None:
        return
    ec2: Any = session.client("ec2", region_name=region)
    filters = [{"Name": "subnet-id", "Values": vpc.subnets}]
    subnets = ec2.describe_subnets(Filters=filters)["Subnets"]
    known = {subnet["SubnetId"] for subnet in subnets}
    absent = [subnet for subnet in vpc.subnets if subnet not in known]
    if absent:
        yield SUBNET_ABSENT.found(
            "error",
            "cluster.vpc.subnets",
            f"{', '.join(absent)} do not exist in {region}",
            "write subnets of this account and region",
        )
        return
    networks = sorted({subnet["VpcId"] for subnet in subnets})
    closed = _without_internet(ec2, networks, vpc.subnets)
    if not closed:
        return
    prefix = f"com.amazonaws.{region}."
    services = {name.removeprefix(prefix) for name in _endpoints(ec2, networks)}
    yield from _service_endpoints(config, closed, services)
    if not config.cluster.network_isolation:
        yield from _package_index(config, prefix, closed, services)


def _endpoints(ec2: Any, networks: list[str]) -> set[str]:
    """Return the names of the services that have an endpoint in the VPCs."""
    pages = ec2.get_paginator("describe_vpc_endpoints").paginate(
        Filters=[{"Name": "vpc-id", "Values": networks}]
    )
    return {
        endpoint["ServiceName"]
        for page in pages
        for endpoint in page["VpcEndpoints"]
        if endpoint["State"].lower() == "available"
    }


def _service_endpoints(
    config: RunConfig, closed: list[str], services: set[str]
) -> Iterator[Finding]:
    """Report services of AWS that jobs in the ``closed`` subnets do not reach.

    With network isolation, only SageMaker's own transfers use the VPC: those of S3.
    """
    needed = ("s3",) if config.cluster.network_isolation else _ENDPOINTS
    if missing := [name for name in needed if name not in services]:
        yield VPC_ENDPOINTS.found(
            "warning",
            "cluster.vpc.subnets",
            f"{', '.join(closed)}: no route to the internet, and the VPC has no endpoint for "
            f"{', '.join(missing)}",
            "create them (a gateway for s3, interfaces with private DNS names for the others), or "
            "add a NAT gateway",
        )


def _package_index(
    config: RunConfig, prefix: str, closed: list[str], services: set[str]
) -> Iterator[Finding]:
    """Report subnets from which pip reaches no package index, as far as routes tell.

    ``prefix`` is that of the names of the region's services.
    """
    index = config.cluster.package_index
    if index is not None and not index.startswith("arn:"):
        return  # a server of the user's, which routes do not identify
    where = ", ".join(closed)
    if index is None:
        has_image = config.cluster.image is not None
        yield PACKAGE_INDEX.found(
            "info" if has_image else "warning",
            "cluster.package_index",
            f"{where}: no route to the internet, from which every job installs packages"
            + (" that the image lacks" if has_image else ""),
            "write package_index (CodeArtifact or a private index), add a NAT gateway, or use an "
            "image with all packages (`sm-train image RUN --dockerfile`)",
        )
        return
    missing = [f"{prefix}{name}" for name in _CODEARTIFACT_ENDPOINTS if name not in services]
    if missing:
        yield PACKAGE_INDEX.found(
            "warning",
            "cluster.package_index",
            f"{where}: no route to the internet, and the VPC has no endpoint "
            f"{' and no '.join(missing)}",
            "create them with private DNS names, or add a NAT gateway",
        )


def _without_internet(ec2: Any, networks: list[str], subnets: list[str]) -> list[str]:
    """Return the subnets whose route table has no default route that a job can use.

    A job's network interfaces have no public address, so an internet gateway does not serve them
    ("Give SageMaker AI Training Jobs Access to Resources in Your Amazon VPC", developer guide).
    """
    pages = ec2.get_paginator("describe_route_tables").paginate(
        Filters=[{"Name": "vpc-id", "Values": networks}]
    )
    own: dict[str, bool] = {}
    main = False
    for page in pages:
        for table in page["RouteTables"]:
            leads_out = any(_leads_out(route) for route in table["Routes"])
            for association in table["Associations"]:
                main = main or (bool(association.get("Main")) and leads_out)
                if "SubnetId" in association:
                    own[association["SubnetId"]] = leads_out
    return [subnet for subnet in subnets if not own.get(subnet, main)]


def _leads_out(route: dict[str, Any]) -> bool:
    return (
        route.get("DestinationCidrBlock") == "0.0.0.0/0"
        and route.get("State", "active") == "active"
        and not str(route.get("GatewayId", "")).startswith("igw-")
    )


def file_system_findings(
    config: RunConfig, session: boto3.Session, region: str
) -> Iterator[Finding]:
    """Check that the file systems of the run exist, are ready, and are in its VPC.

    Raises:
        ClientError: AWS rejects a request.
    """
    if not config.file_systems or config.cluster.vpc is None:
        return
    ec2: Any = session.client("ec2", region_name=region)
    filters = [{"Name": "subnet-id", "Values": config.cluster.vpc.subnets}]
    subnets = ec2.describe_subnets(Filters=filters)["Subnets"]
    networks = {subnet["VpcId"] for subnet in subnets}
    for where, file_system in config.file_systems.items():
        if file_system.type == "EFS":
            yield from _efs(where, file_system, session, region, networks)
        else:
            yield from _lustre(where, file_system, session, region, networks)


def _lustre(
    where: str,
    section: FileSystemInputSection,
    session: boto3.Session,
    region: str,
    networks: set[str],
) -> Iterator[Finding]:
    from botocore.exceptions import ClientError

    fsx: Any = session.client("fsx", region_name=region)
    try:
        [found] = fsx.describe_file_systems(FileSystemIds=[section.id])["FileSystems"]
    except ClientError as error:
        if error.response["Error"]["Code"] != "FileSystemNotFound":
            raise
        yield _absent(where, section, region)
        return
    if found["FileSystemType"] != "LUSTRE":
        yield FILE_SYSTEM.found(
            "error",
            f"{where}.id",
            f"{section.id} is a file system of type {found['FileSystemType']}",
            "name one of type LUSTRE: training jobs mount no other",
        )
        return
    yield from _unready(where, section, found["Lifecycle"])
    mount_name = found.get("LustreConfiguration", {}).get("MountName")
    if mount_name and section.directory.split("/")[1] != mount_name:
        yield FILE_SYSTEM.found(
            "error",
            f"{where}.directory",
            f"{section.directory} does not start with the mount name of {section.id}",
            f"write /{mount_name}{section.directory}",
        )
    if networks and found.get("VpcId") not in networks:
        yield _elsewhere(where, section, [found.get("VpcId")], networks)


def _efs(
    where: str,
    section: FileSystemInputSection,
    session: boto3.Session,
    region: str,
    networks: set[str],
) -> Iterator[Finding]:
    from botocore.exceptions import ClientError

    efs: Any = session.client("efs", region_name=region)
    try:
        [found] = efs.describe_file_systems(FileSystemId=section.id)["FileSystems"]
    except ClientError as error:
        if error.response["Error"]["Code"] != "FileSystemNotFound":
            raise
        yield _absent(where, section, region)
        return
    yield from _unready(where, section, found["LifeCycleState"])
    targets = efs.describe_mount_targets(FileSystemId=section.id)["MountTargets"]
    reachable = {target.get("VpcId") for target in targets}
    if networks and not networks & reachable:
        yield _elsewhere(where, section, sorted(filter(None, reachable)), networks)


def _absent(where: str, section: FileSystemInputSection, region: str) -> Finding:
    return FILE_SYSTEM.found(
        "error",
        f"{where}.id",
        f"{section.id} ({section.type}) does not exist in {region}",
        "write one of this account and region",
    )


def _unready(where: str, section: FileSystemInputSection, state: str) -> Iterator[Finding]:
    if state.lower() not in ("available", "updating"):
        yield FILE_SYSTEM.found(
            "error", f"{where}.id", f"{section.id} is {state}", "wait until it is available"
        )


def _elsewhere(
    where: str, section: FileSystemInputSection, found: list[str | None], networks: set[str]
) -> Finding:
    places = ", ".join(map(str, found)) or "no VPC"
    return FILE_SYSTEM.found(
        "warning",
        f"{where}.id",
        f"{section.id} is reachable in {places}, and the job runs in {', '.join(sorted(networks))}",
        "use subnets of its VPC; for EFS, add a mount target to the job's",
    )

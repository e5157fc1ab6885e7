"""Creates a stage's folders for the SDK's local containers.

The SDK mounts every channel in full into every container, and no checkpoint folder. Each container
corrects that itself: a script that bash reads at its start (``BASH_ENV``; the SDK's entrypoint is a
bash script) links the container's own shards and checkpoint folder to the paths that a job expects.
The training code, the request and the image are unaffected.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from sm_train.entrypoints.base.sagemaker_paths import SageMakerPaths, host_names
from sm_train.estimators.bundle.bundle import Bundle
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.submit.local.emulated_channels import LocalChannel
from sm_train.toolkit.submit.local.folders import LocalFolders, local_channels, unpack

_DATA = PurePosixPath("/opt/ml/input/data")
_LINKS, CHECKPOINTS = "local_shares", "local_checkpoints"
PREPARE = str(_DATA / _LINKS / "prepare.sh")
"""Path of the script inside the containers."""

_SCRIPT = f"""\
# Read by the first bash of a container, before the SDK's own script.
unset BASH_ENV
host=$(sed -n 's/.*"current_host": *"\\([^"]*\\)".*/\\1/p' /opt/ml/input/config/resourceconfig.json)
for channel in "{_DATA}/{_LINKS}/$host"/*; do ln -sfn "$channel" {_DATA}/; done
rmdir /opt/ml/checkpoints 2>/dev/null || true  # an image may contain an empty one
ln -sfn "{_DATA}/{CHECKPOINTS}/$host" /opt/ml/checkpoints
# The caller must be able to read and remove the files that root creates here.
chmod a+rwx {_DATA} /opt/ml/model /opt/ml/output /opt/ml/output/data
umask 0
"""


@dataclass(frozen=True)
class ContainerFolders:
    """The stage's folders, and ``channels``: the folders that every container mounts."""

    local: LocalFolders
    channels: dict[str, Path]

    @property
    def sdk(self) -> Path:
        """The SDK's working folder."""
        return self.local.model.parent


def lay_out_for_containers(
    config: RunConfig, stage: StageSection, bundle: Bundle, *, base: Path, nodes: int, output: Path
) -> ContainerFolders:
    """Create the folders; checkpoints of an earlier attempt stay, also of local processes.

    Raises:
        UserError: no local shards, too few, or links that containers cannot follow.
    """
    channels = local_channels(config, stage, base, nodes, output)
    root = (output / stage.name).absolute()
    sdk = root / "containers"
    trees = tuple(SageMakerPaths(sdk / host) for host in host_names(nodes))
    links, checkpoints = root / "shares", root / "node-checkpoints"
    node_checkpoints = tuple(checkpoints / host for host in host_names(nodes))
    local = LocalFolders(
        root,
        trees,
        node_checkpoints,
        bundle.entry,
        sdk / "model",
        bundle.sha256,
        tuple(channels),
    )
    for recreated in (sdk, links, checkpoints):
        shutil.rmtree(recreated, ignore_errors=True)
        recreated.mkdir(parents=True, exist_ok=True)
    unpack(bundle, local.bundle)
    (links / "prepare.sh").write_text(_SCRIPT, encoding="utf-8")
    mounts = {_LINKS: links, CHECKPOINTS: checkpoints}
    for channel in channels:
        mounts |= _mounts(channel, root, links, nodes)
    return ContainerFolders(local, mounts)


def _mounts(channel: LocalChannel, root: Path, links: Path, nodes: int) -> dict[str, Path]:
    """Return the folders to mount for a channel; link each container's files if they differ."""
    if channel.is_whole_folder:
        return {channel.name: channel.folder}
    if not channel.uri.endswith("/"):
        # An object, next to files that are not part of the channel.
        copies = root / "objects" / channel.name
        shutil.rmtree(copies, ignore_errors=True)
        copies.mkdir(parents=True)
        for path, file in channel.node_files(0, 1).items():
            shutil.copy(file, copies / path)
        return {channel.name: copies}
    mounted = f"local_{channel.name}"
    for rank, host in enumerate(host_names(nodes)):
        for path, file in channel.node_files(rank, nodes).items():
            if not file.resolve().is_relative_to(channel.folder.resolve()):
                raise UserError(
                    f"channel {channel.name}: {file}: links to a file outside of "
                    f"{channel.folder}, which containers do not mount; move the file into the "
                    "folder, or use --local process"
                )
            link = links / host / channel.name / path
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(_DATA / mounted / path)
    return {mounted: channel.folder}

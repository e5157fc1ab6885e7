"""Creates a job's folders on this machine, as SageMaker would on each instance.

``RUN/STAGE/`` holds the unpacked bundle, one ``/opt/ml`` tree for each emulated node, and in
``checkpoints/`` what a job's S3 prefix holds: the nodes' checkpoint folders, uploaded to one place.
"""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sm_train.entrypoints.base.sagemaker_paths import SageMakerPaths, host_names
from sm_train.entrypoints.job_interface.checkpoint_layout import FINAL_MODEL, step_folder_name
from sm_train.entrypoints.job_interface.index_location import (
    index_channel,
    index_path,
    removal_list,
)
from sm_train.entrypoints.shards.shard_format import find_shards
from sm_train.estimators.bundle.bundle import Bundle
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection
from sm_train.estimators.request.training_request import needs_state
from sm_train.toolkit.base.errors import ExitCode, UserError
from sm_train.toolkit.records.job_logs import LOG_NAME
from sm_train.toolkit.submit.local.emulated_channels import LocalChannel

_ANY_FOLDER = "s3://local/"
"""The location of a channel that has none on S3."""


@dataclass(frozen=True)
class LocalFolders:
    """One stage's folders; ``nodes`` are the emulated instances' trees, in rank order.

    ``entry`` is the bundle's script to start, ``model`` the folder of the final model, and
    ``bundle_sha256`` the bundle's digest. Each node has one of ``node_checkpoints``, which it sees
    as ``/opt/ml/checkpoints``.
    """

    root: Path
    nodes: tuple[SageMakerPaths, ...]
    node_checkpoints: tuple[Path, ...]
    entry: str
    model: Path
    bundle_sha256: str
    channels: tuple[LocalChannel, ...]

    @property
    def bundle(self) -> Path:
        return self.root / "bundle"

    @property
    def checkpoints(self) -> Path:
        """What all nodes uploaded and the next job starts from; it stands for the S3 prefix."""
        return self.root / "checkpoints"

    @property
    def inputs(self) -> tuple[Path, ...]:
        """The files and folders of all channels, except folders that hold this stage's output."""
        paths = [node.channel("train").parent for node in self.nodes]
        for channel in self.channels:
            is_folder = channel.uri.endswith("/")
            paths += [channel.folder] if is_folder else channel.node_files(0, 1).values()
        root = self.root.resolve()
        return tuple(path for path in paths if not root.is_relative_to(path.resolve()))

    @property
    def removal_lists(self) -> dict[str, str]:
        """Where the samples that were removed from each channel of shards are listed."""
        return {
            channel.name: removal_list(str(index_path(channel.folder.absolute())))
            for channel in self.channels
            if channel.mode == "FastFile"
        }

    @property
    def log(self) -> Path:
        return self.root / LOG_NAME


def lay_out(
    config: RunConfig, stage: StageSection, bundle: Bundle, *, base: Path, nodes: int, output: Path
) -> LocalFolders:
    """Create the folders of one stage; checkpoints of an earlier attempt stay and are resumed.

    The run file's local folders are relative to ``base``, the run file's folder.

    Raises:
        UserError: no local shards, fewer shards than nodes, or local components are missing.
    """
    channels = local_channels(config, stage, base, nodes, output)
    root = output / stage.name
    names = host_names(nodes)
    trees = tuple(SageMakerPaths((root / "nodes" / name).absolute()) for name in names)
    node_checkpoints = tuple(node.checkpoints for node in trees)
    folders = LocalFolders(
        root,
        trees,
        node_checkpoints,
        bundle.entry,
        trees[0].model,
        bundle.sha256,
        tuple(channels),
    )
    unpack(bundle, folders.bundle)
    shutil.rmtree(root / "nodes", ignore_errors=True)
    for rank, node in enumerate(folders.nodes):
        _create_tree(node)
        _write_config(node, names, rank, stage, channels)
        for channel in channels:
            _fill(node.channel(channel.name), channel, rank, nodes)
    return folders


def local_channels(
    config: RunConfig, stage: StageSection, base: Path, nodes: int, output: Path
) -> list[LocalChannel]:
    """Return the stage's channels that have a local folder, the training data first.

    Raises:
        UserError: a folder in the run file is missing, there are no shards or too few for the
            nodes, or the previous stage has not run.
    """
    channels = [] if config.data.synthetic_samples else _data_channels(config, base, nodes)
    channels += _channels_of_the_run_file(config, base)
    channels += _previous_stage(config, stage, output)
    return channels


def _data_channels(config: RunConfig, base: Path, nodes: int) -> list[LocalChannel]:
    """Return the training data and their index, if there is one."""
    data = _training_data(config, base)
    files = data.node_files(0, 1)
    if config.reads_shards and not find_shards(data.folder):
        raise UserError(f"data.local: {data.folder}: holds no .tar; `sm-train pack` creates shards")
    if len(files) < nodes and config.train_sharded:
        raise UserError(
            f"data.local: {config.data.local} holds {len(files)} shards for {nodes} nodes; "
            f"pack smaller shards or give --nodes {len(files)}",
            ExitCode.PREFLIGHT,
        )
    index = index_path(data.folder)
    if config.index_uri and index.exists():
        return [data, LocalChannel("index", index.parent, config.index_uri)]
    return [data]


def _training_data(config: RunConfig, base: Path) -> LocalChannel:
    if config.data.local is None:
        raise UserError(
            "data.local: not set; a local run reads shards from this machine: "
            "add local: FOLDER under data"
        )
    folder = base / config.data.local
    if not folder.is_dir():
        raise UserError(f"data.local: {folder}: no such folder; `sm-train pack` creates shards")
    return LocalChannel("train", folder, config.data.uri, "FastFile", config.train_sharded)


def _channels_of_the_run_file(config: RunConfig, base: Path) -> list[LocalChannel]:
    model, held_out = config.model.local_components, config.data.local_validation
    found = []
    if model is not None:
        folder = _existing(base / model, "model.local_components")
        found.append(LocalChannel("model", folder, config.model.components or _ANY_FOLDER))
    if held_out is not None:
        folder, uri = _existing(base / held_out, "data.local_validation"), config.data.validation
        found.append(LocalChannel("validation", folder, uri or _ANY_FOLDER, "FastFile"))
    for name, channel in config.channels.items():
        if channel.local is not None:
            folder = _existing(base / channel.local, f"channels.{name}.local")
            found.append(
                LocalChannel(
                    name, folder, channel.uri or _ANY_FOLDER, channel.mode, channel.sharded
                )
            )
            index = index_path(folder)
            if name in config.source_indexes and index.exists():
                uri = config.source_indexes[name]
                found.append(LocalChannel(index_channel(name), index.parent, uri))
        elif name in config.source_channels:
            raise UserError(
                f"channels.{name}.local: not set; a local run reads shards from this machine: "
                f"add local: FOLDER under channels.{name}"
            )
    return found


def _existing(folder: Path, field: str) -> Path:
    if not folder.is_dir():
        raise UserError(f"{field}: {folder}: no such folder")
    return folder


def _previous_stage(config: RunConfig, stage: StageSection, output: Path) -> list[LocalChannel]:
    index = config.stages.index(stage)
    if not index:
        return []
    previous = config.stages[index - 1]
    checkpoints = output / previous.name / "checkpoints"
    folders = {"previous": checkpoints / FINAL_MODEL}
    if needs_state(stage):
        folders["previous_state"] = checkpoints / step_folder_name(previous.max_steps)
    if not all(folder.is_dir() for folder in folders.values()):
        raise UserError(
            f"--stage: {stage.name} starts from {previous.name}, which has no final model in "
            f"{output}; run that stage first",
            ExitCode.PREFLIGHT,
        )
    return [LocalChannel(name, folder, _ANY_FOLDER) for name, folder in folders.items()]


def has_model(folders: LocalFolders) -> bool:
    """Return whether the stage left a model: a script of the user's own need not."""
    return folders.model.is_dir() and any(folders.model.iterdir())


def unpack(bundle: Bundle, folder: Path) -> None:
    """Replace the content of ``folder`` by the bundle's files."""
    shutil.rmtree(folder, ignore_errors=True)
    with tarfile.open(fileobj=io.BytesIO(bundle.archive)) as archive:
        archive.extractall(folder, filter="data")


def _create_tree(node: SageMakerPaths) -> None:
    inputs = node.channel("train").parent
    for folder in (node.input_config, inputs, node.model, node.output_data):
        folder.mkdir(parents=True)


def _fill(target: Path, channel: LocalChannel, node_rank: int, nodes: int) -> None:
    """Link a channel's folder, or a node's files of it."""
    if channel.is_whole_folder:
        target.symlink_to(channel.folder.absolute())
        return
    for path, file in channel.node_files(node_rank, nodes).items():
        link = target / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(file)


def _write_config(
    node: SageMakerPaths,
    hosts: list[str],
    rank: int,
    stage: StageSection,
    channels: Sequence[LocalChannel],
) -> None:
    """Write the platform's three configuration files."""
    documents = {
        "resourceconfig.json": {
            "current_host": hosts[rank],
            "hosts": hosts,
            "network_interface_name": "lo",
        },
        "hyperparameters.json": {"stage": stage.name},
        "inputdataconfig.json": {channel.name: channel.configuration() for channel in channels},
    }
    for name, document in documents.items():
        (node.input_config / name).write_text(json.dumps(document, indent=2) + "\n")

"""Creates a job's folders on this machine, as SageMaker would on each instance.

``RUN/STAGE/`` holds the unpacked bundle, one ``/opt/ml`` tree for each emulated node, and in
``checkpoints/`` what a job's S3 prefix holds: the nodes' checkpoint folders, uploaded to one place.
"""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from dataclasses import dataclass
from pathlib import Path

from sm_train.entrypoints.common.checkpoint_layout import FINAL_MODEL, step_folder_name
from sm_train.entrypoints.common.index_location import index_path
from sm_train.entrypoints.common.sagemaker_paths import SageMakerPaths, host_names
from sm_train.entrypoints.data.shard_format import find_shards
from sm_train.estimators.bundle.bundle import Bundle
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection
from sm_train.estimators.request.training import needs_state
from sm_train.toolkit.errors import ExitCode, UserError
from sm_train.toolkit.jobs.events import LOG_NAME


@dataclass(frozen=True)
class LocalFolders:
    """One stage's folders; ``nodes`` are the emulated instances' trees, in rank order.

    ``entry`` is the bundle's script to start, ``bundle_sha256`` its digest, ``model`` the folder
    of the final model. Each node has one of ``node_checkpoints``, which it sees as
    ``/opt/ml/checkpoints``.
    """

    root: Path
    nodes: tuple[SageMakerPaths, ...]
    node_checkpoints: tuple[Path, ...]
    entry: str
    bundle_sha256: str
    model: Path

    @property
    def bundle(self) -> Path:
        return self.root / "bundle"

    @property
    def checkpoints(self) -> Path:
        """In place of the S3 prefix: what all nodes uploaded, and what the next job starts from."""
        return self.root / "checkpoints"

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
    folder, files = local_data(config, base, nodes)
    channels = shared_channels(config, stage, base, output)
    root = output / stage.name
    names = host_names(nodes)
    trees = tuple(SageMakerPaths((root / "nodes" / name).absolute()) for name in names)
    node_checkpoints = tuple(node.checkpoints for node in trees)
    folders = LocalFolders(
        root, trees, node_checkpoints, bundle.entry, bundle.sha256, trees[0].model
    )
    unpack(bundle, folders.bundle)
    shutil.rmtree(root / "nodes", ignore_errors=True)
    for rank, node in enumerate(folders.nodes):
        _create_tree(node)
        _write_config(node, names, rank, stage, channels, sharded=config.train_sharded)
        _link_all(node_files(config, files, rank, nodes), folder, node.channel("train"))
        if config.reads_index and index_path(folder).exists():
            _link_all([index_path(folder)], folder.parent, node.channel("index"))
        for name, source in channels.items():
            node.channel(name).symlink_to(source.absolute())
    return folders


def node_files(config: RunConfig, files: list[Path], node_rank: int, nodes: int) -> list[Path]:
    """Return a node's files of the training data: all, or about 1/n as by ShardedByS3Key."""
    return files[node_rank::nodes] if config.train_sharded else files


def local_data(config: RunConfig, base: Path, nodes: int) -> tuple[Path, list[Path]]:
    """Return the folder of the run file's local training data and its files.

    The built-in training reads shards, a script of the user's own any file.

    Raises:
        UserError: there are no files, or too few for the nodes.
    """
    if config.data.local is None:
        raise UserError(
            "data.local: not set; a local run reads shards from this machine: "
            "add local: FOLDER under data"
        )
    folder = base / config.data.local
    if not folder.is_dir():
        raise UserError(f"data.local: {folder}: no such folder; `sm-train pack` creates shards")
    if not config.reads_shards:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
    else:
        files = list(find_shards(folder).values())
        if not files:
            raise UserError(f"data.local: {folder}: holds no .tar; `sm-train pack` creates shards")
    if len(files) < nodes and config.train_sharded:
        raise UserError(
            f"data.local: {config.data.local} holds {len(files)} shards for {nodes} nodes; "
            f"pack smaller shards or give --nodes {len(files)}",
            ExitCode.PREFLIGHT,
        )
    return folder, files


def shared_channels(
    config: RunConfig, stage: StageSection, base: Path, output: Path
) -> dict[str, Path]:
    """Return the folders of the channels that every node reads in full, by channel name.

    Raises:
        UserError: a folder in the run file is missing, or the previous stage has not run.
    """
    channels: dict[str, Path] = {}
    for name, field, local in (
        ("model", "model.local_components", config.model.local_components),
        ("validation", "data.local_validation", config.data.local_validation),
        *(
            (name, f"channels.{name}.local", channel.local)
            for name, channel in config.channels.items()
        ),
    ):
        if local is not None:
            channels[name] = base / local
            if not channels[name].is_dir():
                raise UserError(f"{field}: {channels[name]}: no such folder")
    index = config.stages.index(stage)
    if index:
        previous = config.stages[index - 1]
        checkpoints = output / previous.name / "checkpoints"
        channels["previous"] = checkpoints / FINAL_MODEL
        if needs_state(stage):
            channels["previous_state"] = checkpoints / step_folder_name(previous.max_steps)
        if not all(folder.is_dir() for folder in channels.values()):
            raise UserError(
                f"--stage: {stage.name} starts from {previous.name}, which has no final model in "
                f"{output}; run that stage first",
                ExitCode.PREFLIGHT,
            )
    return channels


def has_model(folders: LocalFolders) -> bool:
    """Return whether the stage left a model: a script of the user's own need not."""
    return folders.model.is_dir() and any(folders.model.iterdir())


def unpack(bundle: Bundle, folder: Path) -> None:
    """Replace the content of ``folder`` by the bundle's files."""
    shutil.rmtree(folder, ignore_errors=True)
    with tarfile.open(fileobj=io.BytesIO(bundle.archive)) as archive:
        archive.extractall(folder, filter="data")


def _create_tree(node: SageMakerPaths) -> None:
    for folder in (node.input_config, node.channel("train"), node.model, node.output_data):
        folder.mkdir(parents=True)


def _link_all(files: list[Path], root: Path, folder: Path) -> None:
    """Create links to ``files`` in ``folder``, under their paths relative to ``root``."""
    for file in files:
        link = folder / file.relative_to(root)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(file.absolute())


def _write_config(
    node: SageMakerPaths,
    hosts: list[str],
    rank: int,
    stage: StageSection,
    channels: dict[str, Path],
    *,
    sharded: bool,
) -> None:
    """Write the platform's three configuration files."""
    distribution = "ShardedByS3Key" if sharded else "FullyReplicated"
    train = {"TrainingInputMode": "FastFile", "S3DistributionType": distribution}
    replicated = {"TrainingInputMode": "File", "S3DistributionType": "FullyReplicated"}
    documents = {
        "resourceconfig.json": {
            "current_host": hosts[rank],
            "hosts": hosts,
            "network_interface_name": "lo",
        },
        "hyperparameters.json": {"stage": stage.name},
        "inputdataconfig.json": {"train": train, **dict.fromkeys(channels, replicated)},
    }
    for name, document in documents.items():
        (node.input_config / name).write_text(json.dumps(document, indent=2) + "\n")

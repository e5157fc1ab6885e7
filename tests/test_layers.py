"""The import structure: top-level folders, sub-package levels, no cycles, small folders."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from functools import cache
from graphlib import CycleError, TopologicalSorter

import pytest

from docs.wings import written
from tests.support.import_graph import PACKAGE, ROOT, imports, is_for_type_checkers, modules

MAY_IMPORT = {
    "cost": {"cost"},
    "entrypoints": {"entrypoints", "cost"},
    "estimators": {"estimators", "cost", "entrypoints"},
    "toolkit": {"toolkit", "estimators", "cost", "entrypoints"},
}
"""Top-level folder → the top-level folders that it may import."""

SHARED_WITH_ESTIMATORS = (
    "sm_train.entrypoints.base",
    "sm_train.entrypoints.job_interface",
    "sm_train.entrypoints.storage",
)
"""All that ``estimators`` may import of ``entrypoints``."""

LEVELS = {
    "entrypoints": [
        {"base"},
        {"job_interface", "storage"},
        {"distributed", "images", "records", "sample_metadata"},
        {"monitoring", "shards"},
        {"data_loading", "tracking"},
        {"checkpoints", "launcher", "lineage"},
        {"clusters", "models", "script"},
        {"data_prep", "planning"},
        {"probes", "training"},
        {"api"},
    ],
    "estimators": [
        {"regions", "secrets"},
        {"config"},
        {"bundle", "cost_stages"},
        {"request"},
        {"manifests", "sdk"},
    ],
    "toolkit": [
        {"base", "memory"},
        {"aws", "report_html", "run_file", "terminal"},
        {"command_base", "records", "shards"},
        {"demo", "platforms"},
        {"models", "planning", "platforms.local"},
        {"checks", "data_prep", "runs"},
        {"analysis", "init", "platforms.sagemaker"},
        {"runs.alarms"},
        {"submit"},
        {"api", "clusters", "platforms.sagemaker.sagemaker_watch", "probes"},
        {"commands"},
        {"cli"},
        {"__main__"},
    ],
}
"""Wings of each folder, lowest level first, and the adapters of platforms, which are leaves.

A wing imports only lower levels of its own folder. Imports inside functions count: a lazy import
postpones a dependency, it does not remove it.
"""

MOST_FILES = {"cost": 26, "toolkit/checks": 23, "toolkit/commands": 28}
"""Folders that may hold more than 22 Python files."""

OWNERS = {
    "cost/network.py": r"\bBACKWARD_SHARE = |\(ranks - 1\) / ranks|\bdef bus_factor\b",
    "cost/timeline.py": r"\bdef mean_speed\b",
    "cost/stage.py": r"\bdef program_that_ran\b",
    "cost/quantity.py": r"\bclass Quantity\b",
    "toolkit/planning/run_price.py": r"\bclass StageLimit\b",
    "toolkit/memory/": r"\bdef memory_fit\b|\bdef choose_sharding\b",
    "entrypoints/job_interface/checkpoint_layout.py": r"\bdef newest_complete\b|"
    r"\bdef complete_marker\b",
    "toolkit/records/run_job.py": r"\bdef billable_seconds\b|\bclass JobPhase\b",
    "toolkit/planning/spent.py": r"\bdef project\b",
    "entrypoints/distributed/nccl_log.py": r"\bGDRDMA\b",
    "entrypoints/checkpoints/safetensors_header.py": r"\bdata_offsets\b|\bF8_E4M3\b",
    "entrypoints/storage/": r"client\(\s*[\"']s3[\"']|\.(put|get|head|copy|delete)_object\(|"
    r"list_objects_v2|(?<!api)\.upload_file\(|\.download_file\(|multipart_upload|TransferManager",
    "entrypoints/storage/storage.py": r"\bclass S3Prefix\b|\bclass LocalFolder\b",
    "entrypoints/storage/lease.py": r"\bclass Lease\b|\bRENEW_SECONDS = ",
    "entrypoints/base/atomic_write.py": r"\bdef durable_replace\b",
    "entrypoints/storage/lease_files.py": r"\bclass AgedFile\b|SET_TO_SERVER_TIME",
    "estimators/request/iam.py": r"\bdef policies\b",
    "estimators/request/data_policies.py": r"\bdef data_policies\b",
    "toolkit/aws/s3.py": r"\bdef regions_of_readers\b",
    "entrypoints/monitoring/heartbeat.py": r"\bcrc32\(head\)|\bpack_into\(",
    "entrypoints/training/step_metrics.py": r"\bRECENT_STEPS = ",
    "entrypoints/base/pip_install.py": r"\bdef install_command\b|direct_url|"
    r"\[sys\.executable, \"-m\", \"pip\"|\bCA_REPOSITORY_ARN\b",
    "entrypoints/data_prep/work/": r"\bclass SharedWork\b|\bdef run_tasks\b",
    "entrypoints/data_prep/streaming/": r"\bclass (?:Stager|Sealer|StreamIndexer)\b",
    "toolkit/data_prep/processing/": r"\bcreate_processing_job\(request|\bclass ProcessingCost\b",
    "entrypoints/distributed/messages.py": r"\bdef job_key\b|\bclass KeyValueStore\b",
    "entrypoints/sample_metadata/row_filter.py": r"\bimport duckdb\b",
    "entrypoints/shards/selection.py": r"\bclass Selection\b",
    "entrypoints/data_loading/indexed_shards.py": r"\bclass IndexedShards\b|\bdef shards_digest\b",
    "entrypoints/shards/removal_list.py": r"\bclass RemovalList\b",
    "entrypoints/lineage/": r"\bclass DataRecord\b",
    "entrypoints/clusters/node_record.py": r"\bclass NodeRecord\b",
    "entrypoints/records/budget.py": r"\bdef is_spent\b",
    "entrypoints/monitoring/alert_outbox.py": r"\bclass PendingAlert\b",
    "entrypoints/storage/aws_session.py": r"\bdef prepare_session\b",
    "entrypoints/base/stored_fields.py": r"\bdef checked_fields\b",
    "entrypoints/data_prep/work/plan_documents.py": r"\bdef read_checked\b",
    "toolkit/clusters/node_records/": r"\bclass ClusterRun\b|\bclass ClusterJob\b",
    "entrypoints/records/upload_notes.py": r"\bsagemaker-upload(?:ed|ing)\b",
    "toolkit/platforms/": r"\bdef parse_target\b|\bclass PlacedRun\b",
    "toolkit/runs/next_command.py": r"\bdef _?next_command\b",
    "toolkit/probes/short_jobs/": r"\bdef short_run\b|\bdef short_run_price\b|\bclass ShortJobs\b",
    "entrypoints/job_interface/job_config.py": r"\bdef choose_compile\b",
    "toolkit/report_html/html_page.py": r"\bfrom jinja2 import\b|\bstring\.Template\b",
    "toolkit/terminal/rich_table.py": r"\bTable\(\s*(?:box|title|show_header)=",
    "toolkit/models/": r"\bclass StoredModel\b|\bdef find_stored\b",
}
"""Owner of a concept → what only its source contains. CONTRIBUTING.md names the concepts.

A folder owns a concept as a whole."""

ADAPTERS = tuple(
    f"{PACKAGE}.toolkit.{room}" for room in ("clusters", "platforms.local", "platforms.sagemaker")
)
"""The folders of platforms, which are found by the table in toolkit/platforms/adapters.py."""

MAY_IMPORT_AN_ADAPTER = {
    "toolkit/submit": "only SageMaker's jobs are created by sm-train",
    "toolkit/runs/alarms": "alarms are those of CloudWatch",
}
"""Folders outside of the adapters that import one, and why."""

MAY_NAME_A_PLATFORM = {
    "toolkit/probes/doctor/canary_report.py": "the report of a canary has a part for SageMaker",
    "toolkit/records/stage_state.py": "whether another platform wrote the newest checkpoint",
}
"""Files outside of the adapters that compare the name of a platform, and why."""

TORCH_FREE = [
    "job_interface.checkpoint_layout",
    "job_interface.events",
    "job_interface.index_location",
    "job_interface.job_config",
    "job_interface.node_description",
    "job_interface.lora_layers",
    "base.sagemaker_paths",
    "shards.shard_format",
    "shards.shard_index",
    "shards.shard_verification",
    "records.doctor_results",
    "probes.doctor_report",
    "launcher.start_doctor",
    "probes.verdict",
    "monitoring.start_monitoring",
    "clusters.start",
    "clusters.elastic_worker",
    "monitoring.watchdog.watchdog",
    "data_prep.packing.describe_shard",
    "records.upload_lag",
    "records.upload_notes",
    "data_prep.streaming.lambda_handler",
    "data_prep.packing.build_pack",
    "data_prep.packing.processing_job",
    "data_prep.enrichment.enrichment_job",
    "planning.memory",
    "models.components",
    "models.component_files",
]
"""Modules that a laptop shares with the cluster, and the watchdog: they import no torch."""


TORCH_USERS = {
    "sm_train.toolkit.api.model_export",
    "sm_train.toolkit.data_prep.data_preview.loaded_crops",
    "sm_train.toolkit.demo.digits",
    "sm_train.toolkit.models.export",
    "sm_train.toolkit.models.sampling.sample",
}
"""The laptop's modules that need the extra ``train``."""

HEAVY = {"torch", "boto3", "diffusers", "transformers", "accelerate", "webdataset", "peft"}
"""Packages that take long to import, or that are not in the base installation."""


def sub_package(name: str) -> str:
    """``sm_train.toolkit.records.job_logs`` → ``records``, or a longer name that has a level."""
    _, folder, *parts = (*name.split("."), "")
    named = {room for rooms in LEVELS.get(folder, ()) for room in rooms}
    longest = range(len(parts), 1, -1)
    return next((room for n in longest if (room := ".".join(parts[:n])) in named), parts[0])


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_top_level_folders_import_only_lower_ones(folder: str) -> None:
    for name in modules():
        if name.split(".")[1] == folder:
            ours = {
                imported.split(".")[1]
                for imported in imports(name)
                if imported.startswith(f"{PACKAGE}.")
            }
            assert ours <= MAY_IMPORT[folder], name


def test_estimators_import_only_the_shared_part_of_entrypoints() -> None:
    for name in modules():
        if name.startswith("sm_train.estimators"):
            used = {
                imported
                for imported in imports(name)
                if imported.startswith("sm_train.entrypoints")
            }
            assert all(imported.startswith(SHARED_WITH_ESTIMATORS) for imported in used), (
                name,
                used,
            )


@pytest.mark.parametrize("folder", LEVELS)
def test_sub_packages_import_only_lower_levels(folder: str) -> None:
    level = {name: number for number, names in enumerate(LEVELS[folder]) for name in names}
    prefix = f"{PACKAGE}.{folder}."
    for name in modules():
        if not name.startswith(prefix):
            continue
        own = sub_package(name)
        assert own in level, f"{name} has no level: add {own} to LEVELS"
        for other in {
            sub_package(imported) for imported in imports(name) if imported.startswith(prefix)
        } - {own}:
            assert level[other] < level[own], f"{name} imports {other}, which is not below {own}"


def test_platforms_are_found_by_their_table_alone() -> None:
    """Between adapters, the folders of Kubernetes and Slurm share what records have in common."""
    importers = {
        path.parent.relative_to(ROOT).as_posix()
        for name, path in modules().items()
        if not name.startswith(ADAPTERS)
        and any(imported.startswith(ADAPTERS) for imported in imports(name))
    }
    assert importers == MAY_IMPORT_AN_ADAPTER.keys()


def test_nothing_outside_of_adapters_asks_which_platform_it_has() -> None:
    """No test of a run's or a job's class, and no comparison of a platform or its name."""
    found = set()
    for name, path in modules().items():
        if name.startswith(ADAPTERS) or not name.startswith(f"{PACKAGE}.toolkit."):
            continue
        tree = ast.parse(path.read_text())
        if any(_asks_for_a_platform(node) for node in ast.walk(tree)):
            found.add(path.relative_to(ROOT).as_posix())
    assert found == MAY_NAME_A_PLATFORM.keys()
    assert len(MAY_NAME_A_PLATFORM) + len(MAY_IMPORT_AN_ADAPTER) <= 5


PLACED = re.compile(
    r"\b(?:\w*(?:Run|Job)Folder|ClusterRun|SageMakerRun|PlacedRun|ClusterJob|TrainingJob)\b"
)
PLATFORM_NAMES = {"sagemaker", "kubernetes", "slurm", "local"}


def _asks_for_a_platform(node: ast.AST) -> bool:
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
        return PLACED.search(ast.unparse(node.args[1])) is not None
    if isinstance(node, ast.Match):
        return any(PLACED.search(ast.unparse(case.pattern)) for case in node.cases)
    if not isinstance(node, ast.Compare):
        return False
    sides = [node.left, *node.comparators]
    values = {side.value for side in sides if isinstance(side, ast.Constant)}
    texts = [ast.unparse(side) for side in sides]
    named = not PLATFORM_NAMES.isdisjoint(value for value in values if isinstance(value, str))
    is_equality = isinstance(node.ops[0], ast.Eq | ast.NotEq | ast.Is | ast.IsNot)
    return is_equality and (
        named or any(re.search(r"\.platform(?:\.name)?$", text) for text in texts)
    )


def test_no_import_cycle() -> None:
    """Between files: a cycle of two modules in one folder fails as well."""
    graph = {name: imports(name) & modules().keys() - {name} for name in modules()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_no_folder_is_crowded() -> None:
    folders: dict[str, int] = {}
    for path in [*modules().values(), *(ROOT / "tests").rglob("*.py")]:
        folder = path.parent.relative_to(ROOT).as_posix()
        folders[folder] = folders.get(folder, 0) + 1
    crowded = {
        folder: count for folder, count in folders.items() if count > MOST_FILES.get(folder, 22)
    }
    assert crowded == {}


def test_each_concept_has_one_owner() -> None:
    sources = {path.relative_to(ROOT).as_posix(): path.read_text() for path in modules().values()}
    for owner, sign in OWNERS.items():
        found = {path for path, source in sources.items() if re.search(sign, source)}
        assert found, owner
        assert {path for path in found if not path.startswith(owner)} == set(), owner


def test_contributing_draws_the_wings() -> None:
    """`make docs` writes the section."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert written(text) == text


def test_readme_lists_every_command() -> None:
    text = (ROOT / "README.md").read_text()
    table = text.partition("\n## Commands\n\n")[2].partition("\n\n")[0]
    listed = set(re.findall(r"`([a-z-]+)`", table))
    files = (ROOT / "toolkit").rglob("commands/[a-z]*.py")
    commands = {path.stem.replace("_", "-") for path in files}
    assert commands - listed == set()


def test_no_two_modules_have_one_name() -> None:
    """A command, a check, a verdict and a section of the run file bear the name of their subject;
    a Lambda function's handler is called as AWS's documentation calls it.
    """
    by_subject = ("toolkit/checks", "toolkit/analysis/review/verdicts", "estimators/config")
    found = Counter(
        path.stem
        for path in modules().values()
        if path.parent.relative_to(ROOT).as_posix() not in by_subject
        and path.parent.name != "commands"
    )
    allowed = {"__init__", "__main__", "lambda_handler"}
    assert {name for name, count in found.items() if count > 1} - allowed == set()


def test_contributing_names_the_owners() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text.partition("| concept | owner |")[2].partition("\n\n")[0]
    assert re.findall(r"\| `([\w/.]+)` \|$", table, re.MULTILINE) == list(OWNERS)


def test_no_class_name_is_defined_in_two_modules() -> None:
    defined: dict[str, list[str]] = {}
    for name, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                defined.setdefault(node.name, []).append(name)
    assert {name: where for name, where in defined.items() if len(where) > 1} == {}


def test_cost_imports_only_the_standard_library() -> None:
    for name in modules():
        if name.startswith("sm_train.cost"):
            others = {imported.split(".")[0] for imported in imports(name)} - {PACKAGE}
            assert others <= sys.stdlib_module_names, name


@pytest.mark.parametrize("module", TORCH_FREE)
def test_modules_shared_with_the_laptop_import_no_torch(module: str) -> None:
    """Importing the module imports none of these packages."""
    assert heavy_imports(f"sm_train.entrypoints.{module}") == set()


def test_laptops_commands_import_no_torch() -> None:
    """A module of ``toolkit`` that uses one of ``entrypoints`` with torch needs the extra train."""
    with_torch = {
        name
        for name in modules()
        if name.startswith("sm_train.toolkit.")
        for imported in imports(name)
        if imported.startswith("sm_train.entrypoints.") and heavy_imports(imported) - {"boto3"}
    }
    assert with_torch == TORCH_USERS


def heavy_imports(name: str) -> set[str]:
    """Return the packages of HEAVY that the import of a module of the product imports."""
    pending, found, heavy = [name], {name}, set()
    for each in pending:
        for imported in top_imports(each):
            if imported in modules() and imported not in found:
                found.add(imported)
                pending.append(imported)
            elif imported.split(".")[0] in HEAVY:
                heavy.add(imported.split(".")[0])
    return heavy


@cache
def top_imports(name: str) -> frozenset[str]:
    """What a module imports when it is imported itself: not inside functions, not for checkers."""
    found = set()
    pending: list[ast.AST] = [ast.parse(modules()[name].read_text())]
    for node in pending:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                found.add(module if module in modules() else node.module or "")
        elif isinstance(node, ast.stmt) and is_for_type_checkers(node):
            continue
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            pending += ast.iter_child_nodes(node)
    return frozenset(found)


def test_no_test_module_imports_another() -> None:
    """What several test modules need is in a module of its own."""
    found = {
        (path.relative_to(ROOT).as_posix(), node.module)
        for path in (ROOT / "tests").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and re.search(r"(?:^|\.)test_\w+$", node.module or "")
    }
    assert found == set()

"""The import structure: top-level folders, sub-package levels, no cycles, small folders."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = "sm_train"

MAY_IMPORT = {
    "cost": {"cost"},
    "entrypoints": {"entrypoints", "cost"},
    "estimators": {"estimators", "cost", "entrypoints"},
    "toolkit": {"toolkit", "estimators", "cost", "entrypoints"},
}
"""Top-level folder → the top-level folders that it may import."""

PUBLIC_API = "sm_train.entrypoints.api"
"""``import sm_train``: names also what only a laptop has, for type checkers; it imports it lazily,
and a job's bundle holds nothing of it."""

SHARED_WITH_ESTIMATORS = (
    "sm_train.entrypoints.common",
    "sm_train.entrypoints.object_store",
    "sm_train.entrypoints.packages",
)
"""All that ``estimators`` may import of ``entrypoints``."""

LEVELS = {
    "entrypoints": [
        {"common"},
        {"images", "object_store", "packages", "sample_metadata", "uploads"},
        {"removal"},
        {"data", "deduplication", "distributed", "leases", "monitoring"},
        {"checkpointing", "lineage", "shared_work", "tracking", "watchdog"},
        {"job_records", "models"},
        {"packing", "planning"},
        {"doctor", "enrichment", "indexing", "script", "streaming", "training"},
        {"api", "training_process"},
        {"launch", "node_start", "run_entry", "train"},
    ],
    "estimators": [
        {"regions", "secrets"},
        {"config"},
        {"bundle", "cost_stages"},
        {"request"},
        {"manifests", "sdk"},
    ],
    "toolkit": [
        {"errors", "placeholders"},
        {"extras", "settings"},
        {"aws", "hub", "report_html", "terminal"},
        {"index_facts", "memory"},
        {"run_file"},
        {"jobs", "processing"},
        {"diagnose"},
        {"platforms"},
        {"costing", "demo", "local", "packing", "sampling"},
        {"checks", "data_preview", "enrichment", "removal", "runs", "streaming"},
        {"platforms.local", "platforms.node_records", "platforms.sagemaker"},
        {"alarms", "init", "lineage", "models", "platforms.kubernetes", "platforms.slurm"},
        {"submit"},
        {"short_jobs"},
        {"doctor", "measuring", "watch"},
        {"platforms.node_records.cluster_watch", "platforms.sagemaker.sagemaker_watch"},
        {"cost_reports", "review"},
        {"api"},
        {"commands"},
        {"cli"},
        {"__main__"},
    ],
}
"""Sub-packages and top-level modules of each folder, lowest level first.

A sub-package imports only lower levels of its own folder. Imports inside functions count: a lazy
import postpones a dependency, it does not remove it.
"""

MOST_FILES = {"cost": 26, "entrypoints/common": 23, "toolkit/checks": 23, "toolkit/commands": 40}
"""Folders that may hold more than 22 Python files."""

OWNERS = {
    "cost/network.py": r"\bBACKWARD_SHARE = |\(ranks - 1\) / ranks|\bdef bus_factor\b",
    "cost/timeline.py": r"\bdef mean_speed\b",
    "cost/stage.py": r"\bdef program_that_ran\b",
    "cost/quantity.py": r"\bclass Quantity\b",
    "toolkit/costing/stage_limits.py": r"\bclass StageLimit\b",
    "toolkit/memory/": r"\bdef memory_fit\b|\bdef choose_sharding\b",
    "entrypoints/common/checkpoint_layout.py": r"\bdef newest_complete\b|\bdef complete_marker\b",
    "toolkit/jobs/run_job.py": r"\bdef billable_seconds\b",
    "toolkit/jobs/platform.py": r"\bclass JobPhase\b",
    "toolkit/costing/projection.py": r"\bdef project\b",
    "entrypoints/doctor/nccl_log.py": r"\bGDRDMA\b",
    "entrypoints/checkpointing/safetensors_header.py": r"\bdata_offsets\b|\bF8_E4M3\b",
    "entrypoints/object_store/": r"client\(\s*[\"']s3[\"']|\.(put|get|head|copy|delete)_object\(|"
    r"list_objects_v2|(?<!api)\.upload_file\(|\.download_file\(|multipart_upload|TransferManager",
    "entrypoints/leases/": r"\bclass Lease\b|\bRENEW_SECONDS = ",
    "entrypoints/common/atomic_write.py": r"\bdef durable_replace\b",
    "entrypoints/leases/lease_files.py": r"\bclass AgedFile\b|SET_TO_SERVER_TIME",
    "estimators/request/iam.py": r"\bdef policies\b",
    "estimators/request/data_policies.py": r"\bdef data_policies\b",
    "toolkit/aws/s3.py": r"\bdef regions_of_readers\b",
    "entrypoints/monitoring/heartbeat.py": r"\bcrc32\(head\)|\bpack_into\(",
    "entrypoints/training/step_metrics.py": r"\bRECENT_STEPS = ",
    "entrypoints/packages/": r"\[sys\.executable, \"-m\", \"pip\"|\bCA_REPOSITORY_ARN\b",
    "entrypoints/shared_work/": r"\bclass SharedWork\b|\bclass S3Prefix\b|\bdef run_tasks\b",
    "entrypoints/streaming/": r"\bclass (?:Stager|Sealer|StreamIndexer)\b",
    "toolkit/processing/": r"\bcreate_processing_job\(request|\bclass ProcessingCost\b",
    "entrypoints/distributed/messages.py": r"\bdef job_key\b|\bclass KeyValueStore\b",
    "entrypoints/sample_metadata/row_filter.py": r"\bimport duckdb\b",
    "entrypoints/data/selection.py": r"\bclass Selection\b",
    "entrypoints/data/indexed_shards.py": r"\bclass IndexedShards\b|\bdef shards_digest\b",
    "entrypoints/removal/": r"\bclass RemovalList\b",
    "entrypoints/lineage/": r"\bclass DataRecord\b",
    "entrypoints/job_records/": r"\bclass NodeRecord\b|\bclass NodeRecorder\b",
    "entrypoints/job_records/budget.py": r"\bdef is_spent\b",
    "entrypoints/job_records/alert_outbox.py": r"\bclass PendingAlert\b",
    "entrypoints/object_store/aws_session.py": r"\bdef prepare_session\b",
    "entrypoints/common/installed_form.py": r"\bdef install_command\b|direct_url",
    "entrypoints/common/stored_fields.py": r"\bdef checked_fields\b",
    "entrypoints/shared_work/plan_documents.py": r"\bdef read_checked\b",
    "toolkit/platforms/node_records/": r"\bclass ClusterRun\b|\bclass ClusterJob\b",
    "entrypoints/uploads/notes.py": r"\bsagemaker-upload(?:ed|ing)\b",
    "toolkit/platforms/": r"\bdef parse_target\b|\bclass PlacedRun\b|\bdef resume_command\b",
    "toolkit/runs/next_command.py": r"\bdef _?next_command\b",
    "toolkit/short_jobs/": r"\bdef short_run\b|\bdef short_run_price\b|\bclass ShortJobs\b",
    "entrypoints/common/job_config.py": r"\bdef choose_compile\b",
    "toolkit/report_html/html_page.py": r"\bfrom jinja2 import\b|\bstring\.Template\b",
    "toolkit/terminal/rich_table.py": r"\bTable\(\s*(?:box|title|show_header)=",
    "toolkit/models/": r"\bclass StoredModel\b|\bdef find_stored\b",
}
"""Owner of a concept → what only its source contains. CONTRIBUTING.md names the concepts.

A folder owns a concept as a whole."""

ADAPTER_ROOMS = (
    "platforms." + name for name in ("kubernetes", "local", "node_records", "sagemaker", "slurm")
)
ADAPTERS = tuple(f"{PACKAGE}.toolkit.{room}" for room in ADAPTER_ROOMS)
"""The folders of platforms, which are found by the table in toolkit/platforms/adapters.py."""

MAY_IMPORT_AN_ADAPTER = {
    "toolkit/submit": "only SageMaker's jobs are created by sm-train",
    "toolkit/alarms": "alarms are those of CloudWatch",
}
"""Folders outside of the adapters that import one, and why."""

MAY_NAME_A_PLATFORM = {
    "toolkit/doctor/canary_report.py": "the report of a canary has a part for SageMaker",
    "toolkit/jobs/stage_state.py": "whether a job of another platform wrote the newest checkpoint",
}
"""Files outside of the adapters that compare the name of a platform, and why."""

TORCH_FREE = [
    "common.checkpoint_layout",
    "common.events",
    "common.index_location",
    "common.job_config",
    "common.node_description",
    "common.lora_layers",
    "common.sagemaker_paths",
    "data.shard_format",
    "data.shard_index",
    "packing.shard_verification",
    "doctor.doctor_history",
    "doctor.doctor_report",
    "doctor.start_doctor",
    "doctor.verdict",
    "monitoring.start_monitoring",
    "node_start.start",
    "node_start.elastic_worker",
    "watchdog.watchdog",
    "packing.describe_shard",
    "uploads.lag",
    "uploads.notes",
    "streaming.lambda_handler",
    "packing.build_pack",
    "packing.processing_job",
    "enrichment.enrichment_job",
    "planning.memory",
    "models.component_check",
    "models.model_manifest",
]
"""Modules that a laptop shares with the cluster, and the watchdog: they import no torch."""


TORCH_USERS = {
    "sm_train.toolkit.api.model_export",
    "sm_train.toolkit.data_preview.loaded_crops",
    "sm_train.toolkit.demo.digits",
    "sm_train.toolkit.models.export",
    "sm_train.toolkit.sampling.sample",
}
"""The laptop's modules that need the extra ``train``."""

HEAVY = {"torch", "boto3", "diffusers", "transformers", "accelerate", "webdataset", "peft"}
"""Packages that take long to import, or that are not in the base installation."""


def module_name(path: Path) -> str:
    """``toolkit/jobs/event_lines.py`` → ``sm_train.toolkit.jobs.event_lines``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join((PACKAGE, *(parts[:-1] if parts[-1] == "__init__" else parts)))


@cache
def modules() -> dict[str, Path]:
    """Every module of the product by its dotted name."""
    return {
        module_name(path): path
        for folder in MAY_IMPORT
        for path in sorted((ROOT / folder).rglob("*.py"))
    }


@cache
def imports(name: str) -> frozenset[str]:
    """What a module imports, at its top or inside functions; ``from package import module`` too."""
    found = set()
    tree = ast.parse(modules()[name].read_text())
    if name == PUBLIC_API:
        tree.body = [node for node in tree.body if not _is_for_type_checkers(node)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import"
            source = node.module or ""
            for alias in node.names:
                module = f"{source}.{alias.name}"
                found.add(module if module in modules() else source)
    return frozenset(found)


def _is_for_type_checkers(node: ast.stmt) -> bool:
    """Whether the statement is ``if TYPE_CHECKING:``."""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def sub_package(name: str) -> str:
    """``sm_train.toolkit.jobs.event_lines`` → ``jobs``, or a longer name that has a level."""
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
        "/".join(name.split(".")[1:3])
        for name in modules()
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


def test_contributing_describes_every_package() -> None:
    """The paragraph of each folder names its packages."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for folder in ("entrypoints", "estimators", "toolkit"):
        [paragraph] = re.findall(rf"^`{folder}/`(?: from|:).*?\n\n", text, re.MULTILINE | re.DOTALL)
        packages = {path.name for path in (ROOT / folder).iterdir() if path.is_dir()}
        packages -= {"__pycache__"}
        missing = {name for name in packages if f"`{name}`" not in paragraph}
        assert missing == set(), folder


def test_readme_lists_every_command() -> None:
    text = (ROOT / "README.md").read_text()
    table = text.partition("| command | does |")[2].partition("\n\n")[0]
    listed = {name for row in table.splitlines() for name in re.findall(r"`([a-z-]+)`", row[:60])}
    files = (ROOT / "toolkit" / "commands").glob("[a-z]*.py")
    commands = {path.stem.replace("_", "-") for path in files}
    assert commands - listed == set()


def test_no_two_modules_have_one_name() -> None:
    """A command, a check, a verdict and a section of the run file bear the name of their subject;
    a Lambda function's handler is called as AWS's documentation calls it.
    """
    by_subject = (
        "toolkit/commands", "toolkit/checks", "toolkit/review/verdicts", "estimators/config",
    )  # fmt: skip
    found = Counter(
        path.stem
        for path in modules().values()
        if path.parent.relative_to(ROOT).as_posix() not in by_subject
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
        elif isinstance(node, ast.stmt) and _is_for_type_checkers(node):
            continue
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            pending += ast.iter_child_nodes(node)
    return frozenset(found)

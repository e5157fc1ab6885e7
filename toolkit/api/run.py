"""``sm_train.Run``: a run file and everything that can be done with it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.aws.session import open_session, resolve_region
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.base.extras import require_local_run
from sm_train.toolkit.base.settings import default_profile
from sm_train.toolkit.memory.sharding_choice import with_sharding
from sm_train.toolkit.run_file.index_facts import with_index_file, with_stored_index
from sm_train.toolkit.run_file.run_file import load, load_dict
from sm_train.toolkit.terminal.console import stderr_console

if TYPE_CHECKING:
    from sagemaker.train import ModelTrainer
    from sm_train.estimators.request.training_request import TrainingRequest
    from sm_train.toolkit.api.checks import Checks
    from sm_train.toolkit.api.job import Job
    from sm_train.toolkit.api.local_run import LocalRun
    from sm_train.toolkit.checks.finding import Finding
    from sm_train.toolkit.planning.cost_result import Cost
    from sm_train.toolkit.submit.planned_job import PlannedJob
    from sm_train.toolkit.submit.submission import Submission


@dataclass(frozen=True, repr=False)
class Run:
    """A run: what a run file describes, validated.

    Create it with :meth:`load` or :meth:`from_dict`. ``config`` holds the values of the run file
    with their defaults, and ``folder`` is the folder that its relative paths start from. ``region``
    and ``profile`` are for AWS; without them they come from where the command line takes them:
    ``SM_TRAIN_*``, the run file, the configuration file, AWS's own configuration.

    Every method raises :class:`sm_train.Error` for what the caller can fix; its subclasses are the
    exit codes of the command line.
    """

    config: RunConfig
    folder: Path = field(default_factory=Path)
    region: str | None = None
    profile: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "profile", self.profile or default_profile())

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        set: Sequence[str] = (),
        region: str | None = None,
        profile: str | None = None,
    ) -> Run:
        """Load a run file.

        Args:
            path: The YAML file.
            set: Changes such as ``"cluster.retries=5"`` or ``"stages.256px.instances=8"``.
            region: The AWS region; default: the run file's, else the user's (`sm-train config`).
            profile: The AWS profile for credentials; default: the user's (`sm-train config`).

        Raises:
            UsageError: the file is invalid; one line for each mistake, with its line number.
        """
        path = Path(path)
        return cls(with_sharding(load(path, set)), path.parent, region, profile)

    @classmethod
    def from_dict(
        cls,
        document: Mapping[str, Any],
        *,
        folder: str | Path = ".",
        region: str | None = None,
        profile: str | None = None,
    ) -> Run:
        """Create a run from the content of a run file.

        Args:
            document: The keys and values of a run file (``sm-train schema`` describes them).
            folder: The folder that relative paths in it start from.
            region: The AWS region; default: the document's, else the user's (`sm-train config`).
            profile: The AWS profile for credentials; default: the user's (`sm-train config`).

        Raises:
            UsageError: the document is invalid; one line for each mistake.
        """
        config = with_sharding(load_dict(dict(document), Path(folder)))
        return cls(config, Path(folder), region, profile)

    @property
    def name(self) -> str:
        """The run's name."""
        return self.config.name

    @property
    def stages(self) -> tuple[str, ...]:
        """The names of the stages, in order."""
        return tuple(stage.name for stage in self.config.stages)

    @property
    def aws_region(self) -> str:
        """The region of the run: the argument's, the run file's or the environment's.

        Raises:
            AccessError: none of them names one.
        """
        return resolve_region(self.region, self.config.region, self.profile)

    def check(
        self,
        *,
        offline: bool = False,
        index: str | Path | None = None,
        components: str | None = None,
        progress: Callable[[int], None] = lambda objects: None,
    ) -> Checks:
        """Find errors and waste before money is spent.

        Args:
            offline: Skip the checks that need AWS.
            index: An ``index.parquet`` to use instead of the shards on this machine.
            components: A model to check the run with: a folder, ``s3://…`` or a Hub ID.
            progress: Called with the number of objects listed in S3 so far.

        Returns:
            The findings; ``ok`` is false if there is an error.

        Raises:
            AccessError: there are no valid credentials (not with ``offline``).
            UsageError: the index or the components cannot be read.
        """
        from sm_train.toolkit.api.checks import Checks
        from sm_train.toolkit.checks.finding import Subject
        from sm_train.toolkit.checks.preflight import offline_findings, online_findings
        from sm_train.toolkit.planning.history import recorded_history
        from sm_train.toolkit.planning.run_price import estimate_run

        if offline and components is not None and components.startswith("s3://"):
            raise UserError("--components: s3://… needs AWS; remove --offline")
        region = self.aws_region
        source = None if index is None else Path(index)
        session = None if offline else open_session(self.profile, region)
        config = self.config if session is None else with_stored_index(self.config, session)
        config = config if source is None else with_index_file(config, source)
        history = recorded_history(config, self.folder)
        estimate = estimate_run(config, region, history=history)
        subject = Subject(config, region, estimate, self.folder, source)
        subject = replace(subject, components=components)
        today = datetime.now(UTC).date()
        patched = tuple(self._patch_findings())
        if session is None:
            return Checks((*patched, *offline_findings(subject, today)))
        return Checks((*patched, *online_findings(subject, session, today, progress)))

    def _patch_findings(self) -> Iterator[Finding]:
        """Build the requests of a run with a patch, as `submit` does; AWS's model reads them."""
        from sm_train.toolkit.checks.run_file import REQUEST_PATCH

        if not self.config.cluster.request_patch:
            return
        cluster = self.config.cluster.model_copy(update={"request_patch": {}})
        unpatched = replace(self, config=self.config.model_copy(update={"cluster": cluster}))
        try:
            submission_of(unpatched, None)
        except UserError:
            return  # something else is wrong, which other checks report
        try:
            submission_of(self, None)
        except UserError as error:
            yield REQUEST_PATCH.found(
                "error",
                "cluster.request_patch",
                str(error).removeprefix("cluster.request_patch: "),
                "correct it; `sm-train submit RUN --request` prints the request",
            )

    def cost(
        self,
        stage: str | None = None,
        *,
        measured: Sequence[str | Path] = (),
        purchase: str = "on-demand",
        prices: str | Path | None = None,
        assume: Mapping[str, float] | None = None,
        learn: bool = False,
    ) -> Cost:
        """Estimate what the run costs, without AWS unless ``learn`` or a measured job needs it.

        Args:
            stage: Estimate only this stage.
            measured: Logs, folders of local runs or names of jobs to take it/s from.
            purchase: How the instances are bought, such as ``"savings-plan-1y-no-upfront"``.
            prices: A CSV file with prices of your own.
            assume: Figures of the cost model to replace, such as ``{"start_up_seconds": 300}``.
            learn: Use the history of the run's finished jobs, from S3.

        Returns:
            ``total``, ``low`` (P10) and ``high`` (P90) in dollars, and each stage. In a notebook
            it is shown as a table.

        Raises:
            UsageError: a value is implausible, or there is no such stage.
        """
        from sm_train.toolkit.planning.cost_result import price
        from sm_train.toolkit.planning.estimate_inputs import (
            CostOptions,
            inputs_of_run,
            usage_errors,
        )

        options = CostOptions(
            stage=stage,
            measured=tuple(map(str, measured)),
            region=self.region,
            profile=self.profile,
            purchase=purchase,
            prices=None if prices is None else Path(prices),
            assume=tuple(f"{name}={value}" for name, value in (assume or {}).items()),
            learn=learn,
        )
        with usage_errors():
            return price(inputs_of_run(options, self.config, self.folder))

    def request(self, stage: str | None = None) -> TrainingRequest:
        """Return the request for ``CreateTrainingJob`` that would start a stage.

        The URI of its code is where :meth:`submit` would stage it; nothing is uploaded.

        Args:
            stage: The stage; default: the first.

        Raises:
            UsageError: there is no such stage.
            PreflightError: SageMaker would reject the request.
        """
        return submission_of(self, stage or self.stages[0]).requests[0]

    def trainer(self, stage: str | None = None) -> ModelTrainer:
        """Return the SageMaker SDK's ``ModelTrainer`` for a stage, ready for ``train()``.

        ``train()`` stages the code, claims the job's name, records what ``resume`` and ``watch``
        need, and creates exactly the job of :meth:`request`, from the newest checkpoint if the
        stage has one. It does not ask for confirmation.

        Args:
            stage: The stage; default: the first.

        Raises:
            UsageError: the stage is running or done already, or the SDK is not installed
                (the extra ``aws``).
            AccessError: the role, credentials or a bucket is missing.
            PreflightError: the shards are missing or too few.
        """
        from sm_train.toolkit.submit.planned_job import trainer_of

        return trainer_of(self._planned_job(stage, auto_advance=False))

    def submit(
        self,
        stage: str | None = None,
        *,
        wait: bool = False,
        auto_advance: bool = False,
        take_over: bool = False,
        unproven: bool = False,
    ) -> Job:
        """Start a stage on SageMaker, from its newest checkpoint if it has one.

        It does not ask for confirmation: see :meth:`cost` first. A warning of the budget is a
        Python warning.

        Args:
            stage: The stage; default: the first.
            wait: Return when the job has ended.
            auto_advance: Let ``sm-train watch`` start each stage when the previous one is done.
            take_over: Continue from the checkpoints of a job on Kubernetes or Slurm that has ended.
            unproven: Start for more than $1,000 where no job or canary of the last 90 days has run.

        Returns:
            The started job.

        Raises:
            UsageError: the stage is running or done already, or the SDK is not installed
                (the extra ``aws``).
            AccessError: the role, credentials, a permission or a bucket is missing.
            PreflightError: the shards are missing or too few, SageMaker rejects the request, or
                nothing has run on the path of a large start.
            CapacityError: the account's quota is too small.
            OverBudgetError: the run costs more than its budget.
            JobFailedError: ``wait`` is set and the job failed.
        """
        from sm_train.toolkit.api.job import Job
        from sm_train.toolkit.submit.proven_path import require_proven
        from sm_train.toolkit.submit.submit import budget_warnings, start

        planned = self._planned_job(stage, auto_advance=auto_advance, take_over=take_over)
        plan = planned.plan
        config, request = plan.submission.config, planned.request
        require_proven(planned.session, config, plan.stage, request, plan.cost, unproven=unproven)
        for line in (*planned.warnings, *budget_warnings(planned)):
            warnings.warn(line, stacklevel=2)
        job = Job(start(planned).job, planned.plan.submission.region, self.profile)
        if wait:
            job.wait()
        return job

    def local(
        self,
        stage: str | None = None,
        *,
        nodes: int | None = None,
        processes: int = 1,
        steps: int | None = None,
        image: str | None = None,
        output: str | Path | None = None,
    ) -> LocalRun:
        """Train on this machine with the bundle that a job would get, and wait for the end.

        The same call resumes an interrupted run from its newest checkpoint.

        Args:
            stage: The stage; default: every stage, one after the other.
            nodes: The number of emulated nodes; default: the stage's, at most one per core.
            processes: Processes on each node.
            steps: Train only this many steps of each stage, as a quick test.
            image: Train in containers of this image instead of in processes.
            output: The folder for checkpoints, logs and the model; default: ``local-runs/NAME``.

        Returns:
            The folders of each stage, and the run as a :class:`Job` to review or diagnose.

        Raises:
            UsageError: the training packages are missing (the extra ``train``), or
                another local run uses the folder.
            JobFailedError: a process failed.
        """

        require_local_run(in_containers=image is not None)
        from sm_train.toolkit.api.local_run import LocalRun
        from sm_train.toolkit.submit.run_bundle import bundle_of
        from sm_train.toolkit.submit.submission import shortened
        from sm_train.toolkit.submit.train_locally import default_output, run_locally

        config = self.config if steps is None else shortened(self.config, steps)
        folder = default_output(config) if output is None else Path(output)
        stages = run_locally(
            config,
            bundle_of(self.config, self.folder),
            base=self.folder,
            stage=stage,
            nodes=nodes,
            processes=processes,
            output=folder,
            image=image,
            console=stderr_console(),
        )
        return LocalRun(folder, stages)

    def _planned_job(
        self, stage: str | None, *, auto_advance: bool, take_over: bool = False
    ) -> PlannedJob:
        from sm_train.toolkit.submit.planned_job import plan_job
        from sm_train.toolkit.submit.submit import session_for_jobs

        submission = submission_of(self, stage or self.stages[0])
        session, bucket = session_for_jobs(self.config, self.profile, submission.region)
        return plan_job(
            submission,
            session,
            bucket,
            cause="submit",
            auto_advance=auto_advance,
            take_over=take_over,
        )

    def __repr__(self) -> str:
        return f"Run({self.name!r}, stages {', '.join(self.stages)})"


def submission_of(run: Run, stage: str | None) -> Submission:
    """Build what ``submit`` sends for ``stage``, or for every stage; nothing is sent.

    Raises:
        UserError: there is no such stage, user code cannot be bundled, or SageMaker would reject a
            request.
    """
    from sm_train.toolkit.planning.history import recorded_history
    from sm_train.toolkit.submit.run_bundle import bundle_of, commit_of
    from sm_train.toolkit.submit.submission import prepare

    bundle = bundle_of(run.config, run.folder)
    commit = commit_of(run.folder)
    history = recorded_history(run.config, run.folder)
    return prepare(run.config, stage, bundle, run.aws_region, datetime.now(), commit, history)

"""Plans a stage's next job against the account, and starts it; nothing is printed or asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sm_train.cost.estimate import Estimate
from sm_train.estimators.config.stage import StageSection
from sm_train.estimators.request.request_patch import additions
from sm_train.estimators.request.training_request import TrainingRequest
from sm_train.toolkit.aws.aws_errors import translate_aws_errors
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.checks.training_data import require_components
from sm_train.toolkit.planning.history import History, history_uri, read_history, with_speeds
from sm_train.toolkit.planning.measured_speeds import applicable, read_measured_object
from sm_train.toolkit.planning.run_price import estimate_run
from sm_train.toolkit.planning.spent import Projection
from sm_train.toolkit.platforms.sagemaker.sagemaker_run import SageMakerRun
from sm_train.toolkit.records.launch_record import JobNameClaim
from sm_train.toolkit.records.stage_state import StageState
from sm_train.toolkit.records.training_job import jobs_of_run
from sm_train.toolkit.runs.remediation import StartJob, other_platform_message
from sm_train.toolkit.runs.run_state import projected, stages_of
from sm_train.toolkit.submit.changes import Changes, changes_since_last_job
from sm_train.toolkit.submit.relocation import job_launch, require_run_data, stage_relocated_code
from sm_train.toolkit.submit.replicate import replicate_inputs
from sm_train.toolkit.submit.start_job import resolve_job_name, with_attempt
from sm_train.toolkit.submit.submission import Submission, launch_record, with_stored_facts

if TYPE_CHECKING:
    import boto3
    from sagemaker.train import ModelTrainer

Progress = Callable[[int, int], None]
"""Called with the bytes that are copied and their total."""


@dataclass(frozen=True)
class RunPlan:
    """What is shown before a job starts.

    ``whole`` is the estimate of every stage, ``cost`` of what starts now: the steps of ``stage``
    after ``from_step``. ``projection`` is that of the whole run, None if its jobs are unknown.
    ``changes`` is None if there is no earlier job or it is not known.
    """

    submission: Submission
    stage: StageSection
    from_step: int
    cost: Estimate
    whole: Estimate
    projection: Projection | None = None
    changes: Changes | None = None


@dataclass(frozen=True)
class PlannedJob:
    """The next job of a run, planned against the account; nothing is started yet.

    ``session`` is in the run's home region, ``bucket`` is its home bucket, and ``stages`` are its
    stages as they are now. ``warnings`` are sentences about what could not be read.
    """

    plan: RunPlan
    session: boto3.Session
    bucket: str
    stages: tuple[StageState, ...]
    start: StartJob
    request: TrainingRequest
    history: History | None
    warnings: tuple[str, ...]

    @property
    def name(self) -> str:
        """The job's name."""
        name: str = self.request["TrainingJobName"]
        return name


def plan_offline(submission: Submission) -> RunPlan:
    """Return the plan of the submission's first stage from its first step, without the account."""
    config, region, stage = submission.config, submission.region, submission.stages[0]
    history = submission.history
    cost = estimate_run(config, region, (stage,), history)
    return RunPlan(submission, stage, 0, cost, estimate_run(config, region, history=history))


def plan_job(
    submission: Submission,
    session: boto3.Session,
    bucket: str,
    *,
    cause: str,
    auto_advance: bool,
    take_over: bool = False,
) -> PlannedJob:
    """Plan the submission's first stage, from its newest checkpoint if it has one.

    Raises:
        UserError: the stage is running or done already, data are missing, or AWS returns an error.
    """
    config, region, stage = submission.config, submission.region, submission.stages[0]
    require_run_data(session, config, region, stage.name)
    require_components(session, config)
    submission = with_stored_facts(submission, session)
    config = submission.config
    record = launch_record(submission, submission.requests[0])
    run = SageMakerRun(
        target=config.name,
        config=config,
        region=region,
        bucket=bucket,
        session=session,
        record=record,
    )
    stages, unread = stages_of(run)
    start = next_start(
        run.name, stages, stage, cause=cause, auto_advance=auto_advance, take_over=take_over
    )
    start = resolve_job_name(session, job_launch(run, start)).start
    history, warnings = _read_history(session, submission)
    projection = projected(run, stages, run.now())
    request = submission.requests[0]
    if start.attempt > 1 or start.from_step or auto_advance:
        request = with_attempt(request, config.name, start)
    plan = RunPlan(
        submission,
        stage,
        start.from_step,
        projection.estimates[stage.name],
        estimate_run(config, region, history=history),
        projection,
        changes_since_last_job(
            session,
            bucket,
            [job for state in stages for job in state.jobs],
            record.document,
            submission.commit,
        ),
    )
    warnings = (*unread, *warnings)
    return PlannedJob(plan, session, bucket, stages, start, request, history, warnings)


def changes_of(session: boto3.Session, bucket: str, submission: Submission) -> Changes | None:
    """Compare the submission with the run's last submitted job; None if there is none.

    Raises:
        UserError: AWS returns an error.
    """
    record = launch_record(submission, submission.requests[0])
    jobs = jobs_of_run(session, submission.config.name)
    return changes_since_last_job(session, bucket, jobs, record.document, submission.commit)


def trainer_of(planned: PlannedJob, progress: Progress = lambda done, total: None) -> ModelTrainer:
    """Return the SDK's trainer whose ``train()`` starts the planned job.

    ``train()`` claims the job's name, so of several processes only one starts it, and records what
    later jobs of the run need.
    """
    from sm_train.estimators.sdk.model_trainer import job_trainer

    submission, session = planned.plan.submission, planned.session

    @contextmanager
    def sending() -> Iterator[Callable[[TrainingRequest], None]]:
        replicate_inputs(session, planned.request, submission.region, planned.stages, progress)
        with ExitStack() as claims, translate_aws_errors("CreateTrainingJob"):

            def record_and_claim(sent: TrainingRequest) -> None:
                stage_relocated_code(session, submission.config, submission.bundle, sent)
                record = launch_record(submission, sent)
                record = replace(record, auto_advance=planned.start.auto_advance)
                claim = JobNameClaim(session, planned.bucket, planned.name, record)
                claims.enter_context(claim)

            yield record_and_claim

    return job_trainer(
        planned.request,
        submission.bundle,
        boto_session=session,
        bucket=planned.bucket,
        sending=sending,
        added=additions(submission.config.cluster),
    )


def start_planned(planned: PlannedJob, progress: Progress = lambda done, total: None) -> str:
    """Start the planned job and return its name.

    Raises:
        UserError: another process is starting the job, or AWS returns an error.
    """
    trainer_of(planned, progress).train(wait=False, logs=False)
    return planned.name


def next_start(
    run: str,
    stages: Sequence[StageState],
    stage: StageSection,
    *,
    cause: str,
    auto_advance: bool,
    take_over: bool,
) -> StartJob:
    """Return the start of the stage's next job.

    With ``take_over`` it may continue from a checkpoint that another platform wrote.

    Raises:
        UserError: a job of the stage is live, the stage is done, or its newest checkpoint was
            written on another platform.
    """
    [state] = [candidate for candidate in stages if candidate.name == stage.name]
    job = state.job
    if job is not None and job.live:
        raise UserError(
            f"{stage.name}: {job.name} is {job.status}; a stage has one job at a time: `sm-train "
            f"status {run}` shows it, `sm-train stop {run}` ends it"
        )
    if state.state == "done":
        raise UserError(
            f"{stage.name}: is done; choose another with --stage, raise its max_steps, or give "
            "the run another name"
        )
    if state.other_platform is not None and not take_over:
        raise UserError(other_platform_message(state))
    attempt = job.attempt + 1 if job else 1
    return StartJob(stage.name, attempt, state.resumes_from, cause, "", auto_advance)


def _read_history(
    session: boto3.Session, submission: Submission
) -> tuple[History | None, tuple[str, ...]]:
    """Return what the run's finished jobs and `sm-train measure` showed; with a warning, only what
    is recorded next to the run file if the bucket's record is unreadable.
    """
    config, region = submission.config, submission.region
    try:
        history = read_history(session, history_uri(config, region))
        speeds, unused = applicable(config, read_measured_object(session, config, region))
    except UserError as error:
        return submission.history, (f"estimated without the run's history: {error}",)
    recorded = submission.history.stage_measurements() if submission.history else []
    return with_speeds(history, [*recorded, *speeds]), tuple(unused)

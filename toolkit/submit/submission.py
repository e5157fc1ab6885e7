"""A submission before it is sent: bundle, requests and estimate, without any side effect."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from typing import TYPE_CHECKING, Any

from sm_train.cost.estimate import Estimate, Purchase, hourly_price
from sm_train.cost.json_document import as_document
from sm_train.estimators.bundle.bundle import Bundle, run_document
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection
from sm_train.estimators.request.images import image_uri
from sm_train.estimators.request.launch_plan import LaunchPlan, launch_plans
from sm_train.estimators.request.request_patch import RequestPatchError
from sm_train.estimators.request.training_request import (
    TrainingRequest,
    staged_uri,
    training_request,
    training_requests,
)
from sm_train.toolkit.base.errors import ExitCode, UserError
from sm_train.toolkit.base.extras import is_installed
from sm_train.toolkit.planning.history import History
from sm_train.toolkit.planning.price_table import price_table
from sm_train.toolkit.planning.run_price import estimate_run
from sm_train.toolkit.planning.training_plans import TrainingPlan, described_plan
from sm_train.toolkit.records.launch_record import LaunchRecord
from sm_train.toolkit.records.training_job import PRICE_TAG, price_tag
from sm_train.toolkit.run_file.index_facts import Expiries, stored_expiries, with_stored_index
from sm_train.toolkit.submit.relocation import (
    RelocatedDocuments,
    relocated_documents,
    relocated_requests,
)

if TYPE_CHECKING:
    import boto3


class SubmissionDocument(RelocatedDocuments):
    """The document of ``submit --dry-run --json``; ``training_plan`` is that of the run, if any."""

    training_plan: dict[str, Any] | None
    requests: list[TrainingRequest]
    cost: dict[str, Any]
    bundle: dict[str, object]


@dataclass(frozen=True)
class Submission:
    """The chosen stages of a run, ready to be shown or sent.

    ``launches`` holds every stage's launch plan by name; ``requests`` are those of ``stages``.
    ``history`` holds the speeds that are recorded next to the run file. ``expiries`` say when the
    samples of the indexes in S3 expire, as far as they are known.
    """

    config: RunConfig
    region: str
    stages: tuple[StageSection, ...]
    launches: Mapping[str, LaunchPlan]
    requests: tuple[TrainingRequest, ...]
    bundle: Bundle
    commit: str | None
    cost: Estimate
    history: History | None = None
    expiries: tuple[Expiries, ...] = ()
    training_plan: TrainingPlan | None = None
    plan_unknown: str | None = None
    """Why the training plan could not be described."""

    def as_dict(self) -> SubmissionDocument:
        """Return the document of ``submit --dry-run --json``."""
        plan = self.training_plan
        return {
            "training_plan": None if plan is None else plan.document(datetime.now(UTC)),
            "requests": list(self.requests),
            "cost": as_document(self.cost),
            "bundle": self.bundle.as_dict(),
            **relocated_documents(self.config, self.region, self.requests),
        }


def prepare(
    config: RunConfig,
    stage: str | None,
    bundle: Bundle,
    region: str,
    now: datetime,
    commit: str | None = None,
    history: History | None = None,
) -> Submission:
    """Build the submission of ``stage``, or of every stage.

    Raises:
        UserError: there is no such stage, AWS has no image for the region, or SageMaker would
            reject a request.
    """
    stages = choose_stages(config, stage)
    try:
        image = image_uri(config, region)
    except ValueError as error:
        raise UserError(str(error)) from None
    launches = launch_plans(config, config.stages, image)
    chosen = {stage.name: launches[stage.name] for stage in stages}
    try:
        made = training_requests(config, chosen, bundle, region=region, now=now, commit=commit)
    except RequestPatchError as error:
        raise UserError(str(error)) from None
    requests = [_with_price(request, config, region) for request in made]
    relocated = relocated_requests(config, region, requests)
    for request in (*requests, *(other for _, others in relocated for other in others)):
        validate(request)
    return Submission(
        config=config,
        region=region,
        stages=stages,
        launches=launches,
        requests=tuple(requests),
        bundle=bundle,
        commit=commit,
        cost=estimate_run(config, region, stages, history),
        history=history,
    )


def _with_price(request: TrainingRequest, config: RunConfig, region: str) -> TrainingRequest:
    """Return the request with a tag of the price with which the plan is made, if it is known.

    The machine that watches the run may know another one, or none.
    """
    purchase = Purchase(region, config.cluster.capacity)
    price = hourly_price(config.cluster.instance_type, purchase, price_table())
    value = price_tag(price, purchase.price_kind)
    if value is None:
        return request
    tagged = deepcopy(request)
    others = [tag for tag in request["Tags"] if tag["Key"] != PRICE_TAG]
    tagged["Tags"] = [*others, {"Key": PRICE_TAG, "Value": value}]
    return tagged


def with_stored_facts(submission: Submission, session: boto3.Session) -> Submission:
    """Return the submission with what AWS knows of its data and its training plan, and priced by
    them.

    Raises:
        UserError: AWS returns an error.
    """
    config, region = with_stored_index(submission.config, session), submission.region
    plan, unknown = described_plan(session, config)  # its price first, which the rest uses
    return replace(
        submission,
        config=config,
        requests=tuple(_with_price(request, config, region) for request in submission.requests),
        cost=estimate_run(config, region, submission.stages, submission.history),
        expiries=stored_expiries(config, session),
        training_plan=plan,
        plan_unknown=unknown,
    )


def launch_record(submission: Submission, sent: TrainingRequest) -> LaunchRecord:
    """Return the record from which later jobs of the run start, now that code is staged for
    ``sent``.

    All stages share the code. A stage that starts by torchrun also needs the SDK's start script,
    which is not staged for a stage that starts by smddp.
    """
    config, launches = submission.config, submission.launches
    routes = {launches[stage.name].route for stage in submission.stages}
    requests = {
        stage.name: _with_price(
            training_request(
                config,
                stage,
                launches[stage.name],
                submission.bundle,
                region=submission.region,
                staged=staged_uri(sent),
                commit=submission.commit,
            ),
            config,
            submission.region,
        )
        for stage in config.stages
        if "torchrun" in routes or launches[stage.name].route == "smddp"
    }
    # The staged requirements fit this PyTorch: a newer sm-train, whose default may differ, must
    # not choose another image when it computes the request of another cluster or region.
    version = launches[submission.stages[0].name].framework_version
    pinned = config.cluster.model_copy(update={"framework_version": version})
    if config.cluster.image is None:
        config = config.model_copy(update={"cluster": pinned})
    return LaunchRecord(run_document(config), requests)


def shortened(config: RunConfig, steps: int) -> RunConfig:
    """Return the run with ``steps`` optimizer steps in each stage, and ten lines of progress."""
    stages = [stage.model_copy(update={"max_steps": steps}) for stage in config.stages]
    log_every = min(config.training.log_every, max(1, steps // 10))
    training = config.training.model_copy(update={"log_every": log_every})
    return config.model_copy(update={"stages": stages, "training": training})


def choose_stages(config: RunConfig, name: str | None) -> tuple[StageSection, ...]:
    """Return the stage called ``name``, or all of them.

    Raises:
        UserError: there is no such stage.
    """
    chosen = tuple(stage for stage in config.stages if name in (None, stage.name))
    if not chosen:
        names = ", ".join(stage.name for stage in config.stages)
        raise UserError(f"--stage: {name!r} is not in the run file; it has {names}")
    return chosen


def validate(request: TrainingRequest) -> None:
    """Validate the request against botocore's model of the service, offline.

    An installation without botocore, which can send no request, does not validate it.

    Raises:
        UserError: SageMaker would reject the request.
    """
    if not is_installed("botocore"):
        return
    import botocore.validate

    report = botocore.validate.ParamValidator().validate(request, _request_shape())
    if report.has_errors():
        raise UserError(
            f"{request['TrainingJobName']}: SageMaker would reject the request: "
            f"{report.generate_report()}",
            ExitCode.PREFLIGHT,
        )


@cache
def _request_shape() -> Any:
    """Return botocore's model of the request, which takes 30 ms to read."""
    import botocore.loaders
    import botocore.model

    document = botocore.loaders.Loader().load_service_model("sagemaker", "service-2")
    return botocore.model.ServiceModel(document).operation_model("CreateTrainingJob").input_shape

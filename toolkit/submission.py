"""What a submission is before it is sent: bundle, requests and estimate, with no effect at all."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sm_train.cost.assumptions import Assumptions, learned
from sm_train.cost.document import as_document
from sm_train.cost.estimate import Estimate, Purchase, estimate
from sm_train.estimators.bundle import Bundle, run_document
from sm_train.estimators.images import image_uri
from sm_train.estimators.launch import Launch, launch
from sm_train.estimators.request import (
    TrainingRequest,
    staged_uri,
    training_request,
    training_requests,
)
from sm_train.estimators.run_config import RunConfig, Stage
from sm_train.toolkit.errors import ExitCode, UserError
from sm_train.toolkit.job_records import Record
from sm_train.toolkit.price_book import price_table
from sm_train.toolkit.priced_stages import stages_to_price
from sm_train.toolkit.run_history import History


@dataclass(frozen=True)
class Submission:
    """The chosen stages of a run, ready to be shown or sent."""

    config: RunConfig
    region: str
    stages: tuple[Stage, ...]
    launches: tuple[Launch, ...]
    requests: tuple[TrainingRequest, ...]
    bundle: Bundle
    image: str
    commit: str | None
    cost: Estimate

    def as_dict(self) -> dict[str, Any]:
        """The contract of ``submit --dry-run --json``."""
        return {
            "requests": list(self.requests),
            "cost": as_document(self.cost),
            "bundle": self.bundle.as_dict(),
        }


def prepare(
    config: RunConfig,
    stage: str | None,
    bundle: Bundle,
    region: str,
    now: datetime,
    commit: str | None = None,
) -> Submission:
    """Build the submission of ``stage``, or of every stage.

    Raises:
        UserError: no such stage, or AWS has no image for the region.
    """
    stages = choose_stages(config, stage)
    try:
        image = image_uri(config, region)
    except ValueError as error:
        raise UserError(str(error)) from None
    requests = tuple(
        training_requests(
            config, stages, bundle, region=region, image=image, now=now, commit=commit
        )
    )
    for request in requests:
        validate(request)
    return Submission(
        config=config,
        region=region,
        stages=stages,
        launches=tuple(launch(config, stage) for stage in stages),
        requests=requests,
        bundle=bundle,
        image=image,
        commit=commit,
        cost=price(config, region, stages),
    )


def record_of(submission: Submission, sent: TrainingRequest) -> Record:
    """What going on with the run takes, now that its code is staged as ``sent`` says.

    The code is the same for every stage. What starts by torchrun needs the SDK's start script
    beside it, which is not staged for a stage that starts by smddp.
    """
    config, staged = submission.config, staged_uri(sent)
    started = {launch(config, stage).route for stage in submission.stages}
    requests = {
        stage.name: training_request(
            config,
            stage,
            submission.bundle,
            region=submission.region,
            image=submission.image,
            staged=staged,
            commit=submission.commit,
        )
        for stage in config.stages
        if "torchrun" in started or launch(config, stage).route == "smddp"
    }
    return Record(run_document(config), requests)


def price(
    config: RunConfig,
    region: str,
    stages: tuple[Stage, ...] | None = None,
    history: History | None = None,
) -> Estimate:
    """The estimate of ``stages``, or of the whole run, with what its finished jobs showed.

    Raises:
        UserError: a figure of the run file that nobody could mean, such as a thousand years.
    """
    names = {stage.name for stage in stages or config.stages}
    try:
        measured = history.measured() if history else []
        chosen = [one for one in stages_to_price(config, measured) if one.name in names]
        assumed = learned(Assumptions(), history.observed) if history else None
        purchase = Purchase(region, config.cluster.capacity)
        return estimate(chosen, purchase, assumed=assumed, prices=price_table())
    except ValueError as error:
        raise UserError(str(error)) from None


def price_of_rest(
    config: RunConfig, region: str, stage: Stage, from_step: int, history: History | None = None
) -> Estimate:
    """The estimate of what ``stage`` has still to do."""
    return price_iterations(config, region, stage, max(1, stage.iterations - from_step), history)


def price_iterations(
    config: RunConfig, region: str, stage: Stage, iterations: int, history: History | None = None
) -> Estimate:
    """The estimate of so many iterations of ``stage``, with a start-up of their own."""
    part = stage.model_copy(update={"iterations": iterations})
    stages = [part if one is stage else one for one in config.stages]
    return price(config.model_copy(update={"stages": stages}), region, (part,), history)


def choose_stages(config: RunConfig, name: str | None) -> tuple[Stage, ...]:
    """The stage called ``name``, or all of them."""
    chosen = tuple(stage for stage in config.stages if name in (None, stage.name))
    if not chosen:
        names = ", ".join(stage.name for stage in config.stages)
        raise UserError(f"--stage: {name!r} is not in the run file; it has {names}")
    return chosen


def validate(request: TrainingRequest) -> None:
    """Hold the request against botocore's own model of the service, offline."""
    import botocore.loaders
    import botocore.model
    import botocore.validate

    document = botocore.loaders.Loader().load_service_model("sagemaker", "service-2")
    operation = botocore.model.ServiceModel(document).operation_model("CreateTrainingJob")
    shape: Any = operation.input_shape
    report = botocore.validate.ParamValidator().validate(request, shape)
    if report.has_errors():
        raise UserError(
            f"{request['TrainingJobName']}: SageMaker would refuse the request: "
            f"{report.generate_report()}",
            ExitCode.PREFLIGHT,
        )

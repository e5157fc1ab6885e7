"""What a submission is before it is sent: bundle, requests and estimate, with no effect at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sm_train.cost.estimate import Estimate
from sm_train.cost.json_document import as_document
from sm_train.estimators.bundle.bundle import Bundle, rebuild_bundle, run_document
from sm_train.estimators.config.placement import Placement, placements
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection
from sm_train.estimators.request.images import image_uri
from sm_train.estimators.request.launcher import LaunchPlan, launch_plan, pytorch_version
from sm_train.estimators.request.training import (
    TrainingRequest,
    request_elsewhere,
    staged_uri,
    training_request,
    training_requests,
)
from sm_train.toolkit.costing.run_price import estimate_run
from sm_train.toolkit.errors import ExitCode, UserError
from sm_train.toolkit.jobs.launch_record import LaunchRecord


@dataclass(frozen=True)
class Submission:
    """The chosen stages of a run, ready to be shown or sent."""

    config: RunConfig
    region: str
    stages: tuple[StageSection, ...]
    launches: tuple[LaunchPlan, ...]
    requests: tuple[TrainingRequest, ...]
    bundle: Bundle
    image: str
    commit: str | None
    cost: Estimate
    elsewhere: tuple[FallbackTarget, ...]

    def as_dict(self) -> dict[str, Any]:
        """The contract of ``submit --dry-run --json``."""
        names = [stage.name for stage in self.stages]
        own = dict(zip(names, self.requests, strict=True))
        return {
            "requests": list(self.requests),
            "cost": as_document(self.cost),
            "bundle": self.bundle.as_dict(),
            "fallbacks": [
                {
                    "place": one.place.number,
                    "region": one.place.region,
                    "requests": list(one.requests(own, self.commit).values()),
                    "cost": as_document(one.cost(self.config, names)),
                }
                for one in self.elsewhere
            ],
        }


@dataclass(frozen=True)
class FallbackTarget:
    """The run at one of its fallbacks, with the bundle and the image that its jobs get there."""

    place: Placement
    bundle: Bundle
    image: str

    def requests(
        self, own: Mapping[str, TrainingRequest], commit: str | None
    ) -> dict[str, TrainingRequest]:
        """By the stages' names, for those that ``own``, the run's own requests, are of."""
        return {
            stage.name: request_elsewhere(
                training_request(
                    self.place.config,
                    stage,
                    self.bundle,
                    region=self.place.region,
                    image=self.image,
                    staged=self.staged(staged_uri(own[stage.name])),
                    commit=commit,
                ),
                own[stage.name],
                self.place.number,
            )
            for stage in self.place.config.stages
            if stage.name in own
        }

    def staged(self, uri: str) -> str:
        """The folder of the code there; ``uri`` is that of the run's own place."""
        path = uri.split("/", 3)[3]
        return f"s3://{self.place.bucket}/{path}-{self.place.number}"

    def cost(self, stated: RunConfig, names: Sequence[str]) -> Estimate:
        """The estimate of the stages called ``names``, if they were all there."""
        stages = tuple(one for one in self.place.config.stages if one.name in names)
        return estimate_run(self.place.config, self.place.region, stages, stated=stated)


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
    submission = Submission(
        config=config,
        region=region,
        stages=stages,
        launches=tuple(launch_plan(config, stage) for stage in stages),
        requests=requests,
        bundle=bundle,
        image=image,
        commit=commit,
        cost=estimate_run(config, region, stages),
        elsewhere=_elsewhere(config, region, bundle),
    )
    own = dict(zip([stage.name for stage in stages], requests, strict=True))
    for request in requests:
        validate(request)
    for one in submission.elsewhere:
        for request in one.requests(own, commit).values():
            validate(request)
    return submission


def _elsewhere(config: RunConfig, region: str, bundle: Bundle) -> tuple[FallbackTarget, ...]:
    """The run at its fallbacks.

    Raises:
        UserError: a stage would start another way there, or AWS has no image for it.
    """
    found = []
    for place in placements(config, region)[1:]:
        if problem := other_start(config, place):
            raise UserError(f"{place.where}: {problem}")
        try:
            image = image_uri(place.config, place.region)
        except ValueError as error:
            raise UserError(f"{place.where}: {error}") from None
        version = pytorch_version(place.config)
        same = version == pytorch_version(config)
        there = rebuild_bundle(bundle.archive, place.config, version, same_image=same)
        found.append(FallbackTarget(place, there, image))
    return tuple(found)


def other_start(config: RunConfig, place: Placement) -> str | None:
    """What keeps a stage from going on at ``place``: a run starts one way, with one PyTorch."""
    for here, there in zip(config.stages, place.config.stages, strict=True):
        ways = launch_plan(config, here).route, launch_plan(place.config, there).route
        if len(set(ways)) > 1:
            return (
                f"{here.name} starts by {ways[0]} at first and by {ways[1]} there, from another "
                "image; write cluster.backend: nccl, which both can"
            )
    return None


def launch_record(submission: Submission, sent: TrainingRequest) -> LaunchRecord:
    """What going on with the run takes, now that its code is staged as ``sent`` says.

    The code is the same for every stage. What starts by torchrun needs the SDK's start script
    beside it, which is not staged for a stage that starts by smddp.
    """
    config, staged = submission.config, staged_uri(sent)
    started = {launch_plan(config, stage).route for stage in submission.stages}
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
        if "torchrun" in started or launch_plan(config, stage).route == "smddp"
    }
    there = [one.requests(requests, submission.commit) for one in submission.elsewhere]
    return LaunchRecord(run_document(config), requests, there)


def choose_stages(config: RunConfig, name: str | None) -> tuple[StageSection, ...]:
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

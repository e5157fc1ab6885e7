"""A streaming pack with its stack on a moto server, as `sm-train stream` sees it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from cfnlint.decode import cfn_yaml
from sm_train.entrypoints.data_prep.streaming import lambda_handler

from tests.conftest import Aws, Cli
from tests.support.aws.policy_enforcement import Permission
from tests.support.background_server import serve_in_background
from tests.support.moto_server import ACCOUNT
from tests.support.streaming.deployment import Deployment, FakeContext, deploy

SEALER = "photo-pack-Sealer-1"


class _Functions(BaseHTTPRequestHandler):
    """Lambda's API for invocations of the function that seals shards."""

    server: FunctionServer

    def do_POST(self) -> None:
        assert self.path == f"/2015-03-31/functions/{SEALER}/invocations"
        event = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        function = f"arn:aws:lambda:us-east-1:{ACCOUNT}:function:{SEALER}"
        aws = self.server.aws
        if aws.missing({}, [Permission("lambda:InvokeFunction", function)]):
            self.send_error(403)
            return
        self.send_response(200)
        if self.server.error is None:
            # The function has a role of its own.
            policy, aws.policy = aws.policy, None
            answer = lambda_handler.seal(event, FakeContext())
            aws.policy = policy
        else:
            self.send_header("X-Amz-Function-Error", "Unhandled")
            answer = {"errorMessage": self.server.error, "errorType": "Runtime.ExitError"}
        content = json.dumps(answer).encode()
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None: ...


class FunctionServer(ThreadingHTTPServer):
    error: str | None = None

    def __init__(self, aws: Aws) -> None:
        super().__init__(("127.0.0.1", 0), _Functions)
        self.aws = aws


class Stack:
    """The stack ``photo-pack`` of the template, without its functions, which this process runs."""

    def __init__(
        self, deployment: Deployment, cli: Cli, functions: FunctionServer, **parameters: str
    ) -> None:
        self.deployment, self._cli, self.functions = deployment, cli, functions
        # Parsed with CloudFormation's short forms of functions, such as !Sub.
        document = cfn_yaml.loads(cli("template", "pack-lambda").stdout)
        template = json.loads(json.dumps(document))
        for key in ("Transform", "Globals"):
            del template[key]
        for name in ("Stager", "Sealer", "PackedAccess", "ArrivalsPolicy"):
            del template["Resources"][name]
        template["Outputs"]["SealerName"]["Value"] = SEALER
        values = {"RawBucket": "raw", "PackedBucket": "packed", "PackedPrefix": "set"}
        values |= {"ImageUri": "image", "ShardBytes": "20000"} | parameters
        deployment.aws.client("cloudformation").create_stack(
            StackName="photo-pack",
            TemplateBody=json.dumps(template),
            Parameters=[
                {"ParameterKey": key, "ParameterValue": value} for key, value in values.items()
            ],
        )
        [stack] = deployment.aws.client("cloudformation").describe_stacks()["Stacks"]
        outputs = {entry["OutputKey"]: entry["OutputValue"] for entry in stack["Outputs"]}
        deployment.queue, deployment.dead_letters = outputs["QueueUrl"], outputs["Rejected"]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self._cli(
            *("--region", "us-east-1", "stream", "photo-pack", *arguments),
            network="loopback",
            env=self.deployment.aws.environment
            | {"AWS_ENDPOINT_URL_LAMBDA": f"http://127.0.0.1:{self.functions.server_port}"},
        )

    def status(self) -> dict[str, Any]:
        run = self.run("--json")
        assert run.returncode == 0, run.stderr
        document: dict[str, Any] = json.loads(run.stdout)
        return document

    def put_unannounced(self, key: str, content: bytes) -> None:
        """Put an image that was in the bucket before its notifications."""
        self.deployment.s3.put_object(Bucket="raw", Key=key, Body=content)
        caption = f"{key.rpartition('.')[0]}.txt"
        self.deployment.s3.put_object(Bucket="raw", Key=caption, Body=b"a caption")


@contextmanager
def stream_stack(
    aws: Aws, cli: Cli, monkeypatch: pytest.MonkeyPatch, **parameters: str
) -> Iterator[Stack]:
    """Run a stack with parameters of its template; its functions have them in the environment."""
    functions = FunctionServer(aws)
    monkeypatch.setenv("SM_TRAIN_COLUMNS", parameters.get("Columns", ""))
    monkeypatch.setenv("SM_TRAIN_COLUMNS_FROM", parameters.get("ColumnsFrom", "sidecar"))
    with serve_in_background(functions):
        yield Stack(deploy(aws, monkeypatch), cli, functions, **parameters)

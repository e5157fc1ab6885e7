#!/usr/bin/env bash
# moto 5.2.5 in server mode answers IAM's SimulatePrincipalPolicy with a page of HTML.
#
# Expected: an AWS error document, which botocore raises as a ClientError with a code such as
# NotImplemented, as for any other call that AWS refuses.
# Seen: status 500 with HTML. botocore cannot parse it and raises ResponseParserError, which is no
# ClientError and no BotoCoreError: code that catches both lets it pass.
# So: a program that checks permissions before it starts must catch ResponseParserError too. A
# proxy between it and AWS that answers with a page of its own leads to the same exception.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --quiet --quiet --disable-pip-version-check "moto[server]==5.2.5" \
    "boto3==1.44.8" "botocore==1.44.8"
"$folder/venv/bin/python" - >"$folder/seen" 2>/dev/null <<'PYTHON'
import boto3
from botocore.exceptions import BotoCoreError, ClientError
from moto.server import ThreadedMotoServer

server = ThreadedMotoServer(port=0, verbose=False)
server.start()
host, port = server.get_host_and_port()
iam = boto3.client(
    "iam",
    region_name="us-east-1",
    endpoint_url=f"http://127.0.0.1:{port}",
    aws_access_key_id="test",
    aws_secret_access_key="test",
)
role = iam.create_role(RoleName="trainer", AssumeRolePolicyDocument="{}")["Role"]["Arn"]
try:
    iam.simulate_principal_policy(PolicySourceArn=role, ActionNames=["s3:GetObject"])
    print("an answer")
except Exception as error:
    kinds = isinstance(error, ClientError), isinstance(error, BotoCoreError)
    print(type(error).__name__, *kinds)
server.stop()
PYTHON
echo "ResponseParserError False False" | diff - "$folder/seen"

"""Credentials of every kind are found in texts, notebooks, archives and settings."""

from __future__ import annotations

import base64
import gzip
import io
import json
import random
import string
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sm_train.estimators.secrets import secret_files
from sm_train.estimators.secrets.secret_scan import (
    UnsearchedFile,
    find_secret,
    find_secret_in_setting,
    find_secrets,
)

HEX = "0123456789abcdef"
ALNUM = string.ascii_letters + string.digits
URL_SAFE = ALNUM + "-_"
BASE64 = ALNUM + "+/"
BASE32 = string.ascii_uppercase + "234567"


def planted_secrets(seed: int = 0) -> dict[str, tuple[str, str]]:
    """Return kind → (line of a file, the secret in it); none of them was ever valid.

    Prefixes are joined at run time, so that no scanner takes this file for a leak.
    """
    generator = random.Random(seed)

    def chars(alphabet: str, length: int) -> str:
        # Start with a letter and a digit, so that no value is a number or a word by chance.
        body = "".join(generator.choices(alphabet, k=length - 2))
        return next(c for c in alphabet if c.isalpha()) + "7" + body

    def uuid() -> str:
        return "-".join("".join(generator.choices(HEX, k=n)) for n in (8, 4, 4, 4, 12))

    def segment(text: str) -> str:
        return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")

    header, payload = segment('{"alg":"HS256"}'), segment('{"sub":"1234567890"}')
    jwt = f"{header}.{payload}.{chars(URL_SAFE, 43)}"
    pair = base64.b64encode(f"robot:{chars(ALNUM, 20)}".encode()).decode()
    values: dict[str, tuple[str, str]] = {}

    def plant(kind: str, line: Callable[[str], str] | str, secret: str) -> None:
        text = line(secret) if callable(line) else line.replace("@@", secret)
        values[kind] = (text, secret)

    plant("AWS access key", "aws_access_key_id = '@@'", "AKIA" + chars(BASE32, 16).upper())
    plant("AWS temporary key", "key: @@", "ASIA" + chars(BASE32, 16).upper())
    plant("AWS secret key", "AWS_SECRET_ACCESS_KEY=@@", chars(BASE64, 40))
    plant("AWS secret key in JSON", '{"SecretAccessKey": "@@"}', chars(BASE64, 39) + "/")
    plant("AWS session token", '"SessionToken": "@@"', "IQoJ" + chars(BASE64, 300))
    plant("private key", "@@", "-----BEGIN " + "OPENSSH PRIVATE KEY-----")
    plant("PGP private key", "@@", "-----BEGIN " + "PGP PRIVATE KEY BLOCK-----")
    plant("PuTTY private key", "@@-3: ssh-ed25519", "PuTTY-User-Key-" + "File")
    hook = "https://hooks.slack" + ".com/services/"
    plant(
        "Slack webhook",
        "url = '@@'",
        f"{hook}T{chars(ALNUM, 8)}/B{chars(ALNUM, 8)}/{chars(ALNUM, 24)}",
    )
    plant("Slack bot token", "token='@@'", "xoxb" + f"-123456789012-{chars(ALNUM, 24)}")
    plant("Slack app token", "@@", "xapp" + f"-1-A0123456789-{chars(HEX, 64)}")
    plant(
        "Discord webhook",
        "@@",
        f"https://discord.com/api/webhooks/1234567890/{chars(URL_SAFE, 68)}",
    )
    plant(
        "Discord bot token",
        "client.run('@@')",
        f"M{chars(ALNUM, 23)}.{chars(URL_SAFE, 6)}.{chars(URL_SAFE, 38)}",
    )
    teams = f"https://acme.webhook.office.com/webhookb2/{uuid()}@{uuid()}/IncomingWebhook/"
    plant("Teams webhook", "@@", f"{teams}{chars(HEX, 32)}/{uuid()}")
    plant("Telegram bot token", "bot = '@@'", f"1234567890:AA{chars(URL_SAFE, 32)}a")
    plant("GitHub token", "git clone with @@", "ghp_" + chars(ALNUM, 36))
    plant("GitHub fine-grained token", "@@", "github_pat_" + chars(ALNUM, 82))
    plant("GitHub token in a URL", "https://@@@github.com/acme/code", "x7" + chars(ALNUM, 38))
    plant("GitLab token", "@@", "glpat-" + chars(URL_SAFE, 20))
    plant("Hugging Face token", "login('@@')", "hf_" + chars(string.ascii_letters + "7", 34))
    plant("W&B key", "WANDB_API_KEY=@@", chars(HEX, 40))
    plant("W&B key in code", "wandb.login(key='@@')", chars(HEX, 40))
    plant("W&B key, new format", "@@", "wandb_v1_" + chars(ALNUM + "_", 77))
    plant("OpenAI key", "@@", "sk-proj-" + chars(URL_SAFE, 48))
    plant("Anthropic key", "@@", "sk-ant-api03-" + chars(URL_SAFE, 93) + "AA")
    plant("Replicate token", "@@", "r8_" + chars(ALNUM, 37))
    plant("NGC key", "@@", "nvapi-" + chars(URL_SAFE, 64))
    plant("Groq key", "@@", "gsk_" + chars(ALNUM, 52))
    plant("Google API key", "@@", "AIza" + chars(URL_SAFE, 35))
    plant("Google OAuth client secret", "@@", "GOCSPX-" + chars(URL_SAFE, 28))
    plant("Google OAuth token", "@@", "ya29." + chars(URL_SAFE, 100))
    account = "DefaultEndpointsProtocol=https;AccountName=acme;AccountKey="
    plant("Azure storage key", account + "@@", chars(BASE64, 86) + "==")
    plant(
        "Azure SAS",
        "https://acme.blob.core.windows.net/c?sv=2024-01-01&sig=@@",
        chars(ALNUM, 43) + "%3D",
    )
    plant("Azure client secret", "client = '@@'", f"a7b8Q~{chars(ALNUM, 34)}")
    plant("Databricks token", "@@", "dapi" + chars(HEX, 32))
    plant("DigitalOcean token", "@@", "dop_v1_" + chars(HEX, 64))
    plant("npm token", "@@", "npm_" + chars(ALNUM, 36))
    plant("PyPI token", "@@", "pypi-" + "AgEIcHlwaS5vcmc" + chars(URL_SAFE, 70))
    plant("Stripe key", "@@", "sk_live_" + chars(ALNUM, 24))
    plant("SendGrid key", "@@", f"SG.{chars(URL_SAFE, 22)}.{chars(URL_SAFE, 43)}")
    plant("Mailgun key", "@@", "key-" + chars(HEX, 32))
    plant("Mailchimp key", "@@", chars(HEX, 32) + "-us12")
    plant("Twilio key", "@@", "SK" + chars(HEX, 32))
    plant("Shopify token", "@@", "shpat_" + chars(HEX, 32))
    plant("Vault token", "@@", "hvs." + chars(URL_SAFE, 92))
    plant("Terraform Cloud token", "@@", f"{chars(ALNUM, 14)}.atlasv1.{chars(ALNUM, 64)}")
    plant("Datadog key", "DD_API_KEY=@@", chars(HEX, 32))
    plant("Grafana token", "@@", f"glsa_{chars(ALNUM, 32)}_{chars(HEX, 8)}")
    plant("Kaggle key", '{"username": "ann", "key": "@@"}', chars(HEX, 32))
    plant("JWT", "@@", jwt)
    plant("authorization header", "Authorization: Bearer @@", chars(URL_SAFE, 40))
    plant("basic authorization header", "headers = {'Authorization': 'Basic @@'}", pair)
    plant("container registry password", '{"auths": {"ghcr.io": {"auth": "@@"}}}', pair)
    plant(".netrc", "machine api.acme.com login ann password @@", chars(ALNUM, 9))
    plant("database URL", "postgresql://ann:@@@db.acme.com/train", chars(ALNUM, 9))
    plant("Redis URL", "redis://:@@@cache.acme.com:6379/0", chars(ALNUM, 9))
    # Formats of services, from their documentation and from gitleaks' rules (July 2026).
    for kind, secret in {
        "GitLab workspace token": "glwt-" + chars(URL_SAFE, 20),
        "Slack workflow token": "xwfp" + f"-123456789012-{chars(ALNUM, 24)}",
        "private key in base64": "LS0tLS1CRUdJTiBSU0EgUFJJ" + f"VkFURSBLRVk{chars(ALNUM, 60)}",
        "Docker Hub token": "dckr_pat_" + chars(URL_SAFE, 27),
        "Figma token": "figd_" + chars(URL_SAFE, 40),
        "Tailscale key": f"tskey-auth-{chars(ALNUM, 17)}-{chars(ALNUM, 32)}",
        "Dynatrace token": f"dt0c01.{chars(BASE32, 24)}.{chars(BASE32, 64)}",
        "HubSpot token": "pat-na1-" + uuid(),
        "Netlify token": "nfp_" + chars(ALNUM, 36),
        "CircleCI token": f"CCIPAT_{chars(ALNUM, 22)}_{chars(HEX, 40)}",
        "Buildkite token": "bkua_" + chars(HEX, 40),
        "SonarQube token": "sqp_" + chars(HEX, 40),
        "Brevo key": f"xkeysib-{chars(HEX, 64)}-{chars(ALNUM, 16)}",
        "Mapbox token": f"sk.eyJ{chars(ALNUM, 80)}.{chars(URL_SAFE, 22)}",
        "Modal token": "ak-" + chars(ALNUM, 22),
        "fal.ai key": f"{uuid()}:{chars(HEX, 32)}",
        "ElevenLabs key": "sk_" + chars(HEX, 48),
        "Kaggle token": "KGAT_" + chars(HEX, 32),
        "Databricks OAuth secret": "dose" + chars(HEX, 32),
        "Mailgun key, new format": f"{chars(HEX, 32)}-{chars(HEX, 8)}-{chars(HEX, 8)}",
        "New Relic license": chars(HEX, 36) + "NRAL",
        "LaunchDarkly key": "sdk-" + uuid(),
        "Azure AI key": f"{chars(ALNUM, 52)}JQQJ99{chars(ALNUM, 24)}",
        "Django key": "django-insecure-" + chars(ALNUM, 50),
        "Sourcegraph token": f"sgp_{chars(HEX, 16)}_{chars(HEX, 40)}",
        "SettleMint token": "sm_pat_" + chars(ALNUM, 16),
        "1Password secret key": "A3-" + "-".join(chars(BASE32, n) for n in (6, 6, 5, 5, 5, 5)),
        "EasyPost key": "EZAK" + chars(ALNUM, 54),
        "ClickHouse key": "4b1d" + chars(ALNUM, 38),
        "Adobe secret": "p8e-" + chars(HEX, 32),
        "MaxMind key": f"{chars(ALNUM, 6)}_{chars(ALNUM, 29)}_mmk",
        "Harness token": f"pat.{chars(URL_SAFE, 22)}.{chars(HEX, 24)}.{chars(ALNUM, 20)}",
        "Infracost key": "ico-" + chars(ALNUM, 32),
        "Scalingo token": "tk-us-" + chars(ALNUM, 48),
        "Octopus key": "API-" + chars(string.ascii_uppercase + "7", 26),
        "Vault token, old format": "s." + chars(ALNUM + "7777777", 24),
        "Lob key": "live_" + chars(HEX, 35),
        "Zapier webhook": f"https://hooks.zapier.com/hooks/catch/12345/{chars(HEX, 7)}/",
        "MongoDB Atlas secret": "mdb_sa_sk_" + chars(ALNUM, 40),
        "Resend key": f"re_{chars(ALNUM, 8)}_{chars(ALNUM, 24)}",
        "Razorpay key": "rzp_live_" + chars(ALNUM, 14),
        "Plaid token": "access-production-" + uuid(),
        "PostHog key": "phx_" + chars(ALNUM, 43),
        "Alchemy token": "alcht_" + chars(ALNUM, 30),
        "age key": "AGE-SECRET-KEY-1" + chars(string.ascii_uppercase + "234567890", 58),
    }.items():
        plant(kind, "login('@@')", secret)
    plant("password of curl", "curl -u ann:@@ https://api.acme.com", chars(ALNUM, 14))
    plant("password of docker login", "docker login -u ann -p @@ ghcr.io", chars(ALNUM, 14))
    plant("password of mysql", "mysql -u root -p@@ db", chars(ALNUM, 12))
    plant("key in a header of curl", 'curl -H "X-Api-Key: @@" https://acme.com', chars(ALNUM, 24))
    plant(".pgpass", "db.acme.com:5432:train:ann:@@", chars(ALNUM, 14))
    plant("GitLab session", "_gitlab_session=@@", chars(HEX, 32))
    plant("password without a digit", "password = '@@'", "CorrectHorse!Staple")
    plant("JDBC password", "jdbc:mysql://db/x?user=ann&password=@@", chars(ALNUM, 12))
    plant("variable in a comment", "# DEPLOY_TOKEN=@@", chars(ALNUM, 20))
    plant("variable in a command", "os.system('SNYK_TOKEN=@@ make')", uuid())
    # Keys without a prefix are found by their place.
    service = "https://api.acme.com/v1/models/3?download=1&"
    hook = "https://chat.acme.com/hooks/"
    for kind, line, secret in (
        ("token in a URL's query", f"wget {service}token=@@", chars(HEX, 32)),
        ("API key in a URL's query", f"url = '{service}api_key=@@'", chars(ALNUM, 20)),
        ("token of an option", "tool login --token @@", chars(ALNUM, 30)),
        ("password of an option", "tool --user=ann --password=@@ run", chars(ALNUM, 16)),
        ("token of a Dockerfile", "ENV API_TOKEN @@", chars(ALNUM, 24)),
        ("password in XML", "<password>@@</password>", chars(ALNUM, 16)),
        ("default of a variable", 'os.getenv("MY_API_KEY", "@@")', chars(ALNUM, 28)),
        ("default of an option", 'add_argument("--api-key", default="@@")', chars(ALNUM, 28)),
        ("argument of a function", 'session.set_token("@@")', chars(ALNUM, 32)),
        ("basic authentication", 'get(url, auth=("ann", "@@"))', chars(ALNUM, 24)),
        ("bytes", "TOKEN = b'@@'", chars(ALNUM, 28)),
        ("random string", "connect('@@')", chars(ALNUM, 22) + "7kQz"),
        ("shadow file", "ann:$y$j9T$@@:19000:0:", f"{chars(ALNUM, 22)}${chars(ALNUM, 43)}"),
        (
            "Jupyter password",
            "password = 'argon2:$argon2id$v=19$m=1,t=1,p=8$@@'",
            chars(BASE64, 44),
        ),
        ("Mattermost webhook", f"{hook}@@", chars(string.ascii_lowercase + "7", 26)),
        ("Rocket.Chat webhook", f"{hook}@@", f"{chars(ALNUM, 24)}/{chars(ALNUM, 44)}"),
        ("Feishu webhook", "https://open.feishu.cn/open-apis/bot/v2/hook/@@", uuid()),
        ("Opsgenie key", 'headers={"Authorization": "GenieKey @@"}', uuid()),
        ("PagerDuty key", '{"routing_key": "@@", "event_action": "trigger"}', chars(HEX, 32)),
        ("Backblaze key", "b2 authorize-account 0051 @@", "K005" + chars(ALNUM, 27)),
        ("Roboflow key", "Roboflow('@@')", chars(ALNUM, 20)),
        ("Voyage AI key", "login @@", "pa-" + chars(ALNUM, 43)),
        (
            "Azure DevOps token, old format",
            "connect('@@')",
            chars(BASE32.lower(), 40) + "a7b2c3d4e5f6",
        ),
        ("Hex key", "mix hex.organization auth acme --key @@", chars(HEX, 32)),
        ("Hex key of its settings", '{"$write_key", "@@"}', chars(HEX, 32)),
        ("Firebase key", "push('@@')", f"AAAA{chars(URL_SAFE, 7)}:APA91b{chars(URL_SAFE, 134)}"),
        ("password of redis-cli", "redis-cli -h cache -a @@ ping", chars(ALNUM, 24)),
        ("password of lftp", "lftp -u ann,@@ sftp://files.acme.com", chars(ALNUM, 14)),
        ("password of openssl", "openssl enc -d -pass pass:@@ -in a", chars(ALNUM, 16)),
        (
            "password of PowerShell",
            'ConvertTo-SecureString "@@" -AsPlainText',
            chars(ALNUM, 12) + "!",
        ),
    ):
        plant(kind, line, secret)
    plant("npm password", "//npm.acme.com/:_auth=@@", pair)
    plant("password in code", "password = '@@'", chars(ALNUM, 10))
    plant("API token in code", "my_service_token = '@@'", chars(ALNUM, 24))
    plant("key in a shell script", "export CUSTOM_API_KEY='@@'", chars(ALNUM, 32))
    return values


PLANTED = planted_secrets()
CODE = "import torch\n\n{}\nmodel = torch.nn.Linear(2, 2)\n"


def notebook(line: str) -> bytes:
    cell = {"cell_type": "code", "source": ["import torch\n", f"{line}\n"], "outputs": []}
    return json.dumps({"cells": [cell], "nbformat": 4}, indent=1).encode()


def zipped(name: str, content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, content)
    return buffer.getvalue()


def tarred(name: str, content: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        member = tarfile.TarInfo(name)
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


WRAPPED: dict[str, tuple[str, Callable[[str], bytes]]] = {
    "code": ("own.py", lambda line: CODE.format(line).encode()),
    "windows_lines": ("own.py", lambda line: CODE.format(line).replace("\n", "\r\n").encode()),
    "utf16": ("keys.txt", lambda line: CODE.format(line).encode("utf-16")),
    "utf16_without_mark": ("keys.txt", lambda line: CODE.format(line).encode("utf-16-le")),
    "utf32_without_mark": ("keys.txt", lambda line: CODE.format(line).encode("utf-32-le")),
    "notebook": ("explore.ipynb", notebook),
    "minified": ("all.js", lambda line: f"{'a = 1; ' * 3000}{line}; {'b = 2; ' * 3000}".encode()),
    "zip": ("old.zip", lambda line: zipped("own.py", CODE.format(line).encode())),
    "zip_application": (
        "tool",
        lambda line: b"#!/usr/bin/env python3\n" + zipped("__main__.py", line.encode()),
    ),
    "zip_in_tar": ("old.tgz", lambda line: tarred("a.whl", zipped("b.py", line.encode()))),
    "gzip": ("dump.gz", lambda line: gzip.compress(line.encode())),
}


@pytest.mark.parametrize("wrapped", WRAPPED)
def test_planted_secrets_are_found_and_not_shown(wrapped: str) -> None:
    name, wrap = WRAPPED[wrapped]
    assert len(PLANTED) >= 45
    missed = []
    for kind, (line, secret) in PLANTED.items():
        found = "\n".join(map(str, find_secrets({name: wrap(line)})))
        assert secret not in found
        if not found:
            missed.append(kind)
    assert missed == []


@pytest.mark.parametrize("seed", range(1, 6))
def test_kinds_are_found_whatever_the_random_characters_are(seed: int) -> None:
    missed = [
        kind
        for kind, (line, _) in planted_secrets(seed).items()
        if not list(find_secrets({"own.py": CODE.format(line).encode()}))
    ]
    assert missed == []


def test_planted_secrets_are_found_in_settings() -> None:
    missed = [
        kind
        for kind, (line, secret) in PLANTED.items()
        if not find_secret(line) and not find_secret_in_setting("SERVICE_API_TOKEN", secret)
    ]
    assert missed == []


def test_the_line_of_a_secret_is_reported() -> None:
    line, _ = PLANTED["Hugging Face token"]
    content = ("\n" * 6 + line + "\n").encode()
    assert [str(secret) for secret in find_secrets({"own.py": content})] == [
        "own.py:7: looks like a Hugging Face token; remove it from the file"
    ]
    in_notebook = [str(secret) for secret in find_secrets({"a.ipynb": notebook(line)})]
    assert [text.split(":")[1] for text in in_notebook] == ["7"]
    escaped = ('"print(\\"x\\")",\n' * 40 + line).encode()
    assert [str(secret).split(":")[1] for secret in find_secrets({"b.ipynb": escaped})] == ["41"]
    inner = [str(secret) for secret in find_secrets({"a.zip": zipped("b/own.py", content)})]
    assert inner == ["a.zip/b/own.py:7: looks like a Hugging Face token; remove it from the file"]


SETTINGS = {
    ("DB_PASSWORD", "correct horse"): "a password",
    ("MY_PASSWD", "hunter2"): "a password",
    ("SERVICE_TOKEN", "a1b2c3d4e5f6"): "a credential",
    ("DEPLOY_KEY_SECRET", "Zx81-pPq0-44ab"): "a credential",
    ("TOKENIZERS_PARALLELISM", "false"): None,
    ("MAX_TOKENS", "77"): None,
    ("HF_TOKEN_SECRET_NAME", "prod/hugging-face"): None,
    ("WEBHOOK_SECRET", "arn:aws:secretsmanager:us-east-1:123456789012:secret:hook-1a2b3c"): None,
    ("PASSWORD_FILE", "/run/secrets/db_password_1"): None,
    ("API_KEY", "${API_KEY}"): None,
    ("NCCL_DEBUG", "INFO"): None,
    ("GIT_COMMIT", "9fceb02d0ae598e95dc970b74767f19372d61af8"): None,
    ("DATASET", "s3://acme-data-1a2b3c4d5e6f7a8b/photos/2024-01-01"): None,
    ("GCP", base64.b64encode(b'{"type": "service_account", "id": "1"}').decode()): (
        "a Google service account"
    ),
    ("IMAGE", "sha256:9fceb02d0ae598e95dc970b74767f19372d61af80ae598e95dc970b74767f193"): None,
}


@pytest.mark.parametrize(("name", "value"), SETTINGS)
def test_the_name_of_a_setting_decides_about_its_value(name: str, value: str) -> None:
    assert find_secret_in_setting(name, value) == SETTINGS[name, value]


ORDINARY = """
token = tokenizer.next_token1()
password: str | None = None
def login(password: str = "", token="<token>"): ...
os.environ["WANDB_API_KEY"]
api_key = os.environ.get("OPENAI_API_KEY")
secret = get_secret("prod/slack-hook-2")
model = AutoModel.from_pretrained("stabilityai/stable-diffusion-2-1-base")
revision = "9fceb02d0ae598e95dc970b74767f19372d61af8"
checksum = "sha256:2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae"
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
url = "postgresql://user:password@localhost/db"
key = "down_blocks.0.attentions.1.transformer_blocks.0.attn2.to_k.weight"
special_tokens = {"pad_token": "<|endoftext|>", "bos_token": "<|startoftext|>"}
num_tokens: 4096
choices.append("type=triton_BLOCK-M=128_BLOCK-K=16_BLOCK-N=64_numstages=4_numwarps=8")
lower("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_")
engine = create_engine("postgresql+psycopg2://scott:tiger@localhost/test")
__all__ = ["Glm4MoeLiteForCausalLM", "MiniMaxH3VideoResnetBlock3d", "Qwen3OmniMoeCode2Wav"]
parser.add_argument("--pad-token", default="pad_token_2"); tokenizer.add_token("special_token_42")
url = "https://acme.com/list?page_token=next_page_of_results_2&key=holiday-photos-of-2024"
train --keyframes frames/0001.png --tokenizer-name stable-diffusion-v1-5
docs = "https://docs.acme.com/webhooks/incoming-webhooks-version-2"
os.environ["TOKENIZERS_PARALLELISM=false"]; MAX_TOKENS=4096; SORT_KEY=None
"""


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("home/.pypirc", "password = s7kQ2mWx4pLz9Tn3"),
        ("app/.env.local", "api_key=s7kQ2mWx4pLz9Tn3"),
        ("rclone.conf", "pass = s7kQ2mWx4pLz9Tn3_vB8rY5cDfH1jK6u"),
    ],
)
def test_values_without_quotes_are_found_in_settings_files(name: str, line: str) -> None:
    [found] = find_secrets({name: f"[acme]\n{line}\n".encode()})
    assert str(found) == f"{name}:2: looks like a credential; remove it from the file"


@pytest.mark.parametrize("name", ["own.py", "train.yaml", "notes.txt"])
def test_ordinary_code_has_no_secrets(name: str) -> None:
    found = [str(secret) for secret in find_secrets({name: ORDINARY.encode()})]
    assert found == []


def test_at_most_one_line_in_ten_thousand_of_installed_code_is_reported() -> None:
    folders = [Path(sys.modules[name].__file__ or "").parent for name in ("pytest", "hypothesis")]
    lines, reported = 0, 0
    for folder in folders:
        for path in folder.parent.joinpath(folder.name).rglob("*.py"):
            content = path.read_bytes()
            lines += content.count(b"\n")
            reported += len(list(find_secrets({path.name: content})))
    assert lines > 5000
    assert reported <= max(1, lines / 10_000)


@pytest.mark.slow
def test_at_most_one_line_in_ten_thousand_of_site_packages_is_reported() -> None:
    lines = reported = 0
    for path in sorted(Path(pytest.__file__).parents[1].rglob("*.py"))[::7]:
        content = path.read_bytes()
        lines += content.count(b"\n")
        reported += len(list(find_secrets({path.name: content})))
    print(f"{reported} of {lines} lines")
    assert reported <= lines / 10_000


def encrypted_zip() -> bytes:
    content = bytearray(zipped("a.txt", b"hidden"))
    content[6] |= 1  # flag bit 0 of the local header, and of the central directory
    content[content.index(b"PK\x01\x02") + 8] |= 1
    return bytes(content)


def nested_zip(levels: int) -> bytes:
    content = b"deep"
    for _ in range(levels):
        content = zipped("inner.zip", content)
    return content


UNSEARCHED = {
    "an encrypted archive": encrypted_zip(),
    "a damaged archive": zipped("a.txt", b"hidden" * 100)[:-30],
    "a 7z archive": b"7z\xbc\xaf\x27\x1c" + bytes(30),
    "an archive nested in 4 others": nested_zip(6),
}


@pytest.mark.parametrize("kind", UNSEARCHED)
def test_an_archive_that_cannot_be_searched_is_reported(kind: str) -> None:
    assert list(find_secrets({"a.zip": UNSEARCHED[kind]})) == [UnsearchedFile(kind, "a.zip")]


def test_an_archive_bomb_is_reported_without_being_unpacked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(secret_files, "MAX_UNPACKED", 2**20)
    [found] = find_secrets({"bomb.gz": gzip.compress(bytes(2**24))})
    assert str(found) == (
        "bomb.gz: an archive of more than 1 MiB unpacked cannot be searched for credentials; "
        "exclude it, or add its files unpacked"
    )


@given(st.binary(max_size=400), st.sampled_from([b"", b"PK\x03\x04", b"\x1f\x8b\x08", b"BZh9"]))
def test_any_bytes_are_searched_without_an_error(content: bytes, magic: bytes) -> None:
    list(find_secrets({"file": magic + content}))

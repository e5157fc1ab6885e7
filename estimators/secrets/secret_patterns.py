"""Formats of credentials that detect-secrets lacks, or of which it knows an older format.

The formats are those that the services publish or that gitleaks lists
(github.com/gitleaks/gitleaks, config/gitleaks.toml, July 2026).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SecretPattern:
    """A kind of credential and its format.

    A text is searched for ``expression`` only if it contains one of ``keywords`` in any case: that
    is twenty times as fast as one expression of all patterns.
    """

    kind: str
    keywords: tuple[str, ...]
    expression: str


def _pattern(kind: str, keywords: str, expression: str) -> SecretPattern:
    """Return a pattern; ``keywords`` are in lower case and separated by spaces."""
    return SecretPattern(kind, tuple(keywords.split(" ")), expression)


_HEX = "[0-9a-fA-F]"
_URL_SAFE = "[A-Za-z0-9_-]"
# Between the words of .netrc; a notebook has one line of it in each string.
_SPACE = r"(?:\s|\\n|[\"',#])+"
_WORD = r"[^\s\"'\\,]+"
_UUID = f"{_HEX}{{8}}-(?:{_HEX}{{4}}-){{3}}{_HEX}{{12}}"

# A name, then the value that is assigned to it: NAME=value, "name": "value", name => 'value'.
_ASSIGN = r"[\"'\]]{0,2}\s{0,4}(?:=|:|:=|=>|,)\s{0,4}[\"'`]?"

PATTERNS = (
    # AKIA: a user's long-term key. ASIA: a temporary key of a role session.
    _pattern(
        "an AWS access key", "akia asia abia acca", r"\b(?:AKIA|ASIA|ABIA|ACCA)[A-Z2-7]{16}\b"
    ),
    # 40 base64 characters alone are too common: the name before them is required.
    _pattern(
        "an AWS secret key",
        "secret",
        rf"(?i:secret_?access_?key|aws_?secret_?key){_ASSIGN}"
        r"[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+])",
    ),
    _pattern(
        "an AWS session token",
        "session security",
        rf"(?i:session_?token|security_?token){_ASSIGN}[A-Za-z0-9/+=]{{100,}}",
    ),
    _pattern(
        "an Amazon Bedrock key",
        "absk bedrock-api-key-",
        r"\bABSK[A-Za-z0-9+/]{100,}|\bbedrock-api-key-[A-Za-z0-9+/]{30,}",
    ),
    _pattern(
        "a private key",
        "key---- block---- key ----",
        r"----[ -]BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?(?:-| -)---",
    ),
    # base64 of "-----BEGIN … PRIVATE KEY", as in a kubeconfig.
    _pattern(
        "a private key",
        "ls0tls1crudjti",
        r"\bLS0tLS1CRUdJTi(?:BQUklWQVRF|BSU0EgUFJJVkFU|BFQyBQUklWQVRF|BPUEVOU1NIIFBSSVZB"
        r"|BFTkNSWVBURUQg|BEU0EgUFJJVkFU)",
    ),
    # base64 of a service account's JSON, as in an environment variable.
    _pattern(
        "a Google service account",
        "ey ew",
        r"\b(?:eyJ0eXBlIjogInNlcnZpY2VfYWNjb3VudC|eyJ0eXBlIjoic2VydmljZV9hY2NvdW50"
        r"|ewogICJ0eXBlIjogInNlcnZpY2VfYWNjb3VudC)",
    ),
    _pattern("a private key", '"d"', rf"\"d\"\s{{0,4}}:\s{{0,4}}\"{_URL_SAFE}{{43,}}\""),
    _pattern("a PuTTY private key", "putty-user-key-file", r"\bPuTTY-User-Key-File-\d"),
    _pattern("an age key", "age-secret-key-", r"\bAGE-SECRET-KEY-(?:PQ-)?1[0-9A-Z]{58}"),
    _pattern(
        "a Slack webhook", "hooks.slack", r"\bhooks\.slack(?:-gov)?\.com/[a-z]+/[A-Za-z0-9/_-]{20,}"
    ),
    _pattern(
        "a Slack token",
        "xox xapp- xwfp-",
        r"\bxox[abeoprs](?:\.xox[bp])?-[A-Za-z0-9-]{10,}|\bx(?:app|wfp)-[A-Za-z0-9-]{20,}",
    ),
    _pattern(
        "a Discord webhook",
        "webhooks/",
        rf"\bdiscord(?:app)?\.com/api/(?:v\d+/)?webhooks/\d{{5,}}/{_URL_SAFE}{{20,}}",
    ),
    _pattern(
        "a Discord bot token",
        ".",
        rf"\b[MNO][A-Za-z0-9]{{23,25}}\.{_URL_SAFE}{{6}}\.{_URL_SAFE}{{27,38}}",
    ),
    _pattern(
        "a Microsoft Teams webhook",
        "webhook.office.com logic.azure.com",
        r"\b[a-z0-9-]+\.webhook\.office\.com/webhookb2/[^\s\"']{40,}"
        r"|\blogic\.azure\.com(?::443)?/workflows/[^\s\"']{20,}[?&]sig=[^\s\"']{20,}",
    ),
    # Mattermost, Rocket.Chat, Feishu, Lark, Webex, IFTTT and PagerDuty: the path is the credential.
    _pattern(
        "a webhook",
        "/hook /webhooks/incoming/ maker.ifttt.com/ events.pagerduty.com/",
        r"https://(?:[\w.-]+(?::\d+)?/(?:[\w.-]+/){0,4}hooks?/|webexapis\.com/v1/webhooks/incoming/"
        r"|maker\.ifttt\.com/trigger/[\w.-]+/(?:json/)?with/key/"
        rf"|events\.(?:eu\.)?pagerduty\.com/integration/)(?={_URL_SAFE}*\d){_URL_SAFE}{{20,}}",
    ),
    _pattern("a Telegram bot token", ":aa", r"\b\d{8,10}:AA[A-Za-z0-9_-]{33}\b"),
    _pattern(
        "a GitHub token",
        "gho_ ghp_ ghs_ ghu_ ghr_ github_pat_",
        r"\bgh[opsur]_[A-Za-z0-9]{36}|\bgithub_pat_[A-Za-z0-9_]{22,}",
    ),
    _pattern(
        "a GitLab token",
        "glpat- gldt- glrt- glptt- glcbt- glft- glimt- glagent- glsoat- gloas- glffct- glwt- "
        "gr1348941",
        r"\b(?:gl(?:pat|dt|rt|ptt|cbt|ft|imt|agent|soat|oas|ffct|wt)-|GR1348941)[A-Za-z0-9_-]{20}",
    ),
    _pattern(
        "a Bitbucket or Atlassian token",
        "atatt atctt atbb",
        r"\bAT(?:ATT|CTT|BB)[A-Za-z0-9_=-]{24,}",
    ),
    _pattern("a Hugging Face token", "hf_ api_org_", r"\b(?:hf|api_org)_[A-Za-z0-9]{34}\b"),
    _pattern(
        "a Weights & Biases key",
        "wandb",
        r"\bwandb_v\d_[A-Za-z0-9_]{32,}"
        rf"|(?i:wandb[\w.-]{{0,20}}|api\.wandb\.ai\s+login\s+user\s+password){_ASSIGN}?\s?{_HEX}{{40}}\b"
        rf"|(?i:wandb\.login\(|wandb\s+login)[^\n]{{0,30}}?\b{_HEX}{{40}}\b",
    ),
    _pattern(
        "an OpenAI, Anthropic or OpenRouter key",
        "sk-",
        r"\bsk-(?:ant-|proj-|svcacct-|admin-|or-v1-)?"
        rf"{_URL_SAFE}{{32,}}",
    ),
    _pattern("a Replicate token", "r8_", r"\br8_[A-Za-z0-9]{37}\b"),
    _pattern(
        "an NVIDIA NGC key",
        "nvapi- ngc",
        rf"\bnvapi-{_URL_SAFE}{{60,}}"
        rf"|(?i:ngc[\w.-]{{0,20}}){_ASSIGN}[A-Za-z0-9]{{80,90}}\b",
    ),
    _pattern(
        "a key of an inference service",
        "gsk_ xai- pplx- fw_ tgp_v1_ rpa_ pcsk_ csk- jina_ lsv2_ sk_",
        r"\b(?:gsk_[A-Za-z0-9]{52}|xai-[A-Za-z0-9]{80}|pplx-[A-Za-z0-9]{48}"
        r"|fw_[A-Za-z0-9]{22,}|tgp_v1_[A-Za-z0-9_-]{40,}|rpa_[A-Z0-9]{40,}|pcsk_[A-Za-z0-9_]{60,}"
        r"|csk-[a-z0-9]{40,}|sk_[0-9a-f]{48}\b|jina_[A-Za-z0-9_-]{50,}|lsv2_(?:pt|sk)_[0-9a-f]{32}_[0-9a-f]{10})",
    ),
    _pattern("a Google API key", "aiza", rf"\bAIza{_URL_SAFE}{{35}}"),
    _pattern(
        "a Google OAuth secret",
        "gocspx- ya29. 1//0",
        rf"\bGOCSPX-{_URL_SAFE}{{28}}|\bya29\.{_URL_SAFE}{{20,}}"
        rf"|\b1//0{_URL_SAFE}{{40,}}",
    ),
    _pattern(
        "an Azure storage key",
        "accountkey sharedaccesskey",
        r"(?i:accountkey|sharedaccesskey)\s{0,2}=\s{0,2}[A-Za-z0-9+/]{40,}={0,2}",
    ),
    _pattern("an Azure SAS token", "sig=", r"[?&;]sig=[A-Za-z0-9%+/_-]{40,}"),
    _pattern(
        "an Azure client secret",
        "q~",
        r"(?<![\w~.-])[A-Za-z0-9_~.]{3}\dQ~[A-Za-z0-9_~.-]{31,34}(?![\w~.-])",
    ),
    _pattern("a Databricks token", "dapi dose", r"\bd(?:api|ose)[0-9a-f]{32}\b"),
    _pattern("a DigitalOcean token", "_v1_", r"\bdo[opr]_v1_[0-9a-f]{64}\b"),
    _pattern(
        "an npm token",
        "npm_ _auth",
        r"\bnpm_[A-Za-z0-9]{36}\b|:_auth(?:Token)?\s{0,2}=\s{0,2}[A-Za-z0-9+/=_-]{20,}",
    ),
    _pattern("a PyPI token", "pypi-age", r"\bpypi-AgE[A-Za-z0-9_-]{50,}"),
    _pattern("a RubyGems key", "rubygems_", r"\brubygems_[0-9a-f]{48}\b"),
    _pattern(
        "a Stripe key",
        "_test_ _live_ _prod_ whsec_",
        r"\b(?:sk|rk)_(?:test|live|prod)_[A-Za-z0-9]{10,}|\bwhsec_[A-Za-z0-9+/]{24,}",
    ),
    _pattern("a SendGrid key", "sg.", r"\bSG\.[A-Za-z0-9_-]{16,24}\.[A-Za-z0-9_-]{32,64}"),
    _pattern(
        "a Mailgun key", "-", r"\bkey-[0-9a-f]{32}\b|\b[0-9a-f]{32}-[0-9a-f]{8}-[0-9a-f]{8}\b"
    ),
    _pattern("a Mailchimp key", "-us", r"\b[0-9a-f]{32}-us\d{1,2}\b"),
    _pattern("a Twilio key", "sk ac", rf"\b(?:SK|AC){_HEX}{{32}}\b"),
    _pattern("a Square token", "sq0 eaaa", rf"\b(?:sq0(?:atp|csp)-|EAAA){_URL_SAFE}{{22,}}"),
    _pattern("a Shopify token", "shp", rf"\bshp(?:at|ca|pa|ss)_{_HEX}{{32}}\b"),
    _pattern(
        "a Grafana token",
        "glsa_ glc_",
        r"\bgl(?:sa_[A-Za-z0-9]{32}_[A-Fa-f0-9]{8}|c_[A-Za-z0-9+/]{32,})",
    ),
    _pattern(
        "a Datadog key",
        "dd_ dd- ddap ddpat_ datadog",
        rf"(?i:(?:dd|datadog)[_-]?(?:api|app|application)[_-]?key){_ASSIGN}[0-9a-f]{{32,40}}\b"
        r"|\bddpat_[A-Za-z0-9_]{32,}",
    ),
    _pattern(
        "a New Relic key",
        "nrak- nrii- nrjs- nraa- nral",
        r"\bNR(?:AK|II|JS|AA)-[A-Za-z0-9-]{19,}|\b[0-9a-f]{36}NRAL\b",
    ),
    _pattern("a Sentry token", "sntr", r"\bsntr(?:ys_eyJ[A-Za-z0-9+/=_]{40,}|yu_[0-9a-f]{64})"),
    _pattern("a HashiCorp Vault token", "hvs. hvb. hvr.", rf"\bhv[sbr]\.{_URL_SAFE}{{24,}}"),
    _pattern(
        "a Terraform Cloud token", ".atlasv1.", rf"\b[A-Za-z0-9]{{14}}\.atlasv1\.{_URL_SAFE}{{60,}}"
    ),
    _pattern("a Pulumi token", "pul-", r"\bpul-[0-9a-f]{40}\b"),
    _pattern("a Doppler token", "dp.", r"\bdp\.(?:pt|st|ct|sa)\.[A-Za-z0-9._-]{40,}"),
    _pattern("a Postman key", "pmak-", r"\bPMAK-[0-9a-f]{24}-[0-9a-f]{34}\b"),
    _pattern("a Linear key", "lin_", r"\blin_(?:api|oauth)_[A-Za-z0-9]{40}"),
    _pattern(
        "a Notion token", "ntn_ secret_", r"\b(?:ntn_[A-Za-z0-9]{40,}|secret_[A-Za-z0-9]{43})\b"
    ),
    _pattern("an Airtable token", "pat", r"\bpat[A-Za-z0-9]{14}\.[0-9a-f]{64}\b"),
    _pattern(
        "a Heroku key",
        "hrku- heroku",
        rf"\bHRKU-{_URL_SAFE}{{36,}}|(?i:heroku[\w.-]{{0,20}}){_ASSIGN}"
        rf"{_UUID}",
    ),
    _pattern(
        "a Fly.io token",
        "fo1_ fm1 fm2",
        r"\bfo1_[A-Za-z0-9_-]{43}|\bfm[12][ar]?_[A-Za-z0-9+/]{100,}",
    ),
    _pattern("a Docker Hub token", "dckr_", rf"\bdckr_(?:pat|oat)_{_URL_SAFE}{{27,}}"),
    _pattern("a Figma token", "figd_ figo", rf"\bfig(?:d|or|oh|u)_{_URL_SAFE}{{40}}"),
    _pattern("a Tailscale key", "tskey-", r"\btskey-[a-z]+-[A-Za-z0-9-]{20,}"),
    _pattern("a Dynatrace token", "dt0", r"\bdt0[a-z]\d\d\.[A-Z0-9]{24}\.[A-Z0-9]{64}\b"),
    _pattern("a HubSpot token", "pat-", rf"\bpat-(?:na|eu|ap)\d-{_UUID}\b"),
    _pattern("a Contentful token", "cfpat-", rf"\bCFPAT-{_URL_SAFE}{{43}}"),
    _pattern("a Netlify token", "nfp_", r"\bnfp_[A-Za-z0-9]{36}\b"),
    _pattern("a Vercel token", "vc", r"\bvc[pikar]_[A-Za-z0-9]{24,}\b"),
    _pattern("a CircleCI token", "cci", r"\bCCI(?:PAT|PRJ)_[A-Za-z0-9]{22}_[0-9a-f]{40}\b"),
    _pattern("a Buildkite token", "bk", r"\bbk(?:ua|at|ct)_[0-9a-f]{40}\b"),
    _pattern("a SonarQube token", "sq", r"\bsq[pua]_[0-9a-f]{40}\b"),
    _pattern("a Brevo key", "xkeysib- xsmtpsib-", r"\bx(?:key|smtp)sib-[0-9a-f]{64}-"),
    _pattern("a Dropbox token", "sl.", rf"\bsl\.(?:u\.)?{_URL_SAFE}{{130,}}"),
    _pattern("a Mapbox token", "sk.eyj", rf"\bsk\.eyJ{_URL_SAFE}{{40,}}\.{_URL_SAFE}{{20,}}"),
    _pattern("a Modal token", "ak- as-", r"\ba[ks]-(?=[A-Za-z]*\d)[A-Za-z0-9]{22}\b"),
    _pattern("a fal.ai key", ":", rf"\b{_UUID}:[0-9a-f]{{32}}\b"),
    _pattern(
        "a Cloudflare token",
        "v1.0- cfut_ cfat_ cfk_",
        r"\bv1\.0-[0-9a-f]{24}-[0-9a-f]{146}\b|\bcf(?:ut|at|k)_[A-Za-z0-9_-]{40,}",
    ),
    _pattern("a Neon key", "napi_", r"\bnapi_[a-z0-9]{64}\b"),
    _pattern("a Render key", "rnd_", r"\brnd_[A-Za-z0-9]{28,}\b"),
    _pattern("a Tencent Cloud key", "akid", r"\bAKID[A-Za-z0-9]{32}\b"),
    _pattern("a Yandex Cloud key", "aqvn", rf"\bAQVN{_URL_SAFE}{{35,}}"),
    _pattern("a NuGet key", "oy2", r"\boy2[a-z0-9]{43}\b"),
    _pattern("a crates.io token", "cio", r"\bcio[A-Za-z0-9]{32}\b"),
    _pattern("a Clojars token", "clojars_", r"\bCLOJARS_[a-z0-9]{60}\b"),
    _pattern(
        "a PayPal token", "access_token$", r"\baccess_token\$(?:production|sandbox)\$\w{16}\$\w{32}"
    ),
    _pattern("a Facebook token", "eaa", r"\bEAA(?:CEdEose0cBA|[MC])[A-Za-z0-9]{60,}"),
    _pattern("a Twitter token", "aaaaaaaaaaaaaaaaaaaa", r"\bA{20,22}[A-Za-z0-9%]{60,}"),
    _pattern("an Asana token", "/1", r"\b[12]/\d{16}(?:/\d{16})?:[0-9a-f]{32}\b"),
    _pattern("a LaunchDarkly key", "sdk- api- mob-", rf"\b(?:sdk|api|mob)-{_UUID}\b"),
    _pattern(
        "a token of a service",
        "shippo_ duffel_ fio-u- rdme_ tfp_ flwseck live_ test_ st.",
        rf"\b(?:shippo_(?:live|test)_{_HEX}{{40}}|duffel_(?:live|test)_{_URL_SAFE}{{40,}}"
        rf"|fio-u-{_URL_SAFE}{{60,}}|rdme_[a-z0-9]{{70}}|tfp_{_URL_SAFE}{{40,}}"
        r"|FLWSECK(?:_TEST)?-[0-9a-h]{12,}(?:-X)?|(?:live|test)_[0-9a-f]{32,35}"
        r"|st\.[0-9a-f]{24}\.[0-9a-f]{32}\.[0-9a-f]{32})\b",
    ),
    _pattern(
        "an Azure key",
        "jqqj99 azdo azure",
        r"\b[A-Za-z0-9]{52}JQQJ99[A-Za-z0-9]{24}|\b[A-Za-z0-9]{76}AZDO[A-Za-z0-9]{4}\b"
        rf"|\.azurewebsites\.net/api/[^\s\"']*[?&]code={_URL_SAFE}{{40,}}",
    ),
    _pattern(
        "a token of a service",
        "sgp_ sm_ p8e- ico- tk-us- ezak eztk 4b1d s-s4t2 _mmk pat. sat. hcaik_ alcht_ vercel_blob_ "
        "mdb_sa_sk_ amzn.mws. access- mlsn. phx_ essu_ unkey_ jsrp_ xaat- luma- cw-secret-",
        rf"\b(?:sgp_(?:(?:{_HEX}{{16}}|local)_)?{_HEX}{{40}}|sm_[aps]at_[A-Za-z0-9]{{16}}"
        rf"|p8e-[a-z0-9]{{32}}|ico-[A-Za-z0-9]{{32}}|tk-us-{_URL_SAFE}{{48}}"
        r"|EZ[AT]K[A-Za-z0-9]{54}|4b1d[A-Za-z0-9]{38}|s-s4t2(?:ud|af)-[0-9a-f]{64}"
        r"|[A-Za-z0-9]{6}_[A-Za-z0-9]{29}_mmk"
        rf"|[ps]at\.{_URL_SAFE}{{22}}\.[0-9A-Za-z]{{24}}\.[A-Za-z0-9]{{20}}"
        r"|hcaik_[a-z0-9]{58}|alcht_[A-Za-z0-9]{30}|vercel_blob_rw_[A-Za-z0-9]{16}_[A-Za-z0-9]{30,}"
        rf"|mdb_sa_sk_{_URL_SAFE}{{40}}|amzn\.mws\.{_UUID}|access-(?:production|sandbox)-{_UUID}"
        r"|mlsn\.[0-9a-f]{64}|phx_[A-Za-z0-9]{40,}|essu_[A-Za-z0-9+/=]{40,}"
        rf"|unkey_[A-Za-z0-9]{{22,}}|jsrp_[A-Za-z0-9]{{36}}|xaat-{_UUID}|luma-{_UUID}-{_UUID}"
        r"|CW-SECRET-[A-Za-z0-9]{40})\b",
    ),
    _pattern(
        "a token of a service",
        "re_ rzp_ tr_ esecret_ nf- bbff- xau_ pk_ ddp_ mfa. sk_ secret_lambda_ api-",
        r"\b(?:re_[A-Za-z0-9]{8}_[A-Za-z0-9]{24}|rzp_(?:live|test)_[A-Za-z0-9]{14}"
        r"|tr_(?:prod|dev|stg)_[A-Za-z0-9]{20,}|esecret_[a-z0-9]{26}|NF-[A-Za-z0-9]{32}"
        r"|BBFF-[A-Za-z0-9]{30}|xau_[A-Za-z0-9]{36}|pk_[0-9a-f]{34}|ddp_[A-Za-z0-9]{36}"
        rf"|mfa\.{_URL_SAFE}{{80,}}|sk_pr_[a-z]+_[0-9a-f]{{40}}"
        r"|secret_lambda_\w{8,20}_[0-9a-f]{32}\.[A-Za-z0-9]{32}|API-[A-Z0-9]{26})\b",
    ),
    _pattern("a 1Password secret key", "a3-", r"\bA3-[A-Z0-9]{6}(?:-?[A-Z0-9]{5,6}){5}\b"),
    _pattern(
        "an Authress key",
        ".acc",
        rf"\b(?:sc|ext|scauth|authress)_[A-Za-z0-9]{{5,30}}\.[A-Za-z0-9]{{4,6}}\.acc[_-]{_URL_SAFE}"
        r"{10,32}\.[A-Za-z0-9+/_=-]{30,}",
    ),
    _pattern("a Zapier webhook", "hooks.zapier", r"\bhooks\.zapier\.com/hooks/catch/\d+/[a-z0-9]+"),
    _pattern("a GitLab session", "_gitlab_session", r"\b_gitlab_session\s?=\s?[0-9a-z]{32}\b"),
    _pattern(
        "a Facebook token", "| %7c", r"\b\d{15,16}(?:\||%7[Cc])(?=[A-Za-z_-]*\d)[\w-]{27,40}\b"
    ),
    _pattern(
        "a NuGet password",
        "password",
        r"(?i:<add\s+key=\"(?:cleartext)?password\"\s*value=\")[^\"$%]{4,}",
    ),
    # The token of Vault before version 1.10.
    _pattern(
        "a HashiCorp Vault token", "s.", r"(?<![\w.])s\.(?=(?:[A-Za-z]*\d){2})[A-Za-z0-9]{24}\b"
    ),
    _pattern(
        "an API key in a header",
        "-h --header",
        r"\s(?:-H|--header)[\s=]+[\"'](?i:[\w-]*(?:key|token)):\s{0,5}[\w=~@.+/-]{12,}",
    ),
    _pattern(
        "a password of a command",
        "login mysql secret_access_key authtoken",
        r"\b(?:docker|podman|helm|oras|skopeo)\b[^\n]{0,80}?\slogin\b[^\n]{0,120}?\s(?:-p|--password)[\s=]+"
        r"['\"]?(?![$<'\"])\S{6,}"
        r"|\bmysql(?:dump)?\b[^\n]{0,80}?\s-p(?![$<])[^\s'\"]{6,}"
        r"|\bset\s+aws_secret_access_key\s+[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+])|\bauthtoken\s+\w{40,}",
    ),
    # host:port:database:user:password
    _pattern(
        "a password of .pgpass",
        ":",
        r"(?<![\w.:*-])(?:[\w-]+\.[\w.-]+|localhost|\*):(?:\d{4,5}|\*):[\w*-]+:[\w-]+:"
        r"(?=[A-Za-z]*\d)[^\s:$<{\"'\\]{6,}",
    ),
    _pattern("a Grafana key", "eyjrijoi", r"\beyJrIjoi[A-Za-z0-9+/=]{40,}"),
    _pattern("a Django secret key", "django-insecure-", r"\bdjango-insecure-[^\s\"']{40,}"),
    _pattern(
        "a password of a command",
        "lftp redis-cli sqlcmd openssl swift vastai",
        r"\blftp\b[^\n]{0,80}?\s-u\s*[\w.@-]+,(?![$<])[^\s'\"]{6,}"
        r"|\bredis-cli\b[^\n]{0,80}?\s(?:-a|--pass)[\s=]+(?![$<'\"])\S{8,}"
        r"|\bsqlcmd\b[^\n]{0,80}?\s-P\s*(?![$<'\"])[^\s'\"]{6,}"
        r"|\bopenssl\b[^\n]{0,120}?\s-pass(?:in|out)?\s+pass:(?![$<])[^\s'\"]{6,}"
        r"|\bswift\b[^\n]{0,80}?\s(?:-K|--key)[\s=]+(?![$<'\"])\S{12,}"
        rf"|\bvastai\s+set\s+api-key\s+{_HEX}{{40,}}",
    ),
    _pattern("a password of sshpass", "sshpass", r"\bsshpass\s+-p\s*['\"]?(?![$'\"])\S{6,}"),
    _pattern(
        "a password of curl",
        "curl",
        r"\bcurl\b[^\n]{0,200}?\s(?:-u|--user)[\s=]+['\"]?(?!user(?:name)?:pass)"
        r"[\w.@-]+:(?![$<{])[^\s'\"<>{}]{6,}",
    ),
    _pattern(
        "a password of a connection string",
        "password= pwd=",
        r"(?i:\bjdbc:\S+[?&;]password=)(?![$<{])[^\s&;'\"<>{}]{6,}"
        r"|(?i:(?:server|data source)=[^\n\"']{3,200};\s?(?:password|pwd)=)"
        r"(?![$<{])[^\s;'\"<>{}]{6,}",
    ),
    _pattern(
        "a password hash",
        "$apr1$ $2y$ $2b$ $6$ $y$ $argon2",
        r":\$(?:apr1|2[aby]|5|6|y|argon2id?)\$[./A-Za-z0-9$+=,]{20,}",
    ),
    _pattern("a PlanetScale token", "pscale_", r"\bpscale_(?:tkn|oauth|pw)_[A-Za-z0-9=._-]{32,}"),
    _pattern(
        "a Supabase token", "sbp_ sb_secret_", r"\bsb(?:p_[0-9a-f]{40}|_secret_[A-Za-z0-9_-]{20,})"
    ),
    _pattern(
        "a Backblaze key",
        "k00",
        r"\bK00\d(?=[A-Za-z0-9+/]*[a-z])[A-Za-z0-9+/]{27}(?![A-Za-z0-9+/])",
    ),
    _pattern(
        "a Voyage AI key",
        "pa-",
        rf"(?<![\w-])pa-(?={_URL_SAFE}*\d)(?={_URL_SAFE}*[A-Z]){_URL_SAFE}{{43}}(?![\w-])",
    ),
    # Without a prefix: 52 characters of base32 in lower case.
    _pattern(
        "an Azure DevOps token",
        "2 3 4 5 6 7",
        r"(?<![\w+/=.-])(?=(?:[a-z]*[2-7]){4})[a-z2-7]{52}(?![\w+/=.-])",
    ),
    # Its keys are 32 hexadecimal digits, which alone are a checksum.
    _pattern(
        "a Hex key",
        "$write_key $read_key mix",
        rf"\$(?:write|read)_key\W{{1,8}}{_HEX}{{32}}\b"
        rf"|\bmix\s+hex\.[^\n]{{0,80}}?\s(?:--key|api_key)[\s=]+{_HEX}{{32}}\b",
    ),
    _pattern(
        "a Roboflow key", "roboflow(", r"\bRoboflow\([\"'](?=[A-Za-z]*\d)[A-Za-z0-9]{20}[\"']"
    ),
    _pattern(
        "a PagerDuty key", "_key", rf"\b(?:routing|service|integration)_key{_ASSIGN}{_HEX}{{32}}\b"
    ),
    _pattern("a Firebase key", ":apa91b", rf"\bAAAA{_URL_SAFE}{{7}}:APA91b{_URL_SAFE}{{60,}}"),
    _pattern(
        "a password of PowerShell",
        "convertto-securestring",
        r"(?i:ConvertTo-SecureString)\s+(?:-String\s+)?([\"'])(?!\$)[^\"'\n]{4,}\1(?=[^\n]*(?i:-AsPlainText))",
    ),
    _pattern("a Prefect key", "pnu_ pnb_", r"\bpn[ub]_[A-Za-z0-9]{36}\b"),
    _pattern("a 1Password token", "ops_ey", r"\bops_eyJ[A-Za-z0-9+/]{100,}"),
    _pattern("an Alibaba Cloud key", "ltai", r"\bLTAI[A-Za-z0-9]{12,20}\b"),
    _pattern("an OpenShift token", "sha256~", r"\bsha256~[A-Za-z0-9_-]{43}(?![A-Za-z0-9_-])"),
    _pattern(
        "an Artifactory key", "akcp cmvmd", r"\bAKCp[A-Za-z0-9]{60,}|\bcmVmd[A-Za-z0-9]{59}\b"
    ),
    _pattern(
        "a Kaggle key",
        "kaggle_key kgat_ username",
        rf"(?i:kaggle_key|\"username\"\s?:\s?\"[^\"\n]{{1,40}}\",\s?\"key\"){_ASSIGN}{_HEX}{{32}}\b"
        rf"|\bKGAT_{_HEX}{{32}}\b",
    ),
    _pattern(
        "a Comet or Neptune key",
        "comet neptune",
        rf"(?i:(?:comet|neptune)_?(?:ml)?_?api_?(?:key|token)){_ASSIGN}"
        r"[A-Za-z0-9+/=]{25,}",
    ),
    # Header and payload of a token are JSON objects, whose base64 starts with eyJ.
    _pattern(
        "a JSON web token",
        "eyj",
        rf"\beyJ{_URL_SAFE}{{10,}}\.eyJ{_URL_SAFE}{{10,}}\.{_URL_SAFE}{{10,}}",
    ),
    _pattern(
        "an authorization header",
        "authorization",
        r"(?i:\bauthorization[\"']?\s{0,2}[:=]\s{0,2}[\"']?(?:(?:bearer|basic|token|splunk)\s+"
        r"|[a-z][a-z-]{2,20}\s+(?=[a-z._~+/=-]{0,40}\d)))[A-Za-z0-9+/=._~-]{16,}",
    ),
    _pattern(
        "a bearer token", "bearer", r"\b[Bb]earer (?=[A-Za-z._~+/-]*\d)[A-Za-z0-9._~+/-]{24,}"
    ),
    # base64 of user:password in ~/.docker/config.json.
    _pattern(
        "a container registry password",
        'auth" identitytoken',
        r"\"(?:auth|identitytoken)\"\s{0,4}:\s{0,4}\"[A-Za-z0-9+/=_-]{12,}\"",
    ),
    _pattern(
        "a password of .netrc",
        "login",
        rf"\b(?:machine{_SPACE}{_WORD}|default){_SPACE}login{_SPACE}{_WORD}{_SPACE}password{_SPACE}{_WORD}",
    ),
    # user:password@, :password@ and TOKEN@ in a URL; documentation writes user:password@.
    _pattern(
        "a password in a URL",
        "://",
        r"\b[a-z][a-z0-9+.-]*://"
        r"(?!(?i:user(?:name)?:pass(?:word)?|scott:tiger|redacted:redacted|[*x]+:[*x]+)@)"
        r"[^\s/:@'\"<>{}$]*:(?!//)[^\s/@'\"<>{}$]+@[\w\[]",
    ),
    _pattern("a token in a URL", "https://", r"\bhttps?://[A-Za-z0-9_.~-]{20,}@[\w-]+\."),
)

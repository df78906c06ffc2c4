# SPDX-License-Identifier: Apache-2.0
"""Environment variables that a vLLM which a run starts does not get: keys of other services.

It serves a local folder and is offline (HF_HUB_OFFLINE), so it needs none of them; an attacker in
the server would find them in its environment. Next: jaxmoe/vllm/engine/server.py.
"""

import re
from collections.abc import Mapping

_SECRET_NAME = re.compile(
    r"(^|_)(TOKEN|KEY|SECRET|SECRETS|PASSWORD|PASSWD|PASS|CREDENTIAL|CREDENTIALS|COOKIE)(_|$)"
    r"|^(AWS|AZURE|WANDB|COMET|NEPTUNE|MLFLOW)_|^SSH_AUTH_SOCK$",
    re.IGNORECASE,
)


def remove_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables whose names do not look like secrets."""
    return {name: value for name, value in environ.items() if not _SECRET_NAME.search(name)}

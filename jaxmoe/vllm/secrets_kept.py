# SPDX-License-Identifier: Apache-2.0
"""Which environment variables a vLLM that a run starts does not get: keys to other services.

It serves a local folder and is offline (HF_HUB_OFFLINE), so it needs none of them, and whoever
finds a way into the server would find them in its environment.
Next: jaxmoe/vllm/server.py.
"""

import re
from collections.abc import Mapping

_SECRET = re.compile(
    r"(^|_)(TOKEN|KEY|SECRET|SECRETS|PASSWORD|PASSWD|PASS|CREDENTIAL|CREDENTIALS|COOKIE)(_|$)"
    r"|^(AWS|AZURE|WANDB|COMET|NEPTUNE|MLFLOW)_|^SSH_AUTH_SOCK$",
    re.IGNORECASE,
)


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables whose names do not say that they are secret."""
    return {name: value for name, value in environ.items() if not _SECRET.search(name)}

# SPDX-License-Identifier: Apache-2.0
"""A hostile server's answers to the client of vLLM, in a process whose memory is measured.

Next: tests/jaxmoe/vllm/hostile.py has the tricks, faults.py the campaign.
"""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "jaxmoe" / "vllm"))

from hostile import KEY, TRICKS, HostileServer  # pyright: ignore[reportMissingImports]

ROOT = Path(__file__).resolve().parents[1]
CLIENT = ROOT / "tests/jaxmoe/vllm/hostile_client.py"
ROUTES = ("generate", "loaded_state", "max_context")
TIMEOUT_S = 1.0
MEMORY = 200 << 20  # bytes above what the process had before
START_S = 120.0  # on a machine that does other things too


def meet(count: int, dice: random.Random) -> list[dict]:
    """Ask for that many tricks in one process; one fault for each."""
    lines = [f"{dice.choice(ROUTES)}: {dice.choice(list(TRICKS))}" for _ in range(count)]
    server = HostileServer()
    command = [sys.executable, str(CLIENT), server.url, KEY]
    try:
        done = subprocess.run(
            [*command, str(TIMEOUT_S)],
            input="\n".join(lines),
            capture_output=True,
            text=True,
            timeout=START_S + 10 * TIMEOUT_S * count,
            env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        )
        out, errors = done.stdout, done.stderr
    except subprocess.TimeoutExpired as late:
        out, errors = (late.stdout or b"").decode(), (late.stderr or b"").decode()
    finally:
        server.close()
    answers = [json.loads(line) for line in out.splitlines()]
    faults = [{"kind": "answer", "failure": judged(*a), "what": a[0]} for a in answers]
    for line in lines[len(answers) :]:
        failure = "traceback" if "Traceback" in errors else "hang"
        faults.append({"kind": "answer", "failure": failure, "what": f"{line} {errors[-2000:]}"})
    return faults


def judged(line: str, seconds: float, used: int, error: str, text: str) -> str:
    """ "" for a request that failed as it should."""
    if error != "RequestFailed":
        return "traceback" if error else "lost"  # a spoilt answer was taken for a good one
    if seconds > 2 * TIMEOUT_S:
        return "hang"
    shown = any(form.lower() in text.lower() for form in (KEY, KEY[::-1], KEY.encode().hex()[:16]))
    return "other" if used > MEMORY or shown or not text.isprintable() else ""

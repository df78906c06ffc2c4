# SPDX-License-Identifier: Apache-2.0
"""Keys of the configuration that have another name now, and what an old one is answered with.

Next: jaxmoe/config_file.py answers who types one; jaxmoe/checkpoint/same_run.py reads old runs.
"""

RENAMED = {  # old: new
    "loss.correction": "loss.rollout_correction",
    "loss.mean": "loss.aggregation",
    "rollout.max_draws": "rollout.max_gen_batches",
    "rollout.vllm.swap": "rollout.vllm.on_weight_sync",
    "rollout.vllm.way": "rollout.vllm.transport",
}


def renamed_field(old: str, fields: list[str]) -> str | None:
    """The field of a dataclass with these fields that the name `old` stood for; None: no such."""
    for before, after in RENAMED.items():
        if before.endswith(f".{old}") and after.rpartition(".")[2] in fields:
            return after.rpartition(".")[2]
    return None

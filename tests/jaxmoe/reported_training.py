# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.jaxmoe.reported_training FILE --config ...`: the train command, with a report.

FILE gets a line for each step: row, tokens, versions and reward of each answer.
"""

import json
import sys
from dataclasses import replace

from jaxmoe.cli import ExitStatus, parse_config
from jaxmoe.collection.batches import make_batch
from jaxmoe.distributed.processes import exit_process, joined_processes
from jaxmoe.run.parts import make_parts
from jaxmoe.train import train


def report_batch(cfg, task, rollouts, rewards):
    rows = [
        [r.prompt.id, r.tokens.tolist(), r.weight_versions.tolist(), float(reward)]
        for r, reward in zip(rollouts, rewards, strict=True)
    ]
    with open(sys.argv[1], "a") as file:
        file.write(json.dumps(rows) + "\n")
    return make_batch(cfg, task, rollouts, rewards)


if __name__ == "__main__":
    with ExitStatus() as status:
        cfg, _ = parse_config(sys.argv[2:], "Train.")
        with joined_processes():
            train(cfg, replace(make_parts(cfg), make_batch=report_batch))
    sys.exit(exit_process(status.code))

# SPDX-License-Identifier: Apache-2.0
"""The lines of a printed plan that say what would run."""

from jaxmoe.config_file import override
from jaxmoe.run.dry_run import format_plan


def what_runs(cfg, *changes):
    text = format_plan(override(cfg, *changes)).partition("would run\n")[2]
    return {line[2:15].strip(): line[15:] for line in text.splitlines()}

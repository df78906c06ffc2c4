# SPDX-License-Identifier: Apache-2.0
"""An engine's description of itself: all that the product asks of an engine before it is opened.

`rollout.engine` is the name of a function of the config that returns the description, in ENGINES
or "module:function(option=1)". The function is called while a config is checked, so its module
imports neither jax nor vLLM; `open` and `memory` import what they need when they are called.
Next: jaxmoe/rollout/native_description.py and jaxmoe/vllm/engine/description.py.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxmoe.config.errors import ConfigError, require
from jaxmoe.config.function_specs import import_function, parse_call

if TYPE_CHECKING:
    from jaxmoe.config import Config

ENGINES = {
    "native": "jaxmoe.rollout.native_description:describe_native",
    "vllm": "jaxmoe.vllm.engine.description:describe_vllm",
}
_KEY = "rollout.engine"


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of an engine on each device of the trainer, and in host memory."""

    weights: int = 0  # its copy of the policy's weights; two copies exist during a weight sync
    cache: int = 0  # keys and values while it samples a step's answers
    evaluation_cache: int = 0  # the same for held-out prompts
    sent: int = 0  # of weights that were sent: in this host's memory, and in that of each worker


def plan_no_memory(_cfg: "Config") -> EngineMemory:
    """Memory of an engine on devices of its own."""
    return EngineMemory()


def accept_config(_cfg: "Config") -> None:
    """A check that refuses nothing."""


def refuse_processes(cfg: "Config") -> None:
    """Raise ConfigError: the engine was not made for several trainer processes."""
    raise ConfigError(
        f"rollout.engine={cfg.rollout.engine} must run in one process: its description has no "
        "check_processes. Start one process, or try --set rollout.engine=native."
    )


def keep_config(cfg: "Config") -> "Config":
    return cfg


@dataclass(frozen=True)
class EngineDescription:
    """Facts of an engine for one config. The defaults are those of an engine that stands apart.

    Functions take the config. Checks raise ConfigError for settings that the engine cannot run.
    """

    open: Callable[..., Any]  # (cfg, ops, work, mesh) -> jaxmoe.rollout.engine.Engine
    summary: str  # the engine, its location, and how weights reach it; for --dry-run
    # It samples with the trainer's forward and ops, on the trainer's devices: log-probs may be
    # required to be bitwise equal, and its decoding is part of the run's kernels and plan.
    uses_trainer_forward: bool = False
    memory: Callable[["Config"], EngineMemory] = plan_no_memory
    # rollout_logp is of the distribution after temperature, top-k and top-p. If not, they are
    # refused, since the log-probs would be of another distribution than the samples.
    reports_sampled_logp: bool = True
    reports_kept_mass: bool = False  # rollouts have log_kept if top-k or top-p are on
    reports_experts: bool = False  # rollouts have routed_experts if cfg.records_experts
    # It loads experts in four bits as such; others get the same values in the model's dtype.
    reads_four_bits: bool = False
    runs_episodes: bool = False  # generate() takes an environment
    runs_groups: bool = False  # several threads may call generate() at once
    replicas: int = 1  # servers, each with rollout.max_parallel_sequences
    # Options of the function that describes the engine, which a resumed run may change.
    changeable_options: frozenset[str] = frozenset()
    check: Callable[["Config"], None] = accept_config
    first_process_samples: bool = False  # for all, and in any thread; see FirstProcessEngine
    check_processes: Callable[["Config"], None] = refuse_processes  # called if there are several
    # Returns the config of an engine that loads weights even if its own check refuses them: the
    # doctor explains the difference.
    without_weight_check: Callable[["Config"], "Config"] = keep_config


def check_engine_name(text: str) -> None:
    """Raise ConfigError unless the text is in ENGINES, or may name a function."""
    require(
        text in ENGINES or ":" in text,
        f"rollout.engine must be {', '.join(ENGINES)} or module:function, got {text!r}. "
        "Try --set rollout.engine=native.",
    )


def describe_engine(cfg: "Config") -> EngineDescription:
    """Return the description of the config's engine.

    Raises ConfigError if rollout.engine is not a function that returns one.
    """
    path, options = parse_call(ENGINES.get(cfg.rollout.engine, cfg.rollout.engine), _KEY)
    describe = import_function(path, _KEY)
    try:
        # Bound before the call, so that a TypeError inside the function is not reported as wrong
        # options.
        inspect.signature(describe).bind(cfg, **options)
    except TypeError as error:
        raise ConfigError(
            f"rollout.engine={cfg.rollout.engine} must take the config and these options; {error}."
        ) from error
    try:
        description = describe(cfg, **options)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"rollout.engine={cfg.rollout.engine} must return a jaxmoe.config.EngineDescription; "
            f"it raised {type(error).__name__}: {error}. Correct the function."
        ) from error
    require(
        isinstance(description, EngineDescription),
        f"rollout.engine={cfg.rollout.engine} must return a jaxmoe.config.EngineDescription, got "
        f"{type(description).__name__}.",
    )
    return description


def may_change_at_resume(cfg: "Config", key: str, saved: Any) -> bool:
    """Return True if a resumed run may have another rollout.engine: only such options changed."""
    if key != _KEY:
        return False
    changeable = describe_engine(cfg).changeable_options
    (path, options), (saved_path, saved_options) = (
        parse_call(text, _KEY) for text in (cfg.rollout.engine, saved)
    )
    absent = object()
    changed = {
        name
        for name in options.keys() | saved_options.keys()
        if options.get(name, absent) != saved_options.get(name, absent)
    }
    return path == saved_path and changed <= changeable


def check_engine(cfg: "Config") -> None:
    """Raise ConfigError if the engine cannot run the config or report what the config needs."""
    engine, r = describe_engine(cfg), cfg.rollout
    truncates = r.top_k > 0 or r.top_p < 1
    require(
        engine.reports_kept_mass or not truncates,
        f"rollout.top_k ({r.top_k}) and rollout.top_p ({r.top_p}) must be off with "
        f"rollout.engine={r.engine}, which does not report the mass that they keep. "
        "Try --set rollout.top_k=0 --set rollout.top_p=1.0.",
    )
    require(
        engine.reports_sampled_logp or not (truncates or r.temperature != 1.0),
        f"rollout.temperature must be 1 with rollout.engine={r.engine}, got {r.temperature}, and "
        "top_k and top_p off: it reports log-probs before they are applied. Try --set "
        "rollout.temperature=1.0 --set rollout.top_k=0 --set rollout.top_p=1.0.",
    )
    require(
        engine.runs_episodes or not cfg.has_environment,
        f"rollout.engine={r.engine} must run episodes for data.environment and data.tools; its "
        "description has runs_episodes=False. Try --set rollout.engine=native.",
    )
    require(
        engine.runs_groups or r.schedule == "batch",
        f"rollout.engine={r.engine} must sample several groups at once for rollout.schedule="
        "groups; its description has runs_groups=False. Try --set rollout.schedule=batch.",
    )
    require(
        engine.reports_experts or not cfg.records_experts,
        f"rollout.engine={r.engine} does not report experts, which router.replay=R3, "
        "rollout.compare_experts, load_balance in router.terms and model.numerics=invariant need. "
        "Try --set router.replay='' --set rollout.compare_experts=False --set router.terms='' "
        "--set model.numerics=fast.",
    )
    engine.check(cfg)

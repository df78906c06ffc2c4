# SPDX-License-Identifier: Apache-2.0
"""The configuration: frozen dataclasses, and the loader behind `--config FILE --set a.b=v`.

Names carry their units. A config file is a Python file with `get_config() -> Config`; it is
looked up as given, then in the current directory's configs/, then among the shipped ones.
Functions below the loop take plain numbers, never a Config. Next: jaxmoe/train.py.
"""

import ast
import dataclasses
import difflib
import importlib.util
import json
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class ConfigError(ValueError):
    """A mistake in the user's input: what must hold, what was given, what to type."""


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of a GPT-OSS model; even layers slide, odd layers see everything."""

    vocab_size: int
    d_model: int
    n_layers: int
    n_q_heads: int
    n_kv_heads: int
    head_dim: int
    n_experts: int
    experts_per_token: int
    d_expert: int
    sliding_window: int  # keys a query may read in a sliding layer, itself included
    dtype: str = "bfloat16"  # of the arithmetic; softmax, router and loss are float32 anyway
    vocab_multiple: int = 1  # the embedding and the head are padded to a multiple of this
    rope_theta: float = 150_000.0
    rope_factor: float = 32.0  # YaRN; 1 is plain RoPE
    rope_original_context: int = 4096
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0
    rope_truncate: bool = False
    rms_eps: float = 1e-5
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    max_context: int = 131_072

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.type is int:
                _require(
                    value > 0,
                    f"model.{f.name} must be positive, got {value}. Try --set model.{f.name}=2.",
                )
        _require(
            self.n_q_heads % self.n_kv_heads == 0,
            f"model.n_q_heads ({self.n_q_heads}) must be a multiple of model.n_kv_heads "
            f"({self.n_kv_heads}). Try --set model.n_kv_heads=1.",
        )
        _require(
            self.n_layers % 2 == 0,
            f"model.n_layers ({self.n_layers}) must be even: layers come in (sliding, full) "
            f"pairs. Try --set model.n_layers={self.n_layers + 1}.",
        )
        _require(
            self.experts_per_token <= self.n_experts,
            f"model.experts_per_token ({self.experts_per_token}) must be at most "
            f"model.n_experts ({self.n_experts}). "
            f"Try --set model.experts_per_token={self.n_experts}.",
        )
        _require(
            self.head_dim % 2 == 0,
            f"model.head_dim ({self.head_dim}) must be even: RoPE turns pairs of its "
            f"entries. Try --set model.head_dim={self.head_dim + 1}.",
        )
        _require(
            self.dtype in ("float32", "bfloat16"),
            f"model.dtype must be float32 or bfloat16, got {self.dtype!r}. "
            "Try --set model.dtype=bfloat16.",
        )

    @property
    def padded_vocab(self) -> int:
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple


@dataclass(frozen=True)
class InitConfig:
    """Where weights and tokens come from."""

    checkpoint: str = ""  # directory of a Hugging Face GPT-OSS checkpoint; empty: random weights
    tokenizer: str = "bytes"  # or a tokenizer.json, or the directory that holds one


@dataclass(frozen=True)
class DataConfig:
    """Prompts with checkable answers."""

    task: str  # "reasoning_gym:NAME", a .jsonl/.parquet file, or "package:NAME/path/in/it"
    options: dict[str, Any] = field(default_factory=dict)  # for reasoning_gym tasks
    template: str = "{question}"
    train_rows: int = 4096
    held_out_rows: int = 256
    max_prompt_tokens: int = 512


@dataclass(frozen=True)
class WarmupConfig:
    """Supervised steps on the stored answers before RL; 0 steps skips the stage."""

    steps: int = 0
    sequences_per_step: int = 64
    lr: float = 1e-3


@dataclass(frozen=True)
class RolloutConfig:
    """How a step's sequences are sampled."""

    sequences_per_step: int
    samples_per_prompt: int
    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    max_parallel_sequences: int = 256  # one engine batch; more prompts wait for the next

    def __post_init__(self) -> None:
        n, r = self.sequences_per_step, self.samples_per_prompt
        _require(
            r > 0,
            f"rollout.samples_per_prompt must be positive, got {r}. "
            "Try --set rollout.samples_per_prompt=8.",
        )
        _require(
            n > 0 and n % r == 0,
            f"rollout.sequences_per_step ({n}) must be a multiple of rollout.samples_per_prompt "
            f"({r}). Try --set rollout.sequences_per_step={max(1, n // r) * r}.",
        )
        _require(
            self.max_new_tokens > 0,
            f"rollout.max_new_tokens must be positive, got {self.max_new_tokens}. "
            "Try --set rollout.max_new_tokens=256.",
        )
        _require(
            self.temperature > 0,
            f"rollout.temperature must be above 0 (greedy samples are all alike), got "
            f"{self.temperature}. Try --set rollout.temperature=1.0.",
        )
        _require(
            0 < self.top_p <= 1,
            f"rollout.top_p must be in (0, 1], got {self.top_p}. Try --set rollout.top_p=1.0.",
        )
        _require(
            self.top_k >= 0,
            f"rollout.top_k must be 0 (off) or more, got {self.top_k}. Try --set rollout.top_k=0.",
        )

    @property
    def prompts_per_step(self) -> int:
        return self.sequences_per_step // self.samples_per_prompt


@dataclass(frozen=True)
class LossConfig:
    """GRPO."""

    on_policy: bool = True  # old_logp = stop_gradient(logp): the ratio is exactly 1
    updates_per_batch: int = 1
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coef: float = 0.0  # weight of k3(policy, reference); 0 keeps no reference in memory
    advantage_scale: str = "std"  # "std" divides by the group's deviation, "none" does not

    def __post_init__(self) -> None:
        _require(
            not (self.on_policy and self.updates_per_batch > 1),
            f"loss.on_policy needs loss.updates_per_batch=1, got {self.updates_per_batch}: after "
            "the first update the batch is off-policy and its ratio is not 1. "
            "Try --set loss.on_policy=False.",
        )
        _require(
            self.advantage_scale in ("std", "none"),
            f"loss.advantage_scale must be 'std' or 'none', got "
            f"{self.advantage_scale!r}. Try --set loss.advantage_scale=std.",
        )


@dataclass(frozen=True)
class OptimConfig:
    """AdamW with a warm-up and an optional cosine decay."""

    lr: float
    lr_warmup_steps: int = 0
    lr_end_fraction: float = 1.0  # cosine decay ends at lr times this; 1 keeps lr constant
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    param_dtype: str = "float32"  # in which weights and moments are held and updated
    microbatches: int = 1  # the step's sequences are cut into this many pieces
    remat: bool = False  # recompute layer pairs in the backward pass: less memory, a third slower


@dataclass(frozen=True)
class EvalConfig:
    """Greedy answers on the held-out rows."""

    every_steps: int = 10


@dataclass(frozen=True)
class SaveConfig:
    """Checkpoints of everything a resume needs."""

    every_steps: int = 50
    keep: int = 3


@dataclass(frozen=True)
class MeshConfig:
    """Devices = fsdp * expert; each parameter is cut over both."""

    fsdp: int = 1
    expert: int = 1


@dataclass(frozen=True)
class Config:
    """Everything a run depends on."""

    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig
    optim: OptimConfig
    steps: int
    seed: int = 0
    workdir: str = "runs/default"
    init: InitConfig = InitConfig()
    warmup: WarmupConfig = WarmupConfig()
    loss: LossConfig = LossConfig()
    eval: EvalConfig = EvalConfig()
    save: SaveConfig = SaveConfig()
    mesh: MeshConfig = MeshConfig()

    def __post_init__(self) -> None:
        n, m = self.rollout.sequences_per_step, self.optim.microbatches
        _require(
            m > 0 and n % m == 0,
            f"rollout.sequences_per_step ({n}) must be a multiple of optim.microbatches ({m}). "
            f"Try --set optim.microbatches=1.",
        )
        m = self.optim.microbatches
        _require(
            self.warmup.steps == 0 or self.warmup.sequences_per_step % m == 0,
            f"warmup.sequences_per_step ({self.warmup.sequences_per_step}) must be a multiple of "
            f"optim.microbatches ({m}). Try --set warmup.sequences_per_step={m}.",
        )
        _require(
            self.context <= self.model.max_context,
            f"data.max_prompt_tokens + rollout.max_new_tokens ({self.context}) must be at most "
            f"model.max_context ({self.model.max_context}). "
            f"Try --set rollout.max_new_tokens={self.model.max_context // 2}.",
        )
        for name, value in (("steps", self.steps), ("seed", self.seed)):
            _require(value >= 0, f"{name} must be 0 or more, got {value}. Try --set {name}=0.")
        for name, value in (("eval", self.eval.every_steps), ("save", self.save.every_steps)):
            _require(
                value > 0,
                f"{name}.every_steps must be positive, got {value}. "
                f"Try --set {name}.every_steps=50.",
            )

    @property
    def context(self) -> int:
        """Tokens of the longest sequence, prompt and answer."""
        return self.data.max_prompt_tokens + self.rollout.max_new_tokens


def load(name: str) -> Config:
    """The Config that a file's `get_config()` returns.

    Raises ConfigError where there is no such file, function or result.
    """
    path = _find(name)
    spec = importlib.util.spec_from_file_location("jaxmoe_config_file", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    _require(hasattr(module, "get_config"), f"{path} must define get_config() -> Config.")
    config = module.get_config()
    _require(
        isinstance(config, Config),
        f"{path}: get_config() must return a jaxmoe.config.Config, got {type(config).__name__}.",
    )
    return config


def _find(name: str) -> Path:
    shipped = Path(__file__).parent.parent / "configs"
    places = [Path(name), Path("configs") / name, shipped / name]
    for path in places:
        if path.is_file():
            return path
    known = sorted(p.name for p in shipped.glob("[!_]*.py"))
    near = difflib.get_close_matches(Path(name).name, known, 1)
    hint = f" Did you mean {near[0]}?" if near else f" Shipped: {', '.join(known)}."
    raise ConfigError(f"--config must name a file; there is no {name!r}.{hint}")


def override(config: Any, *assignments: str, _prefix: str = "") -> Any:
    """A copy of a config with fields changed: override(cfg, "optim.lr=1e-4", "seed=3").

    All changes are made before any is checked against another, so two that only fit together
    may come in either order.
    Raises ConfigError for an unknown key ("Did you mean …?") or a value of another type.
    """
    changes: dict[str, Any] = {}
    inner: dict[str, list[str]] = {}
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        _require(
            bool(equals), f"--set takes key=value, got {assignment!r}. Try --set optim.lr=1e-4."
        )
        head, dot, rest = path.strip().partition(".")
        names = [f.name for f in dataclasses.fields(config)]
        if head not in names:
            near = difflib.get_close_matches(head, names, 1)
            hint = f"Did you mean {_prefix}{near[0]}?" if near else f"Known: {', '.join(names)}."
            raise ConfigError(f"unknown config key {_prefix}{head!s}. {hint}")
        old, want = getattr(config, head), typing.get_type_hints(type(config))[head]
        if dataclasses.is_dataclass(old) and not isinstance(old, type):
            _require(bool(dot), f"--set {_prefix}{head} needs a field, as in {_prefix}{head}.x=…")
            inner.setdefault(head, []).append(f"{rest}={text}")
        elif isinstance(old, dict):
            _require(bool(dot), f"--set {_prefix}{head} needs a key, as in {_prefix}{head}.x=…")
            changes[head] = changes.get(head, old) | {rest: _literal(text)}
        else:
            _require(not dot, f"{_prefix}{head} is a value; {_prefix}{path} does not exist.")
            changes[head] = _parse(text, want, _prefix + head)
    for head, parts in inner.items():
        changes[head] = override(getattr(config, head), *parts, _prefix=f"{_prefix}{head}.")
    return dataclasses.replace(config, **changes)


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError):
        return text


def _parse(text: str, want: Any, path: str) -> Any:
    if want is str:
        return text
    value = {"true": True, "false": False}.get(text.strip().lower(), _literal(text))
    if want is float and type(value) is int:
        value = float(value)
    kinds = typing.get_args(want) if isinstance(want, types.UnionType) else (want,)
    if type(value) not in kinds:
        name = " or ".join(kind.__name__ for kind in kinds)
        example = {"int": "=8", "float": "=1e-4", "bool": "=True"}.get(name, "=…")
        raise ConfigError(f"{path} must be {name}, got {text!r}. Try --set {path}{example}")
    return value


def to_json(config: Config) -> str:
    """The resolved config, as saved in the run folder."""
    return json.dumps(dataclasses.asdict(config), indent=2)

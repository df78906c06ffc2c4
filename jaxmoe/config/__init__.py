# SPDX-License-Identifier: Apache-2.0
"""The configuration: frozen dataclasses that refuse settings that cannot work.

Names contain units. Next: jaxmoe/config_file.py reads `--config FILE --set a.b=v`.
"""

import dataclasses
import json
from dataclasses import dataclass, field

from jaxmoe.config.data import DataConfig
from jaxmoe.config.engine import EngineDescription, EngineMemory, check_engine, describe_engine
from jaxmoe.config.episodes import check_episodes, context_name
from jaxmoe.config.errors import (
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    ConfigError,
    EngineError,
    Rule,
    check_fields,
    require,
)
from jaxmoe.config.lora import LoraConfig
from jaxmoe.config.lora_with import check_lora
from jaxmoe.config.mesh import MeshConfig
from jaxmoe.config.model import CHECKPOINT_MODEL, ModelConfig
from jaxmoe.config.numerics import check_numerics
from jaxmoe.config.optim import OptimConfig
from jaxmoe.config.quant import QuantConfig, check_quant
from jaxmoe.config.rollout import RolloutConfig, VllmConfig
from jaxmoe.config.router import RouterConfig, check_router_config
from jaxmoe.config.sandbox import SandboxConfig, check_sandbox
from jaxmoe.config.values import check_values

__all__ = [
    "CHECKPOINT_MODEL",
    "Config",
    "ConfigError",
    "CriticConfig",
    "DataConfig",
    "EngineDescription",
    "EngineError",
    "EngineMemory",
    "EvalConfig",
    "GateConfig",
    "InitConfig",
    "LoraConfig",
    "LossConfig",
    "MeshConfig",
    "ModelConfig",
    "ObserveConfig",
    "OptimConfig",
    "QuantConfig",
    "RolloutConfig",
    "RouterConfig",
    "SandboxConfig",
    "SaveConfig",
    "VllmConfig",
    "WarmupConfig",
    "describe_engine",
    "require",
    "to_json",
]


KERNELS = ("auto", "xla", "mosaic_gpu", "mosaic_tpu", "triton", "reference")


@dataclass(frozen=True)
class InitConfig:
    """Source of weights and tokenizer."""

    checkpoint: str = ""  # folder of a Hugging Face GPT-OSS checkpoint; empty: random weights
    tokenizer: str = "bytes"  # or a tokenizer.json, or its folder


@dataclass(frozen=True)
class WarmupConfig:
    """Supervised steps on the stored answers before RL; 0 steps skips the stage."""

    steps: int = 0
    sequences_per_step: int = 64
    lr: float = 1e-3
    # "module:function(option=1)", row -> messages of an episode to imitate; empty: stored answers
    demonstrations: str = ""

    def __post_init__(self) -> None:
        check_fields("warmup", self, steps=(*NOT_NEGATIVE, 0), lr=(*NOT_NEGATIVE, 1e-3))


@dataclass(frozen=True)
class LossConfig:
    """The loss of a step: functions of jaxmoe.losses with options, as text.

    A custom function is "module:function(option=1.0)".
    """

    objective: str = "ppo_clip"  # the loss at every token
    advantages: str = "group_advantages"
    aggregation: str = "token_mean"  # from tokens to the loss
    rollout_correction: str = ""  # for a different engine: "token_is(high=2.0) + veto"
    preset: str = ""  # one of verl's rollout-correction presets; sets several of these fields
    old_logp: str = "detached"  # or "recomputed" by the trainer, or the "rollout"'s
    epochs: int = 1  # passes over the sequences of a step
    minibatches: int = 1  # updates per epoch
    kl: str = "kl_k3"
    kl_coef: float = 0.0  # weight of kl(policy, reference); 0: no reference in memory
    kl_in: str = "loss"  # or "reward": subtracted from the token's reward, before advantages
    entropy_coef: float = 0.0  # weight of the entropy bonus
    terms: str = ""  # further terms: functions of your own, "module:function(weight=0.01) + …"

    def __post_init__(self) -> None:
        for name, allowed in (
            ("old_logp", ("detached", "recomputed", "rollout")),
            ("kl_in", ("loss", "reward")),
        ):
            value = getattr(self, name)
            require(
                value in allowed,
                f"loss.{name} must be one of {', '.join(allowed)}; got {value!r}. "
                f"Try --set loss.{name}={allowed[0]}.",
            )
        for name in ("epochs", "minibatches"):
            require(
                getattr(self, name) > 0,
                f"loss.{name} must be positive, got {getattr(self, name)}. "
                f"Try --set loss.{name}=1.",
            )
        require(
            self.kl_coef >= 0.0,
            f"loss.kl_coef must be 0 or more, got {self.kl_coef}. Try --set loss.kl_coef=0.001.",
        )

    @property
    def updates(self) -> int:
        """Number of optimizer updates in a step."""
        return self.epochs * self.minibatches


@dataclass(frozen=True)
class CriticConfig:
    """A value function, for advantages that take values (gae)."""

    backbone: str = "none"  # none: no critic; own: a second model; shared: the policy's layers
    lr: float = 1e-5
    loss_coef: float = 0.5  # weight of the value loss; with an own backbone only lr matters
    clip: float = 0.5  # limit of a value's change, in units of reward
    pretrain_steps: int = 0  # number of first steps that train only the critic

    def __post_init__(self) -> None:
        require(
            self.backbone in ("none", "own", "shared"),
            f"critic.backbone must be none, own or shared, got {self.backbone!r}. "
            "Try --set critic.backbone=own.",
        )
        require(
            self.pretrain_steps >= 0,
            f"critic.pretrain_steps must be 0 or more, got {self.pretrain_steps}. "
            "Try --set critic.pretrain_steps=0.",
        )
        check_fields(
            "critic",
            self,
            lr=(*NOT_NEGATIVE, 1e-5),
            loss_coef=(*NOT_NEGATIVE, 0.5),
            clip=(*POSITIVE, 0.5),
        )


@dataclass(frozen=True)
class GateConfig:
    """Limits of the difference between trainer and engine; above them a run stops, or skips."""

    abs_diff: float | None = None  # largest mean |logp − rollout_logp|, nats; None is off
    k3: float | None = None  # largest mean k3, nats; None is off
    ess: float = 0.0  # smallest effective sample size of the token ratios, as a share of tokens
    skip: bool = False  # skip the batch; False: stop with an error before the update

    def __post_init__(self) -> None:
        limit: Rule = ("0 or more (None is off)", lambda x: x is None or x >= 0, 0.1)
        check_fields("gate", self, abs_diff=limit, k3=limit, ess=(*SHARE, 0.3))

    @property
    def has_limits(self) -> bool:
        return self.abs_diff is not None or self.k3 is not None or self.ess > 0


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation on the held-out rows: answers sampled as in training, and one greedy answer."""

    every_steps: int = 10
    samples_per_prompt: int = 2  # sampled answers; pass@k is computed for k up to this

    def __post_init__(self) -> None:
        check_fields("eval", self, samples_per_prompt=("1 or more", lambda x: x >= 1, 2))


@dataclass(frozen=True)
class SaveConfig:
    """Checkpoints of everything that a resume needs."""

    every_steps: int = 50
    keep: int = 3
    export_dtype: str = "bfloat16"  # of python -m jaxmoe.export; float32, or mxfp4 (the experts)


@dataclass(frozen=True)
class ObserveConfig:
    """Trackers that get the metrics, in addition to the run folder."""

    to: str = ""  # "wandb", "trackio", or both separated by a comma
    project: str = "jaxmoe"  # name of the trackers' project

    def __post_init__(self) -> None:
        unknown = set(self.trackers) - {"wandb", "trackio"}
        require(
            not unknown and bool(self.project.strip()),
            f"observe.to must be wandb, trackio or both separated by a comma, and "
            f"observe.project a name; got {self.to!r}, {self.project!r}. "
            "Try --set observe.to=wandb --set observe.project=jaxmoe.",
        )

    @property
    def trackers(self) -> list[str]:
        """Names of the trackers, without duplicates."""
        return list(dict.fromkeys(name.strip() for name in self.to.split(",") if name.strip()))


@dataclass(frozen=True)
class Config:
    """Everything that a run depends on."""

    model: ModelConfig = field(default=CHECKPOINT_MODEL, kw_only=True)
    data: DataConfig
    rollout: RolloutConfig
    optim: OptimConfig
    steps: int
    seed: int = 0
    workdir: str = "runs/default"
    init: InitConfig = InitConfig()
    warmup: WarmupConfig = WarmupConfig()
    loss: LossConfig = LossConfig()
    critic: CriticConfig = CriticConfig()
    gate: GateConfig = GateConfig()
    eval: EvalConfig = EvalConfig()
    save: SaveConfig = SaveConfig()
    observe: ObserveConfig = ObserveConfig()
    mesh: MeshConfig = MeshConfig()
    lora: LoraConfig = LoraConfig()
    router: RouterConfig = RouterConfig()
    quant: QuantConfig = QuantConfig()
    sandbox: SandboxConfig = SandboxConfig()
    kernels: str = "auto"  # those that pass the check on this device; or one of KERNELS

    def __post_init__(self) -> None:
        check_values(self)
        n, m = self.rollout.sequences_per_step, self.optim.microbatches
        require(
            m > 0 and n % m == 0,
            f"rollout.sequences_per_step ({n}) must be a multiple of optim.microbatches ({m}). "
            f"Try --set optim.microbatches=1.",
        )
        updates = self.loss.minibatches
        require(
            n % updates == 0 and (m == 1 or m % updates == 0),
            f"rollout.sequences_per_step ({n}) and optim.microbatches ({m}, unless 1) must be "
            f"multiples of loss.minibatches ({updates}). Try --set loss.minibatches=1.",
        )
        packed_tokens = self.optim.tokens_per_microbatch
        require(
            packed_tokens == 0 or (packed_tokens >= self.context and m == 1),
            f"optim.tokens_per_microbatch ({packed_tokens}) must be 0, or at least "
            f"{context_name(self)} ({self.context}) with "
            f"optim.microbatches=1 (got {m}). "
            f"Try --set optim.tokens_per_microbatch={self.context * 8} --set optim.microbatches=1.",
        )
        require(
            self.warmup.steps == 0
            or (self.warmup.sequences_per_step > 0 and self.warmup.sequences_per_step % m == 0),
            f"warmup.sequences_per_step ({self.warmup.sequences_per_step}) must be a positive "
            f"multiple of optim.microbatches ({m}). Try --set warmup.sequences_per_step={m}.",
        )
        require(
            self.context <= self.model.max_context,
            f"{context_name(self)} ({self.context}) must be at most "
            f"model.max_context ({self.model.max_context}). Try {self._smaller_context()}",
        )
        check_episodes(self)
        check_engine(self)
        check_lora(self)
        check_quant(self)
        check_numerics(self)
        check_router_config(self)
        check_sandbox(self)
        require(
            self.kernels in KERNELS,
            f"kernels must be one of {', '.join(KERNELS)}; got {self.kernels!r}. "
            "Try --set kernels=auto, which takes those that are right on this device.",
        )
        seeds: Rule = ("0 or more and below 2**32", lambda x: 0 <= x < 2**32, 0)
        check_fields("", self, steps=(*NOT_NEGATIVE, 0), seed=seeds)
        for name, value in (("eval", self.eval.every_steps), ("save", self.save.every_steps)):
            require(
                value > 0,
                f"{name}.every_steps must be positive, got {value}. "
                f"Try --set {name}.every_steps=50.",
            )
        require(
            self.save.keep > 0,
            f"save.keep must be positive, got {self.save.keep}. Try --set save.keep=3.",
        )

    @property
    def requires_equal_logp(self) -> bool:
        """True if every log-prob of trainer and engine must be bitwise equal in each step."""
        if self.model.numerics != "invariant" or self.rollout.max_staleness > 0:
            return False
        return describe_engine(self).uses_trainer_forward

    @property
    def records_experts(self) -> bool:
        """True if rollouts have the engine's experts, to be replayed or compared."""
        return (
            self.router.replay == "R3"
            or self.rollout.compare_experts
            or self.requires_equal_logp
            or "load_balance" in self.router.term_weights
        )

    @property
    def trainable(self) -> str:
        """Regular expression of the paths of parameters that train: `optim.trainable`, without the
        routers if they are frozen."""
        expression = self.optim.trainable
        return rf"(?!.*_router\b)(?:{expression})" if self.router.freeze else expression

    @property
    def computed_experts(self) -> int:
        """Number of experts that training computes for each token."""
        m = self.model
        return m.n_experts if self.router.is_dense else m.experts_per_token

    @property
    def step_gate(self) -> GateConfig:
        """The gate of RL steps; if log-probs must be equal, any difference stops the run."""
        exact = dataclasses.replace(self.gate, abs_diff=0.0, skip=False)
        return exact if self.requires_equal_logp else self.gate

    @property
    def context(self) -> int:
        """Maximum number of tokens of a sequence: prompt, answer, and replies between them."""
        return self.rollout.max_context or self.data.max_prompt_tokens + self.rollout.max_new_tokens

    @property
    def has_environment(self) -> bool:
        """True if an environment, or tools, reply to the policy."""
        return bool(self.data.environment.strip() or self.data.tools.strip())

    def _smaller_context(self) -> str:
        """Settings for a context that the model has."""
        size = self.model.max_context
        if size <= 1:
            return f"--set model.max_context={self.context}."
        if self.rollout.max_context:
            return f"--set rollout.max_context={size}."
        return f"--set data.max_prompt_tokens={size // 2} --set rollout.max_new_tokens={size // 2}."


def to_json(config: Config) -> str:
    """Return the config as JSON, as it is saved in the run folder."""
    return json.dumps(dataclasses.asdict(config), indent=2)

# SPDX-License-Identifier: Apache-2.0
"""The configuration: frozen dataclasses that refuse settings that cannot work.

Names contain units. Next: jaxmoe/config_file.py reads `--config FILE --set a.b=v`.
"""

import dataclasses
import json
import re
from dataclasses import dataclass, field

from jaxmoe.config.data import DataConfig
from jaxmoe.config.distill import DistillConfig, check_distill
from jaxmoe.config.engine import EngineDescription, EngineMemory, check_engine, describe_engine
from jaxmoe.config.episodes import check_episodes, context_name, read_context_name
from jaxmoe.config.errors import ConfigError, EngineError, require
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
from jaxmoe.config.settings import Section, ValueRule, above, at_least, between, one_of, setting

__all__ = [
    "CHECKPOINT_MODEL",
    "Config",
    "ConfigError",
    "CriticConfig",
    "DataConfig",
    "DistillConfig",
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
# An error suggests auto alone: the closest name may be of another chip.
_KERNELS = dataclasses.replace(one_of(*KERNELS), accepted=KERNELS[:1])
_TRACKERS = ValueRule(
    "wandb, trackio, or both separated by a comma",
    lambda text: set(_split_names(text)) <= {"wandb", "trackio"},
    ("", "wandb", "wandb,trackio"),
    ("wandb,other",),
)
_NAME = ValueRule("a name", lambda text: bool(text.strip()), ("words",), (" ",))


def _split_names(text: str) -> list[str]:
    """Names separated by commas, without duplicates."""
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


@dataclass(frozen=True)
class InitConfig(Section, key="init"):
    """Source of weights and tokenizer."""

    checkpoint: str = setting("", "folder of a Hugging Face GPT-OSS; empty: random weights")
    tokenizer: str = setting("bytes", "bytes, a tokenizer.json, or its folder")


@dataclass(frozen=True)
class WarmupConfig(Section, key="warmup"):
    """Supervised steps on the stored answers before RL; 0 steps skips the stage."""

    steps: int = setting(0, "supervised steps before RL", at_least(0))
    sequences_per_step: int = setting(64, "rows of a step")
    lr: float = setting(1e-3, "learning rate", at_least(0), resume=True)
    demonstrations: str = setting(
        "", "module:function(option=1) from a row to messages to imitate; empty: stored answers"
    )


@dataclass(frozen=True)
class LossConfig(Section, key="loss"):
    """The loss of a step: functions of jaxmoe.losses with options, as text.

    A custom function is "module:function(option=1.0)".
    """

    objective: str = setting("ppo_clip", "the loss at every token")
    advantages: str = setting("group_advantages", "from rewards to advantages")
    aggregation: str = setting("token_mean", "from tokens to the loss")
    rollout_correction: str = setting("", "for a different engine: token_is(high=2.0) + veto")
    preset: str = setting("", "one of verl's corrections; sets several of these fields")
    old_logp: str = setting(
        "detached", "log-probs before the step", one_of("detached", "recomputed", "rollout")
    )
    epochs: int = setting(1, "passes over the sequences of a step", at_least(1))
    minibatches: int = setting(1, "updates per epoch", at_least(1))
    kl: str = setting("kl_k3", "estimator of kl(policy, reference)")
    kl_coef: float = setting(0.0, "its weight; 0: no reference in memory", at_least(0))
    kl_in: str = setting("loss", "where the KL is subtracted", one_of("loss", "reward"))
    entropy_coef: float = setting(0.0, "weight of the entropy bonus")
    terms: str = setting("", "functions of your own: module:function(weight=0.01) + …")

    @property
    def updates(self) -> int:
        """Number of optimizer updates in a step."""
        return self.epochs * self.minibatches


@dataclass(frozen=True)
class CriticConfig(Section, key="critic"):
    """A value function, for advantages that take values (gae)."""

    backbone: str = setting(
        "none", "own: a second model; shared: the policy's", one_of("none", "own", "shared")
    )
    lr: float = setting(1e-5, "learning rate", at_least(0), resume=True)
    loss_coef: float = setting(0.5, "weight of the value loss, if shared", at_least(0))
    clip: float = setting(0.5, "limit of a value's change, in units of reward", above(0))
    pretrain_steps: int = setting(0, "first steps, which train only the critic", at_least(0))

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.backbone != "none" or self.pretrain_steps == 0,
            f"critic.pretrain_steps ({self.pretrain_steps}) needs a critic, and there is none. Try "
            "--set critic.pretrain_steps=0, or --set critic.backbone=own.",
        )


@dataclass(frozen=True)
class GateConfig(Section, key="gate", resume=True):
    """Limits of the difference between trainer and engine; above them a run stops, or skips."""

    abs_diff: float | None = setting(
        None, "largest mean |logp − rollout_logp|, nats", at_least(0), example=0.1
    )
    k3: float | None = setting(None, "largest mean k3, nats", at_least(0), example=0.1)
    ess: float = setting(0.0, "smallest effective share of the tokens", between(0, 1), example=0.3)
    skip: bool = setting(False, "skip the batch; False: stop before the update")

    @property
    def has_limits(self) -> bool:
        return self.abs_diff is not None or self.k3 is not None or self.ess > 0


@dataclass(frozen=True)
class EvalConfig(Section, key="eval", resume=True):
    """Evaluation on the held-out rows: answers sampled as in training, and one greedy answer."""

    every_steps: int = setting(10, "steps between evaluations", at_least(1))
    samples_per_prompt: int = setting(2, "sampled answers, for pass@k", at_least(1))


@dataclass(frozen=True)
class SaveConfig(Section, key="save", resume=True):
    """Checkpoints of everything that a resume needs."""

    every_steps: int = setting(50, "steps between checkpoints", at_least(1))
    keep: int = setting(3, "checkpoints that stay", at_least(1))
    export_dtype: str = setting("bfloat16", "of an export: bfloat16, float32, or mxfp4 experts")


@dataclass(frozen=True)
class ObserveConfig(Section, key="observe", resume=True):
    """Trackers that get the metrics, in addition to the run folder."""

    to: str = setting("", "trackers", _TRACKERS, example="wandb")
    project: str = setting("jaxmoe", "name of the trackers' project", _NAME)

    @property
    def trackers(self) -> list[str]:
        """Names of the trackers, without duplicates."""
        return _split_names(self.to)


@dataclass(frozen=True)
class Config(Section, key=""):
    """Everything that a run depends on."""

    model: ModelConfig = field(default=CHECKPOINT_MODEL, kw_only=True)
    data: DataConfig
    rollout: RolloutConfig
    optim: OptimConfig
    steps: int = setting(
        ..., "RL steps", at_least(0), example=10, resume="unless the learning rate decays over them"
    )
    seed: int = setting(0, "of weights, rows and samples", between(0, 2**32 - 1))
    workdir: str = setting("runs/default", "the run folder", resume=True)
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
    distill: DistillConfig = DistillConfig()
    sandbox: SandboxConfig = SandboxConfig()
    kernels: str = setting(
        "auto", "auto: those that pass this device's check", _KERNELS, resume=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_local_path(str(self.workdir))  # a value of another type is refused later
        n, m = self.rollout.sequences_per_step, self.optim.microbatches
        require(
            n % m == 0,
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
            self.read_context <= self.model.max_context,
            f"{read_context_name(self)} ({self.read_context}) must be at most "
            f"model.max_context ({self.model.max_context}). Try {self._smaller_context()}",
        )
        pretrain = self.critic.pretrain_steps
        require(
            self.steps == 0 or pretrain < self.steps,
            f"critic.pretrain_steps ({pretrain}) must be below steps ({self.steps}), or no step "
            f"trains the policy. Try --set critic.pretrain_steps={self.steps // 2}.",
        )
        check_episodes(self)
        check_engine(self)
        check_lora(self)
        check_quant(self)
        check_numerics(self)
        check_router_config(self)
        check_sandbox(self)
        check_distill(self)

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
        """Maximum number of tokens of a row: prompt, answer, and replies between them; of an
        episode whose context is replaced, those of all its contexts."""
        return self.rollout.max_episode_tokens or self.read_context

    @property
    def read_context(self) -> int:
        """Maximum number of tokens that the policy reads at once."""
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


def _check_local_path(folder: str) -> None:
    """Raise ConfigError for an empty text, and for a URL, of which a path is a local folder."""
    require(
        bool(folder.strip()),
        f"workdir must be the path of a folder, got {folder!r}. Try --workdir runs/another.",
    )
    require(
        not re.match(r"[\w+.-]+://", folder),
        f"workdir must be a folder of this machine, got {folder!r}. Mount the bucket and name its "
        "folder, as in --workdir /mnt/bucket/runs/20b.",
    )


def to_json(config: Config) -> str:
    """Return the config as JSON, as it is saved in the run folder."""
    return json.dumps(dataclasses.asdict(config), indent=2)

# SPDX-License-Identifier: Apache-2.0
"""The configuration: frozen dataclasses that refuse what cannot work.

Names carry their units. Functions below the loop take plain numbers, never a Config.
Next: jaxmoe/config_file.py reads `--config FILE --set a.b=v`.
"""

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any


class ConfigError(ValueError):
    """A mistake in the user's input: what must hold, what was given, what to type."""


def require(holds: bool, message: str) -> None:
    """Raise the message as a ConfigError unless it holds."""
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
                require(
                    value > 0,
                    f"model.{f.name} must be positive, got {value}. Try --set model.{f.name}=2.",
                )
        require(
            self.n_q_heads % self.n_kv_heads == 0,
            f"model.n_q_heads ({self.n_q_heads}) must be a multiple of model.n_kv_heads "
            f"({self.n_kv_heads}). Try --set model.n_kv_heads=1.",
        )
        require(
            self.n_layers % 2 == 0,
            f"model.n_layers ({self.n_layers}) must be even: layers come in (sliding, full) "
            f"pairs. Try --set model.n_layers={self.n_layers + 1}.",
        )
        require(
            self.experts_per_token <= self.n_experts,
            f"model.experts_per_token ({self.experts_per_token}) must be at most "
            f"model.n_experts ({self.n_experts}). "
            f"Try --set model.experts_per_token={self.n_experts}.",
        )
        require(
            self.head_dim % 2 == 0,
            f"model.head_dim ({self.head_dim}) must be even: RoPE turns pairs of its "
            f"entries. Try --set model.head_dim={self.head_dim + 1}.",
        )
        require(
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
class VllmConfig:
    """Where vLLM runs and how weights get there; read where rollout.engine is "vllm"."""

    url: str = ""  # of running servers, a comma between them; empty: start or be one
    launch: int = 1  # servers to start where no url is given; 0: in this process
    python: str = ""  # interpreter of the environment that vLLM is in; empty: this one
    dtype: str = ""  # of the engine's arithmetic; empty: model.dtype
    args: str = ""  # more of vLLM's own options, as on its command line
    way: str = "files"  # of the weights: files, nccl or ipc; in this process they are shared
    weights_dir: str = "/dev/shm"  # where files of weights pass
    swap: str = "keep"  # answers under way when weights change: keep, wait (finish them) or abort
    start_timeout_s: float = 600.0  # until a server that was started answers
    request_timeout_s: float = 600.0  # of one prompt's samples
    retries: int = 5  # of a request, and of a server that died, before the run gives up
    probe_abs_diff: float = 0.0  # largest mean |dlogp| on a probe after each publication, nats;
    # 0: 1e-4 in float32, 0.1 in bfloat16

    def __post_init__(self) -> None:
        for name, allowed in (
            ("way", ("files", "nccl", "ipc")),
            ("swap", ("keep", "wait", "abort")),
            ("dtype", ("", "float32", "bfloat16")),
        ):
            value = getattr(self, name)
            require(
                value in allowed,
                f"rollout.vllm.{name} must be one of {', '.join(a or 'empty' for a in allowed)}; "
                f"got {value!r}. Try --set rollout.vllm.{name}={allowed[0]}.",
            )
        require(
            self.launch >= 0 and self.retries >= 0,
            f"rollout.vllm.launch ({self.launch}) and rollout.vllm.retries ({self.retries}) must "
            "be 0 or more. Try --set rollout.vllm.launch=1 --set rollout.vllm.retries=5.",
        )
        require(
            self.start_timeout_s > 0 and self.request_timeout_s > 0 and self.probe_abs_diff >= 0,
            f"rollout.vllm.start_timeout_s ({self.start_timeout_s}) and request_timeout_s "
            f"({self.request_timeout_s}) must be above 0, probe_abs_diff ({self.probe_abs_diff}) "
            "0 or more. Try --set rollout.vllm.request_timeout_s=600.",
        )


@dataclass(frozen=True)
class RolloutConfig:
    """How a step's sequences are sampled."""

    sequences_per_step: int
    samples_per_prompt: int
    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    max_draws: int = 1  # above 1: groups of equal rewards are drawn anew, so often at most
    overlong_buffer: int = 0  # answers in the last so many tokens lose up to 1 of their reward
    max_parallel_sequences: int = 256  # one engine batch; more prompts wait for the next
    engine: str = "native"  # the trainer's own forward, or "vllm"
    vllm: VllmConfig = VllmConfig()
    max_staleness: int = 0  # sample so many steps ahead of the weights; 0: wait for each other

    def __post_init__(self) -> None:
        n, r = self.sequences_per_step, self.samples_per_prompt
        require(
            r > 0,
            f"rollout.samples_per_prompt must be positive, got {r}. "
            "Try --set rollout.samples_per_prompt=8.",
        )
        require(
            n > 0 and n % r == 0,
            f"rollout.sequences_per_step ({n}) must be a multiple of rollout.samples_per_prompt "
            f"({r}). Try --set rollout.sequences_per_step={max(1, n // r) * r}.",
        )
        require(
            self.max_draws > 0,
            f"rollout.max_draws must be positive, got {self.max_draws}. "
            "Try --set rollout.max_draws=1.",
        )
        require(
            self.max_new_tokens > 0,
            f"rollout.max_new_tokens must be positive, got {self.max_new_tokens}. "
            "Try --set rollout.max_new_tokens=256.",
        )
        require(
            self.temperature > 0,
            f"rollout.temperature must be above 0 (greedy samples are all alike), got "
            f"{self.temperature}. Try --set rollout.temperature=1.0.",
        )
        require(
            self.engine in ("native", "vllm"),
            f"rollout.engine must be native or vllm, got {self.engine!r}. "
            "Try --set rollout.engine=native.",
        )
        require(
            self.max_staleness >= 0,
            f"rollout.max_staleness must be 0 or more, got {self.max_staleness}. "
            "Try --set rollout.max_staleness=0.",
        )
        require(
            0 < self.top_p <= 1,
            f"rollout.top_p must be in (0, 1], got {self.top_p}. Try --set rollout.top_p=1.0.",
        )
        require(
            self.top_k >= 0,
            f"rollout.top_k must be 0 (off) or more, got {self.top_k}. Try --set rollout.top_k=0.",
        )
        require(
            0 <= self.overlong_buffer <= self.max_new_tokens,
            f"rollout.overlong_buffer must be in [0, rollout.max_new_tokens="
            f"{self.max_new_tokens}], got {self.overlong_buffer}. "
            "Try --set rollout.overlong_buffer=0.",
        )

    @property
    def prompts_per_step(self) -> int:
        return self.sequences_per_step // self.samples_per_prompt


@dataclass(frozen=True)
class LossConfig:
    """What a step optimises: functions of jaxmoe.losses with their options, as text.

    A function of your own is "module:function(option=1.0)".
    """

    objective: str = "clipped_terms"  # the loss at every token
    advantages: str = "group_advantages"
    mean: str = "token_mean_weights"  # the denominators
    correction: str = ""  # for an engine that differs: "token_is(high=2.0) + veto", in order
    preset: str = ""  # one of verl's rollout-correction presets; sets what it is about
    old_logp: str = "detached"  # or "recomputed" by the trainer, or the "rollout"'s own
    epochs: int = 1  # over each step's sequences
    minibatches: int = 1  # updates in an epoch
    kl: str = "kl_k3"
    kl_coef: float = 0.0  # weight of kl(policy, reference); 0 keeps no reference in memory
    kl_in: str = "loss"  # or "reward": paid per token, before the advantages
    entropy_coef: float = 0.0  # weight of the entropy bonus

    def __post_init__(self) -> None:
        for name, allowed in (
            ("old_logp", ("detached", "recomputed", "rollout")), ("kl_in", ("loss", "reward")),
        ):  # fmt: skip
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
        """Optimizer updates a step."""
        return self.epochs * self.minibatches


@dataclass(frozen=True)
class CriticConfig:
    """A value head, for advantages that ask for values (gae)."""

    backbone: str = "none"  # no critic; "own": a second model; "shared": the policy's layers
    lr: float = 1e-5
    loss_coef: float = 0.5  # weight of the value loss; with an own backbone lr alone matters
    clip: float = 0.5  # of a value's move, in units of reward
    pretrain_steps: int = 0  # the first steps train the critic alone

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


@dataclass(frozen=True)
class GateConfig:
    """When trainer and engine are too far apart to train: the run stops, or skips the batch."""

    abs_diff: float = 1e9  # largest mean |logp − rollout_logp|, nats; 1e9 is off
    k3: float = 1e9  # largest mean k3, nats; 1e9 is off
    ess: float = 0.0  # smallest effective sample size of the token ratios, a share of the tokens
    skip: bool = False  # False: stop with an error, weights as before the batch


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
    tokens_per_microbatch: int = 0  # or, above 0: packed side by side, at most so many a piece
    remat: bool = False  # recompute layer pairs in the backward pass: less memory, a third slower


@dataclass(frozen=True)
class EvalConfig:
    """Answers to the held-out rows: two sampled as in training, and one greedy."""

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
    critic: CriticConfig = CriticConfig()
    gate: GateConfig = GateConfig()
    eval: EvalConfig = EvalConfig()
    save: SaveConfig = SaveConfig()
    mesh: MeshConfig = MeshConfig()

    def __post_init__(self) -> None:
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
        packed = self.optim.tokens_per_microbatch
        require(
            packed == 0 or (packed >= self.context and m == 1),
            f"optim.tokens_per_microbatch ({packed}) must be 0, or at least data.max_prompt_tokens "
            f"+ rollout.max_new_tokens ({self.context}) with optim.microbatches=1 (got {m}). "
            f"Try --set optim.tokens_per_microbatch={self.context * 8} --set optim.microbatches=1.",
        )
        require(
            self.warmup.steps == 0 or self.warmup.sequences_per_step % m == 0,
            f"warmup.sequences_per_step ({self.warmup.sequences_per_step}) must be a multiple of "
            f"optim.microbatches ({m}). Try --set warmup.sequences_per_step={m}.",
        )
        require(
            self.context <= self.model.max_context,
            f"data.max_prompt_tokens + rollout.max_new_tokens ({self.context}) must be at most "
            f"model.max_context ({self.model.max_context}). "
            f"Try --set rollout.max_new_tokens={self.model.max_context // 2}.",
        )
        for name, value in (("steps", self.steps), ("seed", self.seed)):
            require(value >= 0, f"{name} must be 0 or more, got {value}. Try --set {name}=0.")
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
    def context(self) -> int:
        """Tokens of the longest sequence, prompt and answer."""
        return self.data.max_prompt_tokens + self.rollout.max_new_tokens


def to_json(config: Config) -> str:
    """The resolved config, as saved in the run folder."""
    return json.dumps(dataclasses.asdict(config), indent=2)

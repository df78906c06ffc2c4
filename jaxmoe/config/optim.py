# SPDX-License-Identifier: Apache-2.0
"""Config of the optimizer, and of the memory of an update. Next: jaxmoe/rl/optimizer.py."""

import re
from dataclasses import dataclass

from jaxmoe.config.errors import (
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    ConfigError,
    Rule,
    check_fields,
    require,
)

_BELOW_ONE: Rule = ("0 or more and below 1", lambda x: 0 <= x < 1, 0.9)


@dataclass(frozen=True)
class OptimConfig:
    """An optimizer with a warm-up and an optional cosine decay of its learning rate."""

    lr: float
    # adamw, muon, muon(momentum=0.95) or module:function(option=value), called with the rate
    name: str = "adamw"
    lr_warmup_steps: int = 0
    lr_end_fraction: float = 1.0  # cosine decay ends at lr times this; 1 keeps lr constant
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float | None = 1.0  # largest norm of the gradient; None does not clip
    param_dtype: str = "float32"  # of weights and moments, in storage and updates
    microbatches: int = 1  # number of gradient-accumulation microbatches
    tokens_per_microbatch: int = 0  # above 0: pack sequences into microbatches of this size
    share_prompts: str = "auto"  # compute a prompt once for its samples: auto, on or off
    remat: bool = False  # recompute layers in the backward pass: less memory, a third slower
    remat_keeps: str = ""  # saved in addition to a period's input: "attention", its outputs, or ""
    remat_inputs: str = (
        "device"  # memory of the saved inputs of periods of layers: device or "host"
    )
    expert_tokens: int = 0  # tokens that the experts compute, and recompute, at a time; 0: all
    moments: str = "device"  # memory of the moments between updates: device or "host"
    trainable: str = ".*"  # regex of the paths of parameters that train, as "(?!.*router).*"

    def __post_init__(self) -> None:
        require(
            self.param_dtype in ("float32", "bfloat16"),
            f"optim.param_dtype must be float32 or bfloat16, got {self.param_dtype!r}. "
            "Try --set optim.param_dtype=float32.",
        )
        require(
            self.share_prompts in ("auto", "on", "off"),
            f"optim.share_prompts must be auto, on or off, got {self.share_prompts!r}. "
            "Try --set optim.share_prompts=auto.",
        )
        require(
            self.remat_keeps == "" or (self.remat and self.remat_keeps == "attention"),
            "optim.remat_keeps must be attention, with optim.remat=True, or nothing; got "
            f"{self.remat_keeps!r} with optim.remat={self.remat}. "
            "Try --set optim.remat=True --set optim.remat_keeps=attention.",
        )
        require(
            self.remat_inputs == "device" or (self.remat and self.remat_inputs == "host"),
            "optim.remat_inputs must be host, with optim.remat=True, or device; got "
            f"{self.remat_inputs!r} with optim.remat={self.remat}. "
            "Try --set optim.remat=True --set optim.remat_inputs=host.",
        )
        require(
            self.moments in ("device", "host"),
            f"optim.moments must be device or host, got {self.moments!r}. "
            "Try --set optim.moments=host.",
        )
        try:
            re.compile(self.trainable)
        except re.error as error:
            raise ConfigError(
                "optim.trainable must be a regular expression of parameters' paths, got "
                f"{self.trainable!r}: {error}. Try --set optim.trainable='(?!.*router).*'."
            ) from error
        check_fields(
            "optim",
            self,
            lr=(*NOT_NEGATIVE, 1e-5),
            lr_warmup_steps=(*NOT_NEGATIVE, 0),
            lr_end_fraction=(*SHARE, 1.0),
            beta1=_BELOW_ONE,
            beta2=_BELOW_ONE,
            eps=(*POSITIVE, 1e-8),
            weight_decay=(*NOT_NEGATIVE, 0.0),
            expert_tokens=(*NOT_NEGATIVE, 1024),
            clip_norm=("above 0 (None is off)", lambda x: x is None or x > 0, 1.0),
        )

    @property
    def is_muon(self) -> bool:
        return self.name.partition("(")[0].strip() == "muon"

    @property
    def uses_host_memory(self) -> bool:
        """True if moments or inputs are in host memory."""
        return "host" in (self.moments, self.remat_inputs)

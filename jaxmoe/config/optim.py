# SPDX-License-Identifier: Apache-2.0
"""Config of the optimizer, and of the memory of an update. Next: jaxmoe/rl/optimizer.py."""

import re
from dataclasses import dataclass

from jaxmoe.config.errors import ConfigError, require
from jaxmoe.config.settings import Section, above, at_least, between, from_to_below, one_of, setting

_BELOW_ONE = from_to_below(0, 1)


@dataclass(frozen=True)
class OptimConfig(Section, key="optim"):
    """An optimizer with a warm-up and an optional cosine decay of its learning rate."""

    lr: float = setting(..., "learning rate", at_least(0), example=1e-5, resume=True)
    name: str = setting("adamw", "adamw, muon(momentum=0.95) or module:function(option=value)")
    lr_warmup_steps: int = setting(
        0, "updates in which the rate rises: loss.epochs x loss.minibatches a step", at_least(0)
    )
    lr_end_fraction: float = setting(
        1.0, "cosine decay over the updates after the rise, to lr times this", between(0, 1)
    )
    beta1: float = setting(0.9, "of AdamW's first moment", _BELOW_ONE)
    beta2: float = setting(0.95, "of AdamW's second moment", _BELOW_ONE)
    eps: float = setting(1e-8, "of AdamW", above(0))
    weight_decay: float = setting(0.0, "of AdamW and Muon", at_least(0))
    clip_norm: float | None = setting(1.0, "largest norm of the gradient", above(0), resume=True)
    param_dtype: str = setting(
        "float32", "of weights and moments, stored and updated", one_of("float32", "bfloat16")
    )
    microbatches: int = setting(1, "parts of a step's gradient", at_least(1), resume=True)
    tokens_per_microbatch: int = setting(
        0, "above 0: sequences are packed into microbatches of this size", at_least(0), resume=True
    )
    share_prompts: str = setting(
        "auto", "compute a prompt once for its samples", one_of("auto", "on", "off"), resume=True
    )
    remat: bool = setting(False, "recompute layers: less memory, a third slower", resume=True)
    remat_keeps: str = setting(
        "", "saved besides inputs", one_of("", "attention"), example="attention", resume=True
    )
    remat_inputs: str = setting(
        "device", "memory of the saved inputs", one_of("device", "host"), resume=True
    )
    expert_tokens: int = setting(
        0,
        "tokens that the experts compute, and recompute, at a time; 0: all",
        at_least(0),
        example=1024,
    )
    moments: str = setting(
        "device", "memory of the moments", one_of("device", "host"), example="host", resume=True
    )
    trainable: str = setting(".*", "regular expression of the parameters that train")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, default in (("remat_keeps", ""), ("remat_inputs", "device")):
            value = getattr(self, name)
            require(
                self.remat or value == default,
                f"optim.{name}={value} needs optim.remat=True, got False. "
                f"Try --set optim.remat=True, or --set optim.{name}={default}.",
            )
        try:
            re.compile(self.trainable)
        except re.error as error:
            raise ConfigError(
                "optim.trainable must be a regular expression of parameters' paths, got "
                f"{self.trainable!r}: {error}. Try --set optim.trainable='(?!.*router).*'."
            ) from error

    @property
    def is_muon(self) -> bool:
        return self.name.partition("(")[0].strip() == "muon"

    @property
    def uses_host_memory(self) -> bool:
        """True if moments or inputs are in host memory."""
        return "host" in (self.moments, self.remat_inputs)

# SPDX-License-Identifier: Apache-2.0
"""What adapters are refused with, in one line, and that what it says to type is taken."""

import pytest

from jaxmoe.config import ConfigError
from jaxmoe.config_file import load_config, override

TINY = load_config("tiny.py")


@pytest.mark.parametrize(
    "changes",
    [
        ["mesh.fsdp=2"],
        ["rollout.engine=vllm", "rollout.vllm.transport=nccl"],
        ["optim.moments=host"],
        ["optim.name=muon(momentum=0.9)"],
        ["critic.backbone=own", "loss.advantages=gae"],
    ],
    ids=str,
)
def test_settings_without_adapter_training_are_refused_with_advice(changes):
    with pytest.raises(ConfigError, match="^lora needs .*, got ") as error:
        override(TINY, "lora.expert_rank=4", *changes)
    with_it, _, without_lora = str(error.value).partition("Try --set ")[2].partition(", or --set ")
    override(TINY, "lora.expert_rank=4", *changes, with_it)
    off_settings = without_lora.removesuffix(".").split(" --set ")
    assert override(TINY, "lora.expert_rank=4", *off_settings, *changes).lora.ranks == {}


def test_vllm_takes_adapters_merged():
    assert override(TINY, "lora.expert_rank=4", "rollout.engine=vllm").lora.ranks


ADAPTER_SETTINGS = (
    "lora.expert_rank=4",
    "rollout.engine=vllm",
    "rollout.vllm.lora=adapter",
    "warmup.steps=0",
    "init.checkpoint=somewhere",
)


@pytest.mark.parametrize(
    "changes",
    [
        "init.checkpoint=",
        "warmup.steps=3",
        "rollout.vllm.url=http://127.0.0.1:8000",
        "lora.modules_to_save=router",
        "lora.targets=w_q,w_down",
        "lora.expert_rank=600",
        "lora.expert_rank=0",
    ],
)
def test_settings_without_vllm_adapters_are_refused_with_advice(changes):
    assert override(TINY, *ADAPTER_SETTINGS).rollout.vllm.lora == "adapter"
    with pytest.raises(ConfigError, match="^rollout.vllm.lora=adapter ") as error:
        override(TINY, *ADAPTER_SETTINGS, changes)
    advice = str(error.value).partition("Try --set ")[2].partition(", or --set ")
    assert override(TINY, *ADAPTER_SETTINGS, changes, *advice[0].removesuffix(".").split(" --set "))
    merged = advice[2].partition(",")[0].removesuffix(".") or "rollout.vllm.lora=merged"
    assert override(TINY, *ADAPTER_SETTINGS, changes, merged).rollout.vllm.lora == "merged"


@pytest.mark.parametrize(
    ("key", "name", "meant"),
    [
        ("targets", "w_up", "w_gate_up"),
        ("targets", "q_proj", "w_q"),
        ("modules_to_save", "routers", "router"),
        ("modules_to_save", "lm_head", "head"),
        ("modules_to_save", "norm", "norms"),
    ],
)
def test_an_unknown_adapter_matrix_suggests_the_nearest(key, name, meant):
    ranks = "lora.attention_rank=3", "lora.expert_rank=2"
    pattern = f"lora.{key} must name some of .* got '{name}'. Did you mean {meant}\\? Try --set "
    with pytest.raises(ConfigError, match=f"^{pattern}lora.{key}={meant}.$"):
        override(
            TINY, *ranks, f"lora.{key}=w_q, {name}" if key == "targets" else f"lora.{key}={name}"
        )


def test_a_base_beyond_four_bits_is_refused_early():
    for name in ("d_model", "d_expert"):
        must_be = f"^lora needs model.{name} to be a multiple of 64, got model.{name}=96: "
        pattern = f"{must_be}.* Try --set model.{name}=128, or"
        with pytest.raises(ConfigError, match=pattern):
            override(TINY, "lora.expert_rank=4", f"model.{name}=96")
        assert override(TINY, f"model.{name}=96").lora.ranks == {}

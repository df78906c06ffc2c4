# SPDX-License-Identifier: Apache-2.0
"""A mesh that fits neither devices, model nor batch is one line, before anything is allocated."""

import jax
import pytest

from jaxmoe.config import ConfigError
from jaxmoe.config_file import load_config, override
from jaxmoe.parallel import limits
from jaxmoe.parallel.limits import check_host, check_mesh

TINY = load_config("tiny.py")  # heads 4 and 2, experts 8, rows 64


@pytest.mark.parametrize(
    ("changes", "devices", "message"),
    [
        (["mesh.fsdp=8"], 4, r"\(fsdp 8\) must multiply to the number of devices, 4; they give 8"),
        (["mesh.fsdp=2", "mesh.expert=2"], 8, r"--set mesh.fsdp=8 --set mesh.expert=1"),
        (["mesh.fsdp=8"], 1, r"JAX_NUM_CPU_DEVICES=8 before the command"),
        (["mesh.sequence=7"], 7, r"mesh.sequence \(7\) must divide data.max_prompt_tokens"),
        (["mesh.tensor=8"], 8, r"mesh.tensor \(8\) must divide model.n_"),
        (["mesh.expert=16"], 16, r"mesh.expert \* mesh.tensor \(16\) must divide model.n_experts"),
        (["mesh.fsdp=48"], 48, r"\(48\) must divide the rows of a microbatch"),
        (["mesh.fsdp=8", "warmup.sequences_per_step=12"], 8, r"warmup.sequences_per_step / optim"),
        (
            ["mesh.fsdp=8", "optim.tokens_per_microbatch=2000"],
            8,
            r"must fit a multiple of mesh.data \* mesh.fsdp \* mesh.expert \(8\) rows",
        ),
    ],
)
def test_a_mesh_that_cannot_divide_is_refused(changes, devices, message):
    with pytest.raises(ConfigError, match=message) as error:
        check_mesh(override(TINY, *changes), devices)
    assert "\n" not in str(error.value) and "Try " in str(error.value)


def test_a_mesh_that_cuts_packed_groups_is_refused():
    sizes = "model.d_model=192", "model.d_expert=64", "mesh.fsdp=3", "warmup.sequences_per_step=48"
    cfg = override(load_config("tiny_mxfp4.py"), *sizes, "rollout.sequences_per_step=48")
    message = r"mesh.fsdp \(3\) to divide 2 \* model.d_expert \(128\): devices share the columns"
    with pytest.raises(ConfigError, match=message) as error:
        check_mesh(cfg, 3)
    assert "\n" not in str(error.value)
    typed = str(error.value).partition("Try ")[2].partition(", or")[0].split("--set ")[1:]
    check_mesh(override(cfg, *map(str.strip, typed)), 3)  # what it says works
    check_mesh(override(cfg, "quant.experts=none"), 3)
    for axis in ("fsdp", "sequence", "expert", "tensor", "data"):  # groups of 32 rows are cut
        check_mesh(override(load_config("tiny_mxfp4.py"), f"mesh.{axis}=2"), 2)


def test_several_processes_share_a_mesh_and_vllm_servers(monkeypatch):
    monkeypatch.setattr("jax.process_count", lambda: 2)
    with pytest.raises(ConfigError, match="they give 1"):
        check_mesh(TINY, 2)  # or each would train a run of its own in one folder
    ahead = override(
        TINY, "mesh.fsdp=2", "rollout.max_staleness=1", "loss.rollout_correction=token_is(high=2.0)"
    )
    with pytest.raises(
        ConfigError, match=r"max_staleness \(1\) must be 0 for the native engine"
    ) as error:
        check_mesh(ahead, 2)
    typed = str(error.value).partition("Try --set ")[2].removesuffix(".").split(" --set ")
    check_mesh(override(ahead, *typed), 2)
    vllm = override(TINY, "mesh.fsdp=2", "rollout.engine=vllm")
    check_mesh(vllm, 2)
    groups = "rollout.schedule=groups", "rollout.max_staleness=2", "rollout.max_lag=1"
    for settings in groups[1:2], groups:  # the first process samples ahead for all
        check_mesh(override(vllm, *settings, "loss.rollout_correction=token_is(high=2.0)"), 2)
    with pytest.raises(ConfigError, match="must share vLLM servers"):
        check_mesh(override(vllm, "rollout.vllm.launch=0"), 2)
    for transport in ("nccl", "ipc"):
        with pytest.raises(ConfigError, match=rf"rollout.vllm.transport \({transport}\) must be"):
            check_mesh(override(vllm, f"rollout.vllm.transport={transport}"), 2)
    check_mesh(override(TINY, "mesh.fsdp=2"), 2)


def test_a_host_must_exist_and_have_room(monkeypatch):
    cfg = override(TINY, "optim.moments=host", "mesh.fsdp=2")
    free = 2 * 1000
    monkeypatch.setattr(limits, "count_free_bytes", lambda: free)
    check_host(cfg, 1000)
    check_host(TINY, 10**18)  # nothing waits there
    with pytest.raises(
        ConfigError, match=r"need 2,002 bytes .*1,001 for each of 2 .* only 2,000 are free"
    ):
        check_host(cfg, 1001)

    class Device:
        platform, device_kind = "chip", "Chip 1"

        def addressable_memories(self):
            raise jax.errors.JaxRuntimeError("UNIMPLEMENTED")

    monkeypatch.setattr("jax.local_devices", lambda: [Device()])
    with pytest.raises(ConfigError, match=r"Chip 1 \(chip\) has none. Try --set optim.moments=dev"):
        check_host(cfg, 1)


def test_one_device_and_a_fitting_mesh_pass():
    check_mesh(TINY, 8)
    check_mesh(override(TINY, "mesh.fsdp=8"), 8)
    check_mesh(override(TINY, "mesh.fsdp=8"))  # of other machines

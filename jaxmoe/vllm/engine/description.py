# SPDX-License-Identifier: Apache-2.0
"""vLLM's description as an engine, without an import of jax.

Next: jaxmoe/vllm/engine/vllm_engine.py.
"""

import argparse
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxmoe.config import Config, require
from jaxmoe.config.engine import EngineDescription, EngineMemory
from jaxmoe.config.layer_plan import has_gpt_oss_order
from jaxmoe.config.lora_with import check_lora_of_vllm

# The doctor must open an engine whose log-probs differ from the trainer's, in order to explain why.
UNBOUNDED_ABS_DIFF = 1e9  # of the probe after a weight sync


def describe_vllm(cfg: Config) -> EngineDescription:
    vllm = cfg.rollout.vllm
    servers = len(vllm.urls) or vllm.launch
    return EngineDescription(
        open=open_vllm_engine,
        summary=_summarize(cfg),
        memory=plan_vllm_memory,
        reports_kept_mass=True,
        reports_experts=True,
        runs_episodes=True,
        runs_groups=servers > 0,  # a vLLM in this process has no server's queue
        replicas=max(1, servers),
        reads_four_bits=True,
        check=check_vllm,
        first_process_samples=True,
        check_processes=check_vllm_processes,
        without_weight_check=_without_probe,
    )


def open_vllm_engine(cfg: Config, ops: Any, work: Path, mesh: Any) -> Any:
    """Open vLLM's engine; started servers write their logs to `work`/engine."""
    from jaxmoe.vllm.engine.multi_process_engine import open_vllm
    from jaxmoe.vllm.engine.served_adapter import sent_from_config

    r = cfg.rollout
    return open_vllm(
        cfg.model,
        ops,
        r.vllm,
        mesh=mesh,
        across=cfg.mesh.attention,
        work=work / "engine",
        sent=sent_from_config(cfg),
        max_prompt_tokens=cfg.data.max_prompt_tokens,
        max_new_tokens=r.max_new_tokens,
        max_rows=r.max_parallel_sequences,
        max_context=cfg.read_context,
    )


def plan_vllm_memory(cfg: Config) -> EngineMemory:
    """Return the bytes of the weights to which changes are applied; vLLM's others stand apart."""
    from jaxmoe.weight_sync.sent_weights import count_kept_bytes

    return EngineMemory(sent=count_kept_bytes(cfg))


def check_vllm(cfg: Config) -> None:
    """Raise ConfigError for settings that vLLM cannot sample with."""
    r, vllm = cfg.rollout, cfg.rollout.vllm
    require(
        cfg.model.has_gpt_oss_layers and has_gpt_oss_order(cfg.model.plan),
        "rollout.engine=vllm needs the layers of GPT-OSS, sliding and full in turn with sinks and "
        f"biases: vLLM's model has no others. Got model.layer_types={cfg.model.layer_types}. Try "
        "--set rollout.engine=native.",
    )
    truncates = r.top_k > 0 or r.top_p < 1
    require(
        not (truncates and r.temperature != 1.0),
        f"rollout.temperature must be 1 if rollout.engine is vllm and top_k ({r.top_k}) "
        f"or top_p ({r.top_p}) are on, got {r.temperature}: vLLM does not report the "
        "retained mass at another temperature. Try --set rollout.temperature=1.0, or "
        "--set rollout.top_k=0 --set rollout.top_p=1.0.",
    )
    require(
        not (truncates and r.max_staleness > 0),
        f"rollout.max_staleness must be 0 if rollout.engine is vllm and top_k or top_p are on, "
        f"got {r.max_staleness}: the retained mass is computed by the weights that sampled "
        f"the answer, which are replaced by then. {r.newest_weights_advice}",
    )
    drafts = [x for x in shlex.split(vllm.args) if x.startswith(("--spec", "-sc"))]
    require(
        not drafts,
        f"rollout.vllm.args must not have {' '.join(drafts)}: a sync would leave the drafts' "
        "weights stale, and nothing verifies log-probs with drafts. Leave it out.",
    )
    if cfg.quant.experts != "none":
        dtype = find_option(vllm.args, "dtype")
        require(
            dtype in ("", "auto", "bfloat16", "float32", "float"),
            "quant.experts=mxfp4 needs a vLLM that computes in bfloat16 or float32, since values "
            f"reach 6 · 2^125; got --dtype {dtype} in rollout.vllm.args. Leave it out, and try "
            "--set rollout.vllm.dtype=bfloat16.",
        )
    check_lora_of_vllm(cfg)
    is_in_files = (bool(vllm.urls) or vllm.launch > 0) and vllm.transport == "files"
    require(
        vllm.complete_sync_every == 1 or is_in_files,
        f"rollout.vllm.complete_sync_every ({vllm.complete_sync_every}) must be 1 unless all "
        "weights are sent to servers in files. Try --set rollout.vllm.complete_sync_every=1.",
    )


def check_vllm_processes(cfg: Config) -> None:
    """Raise ConfigError for settings of vLLM that several trainer processes do not support."""
    vllm = cfg.rollout.vllm
    require(
        bool(vllm.urls) or vllm.launch > 0,
        "several processes must share vLLM servers; a vLLM inside one of the processes is not "
        "supported. Try --set rollout.vllm.url=http://HOST:8000, or --set "
        "rollout.vllm.launch=1.",
    )
    require(
        vllm.transport == "files",
        f"rollout.vllm.transport ({vllm.transport}) must be files with several processes: "
        "only the first process sends weights to a reconnected server, but gathering a tensor from "
        "the mesh needs all of them. Try --set rollout.vllm.transport=files --set "
        "rollout.vllm.weights_dir=A_SHARED_FOLDER.",
    )


def find_option(args: str, name: str) -> str:
    """Return the last value of an option among vLLM's, as on a command line; "" without it."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument(f"--{name}", default="")
    try:
        return parser.parse_known_args(shlex.split(args))[0].__dict__[name]
    except argparse.ArgumentError:
        return ""  # vLLM reports the error


def _summarize(cfg: Config) -> str:
    vllm = cfg.rollout.vllm
    text = f"vLLM, {vllm.launch} started by the run" if vllm.launch else "vLLM, in this process"
    text = f"vLLM at {vllm.url}" if vllm.url else text
    text += " (its memory is not in this table)"
    if cfg.lora.ranks:
        sent = {"merged": "merged full weights", "adapter": "only the adapter"}[vllm.lora]
        text += f", receives {sent}"
    return text


def _without_probe(cfg: Config) -> Config:
    vllm = replace(cfg.rollout.vllm, probe_abs_diff=UNBOUNDED_ABS_DIFF)
    return replace(cfg, rollout=replace(cfg.rollout, vllm=vllm))

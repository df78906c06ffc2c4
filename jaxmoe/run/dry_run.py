# SPDX-License-Identifier: Apache-2.0
"""`--dry-run`: print the plan of a run, and check that its inputs can be read.

Nothing is written, started or trained. Next: jaxmoe/train.py.
"""

from collections.abc import Iterator
from pathlib import Path

from jaxmoe.batches.computed_tokens import describe_sharing
from jaxmoe.checkpoint.base import initial_experts
from jaxmoe.checkpoint.headers import read_headers
from jaxmoe.checkpoint.peft.init_from import load_initial_adapters
from jaxmoe.checkpoint.run import check_checkpoint_model
from jaxmoe.collection.demonstrations import check_targets
from jaxmoe.collection.reward_checks import describe_checks
from jaxmoe.collection.tasks import open_task
from jaxmoe.config import Config, ConfigError, describe_engine, to_json
from jaxmoe.model.moe.routers_from_config import router_from_config
from jaxmoe.model.ops import make_ops
from jaxmoe.model.params import count_params
from jaxmoe.model.trainable import count_trained
from jaxmoe.parallel.limits import check_mesh
from jaxmoe.records import expert_dtype
from jaxmoe.rewards.sandbox_rewards import describe_run_sandbox
from jaxmoe.rl.from_config import algorithm_from_config
from jaxmoe.rl.presets import apply_preset
from jaxmoe.run.kernels import describe_kernels
from jaxmoe.run.memory import (
    POLICY_STAGES,
    check_memory,
    format_bytes,
    layer_flops,
    plan_memory,
    stage_bytes,
)
from jaxmoe.run.teacher import make_teacher

RARE_PARTS = (
    "rounded",
    "packed",
    "frozen",
    "teacher",
    "rows",
    "table",
    "routing",
)  # printed only if a run has them


def dry_run(cfg: Config, *stages: str) -> None:
    """Print the plan, and a summary of data, tokenizer and checkpoint.

    `stages` are the command's stages of `stage_bytes`.
    Raises ConfigError, after printing everything, for the first setting that the command would
    refuse; the others are printed. The memory of a mesh for other machines is not checked.
    """
    check_mesh(cfg)
    print(format_plan(cfg, *stages))
    print(f"  kernels      {describe_kernels(cfg)}")
    errors: list[ConfigError] = []
    # All checks run, so that one dry run shows every mistake.
    for check in (
        _check_checkpoint,
        lambda cfg: _check_teacher(cfg) if "training" in stages else "",
        _check_task,
        lambda cfg: describe_sharing(cfg, make_ops(cfg).attend),
        lambda cfg: check_memory(cfg, *stages),
    ):
        try:
            if text := check(cfg):
                print(text)
        except ConfigError as error:
            errors.append(error)
    for error in errors[1:]:
        print(f"  problem      {error}")
    if errors:
        raise errors[0]


def format_plan(cfg: Config, *stages: str) -> str:
    """Return the text of config, parameters, bytes per device, and the steps of the run.

    Raises ConfigError for an algorithm or a router that train would refuse.
    """
    algorithm_from_config(cfg)
    router_from_config(cfg.router)
    total, active = count_params(cfg.model)
    n_trained, n_params = count_trained(cfg)
    r = cfg.rollout
    axes = {name: size for name, size in cfg.mesh.sizes.items() if size > 1}
    mesh_text = " x ".join(f"{name} {size}" for name, size in axes.items()) or "no mesh"
    lines = [
        to_json(cfg),
        "",
        f"parameters   {total:,} ({active:,} active per token)",
        f"trains       {n_trained:,} of {n_params:,}",
        f"devices      {cfg.mesh.devices} ({mesh_text}); bytes on each:",
        *_memory_lines(cfg, *stages),
        *_sent_lines(cfg, *stages),
        "",
        "would run",
        f"  weights      {cfg.init.checkpoint or 'random, seed ' + str(cfg.seed)}",
        f"  task         {task if isinstance(task := cfg.data.task, str) else ', '.join(task)}",
    ]
    if cfg.warmup.steps:
        w = cfg.warmup
        lines.append(f"  warm start   {w.steps} supervised steps of {w.sequences_per_step} answers")
    lines.append(
        f"  RL           {cfg.steps} steps of {r.sequences_per_step} sequences "
        f"({r.prompts_per_step} prompts x {r.samples_per_prompt}), up to {cfg.context:,} tokens"
    )
    lines.append(f"  rollouts     {_engine_line(cfg)}")
    if cfg.has_environment:
        parties = " and ".join(
            x for x in (cfg.data.environment.strip(), cfg.data.tools.strip()) if x
        )
        reply = f"{r.max_reply_tokens:,} tokens" if r.max_reply_tokens else "any number of tokens"
        lines.append(
            f"  episodes     up to {r.max_turns} turns with {parties}: {r.max_new_tokens:,} "
            f"sampled tokens in all, {reply} of a reply"
        )
    lines += [f"  {name:<13}{text}" for name, text in _algorithm_lines(cfg).items()]
    if cfg.optim.remat:
        lines.append(f"  recomputed   {_format_recomputation(cfg)}")
    lines.append(f"  run folder   {cfg.workdir}")
    return "\n".join(lines)


def _memory_lines(cfg: Config, *stages: str) -> Iterator[str]:
    """Bytes on a device by part: of a training, or of the one stage of another command."""
    kinds = memory_labels(cfg)
    if policy_stages := [stage for stage in stages if stage in POLICY_STAGES]:
        (stage,) = policy_stages
        parts = stage_bytes(cfg, stage)
        for name, value in parts.items():
            if value:
                yield f"  {kinds.get(name, name):<13}{format_bytes(value)}"
        total = format_bytes(sum(parts.values()))
        yield f"  {stage:<13}{total}   (of a checkpoint, the policy alone is read)"
        return
    mem = plan_memory(cfg)
    for name, value in vars(mem).items():
        if name != "host" and (value or name not in RARE_PARTS):
            yield f"  {kinds.get(name, name):<13}{format_bytes(value)}"
    yield f"  {'training':<13}{format_bytes(mem.training)}   (all but the cache)"
    yield (
        f"  {'sampling':<13}{format_bytes(mem.sampling)}   "
        "(weights, optimizer, reference, copy, cache)"
    )
    if mem.host:
        yield f"offloaded      {format_bytes(mem.host)}   (in its host's memory)"


def _sent_lines(cfg: Config, *stages: str) -> Iterator[str]:
    """Bytes of sent weights that stay in host memory; a command that exports sends none."""
    sent = describe_engine(cfg).memory(cfg).sent
    if sent and "exporting" not in stages:
        yield f"sent weights {format_bytes(sent)}   (in this host's memory, for changes)"
        yield f"  a worker   {format_bytes(sent)}   (in the memory of each worker's host)"


def memory_labels(cfg: Config) -> dict[str, str]:
    """Labels of fields of Memory in a plan, if they differ from the names."""
    if not cfg.lora.ranks:
        return {}
    dtype = {"bfloat16": "bf16", "float32": "fp32"}.get(cfg.model.dtype, cfg.model.dtype)
    return {
        "weights": "adapters",
        "optimizer": "moments",
        "frozen": dtype,
        "rows": "embedding",
        "table": "full table",
    }


def _format_recomputation(cfg: Config) -> str:
    """Describe the recomputation in the backward pass, for sequences of full length."""
    flops = layer_flops(cfg)
    recomputed = flops.recomputed_flops(cfg)
    # Forward and backward together: the backward has 2 times the linear FLOPs and 2.5 times those
    # of attention.
    share = recomputed / (3 * flops.linear + 3.5 * flops.attention)
    scope = "all but attention" if cfg.optim.remat_keeps else "all"
    return (
        f"{scope} of a period of layers: {recomputed * 1e-12:.3g} TFLOP for "
        f"{cfg.context:,} tokens, {share:.0%} of forward and backward"
    )


def _engine_line(cfg: Config) -> str:
    """Describe the engine, its location, and how far it may be ahead of the weights."""
    r = cfg.rollout
    ahead = f", up to {r.max_staleness} steps ahead of the weights" if r.max_staleness else ""
    if r.schedule == "groups":
        ahead += f"; {format_bytes(queue_bytes(cfg)).strip()} of host memory for groups that wait"
    return describe_engine(cfg).summary + ahead


def queue_bytes(cfg: Config) -> int:
    """Bytes of the groups that are admitted and not trained, if all answers have full length."""
    r, m = cfg.rollout, cfg.model
    sequences = r.sequences_per_step * (1 + r.max_staleness - r.max_lag)
    # tokens, log-probs, versions; the mask and the rewards of episodes; log_kept
    token_bytes = 12 + 9 * cfg.has_environment + 4 * (r.top_k > 0 or r.top_p < 1)
    if cfg.records_experts:
        token_bytes += m.n_layers * m.experts_per_token * expert_dtype(m.n_experts).itemsize
    return sequences * cfg.context * token_bytes


def _algorithm_lines(cfg: Config) -> dict[str, str]:
    loss, critic = apply_preset(cfg.loss), cfg.critic
    lines = {"objective": f"{loss.objective}, {loss.advantages}, old_logp {loss.old_logp}"}
    if critic.backbone != "none":
        first = f", pretrained for {critic.pretrain_steps} steps" if critic.pretrain_steps else ""
        lines["critic"] = f"{critic.backbone} backbone, lr {critic.lr:g}{first}"
    if loss.rollout_correction or cfg.loss.preset:
        source = f" (preset {cfg.loss.preset})" if cfg.loss.preset else ""
        lines["correction"] = (loss.rollout_correction or "none") + source
    if loss.terms:
        lines["terms"] = loss.terms
    if cfg.distill.teacher:
        lines["distills"] = _describe_teacher(cfg)
    if router := _describe_router(cfg):
        lines["router"] = router
    if loss.updates > 1:
        lines["updates"] = f"{loss.epochs} x {loss.minibatches} per step (epochs x minibatches)"
    return lines


def _check_checkpoint(cfg: Config) -> str:
    if not cfg.init.checkpoint:
        return ""
    directory = Path(cfg.init.checkpoint)
    check_checkpoint_model(cfg.model, directory)
    table, _ = read_headers(directory, cfg.model, initial_experts(cfg))
    load_initial_adapters(cfg)
    return f"  checkpoint   {directory}: config.json and {len(table)} tensors of the model above"


def _check_teacher(cfg: Config) -> str:
    if (teacher := make_teacher(cfg)) is None:
        return ""
    folder = teacher.folder
    if folder.run is None:
        read_headers(folder.folder, folder.model, "packed" if folder.is_packed else "dense")
    total, active = count_params(folder.model)
    return f"  teacher      {folder.summary}: {total:,} parameters ({active:,} active per token)"


def _check_task(cfg: Config) -> str:
    task = open_task(cfg)
    longest = task.check_prompts()
    if cfg.warmup.steps:
        check_targets(task, cfg.read_context)
    sandbox = describe_run_sandbox(cfg, (*task.rewards, *task.second_grader))
    text, tokens = cfg.init.tokenizer, task.tokenizer.vocab_size
    counts, *left_out = task.describe_rows()
    return (
        f"  rows         {counts}; the longest prompt read has {longest} of "
        f"{cfg.data.max_prompt_tokens} tokens\n"
        + "".join(f"               {line}\n" for line in left_out)
        + (f"  sandbox      {sandbox}\n" if sandbox else "")
        + "".join(f"  {name:<13}{line}\n" for name, line in describe_checks(task).items())
        + f"  tokenizer    {text}, {tokens:,} ids"
    )


def _describe_teacher(cfg: Config) -> str:
    """Return the teacher and its weights in the loss."""
    d = cfg.distill
    parts = {
        f"{d.advantage_coef:g} in advantages": d.advantage_coef,
        f"{d.reverse_kl_coef:g} kl(policy, teacher)": d.reverse_kl_coef,
        f"{d.forward_kl_coef:g} kl(teacher, policy)": d.forward_kl_coef,
        f"of the teacher's {d.top_k} likeliest words": d.top_k,
        f"{d.warmup_share:g} of the warm start's loss": d.warmup_share,
        f"{d.reward_coef:g} of the rewards": d.reward_coef != 1.0,
        f"to 0 in {d.anneal_steps} steps": d.anneal_steps,
    }
    weights = ", ".join(text for text, is_set in parts.items() if is_set)
    name = "the policy before RL" if d.teacher == "base" else d.teacher
    return f"{name}: {weights}" if weights else name


def _describe_router(cfg: Config) -> str:
    """Return the settings of the router that are not the default."""
    r = cfg.router
    parts = {
        r.route: r.route != "route_top_k",
        f"replay {r.replay}": r.replay,
        f"noise {r.noise} in rollouts": r.noise,
        "frozen": r.freeze,
        f"lr x {r.lr_scale:g}": r.lr_scale != 1.0,
        f"terms {r.terms}": r.terms,
        f"recording {r.record}": r.record,
        "instruments": r.instruments,
        f"{cfg.computed_experts} experts per token in training": r.is_dense,
    }
    return ", ".join(text for text, is_set in parts.items() if is_set)

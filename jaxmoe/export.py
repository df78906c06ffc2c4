# SPDX-License-Identifier: Apache-2.0
"""`python -m jaxmoe.export --config FILE --out DIR`: export a run's newest checkpoint.

DIR is a folder that `transformers` and vLLM load: weights, config.json, tokenizer, and a
generation_config.json with the tokens that end an answer. For a run that trains adapters, it has
the adapters and the tokenizer, in PEFT's format; with --merge, complete weights. Four-bit experts
are then compared with the run's weights.
Next: jaxmoe/checkpoint/hf.py, jaxmoe/checkpoint/peft/write.py, jaxmoe/run/compare_export.py.
"""

import json
import sys
from functools import partial
from pathlib import Path

import jax

from jaxmoe.checkpoint.base import base_digest, check_base, load_base, portable_base_name
from jaxmoe.checkpoint.hf import check_export, save_params
from jaxmoe.checkpoint.packed import format_packing_errors, pack_experts
from jaxmoe.checkpoint.peft.write import save_adapter
from jaxmoe.checkpoint.run import restore_policy
from jaxmoe.checkpoint.tensor_files import planned_bytes
from jaxmoe.cli import ExitStatus, build_parser, open_command
from jaxmoe.config import Config, ConfigError
from jaxmoe.data.tokenizer import (
    Tokenizer,
    check_tokenizer,
    load_tokenizer,
    tokenizer_digest,
    write_tokenizer,
)
from jaxmoe.distributed.processes import check_one_process
from jaxmoe.model.lora import adapter_shapes, with_adapters
from jaxmoe.model.rounded import rounding_from_config
from jaxmoe.observe.printable import escape_unprintable
from jaxmoe.observe.progress import report_phase
from jaxmoe.parallel.rounding import shard_rounding
from jaxmoe.parallel.sharding import make_mesh
from jaxmoe.run.compare_export import compare_export, format_export_gap
from jaxmoe.run.memory import format_bytes, stage_bytes
from jaxmoe.shapes import Params


def main(argv: list[str] | None = None) -> int:
    with ExitStatus() as status:
        parser = build_parser("Write a run's newest checkpoint as a Hugging Face folder.")
        parser.add_argument("--out", required=True, metavar="DIR", help="a new or empty folder")
        parser.add_argument(
            "--merge",
            action="store_true",
            help="for a LoRA run: export merged weights instead of the adapters",
        )
        parser.add_argument(
            "--dtype", metavar="DTYPE", help="bfloat16, float32 or mxfp4; as save.export_dtype"
        )
        parser.add_argument(
            "--no-compare",
            action="store_false",
            dest="compare",
            help="do not score answers with the run's weights and with four-bit experts",
        )
        args = parser.parse_args(argv)
        check_one_process("export")
        if args.dtype is not None:
            args.changes.append(f"save.export_dtype={args.dtype}")
        export_checkpoint(
            open_command(args),
            Path(args.out),
            merge=args.merge,
            dry_run=args.dry_run,
            compare=args.compare,
        )
    return status.code


def export_checkpoint(
    cfg: Config, out: Path, *, merge: bool = False, dry_run: bool = False, compare: bool = False
) -> None:
    """Export a run's newest checkpoint to `out`, in the dtype save.export_dtype.

    The folder is complete or absent. `compare`: if experts are in four bits, also print how far the
    folder is from the run's weights; whatever stops that leaves the folder as it is.
    Numerics: merged weights are rounded once, to that dtype; for mxfp4, the error is printed.
    Raises: ConfigError if the folder is not empty, the disk is full, there is no checkpoint, or
        the base of a run's adapters or its tokenizer is missing or changed.
    """
    if merge and not cfg.lora.ranks:
        raise ConfigError(
            "--merge needs a run that trains adapters, but this config's lora is off. Omit "
            "--merge, or name the run's config."
        )
    dtype, adapts = cfg.save.export_dtype, bool(cfg.lora.ranks) and not merge
    nbytes = sum(map(planned_bytes, check_export(cfg.model, out, dtype)))
    tokenizer = load_tokenizer(cfg.init.tokenizer, cfg.init.checkpoint)
    check_tokenizer(tokenizer, cfg.model.vocab_size)
    description = f"{nbytes / 1e6:,.1f} MB of weights in {dtype}"
    if dry_run and adapts:
        shapes = jax.tree.leaves(adapter_shapes(cfg.model, cfg.lora))
        nbytes = sum(x.size * x.dtype.itemsize for x in shapes)
        description = f"{nbytes / 1e6:,.1f} MB of adapters (complete weights if RL has not started)"
    if dry_run:
        read = format_bytes(sum(stage_bytes(cfg, "exporting").values())).strip()
        print(
            f"would read {read} of parameters on each of {cfg.mesh.devices} devices, and no "
            f"optimizer, and write {description} to {out}, from the newest checkpoint in "
            f"{cfg.workdir}"
        )
        return
    # Without the run's devices, one device holds the parameters.
    mesh = make_mesh(cfg.mesh) if cfg.mesh.devices == jax.device_count() else None
    contents = {"init.tokenizer": tokenizer_digest(cfg.init.tokenizer, cfg.init.checkpoint)}
    contents |= base_digest(cfg)
    saved = restore_policy(Path(cfg.workdir), cfg, mesh, contents=contents)
    if saved is None:
        raise ConfigError(
            f"{cfg.workdir} must hold a checkpoint to export; it has none. Try --workdir with "
            "the folder of a trained run."
        )

    def add_files(folder: Path) -> None:
        write_tokenizer(cfg.init.tokenizer, folder)
        (folder / "generation_config.json").write_text(
            json.dumps(generation_config(tokenizer), indent=2)
        )

    policy, origin = saved.params, f"{saved.stage} step {saved.step} of {cfg.workdir}"
    _warn_of_other_router(cfg, saved.rl_step)
    masters = policy
    if (round_params := shard_rounding(rounding_from_config(cfg), cfg.model, mesh)) is not None:
        policy = round_params(policy)
    if cfg.lora.ranks and saved.stage == "rl":
        if adapts:
            base = check_base(cfg)
            save_adapter(
                policy,
                cfg.model,
                cfg.lora,
                out,
                base=portable_base_name(base),
                add_files=partial(write_tokenizer, cfg.init.tokenizer),
            )
            print(f"{out}: {origin}, adapters of {base} in the format of PEFT 0.19.1")
            return
        policy = with_adapters(load_base(cfg), policy, cfg.lora.scales)
        if dtype == "mxfp4" and cfg.lora.expert_rank:
            policy, errors = pack_experts(policy, cfg.model)
            print(f"merged   {format_packing_errors(errors)}", flush=True)
    with report_phase(f"writing {out}"):
        save_params(policy, cfg.model, out, dtype=dtype, add_files=add_files)
    print(f"{out}: {origin}, {description}", flush=True)
    if compare and not cfg.lora.ranks and (dtype == "mxfp4" or round_params is not None):
        _print_comparison(cfg, masters, out, saved.rl_step)


def _print_comparison(cfg: Config, policy: Params, out: Path, version: int) -> None:
    """Print how far an export is from the run's weights, or why that is not known."""
    try:
        for line in format_export_gap(compare_export(cfg, policy, out, version=version)):
            print(line)
    # The folder is complete, and nothing that stops a measurement may look like its failure.
    except (Exception, KeyboardInterrupt) as error:
        reason = str(error).strip() or "stopped"
        print(
            f"! {out} is complete, but was not compared with the run: "
            f"{type(error).__name__}: {escape_unprintable(reason.splitlines()[0])}",
            file=sys.stderr,
        )


def _warn_of_other_router(cfg: Config, step: int) -> None:
    """Print a line if the policy after `step` RL steps is not that of the exported weights."""
    if not cfg.router.is_top_k_after(step):
        print(
            f"! router.route is {cfg.router.route}, and the run is at step {step}: transformers "
            "and vLLM route by the top-k of the logits, and are another policy with these weights",
            file=sys.stderr,
        )


def generation_config(tokenizer: Tokenizer) -> dict[str, object]:
    """Contents of generation_config.json: stop and padding tokens, without sampling settings."""
    return {"eos_token_id": list(tokenizer.stop_ids), "pad_token_id": tokenizer.pad_id}


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""`python -m jaxmoe.export --config FILE --out DIR`: a run's newest checkpoint for everybody else.

DIR is a folder that `transformers` and vLLM load: weights, config.json, tokenizer, and a
generation_config.json with the tokens that end an answer. Of a run that trains adapters it is
these and the tokenizer, as PEFT loads them beside the base; with --merge it is whole weights again.
Next: jaxmoe/checkpoint/hf.py, jaxmoe/checkpoint/peft.py.
"""

import json
import sys
from functools import partial
from pathlib import Path

import jax

from jaxmoe.checkpoint.base import base_digest, check_base, load_base, portable_name
from jaxmoe.checkpoint.hf import check_export, save_params
from jaxmoe.checkpoint.packed import pack_experts, summary
from jaxmoe.checkpoint.peft import save_adapter
from jaxmoe.checkpoint.run import restore_run
from jaxmoe.checkpoint.tensor_files import planned_bytes
from jaxmoe.cli import ExitStatus, arguments, config_of
from jaxmoe.config import Config, ConfigError
from jaxmoe.data.tokenizer import Tokenizer, check_tokenizer, load_tokenizer, write_tokenizer
from jaxmoe.model.lora import adapter_shapes, with_adapters
from jaxmoe.observe.progress import phase
from jaxmoe.parallel.processes import check_one_process
from jaxmoe.parallel.sharding import make_mesh
from jaxmoe.rl.optimizer import make_optimizer, rl_optimizer
from jaxmoe.rl.state import stage_shapes


def main(argv: list[str] | None = None) -> int:
    with ExitStatus() as status:
        parser = arguments("Write a run's newest checkpoint as a Hugging Face folder.")
        parser.add_argument("--out", required=True, metavar="DIR", help="a new or empty folder")
        parser.add_argument(
            "--merge", action="store_true",
            help="of a LoRA run: whole weights with the adapters in them, not the adapters",
        )  # fmt: skip
        args = parser.parse_args(argv)
        check_one_process("export")
        run(config_of(args), Path(args.out), merge=args.merge, dry_run=args.dry_run)
    return status.code


def run(cfg: Config, out: Path, *, merge: bool = False, dry_run: bool = False) -> None:
    """Export to a folder that is whole or absent; save.export_dtype is the weights' dtype.

    Numerics: merged weights are rounded once, to that dtype; what four bits lose is told.
    Raises ConfigError where the folder holds something, the disk is full, there is no checkpoint,
    or the base of a run's adapters is gone or holds other weights.
    """
    if merge and not cfg.lora.ranks:
        raise ConfigError(
            "--merge needs a run that trains adapters, and this config's lora is off. Leave "
            "--merge out, or name the run's config."
        )
    dtype, adapts = cfg.save.export_dtype, bool(cfg.lora.ranks) and not merge
    nbytes = sum(map(planned_bytes, check_export(cfg.model, out, dtype)))
    tokenizer = load_tokenizer(cfg.init.tokenizer, cfg.init.checkpoint)
    check_tokenizer(tokenizer, cfg.model.vocab_size)
    what = f"{nbytes / 1e6:,.1f} MB of weights in {dtype}"
    if dry_run and adapts:
        shapes = jax.tree.leaves(adapter_shapes(cfg.model, cfg.lora))
        nbytes = sum(x.size * x.dtype.itemsize for x in shapes)
        what = f"{nbytes / 1e6:,.1f} MB of adapters (whole weights where none is trained yet)"
    if dry_run:
        print(f"would write {what} to {out}, from the newest checkpoint in {cfg.workdir}")
        return
    supervised = make_optimizer(cfg.optim, steps=cfg.warmup.steps)
    # where the run's devices are not, one holds it all
    mesh = make_mesh(cfg.mesh) if cfg.mesh.devices == jax.device_count() else None
    shapes = stage_shapes(cfg, supervised, rl_optimizer(cfg), mesh)
    held = base_digest(cfg)
    at = restore_run(Path(cfg.workdir), cfg, shapes, to_train=False, contents=held)
    if at is None:
        raise ConfigError(
            f"{cfg.workdir} must hold a checkpoint to export, and has none. Try --workdir with "
            "the folder of a run that was trained."
        )

    def beside(folder: Path) -> None:
        write_tokenizer(cfg.init.tokenizer, folder)
        (folder / "generation_config.json").write_text(json.dumps(generation(tokenizer), indent=2))

    policy, where = at.state.params.policy, f"{at.stage} step {at.step} of {cfg.workdir}"
    if cfg.lora.ranks and at.stage == "rl":
        if adapts:
            base = check_base(cfg)
            save_adapter(
                policy, cfg.model, cfg.lora, out, base=portable_name(base),
                add_files=partial(write_tokenizer, cfg.init.tokenizer),
            )  # fmt: skip
            print(f"{out}: {where}, adapters of {base} as PEFT 0.19.1 has them")
            return
        policy = with_adapters(load_base(cfg), policy, cfg.lora.scales)
        if dtype == "mxfp4" and cfg.lora.expert_rank:
            policy, errors = pack_experts(policy, cfg.model)
            print(f"merged   {summary(errors)}", flush=True)
    with phase(f"writing {out}"):
        save_params(policy, cfg.model, out, dtype=dtype, beside=beside)
    print(f"{out}: {where}, {what}")


def generation(tokenizer: Tokenizer) -> dict[str, object]:
    """generation_config.json: what ends an answer, and nothing about how it is sampled."""
    return {"eos_token_id": list(tokenizer.stop_ids), "pad_token_id": tokenizer.pad_id}


if __name__ == "__main__":
    sys.exit(main())

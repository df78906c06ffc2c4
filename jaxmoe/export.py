# SPDX-License-Identifier: Apache-2.0
"""`python -m jaxmoe.export --config FILE --out DIR`: a run's newest checkpoint for everybody else.

DIR is a folder that `transformers` and vLLM load: weights, config.json, tokenizer, and a
generation_config.json with the tokens that end an answer. Next: jaxmoe/checkpoint/hf.py.
"""

import json
import sys
from pathlib import Path

import jax

from jaxmoe.checkpoint.base import base_folder, load_base
from jaxmoe.checkpoint.hf import check_export, save_params
from jaxmoe.checkpoint.merge import merged
from jaxmoe.checkpoint.packed import pack_experts, summary
from jaxmoe.checkpoint.peft import save_adapter
from jaxmoe.checkpoint.run import restore_run
from jaxmoe.checkpoint.tensor_files import planned_bytes
from jaxmoe.cli import ExitStatus, arguments, config_of
from jaxmoe.config import Config, ConfigError, LoraConfig
from jaxmoe.data.tokenizer import Tokenizer, check_tokenizer, load_tokenizer, write_tokenizer
from jaxmoe.observe.progress import phase
from jaxmoe.parallel.processes import by_one_process
from jaxmoe.parallel.sharding import make_mesh
from jaxmoe.rl.optimizer import make_optimizer, rl_optimizer
from jaxmoe.rl.state import stage_shapes


def main(argv: list[str] | None = None) -> int:
    with ExitStatus() as status:
        parser = arguments("Write a run's newest checkpoint as a Hugging Face folder.")
        parser.add_argument("--out", required=True, metavar="DIR", help="a new or empty folder")
        parser.add_argument(
            "--merge", action="store_true", help="of a LoRA run whole weights, not the adapter"
        )
        args = parser.parse_args(argv)
        by_one_process("export")
        run(config_of(args), Path(args.out), dry_run=args.dry_run, merge=args.merge)
    return status.code


def run(cfg: Config, out: Path, *, dry_run: bool = False, merge: bool = False) -> None:
    """Export to a folder that is whole or absent; save.export_dtype is the weights' dtype.

    Of a LoRA run the adapter, as PEFT has it, or with `merge` whole weights.
    Raises ConfigError where the folder holds something, the disk is full, or there is no
    checkpoint.
    """
    dtype = cfg.save.export_dtype
    nbytes = sum(map(planned_bytes, check_export(cfg.model, out, dtype)))
    tokenizer = load_tokenizer(cfg.init.tokenizer)
    check_tokenizer(tokenizer, cfg.model.vocab_size)
    what = f"{nbytes / 1e6:,.1f} MB of weights in {dtype}"
    if dry_run:
        what = "a PEFT adapter" if cfg.lora.ranks and not merge else what
        print(f"would write {what} to {out}, from the newest checkpoint in {cfg.workdir}")
        return
    supervised = make_optimizer(cfg.optim, steps=cfg.warmup.steps)
    # where the run's devices are not, one holds it all
    mesh = make_mesh(cfg.mesh) if cfg.mesh.devices == jax.device_count() else None
    shapes = stage_shapes(cfg, supervised, rl_optimizer(cfg), mesh)
    at = restore_run(Path(cfg.workdir), cfg, shapes, to_train=False)
    if at is None:
        raise ConfigError(
            f"{cfg.workdir} must hold a checkpoint to export, and has none. Try --workdir with "
            "the folder of a run that was trained."
        )

    def beside(folder: Path) -> None:
        write_tokenizer(cfg.init.tokenizer, folder)
        (folder / "generation_config.json").write_text(json.dumps(generation(tokenizer), indent=2))

    policy = at.state.params.policy
    lora = cfg.lora if at.stage == "rl" else LoraConfig()
    if lora.ranks and not merge:
        save_adapter(
            policy, cfg.model, out, attention_alpha=lora.attention_alpha,
            expert_alpha=lora.expert_alpha, rank_stabilized=lora.rank_stabilized,
        )  # fmt: skip
        print(f"{out}: PEFT adapter of {base_folder(cfg)}, step {at.step} of {cfg.workdir}")
        return
    with phase(f"writing {out}"):
        errors = {}
        if lora.ranks:
            policy = merged(load_base(cfg), policy, lora.scales, dtype="float32")
            if dtype == "mxfp4":
                policy, errors = pack_experts(policy, cfg.model)
        save_params(policy, cfg.model, out, dtype=dtype, beside=beside)
    if errors:
        print(summary(errors))
    print(f"{out}: {at.stage} step {at.step} of {cfg.workdir}, {what}")


def generation(tokenizer: Tokenizer) -> dict[str, object]:
    """generation_config.json: what ends an answer, and nothing about how it is sampled."""
    return {"eos_token_id": list(tokenizer.stop_ids), "pad_token_id": tokenizer.pad_id}


if __name__ == "__main__":
    sys.exit(main())

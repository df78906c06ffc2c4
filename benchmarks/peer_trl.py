# SPDX-License-Identifier: Apache-2.0
"""The peer's side of the comparison: TRL's GRPOTrainer, answering commands on stdin.

Runs under its own Python (torch, transformers, trl, datasets). Next: compare_trl.py, the parent.
"""

import argparse
import ctypes
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

VOCAB = 512


def make_model(directory: Path) -> None:
    """A random float32 GPT-OSS of 1.9 M parameters in the checkpoint format of transformers."""
    import torch
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=32,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = GptOssForCausalLM(config).float()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" in name:
                value.copy_(1 + 0.1 * torch.randn_like(value))
            else:
                value.copy_(torch.randn_like(value) * (1.0 if "sinks" in name else 0.06))
    model.save_pretrained(directory)
    print(sum(p.numel() for p in model.parameters()))


def load(directory: Path):
    import torch
    from transformers import GptOssForCausalLM

    return GptOssForCausalLM.from_pretrained(
        directory,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="grouped_mm",
    )


def tokenizer():
    """One word a token: a text of 16 words has 16 tokens; the end token is not in the model."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i:03d}": i for i in range(VOCAB)} | {"</s>": VOCAB}
    inner = Tokenizer(models.WordLevel(words, unk_token="w001"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", pad_token="w000")


def token_logprobs(model, rows: list[list[int]]) -> list[list[float]]:
    """log p(token t | tokens before it) of every token but the first."""
    import torch

    tokens = torch.tensor(rows)
    with torch.no_grad():
        logp = model(input_ids=tokens, use_cache=False).logits[:, :-1].float().log_softmax(-1)
    return logp.gather(2, tokens[:, 1:, None])[..., 0].tolist()


def attention_seconds(repeats: int = 3) -> float:
    """Forward and backward of eager attention with sinks: 1 x 16q/2kv x 64, T=1024, causal."""
    from types import SimpleNamespace

    import torch
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    torch.manual_seed(1)
    q, k, v = (torch.randn(1, n, 1024, 64, requires_grad=True) for n in (16, 2, 2))
    sinks = torch.randn(16, requires_grad=True)
    weight = torch.randn(1, 1024, 16, 64)
    mask = torch.full((1024, 1024), torch.finfo(torch.float32).min).triu(1)[None, None]
    module: Any = SimpleNamespace(num_key_value_groups=8, sinks=sinks, training=False)
    times = []
    for _ in range(repeats + 1):
        start = time.process_time()
        out, _ = eager_attention_forward(module, q, k, v, mask, scaling=64**-0.5)
        torch.autograd.grad(out, (q, k, v, sinks), weight)
        times.append(time.process_time() - start)
    return min(times[1:])


def trainer_of(directory: Path, sizes: argparse.Namespace, callback, record: dict):
    """GRPOTrainer whose generation and training_step write their CPU-seconds to `record`."""
    import random

    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    class Timed(GRPOTrainer):
        def _generate_single_turn(self, *args, **kwargs):
            start = time.process_time()
            result = super()._generate_single_turn(*args, **kwargs)
            record["generate_cpu_s"] = time.process_time() - start  # once a step
            record["shape"] = [[len(p) for p in args[0]], [len(c) for c in result[0]]]
            return result

        def training_step(self, *args, **kwargs):
            start = time.process_time()
            result = super().training_step(*args, **kwargs)
            record["step_end"] = time.process_time()
            # called once for each part of a step, which on_step_begin starts at 0
            record["step_cpu_s"] += record["step_end"] - start
            return result

    dice = random.Random(0)

    def reward(completions, **_):
        return [dice.random() for _ in completions]

    config = GRPOConfig(
        output_dir=str(directory / "trl"),
        use_cpu=True,
        bf16=False,
        beta=0.0,
        num_iterations=1,
        num_generations=sizes.samples,
        per_device_train_batch_size=sizes.prompts * sizes.samples // sizes.peer_parts,
        gradient_accumulation_steps=sizes.peer_parts,
        steps_per_generation=sizes.peer_parts,
        max_completion_length=sizes.new_tokens,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        gradient_checkpointing=False,
        max_steps=10**5,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        seed=0,
        optim="adamw_torch",
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
    )
    texts = [
        " ".join(f"w{dice.randrange(1, VOCAB):03d}" for _ in range(sizes.prompt_tokens))
        for _ in range(8 * sizes.prompts)
    ]
    return Timed(
        model=load(directory),
        args=config,
        reward_funcs=reward,
        processing_class=tokenizer(),
        train_dataset=Dataset.from_list([{"prompt": t} for t in texts]),
        callbacks=[callback],
    )


def serve(directory: Path, sizes: argparse.Namespace, say) -> None:
    """Train; before each step past the warm-up, answer commands until one asks for a step."""
    from transformers import TrainerCallback

    record: dict = {}
    first = load(directory).eval()  # the weights before any update

    class Desk(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            record["step_cpu_s"] = 0.0
            if state.global_step < 2:
                return
            if state.global_step == 2:
                say("ready")
            for line in sys.stdin:
                command, _, rest = line.strip().partition(" ")
                if command == "step":
                    return
                if command == "logprobs":
                    say(token_logprobs(first, json.loads(rest)))
                elif command == "attention":
                    say(attention_seconds())
                else:
                    break
            os._exit(0)

        def on_optimizer_step(self, args, state, control, **kwargs):
            record["optimizer_cpu_s"] = time.process_time() - record["step_end"]

        def on_step_end(self, args, state, control, **kwargs):
            prompts, answers = record["shape"]
            rows = sizes.prompts * sizes.samples
            want = [sizes.prompt_tokens] * rows, [sizes.new_tokens] * rows
            assert (prompts, answers) == want, f"lengths differ: {record['shape']}"
            if state.global_step > 2:
                record["train_cpu_s"] = record["step_cpu_s"] - record["generate_cpu_s"]
                say({name: v for name, v in record.items() if name.endswith("cpu_s")})

    trainer_of(directory, sizes, Desk(), record).train()


def keep_freed_memory() -> None:
    """glibc's malloc set as jaxmoe's train command sets it: both sides keep freed memory."""
    libc = ctypes.CDLL("libc.so.6")
    for name, value in ((-4, 0), (-8, 1), (-2, 512 * 2**20), (-1, 2**31 - 1)):
        assert libc.mallopt(name, value) == 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--make", action="store_true", help="write the model and stop")
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--stock-malloc", action="store_true")
    for name in ("prompts", "samples", "prompt-tokens", "new-tokens", "peer-parts"):
        parser.add_argument(f"--{name}", type=int, default=1)
    args = parser.parse_args()
    if args.make:
        return make_model(args.directory)
    os.sched_setaffinity(0, {args.core})
    if not args.stock_malloc:
        keep_freed_memory()
    # answers go to the real stdout, everything the libraries print goes to stderr
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import torch

    torch.set_num_threads(1)
    serve(args.directory, args, lambda value: print(json.dumps(value), file=answers, flush=True))


if __name__ == "__main__":
    main()

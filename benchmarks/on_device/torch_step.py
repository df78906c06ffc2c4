# SPDX-License-Identifier: Apache-2.0
"""The same step in torch and transformers on the same card: what a user would run instead.

    python -m benchmarks.on_device.torch_step --tokens 4096 --sequences 4
    python -m benchmarks.on_device.torch_step --decode 32 --keys 4096 --cache static
    python -m benchmarks.on_device.torch_step --tiny          # toy sizes, on a CPU too

GPT-OSS 20B of random bfloat16 weights made on the device, adapters of peft (rank 16, float32) on
the projections of attention, layers recomputed in the backward pass. Experts stay frozen without
adapters: peft's `target_parameters` would add each expert's delta to its weights, all of them in
memory again. One sequence at a time: its log-probs by blocks of tokens, the clipped policy-gradient
loss, its gradient; after all of them clipping and AdamW. Decoding is one token of every row on a
cache filled with random keys, weights without adapters, greedy. Eager attention is the only one of
transformers that has sinks and needs no kernel from its hub, beside FlexAttention (CUDA only).
Needs torch, transformers and peft. Next: stage.py.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from benchmarks.on_device import stage

BLOCK = 512  # tokens whose logits exist at once: 0.4 GB in float32
WARM_UP, STEPS = 1, 3
DECODE_WARM_UP, DECODE_STEPS = 3, 10
RANK = 16
LR = 1e-4
CLIP = 0.2  # of the ratio, to both sides
TINY = {
    "num_hidden_layers": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "sliding_window": 16,
}
GPT_OSS_20B = {  # the defaults of GptOssConfig are those of 120B in some versions
    "num_hidden_layers": 24,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "head_dim": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 201088,
    "sliding_window": 128,
}


def make_model(sizes: dict[str, int], attention: str, device: str) -> Any:
    """Return GptOssForCausalLM of random weights, which never exist anywhere but on the device."""
    import torch
    from transformers import GptOssConfig, GptOssForCausalLM
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding

    config = GptOssConfig(**sizes)  # pyright: ignore[reportArgumentType]
    with torch.device("meta"):
        model: Any = GptOssForCausalLM._from_config(
            config,
            dtype=torch.bfloat16,
            attn_implementation=attention,
            experts_implementation="grouped_mm",
        )
    model.to_empty(device=device)
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "norm" in name:  # in float32, as from_pretrained keeps them
                x.data = torch.ones(x.shape, dtype=torch.float32, device=device)
            elif name.endswith("bias"):
                x.zero_()
            else:
                x.normal_(std=0.02)
    model.model.rotary_emb = GptOssRotaryEmbedding(config).to(device)  # its buffers were empty too
    return model.requires_grad_(False)


def add_adapters(model: Any) -> Any:
    """Return the model with trainable adapters on attention, its layers recomputed."""
    from peft import LoraConfig, get_peft_model

    projections = ["q_proj", "k_proj", "v_proj", "o_proj"]
    adapted = get_peft_model(
        model, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=projections)
    )
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return adapted.train()


def _block_loss(head: Any, hidden: Any, targets: Any, advantages: Any) -> Any:
    """Sum of the clipped policy-gradient loss of a block of tokens, on policy."""
    import torch

    logits = head(hidden).float()
    logp = logits.gather(-1, targets[:, None])[:, 0] - logits.logsumexp(-1)
    ratio = torch.exp(logp - logp.detach())
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    return -torch.minimum(ratio * advantages, clipped * advantages).sum()


def make_step(model: Any, tokens: Any, advantages: Any) -> Callable[[], float]:
    """Return a step on sequences [B, T]; it waits for its end and returns the gradient's norm."""
    import torch
    from torch.utils.checkpoint import checkpoint

    trained = [x for x in model.parameters() if x.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, fused=tokens.is_cuda)
    base = model.get_base_model()
    count = tokens.shape[0] * (tokens.shape[1] - 1)

    def run_step() -> float:
        for row, advantages_T in zip(tokens, advantages, strict=True):
            hidden = base.model(input_ids=row[None], use_cache=False).last_hidden_state[0, :-1]
            parts = (x.split(BLOCK) for x in (hidden, row[1:], advantages_T[1:]))
            blocks = [
                checkpoint(_block_loss, base.lm_head, *part, use_reentrant=False)
                for part in zip(*parts, strict=True)
            ]
            (torch.stack(blocks).sum() / count).backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if tokens.is_cuda:
            torch.cuda.synchronize()
        return norm.item()

    return run_step


def make_decode(model: Any, rows: int, keys: int, kind: str, device: str) -> Callable[[], int]:
    """Return a step of decoding, which draws every row's next token and waits for it."""
    import torch
    from transformers import DynamicCache, StaticCache

    config = model.config
    longest = keys + DECODE_WARM_UP + DECODE_STEPS
    cache: Any = (
        StaticCache(config=config, max_cache_len=longest)
        if kind == "static"
        else DynamicCache(config=config)
    )
    shape = (rows, config.num_key_value_heads, keys, config.head_dim)
    for layer in range(config.num_hidden_layers):
        key, value = (torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(2))
        cache.update(key, value, layer)
    tokens = torch.randint(config.vocab_size, (rows, 1), device=device)
    model.eval()

    def run_decode() -> int:
        nonlocal tokens
        with torch.inference_mode():
            out = model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
            tokens = out.logits[:, -1].argmax(-1, keepdim=True)
        return int(tokens[0, 0])  # waits

    return run_decode


def time_runs(run: Callable[[], Any], warm_up: int, runs: int) -> tuple[list[float], Any]:
    """Return the seconds of each run after the first `warm_up`, and what the last returned."""
    seconds, result = [], None
    for _ in range(warm_up + runs):
        start = time.perf_counter()
        result = run()  # it waits for its end
        seconds.append(time.perf_counter() - start)
    return seconds[warm_up:], result


def measure(args: argparse.Namespace, device: str) -> dict[str, Any]:
    """Return the figures of a step, or of decoding."""
    import torch

    torch.manual_seed(0)
    sizes = dict(TINY if args.tiny else GPT_OSS_20B)
    if args.layers:
        sizes["num_hidden_layers"] = args.layers
    model = make_model(sizes, args.attention, device)
    figures: dict[str, Any] = {"layers": sizes["num_hidden_layers"], "attention": args.attention}
    if args.decode:
        run = make_decode(model, args.decode, args.keys, args.cache, device)
        seconds, _ = time_runs(run, DECODE_WARM_UP, DECODE_STEPS)
        work = args.decode
        figures |= {"what": "decode", "rows": args.decode, "keys": args.keys, "cache": args.cache}
    else:
        shape = (args.sequences, args.tokens)
        tokens = torch.randint(sizes["vocab_size"], shape, device=device)
        advantages = torch.randn(shape, device=device)
        run = make_step(add_adapters(model), tokens, advantages)
        seconds, norm = time_runs(run, WARM_UP, STEPS)
        work = args.sequences * args.tokens
        figures |= {"what": "step", "sequences": args.sequences, "tokens": args.tokens}
        figures["gradient_norm"] = norm  # 0 or nan: it did not train
    median = statistics.median(seconds)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    return figures | {
        "step_s": median,
        "all_step_s": seconds,
        "tokens_per_s": work / median,
        "peak_bytes": peak,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=4096, help="of a sequence")
    parser.add_argument("--sequences", type=int, default=4, help="of a step, one at a time")
    parser.add_argument("--layers", type=int, help="instead of all")
    parser.add_argument("--attention", choices=("eager", "flex_attention"), default="eager")
    parser.add_argument("--decode", type=int, metavar="ROWS", help="decode instead of a step")
    parser.add_argument("--keys", type=int, default=4096, help="of each row before decoding")
    parser.add_argument("--cache", choices=("dynamic", "static"), default="dynamic")
    parser.add_argument("--tiny", action="store_true", help="toy sizes of everything else")
    args = parser.parse_args(argv)
    os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is fetched, so nothing may wait for a network
    import torch
    import transformers  # noqa: F401  imported before the device is asked for; it takes seconds

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not (args.tiny and args.attention == "eager"):
        print("torch_step: without CUDA only --tiny with eager attention runs.", file=sys.stderr)
        return 2
    versions = {name: version(name) for name in ("torch", "transformers", "peft")}
    try:
        with stage.device_alone():
            figures = measure(args, device)
    except torch.OutOfMemoryError as error:
        stage.report(out_of_memory=str(error).partition("\n")[0], **vars(args), **versions)
        return 1
    stage.report(**figures, **versions)
    return 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of `transformers` is trained here and goes back: same log-probs, and it stops."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.checkpoint.hf import load_params
from jaxmoe.model import forward, plain_ops, sequence_logprobs
from jaxmoe.model.config import read_hf_config

pytestmark = pytest.mark.parity

ROOT = Path(__file__).parents[2]
JOB = """
from jaxmoe.config import (
    Config, DataConfig, InitConfig, OptimConfig, RolloutConfig, SaveConfig, WarmupConfig
)

def get_config():
    return Config(
        data=DataConfig(
            task="reasoning_gym:spell_backward", options={{"min_word_len": 3, "max_word_len": 3}},
            train_rows=256, held_out_rows=8, max_prompt_tokens=52,
        ),
        init=InitConfig(checkpoint={checkpoint!r}),
        warmup=WarmupConfig(steps=40, sequences_per_step=16, lr=3e-3),
        rollout=RolloutConfig(sequences_per_step=8, samples_per_prompt=4, max_new_tokens=6),
        optim=OptimConfig(lr=1e-3), steps=3, save=SaveConfig(every_steps=100),
    )
"""


def run_command(name, home, *options):
    """Run a command in its own process, since the tests' strict promotion is not the product's."""
    args = ["--config", str(home / "job.py"), "--workdir", str(home / "run"), *options]
    process = subprocess.run(
        [sys.executable, "-m", f"jaxmoe.{name}", *args],
        cwd=ROOT,
        env=os.environ,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr


@pytest.fixture(scope="module")
def trained_run(hugging, tmp_path_factory):
    home = tmp_path_factory.mktemp("round_trip")
    hugging.torch.manual_seed(0)
    config = hugging.transformers.GptOssConfig(
        vocab_size=265,
        hidden_size=96,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=16,
        num_local_experts=7,
        num_experts_per_tok=4,
        intermediate_size=64,
        sliding_window=9,
    )
    hugging.transformers.GptOssForCausalLM(config).save_pretrained(home / "theirs")
    (home / "job.py").write_text(JOB.format(checkpoint=str(home / "theirs")))
    run_command("train", home)
    for dtype in ("float32", "mxfp4"):
        run_command(
            "export", home, "--out", str(home / dtype), "--set", f"save.export_dtype={dtype}"
        )
    return home


def reload_export(hugging, directory, **options):
    return hugging.transformers.GptOssForCausalLM.from_pretrained(
        directory, attn_implementation="eager", experts_implementation="eager", **options
    )


def score_with_jax(directory, tokens):
    cfg, ops = read_hf_config(directory), plain_ops()
    cfg = cfg.__class__(**vars(cfg) | {"dtype": "float32"})
    params = jax.tree.map(jnp.asarray, load_params(directory, cfg, "float32"))
    hidden, _, _ = forward(params, tokens, cfg, ops)
    return np.asarray(sequence_logprobs(params, hidden, tokens, cfg, ops)[0])[:, 1:]


def score_with_hf(hugging, model, tokens):
    torch = hugging.torch
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(np.asarray(tokens)), use_cache=False).logits
    logp = torch.log_softmax(logits.double(), -1).numpy()[:, :-1]
    return np.take_along_axis(logp, np.asarray(tokens)[:, 1:, None], -1)[..., 0]


TOKENS = jnp.asarray(np.random.default_rng(1).integers(0, 265, (3, 27)), jnp.int32)


def test_transformers_has_our_log_probs_of_an_export(hugging, trained_run):
    model = reload_export(hugging, trained_run / "float32")
    gap = np.abs(
        score_with_jax(trained_run / "float32", TOKENS) - score_with_hf(hugging, model, TOKENS)
    ).max()
    before = reload_export(hugging, trained_run / "theirs")
    moved = np.abs(
        score_with_hf(hugging, before, TOKENS) - score_with_hf(hugging, model, TOKENS)
    ).max()
    print(f"|Δlogp| {gap:.2e}; training moved them by {moved:.2e}")
    assert gap <= 5e-5 and moved > 1e-2


def test_four_bits_mean_the_same_to_transformers(hugging, trained_run):
    options = dict(quantization_config=hugging.transformers.Mxfp4Config(dequantize=True))
    model = reload_export(hugging, trained_run / "mxfp4", **options).float()
    gap = np.abs(
        score_with_jax(trained_run / "mxfp4", TOKENS) - score_with_hf(hugging, model, TOKENS)
    ).max()
    lost = np.abs(
        score_with_jax(trained_run / "mxfp4", TOKENS)
        - score_with_jax(trained_run / "float32", TOKENS)
    ).max()
    print(f"|Δlogp| {gap:.2e} over the same four bits, which cost {lost:.2e}")
    assert gap <= 5e-5


def test_generation_stops_at_the_exports_token(hugging, trained_run):
    model = reload_export(hugging, trained_run / "float32")
    tokenizer = hugging.transformers.AutoTokenizer.from_pretrained(trained_run / "float32")
    stops = json.loads((trained_run / "float32" / "generation_config.json").read_text())[
        "eos_token_id"
    ]
    text = "Spell this word backward (example: sun -> nus): cat"
    prompt_ids = tokenizer(text, return_tensors="pt").input_ids
    assert prompt_ids[0].tolist() == list(text.encode())
    hugging.torch.manual_seed(0)
    samples = model.generate(prompt_ids, do_sample=True, max_new_tokens=40, num_return_sequences=8)
    for row in samples[:, prompt_ids.shape[1] :].tolist():
        end = min(row.index(stop) for stop in stops if stop in row)
        assert end < 40 and set(row[end + 1 :]) <= {tokenizer.pad_token_id}, row
    print("generated", tokenizer.batch_decode(samples[:, prompt_ids.shape[1] :]))

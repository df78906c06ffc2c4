# SPDX-License-Identifier: Apache-2.0
"""`transformers` on the export of a run with four-bit experts: the log-probs of the run itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import export
from jaxmoe.checkpoint.run import Position, save_run
from jaxmoe.config_file import load_config, override
from jaxmoe.model import forward, plain_ops, sequence_logprobs
from jaxmoe.model.rounded import decode_rounded
from jaxmoe.rl.optimizer import rl_optimizer
from jaxmoe.rl.state import init_rl_state
from tests.jaxmoe.random_weights import random_weights

pytestmark = pytest.mark.parity

TOKENS = jnp.asarray(np.random.default_rng(1).integers(0, 256, (3, 61)), jnp.int32)


def score_with_jax(params, cfg):
    ops = plain_ops()
    hidden, _, _ = forward(params, TOKENS, cfg, ops)
    return np.asarray(sequence_logprobs(params, hidden, TOKENS, cfg, ops)[0])[:, 1:]


def score_with_hf(hugging, folder, dtype):
    torch, transformers = hugging.torch, hugging.transformers
    model = transformers.GptOssForCausalLM.from_pretrained(
        folder,
        attn_implementation="eager",
        experts_implementation="eager",
        dtype=getattr(torch, dtype),
        quantization_config=transformers.Mxfp4Config(dequantize=True),
    )
    kinds = {p.dtype for p in model.parameters()}
    assert kinds == {getattr(torch, dtype)}, kinds
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(np.asarray(TOKENS)), use_cache=False).logits
    logp = torch.log_softmax(logits.double(), -1).numpy()[:, :-1]
    return np.take_along_axis(logp, np.asarray(TOKENS)[:, 1:, None], -1)[..., 0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_has_the_runs_log_probs_of_export(hugging, tmp_path, capsys, dtype):
    """In bfloat16 the values agree as closely, shown in float32 arithmetic; arithmetic in bfloat16
    may be as far from that on either side as the other's is, by the three-way rule."""
    work, out = tmp_path / "run", tmp_path / "export"
    sets = [
        f"model.dtype={dtype}",
        f"optim.param_dtype={dtype}",
        "data.train_rows=64",
        "data.held_out_rows=8",
    ]
    cfg = override(load_config("tiny_mxfp4.py"), *sets, f"workdir={work}")
    masters = jax.tree.map(lambda x: x.astype(dtype), random_weights(cfg.model, 3))
    save_run(work, cfg, Position("rl", 5, init_rl_state(masters, cfg, rl_optimizer(cfg)), {}))
    arguments = ["--config", "tiny_mxfp4.py", "--workdir", str(work), "--out", str(out)]
    with jax.numpy_dtype_promotion("standard"):  # the tests' strict one is not the product's
        assert export.main([*arguments, *(x for s in sets for x in ("--set", s))]) == 0
    assert "max 0 nats; other experts in 0.00%" in capsys.readouterr().out

    read = decode_rounded(masters, cfg)
    exact_cfg = override(cfg, "model.dtype=float32").model
    oracle = score_with_jax(read, exact_cfg)
    unrounded = score_with_jax(masters, exact_cfg)
    gap = np.abs(oracle - score_with_hf(hugging, out, "float32")).max()
    lost = np.abs(oracle - unrounded).max()
    print(f"{dtype} |dlogp| {gap:.2e} in float32; the masters are {lost:.2e} away")
    assert gap <= 5e-5 and lost > 1e-2
    if dtype == "bfloat16":
        our_error = np.abs(score_with_jax(read, cfg.model) - oracle).mean()
        their_error = np.abs(score_with_hf(hugging, out, dtype) - oracle).mean()
        print(f"bfloat16 arithmetic: mean |dlogp| {our_error:.2e} here, {their_error:.2e} there")
        assert their_error <= 2 * our_error and our_error <= 2 * their_error

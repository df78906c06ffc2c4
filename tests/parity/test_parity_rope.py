# SPDX-License-Identifier: Apache-2.0
"""RoPE's frequencies at GPT-OSS's sizes: ours, and torch's, which vLLM and transformers read.

torch's vectorised power ends on another last bit at some exponents, and a position multiplies it.
`-s` prints what that does to the log-probs of a hot random model, in float32, far from the start.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.model import forward, init_params, plain_ops, rope, sequence_logprobs, tiny
from jaxmoe.model.config import gpt_oss_20b
from jaxmoe.model.rope import yarn_frequencies

pytestmark = pytest.mark.parity

RELEASED = gpt_oss_20b()
LAST = RELEASED.max_context - 1
HOT = replace(
    tiny(n_layers=4, head_dim=64, n_q_heads=4, n_kv_heads=2),
    sliding_window=32,
    **{n: getattr(RELEASED, n) for n in ("rope_theta", "rope_factor", "max_context")},
)
TOKENS = 64


@pytest.fixture(scope="module")
def hf_frequencies(hugging):
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding

    config = hugging.transformers.GptOssConfig(head_dim=RELEASED.head_dim)
    return GptOssRotaryEmbedding(config).inv_freq.numpy()


def test_two_of_32_frequencies_differ_by_last_bit(hf_frequencies):
    actual, _ = yarn_frequencies(RELEASED)
    differs = actual != hf_frequencies
    assert actual.shape == hf_frequencies.shape == (32,) and differs.sum() <= 2
    up, down = (np.nextafter(actual[differs], np.float32(x)) for x in (np.inf, 0))
    assert ((hf_frequencies[differs] == up) | (hf_frequencies[differs] == down)).all()
    turned = np.abs(actual - hf_frequencies).max() * LAST
    print(f"{differs.sum()} of 32 differ; {turned:.2g} rad at position {LAST:,}")
    assert turned < 2e-3


def compute_logps(params, first, frequencies, monkeypatch):
    """Log-probs of one row of tokens from position `first` on."""
    if frequencies is not None:
        monkeypatch.setattr(rope, "yarn_frequencies", lambda cfg: (frequencies, FACTOR))
    tokens = jnp.asarray(np.random.default_rng(5).integers(0, 256, (1, TOKENS)))
    positions = first + jnp.arange(TOKENS, dtype=jnp.int32)[None]
    ops = plain_ops()
    hidden, _, _ = forward(params, tokens, HOT, ops, positions_BT=positions)
    logps_found, _ = sequence_logprobs(params, hidden, tokens, HOT, ops)
    monkeypatch.undo()
    return np.asarray(logps_found)[0, :-1].astype(np.float64)


_, FACTOR = yarn_frequencies(RELEASED)


def test_last_bits_change_log_probs_more_with_position(hf_frequencies, monkeypatch):
    params = jax.tree.map(
        lambda x: 6.0 * x if x.ndim > 2 else x, init_params(jax.random.key(2), HOT)
    )
    logps_found = {}
    for first in (0, 6100, 100_000):
        actual, repeated = (compute_logps(params, first, None, monkeypatch) for _ in range(2))
        np.testing.assert_array_equal(actual, repeated)
        gap = np.abs(actual - compute_logps(params, first, hf_frequencies, monkeypatch))
        logps_found[first] = gap.mean()
        print(f"position {first:,}: mean |Δlogp| {gap.mean():.2g}, largest {gap.max():.2g}")
    assert logps_found[0] <= logps_found[6100] < logps_found[100_000] < 0.5

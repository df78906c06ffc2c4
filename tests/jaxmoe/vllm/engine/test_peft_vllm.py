# SPDX-License-Identifier: Apache-2.0
"""A LoRA adapter in a real vLLM against our forward with the adapter merged.

vLLM 0.32 gives every GPT-OSS with LoRA the Triton experts, which a CPU cannot run, even where
adapters may be on attention only; so the second test tells it that the experts have none.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.checkpoint.hf import save_params
from jaxmoe.checkpoint.peft.write import save_adapter
from jaxmoe.config import LoraConfig
from jaxmoe.model import forward, plain_ops, sequence_logprobs
from jaxmoe.model.lora import Pair
from jaxmoe.model.params import map_specs
from tests.jaxmoe.small_models import SIX_EXPERTS

pytestmark = pytest.mark.vllm

OPS = plain_ops()
CFG = replace(SIX_EXPERTS, vocab_size=96, n_q_heads=6, n_experts=4, d_expert=96, sliding_window=16)
RANK, ALPHA = 4, 8.0
ENV = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
SCRIPT = """
import json, sys
home, plain_experts = sys.argv[1], sys.argv[2] == "plain"
tokens = json.load(open(home + "/tokens.json"))
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig as Experts
if plain_experts:
    stock = Experts.__post_init__
    def without_lora(self):
        self.is_lora_enabled = False
        stock(self)
    Experts.__post_init__ = without_lora
llm = LLM(model=home + "/model", dtype="float32", enforce_eager=True, skip_tokenizer_init=True,
          max_model_len=128, max_num_seqs=4, kv_cache_memory_bytes=64 << 20, enable_lora=True,
          max_lora_rank=8, lora_target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
def logps(request):
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    prompt = TokensPrompt(prompt_token_ids=tokens)
    (out,) = llm.generate([prompt], sampling, lora_request=request, use_tqdm=False)
    return [out.prompt_logprobs[i][t].logprob for i, t in enumerate(tokens) if i]
made = {"base": logps(None), "adapter": logps(LoRARequest("a", 1, home + "/adapter"))}
json.dump(made, open(home + "/made.json", "w"))
"""


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """(folder with model, adapter and tokens, our log-probs without and with the adapter)."""
    home, rng = tmp_path_factory.mktemp("lora"), np.random.default_rng(0)
    params = map_specs(
        lambda s: (s.init == "ones") + 0.1 * rng.standard_normal(s.shape, np.float32), CFG
    )
    save_params(params, CFG, home / "model", dtype="float32")
    merged, adapters = jax.tree.map(np.array, params), {"sliding": {}, "full": {}}
    for kind, adapted in adapters.items():
        block = merged["layers"][kind]
        for name in ("w_q", "w_k", "w_v", "w_o"):
            pairs, *sizes = block[name].shape
            a, b = (0.2 * rng.standard_normal((pairs, RANK, n), np.float32) for n in sizes)
            adapted[name] = Pair(a, b)
            block[name] += ALPHA / RANK * np.einsum("prd,prf->pdf", a, b)
    lora = LoraConfig(attention_rank=RANK, attention_alpha=ALPHA)
    save_adapter({"layers": adapters}, CFG, lora, home / "adapter")
    tokens = rng.integers(0, CFG.vocab_size, 40)
    (home / "tokens.json").write_text(json.dumps(tokens.tolist()))

    def logps(weights) -> np.ndarray:
        tokens_BT = jnp.asarray(tokens[None], jnp.int32)
        weights = jax.tree.map(jnp.asarray, weights)
        hidden_BTD = forward(weights, tokens_BT, CFG, OPS)[0]
        return np.asarray(sequence_logprobs(weights, hidden_BTD, tokens_BT, CFG, OPS)[0])[0, 1:]

    return home, logps(params), logps(merged)


def run(home, experts: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, str(home), experts],
        env=os.environ | ENV,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_vllm_on_a_cpu_refuses_gpt_oss_lora(setting):
    result = run(setting[0], "stock")
    assert result.returncode != 0 and "triton_moe.py" in result.stderr, result.stderr[-2000:]


@pytest.mark.slow  # test_adapter_of_vllm.py has such an adapter in a run's engine
def test_vllm_serves_our_adapter_as_our_merged_weights(setting):
    home, base, merged = setting
    result = run(home, "plain")
    assert result.returncode == 0, result.stderr[-2000:]
    reported = json.loads((home / "made.json").read_text())
    gap = np.abs(np.array(reported["adapter"]) - merged).max()
    print(f"max |dlogp| {gap:.1e}; the adapter moves them by {np.abs(merged - base).max():.1f}")
    assert np.abs(merged - base).max() > 0.5
    assert np.abs(np.array(reported["base"]) - base).max() < 5e-5 and gap < 5e-5

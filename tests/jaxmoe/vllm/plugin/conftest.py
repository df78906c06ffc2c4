# SPDX-License-Identifier: Apache-2.0
"""A real vLLM in this process, beside the trainer's forward of the same weights."""

import dataclasses
import importlib
import json
import os
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.checkpoint.hf import iter_hf, save_params
from jaxmoe.config import ModelConfig
from jaxmoe.model import forward, param_specs, plain_ops, sequence_logprobs
from jaxmoe.model.params import Spec
from jaxmoe.weight_sync.checksum import digest_array

# pairwise distinct where vLLM's CPU kernels allow it: hidden sizes in 32s, heads of 32
CFG = ModelConfig(
    vocab_size=97,
    d_model=160,
    n_layers=4,
    n_q_heads=6,
    n_kv_heads=2,
    head_dim=32,
    n_experts=7,
    experts_per_token=3,
    d_expert=128,
    sliding_window=9,
    dtype="float32",
    rope_factor=32.0,
)
QUIET = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # its first engine reads it for all later ones
}
LENGTHS = (3, 23, 150, 210)  # within the window, past it, past vLLM's block of 128 tokens
NEW, LONGEST = 24, 234


def random_params(cfg, seed):
    """Weights of a sharp model: no bias is 0, sinks are large, of either sign."""
    rng = np.random.default_rng(seed)

    def leaf(path, spec):
        name, x = path[-1].key, rng.standard_normal(spec.shape, np.float32)
        if "norm" in name:
            return 1 + 0.2 * x
        if "sink" in name:
            return 1.5 * x + 3 * np.sign(x)
        if name.startswith("b_"):
            return 0.3 * x
        return x / np.float32(np.sqrt(spec.shape[-1 if name == "embed" else -2]))

    return jax.tree.map_with_path(leaf, param_specs(cfg), is_leaf=lambda x: isinstance(x, Spec))


def vllm():
    """The package: by its name a type checker finds the folder of tests beside this one."""
    return importlib.import_module("vllm")


class Served:
    """One vLLM and what a trainer does with it."""

    def __init__(self, cfg, home, dtype="float32", **options):
        self.cfg, self.home, self.version = cfg, home, 0
        self.seed = 0
        self.params = random_params(cfg, 0)
        save_params(self.params, cfg, home / "checkpoint", dtype="float32")
        self.llm = vllm().LLM(
            model=str(home / "checkpoint"),
            dtype=dtype,
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_model_len=256,
            kv_cache_memory_bytes=64 << 20,
            max_num_seqs=8,
            max_num_batched_tokens=256,
            enable_return_routed_experts=True,
            logprobs_mode="processed_logprobs",
            weight_transfer_config={"backend": "jaxmoe"},
            worker_extension_cls="jaxmoe.vllm.plugin.worker.Worker",
            **options,
        )
        self.llm.init_weight_transfer_engine({"init_info": {}})
        self.prompts = [
            [int(t) for t in np.random.default_rng(n).integers(0, cfg.vocab_size, n)]
            for n in LENGTHS
        ]
        self._forward = jax.jit(self._logp)

    def fresh(self):
        """Weights this vLLM has never seen, all of them."""
        self.seed += 1
        return random_params(self.cfg, self.seed)

    def tensors(self, params):
        return dict(iter_hf(params, self.cfg, "float32"))

    def manifest(self, tensors):
        """Return the manifest of these tensors."""
        entries = {
            name: {"dtype": "F32", "shape": list(array.shape), "digest": digest_array(array)}
            for name, array in tensors.items()
        }
        return {"format": 1, "run": "ab", "version": self.version, "tensors": entries}

    def write(self, tensors, manifest=None):
        """An update in files."""
        from safetensors.numpy import save_file

        self.version += 1
        folder = self.home / str(self.version)
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        (folder / "manifest.json").write_text(json.dumps(manifest or self.manifest(tensors)))
        return folder

    def update(self, info):
        self.llm.start_weight_update()
        self.llm.update_weights({"update_info": info})
        self.llm.finish_weight_update(str(self.version))
        assert self.llm.reset_prefix_cache()

    def sync(self, params):
        """Publish, compute with them from now on, and say what vLLM holds."""
        folder = self.write(self.tensors(params))
        self.update({"path": str(folder)})
        shutil.rmtree(folder)
        self.params = params
        return self.loaded_state()

    def loaded_state(self):
        return self.llm.collective_rpc("jaxmoe_loaded_state")[0]

    def answers(self, new=NEW):
        prompts = [vllm().TokensPrompt(prompt_token_ids=p) for p in self.prompts]
        sampling = vllm().SamplingParams(
            max_tokens=new,
            logprobs=0,
            prompt_logprobs=0,
            ignore_eos=True,
            detokenize=False,
            seed=self.version,
        )
        return self.llm.generate(prompts, sampling, use_tqdm=False)

    def _logp(self, params, tokens_BT, lengths_B):
        def record(h_BTD, layer, indices_BTA, weights_BTA):
            logits = h_BTD @ layer["w_router"] + layer["b_router"][None, None]
            top = jax.lax.top_k(logits, self.cfg.experts_per_token + 1)[0]
            return {"experts_BTA": indices_BTA, "margin_BT": top[..., -2] - top[..., -1]}

        ops = replace(plain_ops(), record=record)
        segments = (jnp.arange(tokens_BT.shape[1])[None] < lengths_B[:, None]).astype(jnp.int32)
        hidden, _, recorded = forward(params, tokens_BT, self.cfg, ops, segment_ids_BT=segments)
        shape, experts, margin = (
            (self.cfg.n_layers, *tokens_BT.shape),
            recorded["experts_BTA"],
            recorded["margin_BT"],
        )
        logp = sequence_logprobs(params, hidden, tokens_BT, self.cfg, ops)[0]
        return logp, experts.reshape(*shape, -1), margin.reshape(shape)

    def compare(self, new=NEW):
        """(largest |dlogp|, experts that differ where the margin is 1e-5 or more, all those that
        differ, routings compared), of vLLM's answers under the trainer's weights.
        """
        outputs = self.answers(new)
        rows = [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in outputs]
        tokens = np.zeros((len(rows), LONGEST), np.int32)
        for b, row in enumerate(rows):
            tokens[b, : len(row)] = row
        logp, experts, margin = jax.device_get(
            self._forward(self.params, tokens, np.array([len(r) for r in rows]))
        )
        worst, clear, differing, total = 0.0, 0, 0, 0
        for b, (out, row) in enumerate(zip(outputs, rows, strict=True)):
            vllm_logp = [
                d[t].logprob for d, t in zip(out.prompt_logprobs[1:], row[1:], strict=False)
            ]
            vllm_logp += [
                d[t].logprob
                for d, t in zip(out.outputs[0].logprobs, out.outputs[0].token_ids, strict=True)
            ]
            assert len(vllm_logp) == len(row) - 1
            worst = max(worst, float(np.abs(np.array(vllm_logp) - logp[b, 1 : len(row)]).max()))
            vllm_experts = np.sort(out.outputs[0].routed_experts.astype(int), -1)
            assert vllm_experts.shape == (
                len(row) - 1,
                self.cfg.n_layers,
                self.cfg.experts_per_token,
            )
            trainer_experts = np.sort(experts[:, b, : len(row) - 1].swapaxes(0, 1), -1)
            differ = (vllm_experts != trainer_experts).any(-1)
            differing, total = differing + int(differ.sum()), total + differ.size
            clear += int((differ & (margin[:, b, : len(row) - 1].T >= 1e-5)).sum())
        return worst, clear, differing, total


@pytest.fixture(scope="session")
def quiet():
    """One thread and few words; before torch is imported, or its threads get into each other."""
    os.environ.update(QUIET)


@pytest.fixture(scope="session")
def served(quiet, tmp_path_factory):
    """vLLM with YaRN's factor of 32, as the published model has."""
    return Served(CFG, tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="session")
def served_plain(quiet, tmp_path_factory):
    """vLLM with plain RoPE, as the tiny configuration has."""
    cfg = dataclasses.replace(CFG, rope_factor=1.0, rope_theta=100.0)
    return Served(cfg, tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="session")
def served_rounded(quiet, tmp_path_factory):
    """vLLM in bfloat16, synced in float32."""
    return Served(CFG, tmp_path_factory.mktemp("rounded"), dtype="bfloat16")


@pytest.fixture
def served_by_two(quiet, tmp_path):
    """vLLM whose layers are spread over two processes, an even number of heads in each."""
    server = Served(dataclasses.replace(CFG, n_q_heads=8), tmp_path, tensor_parallel_size=2)
    yield server
    server.llm.llm_engine.engine_core.shutdown()

# SPDX-License-Identifier: Apache-2.0
"""A stand-in for a vLLM server, NOT vLLM: the same HTTP dialect over this project's own forward.

It lets the engine's logic be tested in seconds and be lied to: `faults` say how it misbehaves.
What vLLM itself does is tested under the `vllm` marker.
"""

import base64
import io
import json
import secrets
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import parse_qs, urlsplit

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from jaxmoe.checkpoint.hf import load_params
from jaxmoe.checkpoint.peft.read import read_adapter
from jaxmoe.checkpoint.tensor_files import encode_header
from jaxmoe.model import abstract_params, forward, next_token_logits, plain_ops
from jaxmoe.model.lora import with_adapters
from jaxmoe.vllm.plugin.received_bytes import ReceivedBytes
from jaxmoe.weight_sync.checksum import digest_array
from tests.jaxmoe.vllm.quiet_handler import QuietHandler

ROWS = 4  # sequences computed at once
SHORT = 160  # tokens of the smaller of two programs, for contexts that are longer


def _compute(params, tokens_BT, cfg):
    hidden_BTD, _, recorded = forward(params, tokens_BT, cfg, plain_ops())
    shape = hidden_BTD.shape
    logits_MV = next_token_logits(params, hidden_BTD.reshape(-1, shape[-1]), cfg, plain_ops(), 1.0)
    return logits_MV.reshape(*shape[:2], -1), recorded["experts_BTA"]


# runs some thousand times in these tests: worth its optimising, which tests/conftest.py turns off
COMPUTE = jax.jit(
    _compute,
    static_argnames="cfg",
    compiler_options={
        "xla_backend_optimization_level": "3",
        "xla_llvm_disable_expensive_passes": "False",
    },
)


class StandIn:
    """`url` while it runs; `crash` ends it, `start` brings it back as a new process would be."""

    def __init__(self, cfg, *, context=40, delay=0.0, key="", guards="/", base=None, **reported):
        self.base: Any = base  # of the adapters that it serves
        self.key, self.guards = key, guards  # 401 without the key to paths that begin so
        self.cfg, self.context, self.delay, self.reported = cfg, context, delay, reported
        self._port = 0
        self.faults: set[str] = set()
        self.requests: list[dict] = []  # bodies of /inference/v1/generate
        self.start()

    def start(self, folder: Path | None = None):
        """Start as a new process: with random weights, or with those of an older folder."""
        self.instance, self.label, self.spoken = secrets.token_hex(8), None, "default"
        self.received, self.waiting = {}, None
        self.kept, self.applied = (
            ReceivedBytes(),
            [],
        )  # of changes: the number of files of each sync
        self.params = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract_params(self.cfg))
        if self.base is not None:
            self.params = self.base
        if folder is not None:
            self.params = load_params(folder, self.cfg, "float32")
        self.state = threading.Condition()
        self.paused, self.running, self.aborts, self.dead = "", 0, 0, False
        self.updating = False
        outer = self

        class Handler(QuietHandler):
            def do_GET(self):
                outer.answer(self, {})

            def do_POST(self):
                length = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(length)
                outer.answer(self, json.loads(body) if body else {})

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True
            allow_reuse_address = True
            request_queue_size = 64

            def handle_error(self, request, client_address):
                pass  # clients that went away

        self.http = Quiet(("127.0.0.1", self._port), Handler)
        self._port = self.http.server_address[1]
        self.url = f"http://127.0.0.1:{self._port}"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def crash(self):
        """Simulate kill -9: requests in flight get no response."""
        with self.state:
            self.dead = True
            self.state.notify_all()
        self.http.shutdown()
        self.http.server_close()

    def answer(self, request, body):
        path = urlsplit(request.path)
        query = {k: v[0] for k, v in parse_qs(path.query).items()}
        name = path.path.rsplit("/", 1)[-1]
        if self.dead:
            request.close_connection = True
            return
        allowed = request.headers.get("Authorization") == f"Bearer {self.key}"
        if self.key and path.path.startswith(self.guards) and not allowed:
            return self.send(request, 401, {"error": "Unauthorized"})
        try:
            result = getattr(self, "do_" + name)(body, query)
        except ConnectionAbortedError:
            request.close_connection = True
            return
        except Exception as error:
            return self.send(request, 500, {"error": f"{type(error).__name__}: {error}"})
        self.send(request, 200, result)

    def send(self, request, status, result):
        data = json.dumps(result).encode()
        request.send_response(status)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)

    def do_health(self, body, query):
        return {}

    def do_models(self, body, query):
        return {"data": [{"id": "stand-in", "max_model_len": self.context}]}

    def do_collective_rpc(self, body, query):
        if body["method"] == "jaxmoe_load_adapter":
            return self.load_adapter(Path(body["args"][0]))
        assert body["method"] == "jaxmoe_loaded_state"
        received = dict(self.received)
        stale = []
        if "half sent" in self.faults:
            received.pop(sorted(received)[3], None)
        if "torn" in self.faults and received:
            received[sorted(received)[2]] = "0" * 32
        if "stale" in self.faults:
            stale = ["model.layers.0.self_attn.sinks"]
        loaded = {
            "instance": self.instance,
            "label": self.label,
            "received": received,
            **self.reported,
        }
        return {"results": [loaded | {"live": {}, "stale": stale, "unreadable": []}]}

    def load_adapter(self, folder):
        adapter = read_adapter(folder, self.cfg)
        if skipped := [fault.split()[1] for fault in self.faults if fault.startswith("skips ")]:
            adapter.adapters["layers"]["full"][skipped[0]].b[:] = 0
        adapters = jax.tree.map(jnp.asarray, adapter.adapters)
        self.params = with_adapters(self.base, adapters, adapter.scales)
        manifest = json.loads((folder / "manifest.json").read_text())
        self.label = f"{manifest['run']}:{manifest['version']}"
        (file,) = folder.glob("*.safetensors")
        self.received = {name: digest_array(array) for name, array in load_file(file).items()}
        return {"results": [None]}

    def do_init_weight_transfer_engine(self, body, query):
        return {}

    def do_pause(self, body, query):
        mode = query["mode"]
        with self.state:
            self.paused = mode
            if mode == "abort":
                self.aborts += 1
            self.state.notify_all()
            if mode == "wait":
                self.state.wait_for(lambda: self.running == 0 or self.dead, 30)
        return {"status": "paused"}

    def do_resume(self, body, query):
        with self.state:
            self.paused = ""
            self.state.notify_all()
        return {}

    def do_start_weight_update(self, body, query):
        if self.updating:
            raise RuntimeError("start_weight_update called while … is already active.")
        self.label, self.updating = None, True
        return {}

    def do_update_weights(self, body, query):
        assert self.paused, "weights change while it is paused"
        assert self.updating, "start_weight_update comes first"
        if "update breaks" in self.faults:
            self.updating = False
            self.params = jax.tree.map(jnp.zeros_like, self.params)  # half way, say
            raise RuntimeError("no room")
        info = body["update_info"]
        folder = Path(info["path"])
        with TemporaryDirectory() as scratch:
            if info.get("changes") is not None:
                folder = self.apply_block([folder, *map(Path, info["changes"])], Path(scratch))
            self.waiting = load_params(folder, self.cfg, "float32")
            self.manifest = json.loads((folder / "manifest.json").read_text())
            files = [load_file(path) for path in folder.glob("model*.safetensors")]
            self.received = {name: digest_array(array) for f in files for name, array in f.items()}
        return {}

    def apply_block(self, folders, scratch):
        """Write what vLLM's worker would have, after the checks that the plugin makes."""
        kept = self.kept.read(folders)
        manifest = json.loads((folders[-1] / "manifest.json").read_text())
        self.applied.append(len(folders) - 1)
        with open(scratch / "model.safetensors", "wb") as file:
            planned = [(n, t["dtype"], tuple(t["shape"])) for n, t in manifest["tensors"].items()]
            file.write(encode_header(planned))
            for name, tensor in manifest["tensors"].items():
                if digest_array(kept[name]) != tensor["digest"]:
                    self.kept.forget()
                    raise RuntimeError(f"{name} must have digest {tensor['digest']}")
                file.write(kept[name].data)
        (scratch / "manifest.json").write_text(json.dumps(manifest))
        return scratch

    def do_finish_weight_update(self, body, query):
        assert self.updating, "start_weight_update comes first"
        self.updating = False
        if self.waiting is None:  # nothing came: an update that was given up
            self.label = self.spoken = body["weight_version"]
            return {}
        if "other weights" in self.faults:
            head = self.waiting["head"]
            self.waiting["head"] = head + np.float32(0.2) * np.sin(np.arange(head.size)).astype(
                np.float32
            ).reshape(head.shape)
        with self.state:
            if "ignores" not in self.faults:
                self.params = self.waiting
            self.label = self.spoken = body["weight_version"]
        return {}

    def do_reset_prefix_cache(self, body, query):
        assert query["reset_running_requests"] == "true"
        return {"success": "keeps its cache" not in self.faults}

    def do_generate(self, body, query):
        self.requests.append(body)
        sampling, prompt = body["sampling_params"], body["token_ids"]
        count, stops = sampling["n"], set(sampling["stop_token_ids"])
        assert len(prompt) + sampling["max_tokens"] <= self.context, "too long"
        assert count <= self.reported.get("rows", count), "n must be at most max_num_seqs"
        with self.state:
            self.state.wait_for(lambda: not self.paused or self.dead)
            self.running += 1
            aborts = self.aborts
        try:
            rows = [Row(sampling["seed"] + i, prompt) for i in range(count)]
            while any(not row.finish for row in rows):
                with self.state:
                    if self.aborts > aborts:
                        for row in rows:
                            row.finish = row.finish or "abort"
                        break
                    self.state.wait_for(lambda: self.paused != "keep" or self.dead)
                    if self.dead:
                        raise ConnectionAbortedError
                    params, label = self.params, self.spoken
                    self.state.wait(self.delay) if self.delay else None
                    self.step(params, label, rows, sampling, stops)
            if self.dead:
                raise ConnectionAbortedError
            answer: dict[str, Any] = {
                "choices": [row.choice(i, len(prompt)) for i, row in enumerate(rows)]
            }
            if sampling.get("prompt_logprobs") is not None:
                answer["prompt_logprobs"] = self.prompt_logprobs(params, prompt)
            return answer
        finally:
            with self.state:
                self.running -= 1
                self.state.notify_all()

    def forward(self, params, sequences):
        longest = max(map(len, sequences))
        tokens = np.zeros(
            (ROWS, SHORT if longest <= SHORT < self.context else self.context), np.int32
        )
        for row, ids in enumerate(sequences):
            tokens[row, : len(ids)] = ids
        logits, experts = COMPUTE(params, jnp.asarray(tokens), cfg=self.cfg)
        return np.asarray(logits, np.float64), np.asarray(experts)

    def prompt_logprobs(self, params, prompt):
        logits = self.forward(params, [prompt])[0][0]
        logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        return [None] + [{str(t): {"logprob": logp[i, t]}} for i, t in enumerate(prompt[1:])]

    def step(self, params, label, rows, sampling, stops):
        alive = [row for row in rows if not row.finish]
        for start in range(0, len(alive), ROWS):
            batch = alive[start : start + ROWS]
            logits, experts = self.forward(params, [r.prompt + r.tokens for r in batch])
            for i, row in enumerate(batch):
                position = len(row.prompt) + len(row.tokens) - 1
                row.experts[position] = experts[:, i, position]
                for before in range(position):  # what was read earlier stays
                    row.experts.setdefault(before, experts[:, i, before])
                row.sample_token(logits[i, position], sampling, label, stops)


class Row:
    """One sample in progress."""

    def __init__(self, seed, prompt):
        self.seed, self.prompt = seed, list(prompt)
        self.tokens, self.logp, self.labels, self.finish = [], [], [], ""
        self.experts = {}

    def sample_token(self, logits, sampling, label, stops):
        greedy = sampling["temperature"] == 0.0
        logits = logits / (1.0 if greedy else sampling["temperature"])
        if sampling["top_k"]:
            logits = np.where(logits < np.sort(logits)[-sampling["top_k"]], -np.inf, logits)
        if sampling["top_p"] < 1.0:
            probs = np.exp(logits - logits.max())
            probs /= probs.sum()
            order = np.argsort(-probs)
            cut = order[np.cumsum(probs[order]) - probs[order] >= sampling["top_p"]]
            logits[cut] = -np.inf
        logp = logits - logits.max()
        logp -= np.log(np.exp(logp).sum())
        noise = np.random.default_rng([self.seed, len(self.tokens)]).gumbel(size=len(logp))
        token = int(np.argmax(logp if greedy else logp + noise))
        self.tokens.append(token)
        self.logp.append(float(logp[token]))
        self.labels.append(label)
        if token in stops:
            self.finish = "stop"
        elif len(self.tokens) == sampling["max_tokens"]:
            self.finish = "length"

    def choice(self, index, prompt):
        spans = []
        for i, label in enumerate(self.labels):
            if spans and spans[-1]["version"] == label:
                spans[-1]["end"] = i + 1
            else:
                spans.append({"version": label, "start": i, "end": i + 1})
        file = io.BytesIO()
        rows = [self.experts[i] for i in sorted(self.experts)]
        np.save(file, np.asarray(rows, np.uint8))
        content = [
            {"token_id": t, "logprob": p, "rank": 1, "top_logprobs": []}
            for t, p in zip(self.tokens, self.logp, strict=True)
        ]
        experts = base64.b64encode(file.getvalue()).decode() if rows else None
        return {
            "index": index,
            "token_ids": self.tokens,
            "finish_reason": self.finish,
            "logprobs": {"content": content},
            "weight_versions": spans or None,
            "routed_experts": experts,
        }

# SPDX-License-Identifier: Apache-2.0
"""One run of the train command, looked at from inside: its trace, and whose pieces it runs on."""

import re
import sys
import traceback
from collections import Counter
from dataclasses import dataclass, fields, replace
from functools import wraps
from pathlib import Path

import pytest

from jaxmoe import train
from jaxmoe.batches.batch import Batch
from jaxmoe.collection.batches import make_batch
from jaxmoe.losses import ppo_clip
from jaxmoe.model import Ops
from jaxmoe.model import ops as model_ops
from jaxmoe.rl import scorer
from jaxmoe.rollout import decoding
from jaxmoe.rollout.engine import open_engine
from tests.jaxmoe.commands import TINIEST, arguments, train_here

pytestmark = [
    pytest.mark.slow,  # most of a minute: it compiles every model there is
    pytest.mark.usefixtures("standard_promotion"),
]
ROOT = Path(__file__).resolve().parents[2]
# every model there is: policy, reference, a critic's own backbone; scored first, then trained
ALL_MODELS = (
    "loss.kl_coef=0.1 loss.old_logp=recomputed loss.advantages=gae critic.backbone=own "
    "router.replay=R3 warmup.steps=1 steps=1"
).split()


stacks: list[list[traceback.FrameSummary]] = []


def probe(logp_BT, old_logp_BT, advantages_BT, mask_BT):
    """`ppo_clip`, which remembers who asked it."""
    stacks.append(traceback.extract_stack())
    return ppo_clip(logp_BT, old_logp_BT, advantages_BT, mask_BT)


def product_frames(stack) -> list[tuple[str, str]]:
    """(file, function) of the frames that are this project's, outermost first."""
    frames = []
    for frame in stack:
        path = Path(frame.filename)
        if path.is_relative_to(ROOT / "jaxmoe"):
            frames.append((str(path.relative_to(ROOT)), frame.name))
    return frames


def counting(ops: Ops, calls: Counter) -> Ops:
    """Ops whose every piece counts its calls; jax traces it where it is used."""

    def counted(name):
        piece = getattr(ops, name)

        @wraps(piece)  # a router is asked for its parameters
        def call(*args, **options):
            calls[name] += 1
            calls["experts were given"] += "indices_BTA" in options
            return piece(*args, **options)

        return call

    return replace(ops, **{field.name: counted(field.name) for field in fields(ops)})


@dataclass
class Looked:
    """A run of every model there is, whose objective is `probe` and whose pieces count."""

    calls: Counter
    forwards: Counter
    batches: list[Batch]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One run for the tests below: a run is mostly its compilation."""
    calls, forwards, batches = Counter(), Counter(), []
    make_plain_parts = train.make_parts

    def noted(*arguments):
        batches.append(make_batch(*arguments))
        return batches[-1]

    def counted(name, forward):
        def call(*args, **options):
            forwards[name] += 1
            return forward(*args, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:

        def make_parts(cfg):
            calls["make_parts"] += 1
            parts = make_plain_parts(cfg)
            patch.setattr(model_ops, "plain_ops", None)  # nobody makes pieces of its own from here
            return replace(parts, ops=counting(parts.ops, calls), make_batch=noted)

        patch.setattr(train, "make_parts", make_parts)
        patch.setattr(scorer, "forward", counted("scorer", scorer.forward))
        patch.setattr(decoding, "forward", counted("native", decoding.forward))
        patch.setitem(sys.modules, "probing", sys.modules[__name__])
        settings = (*TINIEST, *ALL_MODELS, "loss.objective=probing:probe")
        assert train_here(arguments(tmp_path_factory.mktemp("looked"), *settings)) == 0
    return Looked(calls, forwards, batches)


def test_the_trace_to_the_gradient_is_the_readmes(run):
    def is_of_an_update(stack):  # not of the checks, which differentiate the objective as well
        return {"update_minibatch", "value_and_grad_f"} <= {frame.name for frame in stack}

    differentiated = [stack for stack in stacks if is_of_an_update(stack)]
    assert differentiated, "the objective must be asked under jax.value_and_grad"
    stack = differentiated[0]
    names = [frame.name for frame in stack]
    before = product_frames(stack[: names.index("value_and_grad_f")])
    trace = [*product_frames(stack), ("jaxmoe/losses/objectives.py", "ppo_clip")]
    print("\n".join(f"{i}  {file}  {function}" for i, (file, function) in enumerate(trace, 1)))
    assert len(before) <= 8 and len(trace) <= 11
    readme = (ROOT / "README.md").read_text()
    block = re.search(r"<!-- trace -->\n```\n(.*?)\n```", readme, re.S)
    assert block, "README must hold the trace after <!-- trace -->"
    lines = re.findall(r"^ *(\d+)  (\S+) +(\w+)", block[1], re.M)
    assert lines == [(str(i), *frame) for i, frame in enumerate(trace, 1)]


def test_every_forward_uses_the_ops_of_its_config(run):
    calls, forwards = run.calls, run.forwards
    assert calls["make_parts"] == 1
    # warm start; policy scored, reference, critic scored; policy and critic under the gradient
    assert forwards["scorer"] >= 6 and forwards["native"] >= 2  # prefill and decode
    total = sum(forwards.values())
    assert calls["embed"] == calls["rotary"] == calls["remat"] == total
    assert calls["decode"] >= 2  # two layers in a pair
    assert calls["attend"] + calls["decode"] >= 2 * total
    for name in ("router", "experts", "record"):
        assert calls[name] >= 2 * total, name
    assert calls["norm"] >= 5 * total and calls["linear"] >= 6 * total
    assert calls["output"] >= 2 * total
    assert calls["logprobs"] >= 4 and calls["logits"] >= 1


def test_no_module_but_one_makes_ops():
    for path in (ROOT / "jaxmoe").rglob("*.py"):
        code = "\n".join(line.split("#")[0] for line in path.read_text().splitlines())
        # A study's micro models have ops of their own; its runs have those of their config.
        if path.name not in ("ops.py", "micro_model.py"):
            assert not re.search(r"\b(Ops|plain_ops)\(", code), path
    assert open_engine.__annotations__["ops"] is Ops


def test_router_replay_reaches_updates_from_the_command(run):
    """The engine's experts come with the batch; test_routing_travels.py packs and cuts them."""
    (batch,) = run.batches
    routed = batch.routed_experts_BTLA
    assert routed.dtype == "int8" and routed.shape == (*batch.tokens_BT.shape, 2, 2)
    assert routed[batch.segment_ids_BT > 0].max() > 0
    # Five forwards after that of the warm start; a packed one is traced twice.
    traces = (run.forwards["scorer"] - 1) / 5
    assert traces in (1, 2)
    # the policy alone, scored and trained, two layers each; reference and critic route themselves
    assert run.calls["experts were given"] == 2 * 2 * traces

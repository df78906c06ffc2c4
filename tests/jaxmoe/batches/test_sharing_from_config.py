# SPDX-License-Identifier: Apache-2.0
"""`optim.share_prompts`: what a config gets, and what is refused before a run begins."""

from functools import partial

import pytest

from jaxmoe.batches.shared_prompts import PromptSharing
from jaxmoe.batches.sharing_from_config import MAX_FRAC, sharing_from_config
from jaxmoe.config import ConfigError
from jaxmoe.config_file import load_config, override
from jaxmoe.model.ops import make_ops
from jaxmoe.run.parts import make_parts
from pallas_kernels import sink_attention

TINY = load_config("tiny.py")  # 16 groups of 16 samples, prompts of 52 tokens, answers of 6


def sharing_of(*changes):
    cfg = override(TINY, *changes)
    return sharing_from_config(cfg, make_ops(cfg).attend)


@pytest.mark.parametrize(
    "changes, expected",
    [
        ((), PromptSharing(51 + 16 * 7, 16, 1, MAX_FRAC)),
        (("optim.share_prompts=on",), PromptSharing(51 + 16 * 7, 16, 1)),
        (("optim.share_prompts=off",), None),
        # whole blocks of batch-invariant attention
        (("model.numerics=invariant",), PromptSharing(32 + 16 * 26, 16, 32, MAX_FRAC)),
        # what a microbatch holds, on each of two devices
        (
            ("optim.tokens_per_microbatch=1200", "mesh.fsdp=2"),
            PromptSharing(10 * 58, 2, 1, MAX_FRAC),
        ),
        (("optim.microbatches=4", "mesh.data=2"), PromptSharing(51 + 16 * 7, 4, 1, MAX_FRAC)),
        # a minibatch of 64 rows is four groups
        (
            ("loss.minibatches=4", "loss.old_logp=recomputed"),
            PromptSharing(51 + 16 * 7, 4, 1, MAX_FRAC),
        ),
        # a microbatch of 8 rows is half a group
        (("optim.microbatches=32",), PromptSharing(51 + 8 * 7, 1, 1, MAX_FRAC)),
        # long answers: a row of full length saves a tenth of the tokens
        (("data.max_prompt_tokens=6", "rollout.max_new_tokens=52"), None),
        (("rollout.samples_per_prompt=1", "loss.advantages=reinforce_pp_advantages"), None),
        # each device has as many tokens of a row, in a zigzag as many of two chunks
        (("mesh.sequence=2",), PromptSharing(51 + 16 * 7 + 1, 16, 1, MAX_FRAC)),
        (
            ("mesh.sequence=4", "mesh.attention=zigzag"),
            PromptSharing(51 + 16 * 7 + 5, 16, 1, MAX_FRAC),
        ),
    ],
)
def test_a_config_gets_rows_that_hold_its_groups(changes, expected):
    assert sharing_of(*changes) == expected


def own_attention(q, k, v, sink, *, q_positions_BT, k_positions_BS, window, **layout):
    return sink_attention(q, k, v, sink, window=window)


def knowing_attention(q, k, v, sink, *, window, k_last_segment_ids_BS=None, **layout):
    return sink_attention(q, k, v, sink, window=window)


@pytest.mark.parametrize(
    "attend, changes, problem",
    [
        (partial(sink_attention, impl=("triton", "xla")), (), "got triton. Try --set kernels=xla"),
        (partial(sink_attention, impl="mosaic_tpu_invariant"), (), "got mosaic_tpu_invariant"),
        (own_attention, (), "own_attention does not"),
    ],
)
def test_runs_that_cannot_share_are_off_or_refused(attend, changes, problem):
    assert sharing_from_config(override(TINY, *changes), attend) is None
    with pytest.raises(ConfigError) as error:
        sharing_from_config(override(TINY, *changes, "optim.share_prompts=on"), attend)
    text = str(error.value)
    assert text.startswith("optim.share_prompts=on needs") and "\n" not in text
    assert problem in text and text.endswith("--set optim.share_prompts=auto.")


def test_an_own_attention_that_knows_shared_keys_shares():
    assert sharing_from_config(TINY, knowing_attention) is not None


@pytest.mark.parametrize("impl", ["mosaic_gpu", "mosaic_tpu", ("mosaic_tpu", "xla")])
def test_the_kernels_of_chips_share(impl):
    attend = partial(sink_attention, impl=impl)
    assert sharing_from_config(TINY, attend) == sharing_of()


def test_a_run_refuses_it_before_it_begins(tmp_path):
    single_samples = "rollout.samples_per_prompt=1", "loss.advantages=reinforce_pp_advantages"
    cfg = override(TINY, *single_samples, "optim.share_prompts=on", f"workdir={tmp_path}")
    with pytest.raises(ConfigError, match="share_prompts=on needs several samples of a prompt"):
        make_parts(cfg)
    assert not list(tmp_path.iterdir())

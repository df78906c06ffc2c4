# SPDX-License-Identifier: Apache-2.0
"""The expression that selects the parameters that train."""

import jax
import numpy as np
import pytest

from jaxmoe.config import ConfigError, OptimConfig
from jaxmoe.config_file import load_config, override
from jaxmoe.model.lora import Pair
from jaxmoe.model.params import count_params
from jaxmoe.model.trainable import count_trained, merge_params, split_params
from jaxmoe.model.weights import weights_of

PARAMS = {
    "embed": np.arange(4.0),
    "layers": {"full": {"w_q": np.ones(2), "w_router": np.ones(3)}, "sliding": {"w_q": Pair(1, 2)}},
}
TINY = load_config("tiny.py")


def paths_of(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves}


@pytest.mark.parametrize(
    ("trainable", "expected"),
    [
        ("embed", {"embed"}),
        (
            "(?!.*router).*",
            {"embed", "layers/full/w_q", "layers/sliding/w_q/a", "layers/sliding/w_q/b"},
        ),
        (".*/b|.*router", {"layers/sliding/w_q/b", "layers/full/w_router"}),
    ],
)
def test_expressions_match_complete_paths_and_parts_merge(trainable, expected):
    trained, frozen = split_params(PARAMS, trainable)
    assert paths_of(trained) == expected
    assert paths_of(frozen) == paths_of(PARAMS) - expected
    merged = merge_params(trained, frozen)
    assert jax.tree.structure(merged) == jax.tree.structure(PARAMS)
    assert all(
        a is b for a, b in zip(jax.tree.leaves(merged), jax.tree.leaves(PARAMS), strict=True)
    )


@pytest.mark.parametrize("trainable", [".*", "embed|layers/.*"])
def test_if_everything_trains_nothing_is_split(trainable):
    trained, frozen = split_params(PARAMS, trainable)
    assert trained is PARAMS and frozen is None and merge_params(trained, frozen) is PARAMS


@pytest.mark.parametrize(
    ("trainable", "suggestion"),
    [
        ("router", "'.*router.*'"),  # as re.search would match
        (".*w_rooter", "'.*w_router.*'"),  # misspelt
        ("", "'(?!.*router).*'"),
        ("critic/.*", "'(?!.*router).*'"),
    ],
)
def test_an_expression_that_matches_nothing_gets_advice(trainable, suggestion):
    with pytest.raises(ConfigError, match="complete path") as error:
        split_params(PARAMS, trainable)
    message = str(error.value)
    assert "\n" not in message and "layers/full/w_router" in message and repr(trainable) in message
    assert message.endswith(f"Try --set optim.trainable={suggestion}.")
    split_params(PARAMS, suggestion.strip("'"))


def test_an_invalid_expression_is_one_line():
    with pytest.raises(ConfigError, match="regular expression") as error:
        OptimConfig(lr=1e-3, trainable="(router")
    assert "unterminated" in str(error.value) and "\n" not in str(error.value)
    assert "Try --set optim.trainable=" in str(error.value)


def test_the_trained_parameters_are_counted_without_padding():
    cfg = override(TINY, "model.vocab_multiple=128")
    m, total = cfg.model, count_params(cfg.model)[0]
    assert count_trained(cfg) == (total, total)
    head = override(cfg, "optim.trainable=head")
    assert m.padded_vocab > m.vocab_size
    assert count_trained(head) == (m.d_model * m.vocab_size, total)
    router = override(TINY, "optim.trainable=(?!.*router).*")
    size = m.n_layers * (m.d_model + 1) * m.n_experts
    assert count_trained(router) == (total - size, total)


def test_a_lora_runs_adapters_are_counted():
    cfg = override(TINY, "lora.attention_rank=2", "lora.targets=w_q", "warmup.steps=0")
    pairs = jax.tree.leaves(weights_of(cfg).trained)
    n_of_pair = sum(int(np.prod(spec.shape)) for spec in pairs)
    assert count_trained(cfg) == (n_of_pair, count_params(cfg.model)[0] + n_of_pair)
    only_b = override(cfg, "optim.trainable=.*/b")
    assert 0 < count_trained(only_b)[0] < n_of_pair
    with pytest.raises(ConfigError, match="matches none"):  # nor may the warm start have nothing
        count_trained(override(only_b, "warmup.steps=1"))

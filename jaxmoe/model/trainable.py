# SPDX-License-Identifier: Apache-2.0
"""The parameters that train, selected by a regular expression over their paths.

    trained, frozen = split_params(params, "(?!.*router).*")  # all but the routers
    params = merge_params(trained, frozen)

Paths are "embed" or "layers/full/w_router", and of adapters "layers/full/w_q/a". The expression
must match a complete path, as re.fullmatch does. Both parts have the structure of the tree, with
None in place of the leaves of the other part. jax has no leaf there, so that a frozen parameter has
neither a gradient nor moments.
Next: jaxmoe/rl/state.py stores both parts.
"""

import difflib
import re
import shlex

import jax

from jaxmoe.config import Config, ConfigError
from jaxmoe.model.params import Spec, count_params, param_specs, unpadded_size
from jaxmoe.model.weights import weights_of
from jaxmoe.shapes import Params


def split_params(params: Params, trainable: str) -> tuple[Params, Params | None]:
    """Return the parameters whose paths match `trainable`, and the others; None if there is none.

    Raises ConfigError if no path matches.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(params)
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    matches = [re.fullmatch(trainable, path) is not None for path in paths]
    # Without frozen parameters the tree is unchanged, and so is the structure of a checkpoint.
    if all(matches):
        return params, None
    if not any(matches):
        suggestion = _suggest_expression(trainable, paths)
        raise ConfigError(
            "optim.trainable must match the complete path of some parameter, such as "
            f"{', '.join(paths[:: -(-len(paths) // 5)])}; {trainable!r} matches none. "
            f"Try --set optim.trainable={shlex.quote(suggestion)}.",
        )
    trained, frozen = (
        [
            leaf if match == selected else None
            for (_, leaf), match in zip(leaves, matches, strict=True)
        ]
        for selected in (True, False)
    )
    return jax.tree.unflatten(tree, trained), jax.tree.unflatten(tree, frozen)


def _suggest_expression(trainable: str, paths: list[str]) -> str:
    """Return an expression that matches: the same within a path, or with the most similar name."""
    unanchored = f".*{trainable}.*"
    if trainable and any(re.fullmatch(unanchored, path) for path in paths):
        return unanchored
    names = {part for path in paths for part in path.split("/")}
    for word in re.findall(r"\w+", trainable):
        if similar := difflib.get_close_matches(word, names, 1):
            return f".*{similar[0]}.*"
    return "(?!.*router).*"


def merge_params(trained: Params, frozen: Params | None) -> Params:
    """Return the complete parameters; the inverse of `split_params`."""
    if frozen is None:
        return trained
    return jax.tree.map(
        lambda x, y: y if x is None else x, trained, frozen, is_leaf=lambda x: x is None
    )


def count_trained(cfg: Config) -> tuple[int, int]:
    """Return (parameters that RL trains, all parameters), of the policy with its adapters.

    Raises ConfigError if optim.trainable matches no parameter of a stage of the run, or if settings
    of the router have nothing of it to train.
    """
    if cfg.warmup.steps:
        split_params(param_specs(cfg.model), cfg.trainable)
    specs = weights_of(cfg).trained
    trained, _ = split_params(specs, cfg.trainable)
    _check_router_trains(cfg, trained)

    def size(leaves: list[Spec]) -> int:
        return sum(unpadded_size(spec, cfg.model) for spec in leaves)

    adapters = [spec for spec in jax.tree.leaves(specs) if not spec.hf]  # not in a checkpoint
    return size(jax.tree.leaves(trained)), count_params(cfg.model)[0] + size(adapters)


def _check_router_trains(cfg: Config, trained: Params) -> None:
    r = cfg.router
    settings = {"router.terms": (r.terms, "''"), "router.lr_scale": (r.lr_scale, "1.0")}
    needed = {"router.terms": bool(r.term_weights), "router.lr_scale": r.lr_scale != 1.0}
    leaves = jax.tree_util.tree_leaves_with_path(trained)
    if any("_router" in jax.tree_util.keystr(path) for path, _ in leaves):
        return
    train = "lora.modules_to_save=router" if cfg.lora.ranks else "'optim.trainable=.*'"
    for key in (key for key, is_set in needed.items() if is_set):
        value, default = settings[key]
        raise ConfigError(
            f"{key}={value} needs routers that train, and this run trains none of their "
            f"parameters. Try --set {train}, or --set {key}={default}."
        )

# SPDX-License-Identifier: Apache-2.0
"""The product's float32 functions, evaluated in float64.

The model and the losses compute in float32 by design, so an identity of the mathematics holds in
them to 1e-7 only. Here a function is traced as it is, and each operation of the trace is evaluated
with float64 in the place of float32. Next: studies/micro_model.py.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal

FLOAT32, FLOAT64 = np.dtype("float32"), np.dtype("float64")
# These read the bits of a number, and mean 32 of them.
_BITWISE = {"bitcast_convert_type", "reduce_precision", "pallas_call"}

_SCATTERS = {"scatter": lax.scatter, "scatter-add": lax.scatter_add}


def in_float64(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` with float64 in the place of every float32, to be called in x64 mode.

        with jax.enable_x64(True):
            gradient = in_float64(jax.grad(loss))(params)

    Arguments are trees of arrays. Take derivatives inside `function`, because custom derivatives
    are not part of its trace. Constants that float32 has rounded stay rounded.
    Raises NotImplementedError for a function that depends on the bits of float32.
    """

    def call_in_float64(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        narrow = [jax.ShapeDtypeStruct(np.shape(x), _narrow_dtype(x)) for x in leaves]
        # In x64 mode, Python scalars and `jnp.arange` would have other types in the trace.
        with jax.enable_x64(False):
            closed, shapes = jax.make_jaxpr(function, return_shape=True)(
                *jax.tree.unflatten(tree, narrow)
            )
        outputs = _evaluate_jaxpr(closed, [_widen_array(x) for x in leaves])
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

    return call_in_float64


def _evaluate_jaxpr(closed: Any, args: Sequence[Any]) -> list[Any]:
    """Evaluate a trace, closed or open, on float64 arguments."""
    jaxpr, consts = closed, ()
    if isinstance(closed, ClosedJaxpr):
        jaxpr, consts = closed.jaxpr, closed.consts
    values: dict[Any, Any] = {}

    def read_atom(atom: Any) -> Any:
        return _widen_array(atom.val) if isinstance(atom, Literal) else values[atom]

    values.update(zip(jaxpr.constvars, map(_widen_array, consts), strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))
    for eqn in jaxpr.eqns:
        results = _evaluate_equation(eqn, [read_atom(atom) for atom in eqn.invars])
        values.update(zip(eqn.outvars, results, strict=True))
    return [read_atom(atom) for atom in jaxpr.outvars]


def _evaluate_equation(eqn: Any, args: list[Any]) -> Sequence[Any]:
    name, params = eqn.primitive.name, dict(eqn.params)
    if name in _BITWISE:
        raise NotImplementedError(f"{name} depends on the bits of float32.")
    if name == "scan":
        return _evaluate_scan(eqn, args)
    if name == "while":
        return _evaluate_while(params, args)
    if name == "cond":
        branches = [partial(_evaluate_branch, branch) for branch in params["branches"]]
        return lax.switch(args[0], branches, *args[1:])
    if name in _SCATTERS:
        # The parameters of a scatter include a trace of its own.
        names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
        return [_SCATTERS[name](*args, **{key: params[key] for key in names})]
    inner = params.get("jaxpr") or params.get("call_jaxpr") or params.get("fun_jaxpr")
    if inner is not None:  # jit, remat, a function with a custom derivative
        return _evaluate_jaxpr(inner, args)
    for key, value in params.items():
        if isinstance(value, type | np.dtype) and np.dtype(value) == FLOAT32:
            params[key] = FLOAT64
    result = eqn.primitive.bind(*args, **params)
    return result if eqn.primitive.multiple_results else [result]


def _evaluate_scan(eqn: Any, args: list[Any]) -> Sequence[Any]:
    params = eqn.params
    inner = getattr(params["jaxpr"], "jaxpr", params["jaxpr"])
    # The names of the numbers of constants and carries differ between versions of jax. A scanned
    # array has one axis more outside of the body.
    n_xs = _count_scanned(eqn.invars, inner.invars)
    n_carry = len(eqn.outvars) - _count_scanned(eqn.outvars, inner.outvars)
    n_consts = len(args) - n_carry - n_xs
    consts, carry, xs = args[:n_consts], args[n_consts : len(args) - n_xs], args[len(args) - n_xs :]

    def run_body(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        out = _evaluate_jaxpr(params["jaxpr"], [*consts, *carry, *x])
        return out[:n_carry], out[n_carry:]

    carry, ys = lax.scan(run_body, carry, xs, params["length"], reverse=params["reverse"])
    return [*carry, *ys]


def _count_scanned(outer: Sequence[Any], inner: Sequence[Any]) -> int:
    return sum(x.aval.ndim > y.aval.ndim for x, y in zip(outer, inner, strict=True))


def _evaluate_while(params: dict[str, Any], args: list[Any]) -> Sequence[Any]:
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, body_consts = args[:n_cond], args[n_cond : n_cond + n_body]
    return lax.while_loop(
        lambda carry: _evaluate_jaxpr(params["cond_jaxpr"], [*cond_consts, *carry])[0],
        lambda carry: _evaluate_jaxpr(params["body_jaxpr"], [*body_consts, *carry]),
        args[n_cond + n_body :],
    )


def _evaluate_branch(branch: Any, *args: Any) -> list[Any]:
    return _evaluate_jaxpr(branch, args)


def _narrow_dtype(x: Any) -> np.dtype:
    dtype = np.dtype(x.dtype if hasattr(x, "dtype") else type(x))
    return FLOAT32 if dtype == FLOAT64 else dtype


def _widen_array(x: Any) -> Any:
    x = jnp.asarray(x)
    return x.astype(FLOAT64) if x.dtype == FLOAT32 else x

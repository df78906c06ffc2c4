# SPDX-License-Identifier: Apache-2.0
"""The child process of a check: one implementation of one operation, case by case.

It reports each case before it starts, so that its parent knows where it hung or died.
Next: child.py, which starts it.
"""

import importlib
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxlib import version as jaxlib_version

from pallas_kernels.bench.measure import JittedOp, first_line, generate_inputs
from pallas_kernels.bench.ops import OPS, Op
from pallas_kernels.check import compare
from pallas_kernels.check.cases import select_hard_cases
from pallas_kernels.check.sampled import (
    mask_cotangents,
    run_references,
    sample_rows,
    select_compared,
)
from pallas_kernels.dispatch import KernelUnsupported

# Begins each line that is for the parent: libraries and drivers print to the same stream.
MARK = "kernel check: "
N_REPEATS = 3  # calls that must return the same bits


def main(request: str) -> None:
    """Run the JSON request {operation, impl, dtype, real}; {} asks for the device only."""
    fields = json.loads(request)
    send_message(chip=describe_chip())
    if fields:
        for message in check_cases(**fields):
            send_message(**message)
    send_message(done=True)


def send_message(**message: Any) -> None:
    print(MARK + json.dumps(message), flush=True)


def describe_chip() -> dict[str, str]:
    """Open the device and return what verdicts depend on: platform, kind, driver, jax version."""
    device, driver = jax.devices()[0], Path("/proc/driver/nvidia/version")
    try:
        version = driver.read_text().splitlines()[0] if device.platform == "gpu" else ""
    except OSError:
        version = ""
    return {
        "platform": device.platform,
        "kind": device.device_kind,
        "driver": " ".join(f"{device.client.platform_version} {version}".split()),
        "jax": f"{jax.__version__} {jaxlib_version.__version__}",
    }


def check_cases(
    operation: str, impl: str, dtype: str, real: list[dict[str, Any]] | None
) -> Iterator[dict[str, Any]]:
    """Yield {begin} and then {case, fault, refused, own} for each case.

    Cases of the run's own sizes (`own`), whose fields are `real`, come last. Their field "op" is a
    name of `bench.ops.OPS`, by default the operation's. The first fault ends the check; so does
    {unable}, when the device runs out of memory.
    `impl` is a name, or module:function of a function (op, case) -> call.
    """
    cases = [(op, case, False) for op, case in select_hard_cases(operation, impl)]
    for fields in real or ():
        op = OPS[fields.get("op", operation)]
        cases.append((op, case_from_json(operation, fields), True))
    for op, case, is_run_case in cases:
        yield {"begin": case.name}
        fault, refused = None, None
        try:
            fault = find_fault(replace_implementation(op, impl), case, impl, dtype)
        except (NotImplementedError, ImportError) as error:
            # Without the advice of a direct call, which a run does not make.
            refused = error.reason if isinstance(error, KernelUnsupported) else first_line(error)
        except Exception as error:  # tracing, the compiler or the device may raise anything
            message = f"{type(error).__name__}: {first_line(error)}"
            if is_out_of_memory(error):
                yield {"unable": message}
                return
            fault = f"it raised {message}"
        yield {"case": case.name, "fault": fault, "refused": refused, "own": is_run_case}
        if fault:
            return


def is_out_of_memory(error: Exception) -> bool:
    """True for XLA's error with the status RESOURCE_EXHAUSTED; its text may come from a kernel."""
    is_from_xla = isinstance(error, jax.errors.JaxRuntimeError)
    return is_from_xla and getattr(error, "error_code_string", "") == "RESOURCE_EXHAUSTED"


def case_from_json(operation: str, fields: dict[str, Any]) -> Any:
    """Make a case from its fields in JSON, where tuples are lists; "op" is none of them."""
    kind = type(OPS[operation].cases.TEST_CASES[0])
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    values.pop("op", None)
    return kind(**values)


def replace_implementation(op: Op, impl: str) -> Op:
    """The operation, with its call replaced if `impl` is module:function."""
    if ":" not in impl:
        return op
    module, _, function = impl.partition(":")
    make_call = getattr(importlib.import_module(module), function)

    def call(case: Any, name: Any) -> Callable[..., Any]:
        return make_call(op, case) if name == impl else op.call(case, name)

    return replace(op, call=call)


def find_fault(
    op: Op,
    case: Any,
    impl: str,
    dtype: Any,
    repeats: int = N_REPEATS,
    hold_device: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> str | None:
    """Describe the first wrong result, or a difference between calls; None if all is correct.

    A large case is compared in sampled rows (sampled.py). The implementation is compiled before
    anything runs; then all is done in the context that `hold_device` returns.
    Raises: NotImplementedError when the implementation does not support the shapes.
    """
    jitted = JittedOp(op, case, impl)
    input_shapes = jax.eval_shape(partial(op.inputs, case, jnp.dtype(dtype)), 1)
    shapes = jax.eval_shape(op.call(case, "reference"), *input_shapes)
    jitted.compile(input_shapes, shapes if op.differentiated else None)
    with hold_device():
        return _find_fault_compiled(op, case, jitted, shapes, dtype, repeats)


def _find_fault_compiled(
    op: Op, case: Any, jitted: JittedOp, shapes: Any, dtype: Any, repeats: int
) -> str | None:
    """`find_fault` of a compiled implementation, whose results have these shapes."""
    inputs = generate_inputs(op, case, jnp.dtype(dtype), 1)
    row_ids, ct = sample_rows(op, inputs), None
    if op.differentiated:
        shapes_flat, tree = jax.tree.flatten(shapes)
        keys = jax.random.split(jax.random.key(2), len(shapes_flat))
        leaves = [
            jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, shapes_flat, strict=True)
        ]
        ct = mask_cotangents(op, jax.tree.unflatten(tree, leaves), row_ids)
    first_results = run_passes(jitted, inputs, ct)
    # A race or a sum in no fixed order shows as a difference between calls.
    for _ in range(repeats - 1):
        for name, a, b in zip(
            op.results, first_results, run_passes(jitted, inputs, ct), strict=False
        ):
            if not bool(_same_bits(a, b)):
                return f"{name} has different bits in two calls with the same inputs"
    # Only samples are compared below, but a gradient must be finite everywhere.
    gradients = zip(
        op.results[-op.differentiated :], first_results[-op.differentiated :], strict=True
    )
    for name, x in gradients if ct is not None else ():
        if not bool(jnp.all(jnp.isfinite(x))):
            return f"{name} is not finite everywhere"
    actual = select_compared(op, first_results, row_ids)
    naive, expected = run_references(op, case, inputs, ct, row_ids)
    outputs = len(op.results) - op.differentiated
    return compare.find_wrong_result(op.results, actual, naive, expected, dtype, outputs)


@jax.jit
def _same_bits(a: jax.Array, b: jax.Array) -> jax.Array:
    # As numbers a NaN differs from itself, and −0 equals 0.
    bits = jnp.dtype(f"uint{8 * a.dtype.itemsize}")
    a, b = (jax.lax.bitcast_convert_type(x, bits) for x in (a, b))
    return jnp.all(a == b)


def run_passes(jitted: JittedOp, inputs: tuple[Any, ...], ct: Any) -> list[Any]:
    """Run the passes and return the outputs, then the gradients."""
    runs = jitted.passes(inputs, ct)
    return [x for run in runs.values() for x in jax.block_until_ready(jax.tree.leaves(run()))]

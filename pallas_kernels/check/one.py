# SPDX-License-Identifier: Apache-2.0
"""What the process of a check does: one operation in one implementation, case by case.

It says what it begins before it begins it, so that whoever waits knows where it hung or died.
Next: child.py, which starts it.
"""

import importlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxlib import version as jaxlib_version

from pallas_kernels.bench.measure import Ours, first_line, values
from pallas_kernels.bench.ops import OPS, Op, float32
from pallas_kernels.check import compare
from pallas_kernels.check.cases import HOSTILE
from pallas_kernels.check.sampled import cut_inputs, cut_results, only, sample

MARK = "kernel check: "  # before each line that is for the parent
TIMES = 3  # the same bits


def main(request: str) -> None:
    """Of a request {operation, impl, dtype, real} in JSON; {} asks for the chip alone."""
    asked = json.loads(request)
    tell(chip=chip())
    if asked:
        for said in lines(**asked):
            tell(**said)
    tell(done=True)


def tell(**said: Any) -> None:
    print(MARK + json.dumps(said), flush=True)


def chip() -> dict[str, str]:
    """What a verdict is about, beside the kernels: opens the device."""
    device, driver = jax.devices()[0], Path("/proc/driver/nvidia/version")
    try:
        version = driver.read_text().splitlines()[0] if device.platform == "gpu" else ""
    except OSError:
        version = ""
    return {
        "platform": device.platform, "kind": device.device_kind,
        "driver": " ".join(f"{device.client.platform_version} {version}".split()),
        "jax": f"{jax.__version__} {jaxlib_version.__version__}",
    }  # fmt: skip


def lines(
    operation: str, impl: str, dtype: str, real: dict[str, Any] | None
) -> Iterator[dict[str, Any]]:
    """{begin} and then {case, fault, refused} of each case; the run's real size comes last.

    It ends with the first fault, or with {unable} where the device has no memory.
    `impl` is a name, or module:function of one that takes (op, case) and returns the call.
    """
    cases = list(HOSTILE[operation])
    if real is not None:
        cases.append((OPS[operation], case_of(operation, real)))
    for op, case in cases:
        yield {"begin": case.name}
        found, refused = None, None
        try:
            found = fault(operation, named(op, impl), case, impl, dtype)
        except (NotImplementedError, ImportError) as error:
            refused = first_line(error)
        except Exception as error:  # whatever tracing, a compiler or the device says
            said = f"{type(error).__name__}: {first_line(error)}"
            if "RESOURCE_EXHAUSTED" in said:
                yield {"unable": said}
                return
            found = f"it ended with {said}"
        yield {"case": case.name, "fault": found, "refused": refused}
        if found:
            return


def case_of(operation: str, fields: dict[str, Any]) -> Any:
    """A case from its fields as JSON has them."""
    kind = type(OPS[operation].cases.TEST_CASES[0])
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})


def named(op: Op, impl: str) -> Op:
    """The operation, its call replaced where `impl` is somebody else's."""
    if ":" not in impl:
        return op
    module, _, function = impl.partition(":")
    make = getattr(importlib.import_module(module), function)

    def call(case: Any, name: Any) -> Callable[..., Any]:
        return make(op, case) if name == impl else op.call(case, name)

    return replace(op, call=call)


def fault(operation: str, op: Op, case: Any, impl: str, dtype: str) -> str | None:
    """What is wrong with the results, or that they differ between calls; None where all is right.

    Raises NotImplementedError where the implementation refuses the shapes.
    """
    inputs = op.inputs(case, jnp.dtype(dtype), 1)
    at = sample(operation, inputs)
    ct = None
    if op.differentiated:
        shapes = jax.eval_shape(op.call(case, "reference"), *inputs)
        leaves, tree = jax.tree.flatten(shapes)
        keys = jax.random.split(jax.random.key(2), len(leaves))
        made = [jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)]
        ct = jax.tree.unflatten(tree, [only(operation, x, at) for x in made])
    ours = Ours(op, case, impl)
    runs = [results(ours, inputs, ct) for _ in range(TIMES)]
    for name, *again in zip(op.results, *runs, strict=False):
        if any(np.asarray(x).tobytes() != np.asarray(again[0]).tobytes() for x in again[1:]):
            return f"{name} has other bits in another call with the same inputs"
    gradients = zip(op.results[-op.differentiated :], runs[0][-op.differentiated :], strict=True)
    for name, x in gradients if ct is not None else ():
        if not bool(jnp.all(jnp.isfinite(x))):
            return f"{name} is not finite everywhere"
    small = cut_inputs(operation, inputs, at)
    cts = None if ct is None else jax.tree.unflatten(
        jax.tree.structure(ct), cut_results(operation, op.results, jax.tree.leaves(ct), at)
    )  # fmt: skip
    plain = values(op, case, small, cts)
    # Partial results in float32: TPUs and GPUs would otherwise round the reference's own products.
    with jax.default_matmul_precision("highest"):
        wide = jax.tree.map(lambda x: x.astype(jnp.float32), cts)
        right = values(op, case, float32(small), wide)
    got = cut_results(operation, op.results, runs[0], at)
    outputs = len(op.results) - op.differentiated
    return compare.fault(op.results, got, plain, right, dtype, outputs)


def results(ours: Ours, inputs: tuple[Any, ...], ct: Any) -> list[Any]:
    """Outputs, then gradients; the outputs of the backward's own forward must be the same."""
    runs = ours.passes(inputs, ct)
    return [x for run in runs.values() for x in jax.block_until_ready(jax.tree.leaves(run()))]

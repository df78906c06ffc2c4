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
from jaxlib import version as jaxlib_version

from pallas_kernels.bench.measure import Ours, drawn, first_line
from pallas_kernels.bench.ops import OPS, Op
from pallas_kernels.check import compare
from pallas_kernels.check.cases import HOSTILE
from pallas_kernels.check.sampled import looked_at, only, references, sample

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
    operation: str, impl: str, dtype: str, real: list[dict[str, Any]] | None
) -> Iterator[dict[str, Any]]:
    """{begin} and then {case, fault, refused, own} of each case; those of the run's own sizes, of
    which `real` has the fields, come last.

    It ends with the first fault, or with {unable} where the device has no memory.
    `impl` is a name, or module:function of one that takes (op, case) and returns the call.
    """
    cases = [(op, case, False) for op, case in HOSTILE[operation]]
    cases += [(OPS[operation], case_of(operation, fields), True) for fields in real or ()]
    for op, case, own in cases:
        yield {"begin": case.name}
        found, refused = None, None
        try:
            found = fault(named(op, impl), case, impl, dtype)
        except (NotImplementedError, ImportError) as error:
            refused = first_line(error)
        except Exception as error:  # whatever tracing, a compiler or the device says
            said = f"{type(error).__name__}: {first_line(error)}"
            if "RESOURCE_EXHAUSTED" in said:
                yield {"unable": said}
                return
            found = f"it ended with {said}"
        yield {"case": case.name, "fault": found, "refused": refused, "own": own}
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


def fault(op: Op, case: Any, impl: str, dtype: Any, times: int = TIMES) -> str | None:
    """What is wrong with the results, or that they differ between calls; None where all is right.

    A large case is looked at in sampled rows (sampled.py).
    Raises NotImplementedError where the implementation refuses the shapes.
    """
    inputs = drawn(op, case, jnp.dtype(dtype), 1)
    at, ct = sample(op, inputs), None
    if op.differentiated:
        shapes = jax.eval_shape(op.call(case, "reference"), *inputs)
        leaves, tree = jax.tree.flatten(shapes)
        keys = jax.random.split(jax.random.key(2), len(leaves))
        made = [jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)]
        ct = only(op, jax.tree.unflatten(tree, made), at)
    ours = Ours(op, case, impl)
    first = results(ours, inputs, ct)
    for _ in range(times - 1):
        for name, a, b in zip(op.results, first, results(ours, inputs, ct), strict=False):
            if not bool(_same_bits(a, b)):
                return f"{name} has other bits in another call with the same inputs"
    gradients = zip(op.results[-op.differentiated :], first[-op.differentiated :], strict=True)
    for name, x in gradients if ct is not None else ():
        if not bool(jnp.all(jnp.isfinite(x))):
            return f"{name} is not finite everywhere"
    got = looked_at(op, first, at)
    plain, right = references(op, case, inputs, ct, at)
    outputs = len(op.results) - op.differentiated
    return compare.fault(op.results, got, plain, right, dtype, outputs)


@jax.jit
def _same_bits(a: jax.Array, b: jax.Array) -> jax.Array:
    bits = jnp.dtype(f"uint{8 * a.dtype.itemsize}")
    a, b = (jax.lax.bitcast_convert_type(x, bits) for x in (a, b))
    return jnp.all(a == b)


def results(ours: Ours, inputs: tuple[Any, ...], ct: Any) -> list[Any]:
    """Outputs, then gradients."""
    runs = ours.passes(inputs, ct)
    return [x for run in runs.values() for x in jax.block_until_ready(jax.tree.leaves(run()))]

# SPDX-License-Identifier: Apache-2.0
"""What the compiler of a chip that is not here says of an operation at its real sizes."""

import time
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.ahead_of_time import compile_for, missing
from pallas_kernels.bench.ops import Op


def figures(op: Op, impl: str, dtype: Any, chip: str, chosen: tuple[Any, ...]) -> str:
    """A table: registers and spills of each kernel, device memory, seconds of compilation.

    Raises: SystemExit where the chip's compiler is missing.
    """
    reason = missing(chip)
    if reason:
        raise SystemExit(reason)
    lines = [f"{'case':<16}{'pass':<20}{'registers':<18}{'spills':<10}{'temp MB':>9}{'s':>7}"]
    for case in chosen:
        inputs = jax.eval_shape(lambda case=case: op.inputs(case, dtype, 0))
        call, n = op.call(case, impl), op.differentiated

        def both(*x: Any, call: Any = call, n: int = n) -> Any:
            out, pull = jax.vjp(lambda *d: call(*d, *x[n:]), *x[:n])
            return out, pull(jax.tree.map(jnp.ones_like, out))

        for name, fn in (("forward", call), ("forward+backward", both))[: 2 if n else 1]:
            start = time.perf_counter()
            found = compile_for(chip, lambda *x, fn=fn: fn(*x), *inputs)
            registers = " ".join(str(k.registers) for k in found.kernels)
            spills = " ".join(str(k.spills) for k in found.kernels)
            lines.append(
                f"{case.name:<16}{name:<20}{registers:<18}{spills:<10}"
                f"{1e-6 * found.temp_bytes:>9.1f}{time.perf_counter() - start:>7.1f}"
            )
    return "\n".join(lines)

# SPDX-License-Identifier: Apache-2.0
"""What the compiler of a chip that is not here says of an operation at its real sizes."""

import time
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.ahead_of_time import GPUS, compile_for
from pallas_kernels.bench.measure import first_line
from pallas_kernels.bench.ops import Op


def figures(op: Op, impl: str, dtype: Any, chip: str, chosen: tuple[Any, ...]) -> tuple[str, bool]:
    """A table, and whether anything compiled: registers, spills and on-chip memory of each kernel,
    device memory, seconds. A kernel that a row above has is "above" where JAX does not compile it
    again; a row that is refused gives the reason and the next one follows.
    """
    gpu, compiled = chip in GPUS, False
    columns = ("registers", "spills", "shared KiB") if gpu else ("VMEM MiB",)
    heads = "".join(f"{x:<18}" for x in columns)
    lines = [f"{'case':<19}{'pass':<20}{heads}{'temp MB':>9}{'s':>7}"]
    for case in chosen:
        inputs = jax.eval_shape(lambda case=case: op.inputs(case, dtype, 0))
        call, n = op.call(case, impl), op.differentiated

        def both(*x: Any, call: Any = call, n: int = n) -> Any:
            out, pull = jax.vjp(lambda *d: call(*d, *x[n:]), *x[:n])
            return out, pull(jax.tree.map(jnp.ones_like, out))

        for name, fn in (("forward", call), ("forward+backward", both))[: 2 if n else 1]:
            start = time.perf_counter()
            try:
                found = compile_for(chip, lambda *x, fn=fn: fn(*x), *inputs)
            except Exception as error:  # whatever tracing, lowering or the compiler refuse
                lines.append(f"{case.name:<19}{name:<20}refused: {first_line(error)}")
                continue
            compiled = True
            seconds, kernels = time.perf_counter() - start, found.kernels
            if gpu:
                each = [[k.registers for k in kernels], [k.spills for k in kernels],
                        [-(-k.shared // 1024) for k in kernels]]  # fmt: skip
                again = found.mosaic_calls - len(kernels)
                each = [[*x, *["above"] * again] for x in each]
            else:
                each = [[f"{x / 2**20:.1f}" for x in found.vmem_bytes]]
            cells = "".join(f"{' '.join(map(str, x)):<18}" for x in each)
            lines.append(
                f"{case.name:<19}{name:<20}{cells}{1e-6 * found.temp_bytes:>9.1f}{seconds:>7.1f}"
            )
            lines += [f"  {warning}" for k in kernels for warning in k.warnings]
    return "\n".join(lines), compiled

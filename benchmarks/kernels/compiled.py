# SPDX-License-Identifier: Apache-2.0
"""Compile an operation at its real sizes for another machine's chip, and print the figures."""

import time
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.ahead_of_time import GPUS, compile_for
from pallas_kernels.bench.measure import first_line
from pallas_kernels.bench.ops import Op


def compile_table(
    op: Op, impl: str, dtype: Any, chip: str, chosen: tuple[Any, ...]
) -> tuple[str, bool]:
    """Return a table, and True if any case compiled.

    Columns: registers, spills and on-chip memory of each kernel, device memory, seconds. "above"
    stands for a kernel of an earlier row, which JAX does not compile again. A case that the
    compiler refuses has the reason in its row.
    """
    gpu, compiled = chip in GPUS, False
    columns = ("registers", "spills", "shared KiB") if gpu else ("VMEM MiB",)
    heads = "".join(f"{x:<18}" for x in columns)
    lines = [f"{'case':<19}{'pass':<20}{heads}{'temp MB':>9}{'s':>7}"]
    for case in chosen:
        inputs = jax.eval_shape(lambda case=case: op.inputs(case, dtype, 0))
        call, n = op.call(case, impl), op.differentiated

        def forward_backward(*x: Any, call: Any = call, n: int = n) -> Any:
            out, pull = jax.vjp(lambda *d: call(*d, *x[n:]), *x[:n])
            return out, pull(jax.tree.map(jnp.ones_like, out))

        for name, fn in (("forward", call), ("forward+backward", forward_backward))[
            : 2 if n else 1
        ]:
            start = time.perf_counter()
            try:
                result = compile_for(chip, lambda *x, fn=fn: fn(*x), *inputs)
            except Exception as error:  # tracing, lowering or the compiler may raise anything
                lines.append(f"{case.name:<19}{name:<20}refused: {first_line(error)}")
                continue
            compiled = True
            seconds, kernels = time.perf_counter() - start, result.kernels
            if gpu:
                cell_values = [
                    [k.registers for k in kernels],
                    [k.spills for k in kernels],
                    [-(-k.shared // 1024) for k in kernels],
                ]
                n_cached = result.mosaic_calls - len(kernels)
                cell_values = [[*x, *["above"] * n_cached] for x in cell_values]
            else:
                cell_values = [[f"{x / 2**20:.1f}" for x in result.vmem_bytes]]
            cells = "".join(f"{' '.join(map(str, x)):<18}" for x in cell_values)
            lines.append(
                f"{case.name:<19}{name:<20}{cells}{1e-6 * result.temp_bytes:>9.1f}{seconds:>7.1f}"
            )
            lines += [f"  {warning}" for k in kernels for warning in k.warnings]
    return "\n".join(lines), compiled

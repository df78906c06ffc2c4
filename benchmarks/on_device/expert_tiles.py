# SPDX-License-Identifier: Apache-2.0
"""A stage: the forms of the Hopper kernel of four-bit experts, each right, then timed in turn.

    python -m benchmarks.on_device.expert_tiles
    JAX_PLATFORMS=cpu python -m benchmarks.on_device.expert_tiles --compile h200
    JAX_PLATFORMS=cpu python -m benchmarks.on_device.expert_tiles --interpret

Both products of GPT-OSS 20B with few and with many rows. `mxfp4_forms.choose_form` has what is
best. Times have the small programs of a call in them (the table of tiles, the bias in float32), but
no launches by Python: a program calls the kernel many times.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.on_device.stage import device_alone, report
from pallas_kernels import ahead_of_time
from pallas_kernels.grouped_matmul.cases import zipf_sizes
from pallas_kernels.grouped_matmul.hopper import mxfp4_forms, pallas_gpu_mxfp4
from pallas_kernels.grouped_matmul.hopper.pallas_gpu_rows import Swiglu
from pallas_kernels.grouped_matmul.mxfp4 import GROUP, Mxfp4, mxfp4_to_dense
from pallas_kernels.grouped_matmul.swiglu import apply_swiglu

ALPHA, LIMIT = 1.702, 7.0
FEW = (
    "SINGLE_DECODER",
    "TWO_DECODERS",
    "FEW_ROWS",
    "FEW_ROWS_TWO_DECODERS",
    "FEW_ROWS_ONE_FETCHER",
)
MANY = ("SINGLE_DECODER", "TWO_DECODERS", "FEW_ROWS")
SAMPLES = 64  # rows and columns that are compared


class Size(NamedTuple):
    """Experts of [D, 2F] and of [F, D]."""

    experts: int
    width: int  # D = F of GPT-OSS
    rows: tuple[int, ...]


REAL = Size(32, 2880, (256, 1024, 98_304))
TOY = Size(3, 128, (20, 200))


class Product(NamedTuple):
    """One of the two products at one number of rows."""

    name: str
    rows: int
    inner: int
    columns: int  # of the matrices
    sizes: tuple[int, ...]

    def run(self, form: mxfp4_forms.Form, interpret: bool, lhs: Any, rhs: Any, bias: Any) -> Any:
        """The kernel's result."""
        sizes = jnp.asarray(self.sizes, jnp.int32)
        if self.name == "gate_up":
            swiglu = Swiglu(ALPHA, LIMIT, False)
            return pallas_gpu_mxfp4.multiply_swiglu_mxfp4_hopper(
                lhs, rhs, sizes, bias, swiglu, interpret, form=form
            )[0]
        return pallas_gpu_mxfp4.multiply_rows_mxfp4_hopper(
            lhs, rhs, sizes, bias, False, interpret, form=form
        )

    @property
    def out_columns(self) -> int:
        """Columns of the result."""
        return self.columns // 2 if self.name == "gate_up" else self.columns

    def shapes(self) -> tuple[Any, ...]:
        """lhs, rhs, bias."""
        E, array = len(self.sizes), jax.ShapeDtypeStruct
        nibbles: Any = array((E, self.inner // 2, self.columns), jnp.uint8)
        scales: Any = array((E, self.inner // GROUP, self.columns), jnp.uint8)
        rows, bias = (self.rows, self.inner), (E, self.columns)
        return array(rows, jnp.bfloat16), Mxfp4(nibbles, scales), array(bias, jnp.bfloat16)

    def read_bytes(self) -> int:
        """Bytes of weights of the experts that have rows, and of lhs and the result."""
        used = sum(x > 0 for x in self.sizes) / len(self.sizes)
        _, rhs, _ = self.shapes()
        weights = sum(x.size for x in rhs.codes)
        return int(used * weights) + 2 * self.rows * (self.inner + self.out_columns)


def products_of(size: Size) -> list[Product]:
    width = size.width
    return [
        Product(name, rows, width, columns, zipf_sizes(rows, size.experts))
        for rows in size.rows
        for name, columns in (("gate_up", 2 * width), ("down", width))
    ]


def make_inputs(product: Product, seed: int) -> tuple[Any, ...]:
    """Normal rows and bias; every code; scales that keep results near 1."""
    lhs, rhs, bias = product.shapes()
    keys = jax.random.split(jax.random.key(seed), 4)
    middle = 127 - round(np.log2(3 * product.inner**0.5))
    return (
        jax.random.normal(keys[0], lhs.shape, jnp.bfloat16),
        Mxfp4(
            jax.random.bits(keys[1], rhs.nibbles_EDF.shape, jnp.uint8),
            jax.random.randint(keys[2], rhs.scales_EDF.shape, middle - 2, middle + 2).astype(
                jnp.uint8
            ),
        ),
        jax.random.normal(keys[3], bias.shape, jnp.bfloat16),
    )


def sample(product: Product) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows with their experts, and columns of the result; the last of each is among them."""
    rng, ends = np.random.default_rng(0), np.cumsum(product.sizes)
    rows = np.unique(np.append(rng.integers(0, ends[-1], SAMPLES), [0, ends[-1] - 1]))
    columns = np.append(rng.integers(0, product.out_columns, SAMPLES), product.out_columns - 1)
    return rows, np.searchsorted(ends, rows, side="right"), columns


def sampled_reference(product: Product, lhs: Any, rhs: Mxfp4, bias: Any) -> Any:
    """The formula in float32 at the sampled rows and columns."""
    rows, experts, columns = sample(product)

    def multiply(columns):
        matrices = mxfp4_to_dense(Mxfp4(*(x[..., columns] for x in rhs.codes)))[experts]
        # No product of matrices: XLA would tune it.
        y = jnp.sum(lhs[rows].astype(jnp.float32)[:, :, None] * matrices, axis=1)
        return y + bias[experts[:, None], columns[None]].astype(jnp.float32)

    if product.name == "gate_up":
        gate, up = multiply(columns), multiply(columns + product.out_columns)
        return apply_swiglu(gate, up, ALPHA, LIMIT)
    return multiply(columns)


def compare(product: Product, got: Any, first: Any, reference: Any) -> tuple[Any, Any]:
    """The largest error in 2^−8 of a value's and the root mean square's sum, and equal bits."""
    rows, _, columns = sample(product)
    got_sampled = got[rows[:, None], columns[None]].astype(jnp.float32)
    unit = 2.0**-8 * (jnp.abs(reference) + jnp.sqrt(jnp.mean(reference**2)))
    a, b = (lax.bitcast_convert_type(x, jnp.uint16) for x in (got, first))
    return jnp.max(jnp.abs(got_sampled - reference) / unit), jnp.array_equal(a, b)


def repeat(product: Product, form: Any, interpret: bool, *inputs: Any) -> Any:
    """The kernel's result, computed `repeats` times, one after another."""
    lhs, *others = inputs

    def again(_, before):
        ordered, _ = lax.optimization_barrier((lhs, before))
        return product.run(form, interpret, ordered, *others)

    out = jnp.zeros((product.rows, product.out_columns), lhs.dtype)
    # A number that XLA knows: else the host would look at the loop's condition each time.
    return lax.fori_loop(0, repeats(product), again, out)


def repeats(product: Product) -> int:
    """Kernels in one program: 10 to 50 ms on an H200."""
    return 1 if product.inner < 1024 else 100 if product.rows < 10_000 else 5


def time_forms(
    product: Product, runs: dict[str, Callable[..., Any]], inputs: Any, rounds: int
) -> dict[str, float]:
    """Seconds of one kernel of each form: the median of `rounds` rounds, in turn."""
    times = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run(*inputs))
            times[name].append((time.perf_counter() - start) / repeats(product))
    return {name: statistics.median(x) for name, x in times.items()}


def forms_of(product: Product) -> tuple[str, ...]:
    return FEW if product.rows <= 64 * len(product.sizes) else MANY


def compile_ahead(chip: str, size: Size) -> None:
    """Compile every form for a chip that is not here."""
    for product in products_of(size):
        for name in forms_of(product):
            form = getattr(mxfp4_forms, name)
            run = partial(product.run, form, False)
            (kernel,) = ahead_of_time.compile_for(chip, run, *product.shapes()).kernels
            report(
                product=product.name,
                rows=product.rows,
                form=name,
                spills=kernel.spills,
                registers=kernel.registers,
                shared=kernel.shared,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compile", metavar="CHIP", help="compile only")
    parser.add_argument("--interpret", action="store_true", help="toy sizes, interpreted")
    args = parser.parse_args()
    size = TOY if args.interpret else REAL
    if args.compile:
        compile_ahead(args.compile, size)
        return
    products = products_of(size)

    def compile_form(product, name):
        run = partial(repeat, product, getattr(mxfp4_forms, name), args.interpret)
        return jax.jit(run).lower(*product.shapes()).compile()

    def compile_product(product):
        inputs = jax.jit(partial(make_inputs, product)).lower(0).compile()
        arrays = product.shapes()
        out = jax.ShapeDtypeStruct((product.rows, product.out_columns), jnp.bfloat16)
        reference = jax.jit(partial(sampled_reference, product)).lower(*arrays).compile()
        wanted = jax.eval_shape(partial(sampled_reference, product), *arrays)
        return (
            inputs,
            reference,
            jax.jit(partial(compare, product)).lower(out, out, wanted).compile(),
        )

    with ThreadPoolExecutor(12) as pool:
        forms = {
            product: {name: pool.submit(compile_form, product, name) for name in forms_of(product)}
            for product in products
        }
        others = {product: pool.submit(compile_product, product) for product in products}
        forms = {p: {name: x.result() for name, x in runs.items()} for p, runs in forms.items()}
        others = {p: x.result() for p, x in others.items()}
    with device_alone():
        for product in products:
            make, reference, comparison = others[product]
            inputs = make(0)
            wanted = reference(*inputs)
            outs = {name: run(*inputs) for name, run in forms[product].items()}
            first = outs["SINGLE_DECODER"]
            right = {name: jax.device_get(comparison(x, first, wanted)) for name, x in outs.items()}
            del outs, first
            runs = {name: run for name, run in forms[product].items() if right[name][0] < 4}
            times = time_forms(product, runs, inputs, args.rounds)
            for name, (error, same) in right.items():
                figures = dict(
                    product=product.name,
                    rows=product.rows,
                    form=name,
                    error=round(float(error), 3),
                    same_bits=bool(same),
                )
                if name in times:
                    s, flops = times[name], 2 * product.rows * product.inner * product.columns
                    gbs = round(1e-9 * product.read_bytes() / s)
                    figures |= dict(
                        ms=round(1e3 * s, 4), gbs=gbs, tflops=round(1e-12 * flops / s, 1)
                    )
                report(**figures)


if __name__ == "__main__":
    main()

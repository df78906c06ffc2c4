# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels of sink attention in Triton's interpreter, on numpy arrays and without torch.

The interpreter is chosen when triton is imported: `interpreted` says where that came too late.
"""

import contextlib
import importlib.util
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.masks import Layout
from pallas_kernels.sink_attention.triton_kernels import jax_triton_call, triton_launch
from pallas_kernels.sink_attention.triton_kernels.triton_launch import TritonTiles

TRITON_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "int32": "i32"}


class Buffer:
    """A numpy array with the interface of a torch tensor that the interpreter needs."""

    def __init__(self, array: Any = None, size=None):
        self.array, self.dtype = array, None if array is None else TRITON_NAMES[array.dtype.name]

    def data_ptr(self):
        return self.array.ctypes.data

    def set_(self, storage, *_):
        self.array, self.dtype = storage.array, storage.dtype

    def new_empty(self, *_, **__):
        return Buffer()

    untyped_storage = cpu = lambda self: self
    storage_offset = size = stride = copy_ = lambda self, *_: 0


def faithful_dot(self, a, b, d, *_):
    """The interpreter multiplies the bit patterns of bfloat16; this widens them first.

    einsum, unlike a library's matmul, treats every row alike.
    """
    wide = [
        (x.data.view(ml_dtypes.bfloat16) if str(x.dtype) == "bf16" else x.data).astype(np.float32)
        for x in (a, b)
    ]
    return type(d)(np.einsum("mk,kn->mn", *wide) + d.data, d.dtype.scalar)


def faithful_cast(original):
    """The interpreter cuts float32 to bfloat16; hardware rounds to nearest even."""

    def cast_impl(self, src, dst_type):
        if (str(src.dtype.scalar), str(dst_type.scalar)) == ("fp32", "bf16"):
            bits = src.data.astype(ml_dtypes.bfloat16).view(np.uint16)
            return type(src)(bits, dst_type.scalar)
        return original(self, src, dst_type)

    return cast_impl


def patch_once(original):
    """The interpreter patches the language at every inner call; once for each file is enough."""
    patched = set()

    def patch_lang(fn):
        outermost = fn.__name__.endswith("_kernel")
        if outermost:
            patched.clear()
        if id(fn.__globals__) in patched:
            return None
        patched.add(id(fn.__globals__))
        return original(fn)

    return patch_lang


def missing():
    """The reason why the kernels cannot be interpreted, or None."""
    return "triton is not installed: pip install triton" * (
        importlib.util.find_spec("triton") is None
    )


@contextlib.contextmanager
def interpreted():
    """The module of kernels, interpreted, with the interpreter's bfloat16 mended; may skip."""
    if missing():
        pytest.skip(missing())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        from triton.runtime import interpreter  # pyright: ignore[reportMissingImports]

        from pallas_kernels.sink_attention.triton_kernels import triton_kernel

        if not isinstance(triton_kernel.forward_kernel, interpreter.InterpretedFunction):
            pytest.skip("triton was imported before without TRITON_INTERPRET=1 in this process")
        builder = interpreter.InterpreterBuilder
        patch.setattr(builder, "create_dot", faithful_dot)
        patch.setattr(builder, "cast_impl", faithful_cast(builder.cast_impl))
        quick = interpreter.InterpreterOptions(sanitize_overflow=False)
        patch.setattr(interpreter.interpreter_builder, "options", quick)
        patch.setattr(interpreter, "_patch_lang", patch_once(interpreter._patch_lang))
        yield triton_kernel


def from_jax(kernels, patch):
    """`sink_attention_triton` with jax_triton's triton_call replaced by the interpreter.

    Tiles are so small that short rows take every path.
    """

    def call_kernel(name, tiles, grid, out, args, constants):
        scalars = [x for x in args if isinstance(x, int)]
        flat, tree = jax.tree.flatten(out)

        def run(*arrays):
            inputs = [Buffer(np.ascontiguousarray(x)) for x in arrays]
            outputs = [np.full(x.shape, np.nan, x.dtype) for x in flat]
            getattr(kernels, name)[grid](*inputs, *scalars, *map(Buffer, outputs), **constants)
            return outputs

        arrays = [x for x in args if not isinstance(x, int)]
        return jax.tree.unflatten(tree, jax.pure_callback(run, flat, *arrays))

    patch.setattr(jax_triton_call, "_triton_call", call_kernel)
    for name, tiles in (
        ("forward", TritonTiles(64, 16, 4, 1)),
        ("dq", TritonTiles(32, 8, 4, 1)),
        ("dkv", TritonTiles(64, 8, 4, 1)),
    ):
        patch.setattr(triton_launch, f"triton_{name}_tiles", lambda *_, x=tiles: x)

    def call(window, q, k, v, sink, *layout):
        layout = Layout(*layout)
        return jax_triton_call.sink_attention_triton(
            q, k, v, sink, layout, window, q.shape[3] ** -0.5
        )

    return call

# SPDX-License-Identifier: Apache-2.0
"""Contents of a compiled program, parsed from its optimized HLO: kernels, products, loops.

For programs of `ahead_of_time.compile_for`, which this machine cannot run. Batch invariance needs
the same tiles at every batch size, and the text shows those.
"""

import base64
import re
from dataclasses import dataclass

from jax._src.interpreters import mlir
from jaxlib.mlir import ir, passmanager
from jaxlib.mosaic.python import mosaic_gpu, tpu

NAME = r"%([\w.\-]+)"
COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{\n((?:  .*\n)*)\}", re.M)
INSTRUCTION = re.compile(rf"^ +(ROOT )?{NAME} = (.*?) ([a-z][\w\-]*)\(([^()]*)\)(.*)", re.M)
BRACES = r'\{(?:[^{}"]|"(?:[^"\\]|\\.)*"|\{[^{}]*\})*\}'  # and braces within, one deep
ASIDE = rf"(?:metadata|frontend_attributes|sharding|control-predecessors)={BRACES}"
NOISE = re.compile(rf"/\*.*?\*/|\{{:S\(\d+\)\}}|S\(\d+\)|, {ASIDE}")
CHOSEN = r'"(?:sizes|kind|num_warps|emitter|selected_algorithm|\w+_bounds)":(?:"[^"]*"|\[[^\]]*])'
MOSAIC = r'custom_call_target="(?:tpu_custom_call|mosaic_gpu)'
MODULE = re.compile(MOSAIC + r'.*(?:"body":"([^"]*)"|\bmodule = "((?:[^"\\]|\\.)*)")')
LIBRARY = r'custom_call_target="(__(?:cublas|cudnn|onednn)[^"]*)"'
PRODUCT = r"(?:tpu\.matmul|mosaic_gpu\.\w+mma) .*|\b(?:wgmma\.|tcgen05\.)?mma[._][\w.:]+"
MEMORY = r"(?:func\.func|memref\.alloca|memref\.view|mosaic_gpu\.slice_smem).*"
OWNED = r"memref<([^,>?\n]*), [^:\n]*?(?:<vmem>|<workgroup>)"  # the core's
LAUNCH = r" threads\(.*?\) in .* dynamic_shared_memory_size %c\d+"


@dataclass(frozen=True)
class Kernel:
    """The tiles of one Mosaic kernel, without its grid and its numbers of iterations."""

    blocks: tuple[str, ...]  # distinct shapes in VMEM or in shared memory, in program order
    products: tuple[str, ...]  # every product of matrices, in program order
    launch: tuple[int, ...]  # threads along x, y, z of a block, its bytes of memory; of a GPU only


def kernels(executable_text: str) -> dict[str, set[Kernel]]:
    """The distinct tiles of every Pallas Mosaic kernel, by the kernel's name.

    Raises: ValueError for a call without its module; MLIR's error where jaxlib cannot read it.
    """
    modules = MODULE.findall(executable_text)
    if len(modules) != len(re.findall(MOSAIC, executable_text)):
        raise ValueError("every Mosaic call must hold its module; one does not.")
    matches: dict[str, set[Kernel]] = {}
    with ir.Context() as context, ir.Location.unknown():
        context.append_dialect_registry(mlir.upstream_dialects)
        tpu.register_dialect(context)
        mosaic_gpu.register_dialect(context)
        context.load_all_available_dialects()
        context.allow_unregistered_dialects = True  # of a serialized module
        for of_tpu, of_gpu in modules:
            name, kernel = _kernel(of_tpu, of_gpu)
            matches.setdefault(name, set()).add(kernel)
    return matches


def library_matmuls(executable_text: str) -> list[str]:
    """Products of matrices that no Mosaic kernel makes: which, in what fusion, its op_name.

    A `reduce` sums what XLA multiplied itself, as of a single row, or the parts of a `dot`.
    """
    matches = []
    rests = [x for *_, x in INSTRUCTION.findall(executable_text)]
    callers = {called: x for x in rests for called in re.findall(rf"^, kind=\w+, calls={NAME}", x)}
    for computation, lines in COMPUTATION.findall(executable_text):
        for _, name, shape, opcode, _, remaining in INSTRUCTION.findall(lines):
            product = (
                [opcode] if opcode in ("dot", "convolution") else re.findall(LIBRARY, remaining)
            )
            if product or opcode == "reduce" and 'dot_general"' in remaining:
                error_text = re.findall(r'"kind":"(__[^"]*)', callers.get(computation, ""))
                error_text += re.findall(
                    r'op_name="[^"]*"', remaining + callers.get(computation, "")
                )[:1]
                matches.append(
                    " ".join([name, shape, *(product or [opcode]), computation, *error_text])
                )
    return matches


def loop_bodies(executable_text: str, label: str) -> list[str]:
    """The bodies of the loops made under `label`, with all that they call, to compare as text.

    Made under it: their own op_name has it; where no loop's has, an instruction's in the body.
    Sorted. Instructions stand where results need them, not as scheduled; names are numbers; copies
    and places in memory are left out. An array of which a turn reads or writes one slice has N for
    its first axis, so has a constant equal to it: choose sizes so that nothing else is alike. From
    a loop over one slice XLA for TPU moves what is invariant: its body is another.
    """
    computations = dict(COMPUTATION.findall(executable_text))
    loops = re.findall(rf" while\(.*\bbody={NAME}(.*)", executable_text)
    prefix = rf'op_name="[^"]*{re.escape(label)}'
    bodies = [body for body, remaining in loops if re.search(prefix, remaining)]
    inside = [body for body, _ in loops if re.search(prefix, computations[body])]
    return sorted(_normal(computations, body) for body in bodies or inside)


def _kernel(of_tpu: str, of_gpu: str) -> tuple[str, Kernel]:
    escaped = re.compile(rb"\\(?:([0-9A-Fa-f]{2})|(\\))")
    code = escaped.sub(lambda x: x[2] or bytes.fromhex(x[1].decode()), of_gpu.encode())
    module = ir.Module.parse(base64.b64decode(of_tpu) if of_tpu else code)
    form = f"{'mosaic' if of_tpu else 'mosaic_gpu'}-serde{{serialize=false}}"
    passmanager.PassManager.parse(f"builtin.module({form})").run(module.operation)
    text = str(module)
    name = re.findall(r"(?m)(?:^module|func\.func) @([\w.\-]+)", text)[0]
    blocks = re.findall(OWNED, "\n".join(re.findall(MEMORY, text)))
    products = re.findall(PRODUCT, re.sub(r"%[\w#]+(?:, | )?", "", text))
    launch = re.findall(r"%c(\d+)", "".join(re.findall(LAUNCH, text)))
    return name, Kernel(tuple(dict.fromkeys(blocks)), tuple(products), tuple(map(int, launch)))


def _in_order(lines: str, places: dict[str, list[int]], of_this: list[int]) -> list[str]:
    """The instructions that the root needs, depth first, without copies.

    Operands of fusions are replaced by their shapes.

    Adds to `places` where the parameters of a computation that is fused then stand; `of_this` are
    those of this one.
    """
    matches, renamed, ordered, waiting = {}, {}, {}, []
    for root, name, shape, opcode, operands, remaining in INSTRUCTION.findall(NOISE.sub("", lines)):
        needs = [renamed.get(x, x) for x in re.findall(NAME, operands)]
        if opcode == "fusion":
            kinds = [re.sub(r"\d+", "", matches[x][0]) for x in needs]  # the same at every size
            by_shape = sorted(range(len(needs)), key=kinds.__getitem__)
            needs = [needs[i] for i in by_shape]
            (called,) = re.findall(f"calls={NAME}", remaining)
            places[called] = [by_shape.index(i) for i in range(len(needs))]
        if opcode == "parameter" and of_this:
            operands = str(of_this[int(operands)])
        operands = ", ".join(f"%{x}" for x in needs) or operands
        remaining, _, config = remaining.partition(", backend_config=")
        chosen = " ".join(re.findall(CHOSEN, config))
        text = f"%{name} = {shape} {opcode}({operands}){remaining} {chosen}"
        matches[name] = shape, needs, text.rstrip()
        if opcode == "copy-done" or opcode == "copy" and matches[needs[0]][0] == shape:
            renamed[name] = matches[needs[0]][1][0] if opcode == "copy-done" else needs[0]
        waiting = [name] if root else waiting
    while waiting:
        _, needs, text = matches[waiting[-1]]
        if missing := [x for x in needs if x not in ordered]:
            waiting.append(missing[0])
        else:
            ordered[waiting.pop()] = text
    return list(ordered.values())


def _normal(computations: dict[str, str], body: str) -> str:
    names, text, places = [body], "", {}
    for name in names:  # which grows
        ordered = _in_order(computations[name], places, places.get(name, []))
        lines = "\n".join([f"%{name}:", *ordered, ""])
        text += lines
        called = re.findall(rf"(?:calls|to_apply|body|condition)={NAME}", lines)
        names += dict.fromkeys(x for x in called if x not in names)
    shapes = dict(re.findall(rf"{NAME} = (\w+\[[\d,]*\])", text))
    stacked = {shapes[x] for x in re.findall(rf" dynamic-slice\({NAME}.*_sizes=\{{1[,}}]", text)}
    updates = re.findall(rf" dynamic-update-slice\({NAME}, {NAME}", text)
    stacked |= {
        shapes[module_text] for module_text, x in updates if re.search(r"\[1[,\]]", shapes[x])
    }
    for array in stacked:
        kind, turns, remaining = re.split(r"(?<=\[)(\d+)", array, maxsplit=1)
        text = re.sub(re.escape(array) + r"(\{[^}]*\})?", f"{kind}N{remaining}", text)
        text = re.sub(rf"(= s32\[\]\S* constant\(){turns}\)", r"\1N)", text)
    numbers: dict[str, int] = {}
    return re.sub(NAME, lambda x: f"%{numbers.setdefault(x[0], len(numbers))}", text)

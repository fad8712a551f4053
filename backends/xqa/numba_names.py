# mypy: ignore-errors
"""The names that kernels use, as Numba knows them: each instruction of `isa.py` becomes inline PTX.

Imports Numba; only `compiler.py` imports this module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mla.backends.xqa.instruction import INSTRUCTIONS, REGISTERS, Instruction

if not hasattr(np, "row_stack"):  # numba-cuda up to 0.30 asks for it by name; numpy dropped it in 2.5
    np.row_stack = np.vstack

from llvmlite import ir
from numba import cuda, types
from numba.core.typing import signature
from numba.cuda import cgutils
from numba.cuda.compiler import compile_cuda
from numba.cuda.dispatcher import CUDADispatcher
from numba.cuda.extending import intrinsic

LLVM = {"f": ir.FloatType(), "r": ir.IntType(32), "l": ir.IntType(64), "h": ir.IntType(16)}
SCALARS = {"F32": types.float32, "U32": types.uint32, "I32": types.int32, "I64": types.int64, "U16": types.uint16}


def _numba_type(kind: str) -> Any:
    if kind in SCALARS:
        return SCALARS[kind]
    return types.UniTuple(SCALARS[f"{kind[0]}32"], REGISTERS[kind][1])


def _intrinsic_of(instruction: Instruction) -> Any:
    """The instruction as a function that Numba can call: operands cast to their types, then inline assembly."""
    text, constraints = instruction.assembly()
    wanted = [_numba_type(kind) for _, kind in instruction.arguments]
    result = types.void if instruction.result is None else _numba_type(instruction.result)
    letter, count = ("", 0) if instruction.result is None else REGISTERS[instruction.result]

    def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        operands: list[Any] = []
        for (_, kind), value in zip(instruction.arguments, values, strict=True):
            many = REGISTERS[kind][1]
            operands += [value] if many == 1 else [builder.extract_value(value, i) for i in range(many)]
        if count == 0:
            returned: Any = ir.VoidType()
        else:
            returned = LLVM[letter] if count == 1 else ir.LiteralStructType([LLVM[letter]] * count)
        form = ir.FunctionType(returned, [operand.type for operand in operands])
        assembly = ir.InlineAsm(form, text, constraints, side_effect=instruction.effect)
        value = builder.call(assembly, operands)
        if count == 0:
            return context.get_dummy_value()
        if count == 1:
            return value
        return cgutils.pack_array(builder, [builder.extract_value(value, i) for i in range(count)])

    names = ", ".join(name for name, _ in instruction.arguments)
    typing_function: dict[str, Any] = {"form": lambda: (signature(result, *wanted), codegen)}
    exec(f"def {instruction.name}(typingctx, {names}):\n    return form()", typing_function)
    return intrinsic(typing_function[instruction.name])


@intrinsic
def _shared_window(typingctx: Any, array: Any) -> Any:
    """The 32-bit address that `ldmatrix`, `cp.async` and `ld.shared` take, of a shared array."""

    def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        data = context.make_array(sig.args[0])(context, builder, value=values[0]).data
        opaque = getattr(data.type, "is_opaque", False)
        pointee = None if opaque else getattr(data.type, "pointee", None)
        return builder.ptrtoint(builder.addrspacecast(data, ir.PointerType(pointee, addrspace=3)), LLVM["r"])

    return types.int32(array), codegen


class _Helper(CUDADispatcher):
    """A device function that is compiled for a given compute capability, where Numba's own asks the current GPU."""

    capability: tuple[int, int]

    def compile_device(self, args: Any, return_type: Any = None) -> Any:
        if args not in self.overloads:
            compiled = compile_cuda(
                self.py_func, return_type, args, forceinline=True, nvvm_options={"opt": 3}, cc=self.capability
            )
            self.overloads[args] = compiled
            compiled.target_context.insert_user_function(compiled.entry_point, compiled.fndesc, [compiled.library])
        return self.overloads[args]


def device_function(capability: tuple[int, int]) -> Callable[[Callable[..., Any]], Any]:
    """What makes a helper of a kernel a function that Numba can call: compiled by itself, inlined by the compiler.

    (Numba's `inline="always"` copies the caller's whole representation for each call; it takes three times as long.)
    """

    def make(function: Callable[..., Any]) -> Any:
        helper = _Helper(function, targetoptions={"device": True, "opt": True, "debug": False})
        helper.capability = capability
        return helper

    return make


def shared_base():
    return _shared_window(cuda.shared.array(0, dtype=types.uint8, alignment=128))


@intrinsic
def select(typingctx: Any, condition: Any, yes: Any, no: Any) -> Any:
    """A select instruction, not a branch; both sides become one type, as in a conditional expression."""

    def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        return builder.select(*values)

    one = typingctx.unify_types(types.unliteral(yes), types.unliteral(no))
    return signature(one, types.boolean, one, one), codegen


def _int_choice(comparison: str) -> Any:
    @intrinsic
    def choose(typingctx: Any, x: Any, y: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            return builder.select(builder.icmp_signed(comparison, *values), *values)

        one = typingctx.unify_types(types.unliteral(x), types.unliteral(y))
        return signature(one, one, one), codegen

    return choose


NAMES: dict[str, Any] = {name: _intrinsic_of(instruction) for name, instruction in INSTRUCTIONS.items()}
NAMES |= {
    "cuda": cuda,
    "shared_base": shared_base,
    "select": select,
    "smaller_int": _int_choice("<"),
    "larger_int": _int_choice(">"),
    "int32": types.int32,
    "int64": types.int64,
    "uint32": types.uint32,
    "float32": types.float32,
}
"""Name in a kernel -> what Numba compiles."""

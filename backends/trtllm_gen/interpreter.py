"""Triton's CPU interpreter, repaired so that a kernel run on it means what it means on a GPU.

With TRITON_INTERPRET=1 Triton runs a kernel program by program in numpy. That is how these kernels are tested where
there is no GPU. As it comes, the interpreter keeps bf16 as raw 16-bit integers and computes with those; it truncates
fp32 to bf16, rounds to e4m3 wrongly, and spends most of its time replacing the functions of the language over and over.
`repair` puts that right, once per process and for nobody who does not call it.

What is repaired
* bf16 and e4m3: loads, stores, casts, arithmetic, comparisons, `tl.dot` and `tl.sum`. A cast rounds to nearest even; to
  e4m3 it saturates at 448 and keeps NaN, as `cvt.rn.satfinite` does. Arithmetic is done in fp32 and rounded once, which
  for these widths is the correctly rounded result.
* `tl.dot` multiplies 8- and 16-bit operands exactly and accumulates in fp32.
* `tl.maximum`, `tl.minimum`, `tl.max` and `tl.min` skip a NaN where a number stands beside it.
* `range` and `tl.range` take run-time bounds under every numpy, and their variable is a tensor, as when compiled.
* Arguments have the types that a compiled kernel sees: as annotated; else a float is fp32, and an int that needs more
  than 32 bits is int64.
* What a masked load leaves out, and no `other` names, is all ones (NaN, -1): on a GPU it is undefined.
* Waiting for the previous kernel and releasing the next (`tl.extra.cuda.gdc_*`) do nothing. Call them by that name:
  one that was imported into a module before the repair is not found.

What stays different from a GPU
* One program runs after another, so nothing is said about races; `num_warps`, `num_stages` and layouts mean nothing.
* Sums and products are accumulated in numpy's order. A dot of fp32 operands is not rounded to TF32. The e4m3 matrix
  instruction of Hopper keeps fewer bits of its partial sums than fp32.
* `exp2`, `log2` and division are numpy's, which are closer to the truth than a GPU's approximations, and subnormals are
  not flushed.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter as its
from triton.runtime.jit import _normalize_ty, mangle_type, type_canonicalisation_dict

from mla.backends.trtllm_gen.gpu_numbers import (
    Array,
    bf16_to_fp32,
    but_nan,
    e4m3_to_fp32,
    extreme_but_nan,
    fp32_to_bf16,
    fp32_to_e4m3,
)

SUPPORTED = ((3, 6), (3, 9))
"""The oldest and the newest Triton whose interpreter this module was tried with."""

Handle = Any  # an array with the Triton dtype that its bits mean

_NARROW: dict[Any, tuple[Callable[[Array], Array], Callable[[Array], Array]]] = {
    tl.bfloat16: (bf16_to_fp32, fp32_to_bf16),
    tl.float8e4nv: (e4m3_to_fp32, fp32_to_e4m3),
}
"""The types that numpy lacks: to fp32, and from it."""

_BITWISE = (np.bitwise_and, np.bitwise_or, np.bitwise_xor)
_state = SimpleNamespace(repaired=False, launching=False)


def active() -> bool:
    """Whether kernels of this process are interpreted: what TRITON_INTERPRET was when Triton was imported."""
    return isinstance(tl.max, its.InterpretedFunction)


def repair() -> None:
    """Repair the interpreter in this process; a second call changes nothing.

    Raises:
        RuntimeError: TRITON_INTERPRET was not set when Triton was imported, or this Triton is another than `SUPPORTED`.
    """
    if _state.repaired:
        return
    why = unsupported(triton.__version__)
    if not active():
        why = "the interpreter is off: set TRITON_INTERPRET=1 before Triton is imported"
    if why:
        raise RuntimeError(why)
    _repair_numbers(its.InterpreterBuilder)
    _repair_reductions(its.ReduceOps)
    _repair_loops(its.ASTTransformer)
    _repair_launch(its.GridExecutor)
    _repair_speed(tl.tensor, tl.block_type)
    _state.repaired = True


def unsupported(version: str) -> str:
    """Why this version's interpreter is not repaired, or ""."""
    oldest, newest = (f"{major}.{minor}" for major, minor in SUPPORTED)
    if SUPPORTED[0] <= tuple(int(part) for part in version.split(".")[:2]) <= SUPPORTED[1]:
        return ""
    return (
        f"the repair of Triton's interpreter is written for Triton {oldest} to {newest}, and this is {version}: "
        "unrepaired, its bf16 and e4m3 numbers are wrong"
    )


def _widened(handle: Handle) -> Handle:
    """The same numbers in a type that numpy computes with."""
    if handle.dtype.scalar not in _NARROW:
        return handle
    widen, _ = _NARROW[handle.dtype.scalar]
    return its.TensorHandle(widen(handle.data), tl.float32)


def _as_type(data: Array, dtype: Any) -> Handle:
    """The numbers `data`, rounded to the Triton dtype."""
    if dtype not in _NARROW:
        return its.TensorHandle(data.astype(its._get_np_dtype(dtype), copy=False), dtype)
    _, narrow = _NARROW[dtype]
    return its.TensorHandle(narrow(data.astype(np.float32)), dtype)


def _repair_numbers(builder: Any) -> None:
    """Replace what `InterpreterBuilder` does with numbers."""
    plain_binary, plain_unary, plain_dot = builder.binary_op, builder.unary_op, builder.create_dot
    plain_fp_to_fp, plain_fma, plain_load = builder.create_fp_to_fp, builder.create_fma, builder.create_masked_load

    def binary_op(self: Any, lhs: Handle, rhs: Handle, op: Any) -> Handle:
        narrow = lhs.dtype.scalar in _NARROW and op not in _BITWISE
        result = op(_widened(lhs).data, _widened(rhs).data) if narrow else plain_binary(self, lhs, rhs, op).data
        if result.dtype == np.bool_:  # of a comparison: Triton gives it the type of what was compared
            return its.TensorHandle(result, tl.int1)
        return _as_type(result, lhs.dtype.scalar) if narrow else its.TensorHandle(result, lhs.dtype.scalar)

    def unary_op(self: Any, arg: Handle, op: Any) -> Handle:
        if arg.dtype.scalar not in _NARROW:
            return plain_unary(self, arg, op)
        return _as_type(op(_widened(arg).data), arg.dtype.scalar)

    def cast_impl(self: Any, source: Handle, dtype: Any) -> Handle:
        return _as_type(_widened(source).data, dtype.scalar)

    def create_fp_to_fp(self: Any, source: Handle, dtype: Any, rounding: Any) -> Handle:
        repaired = source.dtype.scalar in _NARROW or dtype.scalar in _NARROW
        if not repaired or rounding == its._ir.ROUNDING_MODE.RTZ:
            return plain_fp_to_fp(self, source, dtype, rounding)
        return cast_impl(self, source, dtype)

    def create_dot(self: Any, a: Handle, b: Handle, acc: Handle, *rest: Any) -> Handle:
        if not (a.dtype.scalar.is_floating() and a.dtype.scalar.primitive_bitwidth <= 32):
            return plain_dot(self, a, b, acc, *rest)
        product = np.matmul(_widened(a).data.astype(np.float32), _widened(b).data.astype(np.float32))
        return _as_type(product + _widened(acc).data, acc.dtype.scalar)

    def create_fma(self: Any, x: Handle, y: Handle, z: Handle) -> Handle:
        if z.dtype.scalar in _NARROW:
            raise NotImplementedError(f"tl.fma of {z.dtype.scalar} is not repaired: cast to fp32 first")
        return plain_fma(self, x, y, z)

    def create_masked_load(self: Any, pointers: Handle, mask: Any, other: Handle | None, *rest: Any) -> Handle:
        if other is None:
            dtype = pointers.get_element_ty()
            stored = its._get_np_dtype(dtype)
            ones = np.full((*pointers.data.shape, stored.itemsize), 1 if stored == np.bool_ else 0xFF, np.uint8)
            other = its.TensorHandle(ones.view(stored)[..., 0], dtype)
        return plain_load(self, pointers, mask, other, *rest)

    for replacement in (binary_op, unary_op, cast_impl, create_fp_to_fp, create_dot, create_fma, create_masked_load):
        setattr(builder, replacement.__name__, replacement)
    # `propagate_nan=tl.PropagateNan.ALL` takes the two others. numpy's own fmax stumbles over signalling NaN.
    builder.create_maxnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, functools.partial(but_nan, np.maximum))
    builder.create_minnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, functools.partial(but_nan, np.minimum))
    builder.get_bf16 = lambda self, value: _as_type(np.array([value]), tl.bfloat16)


def _repair_reductions(reduce_ops: Any) -> None:
    plain_min_max = reduce_ops.min_max
    repaired = {
        np.nanmax: functools.partial(extreme_but_nan, np.max),
        np.nanmin: functools.partial(extreme_but_nan, np.min),
    }

    def min_max(self: Any, operand: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
        return plain_min_max(self, operand, repaired.get(val_reduce_op, val_reduce_op), idx_reduce_op)

    def total(self: Any, operand: Any) -> Any:
        result = np.sum(_widened(operand.handle).data, axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(_as_type(np.asarray(result), operand.dtype).data, operand.dtype)

    reduce_ops.min_max, reduce_ops.sum = min_max, total


def _repair_loops(transformer: Any) -> None:
    def visit_for(self: Any, node: ast.For) -> ast.For:
        self.generic_visit(node)
        if isinstance(node.iter, ast.Call) and isinstance(node.iter.func, ast.Name) and node.iter.func.id == "range":
            node.iter.func = ast.Attribute(ast.Name("tl", ast.Load()), "range", ast.Load())
        return node

    transformer.visit_For = visit_for


def _repair_launch(executor: Any) -> None:
    plain_call, plain_restore = executor.__call__, executor._restore_args_dev
    plain_patch, plain_convert = its._patch_lang, its._implicit_cvt

    @contextmanager
    def language() -> Iterator[None]:
        """Triton's language, interpreted: replaced once, not again for every helper function that is called."""
        scope = plain_patch(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        for module in (tl, tl.core):
            scope.set_attr(module, "range", _run_time_range)
        scope.set_attr(tl.tensor, "__index__", lambda self: int(self.handle.data.item()))
        for name in ("gdc_wait", "gdc_launch_dependents"):
            scope.set_attr(tl.extra.cuda, name, lambda _semantic=None: None)
        _state.launching = True
        try:
            yield
        finally:
            _state.launching = False
            scope.restore()

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        kinds = {name: _normalize_ty(self.fn.__annotations__.get(name, "")) for name in self.arg_names}
        args = (*map(_typed, args, kinds.values()), *args[len(kinds) :])
        kwargs = {name: _typed(arg, kinds.get(name, "")) for name, arg in kwargs.items()}
        with language(), np.errstate(all="ignore"):  # a GPU does not complain of inf - inf
            plain_call(self, *args, **kwargs)

    def patch_lang(fn: Any) -> Any:
        return its._LangPatchScope() if _state.launching else plain_patch(fn)

    def restore_args_dev(self: Any, args: Any, host_args: Any, kwargs: Any, host_kwargs: Any) -> None:
        given = (*args, *kwargs.values())
        if any(hasattr(arg, "data_ptr") and arg.device.type != "cpu" for arg in given):
            plain_restore(self, args, host_args, kwargs, host_kwargs)  # CPU tensors were worked on in place

    def implicit_cvt(arg: Any) -> Any:
        return _scalar(arg, mangle_type(arg)) if isinstance(arg, bool | int | float) else plain_convert(arg)

    executor.__call__, executor._restore_args_dev = call, restore_args_dev
    its._patch_lang, its._implicit_cvt = patch_lang, implicit_cvt


def _repair_speed(tensor: Any, block_type: Any) -> None:
    """Every operation makes a tensor and its type; what depends on the shape and the dtype alone is made once."""
    plain_np_dtype, plain_block = its._get_np_dtype, block_type.__init__
    dtypes: dict[str, Any] = {}
    blocks: dict[Any, tuple[Any, ...]] = {}
    shapes: dict[tuple[int, ...], tuple[Any, ...]] = {}

    def np_dtype(dtype: Any) -> Any:
        if dtype.name not in dtypes:
            dtypes[dtype.name] = plain_np_dtype(dtype)
        return dtypes[dtype.name]

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(getattr(n, "value", n) for n in shape))
        if key not in blocks:
            plain_block(self, element_ty, shape)
            blocks[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = blocks[key]

    def init_tensor(self: Any, handle: Handle, type: Any) -> None:
        shape = tuple(type.shape.values) if type.is_block() else ()
        if shape not in shapes:
            shapes[shape] = tl.core.tuple([tl.constexpr(n) for n in shape]), tl.constexpr(math.prod(shape))
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[shape]

    # Whether integers overflow would be computed for every sum and product, and told to nobody.
    its.interpreter_builder.options = dataclasses.replace(its.interpreter_builder.options, sanitize_overflow=False)
    its._get_np_dtype = np_dtype
    block_type.__init__ = init_block
    tensor.__init__ = init_tensor


def _run_time_range(start: Any, stop: Any = None, step: Any = None, **hints: Any) -> Iterator[Any]:
    """`tl.range`: the variable is an int32, or an int64 when a bound is one."""
    bounds = [start if stop is not None else 0, stop if stop is not None else start, 1 if step is None else step]
    tensors = [its.interpreter_semantic.to_tensor(bound) for bound in bounds]
    kind = "i64" if any(tensor.dtype.primitive_bitwidth == 64 for tensor in tensors) else "i32"
    for value in range(*(tensor.handle.data.item() for tensor in tensors)):
        yield _scalar(value, kind)


def _typed(arg: Any, kind: str) -> Any:
    """A number as the type that its parameter is annotated with; anything else as it is."""
    return _scalar(arg, kind) if isinstance(arg, bool | int | float) and kind in _KINDS else arg


def _scalar(value: float, kind: str) -> Any:
    dtype = tl.str_to_ty(kind, None)
    return tl.tensor(_as_type(np.array([value]), dtype), dtype)


_KINDS = frozenset(type_canonicalisation_dict.values())

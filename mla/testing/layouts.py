"""How a tensor lies in memory: views into larger, poisoned buffers, and a watch over what must stay as it is."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

GUARD = 16  # elements on either side that belong to nobody; whole 16-byte steps, so that "packed" is aligned
PADDED_ROWS = 16  # a kernel that pads heads writes up to so many rows behind an output


def poison(tensor: torch.Tensor, kind: str) -> None:
    """Fill `tensor` in place: "nan", "inf", "max" (the largest finite number), "zero" or "noise".

    Formats without a NaN or infinity (integers; e4m3 has no infinity) take their largest number for it.
    """
    if kind == "zero":
        tensor.zero_()
    elif kind == "noise":
        pattern = torch.arange(tensor.numel(), device=tensor.device).reshape(tensor.shape) % 13 - 6
        tensor.copy_(pattern.to(tensor.dtype))
    elif not tensor.is_floating_point():
        tensor.fill_(torch.iinfo(tensor.dtype).max)
    elif kind == "nan":
        tensor.fill_(math.nan)
    elif kind == "inf" and tensor.dtype is not torch.float8_e4m3fn:
        tensor.fill_(math.inf)
    else:
        tensor.fill_(torch.finfo(tensor.dtype).max)


@dataclass
class Watch:
    """A buffer, the view into it that was handed out, and the bytes as they were."""

    name: str
    buffer: torch.Tensor
    view: torch.Tensor
    before: torch.Tensor
    written: bool  # the view itself may be written

    def changed(self) -> bool:
        """Whether a byte changed that must not: any, or any outside the view when the view may be written."""
        if self.written:
            now = self.buffer.clone()
            lens = now.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset())
            old = self.before.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset())
            lens.copy_(old)
        else:
            now = self.buffer
        return not torch.equal(_bytes(now), _bytes(self.before))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def place(name: str, value: torch.Tensor, layout: str, fill: str, *, written: bool) -> tuple[torch.Tensor, Watch]:
    """A view with `value`'s content that lies in a larger buffer filled with `fill`, and a watch over that buffer.

    Layouts: "packed"; "offset" (contiguous, one element off alignment); "wider" and "sliced" (rows of a wider tensor);
    "transposed" (axes 1 and 2 exchanged in memory); "layers" (one layer of an interleaved pool); "every_second" (of
    axis 0); "spread" (every axis but the last two elements apart; the last as well for tables and lengths).
    """
    shape = tuple(value.shape)
    strides = _strides(shape, layout, last_free=not value.is_floating_point())
    reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1 if value.numel() else 0
    offset = GUARD + (1 if layout == "offset" else 0)
    behind = GUARD + (PADDED_ROWS * max(strides[-2:-1], default=1) if written else 0)
    buffer = torch.empty(offset + reach + behind, dtype=value.dtype, device=value.device)
    poison(buffer, fill)
    view = buffer.as_strided(shape, strides, offset)
    view.copy_(value)
    return view, Watch(name, buffer, view, buffer.clone(), written)


def _strides(shape: tuple[int, ...], layout: str, last_free: bool) -> tuple[int, ...]:
    packed = torch.empty(shape, device="meta").stride()
    if layout in ("packed", "offset") or not shape:
        return packed
    if layout in ("wider", "sliced"):
        return _row_major((*shape[:-1], shape[-1] + 64))
    if layout == "transposed":
        _, one, two, *rest = shape
        inner = math.prod(rest) if rest else 1
        return (one * two * inner, inner, one * inner, *_row_major(tuple(rest)))
    if layout == "layers":
        return (3 * packed[0], *packed[1:])
    if layout == "every_second":
        return (2 * packed[0], *packed[1:])
    assert layout == "spread"
    strides = [2 * stride for stride in packed]
    return tuple(strides) if last_free else (*strides[:-1], 1)


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))

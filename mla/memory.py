"""Do two strided tensors share memory? Exact, and free of charge when their address ranges are apart."""

from __future__ import annotations

import torch


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """[first byte, one past the last byte) that the tensor can reach."""
    first = tensor.data_ptr()
    if tensor.is_contiguous():
        return first, first + tensor.nbytes
    if tensor.numel() == 0:
        return first, first
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (last + 1) * tensor.element_size()


def _runs(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """(sorted first bytes, length) of the runs of contiguous bytes that the tensor consists of."""
    element = tensor.element_size()
    axes: list[tuple[int, int]] = []
    length = element
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda axis: axis[1]):
        if size == 1 or stride == 0:  # neither adds an address
            continue
        if not axes and stride * element == length:
            length *= size
        else:
            axes.append((size, stride * element))
    starts = torch.zeros(1, dtype=torch.int64, device="cpu")
    for size, step in axes:
        starts = (starts[:, None] + torch.arange(size, dtype=torch.int64, device="cpu") * step).flatten()
    return starts.sort().values + tensor.data_ptr(), length


def overlaps(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if some byte belongs to both tensors. Interleaved views of one buffer are told apart."""
    if a.device != b.device or a.device.type == "meta" or a.numel() == 0 or b.numel() == 0:
        return False
    (a_first, a_end), (b_first, b_end) = span(a), span(b)
    if a_end <= b_first or b_end <= a_first:
        return False
    (a_starts, a_length), (b_starts, b_length) = _runs(a), _runs(b)
    after = torch.searchsorted(b_starts, a_starts)  # the first run of b at or after each run of a
    nearest_after = b_starts[after.clamp(max=len(b_starts) - 1)]
    nearest_before = b_starts[(after - 1).clamp(min=0)]
    hits = ((nearest_after >= a_starts) & (nearest_after < a_starts + a_length)) | (
        (nearest_before <= a_starts) & (a_starts < nearest_before + b_length)
    )
    return bool(hits.any())


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """True if two elements of the tensor share memory (an expanded axis, say)."""
    if tensor.numel() == 0 or tensor.is_contiguous():
        return False
    axes = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    if any(stride == 0 for stride, _ in axes):
        return True
    reach = 1  # elements that the axes so far span; a next stride of at least that keeps them apart
    for stride, size in axes:
        if stride < reach:
            break
        reach += (size - 1) * stride
    else:
        return False
    starts, length = _runs(tensor)
    return bool((starts.diff() < length).any())

"""What a user of the cache needs besides the call: writing new tokens, and quantising to e4m3."""

from __future__ import annotations

import torch

from mla import checks

CACHE_DTYPES = (*checks.HALVES, checks.E4M3, *checks.WIDE)
E4M3_MAX = 448.0  # the largest finite float8_e4m3fn


@torch.no_grad()
def quantize_e4m3(x: torch.Tensor, scale: float | torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Round to float8_e4m3fn with one scale for the whole tensor: `x` is about `quantised.float() * scale`.

    Pass the scale on as q_scale or k_scale in bmm1_scale, and as v_scale in bmm2_scale (one latent is both key and
    value, so k_scale and v_scale of a cache are the same number).

    Args:
        x: floats of any shape, the query or the latents.
        scale: a positive number or a float32 tensor of 1 element on x's device (not read on the host). None: the
            largest finite magnitude of `x` divided by 448, so that nothing saturates; 1 if that is 0.

    Returns:
        (float8_e4m3fn tensor like x, float32 scale of shape []). Magnitudes above 448 * scale saturate, infinities too;
        NaN stays NaN.

    Raises:
        TypeError: `x` is not a floating-point tensor, or the scale's kind or dtype is wrong.
        ValueError: the scale is a number that is not positive, or a tensor of several elements or on another device.

    Example:
        >>> import torch
        >>> stored, scale = quantize_e4m3(torch.tensor([-896.0, 1.0, 0.5]))
        >>> scale.item(), (stored.float() * scale).tolist()
        (2.0, [-896.0, 1.0, 0.5])
    """
    _check_floats("x", x)
    wide = x.to(torch.float32)
    if scale is None:
        finite = torch.where(wide.isfinite(), wide.abs(), 0.0)
        largest = finite.amax() if x.numel() else wide.new_zeros(())
        divisor = torch.where(largest > 0, largest / E4M3_MAX, 1.0)
    else:
        divisor = _scale_tensor(scale, x.device)
    return _saturate(wide / divisor), divisor


@torch.no_grad()
def append_tokens(
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    latents: torch.Tensor,
    *,
    scale: float | torch.Tensor | None = None,
) -> torch.Tensor:
    """Write the newest tokens of each request into the paged cache, in place.

    Token t of request b goes to position `seq_lens[b] - Q + t`: the lengths are those of the decode call that follows,
    new tokens included. Positions below 0, past the table, or in a page that the pool does not have are not written.
    That covers padded requests of a captured batch (length 0, table -1), and the padding in front of shorter prompts
    when several are appended at once, aligned at their ends. No host sync; works inside a CUDA graph capture.

    Args:
        kv_cache: [N, P, D] or [N, 1, P, D], any strides with last 1; bfloat16, float16, float32, float64 or
            float8_e4m3fn. Written.
        block_tables: int32 or int64 page ids [B, W].
        seq_lens: int32 or int64 [B].
        latents: floats [B, Q, D]: 512 compressed numbers and 64 of the rotated key per token. Rounded to the cache's
            dtype; two requests must not append to the same slot.
        scale: for a float8_e4m3fn cache, what the latents are divided by before they are rounded (saturating); a
            positive number or a float32 tensor of 1 element. None is 1. An error for any other cache.

    Returns:
        kv_cache, the same object.

    Raises:
        ValueError: a shape, device or scale is wrong; nothing was written then.
        TypeError: a dtype or kind is wrong; nothing was written then.

    Example:
        One request of 3 tokens, whose newest one goes to offset 2 of its page, page 1:

        >>> import torch
        >>> cache = torch.zeros(2, 64, 576, dtype=torch.bfloat16)
        >>> tables, lengths = torch.tensor([[1]]), torch.tensor([3])
        >>> append_tokens(cache, tables, lengths, torch.ones(1, 1, 576)) is cache
        True
        >>> cache[1, :4, 0].tolist(), cache[0].any().item()
        ([0.0, 0.0, 1.0, 0.0], False)
    """
    rank, rope = checks.LATENT_DIMS["kv_lora_rank"], checks.LATENT_DIMS["qk_rope_head_dim"]
    cache = checks.kv_cache(kv_cache, rank, rope)
    _check_floats("latents", latents)
    if latents.ndim != 3 or latents.shape[-1] != rank + rope:
        raise ValueError(f"latents has shape {checks.shape(latents)}; expected [B, Q, {rank + rope}]")
    if cache.dtype not in CACHE_DTYPES:
        raise TypeError(f"kv_cache has dtype {checks.short(cache.dtype)}; expected {checks.names(CACHE_DTYPES)}")
    batch, q_len, _ = latents.shape
    checks.block_tables(block_tables, batch, q_len, 0)
    checks.seq_lens(seq_lens, batch)
    checks.same_device(cache.device, block_tables=block_tables, seq_lens=seq_lens, latents=latents)
    if scale is not None and cache.dtype is not checks.E4M3:
        raise ValueError(
            f"scale is given and kv_cache is {checks.short(cache.dtype)}; expected None: only e4m3 caches are scaled"
        )
    divisor = None if scale is None else _scale_tensor(scale, cache.device)
    num_pages, page_size = cache.shape[:2]
    if batch * q_len == 0 or num_pages == 0 or block_tables.shape[1] == 0:
        return kv_cache

    position = seq_lens.to(torch.int64)[:, None] - q_len + torch.arange(q_len, device=cache.device)  # [B, Q]
    column = torch.div(position, page_size, rounding_mode="floor")
    page = block_tables.to(torch.int64).gather(1, column.clamp(0, block_tables.shape[1] - 1))
    writable = (position >= 0) & (column < block_tables.shape[1]) & (page >= 0) & (page < num_pages)
    page, offset = torch.where(writable, page, 0).flatten(), torch.where(writable, position % page_size, 0).flatten()
    rows = latents if divisor is None else latents.to(torch.float32) / divisor
    rows = _saturate(rows) if cache.dtype is checks.E4M3 else rows.to(cache.dtype)
    rows = rows.reshape(batch * q_len, -1).contiguous()
    page, offset, rows = _redirect(cache, writable.flatten(), page, offset, rows)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[cache.element_size()]
    cache.view(bits).index_put_((page, offset), rows.view(bits))
    return kv_cache


def _redirect(
    cache: torch.Tensor, writable: torch.Tensor, page: torch.Tensor, offset: torch.Tensor, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Turn each row that must not be written into a repetition of one that is, or of what the cache holds already.

    Dropping rows would need their number on the host. Repeating a write changes nothing.
    """
    any_writable = writable.any()
    # The first writable row, or row 0. One-dimensional: an index of no dimension would be read on the host.
    model = writable.to(torch.int8).argmax(dim=0, keepdim=True)  # [1]
    as_bytes = rows.view(torch.uint8)  # [B*Q, bytes]
    held = cache.view(torch.uint8)[page[model], offset[model]]
    repeated = torch.where(any_writable, as_bytes[model], held)
    page, offset = torch.where(writable, page, page[model]), torch.where(writable, offset, offset[model])
    return page, offset, torch.where(writable[:, None], as_bytes, repeated).view(rows.dtype)


def _saturate(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float32).clamp(-E4M3_MAX, E4M3_MAX).to(checks.E4M3)


def _check_floats(name: str, value: object) -> None:
    tensor = checks.tensor(name, value, "of floats")
    if not tensor.is_floating_point():
        raise TypeError(f"{name} has dtype {checks.short(tensor.dtype)}; expected a float")


def _scale_tensor(scale: float | torch.Tensor, device: torch.device) -> torch.Tensor:
    checked = checks.scale("scale", scale, device)
    if isinstance(checked, torch.Tensor):
        return checked
    if checked <= 0:
        raise ValueError(f"scale is {checked}; expected a positive number")
    return torch.full((), checked, dtype=torch.float32, device=device)

"""Published kernels as contenders, each called the way its engine calls it: plans and lists are made off the clock.

Nothing here is imported before it is asked for. A peer is installed when its module can be found on the path; vLLM's
and SGLang's single files count, too (`examples/README.md` says how to get everything).
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from mla.bench.contenders import Contender, Unable, Way
from mla.bench.floors import D, R
from mla.bench.inputs import SCALE, Inputs

SPLITS = (1, 4, 8, 16, 32)
"""What the two Triton kernels are tried with; their engines choose by rules of thumb."""

WORKSPACE_BYTES = 256 << 20


@dataclass(frozen=True)
class Peer:
    """One published kernel.

    Attributes:
        name: in reports and after --peers.
        title: for people.
        modules: where its entry point may lie; the first that is there counts.
        distribution: the package, for its version.
        prepare: (module, inputs) -> the ways to call it.
    """

    name: str
    title: str
    modules: tuple[str, ...]
    distribution: str
    prepare: Callable[[ModuleType, Inputs], list[Way]]

    def module_name(self) -> str | None:
        """The first of its modules that can be found, or None."""
        return next(filter(_is_there, self.modules), None)

    def version(self) -> str:
        """Of the package; "" when its file came alone."""
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return ""

    def contender(self) -> Contender:
        """The peer as one that takes part, installed or not: then its rows say so."""
        return Contender(self.name, "peer", partial(_prepare, self), self.version())


def _is_there(module: str) -> bool:
    """Whether the path has the module. Nothing is imported: a package may load a GPU library at once."""
    top, *inner = module.split(".")
    try:
        spec = find_spec(top)
    except ValueError:  # something of that name was put into sys.modules by hand
        return False
    if spec is None or not inner:
        return spec is not None
    places = [Path(place, *inner) for place in spec.submodule_search_locations or ()]
    return any(place.is_dir() or place.with_suffix(".py").is_file() for place in places)


def _prepare(peer: Peer, inputs: Inputs) -> list[Way]:
    found = peer.module_name()
    if found is None:
        raise Unable(f"not installed: no module {peer.modules[0]} on the path")
    if inputs.device.type != "cuda":
        raise Unable(f"{peer.title} runs on an NVIDIA GPU alone")
    return peer.prepare(importlib.import_module(found), inputs)


def _flashmla(module: ModuleType, inputs: Inputs) -> list[Way]:
    case = inputs.case
    if case.top_k:
        return _flashmla_sparse(module, inputs)
    if case.page_size != 64:
        raise Unable(f"the page size is {case.page_size}; FlashMLA takes 64")
    plan = module.FlashMLASchedMeta()  # filled by the first call, and used again by the others
    extra: dict[str, Any] = {}
    if case.dtype == "fp8":
        plan.tile_scheduler_metadata, plan.num_splits = module.get_mla_decoding_metadata(
            inputs.lengths, case.q_len * case.heads, 1, is_fp8_kvcache=True, use_legacy=True
        )
        one = torch.ones(1, device=inputs.device)
        extra = {"is_fp8_kvcache": True, "descale_q": one, "descale_k": one}
    pool = inputs.pool.unsqueeze(2)  # [N, P, 1, D]

    def run() -> torch.Tensor:
        out: torch.Tensor = module.flash_mla_with_kvcache(
            inputs.query,
            pool,
            inputs.tables,
            inputs.lengths,
            R,
            plan,
            softmax_scale=SCALE,
            causal=case.q_len > 1,
            use_legacy=True,
            **extra,
        )[0]
        return out

    return [Way(run)]


def _flashmla_sparse(module: ModuleType, inputs: Inputs) -> list[Way]:
    case, slots = inputs.case, inputs.slots
    if case.dtype != "bf16":
        raise Unable(f"the pool is in {case.dtype}; FlashMLA's sparse kernel reads bf16 here")
    if case.heads not in (64, 128) or case.top_k % 128:
        raise Unable(
            f"H is {case.heads}, K is {case.top_k}; FlashMLA's sparse kernel takes 64 or 128 and multiples of 128"
        )
    if case.visible(case.lengths.index(min(case.lengths)), 0) < case.top_k:
        raise Unable(
            "a list is longer than what its token sees; FlashMLA's sparse kernel is called with full lists here"
        )
    assert slots is not None
    query = inputs.query.flatten(0, 1)  # [B * Q, H, D]
    pool = inputs.pool.view(-1, 1, D)
    lists = slots.flatten(0, 1).unsqueeze(1)  # [B * Q, 1, K]
    shape = (case.batch, case.q_len, case.heads, R)
    attend = partial(module.flash_mla_sparse_fwd, query, pool, lists, SCALE, use_legacy=True, return_log2_lse=False)
    return [Way(lambda: attend()[0].view(shape))]


def _flashinfer_fa3(module: ModuleType, inputs: Inputs) -> list[Way]:
    case = inputs.case
    _dense_16_bit("FlashInfer's fa3 kernel", inputs)
    scratch = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=inputs.device)
    wrapper = module.BatchMLAPagedAttentionWrapper(scratch, backend="fa3")
    pages = (inputs.lengths + case.page_size - 1) // case.page_size  # [B]
    in_use = torch.arange(inputs.tables.shape[1], device=inputs.device) < pages[:, None]  # [B, W]
    first_rows = case.q_len * torch.arange(case.batch + 1, dtype=torch.int32, device=inputs.device)
    wrapper.plan(
        first_rows,
        _starts(pages),
        inputs.tables[in_use],
        inputs.lengths,
        case.heads,
        R,
        D - R,
        case.page_size,
        case.q_len > 1,  # causal
        SCALE,
        inputs.query.dtype,
        inputs.pool.dtype,
    )
    query = inputs.query.flatten(0, 1)  # [B * Q, H, D]
    parts = [part.contiguous() for tensor in (query, inputs.pool) for part in (tensor[..., :R], tensor[..., R:])]
    shape = (case.batch, case.q_len, case.heads, R)
    return [Way(lambda: wrapper.run(*parts).view(shape))]


def _vllm_triton(module: ModuleType, inputs: Inputs) -> list[Way]:
    """A request of Q tokens becomes Q rows of the same table, each with the length that its token sees."""
    case, device = inputs.case, inputs.device
    _dense_16_bit("vLLM's Triton kernel", inputs)
    rows = case.batch * case.q_len
    behind = torch.arange(1 - case.q_len, 1, dtype=torch.int32, device=device)
    lengths = (inputs.lengths[:, None] + behind).flatten()  # [B * Q]
    tables = inputs.tables.repeat_interleave(case.q_len, 0) if case.q_len > 1 else inputs.tables
    pool = inputs.pool.unsqueeze(2)  # [N, P, 1, D]
    query = inputs.query.flatten(0, 1)
    out = torch.zeros(rows, case.heads, R, dtype=query.dtype, device=device)
    lse = torch.zeros(rows, case.heads, device=device)
    one = torch.ones((), device=device)  # the scales of an unquantised pool, which an engine keeps on the device

    def way(splits: int) -> Way:
        partial_sums = torch.empty(rows, case.heads, splits, R + 1, device=device)

        def run() -> torch.Tensor:
            module.decode_attention_fwd(
                query, pool, pool[..., :R], out, lse, tables, lengths, partial_sums, splits, SCALE, case.page_size,
                k_scale=one, v_scale=one, is_mla=True,
            )  # fmt: skip
            return out.view(case.batch, case.q_len, case.heads, R)

        return Way(run, f"{splits} splits")

    return [way(splits) for splits in SPLITS]


def _sglang_triton(module: ModuleType, inputs: Inputs) -> list[Way]:
    """The table becomes a list of token slots, which is what that engine keeps."""
    case, device = inputs.case, inputs.device
    _dense_16_bit("SGLang's Triton kernel", inputs)
    if case.q_len > 1:
        raise Unable(f"Q is {case.q_len}; SGLang's Triton decode kernel takes 1")
    inside = torch.arange(case.page_size, device=device)
    tokens = (inputs.tables.long()[..., None] * case.page_size + inside).flatten(1)  # [B, W * P]
    listed = tokens[torch.arange(tokens.shape[1], device=device) < inputs.lengths[:, None]]
    starts = _starts(inputs.lengths)
    slots = inputs.pool.view(-1, 1, D)
    query = inputs.query[:, 0]
    out = torch.zeros(case.batch, case.heads, R, dtype=query.dtype, device=device)

    def way(splits: int) -> Way:
        partial_sums = torch.empty(case.batch, case.heads, splits, R, device=device)
        partial_lse = torch.empty(case.batch, case.heads, splits, device=device)
        counts = torch.full((case.batch,), splits, dtype=torch.int32, device=device)

        def run() -> torch.Tensor:
            module.decode_attention_fwd(
                query, slots, slots[..., :R], out, starts, listed, partial_sums, partial_lse, counts, splits, SCALE,
                1.0, 1.0,
            )  # fmt: skip
            return out.view(case.batch, 1, case.heads, R)

        return Way(run, f"{splits} splits")

    return [way(splits) for splits in SPLITS]


def _dense_16_bit(whose: str, inputs: Inputs) -> None:
    if inputs.case.top_k:
        raise Unable(f"the case is sparse; {whose} is dense")
    if inputs.case.dtype == "fp8":
        raise Unable(f"the pool is in fp8; {whose} takes bf16 and fp16 here")


def _starts(counts: torch.Tensor) -> torch.Tensor:
    """[B + 1] int32: where each request's entries begin in a list of all."""
    starts = torch.zeros(len(counts) + 1, dtype=torch.int32, device=counts.device)
    starts[1:] = counts.cumsum(0)
    return starts


PEERS = {
    peer.name: peer
    for peer in (
        Peer("flashmla", "FlashMLA", ("flash_mla.flash_mla_interface",), "sgl-flash-mla", _flashmla),
        Peer("flashinfer", "FlashInfer fa3", ("flashinfer.mla",), "flashinfer-python", _flashinfer_fa3),
        Peer(
            "sglang",
            "SGLang Triton",
            ("sglang.srt.layers.attention.triton_ops.decode_attention", "sgl_decode"),
            "sglang",
            _sglang_triton,
        ),
        Peer(
            "vllm",
            "vLLM Triton",
            ("vllm.v1.attention.ops.triton_decode_attention", "vllm_triton_decode"),
            "vllm",
            _vllm_triton,
        ),
    )
}
"""Every peer by name, the fastest ones of Hopper first."""


def choose(names: Iterable[str] | None) -> list[Peer]:
    """The peers of these names; "all" is every one, None every one that is installed.

    Raises:
        ValueError: no peer has that name.
    """
    if names is None:
        return [peer for peer in PEERS.values() if peer.module_name()]
    asked = list(names)
    unknown = [name for name in asked if name not in PEERS and name != "all"]
    if unknown:
        raise ValueError(f"no peer is named {unknown[0]!r}; the peers are {', '.join(PEERS)}, or all")
    return [peer for name, peer in PEERS.items() if name in asked or "all" in asked]

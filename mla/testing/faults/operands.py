"""What is taken for the key, the value and the query once the address is right."""

from __future__ import annotations

from functools import partial

import torch

from mla.problem import Problem
from mla.testing.case import Case
from mla.testing.emulate import Kernel
from mla.testing.faults.fault import planted
from mla.testing.faults.raw import Careless, load

_planted = partial(planted, "operands")


@_planted(
    "values-from-the-last-columns",
    "The values are the last 512 columns of a row, not the first.",
    Case(lengths=(5, 9), heads=3, page_size=4),
    Case(lengths=(1,), heads=2, page_size=4),
)
class LastColumns(Kernel):
    def values(self, p: Problem, keys: torch.Tensor) -> torch.Tensor:
        return keys[:, p.head_dim - p.kv_lora_rank :]


@_planted(
    "rope-part-in-the-values",
    "The last 64 columns of the values come from the rope part.",
    Case(lengths=(5, 9), heads=3, page_size=4),
    Case(lengths=(1,), heads=2, page_size=4),
)
class RopeInValues(Kernel):
    def values(self, p: Problem, keys: torch.Tensor) -> torch.Tensor:
        return torch.cat([keys[:, : p.kv_lora_rank - p.qk_rope_head_dim], keys[:, p.kv_lora_rank :]], dim=1)


@_planted(
    "scores-without-the-rope-part",
    "Only the first 512 dimensions of query and key meet.",
    Case(lengths=(5, 9), heads=3, page_size=4),
    Case(lengths=(6, 11), q_len=2, heads=2, page_size=4, scores="peaked"),
)
class NoRope(Kernel):
    def scores(self, p: Problem, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return super().scores(p, query[:, : p.kv_lora_rank], keys[:, : p.kv_lora_rank])


@_planted(
    "scores-from-the-rope-part-alone",
    "Only the last 64 dimensions of query and key meet.",
    Case(lengths=(5, 9), heads=3, page_size=4),
    Case(lengths=(6, 11), q_len=2, heads=2, page_size=4, scores="one_hot"),
)
class RopeAlone(Kernel):
    def scores(self, p: Problem, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return super().scores(p, query[:, p.kv_lora_rank :], keys[:, p.kv_lora_rank :])


@_planted(
    "rope-part-counted-twice",
    "The rope part is added to a tile of scores that has it already.",
    Case(lengths=(5, 9), heads=3, page_size=4),
    Case(lengths=(6, 11), q_len=2, heads=2, page_size=4, scores="peaked"),
)
class RopeTwice(Kernel):
    def scores(self, p: Problem, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        rank = p.kv_lora_rank
        return super().scores(p, query, keys) + super().scores(p, query[:, rank:], keys[:, rank:])


@_planted(
    "query-strides-ignored",
    "The query is taken to be packed.",
    Case(lengths=(6, 11), q_len=3, heads=3, page_size=4, query_layout="transposed"),
    Case(lengths=(5, 9), heads=3, page_size=4, query_layout="wider"),
    needs=("strided query",),
)
class PackedQuery(Kernel):
    def query(self, p: Problem, b: int, t: int) -> torch.Tensor:
        first = (b * p.q_len + t) * p.num_heads * p.head_dim
        lanes = torch.arange(p.num_heads * p.head_dim, device=p.device)
        return load(p.query, first + lanes).view(p.num_heads, p.head_dim).to(torch.float32)


@_planted(
    "query-heads-before-tokens",
    "The query is read as [B, H, Q, D].",
    Case(lengths=(6, 11), q_len=3, heads=4, page_size=4),
    Case(lengths=(9,), q_len=2, heads=3, page_size=4),
    needs=("several tokens", "several heads"),
)
class HeadsBeforeTokens(Kernel):
    def query(self, p: Problem, b: int, t: int) -> torch.Tensor:
        heads_first = p.query[b].reshape(p.num_heads, p.q_len, p.head_dim)
        return heads_first[:, t].to(torch.float32)


@_planted(
    "query-of-the-first-token",
    "Every token of a request asks with the first token's query.",
    Case(lengths=(6, 11), q_len=3, heads=3, page_size=4),
    Case(lengths=(9,), q_len=2, heads=3, page_size=4),
    needs=("several tokens",),
)
class FirstTokensQuery(Kernel):
    def query(self, p: Problem, b: int, t: int) -> torch.Tensor:
        return super().query(p, b, 0)


@_planted(
    "e4m3-cache-read-as-e5m2",
    "The bytes of an e4m3 cache are read as e5m2.",
    Case(lengths=(5, 9), heads=3, page_size=4, query="float8_e4m3fn", cache="float8_e4m3fn"),
    Case(lengths=(6, 11), q_len=2, heads=2, page_size=4, query="bfloat16", cache="float8_e4m3fn"),
    needs=("e4m3 cache",),
)
class ReadAsE5m2(Careless):
    def number(self, stored: torch.Tensor) -> torch.Tensor:
        read = stored.view(torch.float8_e5m2) if stored.dtype is torch.float8_e4m3fn else stored
        return super().number(read)


@_planted(
    "e4m3-cache-read-with-another-bias",
    "The bytes of an e4m3 cache are read as e4m3fnuz: half of each value, and NaN for minus zero.",
    Case(lengths=(5, 9), heads=3, page_size=4, query="float8_e4m3fn", cache="float8_e4m3fn"),
    Case(lengths=(4,), heads=2, page_size=4, query="float16", cache="float8_e4m3fn", values="ones", scores="equal"),
    needs=("e4m3 cache",),
)
class ReadAsFnuz(Careless):
    def number(self, stored: torch.Tensor) -> torch.Tensor:
        read = stored.view(torch.float8_e4m3fnuz) if stored.dtype is torch.float8_e4m3fn else stored
        return super().number(read)


@_planted(
    "fp16-cache-read-as-bf16",
    "The bits of an fp16 cache are read as bf16.",
    Case(lengths=(5, 9), heads=3, page_size=4, query="float16", cache="float16"),
    Case(lengths=(4,), q_len=2, heads=2, page_size=4, query="float16", cache="float16", values="ones", scores="equal"),
    needs=("fp16 cache",),
)
class ReadAsBf16(Careless):
    def number(self, stored: torch.Tensor) -> torch.Tensor:
        read = stored.view(torch.bfloat16) if stored.dtype is torch.float16 else stored
        return super().number(read)

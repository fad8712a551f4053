"""One attention layer of DeepSeek-V3 in plain PyTorch: all that stands before and behind the decode call.

The layer has two forms with the same result. With a token's latent c [R], its rotated key k [64], and per head the key
and value matrices W_K and W_V [128, R]:

    plain      score = q_nope . (W_K c) + q_rope . k        out = sum p (W_V c)      builds every head's keys and values
    absorbed   score = (W_K^T q_nope) . c + q_rope . k      out = W_V (sum p c)      reads nothing but c and k

The absorbed query is [W_K^T q_nope, q_rope], R + 64 = D numbers, and [c, k] is what the cache holds.

Letters: B requests, Q query tokens, T tokens of a whole sequence, S of them whose output is wanted, H heads, R = 512,
D = 576, C hidden size, L = q_lora_rank.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1; DeepSeek-V3 (arXiv 2412.19437) for the sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mla.demo import rope
from mla.demo.rope import Rope

NOPE, ROPE, VALUE, R = 128, rope.WIDTH, 128, 512
DEEPSEEK_ROPE = Rope()
ROWS_AT_ONCE = 1024  # of a weight, when it is cast
HEADS_AT_ONCE = 16  # of keys and values, when they are built


@dataclass(frozen=True)
class Size:
    """The sizes of a layer that may vary. The defaults are DeepSeek-V3's."""

    hidden: int = 7168  # C
    heads: int = 128  # H
    q_lora_rank: int = 1536  # L


@dataclass(frozen=True)
class Weights:
    """The weights as a checkpoint lays them out, [outputs, inputs]; any float dtype, one for all."""

    q_a: torch.Tensor  # [L, C]
    q_a_norm: torch.Tensor  # [L]
    q_b: torch.Tensor  # [H * 192, L], per head 128 rows without position and 64 rotated ones
    kv_a: torch.Tensor  # [D, C], the latent's R rows and the 64 of the rotated key that all heads share
    kv_a_norm: torch.Tensor  # [R]
    kv_b: torch.Tensor  # [H * 256, R], per head W_K's 128 rows and W_V's 128
    o: torch.Tensor  # [C, H * 128]

    @classmethod
    def seeded(cls, size: Size, seed: int, device: torch.device | str = "cpu") -> Weights:
        """Float32 weights that keep unit variance: the same numbers on every device."""
        generator = torch.Generator().manual_seed(seed)

        def matrix(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, generator=generator).mul_(columns**-0.5).to(device)

        def norm(width: int) -> torch.Tensor:
            return (0.75 + 0.5 * torch.rand(width, generator=generator)).to(device)

        return cls(
            q_a=matrix(size.q_lora_rank, size.hidden),
            q_a_norm=norm(size.q_lora_rank),
            q_b=matrix(size.heads * (NOPE + ROPE), size.q_lora_rank),
            kv_a=matrix(R + ROPE, size.hidden),
            kv_a_norm=norm(R),
            kv_b=matrix(size.heads * (NOPE + VALUE), R),
            o=matrix(size.hidden, size.heads * VALUE),
        )

    def count(self) -> int:
        """How many numbers the layer has."""
        return sum(tensor.numel() for tensor in vars(self).values())


def _exact(x: torch.Tensor) -> torch.Tensor:
    return x


@dataclass(frozen=True)
class Rounding:
    """What plain attention does to a tensor where a decode would store it. The default is nothing."""

    query: Callable[[torch.Tensor], torch.Tensor] = _exact  # [S, H, 192], S query tokens
    latents: Callable[[torch.Tensor], torch.Tensor] = _exact  # [T, D]
    output: Callable[[torch.Tensor], torch.Tensor] = _exact  # [S, heads, 128], some heads at a time


NO_ROUNDING = Rounding()


class AttentionLayer:
    """Multi-head latent attention. Computes in the wider dtype of its input and its weights.

    Args:
        weights: see `Weights`; H and C are read from their shapes.
        rope: the rotation.
        norm_eps: added to the mean square in both RMS norms.
    """

    def __init__(self, weights: Weights, rope: Rope = DEEPSEEK_ROPE, norm_eps: float = 1e-6) -> None:
        self.weights = weights
        self.rope = rope
        self.norm_eps = norm_eps
        self.heads = weights.kv_b.shape[0] // (NOPE + VALUE)

    @property
    def softmax_scale(self) -> float:
        """What the scores are multiplied by: 1 / sqrt(128 + 64), the width before absorption, times YaRN's factor."""
        return float(self.rope.score_factor * (NOPE + ROPE) ** -0.5)

    @torch.no_grad()
    def latents(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """What the cache holds of each token: the normalised latent and the rotated key.

        Args:
            hidden: [B, T, C].
            positions: integers [B, T], counted from the start of the request.

        Returns:
            [B, T, D].
        """
        compressed, key = torch.split(_linear(hidden, self.weights.kv_a), [R, ROPE], dim=-1)
        return torch.cat([self._norm(compressed, self.weights.kv_a_norm), self.rope.rotate(key, positions)], dim=-1)

    @torch.no_grad()
    def query(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The plain query, [B, Q, H, 192] from hidden [B, Q, C]: 128 numbers without position, 64 rotated."""
        low = self._norm(_linear(hidden, self.weights.q_a), self.weights.q_a_norm)  # [B, Q, L]
        query = _linear(low, self.weights.q_b).reshape(*low.shape[:-1], self.heads, NOPE + ROPE)
        nope, rotated = torch.split(query, [NOPE, ROPE], dim=-1)
        return torch.cat([nope, self.rope.rotate(rotated, positions[..., None])], dim=-1)

    @torch.no_grad()
    def absorbed_query(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The query that meets latents instead of keys, as the decode call takes it.

        Args:
            hidden: [B, Q, C].
            positions: integers [B, Q].

        Returns:
            [B, Q, H, D]: W_K^T q_nope, then q_rope. Not scaled.
        """
        nope, rotated = torch.split(self.query(hidden, positions), [NOPE, ROPE], dim=-1)
        key_weight = self._kv_b()[:, :NOPE].to(nope.dtype)  # [H, 128, R]
        return torch.cat([torch.einsum("bqhn,hnr->bqhr", nope, key_weight), rotated], dim=-1)

    @torch.no_grad()
    def project_out(self, attention: torch.Tensor) -> torch.Tensor:
        """The layer's output from the decode call's: W_V per head, then the output projection.

        Args:
            attention: [B, Q, H, R], the weighted sums of latents.

        Returns:
            [B, Q, C].
        """
        x = attention.to(_wider(attention, self.weights.kv_b))
        values = torch.einsum("bqhr,hvr->bqhv", x, self._kv_b()[:, NOPE:].to(x.dtype))
        return _linear(values.flatten(2), self.weights.o)

    @torch.no_grad()
    def plain_attention(
        self, hidden: torch.Tensor, *, first: int = 0, rounding: Rounding = NO_ROUNDING
    ) -> torch.Tensor:
        """Causal attention over one whole sequence with the keys and values of every head: the un-absorbed form.

        Args:
            hidden: [T, C]; float64 gives the exact answer. Token t stands at position t and sees tokens 0..t.
            first: the first token whose output is wanted.
            rounding: applied where a decode would store; see `mla.demo.storage`.

        Returns:
            [T - first, C]. Weights of another dtype are cast piece by piece and never held twice.
        """
        positions = torch.arange(hidden.shape[0], device=hidden.device)
        query = rounding.query(self.query(hidden[None, first:], positions[None, first:])[0])  # [S, H, 192]
        cached = rounding.latents(self.latents(hidden[None], positions[None])[0])  # [T, D]
        latent, key = torch.split(cached, [R, ROPE], dim=-1)
        later = positions[first:, None] < positions  # [S, T]
        values = []
        for start in range(0, self.heads, HEADS_AT_ONCE):
            heads = slice(start, start + HEADS_AT_ONCE)
            key_value = torch.einsum("tr,hmr->htm", latent, self._kv_b()[heads].to(latent.dtype))
            key_nope, value = torch.split(key_value, [NOPE, VALUE], dim=-1)  # [heads, T, 128] each
            query_nope, query_rope = torch.split(query[:, heads], [NOPE, ROPE], dim=-1)
            scores = torch.einsum("shn,htn->hst", query_nope, key_nope) + torch.einsum("shn,tn->hst", query_rope, key)
            scores = (scores * self.softmax_scale).masked_fill(later, float("-inf"))
            values.append(rounding.output(torch.einsum("hst,htv->shv", scores.softmax(dim=-1), value)))
        return _linear(torch.cat(values, dim=1).flatten(1), self.weights.o)

    def _kv_b(self) -> torch.Tensor:
        return self.weights.kv_b.reshape(self.heads, NOPE + VALUE, R)  # [H, 256, R]

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.norm_eps) * weight.to(x.dtype)


def _wider(x: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, weight.dtype)


def _linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [..., inputs] times weight [outputs, inputs] -> [..., outputs], in the wider dtype of the two."""
    x = x.to(_wider(x, weight))
    if x.dtype is weight.dtype:
        return x @ weight.T
    return torch.cat([x @ rows.to(x.dtype).T for rows in torch.split(weight, ROWS_AT_ONCE)], dim=-1)

"""The demo: one attention layer of DeepSeek-V3 at its true size, decoded from a paged cache and held to float64."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mla.demo.decode import Decoded, decode
from mla.demo.layer import NO_ROUNDING, NOPE, ROPE, VALUE, AttentionLayer, Rounding, Size, Weights
from mla.demo.picture import Curve, save_picture
from mla.demo.storage import ALLOWED, CONFIGURATIONS, budget, relative_error
from mla.progress import progress

Q_LEN = 2  # tokens decoded at once: one proposed by multi-token prediction, and the one before it
SMALL = Size(hidden=512, heads=4, q_lora_rank=256)
BUDGET_IN_WORDS = (
    f"Budget: {ALLOWED:g} times the largest error of plain un-absorbed float64 attention whose query, latents and\n"
    "head outputs are rounded to the same formats (e4m3 latents by the same scale), and nothing else is."
)


@dataclass(frozen=True)
class Judged:
    """One configuration next to the answer.

    Attributes:
        decoded: what ran.
        error: [S] float64, relative, one per decoded token.
        budget: the largest that is allowed.
    """

    decoded: Decoded
    error: torch.Tensor
    budget: float

    @property
    def passed(self) -> bool:
        """Whether every token is within the budget; NaN is not."""
        return bool((self.error <= self.budget).all())


def run_demo(
    *,
    tokens: int = 384,
    steps: int = 24,
    picture: str | None = "mla_demo.png",
    seed: int = 0,
    device: str = "cpu",
    small: bool = False,
) -> int:
    """Decode, compare, print, and draw.

    Args:
        tokens: in the cache before the first step.
        steps: of decoding, two tokens each.
        picture: the PNG file to write; None writes none. Without matplotlib a sentence says so.
        seed: of the weights and the hidden states.
        device: any that PyTorch knows, with float64.
        small: a layer of hidden size 512 and 4 heads instead of 7168 and 128.

    Returns:
        0 if every token's error is within its budget, else 1.

    Raises:
        ValueError: tokens or steps is below 1, or the picture's folder does not exist.
    """
    for name, value in (("tokens", tokens), ("steps", steps)):
        if value < 1:
            raise ValueError(f"{name} is {value}; expected at least 1")
    if picture is not None and not Path(picture).resolve().parent.is_dir():
        raise ValueError(f"picture is {picture!r}; expected a file in a folder that exists")
    size = SMALL if small else Size()
    with progress(2 + len(CONFIGURATIONS) * (steps + 1)) as advance:
        advance("making the layer")
        layer = AttentionLayer(Weights.seeded(size, seed, device))
        hidden = _hidden_states(tokens + steps * Q_LEN, size.hidden, seed + 1).to(device)
        advance("plain attention in float64")
        exact = _plain(layer, hidden, tokens)
        judged = []
        for formats in CONFIGURATIONS:
            decoded = decode(layer, hidden, tokens, Q_LEN, formats, advance)
            advance(f"plain attention in float64, rounded as {formats.name}")
            rounded = _plain(layer, hidden, tokens, formats.rounding(decoded.cache_scale))
            judged.append(Judged(decoded, relative_error(decoded.output, exact), budget(rounded, exact)))
    print(
        f"One DeepSeek-V3 attention layer: hidden size {size.hidden}, {size.heads} heads, "
        f"q_lora_rank {size.q_lora_rank}.\n{layer.weights.count():,} float32 weights (seed {seed}), on {device}. "
        f"Prefill {tokens} tokens, then {steps} steps of {Q_LEN} tokens.\n"
    )
    _print_what_ran(judged)
    _print_errors(judged)
    _print_costs(judged, size.heads)
    if picture is not None:
        title = f"Decoding {steps * Q_LEN} tokens after {tokens}: hidden size {size.hidden}, {size.heads} heads"
        curves = [Curve(one.decoded.formats.name, one.error, one.budget) for one in judged]
        print(save_picture(picture, title, tokens, curves))
    return 0 if all(one.passed for one in judged) else 1


def _hidden_states(tokens: int, width: int, seed: int) -> torch.Tensor:
    """[T, C] float32 of unit variance, as they leave the norm in front of an attention layer."""
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed))


def _plain(layer: AttentionLayer, hidden: torch.Tensor, first: int, rounding: Rounding = NO_ROUNDING) -> torch.Tensor:
    return layer.plain_attention(hidden.to(torch.float64), first=first, rounding=rounding)


def _print_what_ran(judged: Sequence[Judged]) -> None:
    told: set[str] = set()
    for one in judged:
        text = str(one.decoded.explanation)
        print(text.splitlines()[0])
        verdicts = "\n".join(text.splitlines()[1:])
        print("  as above" if verdicts in told else verdicts)
        told.add(verdicts)


def _print_errors(judged: Sequence[Judged]) -> None:
    print(
        "\nError of the layer's output against plain un-absorbed attention in float64: ||y - y64|| / ||y64|| by token."
    )
    print(BUDGET_IN_WORDS)
    print(f"{'':24}{'median':>10}{'max':>10}{'budget':>10}{'max/budget':>12}")
    for one in judged:
        largest = float(one.error.max())
        print(
            f"{one.decoded.formats.name:24}{one.error.median():10.2e}{largest:10.2e}{one.budget:10.2e}"
            f"{largest / one.budget:12.2f}  {'pass' if one.passed else 'FAIL'}"
        )


def _print_costs(judged: Sequence[Judged], heads: int) -> None:
    full = heads * (NOPE + ROPE + VALUE) * 2
    print(f"\nBytes per token in the cache (the keys and values of {heads} heads in bf16 are {full}):")
    for word, held in {one.decoded.formats.cache_word: one.decoded.bytes_per_token for one in judged}.items():
        print(f"  {word} latents: {held}, {full / held:.1f} times fewer")
    print(f"\n{'Milliseconds per step':24}" + "".join(f"{part:>16}" for part in judged[0].decoded.milliseconds))
    for one in judged:
        print(f"{one.decoded.formats.name:24}" + "".join(f"{ms:16.1f}" for ms in one.decoded.milliseconds.values()))
    peak = _peak_memory()
    if peak is not None:
        print(f"\nPeak memory of this process: {peak / 2**30:.1f} GiB.")


def _peak_memory() -> int | None:
    """Bytes; None where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024

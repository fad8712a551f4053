"""What our own backends claim, as one table: the README contains it, and a test compares."""

from __future__ import annotations

from mla import registry
from mla.backend import Backend
from mla.capabilities import Capabilities
from mla.cli.problems import DTYPES, short_name
from mla.cli.tables import Table

COLUMNS = ("backend", "state", "devices", "query and cache", "out", "modes", "sinks", "LSE", "limits")


def capability_table() -> Table:
    """One row per built-in backend, from the data that also makes it refuse."""
    return Table("what the backends claim", COLUMNS, [_row(registry.load(name)) for name in registry.BUILT_IN])


def _row(backend: Backend) -> tuple[str, ...]:
    name = f"`{backend.name}`"
    claims = getattr(backend, "capabilities", None)
    if not isinstance(claims, Capabilities):
        return (name, "runs, and states no capabilities", *("-",) * (len(COLUMNS) - 2))
    return (
        name,
        "runs",
        _devices(claims),
        _pairs(claims),
        ", ".join(map(short_name, claims.out_dtypes)),
        " and ".join(mode for mode, there in (("dense", claims.dense), ("sparse", claims.sparse)) if there),
        "yes" if claims.sinks else "no",
        "yes" if claims.lse else "no",
        _limits(claims),
    )


def _devices(claims: Capabilities) -> str:
    if claims.compute_capabilities is not None:
        return ", ".join(f"sm_{major}{minor}" for major, minor in claims.compute_capabilities)
    return "any" if claims.device_types is None else ", ".join(claims.device_types)


def _pairs(claims: Capabilities) -> str:
    """ "bf16" where both are, "bf16 on e4m3" where the cache differs; in the order of `DTYPES`."""
    order = list(DTYPES.values())
    pairs = sorted(
        claims.dtype_pairs, key=lambda pair: (pair[0] is not pair[1], order.index(pair[0]), order.index(pair[1]))
    )
    return ", ".join(short_name(q) if q is kv else f"{short_name(q)} on {short_name(kv)}" for q, kv in pairs)


def _limits(claims: Capabilities) -> str:
    limits = []
    if claims.max_q_len is not None:
        limits.append(f"Q <= {claims.max_q_len}")
    if claims.max_heads is not None:
        limits.append(f"H <= {claims.max_heads}")
    if claims.page_sizes is not None:
        limits.append(f"page size {' or '.join(map(str, claims.page_sizes))}")
    return ", ".join(limits) or "none"

"""The table of claims is made from the same data that makes a backend refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mla
from mla.cli import capability_table
from mla.cli.problems import DTYPES


def cells(backend: Any) -> dict[str, str]:
    return dict(zip(capability_table.COLUMNS, capability_table._row(backend), strict=True))


class Claimant:
    name = "claimant"

    def __init__(self, **claims: Any) -> None:
        self.capabilities = mla.Capabilities(**claims)


def test_a_backend_that_claims_everything() -> None:
    assert cells(Claimant()) == {
        "backend": "`claimant`",
        "state": "runs",
        "devices": "any",
        "query and cache": "bf16, fp16, e4m3, fp32, fp64, bf16 on e4m3, fp16 on e4m3",
        "out": "bf16, fp16, fp32",
        "modes": "dense and sparse",
        "sinks": "yes",
        "LSE": "yes",
        "limits": "none",
    }


@pytest.mark.parametrize(
    ("claims", "column", "told"),
    [
        ({"device_types": ("cuda",)}, "devices", "cuda"),
        ({"compute_capabilities": ((10, 0), (10, 3))}, "devices", "sm_100, sm_103"),
        ({"dtype_pairs": frozenset({(torch.bfloat16, torch.float8_e4m3fn)})}, "query and cache", "bf16 on e4m3"),
        ({"out_dtypes": (torch.bfloat16,)}, "out", "bf16"),
        ({"sparse": False}, "modes", "dense"),
        ({"dense": False}, "modes", "sparse"),
        ({"sinks": False}, "sinks", "no"),
        ({"lse": False}, "LSE", "no"),
        ({"max_q_len": 4, "max_heads": 64, "page_sizes": (32, 64)}, "limits", "Q <= 4, H <= 64, page size 32 or 64"),
    ],
)
def test_each_claim_shows(claims: dict[str, Any], column: str, told: str) -> None:
    assert cells(Claimant(**claims))[column] == told


def test_a_backend_without_stated_claims_says_so() -> None:
    class Silent:
        name = "silent"

    assert cells(Silent())["state"] == "runs, and states no capabilities"


def test_every_dtype_of_the_contract_has_a_short_name() -> None:
    every = {dtype for pair in mla.Capabilities().dtype_pairs for dtype in pair}
    assert every == set(DTYPES.values())


def test_the_markdown_has_a_row_for_each_of_our_backends(run: Any) -> None:
    header, rule, *rows = run("backends", "--markdown").splitlines()
    assert header.split(" | ")[:2] == ["| backend", "state"]
    assert set(rule) == set("| -")
    assert [row.split("`")[1] for row in rows] == list(mla.registry.BUILT_IN)
    assert {line.count("|") for line in (header, rule, *rows)} == {len(capability_table.COLUMNS) + 1}

"""Backends that other distributions offer: real metadata on the import path of a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

import mla

GOOD = """
import mla

class Sevens:
    name = "sevens"
    capabilities = mla.Capabilities(sparse=False)

    def why_not(self, problem):
        return self.capabilities.refusals(problem)

    def run(self, problem, out, lse):
        out.fill_(7)
        if lse is not None:
            lse.zero_()

backend = Sevens()
"""

SETUP = """
import sys, warnings, torch, mla
from mla.errors import BackendPluginWarning

def arguments(backend="auto"):
    return dict(
        query=torch.zeros(1, 1, 2, 576), kv_cache=torch.ones(1, 4, 576), workspace_buffer=None, qk_nope_head_dim=128,
        kv_lora_rank=512, qk_rope_head_dim=64, block_tables=torch.zeros(1, 1, dtype=torch.int32),
        seq_lens=torch.tensor([3]), max_seq_len=3, backend=backend,
    )

def decode(backend="auto"):
    (value,) = set(mla.trtllm_batch_decode_with_kv_cache_mla(**arguments(backend)).flatten().tolist())
    return value

def warned(act):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    assert all(one.category is BackendPluginWarning for one in caught), caught
    return [str(one.message) for one in caught]
"""


@pytest.fixture
def offer(tmp_path: Path) -> Callable[..., None]:
    """offer(distribution, {name: target}, module=source): install a distribution by hand, as an installer would."""

    def install(distribution: str, backends: Mapping[str, str], **modules: str) -> None:
        metadata = tmp_path / f"{distribution.replace('-', '_')}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        lines = [f"{name} = {target}" for name, target in backends.items()]
        (metadata / "entry_points.txt").write_text("\n".join(["[mla.backends]", *lines, ""]))
        for module, source in modules.items():
            (tmp_path / f"{module}.py").write_text(source)

    return install


@pytest.fixture
def fresh(tmp_path: Path) -> Callable[[str], None]:
    """fresh(code): a new process that sees what was offered runs it, and its assertions hold."""

    def run(code: str) -> None:
        path = os.pathsep.join([str(tmp_path), str(Path(mla.__file__).parents[1])])
        done = subprocess.run(
            [sys.executable, "-c", SETUP + code],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr

    return run


def test_a_good_plugin_is_listed_runs_by_name_and_is_never_picked_by_auto(
    offer: Callable[..., None], fresh: Callable[[str], None]
) -> None:
    offer("kernel-shop", {"sevens": "kernel_shop:backend"}, kernel_shop=GOOD)
    fresh("""
info = mla.backends()["sevens"]
assert (info.source, info.target, info.loaded, info.broken) == ("kernel-shop", "kernel_shop:backend", False, None)
assert "kernel_shop" not in sys.modules, "listing loads nothing"
assert warned(lambda: decode("sevens")) == []
assert decode("sevens") == 7
assert decode() == 1
assert mla.backends()["sevens"].loaded
assert list(mla.backends())[:3] == ["reference", "trtllm-gen", "xqa"], "ours come first"
explained = mla.explain(**arguments())
assert explained.backend == "reference"
assert explained.verdicts["sevens"].state == "accepts"
assert "sevens" not in explained.order
""")


def test_a_plugin_refuses_with_its_reasons(offer: Callable[..., None], fresh: Callable[[str], None]) -> None:
    offer("kernel-shop", {"sevens": "kernel_shop:backend"}, kernel_shop=GOOD)
    fresh("""
sparse = arguments("sevens") | dict(block_tables=torch.zeros(1, 1, 4, dtype=torch.int32), sparse_mla_top_k=4)
try:
    mla.trtllm_batch_decode_with_kv_cache_mla(**sparse)
except mla.BackendUnsupported as error:
    assert error.reasons == {"sevens": ("the call is sparse (top 4); it does dense only",)}
else:
    raise AssertionError("it ran")
""")


BROKEN = {
    "raises on import": (
        "broken:backend",
        'raise OSError("libcuda.so.1: cannot open shared object file")',
        "OSError: libcuda",
    ),
    "is not there": ("absent:backend", "", "No module named 'absent'"),
    "lacks the attribute": ("broken:backend", "", "has no attribute 'backend'"),
    "is no backend": ("broken:backend", "backend = 7", "is a int without name, why_not, run"),
    "has another name": ("broken:backend", GOOD, "calls itself 'sevens'"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_plugin_warns_by_name_and_stops_nobody_else(
    fault: str, offer: Callable[..., None], fresh: Callable[[str], None]
) -> None:
    target, source, message = BROKEN[fault]
    offer("broken-shop", {"shaky": target}, broken=source)
    offer("kernel-shop", {"sevens": "kernel_shop:backend"}, kernel_shop=GOOD)
    fresh(f"""
assert warned(lambda: mla.backends()) == []
assert warned(lambda: decode()) == [], "auto does not even look at it"
(warning,) = warned(lambda: print(mla.explain(**arguments())))
assert "'shaky' (from broken-shop) is broken" in warning and {message!r} in warning, warning
explained = mla.explain(**arguments())
assert explained.backend == "reference"
assert explained.verdicts["shaky"].state == "broken"
assert "by name: broken" in str(explained)
assert {message!r} in mla.backends()["shaky"].broken
assert decode() == 1 and decode("sevens") == 7
try:
    decode("shaky")
except mla.BackendBroken as error:
    assert "'shaky'" in str(error) and {message!r} in str(error), error
else:
    raise AssertionError("it ran")
""")


def test_two_plugins_of_one_name_are_named_with_both_distributions(
    offer: Callable[..., None], fresh: Callable[[str], None]
) -> None:
    offer("alpha-shop", {"sevens": "alpha_shop:backend"}, alpha_shop=GOOD)
    offer("beta-shop", {"sevens": "beta_shop:backend"}, beta_shop=GOOD.replace("fill_(7)", "fill_(8)"))
    fresh("""
(warning,) = warned(lambda: mla.backends())
for word in ("'sevens'", "alpha-shop", "alpha_shop:backend", "beta-shop", "beta_shop:backend", "the first is used"):
    assert word in warning, (word, warning)
assert mla.backends()["sevens"].source == "alpha-shop"
assert decode("sevens") == 7
""")


@pytest.mark.parametrize("name", mla.registry.BUILT_IN)
def test_a_plugin_cannot_take_the_place_of_one_of_ours(
    name: str, offer: Callable[..., None], fresh: Callable[[str], None]
) -> None:
    offer("impostor", {name: "impostor:backend"}, impostor=GOOD.replace('"sevens"', repr(name)))
    fresh(f"""
(warning,) = warned(lambda: mla.backends())
assert {name!r} in warning and "by mla" in warning and "impostor" in warning, warning
info = mla.backends()[{name!r}]
assert (info.source, info.target) == ("mla", {mla.registry.BUILT_IN[name]!r})
assert decode() == 1
""")


def test_our_own_entry_points_are_not_duplicates(offer: Callable[..., None], fresh: Callable[[str], None]) -> None:
    offer("mla", mla.registry.BUILT_IN)
    fresh("""
assert warned(lambda: mla.backends()) == []
assert {info.source for info in mla.backends().values()} == {"mla"}
""")


def test_the_command_line_lists_plugins_by_distribution(
    offer: Callable[..., None], fresh: Callable[[str], None]
) -> None:
    offer("kernel-shop", {"sevens": "kernel_shop:backend"}, kernel_shop=GOOD)
    offer("broken-shop", {"shaky": "absent:backend"})
    fresh("""
import contextlib, io
from mla.cli import main
told = io.StringIO()
with contextlib.redirect_stdout(told):
    assert main(["backends"]) == 0
rows = [line.split()[:3] for line in told.getvalue().splitlines()]
assert ["sevens", "kernel-shop", "accepts"] in rows and ["shaky", "broken-shop", "broken"] in rows, rows
""")

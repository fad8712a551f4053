"""mla works from the tree with nothing installed, and from each way of installing it, wherever one stands."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mla

PROBE = """
import json, torch, mla, mla.reference, mla.backends.xqa, mla.testing
out = mla.trtllm_batch_decode_with_kv_cache_mla(
    query=torch.zeros(1, 1, 2, 576), kv_cache=torch.arange(4.0)[None, :, None].expand(1, 4, 576).contiguous(),
    workspace_buffer=None, qk_nope_head_dim=128, kv_lora_rank=512, qk_rope_head_dim=64,
    block_tables=torch.zeros(1, 1, dtype=torch.int32), seq_lens=torch.tensor([3]), max_seq_len=3,
)
print(json.dumps({
    "version": mla.__version__,
    "backends": sorted(mla.backends()),
    "mean of 0, 1 and 2": out.unique().tolist(),
    "folders": [mla.__path__[0], mla.reference.__path__[0], mla.backends.__path__[0]],
}))
"""


@pytest.fixture(scope="session")
def pythons(
    make_python: Callable[..., Path], bare_python: Path, wheel_python: Path, built: Any, source_tree: Path
) -> Callable[[str], Path]:
    """The interpreter of each way to have mla, made when first asked for."""
    made = {"tree": bare_python, "wheel": wheel_python}
    recipes = {"editable": ("--editable", source_tree), "sdist": (built.sdist,)}

    def python(way: str) -> Path:
        if way not in made:
            made[way] = make_python(way, *recipes[way])
        return made[way]

    return python


WAYS = [
    ("tree", "root"),
    ("editable", "root"),
    ("editable", "elsewhere"),
    ("wheel", "root"),
    ("wheel", "elsewhere"),
    ("sdist", "elsewhere"),
]


@pytest.mark.parametrize(("way", "place"), WAYS, ids=[f"{way}-{place}" for way, place in WAYS])
def test_mla_works(way: str, place: str, pythons: Any, command: Any, source_tree: Path, tmp_path: Path) -> None:
    cwd = source_tree if place == "root" else tmp_path
    told = json.loads(command(pythons(way), "-c", PROBE, cwd=cwd).stdout)
    folders = [Path(folder).resolve() for folder in told.pop("folders")]
    assert told == {
        "version": mla.__version__,
        "backends": ["reference", "trtllm-gen", "xqa"],
        "mean of 0, 1 and 2": [1.0],
    }
    from_tree = place == "root" or way == "editable"
    expected = {source_tree / name for name in ("mla", "reference", "backends")}
    assert (set(folders) == expected) if from_tree else all("site-packages" in folder.parts for folder in folders)


@pytest.mark.parametrize(("way", "place"), [("tree", "root"), ("wheel", "elsewhere")], ids=["tree", "wheel"])
def test_the_module_is_a_command(
    way: str, place: str, pythons: Any, command: Any, source_tree: Path, tmp_path: Path
) -> None:
    cwd = source_tree if place == "root" else tmp_path
    assert "numba-cuda" in command(pythons(way), "-m", "mla", "env", cwd=cwd).stdout


@pytest.mark.parametrize("way", ["editable", "wheel", "sdist"])
def test_an_install_brings_the_command(way: str, pythons: Any, command: Any, tmp_path: Path) -> None:
    script = pythons(way).parent / "mla"
    assert command(script, "--version", cwd=tmp_path).stdout == f"mla {mla.__version__}\n"
    assert command(script, "backends", cwd=tmp_path).stdout.count("accepts") == 1


@pytest.mark.parametrize("way", ["editable", "wheel", "sdist"])
def test_the_installed_metadata_tells_the_same_version_and_backends(
    way: str, pythons: Any, command: Any, tmp_path: Path
) -> None:
    code = (
        "import json; from importlib.metadata import distribution; d = distribution('mla');"
        "print(json.dumps([d.version, {e.name: e.value for e in d.entry_points if e.group == 'mla.backends'}]))"
    )
    version, offered = json.loads(command(pythons(way), "-c", code, cwd=tmp_path).stdout)
    assert version == mla.__version__
    assert offered == mla.registry.BUILT_IN

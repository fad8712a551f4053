"""`import mla` needs PyTorch alone and starts nothing. Each test is a fresh process."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

TINY_CALL = """
import torch, mla
result = mla.trtllm_batch_decode_with_kv_cache_mla(
    torch.zeros(1, 1, 2, 576), torch.ones(1, 4, 576), None, 128, 512, 64,
    torch.zeros(1, 1, dtype=torch.int32), torch.tensor([3]), 3,
)
assert result.eq(1).all()
assert list(mla.backends()) == ["reference", "trtllm-gen", "xqa"]
"""

NEWLY_LOADED = """
import json, sys, torch
before = set(sys.modules)
import mla
{then}
print(json.dumps(sorted(set(sys.modules) - before)))
"""


@pytest.fixture
def fresh(bare_python: Path, command: Any, source_tree: Path) -> Any:
    """fresh(code) -> what a new process printed that ran it in the tree's root, with nothing installed."""

    def run(code: str, **changes: str) -> str:
        stdout: str = command(bare_python, "-c", code, cwd=source_tree, **changes).stdout
        return stdout

    return run


def test_import_loads_nothing_but_itself_and_what_torch_loads(fresh: Any) -> None:
    loaded = json.loads(fresh(NEWLY_LOADED.format(then="")))
    assert {name.partition(".")[0] for name in loaded} - sys.stdlib_module_names == {"mla"}


def test_import_leaves_the_tools_and_the_kernels_alone(fresh: Any) -> None:
    loaded = json.loads(fresh(NEWLY_LOADED.format(then="mla.backends()")))
    later = ("mla.cli", "mla.demo", "mla.testing", "mla.reference", "mla.backends.trtllm_gen", "mla.backends.xqa")
    assert not [name for name in loaded if name.startswith(later)]


def test_a_call_loads_the_backend_that_runs_it_and_no_toolchain(fresh: Any) -> None:
    loaded = json.loads(fresh(NEWLY_LOADED.format(then=TINY_CALL)))
    assert "mla.reference.runner" in loaded
    assert not {"triton", "numba", "matplotlib", "rich", "flashinfer"} & {name.partition(".")[0] for name in loaded}


@pytest.mark.parametrize("absent", [("triton",), ("numba",), ("triton", "numba")], ids="+".join)
def test_toolchains_may_be_absent(fresh: Any, absent: tuple[str, ...]) -> None:
    blocker = f"""
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
"""
    fresh(blocker + TINY_CALL)


@pytest.mark.parametrize("broken", ["triton", "numba"])
def test_a_toolchain_may_fail_to_load_its_library(fresh: Any, broken: str, tmp_path: Path) -> None:
    (tmp_path / f"{broken}.py").write_text('raise OSError("libcuda.so.1: cannot open shared object file")\n')
    fresh(TINY_CALL, PYTHONPATH=str(tmp_path))


def test_all_works_with_every_gpu_hidden(fresh: Any) -> None:
    fresh(TINY_CALL, CUDA_VISIBLE_DEVICES="")


def test_import_and_listing_start_no_gpu_and_a_forked_child_can_go_on(fresh: Any) -> None:
    fresh(f"""
import os, sys, torch, mla
mla.backends()
assert not torch.cuda.is_initialized()
child = os.fork()
if child == 0:
    try:
{"".join(f"        {line}" for line in TINY_CALL.splitlines(keepends=True))}
        assert not torch.cuda.is_initialized()
        os._exit(0)
    except BaseException:
        os._exit(1)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0
""")


@pytest.mark.parametrize("folder", ["reference", "backends"])
def test_a_folder_under_its_bare_name_is_refused_and_the_right_name_told(fresh: Any, folder: str) -> None:
    told = fresh(f"""
try:
    import {folder}
except ImportError as error:
    print(error)
""")
    assert told.startswith(f"import mla.{folder}, not {folder}")


def test_import_time_is_told(fresh: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code = "import torch, time; start = time.perf_counter(); import mla; print(time.perf_counter() - start)"
    start = time.perf_counter()
    seconds = float(fresh(code))
    with capsys.disabled():
        whole = time.perf_counter() - start
        print(f"\nimport mla: {seconds * 1000:.0f} ms on top of torch, {whole:.1f} s with the process")

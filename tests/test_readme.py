"""The README's Python runs, its commands exist, and the backend that it shows passes the contract."""

import re
from pathlib import Path

import pytest
import torch

import effattn
from effattn.backend import _registry
from effattn.testing import contract_cases

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.fixture
def strided():
    (block,) = [block for block in BLOCKS if "class Strided" in block]
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
    yield effattn.get("strided")
    del _registry["strided"]


def run(block: str) -> dict[str, object]:
    names: dict[str, object] = {"__name__": "readme"}
    exec(compile(block, "README.md", "exec"), names)
    return names


def test_the_call(capsys):
    names = run(BLOCKS[0])
    assert names["exact"].shape == names["local"].shape == names["hashed"].shape == (2, 8, 1000, 64)
    assert "sliding_window" in capsys.readouterr().out


@pytest.mark.parametrize("block", [block for block in BLOCKS[1:] if "class Strided" not in block])
def test_every_other_block_runs(block, capsys):
    torch.manual_seed(0)
    names = run(block)
    printed = capsys.readouterr().out
    if "report" in names:  # a swap
        assert "2 of 2 attention sites served" in printed
    assert printed or "print" not in block


def test_a_backend_of_ones_own_is_short_and_passes_the_contract(strided):
    (block,) = [block for block in BLOCKS if "class Strided" in block]
    assert len([line for line in block.splitlines() if line.strip()]) <= 15
    outcomes = [case.check() for case in contract_cases(strided)]
    assert len(outcomes) > 100


def test_every_backend_is_in_the_table():
    for name in effattn.names():
        assert f"| `{name}` |" in README


def test_every_file_that_is_linked_is_there():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("http") or (ROOT / target).exists(), target


def test_every_make_target_exists():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE):
        assert target in targets

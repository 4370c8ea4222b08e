"""What runners share: which cells are left, how a failure becomes a row."""

import io
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

import effattn
from effattn.bench import running
from effattn.bench.workers import load_plugin


@dataclass(frozen=True)
class Cell:
    key: str


CELLS = [Cell("a"), Cell("b"), Cell("c")]
KNOWN: dict[str, dict[str, Any]] = {
    "a": {"status": "ok", "commit": "1234567", "backend_name": "mine"},
    "b": {"status": "crashed", "commit": "1234567", "backend_name": "sdpa"},
    "of another study": {"status": "ok", "commit": "7654321"},
}


@pytest.mark.parametrize(
    ("options", "left", "told"),
    [
        ({}, "c", "2 cells have been measured before"),
        ({"retry": True}, "bc", "1 cells have been measured before"),
        ({"fresh": True}, "abc", None),
    ],
)
@pytest.mark.parametrize("commit", ["1234567", "now"])
def test_what_is_left(options: dict[str, bool], left: str, told: str | None, commit: str) -> None:
    console = Console(file=io.StringIO(), width=120)
    machine: Any = SimpleNamespace(commit=commit)
    cells = running.unmeasured(CELLS, KNOWN, machine, console, source_of=lambda cell: None, **options)
    assert "".join(cell.key for cell in cells) == left
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert printed.startswith(told) if told else printed == ""
    assert ("Some of them with other code (1234567, now now)" in printed) == (bool(told) and commit == "now")


def test_what_other_code_has_measured_is_measured_again() -> None:
    console = Console(file=io.StringIO(), width=120)
    machine: Any = SimpleNamespace(commit="1234567")
    sources = {"a": "now", "b": None, "c": "now"}
    cells = running.unmeasured(CELLS, KNOWN, machine, console, source_of=lambda cell: sources[cell.key])
    assert [cell.key for cell in cells] == ["a", "c"]
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "The code of mine has changed since 1 cells were measured" in printed


def test_the_source_of_a_backend_is_its_file(registry: dict[str, Any], tmp_path: Path) -> None:
    assert running.backend_source([effattn.get("sdpa"), effattn.get("lsh")]) is None
    path = tmp_path / "running_test_plugin.py"
    code = """
from dataclasses import dataclass

import effattn


@effattn.register
@dataclass(frozen=True)
class Mine(effattn.Backend):
    name = "mine_for_test_running"
"""
    path.write_text(code)
    load_plugin(str(path))
    before = running.backend_source([effattn.get("sdpa"), effattn.get("mine_for_test_running")])
    assert before == running.backend_source([effattn.get("mine_for_test_running")])
    path.write_text(code + "    # changed")
    assert before != running.backend_source([effattn.get("mine_for_test_running")])


def test_the_outcome_of_what_ends_well() -> None:
    assert running.outcome(lambda: {"density": 0.5}) == {"status": "ok", "reason": None, "density": 0.5}


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (effattn.UnsupportedError(effattn.get("sdpa"), ["requested X; supported Y"]), "unsupported", "requested X"),
        (ArithmeticError("3 values are NaN"), "error", "3 values are NaN"),
        (torch.OutOfMemoryError("CUDA out of\nmemory"), "out_of_memory", "CUDA out of memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "out_of_memory", "enforce fail"),
        (MemoryError(), "out_of_memory", "MemoryError"),
    ],
)
def test_the_outcome_of_what_fails(error: Exception, status: str, reason: str) -> None:
    def fail() -> dict[str, Any]:
        raise error

    record = running.outcome(fail)
    assert record["status"] == status
    assert reason in record["reason"]


def test_a_mistake_is_no_outcome() -> None:
    def fail() -> dict[str, Any]:
        raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match="shapes do not fit"):
        running.outcome(fail)

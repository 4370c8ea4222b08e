"""What all runners do around their cells: which of them are left, how one that fails becomes a row, the terminal."""

import hashlib
import inspect
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from effattn.backend import Backend, UnsupportedError
from effattn.bench.machine import Machine
from effattn.bench.records import Record
from effattn.bench.workers import is_out_of_memory


class _Cell(Protocol):
    @property
    def key(self) -> str: ...


CellT = TypeVar("CellT", bound=_Cell)


def unmeasured(
    cells: Sequence[CellT],
    known: Mapping[str, Record],
    machine: Machine,
    console: Console,
    *,
    source_of: Callable[[CellT], str | None],
    retry: bool = False,
    fresh: bool = False,
) -> list[CellT]:
    """The cells without a record in ``known``, or with one of other code of a plugin; the user is told of the others.

    Args:
        machine: where, and with which commit, the others are measured now.
        source_of: ``backend_source`` of a cell's backends, which its record holds.
        retry: also those that did not end well.
        fresh: all.
    """
    changed = {
        cell.key: cell
        for cell in cells
        if cell.key in known and known[cell.key].get("backend_source") != source_of(cell)
    }
    left = [
        cell
        for cell in cells
        if fresh or cell.key not in known or cell.key in changed or (retry and known[cell.key].get("status") != "ok")
    ]
    keys = {cell.key for cell in left}
    if changed and not fresh:
        names = ", ".join(dict.fromkeys(known[key]["backend_name"] for key in changed))
        words = f"The code of {names} has changed since {len(changed)} cells were measured: they are measured again"
        console.print(words, style="yellow", highlight=False)
    kept = [known[cell.key] for cell in cells if cell.key not in keys]
    if kept:
        console.print(f"{len(kept)} cells have been measured before; --fresh measures them again", highlight=False)
    if others := {str(record.get("commit")) for record in kept} - {str(machine.commit)}:
        words = f"Some of them with other code ({', '.join(sorted(others))}, now {machine.commit})"
        console.print(words, style="yellow", highlight=False)
    return left


def backend_source(backends: Iterable[Backend]) -> str | None:
    """A digest of the files that define those of the backends that are not of this package; None where all are.

    What is measured of this package is told apart by its commit.
    """
    classes = {type(backend) for backend in backends}
    files = {inspect.getsourcefile(cls) for cls in classes if not cls.__module__.startswith("effattn.")}
    if not files:
        return None
    digest = hashlib.sha256()
    for path in sorted(filter(None, files)):
        digest.update(Path(path).read_bytes())
    return digest.hexdigest()[:16]


def outcome(measure: Callable[[], Record]) -> Record:
    """Status, reason, and what ``measure`` gives: of a cell that is measured in this process.

    It may be refused, run out of memory, or give what is not finite (``ArithmeticError``); whatever else it raises
    comes through.
    """
    try:
        return {"status": "ok", "reason": None, **measure()}
    except UnsupportedError as error:
        return {"status": "unsupported", "reason": "; ".join(error.reasons)}
    except ArithmeticError as error:
        return {"status": "error", "reason": str(error)}
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)  # what they hold is what the next cell needs
        return {"status": "out_of_memory", "reason": " ".join(str(error).split()) or type(error).__name__}


def terminal() -> Console:
    """As wide as the terminal is; in a file wide enough for a table."""
    console = Console()
    return console if console.is_terminal else Console(width=140)


def progress_bar(console: Console, count: ProgressColumn) -> Progress:
    """A bar with ``count``, the time that has passed and what is left of it; on a terminal alone."""
    columns = (BarColumn(), count, TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    # The estimate of the time left looks back over the whole run, because cells differ so much.
    return Progress(*columns, console=console, disable=not console.is_terminal, speed_estimate_period=24 * 3600)

"""A process for each cell, which may die: out of memory, crash, hang and refusal all become an outcome.

One worker process stands ready at a time and measures one cell, then the next one takes its place. The time
limit of a cell begins when its worker has imported everything. An outcome is text and numbers: exceptions
do not cross the process boundary as objects, because one that the other side cannot rebuild would break the
pool.
"""

import errno
import faulthandler
import importlib
import importlib.util
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.context import BaseContext
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import psutil
import torch
from pebble import ProcessExpired, ProcessPool

from effattn.backend import UnsupportedError
from effattn.bench.ceilings import Ceilings, measure_ceilings
from effattn.bench.measure import measure, refusals
from effattn.bench.study import Cell

_OUT_OF_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "cannot allocate memory",
    "bad_alloc",
    "out of memory",
)


@dataclass(frozen=True)
class Outcome:
    """How a cell ended; ``measured`` are the fields of its record where it ended well."""

    status: str
    reason: str | None = None
    measured: dict[str, Any] = field(default_factory=dict)
    wall_s: float | None = None


class Failed(Exception):
    """What went wrong in a worker, as text."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(status, reason)
        self.status, self.reason = status, reason


class Workers:
    """Measures cells one after the other, each in a process of its own; a context manager.

    Args:
        device: that the cells are measured on.
        plugins: files or modules that register backends, imported in every worker.
        memory_limit_bytes: what a worker may allocate; on Linux, elsewhere the system's own limits hold.
        timeout_s: of a cell.
    """

    def __init__(self, device: str, plugins: Sequence[str], memory_limit_bytes: int, timeout_s: float) -> None:
        self._context = _start_method(device)
        self.plugins, self.memory_limit_bytes, self.timeout_s = tuple(plugins), memory_limit_bytes, timeout_s
        self._folder = tempfile.TemporaryDirectory(prefix="effattn-")
        self._crash_log = Path(self._folder.name, "crash.txt")
        self._pool = self._start()

    def measure(self, cell: Cell) -> Outcome:
        """Measure one cell. Whatever happens to the worker, this returns."""
        return self._run(measure, cell)

    def refusals(self, cells: Sequence[Cell]) -> dict[str, str]:
        """Reasons for the cells that are refused before anything is computed, by cell key.

        All are asked in one worker. If that fails, nothing is refused and each cell finds out by itself.
        """
        return self._run(_refusals_by_key, tuple(cells)).measured

    def ceilings(self, device: str, dtypes: Sequence[str]) -> dict[str, Ceilings]:
        """What the device can do at most, by dtype; none where that fails, or memory does not suffice."""
        return self._run(_ceilings_by_dtype, (device, tuple(dtypes))).measured

    def __enter__(self) -> "Workers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        self._folder.cleanup()

    def _run(self, function: Callable[[Any], dict[str, Any]], argument: object) -> Outcome:
        kills, start = _oom_kills(), time.monotonic()
        future = self._pool.schedule(_translated, args=(function, argument), timeout=self.timeout_s)
        error = future.exception()
        wall_s = time.monotonic() - start
        if error is None:
            return Outcome("ok", measured=future.result(), wall_s=wall_s)
        if isinstance(error, BrokenProcessPool):
            self._stop()
            self._pool = self._start()
        status, reason = self._verdict(error, killed_for_memory=_oom_kills() > kills)
        return Outcome(status, reason, wall_s=wall_s)

    def _verdict(self, error: BaseException, killed_for_memory: bool) -> tuple[str, str]:
        if isinstance(error, Failed):
            reason = error.reason
            if error.status == "out_of_memory":
                reason += f" (a worker may take {self.memory_limit_bytes / 2**30:.1f} GiB)"
            return error.status, reason
        if isinstance(error, TimeoutError):
            return "timeout", f"did not end within {self.timeout_s:g} s"
        if isinstance(error, ProcessExpired):
            if killed_for_memory and error.exitcode == -signal.SIGKILL:
                return "out_of_memory", "the system killed the worker because memory ran out"
            return "crashed", f"the worker {_how_it_ended(error.exitcode)}{self._where_it_crashed()}"
        if isinstance(error, BrokenProcessPool):
            return "crashed", f"the worker died before it began ({error})"
        return ("out_of_memory" if is_out_of_memory(error) else "error"), _describe(error)

    def _where_it_crashed(self) -> str:
        """The innermost Python line at a fatal signal, which a dying worker writes down."""
        frame = re.search(r'File "(.+)", line (\d+)', self._crash_log.read_text(errors="replace"))
        return f" ({os.path.basename(frame[1])}:{frame[2]})" if frame else ""

    def _start(self) -> ProcessPool:
        return ProcessPool(
            max_workers=1,
            max_tasks=1,
            initializer=_prepare,
            initargs=(self.plugins, self.memory_limit_bytes, self._crash_log),
            context=self._context,
        )

    def _stop(self) -> None:
        self._pool.stop()
        self._pool.join()


def _start_method(device: str) -> BaseContext:
    """How a worker starts: anew, or for the CPU on Linux as a copy of a process that has only imported torch.

    That saves two seconds a cell. CUDA does not work in copies, nor do some libraries of macOS.
    """
    if device == "cuda" or sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", __name__])
    return context


def memory_limit_bytes(share: float) -> int:
    """That share of this machine's memory."""
    return int(share * psutil.virtual_memory().total)


def load_plugin(plugin: str) -> ModuleType:
    """Import a file ``*.py`` (relative to the working directory) or a module by name, once.

    Raises:
        ValueError: if there is no such file.
        ModuleNotFoundError: if there is no such module.
    """
    if not plugin.endswith(".py"):
        return importlib.import_module(plugin)
    path = Path(plugin)
    name = f"effattn_plugin_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise ValueError(f"study: plugins must be modules or files that exist, got {plugin!r}")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with ExitStack() as unless_imported:
        unless_imported.callback(sys.modules.pop, name)
        spec.loader.exec_module(module)
        unless_imported.pop_all()
    return module


# In the worker
# ---------------------------------------------------------------------------------------------------


def _prepare(plugins: tuple[str, ...], memory_limit_bytes: int, crash_log: Path) -> None:
    faulthandler.enable(crash_log.open("w"), all_threads=False)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    _limit_memory(memory_limit_bytes)
    for plugin in plugins:
        load_plugin(plugin)


def _die_with_parent() -> None:
    """A sweep that is killed must not leave a worker behind that goes on measuring."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def _limit_memory(limit_bytes: int) -> None:
    if sys.platform == "linux":
        import resource

        # Not RLIMIT_AS: CUDA reserves address space far beyond the machine's memory, which costs nothing.
        # Private memory that can be written is what costs, and that is what this one counts.
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))


def _translated(function: Callable[[Any], dict[str, Any]], argument: object) -> dict[str, Any]:
    """``function(argument)``, with any exception told as text."""
    try:
        return function(argument)
    except UnsupportedError as error:
        raise Failed("unsupported", _one_line(error.reasons)) from error
    except Exception as error:
        status = "out_of_memory" if is_out_of_memory(error) else "error"
        reason = _describe(error)
        traceback.clear_frames(error.__traceback__)  # where memory ran out, the report needs some of it
        raise Failed(status, reason) from error


def _refusals_by_key(cells: Sequence[Cell]) -> dict[str, str]:
    return {cell.key: _one_line(reasons) for cell in cells if (reasons := refusals(cell))}


def _ceilings_by_dtype(asked: tuple[str, Sequence[str]]) -> dict[str, Ceilings]:
    device, dtypes = asked
    return {dtype: measure_ceilings(device, dtype) for dtype in dtypes}


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    # torch's allocator for the CPU has no class of its own for this.
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _OUT_OF_MEMORY)


def _describe(error: BaseException) -> str:
    """Type, message and the line that raised: "ValueError: no (my_backend.py:31)"."""
    what = " ".join([f"{type(error).__name__}:", *str(error).split()])
    frames = traceback.extract_tb(error.__traceback__)
    return what + (f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else "")


def _one_line(reasons: Sequence[str]) -> str:
    return "; ".join(reasons)


def _how_it_ended(exit_code: int) -> str:
    return f"was ended by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"ended with exit code {exit_code}"


def _oom_kills() -> int:
    """How many processes the kernel has killed for memory since it started; 0 where it does not tell."""
    counters = Path("/proc/vmstat")
    lines = counters.read_text().splitlines() if counters.exists() else []
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)

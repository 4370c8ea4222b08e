"""Which machine, which versions and which state of the code a number comes from."""

import importlib
import importlib.util
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

import effattn


@dataclass(frozen=True)
class Machine:
    """What every record says of where it was measured."""

    machine: str  # a short label, fit for a folder's name
    cpu: str
    cpu_threads: int
    gpu: str | None
    memory_total_bytes: int
    python: str
    torch: str
    effattn: str
    commit: str | None
    gpu_driver: str | None = None
    gpu_sm_count: int | None = None
    gpu_memory_bytes: int | None = None

    @classmethod
    def this(cls, device: str, label: str | None = None) -> "Machine":
        """This machine as it measures on ``device``; ``label`` is its name where the derived one does not
        please.

        Raises:
            ValueError: for a label that cannot name a folder.
        """
        if label is not None and not re.fullmatch(r"[\w.-]*\w", label):
            raise ValueError(f"machine_label: must be of letters, digits, '-', '_' and '.', got {label!r}")
        cpu = cpu_name()
        of_gpu = _gpu_fields() if device == "cuda" else {"gpu": None}
        gpu = of_gpu["gpu"]
        return cls(
            machine=label or _slug(gpu or f"{cpu} {_num_cores()} cores"),
            cpu=cpu,
            cpu_threads=torch.get_num_threads(),
            memory_total_bytes=psutil.virtual_memory().total,
            python=platform.python_version(),
            torch=torch.__version__,
            effattn=effattn.__version__,
            commit=commit(Path(effattn.__file__).parent),
            **of_gpu,
        )

    @property
    def record(self) -> dict[str, Any]:
        """The fields of a record."""
        return asdict(self)


def gpu_state(device: str) -> dict[str, float]:
    """The GPU's clock, temperature and power now: fields of a record, empty where nobody can tell.

    Read by nvidia-ml-py, as far as the GPU tells it; averages over a sixth of a second to a second.
    """
    nvml = _nvml()
    if device != "cuda" or nvml is None:
        return {}
    readings: dict[str, Callable[[], float]] = {
        "gpu_sm_clock_mhz": torch.cuda.clock_rate,
        "gpu_temperature_c": torch.cuda.temperature,
        "gpu_power_w": lambda: torch.cuda.power_draw() / 1e3,
    }
    state = {}
    for name, read in readings.items():
        with suppress(nvml.NVMLError):  # not every GPU has every sensor
            state[name] = read()
    return state


def _gpu_fields() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties()
    driver = None
    if nvml := _nvml():
        nvml.nvmlInit()
        driver = nvml.nvmlSystemGetDriverVersion()
    return {
        "gpu": properties.name,
        "gpu_driver": driver,
        "gpu_sm_count": properties.multi_processor_count,
        "gpu_memory_bytes": properties.total_memory,
    }


def _nvml() -> Any:
    """The module of nvidia-ml-py, or None where it is not installed."""
    return importlib.import_module("pynvml") if importlib.util.find_spec("pynvml") else None


def cpu_name() -> str:
    """The processor as its maker calls it, or its architecture where the system does not say."""
    if sys.platform == "linux":
        models = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), flags=re.MULTILINE)
        if models:
            return models[0].strip()
    return platform.processor() or platform.machine()


def commit(folder: Path) -> str | None:
    """The commit of the code in ``folder``, "-dirty" where the code differs from it; None outside of git."""

    def git(*arguments: str) -> str | None:
        run = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
        return run.stdout.strip() if run.returncode == 0 else None

    try:
        # An environment inside somebody else's repository is not that repository's code.
        if not git("ls-files", "."):
            return None
        head = git("rev-parse", "HEAD")
        return f"{head}-dirty" if head and git("status", "--porcelain", "--", ".") else head
    except FileNotFoundError:
        return None


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _slug(name: str) -> str:
    name = re.sub(r"\((r|tm)\)|\d+-core|processor|\bcpu\b|@.*ghz", " ", name.lower())
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")

"""What serves a model's attention while it is evaluated, one backend or one a layer, and what that takes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.benchmark import timer as synchronized_clock

import effattn
from effattn import cost
from effattn.backend import Backend
from effattn.bench import errors
from effattn.bench.observe import Observed, Result
from effattn.swap import from_file

_DENSITY_ROWS = 64


@dataclass(frozen=True)
class Served:
    """A backend for all layers, or one for each of some; ``label`` names it in records, tables and figures."""

    label: str
    backends: Backend | Mapping[int, Backend]

    @classmethod
    def parse(cls, spec: str) -> Served:
        """From a backend's spec string, labelled by its canonical form, or from a file whose name ends in ``.yaml``.

        The file is one that ``swap.from_file`` reads. It is labelled by its name and eight hexadecimal digits that tell
        mappings apart.

        Raises:
            ValueError: for an unknown backend; and what ``swap.from_file`` raises.
        """
        if not spec.endswith(".yaml"):
            backend = effattn.get(spec)
            return cls(str(backend), backend)
        path = Path(spec).expanduser()
        found = from_file(path)
        backends = effattn.get(found) if isinstance(found, str) else {i: effattn.get(each) for i, each in found.items()}
        digest = hashlib.sha256(json.dumps(_canonical(backends)).encode()).hexdigest()
        return cls(f"{path.stem}@{digest[:8]}", backends)

    @property
    def all_backends(self) -> tuple[Backend, ...]:
        return (self.backends,) if isinstance(self.backends, Backend) else tuple(self.backends.values())

    @property
    def is_by_layer(self) -> bool:
        return isinstance(self.backends, Mapping)

    def observed(self, watch: Watch) -> Backend | Mapping[int | str, str | Backend]:
        """What ``effattn.swap`` takes, with every call going through ``watch``."""
        if isinstance(self.backends, Backend):
            return Observed(self.backends, partial(watch, self.backends))
        return {layer: Observed(backend, partial(watch, backend)) for layer, backend in self.backends.items()}


class Watch:
    """Times the calls of backends and counts the pairs of their patterns; what that takes itself is in ``extra_s``.

    A backend's first call is made twice, and timed the second time: the first one compiles and allocates.
    """

    def __init__(self) -> None:
        self.attention_s = self.extra_s = 0.0
        self._pairs = self._allowed_pairs = 0.0
        self._impls: dict[Backend, str] = {}

    @property
    def density(self) -> float | None:
        """Attended pairs of those that the model's mask allows; None where a backend has no pattern."""
        has_pattern = all(backend.capabilities.pattern for backend in self._impls)
        return self._pairs / self._allowed_pairs if has_pattern and self._allowed_pairs else None

    @property
    def impl(self) -> str | None:
        """What ran, of several backends each."""
        return "; ".join(dict.fromkeys(self._impls.values())) or None

    def __call__(self, backend: Backend, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Result:
        start = synchronized_clock()
        if backend not in self._impls:
            backend.attend(query, key, value, **options)
            asked = {name: options[name] for name in ("mask", "bias", "query_offset", "return_lse", "dropout_p")}
            self._impls[backend] = backend.resolve(effattn.Request.of(query, key, value, **asked))
        if backend.capabilities.pattern:
            self._count(backend, query, key, options["mask"], options["query_offset"])
        ready = synchronized_clock()
        result = backend.attend(query, key, value, **options)
        self.attention_s += synchronized_clock() - ready
        self.extra_s += ready - start
        return result

    def _count(self, backend: Backend, query: Tensor, key: Tensor, mask: Any, query_offset: int) -> None:
        assert query_offset == key.shape[2] - query.shape[2], "a cache, of which there is none here"
        pattern = effattn.pattern(query, key, backend=backend, mask=mask)
        rows = errors.sample_rows(query.shape[2], _DENSITY_ROWS, seed=0).to(query.device)
        work = errors.work(query, key.shape[2], mask=mask, pattern=pattern, rows=rows)
        batch_size, num_heads, query_len, _ = query.shape
        allowed = cost.attended_pairs(mask, batch_size, num_heads, query_len, key.shape[2], device=query.device)
        self._pairs += work.density * allowed
        self._allowed_pairs += allowed


def _canonical(backends: Backend | Mapping[int, Backend]) -> Any:
    if isinstance(backends, Backend):
        return str(backends)
    return {str(layer): str(backend) for layer, backend in backends.items()}

"""The backends of a model from a file: what ``effattn tune`` writes, or what a person does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from effattn.backend import get


def from_file(path: str | Path) -> str | dict[int, str]:
    """What a YAML file says of a model's backends, as ``swap`` takes it: one spec, or one for each of some layers.

    The file holds a mapping with the key ``backend``, a spec string for all layers, or ``backends``, a mapping from
    numbers of layers to spec strings. Other keys tell where that comes from, and are ignored.

    Raises:
        ValueError: if the file holds neither, or a spec that is none.
        ModuleNotFoundError: if PyYAML is not installed.
        OSError: if there is no such file.
    """
    try:
        import yaml
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"swap: reading {path} needs PyYAML, which is not installed: pip install pyyaml", name="yaml"
        ) from None

    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"swap: {path} is not YAML: {' '.join(str(error).split())}") from None
    named: dict[str, Any] = found if isinstance(found, dict) else {}
    by_layer = named.get("backends")
    try:
        if isinstance(named.get("backend"), str):
            return str(get(named["backend"]))
        if isinstance(by_layer, dict) and by_layer and all(type(layer) is int for layer in by_layer):
            return {layer: str(get(by_layer[layer])) for layer in sorted(by_layer)}
    except ValueError as error:
        raise ValueError(f"swap: {path}: {error}") from None
    raise ValueError(
        f"swap: {path} must hold `backend`, a spec, or `backends`, one for the number of each layer, got {found!r:.80}"
    )

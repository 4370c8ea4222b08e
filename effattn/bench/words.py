"""How backends and numbers are written in tables and legends."""

import re
import textwrap
from collections.abc import Sequence
from dataclasses import fields

import pandas as pd
from rich import box
from rich.table import Table

import effattn
from effattn.backend import literal

LONG_SPEC = 28  # characters
_NO_BREAK = "\u00a0"
_BETWEEN_FIELDS = re.compile(r" (?![^=()]*\))")  # and words, but not within (0, 1, 2)


def spec_table(*headings: str) -> Table:
    """An empty table; columns of backends stand left, the others right."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for heading in headings:
        is_spec = heading in ("backend", "fastest", "sparsest")
        table.add_column(heading, justify="left" if is_spec else "right", no_wrap=True)
    return table


def broken(spec: str, width: int = LONG_SPEC + 8) -> str:
    """A long spec on lines of at most ``width`` characters, broken between its fields."""
    if len(spec) <= LONG_SPEC:
        return spec
    name, bracket, parameters = spec.partition("(")
    return f"{name}{bracket}\n" + textwrap.indent(folded(parameters, width - 2), "  ")


def folded(words: str, width: int) -> str:
    """Words, among them specs, on lines of at most ``width`` characters, broken between words and fields."""
    return on_lines(_BETWEEN_FIELDS.split(words), width)


def on_lines(parts: Sequence[str], width: int) -> str:
    """The parts on lines of at most ``width`` characters; only one that is longer than a line is broken itself."""
    tied = [part.replace(" ", _NO_BREAK) if len(part) <= width else part for part in parts]
    return textwrap.fill(" ".join(tied), width, break_on_hyphens=False).replace(_NO_BREAK, " ")


def family(specs: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Backends of one name: it with the fields off their default that all share, and of each spec the fields left."""
    backends = {spec: effattn.get(spec) for spec in specs}
    first = next(iter(backends.values()))
    shared, varying = [], []
    for field in fields(first):  # type: ignore[arg-type]
        values = {literal(getattr(backend, field.name)) for backend in backends.values()}
        if len(values) > 1:
            varying.append(field.name)
        elif getattr(first, field.name) != field.default:
            shared.append(f"{field.name}={values.pop()}")
    own = {
        spec: ", ".join(f"{name}={literal(getattr(backend, name))}" for name in varying)
        for spec, backend in backends.items()
    }
    return first.name + (f"({', '.join(shared)})" if shared else ""), own


def number(value: float | None, form: str, unit: str = "") -> str:
    """A number with its unit; nothing where it was not measured."""
    return "" if value is None or pd.isna(value) else f"{value:{form}}{unit}"

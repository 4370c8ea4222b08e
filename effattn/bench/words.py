"""How backends and numbers are written in tables and legends."""

import textwrap

import pandas as pd
from rich import box
from rich.table import Table

LONG_SPEC = 28  # characters


def spec_table(*headings: str) -> Table:
    """An empty table; columns of backends stand left, the others right."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for heading in headings:
        is_spec = heading in ("backend", "fastest", "sparsest")
        table.add_column(heading, justify="left" if is_spec else "right", no_wrap=True)
    return table


def broken(spec: str, width: int = LONG_SPEC + 8) -> str:
    """A long spec on lines of at most ``width`` characters."""
    if len(spec) <= LONG_SPEC:
        return spec
    name, bracket, parameters = spec.partition("(")
    return f"{name}{bracket}\n" + textwrap.indent(textwrap.fill(parameters, width - 2), "  ")


def number(value: float | None, form: str, unit: str = "") -> str:
    """A number with its unit; nothing where it was not measured."""
    return "" if value is None or pd.isna(value) else f"{value:{form}}{unit}"

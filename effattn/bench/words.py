"""How backends and numbers are written in tables and legends."""

import re
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
    """A spec as people read it: runs of numbers shortened, a long one on lines of at most ``width`` characters."""
    short = shortened(spec)
    name, bracket, parameters = short.partition("(")
    if len(short) <= LONG_SPEC:
        return short
    return f"{name}{bracket}\n" + textwrap.indent(textwrap.fill(parameters, width - 2), "  ")


def shortened(spec: str) -> str:
    """A spec with ``(0, 1, ..., 63)`` for tuples of consecutive numbers that are longer than four."""

    def shorten(match: re.Match[str]) -> str:
        numbers = [int(number) for number in match[0].strip("()").split(", ")]
        is_run = numbers == list(range(numbers[0], numbers[-1] + 1)) and len(numbers) > 4
        return f"({numbers[0]}, {numbers[1]}, ..., {numbers[-1]})" if is_run else match[0]

    return re.sub(r"\(\d+(, \d+)+\)", shorten, spec)


def number(value: float | None, form: str, unit: str = "") -> str:
    """A number with its unit; nothing where it was not measured."""
    return "" if value is None or pd.isna(value) else f"{value:{form}}{unit}"

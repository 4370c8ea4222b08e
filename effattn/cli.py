"""The command line: ``effattn sweep | compare | plot | list | check``."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypedDict

import tyro
from rich.console import Console
from tyro.conf import Positional, arg

from effattn.bench.study import Study

# The fields of a study, each of which may be given on the command line, where it counts more than the file.
Overrides = TypedDict(  # type: ignore[misc]
    "Overrides",
    {
        name: Annotated[field.annotation, arg(help=field.description, help_behavior_hint="(default: the study's)")]
        for name, field in Study.model_fields.items()
    },
    total=False,
)
Fields = Annotated[Overrides, arg(name="")]


def sweep(
    study: Positional[Path],
    /,
    fields: Fields,
    quick: bool = False,
    retry: bool = False,
    fresh: bool = False,
    out: Path = Path("results"),
    machine_label: str | None = None,
) -> None:
    """Measure what a study asks for and has no record yet, then draw figures and write the report.

    Args:
        study: the study's YAML file.
        fields: fields of the study, instead of what the file says.
        quick: the two shortest lengths and few repeats, for a glance.
        retry: measure the cells again that did not end well.
        fresh: begin anew; the old results are moved aside.
        out: where results go, to STUDY/MACHINE in it.
        machine_label: name of this machine; by default that of its GPU or CPU.
    """
    from effattn.bench import runner

    asked = Study.load(study, dict(fields), quick=quick)
    runner.sweep(asked, out=out, machine_label=machine_label, retry=retry, fresh=fresh)


def compare(
    specs: Positional[tuple[str, ...]],
    /,
    fields: Fields,
    out: Path = Path("results"),
    machine_label: str | None = None,
) -> None:
    """Sweep over some backends without a study: by default on captured input of 512 to 2048 tokens.

    Args:
        specs: backends such as sdpa or "lsh(num_hashes=8)".
        fields: fields of the study.
        out: where results go, to compare/MACHINE in it.
        machine_label: name of this machine; by default that of its GPU or CPU.
    """
    from effattn.bench import runner

    asked = Study.parse({"name": "compare", "seq_lens": (512, 1024, 2048), "backends": specs, **fields})
    runner.sweep(asked, out=out, machine_label=machine_label)


def plot(folder: Positional[Path], /) -> None:
    """Draw the figures and write the tables and the report again, from the records.

    Args:
        folder: a folder of results, such as results/length_sweep/MACHINE.
    """
    from effattn.bench import runner

    runner.draw(folder)


def list_backends(device: str | None = None, plugins: tuple[str, ...] = ()) -> None:
    """List the backends: whether each runs here, or why not.

    Args:
        device: cpu or cuda; by default CUDA where there is one.
        plugins: files or modules that register more backends.
    """
    from rich.table import Table

    import effattn
    from effattn.bench.workers import load_plugin

    for plugin in plugins:
        load_plugin(plugin)
    overview = effattn.describe(device)
    table = Table("backend", "runs", "what it is", title=f"effattn backends on {overview.device}", title_justify="left")
    for row in overview.rows:
        fields = f"\n  {row['fields'].replace(', ', chr(10) + '  ')}" if row["fields"] else ""
        table.add_row(
            row["backend"] + fields,
            row["runs"],
            row["what it is"],
            style=None if row["runs"] == "yes" else "dim",
        )
    Console().print(table)


def check(spec: Positional[str], /, device: str = "cpu", plugins: tuple[str, ...] = ()) -> None:
    """Hold a backend to the contract that every backend must pass; exit status 1 if it breaks a clause.

    Args:
        spec: a backend such as my_backend or "lsh(num_hashes=8)".
        device: cpu or cuda.
        plugins: files or modules that register more backends.
    """
    from effattn.bench.workers import load_plugin
    from effattn.testing import check_backend

    for plugin in plugins:
        load_plugin(plugin)
    report = check_backend(spec, device)
    console = Console()
    for case, outcome in report.items():
        style = {"holds": "green", "refused": "dim"}.get(outcome, "red")
        console.print(f"{case}: {outcome}", style=style, markup=False, highlight=False, soft_wrap=True)
    held, refused = (sum(outcome == end for outcome in report.values()) for end in ("holds", "refused"))
    broken = len(report) - held - refused
    console.print(f"\n{spec} on {device}: {held} hold, {refused} refused as declared, {broken} broken", highlight=False)
    if broken:
        sys.exit(1)


COMMANDS: dict[str, Callable[..., Any]] = {
    "sweep": sweep,
    "compare": compare,
    "plot": plot,
    "list": list_backends,
    "check": check,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; what a user got wrong is one line on standard error and exit status 2."""
    try:
        tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="effattn", args=arguments)
    except (ValueError, OSError, ImportError) as error:
        print(f"effattn: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("effattn: interrupted; the same command goes on from here", file=sys.stderr)
        sys.exit(130)

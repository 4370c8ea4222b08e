"""The tuner, on a tiny random Llama: what it finds, what it says of it, and that a model can be swapped with it."""

import io
import re
from dataclasses import dataclass, replace
from itertools import pairwise

import pandas as pd
import pytest
import torch
import transformers
import yaml
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import effattn
from effattn import Causal
from effattn.bench import tune as tuner
from effattn.bench.capture import CaptureSource, load_captured
from effattn.bench.errors import sample_rows
from effattn.bench.machine import Machine
from effattn.bench.models import load as load_model
from effattn.bench.texts import read_tokens
from effattn.bench.tune import EXACT, candidates, save, tune
from effattn.bench.tune_report import draw_all, layers_figure, print_tuning, run, trade_off_figure
from effattn.cli import main
from effattn.swap import from_file

LENGTH = 200
SPACE = "{left: [4, 16, 64], right: [0], global_tokens: [[], [0]]}"
SIZES = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 300,
    "initializer_range": 0.3,
}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("EFFATTN_CACHE", str(tmp_path_factory.getbasetemp() / "captures"))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A random model whose tokens are bytes, in a folder, and a text."""
    folder = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    text = folder / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 8)
    return CaptureSource(str(folder), str(text))


@pytest.fixture
def search(source):
    def search(max_error, backends=("sliding_window",), **options):
        defaults = {"seq_len": LENGTH, "space": SPACE, "cost": "flops", "source": source}
        return tune(backends, max_error=max_error, **defaults | options)

    return search


def printed(tuning):
    console = Console(width=160, file=io.StringIO(), record=True)
    print_tuning(tuning, "here", console)
    return " ".join(console.export_text().split())


def error_by_hand(spec, source, layer):
    """Relative L2 error over all heads and sampled rows, and of the worst head, from the whole softmax."""
    captured = load_captured(replace(source, layers=(layer,)), LENGTH)
    query, key, value = captured.query.double(), captured.key.double(), captured.value.double()
    rows = sample_rows(LENGTH, 128, seed=0)
    key, value = (x.repeat_interleave(2, dim=1) for x in (key, value))
    scores = captured.info.scale * query @ key.mT
    outputs = []
    for mask in (effattn.pattern(query, key, backend=spec, mask=Causal()), Causal()):
        allowed = mask.dense(1, 4, LENGTH, LENGTH, 0)
        outputs.append((scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ value)[:, :, rows])
    ours, full = outputs
    by_head = ((ours - full).pow(2).sum((0, 2, 3)) / full.pow(2).sum((0, 2, 3))).sqrt()
    return float((ours - full).norm() / full.norm()), float(by_head.max())


# What is found ----------------------------------------------------------------------------------------------


def test_errors_are_those_of_the_whole_softmax(search, source):
    tuning = search(0.5, per_layer=True)
    spec = "sliding_window(left=4, right=0, global_tokens=(0,))"
    of_layers, of_heads = zip(*(error_by_hand(spec, source, layer) for layer in range(3)), strict=True)
    assert tuning.layers == [0, 1, 2]
    assert tuning.errors.loc[spec].tolist() == pytest.approx(of_layers, rel=1e-4)
    row = tuning.table.set_index("backend").loc[spec]
    assert row["error_rel_l2"] == pytest.approx((sum(e * e for e in of_layers) / 3) ** 0.5, rel=1e-4)
    assert row["worst_layer"] == pytest.approx(max(of_layers), rel=1e-4)
    assert row["worst_head"] == pytest.approx(max(of_heads), rel=1e-4)
    assert len(set(of_layers)) == 3


def test_density_and_operations_are_those_of_the_pattern(search):
    row = search(0.5).table.set_index("backend").loc["sliding_window(left=16, right=0)"]
    rows = sample_rows(LENGTH, 128, seed=0)
    kept, of = (rows + 1).clamp(max=17).sum(), (rows + 1).sum()
    assert row["density"] == pytest.approx(float(kept / of))
    assert row["gflops"] == pytest.approx(row["density"] * 4 * LENGTH * (LENGTH + 1) / 2 * 2 * 16 / 1e9)


def test_the_cheapest_that_keeps_the_budget_is_chosen(search):
    table = search(0.5).table
    assert table["gflops"].is_monotonic_increasing
    for max_error in (0, *table["error_rel_l2"].unique()):
        tuning = search(max_error)
        within = table[(table["error_rel_l2"] <= max_error) & (table["backend"] != EXACT)]
        assert tuning.backend == (within["backend"].iloc[0] if len(within) else None)
        assert tuning.qualifies == bool(len(within))


def test_each_layer_gets_the_cheapest_that_keeps_the_budget_there(search):
    errors = search(0.5, per_layer=True).errors
    by_cost = [spec for spec in search(0.5).table["backend"] if spec != EXACT]
    # Between the least errors of the layers, so that one keeps the budget and another does not.
    low, high = sorted(errors.drop(index=EXACT).min())[0], sorted(errors.drop(index=EXACT).min())[-1]
    assert low < high
    tuning = search((low + high) / 2, per_layer=True)
    expected = {}
    for layer in errors:
        within = [spec for spec in by_cost if errors.at[spec, layer] <= tuning.max_error]
        expected[layer] = within[0] if within else EXACT
    assert tuning.backends == expected
    assert tuning.unkept == [layer for layer, spec in expected.items() if spec == EXACT]
    assert 0 < len(tuning.unkept) < 3
    assert tuning.qualifies
    text = printed(tuning)
    assert f"Nothing in the space keeps it in layer{'s' * (len(tuning.unkept) > 1)} {tuning.unkept[0]}" in text
    assert "the exact sdpa serves" in text


def test_a_choice_by_layer_keeps_the_pooled_budget_and_costs_no_more_than_one_for_all(search):
    for max_error in (0.3, 0.5, 0.8):
        tuning = search(max_error, per_layer=True)
        held = pd.Series([tuning.errors.at[spec, layer] for layer, spec in tuning.backends.items()])
        assert (held <= max_error).all()
        assert held.pow(2).mean() ** 0.5 <= max_error
        worst = search(max_error, judge="worst_layer", per_layer=False, source=replace(tuning.source, layers=(0, 1, 2)))
        one_for_all = 3 * worst.cost_of(worst.backend or EXACT)
        assert sum(map(tuning.cost_of, tuning.backends.values())) <= one_for_all


def test_the_worst_head_is_judged_more_strictly(search):
    pooled, worst_layer, worst_head = (
        search(0.5, judge=judge).table.set_index("backend")["error_rel_l2"].drop(EXACT)
        for judge in ("pooled", "worst_layer", "worst_head")
    )
    for milder, stricter in pairwise((pooled, worst_layer, worst_head)):
        assert (milder <= stricter[milder.index]).all()
        assert (milder < stricter[milder.index]).any()


def test_the_search_is_deterministic(search):
    spec, space = "lsh", "{bucket_size: [8, 16], num_hashes: [1, 2], sinks: [0, 2]}"
    first, second = (search(0.5, (spec,), space=space).table for _ in range(2))
    pd.testing.assert_frame_equal(first, second)


@pytest.fixture
def made_up_times(monkeypatch):
    """Times by spec, and with None those of all others; gives the specs in the order in which they were timed."""

    def make_up(times):
        asked = []

        def time_repeats(stages, *, device, repeats, min_time_s):
            asked.append(stages["forward"].args[0])
            return {"forward": [times.get(asked[-1], times.get(None))]}

        monkeypatch.setattr(tuner.timing, "time_repeats", time_repeats)
        monkeypatch.setattr(tuner.memory, "peak_memory", lambda call, device: 2**20)
        return asked

    return make_up


def test_time_counts_where_it_is_asked_for(search, made_up_times):
    """What keeps the budget and is fastest wins, however many its pairs; what is far behind is timed no further."""
    winner = "sliding_window(left=64, right=0)"
    asked = made_up_times({winner: 1.0, EXACT: 4.0, None: 3.0})
    tuning = search(10.0, cost="time", rounds=5)
    assert tuning.backend == winner
    assert (tuning.cost_of(winner), tuning.cost_of(EXACT)) == (1, 4)
    counts = pd.Series(asked).value_counts()
    assert counts[winner] == counts[EXACT] == 5
    assert set(counts.drop([winner, EXACT])) == {2}


def test_what_is_behind_overall_is_timed_where_it_alone_keeps_the_budget(search, made_up_times):
    by_layer = search(0.5, per_layer=True).errors.drop(index=EXACT)
    closest = by_layer.max(axis=1).idxmin()  # alone keeps a budget in the hardest layer
    hardest = by_layer.loc[closest].idxmax()
    asked = made_up_times({closest: 3.0, EXACT: 4.0, None: 1.0})
    tuning = search(by_layer.at[closest, hardest], cost="time", rounds=5, per_layer=True)
    assert tuning.backends[hardest] == closest
    assert asked.count(closest) == 5


def test_rounds_are_interleaved(search, made_up_times):
    asked = made_up_times({None: 1.0})
    tuning = search(10.0, cost="time", rounds=3)
    turns = [asked[i : i + len(tuning.table)] for i in range(0, len(asked), len(tuning.table))]
    assert len(turns) == 3
    for turn, following in pairwise(turns):
        assert following == [*turn[1:], turn[0]]


def test_what_saves_little_is_not_worth_an_error(search, made_up_times):
    made_up_times({EXACT: 1.0, None: 0.96})
    tuning = search(10.0, cost="time", rounds=1, per_layer=True)
    assert tuning.backend == EXACT
    assert set(tuning.backends.values()) == {EXACT}
    assert tuning.unkept == []
    assert "In layers 0-2 nothing that keeps it costs much less than sdpa" in printed(tuning)
    made_up_times({EXACT: 1.0, None: 0.94})
    assert search(10.0, cost="time", rounds=1).backend != EXACT


def test_time_is_measured(search):
    table = search(10.0, cost="time", rounds=3, space="{left: [4], right: [0], global_tokens: [[]]}").table
    assert (table["time_ms"] > 0).all()
    assert (table["time_ms_p20"] <= table["time_ms"]).all()
    assert (table["time_ms"] <= table["time_ms_p80"]).all()
    assert table.set_index("backend").at[EXACT, "peak_memory_mib"] > 0


def test_a_candidate_that_cannot_serve_is_left_out_with_its_reason(search):
    tuning = search(0.5, ("xformers", "sliding_window"), space="{op: [auto, triton_splitk], left: [4]}")
    assert set(tuning.failed) == {"xformers", "xformers(op='triton_splitk')"}
    assert set(tuning.table["backend"].str.partition("(")[0]) == {"sliding_window", EXACT}
    assert "xformers failed: requested" in printed(tuning)
    with pytest.raises(ValueError, match="tune: backends must be able to serve this, but xformers cannot: requested"):
        search(0.5, ("xformers",), space="{op: [auto]}")


def test_all_layers_as_the_model_reads_are_those_of_the_cache(search, source):
    streamed, cached = search(0.5, per_layer=True), search(0.5, source=replace(source, layers=(2, 0, 1)))
    pd.testing.assert_frame_equal(streamed.errors, cached.errors)
    pd.testing.assert_frame_equal(streamed.table, cached.table)


# The space --------------------------------------------------------------------------------------------------


def test_the_declared_spaces_are_of_fields_and_values_that_the_backends_take():
    for name, ladders in tuner.SPACES.items():
        count = 1
        for values in ladders.values():
            count *= len(values)
        assert len(candidates([name])) == count
        assert count <= 20


def test_a_spec_sets_what_is_not_searched():
    assert candidates(["sliding_window(right=3, left=7)"], "{global_tokens: [[0]]}") == [
        "sliding_window(left=7, right=3, global_tokens=(0,))"
    ]
    # Also where it sets a field to its default.
    found = candidates(["lsh(num_hashes=4, hashing='rotation')"])
    assert len(found) == 6
    assert not any("num_hashes" in spec or "anchors" in spec for spec in found)


def test_a_space_replaces_what_is_declared_field_by_field():
    assert len(candidates(["sliding_window"], "{left: [1, 2]}")) == 2 * 3
    both = candidates(["sliding_window", "lsh"], {"left": [1], "lsh": {"bucket_size": [8], "num_hashes": [1]}})
    assert len([spec for spec in both if spec.startswith("sliding")]) == 3
    assert len([spec for spec in both if spec.startswith("lsh")]) == 2


def test_declared_numbers_that_reach_the_length_are_left_out():
    assert len(candidates(["sliding_window"], seq_len=1024)) == 4 * 3
    assert len(candidates(["sliding_window"], seq_len=1025)) == 5 * 3
    assert len(candidates(["sliding_window"], "{left: [1, 2000]}", seq_len=1024)) == 2 * 3  # as it is asked for
    assert len(candidates(["sliding_window"], seq_len=32)) == 3


def test_candidates_come_once():
    assert candidates(["sliding_window(left=3)", "sliding_window(left=3)"], "{global_tokens: [[]], right: [0, 0]}") == [
        "sliding_window(left=3, right=0)"
    ]


@dataclass(frozen=True)
class Nearest(effattn.Backend):
    """A backend of another package."""

    name = "nearest_of_tune"
    count: int = 3

    def pattern(self, query, key, *, mask, query_offset):
        return mask & effattn.Window(self.count, 0)


@pytest.fixture
def nearest(monkeypatch):
    effattn.names()
    monkeypatch.setattr("effattn.backend._registry", dict(effattn.backend._registry))
    effattn.register(Nearest)
    yield Nearest
    effattn.backend._parsed.clear()


def test_a_backend_of_another_package_declares_its_space_or_is_given_one(nearest, monkeypatch, search):
    with pytest.raises(ValueError, match="tune: nearest_of_tune declares no values to try; give some as space, such"):
        candidates(["nearest_of_tune"])
    assert candidates(["nearest_of_tune"], "{count: [1, 3]}") == ["nearest_of_tune(count=1)", "nearest_of_tune"]
    monkeypatch.setattr(nearest, "tuning_space", {"count": (1, 2, 30)}, raising=False)
    tuning = search(0.9, ("nearest_of_tune",), space=None)
    assert set(tuning.table["backend"]) == {*(f"nearest_of_tune(count={count})" for count in (1, 2, 30)), EXACT}


@pytest.mark.parametrize(
    ("backends", "space", "message"),
    [
        ([], None, "tune: backends must name at least one, got none"),
        (["sdpa"], "{kernel: [auto]}", "tune: backends must be others than sdpa"),
        (["sdpa"], None, "tune: sdpa declares no values to try"),
        (["sliding_windw"], None, "unknown name 'sliding_windw'; did you mean 'sliding_window'"),
        (["sliding_window"], "{width: [3]}", "tune: space names 'width', which no backend has; sliding_window has dil"),
        (["sliding_window"], "{lsh: {sinks: [3]}}", "tune: space names 'lsh', which no backend has"),
        (["lsh"], "{lsh: {sink: [3]}}", "lsh: unknown field 'sink'; did you mean 'sinks'"),
        (["lsh"], "{lsh: [3]}", "tune: space must map the fields of lsh to lists of values, got [3]"),
        (["lsh"], "{sinks: 3}", "tune: space must list the values of sinks, got 3"),
        (["lsh"], "{sinks: []}", "tune: space must list the values of sinks, got []"),
        (["lsh"], "{sinks: [-1]}", "lsh: sinks must be an integer >= 0, got -1"),
        (["lsh"], "{sinks: [", "tune: space must be fields and lists of values such as '{left: [64, 128]}', got"),
        (["lsh"], "sinks", "tune: space must be fields and lists of values"),
    ],
)
def test_what_is_wrong_with_a_space(backends, space, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        candidates(backends, space)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_error": -0.1}, "tune: max_error must be >= 0, got -0.1"),
        ({"max_error": float("nan")}, "tune: max_error must be >= 0, got nan"),
        ({"rounds": 0}, "tune: rounds must be >= 1, got 0"),
        ({"judge": "best"}, "tune: judge must be one of pooled, worst_layer, worst_head, got 'best'"),
        ({"cost": "money"}, "tune: cost must be one of time, flops, got 'money'"),
        ({"dtype": "int8"}, "tune: dtype must be one of float32, bfloat16, float16, got 'int8'"),
    ],
)
def test_what_is_wrong_with_an_argument(options, message):
    with pytest.raises(ValueError, match=message):
        tune(["sliding_window"], **{"max_error": 0.1} | options)


# The file ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_layer", [False, True])
def test_a_model_is_swapped_with_what_was_saved(search, source, tmp_path, per_layer):
    tuning = search(0.6, per_layer=per_layer, source=replace(source, layers=(0, 1, 2)))
    save(tuning, tmp_path / "a" / "found.yaml", Machine.this("cpu", "here"))
    found = from_file(tmp_path / "a" / "found.yaml")
    assert found == (tuning.backends if per_layer else tuning.backend)
    evidence = yaml.safe_load((tmp_path / "a" / "found.yaml").read_text())["evidence"]
    assert evidence["machine"] == "here"
    assert evidence["max_error"] == 0.6
    assert list(evidence["errors"]) == [0, 1, 2]

    model, tokenizer = load_model(source.model)
    tokens = read_tokens(source.text, tokenizer, LENGTH)
    with torch.inference_mode():
        full = model(tokens).logits
        with effattn.swap(model, found) as report:
            swapped = model(tokens).logits
    assert [str(site.backend) for site in report.sites] == [found[layer] if per_layer else found for layer in range(3)]
    assert [site.calls for site in report.sites] == [1, 1, 1]
    assert not torch.allclose(swapped, full, atol=1e-3)


# What is said and drawn -------------------------------------------------------------------------------------


def test_nothing_that_keeps_the_budget_is_said_plainly(search):
    text = printed(search(0.0))
    assert (
        "Nothing in the space keeps a relative L2 error, pooled over the layers, of at most 0; the closest is" in text
    )
    text = printed(search(0.0, per_layer=True, judge="worst_head"))
    assert "Nothing in the space keeps a relative L2 error, in the worst head, of at most 0 in any layer" in text


def test_the_choice_and_its_saving_are_said(search):
    tuning = search(0.6)
    share = tuning.cost_of(tuning.backend) / tuning.cost_of(EXACT)
    assert 0 < share < 1
    assert f"{tuning.backend} least operations with a relative L2 error" in printed(tuning)
    assert f"{share:.2f} of sdpa's" in printed(tuning)
    tuning = search(0.6, per_layer=True)
    total = sum(map(tuning.cost_of, tuning.backends.values())) / (3 * tuning.cost_of(EXACT))
    assert f"{total:.2f} of sdpa's" in printed(tuning)


def test_the_figures_show_every_candidate_and_every_layer(search, tmp_path):
    tuning = search(0.6, per_layer=True)
    paths = draw_all(tuning, "here", tmp_path / "found")
    assert [path.name for path in paths] == ["found.png", "found.pdf", "found-layers.png", "found-layers.pdf"]
    assert all(path.stat().st_size for path in paths)
    (ax,) = trade_off_figure(tuning, "here").axes
    points = [line for line in ax.lines if line.get_marker() in "^s" and len(line.get_xdata()) == 1]
    drawn = sorted(float(line.get_xdata()[0]) for line in points)
    assert drawn == pytest.approx(sorted(tuning.table["gflops"]))
    upper, lower = layers_figure(tuning, "here").axes
    heights = [patch.get_height() for patch in upper.patches]
    assert heights == pytest.approx([tuning.errors.at[spec, layer] for layer, spec in tuning.backends.items()])
    assert [patch.get_height() for patch in lower.patches] == pytest.approx(
        [tuning.cost_of(spec) for spec in tuning.backends.values()]
    )


def test_the_command_writes_file_table_and_figures(source, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    asked = ["tune", "sliding_window", "--max-error", "0.6", "--seq-len", str(LENGTH), "--cost", "flops"]
    asked += ["--space", SPACE, "--model", source.model, "--text", source.text, "--machine-label", "here"]
    main(asked)
    folder = tmp_path / "results" / "tune" / "here"
    (path,) = folder.glob("*.yaml")
    assert path.name.startswith("sliding_window-")
    assert path.name.endswith("-200-0.6.yaml")
    out = " ".join(capsys.readouterr().out.split())
    assert str(path.relative_to(tmp_path)) in out
    assert from_file(path) in out
    assert len(pd.read_csv(path.with_suffix(".csv"))) == 7
    assert path.with_suffix(".png").exists()
    main([*asked, "--per-layer", "--out", "mine.yaml"])
    assert set(from_file("mine.yaml")) == {0, 1, 2}


def test_the_command_fails_where_nothing_keeps_the_budget(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = ["tune", "sliding_window", "--max-error", "0", "--seq-len", str(LENGTH), "--cost", "flops"]
    with pytest.raises(SystemExit) as ended:
        main([*asked, "--space", SPACE, "--model", source.model, "--text", source.text])
    assert ended.value.code == 1
    assert list(tmp_path.iterdir()) == []


def test_run_hands_back_the_search(source, tmp_path):
    console = Console(width=120, file=io.StringIO())
    tuning = run(
        ["sliding_window"], out=tmp_path / "x.yaml", machine_label="here", console=console,
        max_error=0.6, seq_len=LENGTH, source=source, space=SPACE, cost="flops",
    )  # fmt: skip
    assert from_file(tmp_path / "x.yaml") == tuning.backend

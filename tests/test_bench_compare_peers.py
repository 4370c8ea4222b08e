import csv
import json
from pathlib import Path

import pytest
from pydantic import ValidationError
from rich.console import Console

from effattn.bench.compare_peers import (
    Comparison,
    Race,
    Ratio,
    compare,
    crossing,
    crossovers_of,
    race_groups,
    ratios_of,
)
from effattn.bench.rounds import Result

PEERS = Path(__file__).parents[1] / "experiments" / "peers.yaml"
SHAPE = {"name": "small", "num_heads": 2, "head_dim": 8, "input": "gaussian"}


def comparison(*races, **fields):
    return Comparison.model_validate({**SHAPE, **fields, "races": races})


def race(**fields):
    return {"name": "one", "ours": "chunked", "others": ["sdpa"], "seq_lens": [32], **fields}


def results_of(asked, times_ms, memory_bytes=1000):
    """The results of the only race's only group, with made-up numbers by (backend, pass, length)."""
    (cells,) = race_groups(asked, asked.races[0])
    return [
        Result(cell, times_ms=times_ms[cell.backend, cell.pass_name, cell.seq_len], peak_memory_bytes=memory_bytes)
        for cell in cells
    ]


def test_ratios_are_taken_within_each_round():
    asked = comparison(race())
    results = results_of(asked, {("chunked", "forward", 32): [1, 2, 30], ("sdpa", "forward", 32): [2, 2, 20]})
    time, memory = ratios_of(asked.races[0], results)
    assert time.spread is not None
    assert time.spread.median == 1.0  # of 0.5, 1 and 1.5; that of the medians is the same only by chance
    assert time.spread.p20 == pytest.approx(0.7)
    assert time.spread.p80 == pytest.approx(1.3)
    assert memory.spread is not None
    assert memory.spread.median == 1.0
    assert time.holds is None


def test_limits_judge_what_they_name_and_nothing_else():
    limits = [
        {"issue": 2, "other": "sdpa", "passes": ["forward"], "at_most": 0.5},
        {"issue": 2, "other": "sdpa", "measure": "memory", "dtypes": ["bfloat16"], "at_most": 0.5},
        {"issue": 2, "passes": ["forward_backward"], "other_pass": "forward", "at_most": 3.6},
    ]
    asked = comparison(race(passes=["forward_backward", "forward"], limits=limits))
    times = {
        ("chunked", "forward", 32): [1.0] * 5,
        ("chunked", "forward_backward", 32): [4.0] * 5,
        ("sdpa", "forward", 32): [2.0] * 5,
        ("sdpa", "forward_backward", 32): [8.0] * 5,
    }
    found = ratios_of(asked.races[0], results_of(asked, times))
    judged = {(r.measure, r.ours.cell.pass_name, r.other.cell.backend, r.other.cell.pass_name): r.holds for r in found}
    assert judged == {
        ("time", "forward_backward", "sdpa", "forward_backward"): None,
        ("time", "forward", "sdpa", "forward"): True,
        ("memory", "forward_backward", "sdpa", "forward_backward"): None,
        ("memory", "forward", "sdpa", "forward"): None,
        ("time", "forward_backward", "chunked", "forward"): False,
    }


def test_the_pass_that_a_limit_divides_by_is_measured_of_that_backend_alone():
    limits = [{"issue": 2, "other_pass": "forward", "at_most": 3.6}]
    asked = comparison(race(passes=["forward_backward"], limits=limits))
    (cells,) = race_groups(asked, asked.races[0])
    assert [(cell.backend, cell.pass_name) for cell in cells] == [
        ("chunked", "forward_backward"),
        ("sdpa", "forward_backward"),
        ("chunked", "forward"),
    ]


def test_growth_is_each_length_against_the_one_before():
    limits = [{"issue": 2, "at_most": 2.15}, {"issue": 2, "measure": "memory", "at_most": 0.9}]
    asked = comparison(race(kind="growth", others=[], seq_lens=[64, 32, 128], limits=limits))
    times = {("chunked", "forward", n): [float(t)] * 5 for n, t in {32: 1, 64: 2, 128: 5}.items()}
    found = ratios_of(asked.races[0], results_of(asked, times))
    assert [(r.measure, r.ours.cell.seq_len, r.other.cell.seq_len, r.holds) for r in found] == [
        ("time", 64, 32, True),
        ("time", 128, 64, False),
        ("memory", 64, 32, False),
        ("memory", 128, 64, False),
    ]


def test_what_did_not_run_has_no_ratio():
    asked = comparison(race(limits=[{"issue": 2, "other": "sdpa", "at_most": 1.0}]))
    (ours, other) = (Result(cell) for cell in next(race_groups(asked, asked.races[0])))
    other.reasons = ["requested a miracle; supported none"]
    ratio = Ratio("one", "time", ours, other, asked.races[0].limits[0])
    assert ratio.spread is None
    assert ratio.holds is None
    assert ratio.record["ratio_median"] is None
    assert ratio.record["reason"] == "requested a miracle; supported none"


@pytest.mark.parametrize(
    ("ratios", "length"),
    [
        ([0.9, 0.5, 0.2], 256),
        ([2.0, 0.5, 0.2], 256 * 2**0.5),
        ([4.0, 2.0, 0.5], 512 * 2**0.5),
        ([0.5, 2.0, 0.5], 512 * 2**0.5),  # faster once is not yet faster from there on
        ([4.0, 1.0, 0.5], 512),
        ([4.0, 2.0, 1.0], None),
    ],
)
def test_the_crossing_lies_between_the_last_slower_length_and_the_next(ratios, length):
    assert crossing([256, 512, 1024], ratios) == (length if length is None else pytest.approx(length))


def test_the_crossover_has_a_spread_over_rounds():
    asked = comparison(race(kind="crossover", seq_lens=[256, 512]))
    times = {
        ("chunked", "forward", 256): [2.0, 0.5, 2.0],
        ("sdpa", "forward", 256): [1.0, 1.0, 1.0],
        ("chunked", "forward", 512): [1.0, 1.0, 1.0],
        ("sdpa", "forward", 512): [2.0, 2.0, 2.0],
    }
    (found,) = crossovers_of(asked.races[0], results_of(asked, times))
    assert found.lengths == (pytest.approx(256 * 2**0.5), 256.0, pytest.approx(256 * 2**0.5))
    assert found.spread is not None
    assert found.spread.median == pytest.approx(256 * 2**0.5)
    assert found.record["rounds_that_cross"] == 3


def test_no_crossover_is_read_off_what_did_not_run():
    asked = comparison(race(kind="crossover", seq_lens=[256, 512]))
    (cells,) = race_groups(asked, asked.races[0])
    (found,) = crossovers_of(asked.races[0], [Result(cell, reasons=["none"]) for cell in cells])
    assert found.spread is None
    assert found.record["seq_len_median"] is None


def test_a_run_writes_records_ratios_and_crossovers(tmp_path):
    asked = comparison(
        race(limits=[{"issue": 2, "other": "sdpa", "measure": "memory", "at_most": 1e9}], agreeing=["full"]),
        race(name="two", kind="growth", others=[], seq_lens=[16, 32]),
        race(name="three", kind="crossover", seq_lens=[16, 32]),
    )
    console = Console(width=160, record=True)
    for _ in range(2):  # the second run replaces what the first one wrote
        folder = compare(asked, out=tmp_path, machine_label="here", console=console)
    assert folder == tmp_path / "small" / "here"
    records = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    assert [record["race"] for record in records] == ["one"] * 3 + ["two"] * 2 + ["three"] * 4
    assert records[1]["agreement_share"] == 1.0
    assert records[1]["agreement_rel_l2"] < 1e-6
    assert records[2]["backend"] == "full"
    assert "time_ms_median" not in records[2]
    assert records[0]["machine"] == "here"
    assert records[0]["packages"]["torch"] == records[0]["torch"]
    with (folder / "ratios.csv").open() as file:
        rows = list(csv.DictReader(file))
    held = [row for row in rows if row["holds"]]
    assert [(row["race"], row["measure"], row["holds"], row["issue"]) for row in held] == [
        ("one", "memory", "True", "2.0")
    ]
    assert (folder / "crossovers.csv").read_text().count("\n") == 2
    assert "1 of 1 limits hold" in console.export_text()


def test_the_peers_study_is_read_and_each_of_its_limits_finds_its_ratio():
    asked = Comparison.load(PEERS)
    quick = asked.quickened()
    assert quick.name == "peers-quick"
    assert max(n for one in quick.races for n in one.seq_lens) == 65536 // 8
    for one in (*asked.races, *quick.races):
        for limit in one.limits:
            assert set(limit.seq_lens or ()) <= set(one.seq_lens), (one.name, limit)
            assert set(limit.dtypes or ()) <= set(one.dtypes), (one.name, limit)
            assert set(limit.passes or ()) <= set(one.passes), (one.name, limit)
            assert one.kind == "growth" or (limit.other or one.ours) in {one.ours, *one.others}, (one.name, limit)


def test_a_misspelt_field_is_refused():
    with pytest.raises(ValidationError, match="at_mots"):
        Race.model_validate(race(limits=[{"issue": 2, "at_mots": 1.0}]))

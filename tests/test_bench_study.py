import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import effattn
from effattn import Causal, Everything, Global, Window
from effattn.bench import study as study_module
from effattn.bench.capture import CaptureSource
from effattn.bench.study import Cell, Study, mask_name, parse_mask

RESOLVED = {
    "name": "tiny",
    "backends": ["full", "sdpa"],
    "seq_lens": [32, 16],
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "device": "cpu",
    "inputs": ["gaussian"],
}
CELL = Cell(
    backend="full",
    batch_size=1,
    num_heads=4,
    num_kv_heads=2,
    seq_len=32,
    head_dim=8,
    dtype="float32",
    device="cpu",
    mask="causal",
    input="captured",
    source=CaptureSource(),
    pass_name="forward",
    seed=0,
    repeats=5,
    min_time_s=0.2,
    error_rows=256,
    grad_error_max_len=2048,
)


def write(path, text):
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seqlens": [16]}, "study: unknown field 'seqlens'; did you mean 'seq_lens'?"),
        ({"zzz": 1}, "study: unknown field 'zzz'; there are name, plugins"),
        ({"seq_lens": [16, -1]}, "study: seq_lens must be greater than 0, got -1"),
        ({"seq_lens": ["512"]}, "study: seq_lens must be a valid integer, got '512'"),
        ({"seq_lens": []}, "study: seq_lens .* at least 1 item"),
        ({"name": "../elsewhere"}, "study: name "),
        ({"dtypes": ["float31"]}, "study: dtypes must be 'float32'.*got 'float31'"),
        ({"passes": ["sideways"]}, "study: passes must be 'forward'"),
        ({"inputs": ["captivated"]}, "study: inputs must be of .*heavy_tailed.*, got"),
        ({"masks": ["casual"]}, "study: masks must look like .*got 'casual'"),
        ({"memory_limit": 1.5}, "study: memory_limit must be less than or equal to 1, got 1.5"),
        ({"repeats": 2}, "study: repeats must be greater than or equal to 5, got 2"),
    ],
)
def test_a_wrong_field_is_one_clear_line(fields, message):
    with pytest.raises(ValueError, match=message) as raised:
        Study.parse({**RESOLVED, **fields})
    assert "\n" not in str(raised.value)


def test_a_missing_field_is_named():
    with pytest.raises(ValueError, match="study: seq_lens is missing"):
        Study.parse({"name": "tiny"})


@pytest.mark.parametrize("text", ["- a list\n", "seq_lens: [1, 2\n", ""])
def test_a_file_that_is_no_study_is_refused_by_name(tmp_path, text):
    with pytest.raises(ValueError, match=r"odd\.yaml"):
        Study.load(write(tmp_path / "odd.yaml", text))


def test_overrides_count_more_than_the_file(tmp_path):
    path = write(tmp_path / "tiny.yaml", "name: tiny\nseq_lens: [16, 32]\nseed: 3\n")
    study = Study.load(path, {"seq_lens": (64,), "backends": ("full", "lsh(num_hashes=8)")})
    assert study.seq_lens == (64,)
    assert study.backends == ("full", "lsh(num_hashes=8)")
    assert study.seed == 3


@pytest.mark.parametrize(("has_cuda", "dtypes"), [(True, ("bfloat16",)), (False, ("float32",))])
def test_when_cuda_counts_on_cuda_alone(tmp_path, monkeypatch, has_cuda, dtypes):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    text = "name: tiny\nseq_lens: [16]\nwhen_cuda:\n  dtypes: [bfloat16]\n"
    path = write(tmp_path / "tiny.yaml", text)
    assert Study.load(path).dtypes == dtypes
    assert Study.load(path, {"device": "cpu"}).dtypes == ("float32",)
    assert Study.load(path, {"dtypes": ("float16",)}).dtypes == ("float16",)


def test_when_cuda_is_checked_where_there_is_none(tmp_path):
    path = write(tmp_path / "tiny.yaml", "name: tiny\nseq_lens: [16]\nwhen_cuda:\n  dtype: [bfloat16]\n")
    with pytest.raises(ValueError, match="unknown field 'dtype'; did you mean 'dtypes'"):
        Study.load(path, {"device": "cpu"})


def test_cuda_is_refused_where_torch_finds_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert study_module.pick_device("auto") == "cpu"
    with pytest.raises(ValueError, match="study: device must be cpu"):
        study_module.pick_device("cuda")


def test_quick_trims_under_another_name_and_gives_way_to_overrides(tmp_path):
    path = write(tmp_path / "tiny.yaml", "name: tiny\nseq_lens: [64, 16, 32, 128]\nrepeats: 20\n")
    quick = Study.load(path, quick=True)
    assert (quick.name, quick.seq_lens, quick.repeats) == ("tiny-quick", (16, 32), 5)
    assert Study.load(path, {"seq_lens": (64, 128, 256)}, quick=True).seq_lens == (64, 128, 256)


def test_a_saved_study_reads_back_the_same(tmp_path):
    study = Study.parse({**RESOLVED, "masks": ["causal & Window(4, 0) | Global((0,))"], "layers": [3, 1]})
    study.save(tmp_path / "study.yaml")
    assert Study.load(tmp_path / "study.yaml") == study


def test_cells_are_the_cross_product_without_doubles():
    study = Study.parse({**RESOLVED, "passes": ["forward", "decode"], "masks": ["none", "causal", "Causal()"]})
    cells = study.cells()
    assert len(cells) == len(set(cells)) == 2 * 2 * 2 * 2
    assert [cell.seq_len for cell in cells[:8]] == [32] * 4 + [16] * 4
    assert {cell.source for cell in cells} == {None}
    keys = [cell.key for cell in cells]
    assert len(set(keys)) == len(keys)


def test_a_wider_study_has_the_same_cells_and_more():
    narrow, wide = Study.parse(RESOLVED), Study.parse({**RESOLVED, "name": "wide", "seq_lens": [16, 32, 64]})
    assert {cell.key for cell in narrow.cells()} < {cell.key for cell in wide.cells()}


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Cell)])
def test_every_field_of_a_cell_is_in_its_key(field):
    value = getattr(CELL, field)
    other = None if field == "source" else f"{value}x" if isinstance(value, str) else value + 1
    assert dataclasses.replace(CELL, **{field: other}).key != CELL.key


def test_a_key_is_the_same_in_every_process():
    code = f"from effattn.bench.study import Cell; from effattn.bench.capture import CaptureSource; print({CELL!r}.key)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == CELL.key
    assert len(CELL.key) == 16
    int(CELL.key, 16)


@pytest.mark.parametrize(
    ("spec", "mask", "name"),
    [
        ("none", Everything(), "none"),
        ("Everything()", Everything(), "none"),
        ("causal", Causal(), "causal"),
        ("Causal()", Causal(), "causal"),
        ("Window(256, None)", Window(256, None), "Window(left=256, right=None, dilation=1)"),
        (
            "causal & Window(left=4, right=0) | Global((0, 1))",
            (Causal() & Window(4, 0)) | Global((0, 1)),
            "(Causal() & Window(left=4, right=0, dilation=1)) | Global((0, 1))",
        ),
    ],
)
def test_masks_have_a_spec_that_reads_back(spec, mask, name):
    assert parse_mask(spec) == mask
    assert mask_name(mask) == name
    assert parse_mask(name) == mask


@pytest.mark.parametrize(
    "spec",
    ["", "causal &", "Padding(1)", "__import__('os')", "Window(1)", "Window(f(), 0)", "Window(-1, 0)", "causal + none"],
)
def test_other_masks_are_refused(spec):
    with pytest.raises(ValueError, match="must"):
        parse_mask(spec)


def test_short_forward_passes_on_cuda_are_timed_in_a_graph_too_where_that_is_asked_for():
    fields = {**RESOLVED, "seq_lens": (64, 128), "passes": ("forward", "forward_backward", "decode")}
    for device, max_len, graphs in (
        ("cuda", 64, {(64, "forward"), (64, "decode")}),
        ("cuda", 0, set()),
        ("cpu", 64, set()),
    ):
        cells = Study.parse({**fields, "device": device, "cuda_graph_max_len": max_len}).cells()
        assert {(cell.seq_len, cell.pass_name) for cell in cells if cell.cuda_graph} == graphs


def test_cells_without_a_graph_keep_their_keys():
    """Those of the results that are in the repository."""
    cell = Study.parse(RESOLVED).cells()[0]
    assert cell.key == "43e10aa9cae0f6da"
    assert dataclasses.replace(cell, cuda_graph=True).key != cell.key


def test_variants_add_cells_with_other_values_for_some_fields():
    study = Study.parse(
        {
            **RESOLVED,
            "passes": ["forward"],
            "variants": ["{head_dim: 16, seq_lens: [64, 32]}", {"backends": ["lsh(num_hashes=4)"], "masks": ["none"]}],
        }
    )
    found = [(cell.backend, cell.seq_len, cell.head_dim, cell.mask) for cell in study.cells()]
    assert found == [
        ("full", 32, 8, "causal"),
        ("sdpa", 32, 8, "causal"),
        ("full", 16, 8, "causal"),
        ("sdpa", 16, 8, "causal"),
        ("full", 64, 16, "causal"),
        ("sdpa", 64, 16, "causal"),
        ("full", 32, 16, "causal"),
        ("sdpa", 32, 16, "causal"),
        ("lsh", 32, 8, "none"),
        ("lsh", 16, 8, "none"),
    ]
    assert study.replace() == study
    assert {(cell.seq_len, cell.head_dim) for cell in study.quickened().cells()} == {(16, 8), (32, 8)}


def test_variants_are_saved_and_loaded(tmp_path):
    study = Study.parse({**RESOLVED, "variants": [{"dtypes": ["float16"]}]})
    study.save(tmp_path / "study.yaml")
    assert Study.load(tmp_path / "study.yaml") == study


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ("{head_dim: -1}", 'study: variants {"head_dim": -1}: head_dim must be greater than 0, got -1'),
        ("{nonsense: 1}", "unknown field 'nonsense'"),
        ("{device: cpu}", "study: variants must leave device to the study"),
        ("{variants: []}", "study: variants must leave variants to the study"),
        ("3", "study: variants must be fields of a study such as '{head_dim: 128}', got 3"),
        ("{", "study: variants must be YAML such as '{head_dim: 128}'"),
    ],
)
def test_a_variant_that_is_none_is_refused(variant, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Study.parse({**RESOLVED, "variants": [variant]})


def test_the_study_for_a_gpu_is_one():
    study = Study.load(Path(effattn.__file__).parents[1] / "experiments" / "length_sweep_cuda.yaml")
    assert study.device == "cuda"
    cells = study.replace(num_heads=9, num_kv_heads=3, head_dim=64).cells()  # those of the captured model
    for field, values in {
        "seq_len": {512, 2048, 8192, 32768, 131072, 1048576},
        "dtype": {"bfloat16", "float16"},
        "mask": {"causal", "none", "Causal() & Window(left=1024, right=0, dilation=1)"},
        "pass_name": {"forward", "forward_backward", "decode"},
        "head_dim": {64, 128},
        "cuda_graph": {True, False},
    }.items():
        assert {getattr(cell, field) for cell in cells} == values
    assert all(cell.num_kv_heads < cell.num_heads for cell in cells)
    assert all(cell.seq_len <= 8192 for cell in cells if cell.input == "captured")  # the positions of the model
    long = {cell.backend.partition("(")[0] for cell in cells if cell.seq_len > 131072}
    assert long == {"sliding_window", "lsh"}
    assert len(cells) <= 150  # some seconds each, in under 20 minutes

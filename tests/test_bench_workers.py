import errno
import sys

import pytest
import torch

from effattn.bench import workers
from effattn.bench.workers import Failed, load_plugin, memory_limit_bytes


def raise_it(error):
    raise error


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried ..."),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 4 bytes."),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
)
def test_memory_that_runs_out_is_told_from_other_errors(error):
    with pytest.raises(Failed) as failed:
        workers._translated(raise_it, error)
    assert failed.value.status == "out_of_memory"


@pytest.mark.parametrize("error", [RuntimeError("shapes do not fit"), OSError(errno.ENOENT, "no file"), ValueError()])
def test_other_errors_are_errors_with_type_message_and_line(error):
    with pytest.raises(Failed) as failed:
        workers._translated(raise_it, error)
    assert failed.value.status == "error"
    assert failed.value.reason.startswith(f"{type(error).__name__}:")
    assert f"{error}" in failed.value.reason
    assert "(test_bench_workers.py:" in failed.value.reason


def test_the_reason_is_one_line():
    with pytest.raises(Failed) as failed:
        workers._translated(raise_it, ValueError("first\n  second"))
    assert failed.value.reason.startswith("ValueError: first second (")


def test_a_failed_call_no_longer_holds_its_tensors():
    held = []

    def hoard(_):
        tensor = torch.zeros(8)
        held.append(__import__("weakref").ref(tensor))
        raise MemoryError

    with pytest.raises(Failed):
        workers._translated(hoard, None)
    assert held[0]() is None


def test_an_exit_code_is_put_in_words():
    assert workers._how_it_ended(-11) == "was ended by SIGSEGV"
    assert workers._how_it_ended(3) == "ended with exit code 3"


def test_the_memory_limit_is_a_share_of_the_machine():
    whole = memory_limit_bytes(1.0)
    assert memory_limit_bytes(0.5) == pytest.approx(whole / 2, rel=0.01)
    assert whole > 2**28


def test_a_plugin_is_a_file_or_a_module_imported_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plug_for_test.py").write_text("COUNT = []\n")
    plugin = load_plugin("plug_for_test.py")
    try:
        assert load_plugin("plug_for_test.py") is plugin
    finally:
        del sys.modules[plugin.__name__]
    assert load_plugin("json").__name__ == "json"


def test_a_plugin_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"study: plugins must be modules or files that exist, got 'nowhere\.py'"):
        load_plugin("nowhere.py")
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        load_plugin("nowhere")


def test_a_plugin_that_fails_is_not_half_imported(tmp_path):
    path = tmp_path / "fails_for_test.py"
    path.write_text("1 / 0\n")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            load_plugin(str(path))

import importlib.machinery
import subprocess
import sys
from dataclasses import asdict
from types import ModuleType, SimpleNamespace

import pytest
import torch

import effattn
from effattn.bench import machine
from effattn.bench.machine import Machine, commit, gpu_state


def git(folder, *arguments):
    identity = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.org"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


def test_this_machine_is_described():
    found = Machine.this("cpu")
    assert found.gpu is None
    assert found.cpu
    assert found.cpu_threads == torch.get_num_threads()
    assert found.memory_total_bytes > 2**28
    assert (found.torch, found.effattn) == (torch.__version__, effattn.__version__)
    assert found.record == asdict(found)


@pytest.mark.parametrize(
    ("cpu", "label"),
    [
        ("AMD EPYC 7B13 64-Core Processor", "amd-epyc-7b13-2-cores"),
        ("Intel(R) Xeon(R) CPU E5-2690 v4 @ 2.60GHz", "intel-xeon-e5-2690-v4-2-cores"),
        ("Apple M3", "apple-m3-2-cores"),
    ],
)
def test_the_label_is_short_and_fit_for_a_folder(monkeypatch, cpu, label):
    monkeypatch.setattr(machine, "cpu_name", lambda: cpu)
    monkeypatch.setattr(machine, "_num_cores", lambda: 2)
    assert Machine.this("cpu").machine == label


def test_the_label_can_be_given():
    assert Machine.this("cpu", "my-box").machine == "my-box"
    with pytest.raises(ValueError, match=r"machine_label: must be of letters.*got 'a/b'"):
        Machine.this("cpu", "a/b")


def test_the_commit_says_whether_the_code_differs_from_it(tmp_path):
    code = tmp_path / "code"
    code.mkdir()
    (code / "a.py").write_text("1")
    git(tmp_path, "init", "--quiet")
    assert commit(code) is None
    git(tmp_path, "add", "code")
    git(tmp_path, "commit", "--quiet", "--message", "First")
    clean = commit(code)
    assert clean is not None
    assert len(clean) == 40
    (tmp_path / "records.jsonl").write_text("results are not code")
    assert commit(code) == clean
    (code / "a.py").write_text("2")
    assert commit(code) == f"{clean}-dirty"


def test_there_is_no_commit_outside_of_git(tmp_path):
    assert commit(tmp_path) is None


@pytest.fixture
def nvml(monkeypatch):
    """nvidia-ml-py, without a GPU to ask."""
    module = ModuleType("pynvml")
    module.__spec__ = importlib.machinery.ModuleSpec("pynvml", None)
    module.NVMLError = type("NVMLError", (Exception,), {})
    module.nvmlInit = lambda: None
    module.nvmlSystemGetDriverVersion = lambda: "570.1"
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


@pytest.fixture
def gpu(monkeypatch):
    properties = SimpleNamespace(name="NVIDIA H200", multi_processor_count=132, total_memory=150 * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: properties)


@pytest.mark.usefixtures("gpu", "nvml")
def test_a_gpu_is_described():
    found = Machine.this("cuda")
    assert found.machine == "nvidia-h200"
    described = (found.gpu, found.gpu_driver, found.gpu_sm_count, found.gpu_memory_bytes)
    assert described == ("NVIDIA H200", "570.1", 132, 150 * 10**9)


@pytest.mark.usefixtures("gpu")
def test_the_driver_is_unknown_without_nvidia_ml_py(monkeypatch):
    monkeypatch.setattr(machine, "_nvml", lambda: None)
    found = Machine.this("cuda")
    assert (found.gpu, found.gpu_driver) == ("NVIDIA H200", None)
    assert gpu_state("cuda") == {}


def test_the_state_of_a_gpu_is_what_its_sensors_tell(monkeypatch, nvml):
    def no_sensor():
        raise nvml.NVMLError

    monkeypatch.setattr(torch.cuda, "clock_rate", lambda: 1980)
    monkeypatch.setattr(torch.cuda, "temperature", lambda: 41)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda: 118_400)  # mW
    assert gpu_state("cuda") == {"gpu_sm_clock_mhz": 1980, "gpu_temperature_c": 41, "gpu_power_w": 118.4}
    monkeypatch.setattr(torch.cuda, "power_draw", no_sensor)
    assert gpu_state("cuda") == {"gpu_sm_clock_mhz": 1980, "gpu_temperature_c": 41}
    assert gpu_state("cpu") == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_this_gpu_is_described():
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    found = Machine.this("cuda")
    assert found.gpu_driver
    assert found.gpu_sm_count
    assert gpu_state("cuda")["gpu_temperature_c"] > 0

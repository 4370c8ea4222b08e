import subprocess
from dataclasses import asdict

import pytest
import torch

import effattn
from effattn.bench import machine
from effattn.bench.machine import Machine, commit


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

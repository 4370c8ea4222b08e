"""Backends of a model from a YAML file."""

import re
import sys

import pytest

import effattn


def test_one_spec_or_one_a_layer(tmp_path):
    path = tmp_path / "f.yaml"
    path.write_text("backend: lsh( seed=0, num_hashes=8 )\nevidence: {density: 0.5}\n")
    assert effattn.swap.from_file(path) == "lsh(num_hashes=8)"
    path.write_text("backends:\n  2: sdpa\n  0: sliding_window(global_tokens=range(64))\n")
    found = effattn.swap.from_file(str(path))
    assert list(found.items()) == [(0, "sliding_window(global_tokens=range(64))"), (2, "sdpa")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("other: 3", "must hold `backend`, a spec, or `backends`, one for the number of each layer, got {'other': 3}"),
        ("backends: {}", "must hold `backend`"),
        ("backends: {a: sdpa}", "must hold `backend`"),
        ("backends: {0: sdpaa}", "f.yaml: backend: unknown name 'sdpaa'"),
        ("backend: lsh(", "a spec looks like"),
        ("[", "is not YAML"),
    ],
)
def test_a_file_that_is_none(tmp_path, text, message):
    (tmp_path / "f.yaml").write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        effattn.swap.from_file(tmp_path / "f.yaml")


def test_without_yaml_the_reason_is_read(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ModuleNotFoundError, match="needs PyYAML, which is not installed: pip install pyyaml"):
        effattn.swap.from_file(tmp_path / "f.yaml")

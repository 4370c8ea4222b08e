"""What a backend is: fields, specs, capabilities, refusals, and the registry."""

import dataclasses
import json
import os
import pickle
import subprocess
import sys
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

import effattn
from effattn import Backend, Capabilities, Request, UnsupportedError, backend, reference
from effattn.masks import Causal, Dense, Everything, Global, Padding, Window

REQUEST = Request(
    batch_size=2, num_heads=4, num_kv_heads=4, query_len=8, key_len=8, head_dim=16, value_dim=16, query_offset=0
)


@pytest.fixture
def registry(monkeypatch):
    """The registry, put back as it was after the test."""
    effattn.names()
    monkeypatch.setattr(backend, "_registry", dict(backend._registry))


@dataclass(frozen=True)
class Toy(Backend):
    """Attends to the first keys only. For tests."""

    name = "toy"
    first: int = 2

    def __post_init__(self):
        self._require_int("first", 1)

    def pattern(self, query, key, *, mask, query_offset):
        return mask & Dense(torch.arange(key.shape[2]) < self.first)


# Specs


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("lsh", {}),
        ("  lsh ", {}),
        ("lsh()", {}),
        ("lsh(num_hashes=8)", {"num_hashes": 8}),
        ("lsh(num_hashes=8, seed=None, count='per_round')", {"num_hashes": 8, "seed": None, "count": "per_round"}),
    ],
)
def test_specs(spec, expected):
    made = effattn.get(spec)
    assert made.name == "lsh"
    assert {field: getattr(made, field) for field in expected} == expected
    assert made == replace(effattn.get("lsh"), **expected)


def test_fields_override_the_spec():
    assert effattn.get("lsh(seed=1, num_hashes=2)", seed=5) == effattn.get("lsh(num_hashes=2, seed=5)")
    assert effattn.get(effattn.get("lsh(num_hashes=2)"), seed=5) == effattn.get("lsh(num_hashes=2, seed=5)")


def test_a_backend_is_itself():
    made = effattn.get("chunked")
    assert effattn.get(made) is made


@pytest.mark.parametrize(
    "spec",
    [
        "full",
        "lsh(num_hashes=8, seed=None)",
        "sdpa(kernel='math')",
        "sliding_window(left=None, right=0, global_tokens=(0, 5))",
        "sliding_window(global_tokens=((0,), ()))",
    ],
)
def test_str_is_the_shortest_spec(spec):
    made = effattn.get(spec)
    assert str(made) == spec
    assert effattn.get(str(made)) == made
    assert {made: 1}[effattn.get(spec)] == 1
    json.dumps(dataclasses.asdict(made))
    assert pickle.loads(pickle.dumps(made)) == made
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.seed = 3


def test_a_long_run_of_numbers_is_a_range():
    window = effattn.get("sliding_window")
    for tokens, written in {
        tuple(range(64)): "range(64)",
        tuple(range(3, 8)): "range(3, 8)",
        (0, 1, 2, 3): "(0, 1, 2, 3)",
        (0, 1, 2, 3, 5): "(0, 1, 2, 3, 5)",
        (0, 1, 2, 3, 10**15): "(0, 1, 2, 3, 1000000000000000)",
        (tuple(range(8)), (), (3,)): "(range(8), (), (3,))",
        (tuple(range(8)),): "(range(8),)",
    }.items():
        made = dataclasses.replace(window, global_tokens=tokens)
        assert str(made) == f"sliding_window(global_tokens={written})"
        assert effattn.get(str(made)) == made
    assert effattn.get("sliding_window", global_tokens=range(64)) == effattn.get(
        "sliding_window(global_tokens=range(64))"
    )


def test_str_leaves_defaults_out():
    assert str(effattn.get("lsh(num_hashes=4, seed=3)")) == "lsh(seed=3)"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("flul", r"backend: unknown name 'flul'; did you mean 'full'\? registered are .*full.*sdpa"),
        ("zzz", "backend: unknown name 'zzz'; registered are"),
        ("lsh(hashes=3)", r"lsh: unknown field 'hashes'; did you mean 'num_hashes'\? it has bucket_size, num_hashes"),
        ("full(seed=3)", "full: unknown field 'seed'; it has none"),
        ("lsh(num_hashes=0)", "lsh: num_hashes must be an integer >= 1, got 0"),
        ("lsh(num_hashes=2.0)", "lsh: num_hashes must be an integer >= 1, got 2.0"),
        ("lsh(num_hashes=True)", "lsh: num_hashes must be an integer >= 1, got True"),
        ("lsh(seed=-1)", "lsh: seed must be an integer >= 0 or None, got -1"),
        (
            "lsh(num_hashes=many)",
            r"lsh: num_hashes must be a literal such as 8, 'auto', None or range\(64\), got 'many'",
        ),
        ("lsh(num_hashes=range(10**12))", r"lsh: num_hashes must be a literal .*, got 'range\(10 \*\* 12\)'"),
        ("lsh(num_hashes=range(1000000000000))", "lsh: num_hashes must be a range of at most 16777216 numbers"),
        ("lsh(num_hashes=range(10000000000000000000000))", "lsh: num_hashes must be a range of at most 16777216"),
        ("lsh(num_hashes=range(1, 2, 0))", "lsh: num_hashes must be a literal"),
        ("lsh(num_hashes=range('a'))", "lsh: num_hashes must be a literal"),
        ("lsh(num_hashes={[]: 1})", "lsh: num_hashes must be a literal such as 8"),
        ("lsh(seed=1, seed=2)", "lsh: seed must be given once"),
        ("lsh(8)", r"backend: a spec looks like .*, got 'lsh\(8\)'"),
        ("lsh(**x)", "backend: a spec looks like"),
        ("lsh(", r"backend: a spec looks like .*, got 'lsh\('"),
        ("", "backend: a spec looks like .*, got ''"),
        ("effattn.lsh()", "backend: a spec looks like"),
        (3, "backend: must be a spec string or a Backend, got int"),
        (None, "backend: must be a spec string or a Backend, got NoneType"),
    ],
)
def test_bad_specs_say_what_is_allowed(spec, message):
    with pytest.raises(ValueError, match=message):
        effattn.get(spec)


def test_a_backend_value_is_asked_for_its_fields_too():
    with pytest.raises(ValueError, match=r"lsh: unknown field 'hashes'; did you mean 'num_hashes'\?"):
        effattn.get(effattn.get("lsh"), hashes=3)


# The registry


def test_names_are_sorted_and_complete():
    names = effattn.names()
    assert list(names) == sorted(names)
    assert {"full", "sdpa", "chunked", "sliding_window", "lsh", "xformers", "flex"} <= set(names)


def test_a_backend_of_ones_own_works_at_once(registry):
    """A pattern alone is enough: it is computed by the dense reference."""
    assert effattn.register(Toy) is Toy
    assert "toy" in effattn.names()
    query, key, value = (torch.randn(1, 2, 5, 4) for _ in range(3))
    output, lse = effattn.attention(query, key, value, backend="toy(first=3)", mask=Causal(), return_lse=True)
    mask = Causal() & Dense(torch.arange(5) < 3)
    expected, expected_lse = reference.attention(query, key, value, mask=mask)
    torch.testing.assert_close(output, expected.float())
    torch.testing.assert_close(lse, expected_lse.float())
    assert effattn.get("toy").resolve(REQUEST) == "dense reference"
    with pytest.raises(ValueError, match="toy: first must be an integer >= 1, got 0"):
        effattn.get("toy(first=0)")


def test_registering_again_is_harmless_and_a_taken_name_is_refused(registry):
    effattn.register(Toy)
    effattn.register(Toy)

    @dataclass(frozen=True)
    class Other(Backend):
        name = "toy"

    with pytest.raises(ValueError, match=r"register: the name 'toy' is taken by .*test_backend\.Toy"):
        effattn.register(Other)


def test_what_cannot_be_registered():
    @dataclass
    class Thawed(Backend):
        name = "thawed"

    @dataclass(frozen=True)
    class Nameless(Backend):
        field: int = 1

    @dataclass(frozen=True)
    class Misnamed(Backend):
        name = "my attention"

    @dataclass(frozen=True)
    class Open(Backend):
        name = "open"
        size: int

    class Inherits(Toy):
        name = "inherits"

    for cls, message in (
        (Thawed, "Thawed must be a frozen dataclass"),
        (Inherits, "Inherits must be a frozen dataclass"),
        (Nameless, "Nameless.name must be an identifier such as 'my_attention', got None"),
        (Misnamed, "Misnamed.name must be an identifier such as 'my_attention', got 'my attention'"),
        (Open, "every field of Open needs a default, size has none"),
        (int, "needs a subclass of effattn.Backend, got <class 'int'>"),
        (Toy(), r"needs a subclass of effattn.Backend, got Toy\(first=2\)"),
    ):
        with pytest.raises(ValueError, match=f"register: {message}"):
            effattn.register(cls)


def test_entry_points(tmp_path):
    """Packages of others are found through their entry points; one that cannot be imported says so when asked for."""
    (tmp_path / "others.py").write_text(
        "from dataclasses import dataclass\n"
        "import effattn\n"
        "@effattn.register\n"
        "@dataclass(frozen=True)\n"
        "class Theirs(effattn.Backend):\n"
        "    '''Theirs, from afar.'''\n"
        "    name = 'theirs'\n"
    )
    (tmp_path / "broken.py").write_text("import a_module_that_nobody_has\n")
    info = tmp_path / "others-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[effattn.backends]\ntheirs = others\nbroken = broken\n")
    script = (
        "import effattn\n"
        "assert 'theirs' in effattn.names() and 'broken' not in effattn.names()\n"
        "assert str(effattn.get('theirs')) == 'theirs'\n"
        "rows = {row['backend']: row for row in effattn.describe('cpu').rows}\n"
        "assert rows['theirs']['what it is'] == 'Theirs, from afar', rows['theirs']\n"
        "assert 'a_module_that_nobody_has' in rows['broken']['runs'], rows['broken']\n"
        "try:\n"
        "    effattn.get('broken')\n"
        "except ValueError as error:\n"
        "    print(error)\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "backend: 'broken' could not be imported: No module named 'a_module_that_nobody_has'\n"


def test_describe_says_what_runs_here():
    overview = effattn.describe("cpu")
    rows = {row["backend"]: row for row in overview.rows}
    assert set(rows) == set(effattn.names())
    assert rows["full"]["runs"] == "yes"
    assert rows["lsh"]["fields"].startswith("bucket_size=64, num_hashes=4")
    text = str(overview).splitlines()
    assert text[0] == "effattn backends on cpu"
    assert text[1].split() == ["backend", "runs", "what", "it", "is"]
    assert len(text) == 3 + len(rows)
    for row in rows.values():
        assert row["what it is"], f"{row['backend']} has no docstring"
        assert not row["what it is"].endswith(".")


def test_describe_gives_the_reason_where_nothing_runs():
    rows = effattn.describe("tpu").rows
    assert all(row["runs"].startswith("no: ") and "device tpu" in row["runs"] for row in rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what CUDA runs where there is one")
def test_nothing_runs_on_a_device_that_is_not_here():
    assert all(row["runs"] == "no: this machine has no CUDA device" for row in effattn.describe("cuda").rows)


# Capabilities


@dataclass(frozen=True)
class Limited(Backend):
    """Can do what its field says. For tests."""

    name = "limited"
    able: Capabilities = dataclasses.field(default_factory=Capabilities)

    @property
    def capabilities(self):
        return self.able

    def __str__(self):
        return self.name


@pytest.mark.parametrize(
    ("limits", "asked", "reason"),
    [
        (
            {"masks": frozenset({Causal, Window})},
            {"mask": Causal() & Global((0,))},
            "requested a mask of Global; supported Causal, Window",
        ),
        ({"masks": frozenset()}, {"mask": Causal()}, "requested a mask of Causal; supported no masks"),
        (
            {"masks": frozenset({Causal, Window})},
            {"mask": Causal() | Window(1, 1)},
            "requested a mask of Or; supported Causal, Window",
        ),
        ({"bias": False}, {"bias": True}, "requested a bias; supported none"),
        (
            {"bias_grad": False},
            {"bias": True, "bias_grad": True},
            "requested a gradient for the bias; supported a bias without one",
        ),
        (
            {"dtypes": (torch.float16, torch.bfloat16)},
            {"dtype": torch.float64},
            "requested float64; supported float16, bfloat16",
        ),
        ({"devices": ("cuda",)}, {}, "requested device cpu; supported cuda"),
        ({"max_head_dim": 64}, {"head_dim": 65}, "requested head_dim 65; supported up to 64"),
        ({"max_head_dim": 64}, {"value_dim": 80}, "requested head_dim 80; supported up to 64"),
        (
            {"value_head_dim": False},
            {"value_dim": 8},
            "requested value head_dim 8; supported that of the queries, 16",
        ),
        (
            {"grouped_heads": False},
            {"num_kv_heads": 2},
            "requested 4 query heads on 2 key heads; supported equal numbers",
        ),
        (
            {"cross_length": False},
            {"query_len": 3, "query_offset": 5},
            "requested query_len 3 with key_len 8; supported equal lengths",
        ),
        (
            {"query_offset": False},
            {"query_len": 3},
            "requested query_offset 0; supported key_len - query_len = 5",
        ),
        ({"dropout": False}, {"dropout_p": 0.1}, "requested dropout_p 0.1; supported 0"),
        ({"backward": False}, {"backward": True}, "requested a backward pass; supported forward only"),
        ({"lse": False}, {"return_lse": True}, "requested the log-sum-exp; supported the output only"),
    ],
)
def test_what_is_not_declared_is_refused_with_its_reason(limits, asked, reason):
    request = replace(REQUEST, **asked)
    assert Limited(Capabilities(**limits)).reasons(request) == [reason]
    assert Limited().reasons(request) == []


def test_a_refusal_lists_every_reason():
    limited = Limited(Capabilities(bias=False, dropout=False, lse=False))
    request = replace(REQUEST, bias=True, dropout_p=0.5, return_lse=True)
    with pytest.raises(UnsupportedError) as refusal:
        limited.check(request)
    assert refusal.value.reasons == (
        "requested a bias; supported none",
        "requested dropout_p 0.5; supported 0",
        "requested the log-sum-exp; supported the output only",
    )
    assert str(refusal.value).splitlines() == [
        "limited cannot do this:",
        *(f"  - {reason}" for reason in refusal.value.reasons),
    ]
    assert isinstance(refusal.value, ValueError)


def test_a_refusal_survives_the_way_between_processes():
    error = UnsupportedError(effattn.get("lsh(seed=3)"), ["requested a; supported b"])
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (UnsupportedError, str(error))
    assert (again.backend, again.reasons) == ("lsh(seed=3)", ("requested a; supported b",))


def test_a_machine_that_lacks_the_backend_is_a_reason_too():
    class Absent(Limited):
        def unavailable(self):
            return "needs a machine of tomorrow"

    assert Absent().reasons(REQUEST) == ["needs a machine of tomorrow"]


def test_a_request_is_the_call_without_its_data():
    query = torch.randn(2, 4, 3, 16, dtype=torch.float64, requires_grad=True)
    key, value = torch.randn(2, 2, 8, 16, dtype=torch.float64), torch.randn(2, 2, 8, 5, dtype=torch.float64)
    bias = torch.zeros(8, requires_grad=True)
    request = Request.of(query, key, value, mask=Causal(), bias=bias, dropout_p=0.1, return_lse=True)
    assert request == Request(
        batch_size=2,
        num_heads=4,
        num_kv_heads=2,
        query_len=3,
        key_len=8,
        head_dim=16,
        value_dim=5,
        dtype=torch.float64,
        device="cpu",
        mask=Causal(),
        query_offset=5,
        bias=True,
        bias_grad=True,
        dropout_p=0.1,
        backward=True,
        return_lse=True,
    )
    with torch.no_grad():
        request = Request.of(query, key, value, bias=bias, query_offset=1)
    assert (request.backward, request.bias_grad, request.query_offset, request.mask) == (False, False, 1, Everything())


def test_what_is_refused_is_never_computed(monkeypatch):
    called = SimpleNamespace(count=0)

    def attend(self, *args, **kwargs):
        called.count += 1

    monkeypatch.setattr(Limited, "attend", attend)
    query = torch.randn(1, 2, 4, 8)
    keep = Padding(torch.ones(1, 4, dtype=torch.bool))
    with pytest.raises(UnsupportedError, match="requested a mask of Padding; supported Causal"):
        effattn.attention(query, query, query, backend=Limited(Capabilities(masks=frozenset({Causal}))), mask=keep)
    assert called.count == 0

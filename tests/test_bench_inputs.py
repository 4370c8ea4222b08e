"""Inputs of the runner: what is drawn, and what is recorded from a model, here tiny random ones."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import TINY_LLAMA
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from effattn.bench import capture, models
from effattn.bench.capture import CaptureSource, captured_info, ensure_captured, load_captured
from effattn.bench.inputs import HeadShape, Inputs, input_shape, kinds, make_inputs
from effattn.bench.texts import read_tokens

transformers = pytest.importorskip("transformers", reason="captured inputs need the extra 'models'")

SHAPE = {"batch_size": 2, "num_heads": 4, "num_kv_heads": 2, "seq_len": 96, "head_dim": 16}
TINY = {name: TINY_LLAMA[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
MODEL_POSITIONS = TINY_LLAMA["max_position_embeddings"]


def make(kind: str, **changes: Any) -> Inputs:
    arguments = {**SHAPE, "dtype": torch.float32, "device": "cpu", "seed": 0, **changes}
    return make_inputs(kind, **arguments)


# Random kinds -----------------------------------------------------------------------------------------------

drawn = pytest.mark.parametrize("kind", [kind for kind in kinds() if kind != "captured"])


@drawn
def test_drawn_shapes(kind: str) -> None:
    inputs = make(kind)
    assert inputs.query.shape == (2, 4, 96, 16)
    assert inputs.key.shape == inputs.value.shape == (2, 2, 96, 16)
    assert inputs.scale == 0.25
    assert inputs.description.startswith(f"{kind}: ")
    assert input_shape(kind) is None


@drawn
def test_equal_arguments_give_equal_bits_and_leave_the_global_generator(kind: str) -> None:
    before = torch.get_rng_state()
    first, second, other = make(kind), make(kind), make(kind, seed=1)
    assert torch.equal(before, torch.get_rng_state())
    for name in ("query", "key", "value"):
        assert torch.equal(getattr(first, name), getattr(second, name))
        assert not torch.equal(getattr(first, name), getattr(other, name))


@drawn
def test_drawn_in_float32_then_cast(kind: str) -> None:
    exact, rounded = make(kind), make(kind, dtype=torch.bfloat16)
    assert rounded.query.dtype == torch.bfloat16
    assert torch.equal(exact.query.bfloat16(), rounded.query)


def test_clustered_shares_query_and_key() -> None:
    inputs = make("clustered", num_heads=2)
    torch.testing.assert_close(inputs.key.norm(dim=-1), torch.ones(2, 2, 96))
    torch.testing.assert_close(F.normalize(inputs.query, dim=-1), inputs.key)
    # |x|^2 is 16 dimensions of variance 2^2 + 1, and the query is 4 x.
    assert inputs.query.square().mean().item() == pytest.approx(16 * 5, rel=0.1)


def test_clustered_query_heads_of_one_key_head_share_its_clusters_but_differ() -> None:
    inputs = make("clustered", head_dim=64)
    first, second = F.normalize(inputs.query, dim=-1).unflatten(1, (2, 2)).unbind(2)
    torch.testing.assert_close(first, inputs.key)
    cosine = (second * inputs.key).sum(-1)
    assert 0.7 < cosine.mean() < 0.9  # the centre's share, 2^2 / (2^2 + 1), and noise of its own


def test_clustered_has_64_clusters() -> None:
    key = make("clustered", batch_size=1, num_heads=1, num_kv_heads=1, seq_len=1024, head_dim=128).key[0, 0]
    together = key @ key.mT > 0.5
    # 64 complete groups: as an equivalence relation, the sizes' reciprocals add up to the number of classes.
    assert torch.equal(together, (together.float() @ together.float()) > 0)
    assert (1 / together.sum(-1)).sum().item() == pytest.approx(64)


def test_heavy_tailed_has_outliers_at_unit_variance() -> None:
    heavy, normal = (make(kind, seq_len=20_000).query for kind in ("heavy_tailed", "gaussian"))
    assert (heavy.abs() > 12.924 / 3**0.5).double().mean() == pytest.approx(1e-3, rel=0.1)  # t table, 3 degrees
    assert heavy.abs().median() * 3**0.5 == pytest.approx(0.765, rel=0.01)
    assert normal.abs().max() < 7


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("gausian", {}, "kind must be one of clustered, gaussian, heavy_tailed, captured, got 'gausian'"),
        ("gaussian", {"seq_len": 0}, "seq_len must be positive, got 0"),
        ("gaussian", {"num_kv_heads": 3}, "multiple of num_kv_heads, got 4 and 3"),
        ("gaussian", {"head_dim": None}, "gaussian needs num_heads, num_kv_heads and head_dim"),
        ("gaussian", {"source": CaptureSource()}, "source goes with kind 'captured' alone"),
    ],
)
def test_what_cannot_be_drawn(kind: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(kind, **changes)


# Captured ---------------------------------------------------------------------------------------------------


@pytest.fixture
def source(llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CaptureSource:
    """The tiny Llama reading 900 bytes, with a cache of its own."""
    monkeypatch.setenv("EFFATTN_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(97 + i * i % 23) for i in range(900)))
    return CaptureSource(llama, str(text), layers=(1, 0))


def attention(inputs: Inputs) -> Tensor:
    return F.scaled_dot_product_attention(
        inputs.query, inputs.key, inputs.value, scale=inputs.scale, is_causal=True, enable_gqa=True
    )


def make_captured(source: CaptureSource, **changes: Any) -> Inputs:
    own = {"num_heads": None, "num_kv_heads": None, "head_dim": None}
    return make("captured", source=source, **{**own, **changes})


def cache_files() -> list[Path]:
    return sorted(models.cache_folder().iterdir())


def test_captured_attention_is_that_of_the_model(source: CaptureSource) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(source.model, attn_implementation="eager")
    _, tokenizer = models.load(source.model)
    outputs: dict[int, Tensor] = {}
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.o_proj.register_forward_pre_hook(
            lambda module, args, index=index: outputs.update({index: args[0].unflatten(-1, (4, 8)).transpose(1, 2)})
        )
    with torch.no_grad():
        model(read_tokens(source.text, tokenizer, 96))

    inputs = make_captured(source)
    assert inputs.query.shape == (2, 4, 96, 8)
    assert inputs.key.shape == inputs.value.shape == (2, 2, 96, 8)
    torch.testing.assert_close(attention(inputs), torch.cat([outputs[1], outputs[0]]))
    assert (outputs[1] - outputs[0]).norm() > 0.5 * outputs[0].norm()


def test_row_b_is_layer_b(source: CaptureSource) -> None:
    both, first = make_captured(source), make_captured(source, batch_size=1)
    assert torch.equal(first.query, both.query[:1])
    assert first.description == f"captured: layers (1,) of {source}"


def test_the_shape_is_the_models(source: CaptureSource) -> None:
    ensure_captured(source, 96)
    assert input_shape("captured", source) == HeadShape(num_heads=4, num_kv_heads=2, head_dim=8)
    assert make_captured(source, num_heads=4, num_kv_heads=2, head_dim=8).scale == 8**-0.5
    with pytest.raises(ValueError, match=r"head_dim must be 8, that of .*, or None, got 64"):
        make_captured(source, head_dim=64)
    with pytest.raises(ValueError, match=r"batch_size must be at most 2, a row for each of layers \(1, 0\)"):
        make_captured(source, batch_size=3)


def test_a_shorter_capture_is_a_prefix(source: CaptureSource) -> None:
    ensure_captured(source, 96)
    prefix, alone = load_captured(source, 41), capture.capture(source, 41)
    assert prefix.info == alone.info
    for name in ("query", "key", "value"):
        torch.testing.assert_close(getattr(prefix, name), getattr(alone, name))


def test_the_model_is_loaded_once_for_the_longest(source: CaptureSource, monkeypatch: pytest.MonkeyPatch) -> None:
    loads = []

    def load_and_count(name: str) -> tuple[Any, Any]:
        loads.append(name)
        return load(name)

    load = models.load
    monkeypatch.setattr(models, "load", load_and_count)
    assert ensure_captured(source, 64).seq_len == 64
    assert ensure_captured(source, 64) == captured_info(source) == load_captured(source, 64).info
    assert make_captured(source, seq_len=32).query.shape[2] == 32
    assert len(loads) == 1
    assert ensure_captured(source, 65).seq_len == 65
    assert len(loads) == 2
    assert captured_info(source).seq_len == 65
    assert len(cache_files()) == 1


def test_another_text_or_model_is_another_capture(source: CaptureSource) -> None:
    ensure_captured(source, 32)
    text = Path(source.text)
    text.write_text(text.read_text()[::-1])
    with pytest.raises(ValueError, match=r"is not in .* yet"):
        captured_info(source)
    ensure_captured(source, 32)
    weights = Path(source.model) / "model.safetensors"
    weights.touch()
    with pytest.raises(ValueError, match=r"is not in .* yet"):
        captured_info(source)
    assert len(cache_files()) == 2


def flip_a_bit(content: bytes) -> bytes:
    return content[:-5] + bytes([content[-5] ^ 1]) + content[-4:]


@pytest.mark.parametrize(
    "damage",
    [flip_a_bit, lambda content: content[:-100], lambda content: b"", lambda content: b"something else" * 9],
    ids=["bit", "truncated", "empty", "other"],
)
def test_a_damaged_file_is_an_error(source: CaptureSource, damage: Callable[[bytes], bytes]) -> None:
    ensure_captured(source, 32)
    (file,) = cache_files()
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ValueError, match=f"{file.name} is damaged, delete it"):
        load_captured(source, 32)


def test_a_file_of_another_source_is_an_error(source: CaptureSource) -> None:
    ensure_captured(source, 32)
    (file,) = cache_files()
    other = CaptureSource(source.model, source.text, layers=(2,))
    ensure_captured(other, 32)
    (other_file,) = set(cache_files()) - {file}
    other_file.replace(file)
    with pytest.raises(ValueError, match=f"{file.name} is not what its name says"):
        load_captured(source, 32)


def test_what_a_source_cannot_give(source: CaptureSource, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"seq_len must be at most {MODEL_POSITIONS}, the positions of .*, got 641"):
        ensure_captured(source, MODEL_POSITIONS + 1)
    short = tmp_path / "short.txt"
    short.write_text("nine more")
    with pytest.raises(ValueError, match=r"seq_len must be at most 10, the tokens that text .*short\.txt.*, got 11"):
        ensure_captured(CaptureSource(source.model, str(short)), 11)
    with pytest.raises(ValueError, match=r"layers must be below 3, the depth of .*, got \(0, 3\)"):
        ensure_captured(CaptureSource(source.model, source.text, layers=(0, 3)), 8)
    with pytest.raises(ValueError, match=r"text must be one of stdlib, prose, tables, or a text file, got 'no\.txt'"):
        ensure_captured(CaptureSource(source.model, "no.txt"), 8)
    assert cache_files_if_any() == []


def cache_files_if_any() -> list[Path]:
    return cache_files() if models.cache_folder().exists() else []


@pytest.mark.parametrize("layers", [(), (0, 0), (-1,)])
def test_layers_must_be_distinct_indices(layers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="layers must be distinct indices from 0"):
        CaptureSource(layers=layers)


@pytest.mark.parametrize(
    ("config_name", "options", "message"),
    [
        (
            "Bloom",
            {"vocab_size": 300, "hidden_size": 32, "n_layer": 2, "n_head": 4},
            r"\(BloomForCausalLM\) does not",
        ),
        ("Bert", {**TINY, "intermediate_size": 48}, "must attend causally to everything before, layer 0"),
        (
            "Mistral",
            {**TINY_LLAMA, "sliding_window": 16},
            "must attend causally to everything before, layer 0",
        ),
        ("Gemma2", {**TINY_LLAMA, "head_dim": 8}, "layer 0 of .* adds softcap"),
    ],
)
def test_models_that_do_not_fit_are_refused_by_name(
    save_model: Callable[..., str],
    source: CaptureSource,
    config_name: str,
    options: dict[str, Any],
    message: str,
) -> None:
    config = getattr(transformers, f"{config_name}Config")(**options, pad_token_id=0)
    model = save_model(config)
    with pytest.raises(ValueError, match=message) as refusal:
        ensure_captured(CaptureSource(model, source.text, layers=(0,)), 64)
    assert model in str(refusal.value)


class LargestTensor(TorchDispatchMode):
    """Keeps the size of the largest tensor that any operation gives."""

    numel = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


def test_recording_is_linear_stops_early_and_leaves_the_model_as_it_was(source: CaptureSource) -> None:
    model, tokenizer = models.load(source.model)
    own = model.config._attn_implementation
    seen = []
    for index, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_hook(lambda *_, index=index: seen.append(index))
    visited: list[int] = []
    with LargestTensor() as largest:
        info = capture.stream(
            source,
            MODEL_POSITIONS,
            lambda inputs: visited.append(inputs.layer),
            layers=(1, 0),
            loaded=(model, tokenizer),
        )
    assert visited == [0, 1]
    assert info.layers == (1, 0)
    assert 0 < largest.numel < MODEL_POSITIONS**2 / 4
    assert seen == [0]  # layer 1 is the last one wanted
    assert model.config._attn_implementation == own


def test_all_layers_one_at_a_time(source: CaptureSource) -> None:
    alive: list[weakref.ref[Tensor]] = []
    streamed = {}

    def visit(inputs: capture.LayerInputs) -> None:
        gc.collect()
        assert all(reference() is None for reference in alive)
        alive.extend(weakref.ref(tensor) for tensor in (inputs.query, inputs.key, inputs.value))
        streamed[inputs.layer] = inputs.query.clone()

    info = capture.stream(source, 64, visit)
    assert list(streamed) == list(info.layers) == [0, 1, 2]
    for layer, query in zip(source.layers or (), load_captured(source, 64).query, strict=True):
        assert torch.equal(streamed[layer][0], query)


def test_what_a_visit_raises_comes_through(source: CaptureSource) -> None:
    model, tokenizer = models.load(source.model)
    own = model.config._attn_implementation

    def visit(inputs: capture.LayerInputs) -> None:
        raise ArithmeticError(f"layer {inputs.layer}")

    with pytest.raises(ArithmeticError, match="layer 0"):
        capture.stream(source, 8, visit, loaded=(model, tokenizer))
    assert model.config._attn_implementation == own


def test_the_default_layers_follow_the_depth() -> None:
    assert capture.choose_layers(CaptureSource(), depth=30) == (15, 1, 7, 25)
    assert capture.choose_layers(CaptureSource(), depth=2) == (1, 0)

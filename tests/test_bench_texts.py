"""Texts to read: what they begin with, and that a prefix does not depend on how much is read."""

import argparse
from pathlib import Path

import pytest
import torch

from effattn.bench import models
from effattn.bench.texts import TEXTS, read_tokens


def test_the_standard_library_begins_with_argparse(llama: str) -> None:
    _, tokenizer = models.load(llama)
    text = Path(argparse.__file__).read_text(encoding="utf-8")
    size = len(text.encode())
    tokens = read_tokens("stdlib", tokenizer, size + 50)
    assert tokenizer.decode(tokens[0, 1 : 1 + size]) == text
    assert (tokens[0] == 0).nonzero().tolist() == [[0]]  # <s> begins the whole, not every file
    assert torch.equal(read_tokens("stdlib", tokenizer, 100), tokens[:, :100])


def test_texts_that_every_machine_has() -> None:
    starts = {name: next(documents()) for name, documents in TEXTS.items()}
    assert len(set(starts.values())) == 3
    assert starts["prose"].count(". ") > 100  # sentences
    assert starts["tables"].count("': '") > 1000  # entries
    assert all(sum(map(len, documents())) > 200_000 for documents in TEXTS.values())


def test_a_text_that_is_missing_or_too_short_is_named(llama: str, tmp_path: Path) -> None:
    _, tokenizer = models.load(llama)
    short = tmp_path / "short.txt"
    short.write_text("123456789")
    with pytest.raises(ValueError, match=r"seq_len must be at most 10, the tokens that text .*short\.txt.*, got 11"):
        read_tokens(str(short), tokenizer, 11)
    with pytest.raises(ValueError, match=r"text must be one of stdlib, prose, tables, or a text file, got 'no\.txt'"):
        read_tokens("no.txt", tokenizer, 11)

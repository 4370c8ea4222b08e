"""Long texts to read: three that every machine has, code, prose and tables, or any text file."""

import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from effattn.bench.models import quiet_transformers


def read_tokens(text: str, tokenizer: Any, seq_len: int) -> Int[Tensor, "1 seq"]:
    """The first `seq_len` tokens of a text.

    Its files or chapters are tokenized one by one, so that the tokens at the start do not depend on how many are
    read; the first gets the tokenizer's special tokens, such as one for the beginning.

    Args:
        text: one of `TEXTS`, or a UTF-8 text file.
        tokenizer: of a Hugging Face model.
        seq_len: how many.

    Raises:
        ValueError: if there is no such text, or it has fewer tokens.
    """
    tokens: list[int] = []
    with quiet_transformers():
        for document in documents(text):
            tokens += tokenizer(document, add_special_tokens=not tokens)["input_ids"]
            if len(tokens) >= seq_len:
                return torch.tensor([tokens[:seq_len]])
    raise ValueError(
        f"texts: seq_len must be at most {len(tokens)}, the tokens that text {text!r} has for this model, got {seq_len}"
    )


def documents(text: str) -> Iterator[str]:
    """The pieces of `text` in order, as they are needed; the errors of `read_tokens`."""
    if text in TEXTS:
        yield from TEXTS[text]()
        return
    path = Path(text).expanduser()
    if not path.is_file():
        raise ValueError(f"texts: text must be one of {', '.join(TEXTS)}, or a text file, got {text!r}")
    yield path.read_text(encoding="utf-8")


def _standard_library() -> Iterator[str]:
    modules = Path(sysconfig.get_path("stdlib")).glob("*.py")
    for path in sorted(modules, key=lambda path: (path.name != "argparse.py", path.name)):
        yield path.read_text(encoding="utf-8")


def _language_reference() -> Iterator[str]:
    from pydoc_data.topics import topics

    for name in sorted(topics, key=lambda name: (-len(topics[name]), name)):  # the longest chapters first
        yield topics[name]


def _character_tables() -> Iterator[str]:
    folder = Path(sysconfig.get_path("stdlib"))
    for path in (folder / "html" / "entities.py", *sorted((folder / "encodings").glob("*.py"))):
        yield path.read_text(encoding="utf-8")


TEXTS: dict[str, Callable[[], Iterator[str]]] = {
    "stdlib": _standard_library,
    "prose": _language_reference,
    "tables": _character_tables,
}

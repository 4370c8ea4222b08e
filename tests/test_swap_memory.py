"""A swapped forward at 8192 tokens holds nothing of size n x n: not the mask, not the scores."""

import pytest
import torch
import transformers

import effattn
import effattn.swap
from effattn.bench.memory import allocations, peak_memory
from effattn.bench.texts import read_tokens

SEQ_LEN = 8192
SIZES = {
    "vocab_size": 9,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "max_position_embeddings": SEQ_LEN,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.mark.parametrize(
    ("model_class", "config_class", "options"),
    [
        ("BertModel", "BertConfig", {}),
        ("LlamaModel", "LlamaConfig", {"num_key_value_heads": 1}),
        ("MistralModel", "MistralConfig", {"num_key_value_heads": 1, "sliding_window": 100}),
    ],
)
def test_the_peak_is_below_one_bit_map_of_n_by_n(model_class, config_class, options):
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**SIZES, **options)
    model = getattr(transformers, model_class)(config).eval()
    keep = torch.ones(1, SEQ_LEN, dtype=torch.long)
    keep[0, :100] = 0
    given = {"input_ids": torch.full((1, SEQ_LEN), 5), "attention_mask": keep}

    @torch.no_grad()
    def forward():
        model(**given)

    for backend in ("chunked", "sliding_window(left=64, right=0)"):
        with effattn.swap(model, backend):
            assert peak_memory(forward, "cpu") < SEQ_LEN**2 / 4
    assert peak_memory(forward, "cpu") > SEQ_LEN**2  # as transformers has it, with a bool for every pair


def test_a_padded_causal_encoder_of_pytorch():
    torch.manual_seed(0)
    model = torch.nn.TransformerEncoderLayer(8, 1, 8, batch_first=True).eval()
    x, hidden = torch.randn(1, SEQ_LEN, 8), torch.arange(SEQ_LEN)[None] > 8000

    @torch.no_grad()
    def forward():
        model(x, src_key_padding_mask=hidden)

    with effattn.swap(model, "chunked") as swapped:
        assert peak_memory(forward, "cpu") < SEQ_LEN**2 / 4
    assert swapped.sites[0].calls > 0


def test_smollm2_reads_8192_tokens_without_anything_of_n_by_n(smollm2, monkeypatch):
    model, tokenizer = smollm2
    monkeypatch.setitem(model.base_model._modules, "layers", model.base_model.layers[:1])  # all are alike
    tokens = read_tokens("stdlib", tokenizer, SEQ_LEN)
    keep = torch.ones_like(tokens)
    keep[0, :100] = 0

    @torch.no_grad()
    def forward():
        model.base_model(input_ids=tokens, attention_mask=keep, use_cache=False)

    for backend in ("chunked", "sliding_window(left=256, right=0)", "lsh(num_hashes=2)"):
        with effattn.swap(model, backend, layers=(0,)) as report:
            changes, _ = allocations(forward)
        assert report.sites[0].calls == 1
        assert max(changes) < SEQ_LEN**2  # bytes of one bool for every pair; the MLP's activations are 48 MiB
    changes, _ = allocations(forward)
    assert max(changes) >= SEQ_LEN**2  # as transformers has it

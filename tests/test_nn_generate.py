"""Generation: the same tokens with and without a cache, padding, drawing, and where it ends."""

import pytest
import torch

from effattn import Causal, UnsupportedError, Window
from effattn.nn import GPTConfig, GPTForCausalLM, set_backend
from effattn.nn.generate import sample

IDS = torch.randint(2, 60, (3, 9), generator=torch.Generator().manual_seed(0))
KEEP = (torch.arange(9) >= torch.tensor([[0], [4], [8]])).long()


def model(**options):
    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "d_model": 32, "num_layers": 2, "num_heads": 4, "max_len": 32, "backend": "sdpa"}
    made = GPTForCausalLM(GPTConfig(**sizes | options)).eval()
    for parameter in made.parameters():  # larger than at the start, so that what is read decides
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.4)
    return made


@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "rotary", "alibi"])
@pytest.mark.parametrize(
    "backend",
    ["full", "sdpa", "chunked", "sliding_window(left=4, right=0)", "sliding_window(left=3, global_tokens=(0,))"],
)
def test_the_cache_changes_no_token(positions, backend):
    gpt = model(positions=positions, backend=backend, num_kv_heads=2)
    cached, read_again = (gpt.generate(IDS, KEEP, max_new_tokens=12, use_cache=how) for how in (True, False))
    assert torch.equal(cached, read_again)
    assert torch.equal(cached[:, :9], IDS)
    assert len(cached[:, 9:].unique()) > 4


def test_each_row_is_what_it_is_alone():
    gpt = model()
    batch = gpt.generate(IDS, KEEP, max_new_tokens=8)
    for row in range(3):
        alone = gpt.generate(IDS[row, KEEP[row].bool()][None], max_new_tokens=8)
        assert torch.equal(batch[row, 9:], alone[0, -8:])


def test_greedy_takes_the_likeliest_at_each_step():
    gpt = model()
    tokens = gpt.generate(IDS, max_new_tokens=5)
    logits = gpt(tokens)
    assert torch.equal(logits[:, 8:-1].argmax(-1), tokens[:, 9:])


def test_a_prefill_in_pieces_gives_the_logits_of_one():
    gpt = model(backend="sliding_window(left=3, right=0)")
    cache = gpt.new_cache()
    pieces = [gpt(IDS[:, a:b], KEEP[:, :b], cache=cache) for a, b in ((0, 4), (4, 5), (5, 9))]
    torch.testing.assert_close(torch.cat(pieces, dim=1), gpt(IDS, KEEP), atol=2e-5, rtol=1e-4)
    assert cache.length == 9
    windowed = model()
    cache = windowed.new_cache()
    pieces = [windowed(IDS[:, a:b], mask=Window(3, 0) & Causal(), cache=cache) for a, b in ((0, 4), (4, 9))]
    torch.testing.assert_close(torch.cat(pieces, dim=1), gpt(IDS), atol=2e-5, rtol=1e-4)


def test_a_row_ends_with_eos_and_is_filled_up():
    gpt = model()
    free = gpt.generate(IDS, max_new_tokens=12)
    eos = int(free[0, 11])
    ended = gpt.generate(IDS, max_new_tokens=12, eos_token_id=eos, pad_token_id=0)
    for row in range(3):
        hits = (free[row, 9:] == eos).nonzero()
        stop = 9 + int(hits[0]) + 1 if len(hits) else ended.shape[1]
        assert torch.equal(ended[row, :stop], free[row, :stop])
        assert (ended[row, stop:] == 0).all()
    alone = gpt.generate(IDS[:1], max_new_tokens=12, eos_token_id=eos)
    assert torch.equal(alone, free[:1, : alone.shape[1]])
    assert alone[0, -1] == eos
    assert alone.shape[1] <= 12


def test_drawing_follows_the_seed():
    gpt = model()

    def draw(seed):
        return gpt.generate(IDS, max_new_tokens=8, temperature=2.0, generator=torch.Generator().manual_seed(seed))

    state = torch.get_rng_state()
    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(3)
    first = gpt.generate(IDS, max_new_tokens=8, temperature=2.0)
    torch.manual_seed(3)
    assert torch.equal(gpt.generate(IDS, max_new_tokens=8, temperature=2.0), first)


def frequencies(**options):
    probabilities = torch.tensor([0.1, 0.5, 0.15, 0.25])
    generator = torch.Generator().manual_seed(0)
    drawn = sample(probabilities.log().expand(20000, 4), **{"temperature": 1.0, **options}, generator=generator)
    return torch.bincount(drawn[:, 0], minlength=4) / 20000


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.1, 0.5, 0.15, 0.25]),
        ({"temperature": 0}, [0, 1, 0, 0]),
        ({"temperature": 0.5}, [0.01 / 0.345, 0.25 / 0.345, 0.0225 / 0.345, 0.0625 / 0.345]),
        ({"top_k": 2}, [0, 2 / 3, 0, 1 / 3]),
        ({"top_k": 9}, [0.1, 0.5, 0.15, 0.25]),
        ({"top_p": 0.5}, [0, 1, 0, 0]),
        ({"top_p": 0.51}, [0, 2 / 3, 0, 1 / 3]),
        ({"top_p": 0.8}, [0, 5 / 9, 1.5 / 9, 2.5 / 9]),
        ({"top_p": 1.0}, [0.1, 0.5, 0.15, 0.25]),
        ({"top_k": 2, "top_p": 0.6}, [0, 1, 0, 0]),  # of the two that are left the first has 2/3
    ],
)
def test_what_is_drawn(options, expected):
    torch.testing.assert_close(frequencies(**options), torch.tensor(expected).float(), atol=0.015, rtol=0)


def test_the_last_token_needs_no_position():
    gpt = model(max_len=12)
    assert gpt.generate(IDS, max_new_tokens=4).shape == (3, 13)
    with pytest.raises(ValueError, match="9 tokens and 5 new ones need 13 positions, the learned table has 12"):
        gpt.generate(IDS, max_new_tokens=5)
    assert gpt.generate(IDS[1:], KEEP[1:], max_new_tokens=8).shape == (2, 17)  # 5 real tokens
    assert model(max_len=12, positions="rotary").generate(IDS, max_new_tokens=30).shape == (3, 39)


def test_a_backend_without_decoding_serves_without_a_cache():
    gpt = model(positions="rotary")
    set_backend(gpt, "lsh(bucket_size=4, num_hashes=2, shared_qk=True)")
    with pytest.raises(UnsupportedError, match="supported equal lengths"):
        gpt.generate(IDS, max_new_tokens=3)
    assert gpt.generate(IDS, max_new_tokens=3, use_cache=False).shape == (3, 12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be an integer >= 1, got 0"),
        ({"temperature": -1.0}, "temperature must be >= 0, got -1.0"),
        ({"temperature": float("nan")}, "temperature must be >= 0, got nan"),
        ({"top_k": 3}, "needs temperature > 0"),
        ({"top_p": 0.5}, "needs temperature > 0"),
        ({"temperature": 1.0, "top_k": 0}, "top_k must be an integer >= 1, got 0"),
        ({"temperature": 1.0, "top_p": 0.0}, r"top_p must lie in 0..1 and not be 0, got 0.0"),
        ({"attention_mask": KEEP.flip(1)}, "prompts must be padded on the left"),
        ({"input_ids": IDS[:, :0]}, "prompt_len must be an integer >= 1, got 0"),
    ],
)
def test_what_does_not_fit_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        model().generate(**{"input_ids": IDS, "max_new_tokens": 3, **options})


def test_a_model_in_training_is_refused():
    with pytest.raises(ValueError, match=r"dropout would change the tokens; call model.eval\(\)"):
        model().train().generate(IDS, max_new_tokens=1)

"""What heads attend to: maps of tiny random models against the attentions that the models themselves report."""

import math
from dataclasses import dataclass

import pytest
import torch
import transformers

import effattn
from effattn import Causal, Window
from effattn.bench import maps
from effattn.bench.maps import choose_heads, compare_figure, draw_patterns, head_maps

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 32, "num_hidden_layers": 2}
WINDOW = "sliding_window(left=3, right=1)"


@pytest.fixture(scope="module")
def bert():
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=50, initializer_range=0.5, **SIZES)
    return transformers.BertModel._from_config(config, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=50, initializer_range=0.5, num_key_value_heads=2, **SIZES)
    return transformers.LlamaModel._from_config(config, attn_implementation="eager").eval()


def tokens(length):
    return {"input_ids": torch.randint(50, (1, length), generator=torch.Generator().manual_seed(0))}


def attentions(model, given):
    with torch.no_grad():
        return model(**given, output_attentions=True).attentions


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_map_is_the_attention_that_the_model_reports(name, request):
    model, given = request.getfixturevalue(name), tokens(23)
    want = attentions(model, given)
    found = head_maps(model, given, [WINDOW, "full"], name=name)
    assert len(found) == 2 * 2 * 4
    for each in found:
        full = want[each.layer][0, each.head]
        torch.testing.assert_close(each.full, full, atol=1e-5, rtol=0)
        mask = Window(3, 1) & Causal() if name == "llama" else Window(3, 1)
        allowed = mask.dense(1, 1, 23, 23, 0)[0, 0] if each.backend != "full" else full > 0
        kept = full * allowed
        torch.testing.assert_close(each.kept, kept / kept.sum(-1, keepdim=True), atol=1e-5, rtol=0)
        assert torch.equal(each.allowed > 0, allowed)
        assert each.recall == pytest.approx(float(kept.sum() / 23), abs=1e-5)


def test_later_layers_are_compared_on_what_full_attention_gave_them(llama):
    narrow, wide = (head_maps(llama, tokens(20), [f"sliding_window(left={left}, right=0)"]) for left in (1, 15))
    for a, b in zip(narrow, wide, strict=True):
        assert torch.equal(a.full, b.full)


@pytest.mark.parametrize(("length", "block"), [(20, 5), (23, 5), (7, 10), (1, 1)])
def test_blocks_hold_the_mean_over_queries_and_the_sum_over_keys(bert, length, block):
    (each, *_) = head_maps(bert, tokens(length), [WINDOW], layers=[1], block=block)
    whole = attentions(bert, tokens(length))[1][0, 0]
    parts = [torch.stack([row.sum(1) for row in rows.split(block, 1)], 1).mean(0) for rows in whole.split(block)]
    torch.testing.assert_close(each.full, torch.stack(parts), atol=1e-5, rtol=0)
    assert each.full.shape == (math.ceil(length / block),) * 2
    torch.testing.assert_close(each.kept.sum(-1), torch.ones(len(parts)))
    assert 0 < each.allowed.max() <= 1


def test_what_is_asked_must_be_there(bert):
    with pytest.raises(ValueError, match="maps: block must be >= 1, got 0"):
        head_maps(bert, tokens(4), [WINDOW], block=0)
    with pytest.raises(ValueError, match="layers names 5"):
        head_maps(bert, tokens(4), [WINDOW], layers=[5])
    with pytest.raises(ValueError, match="did you mean 'lsh'"):
        head_maps(bert, tokens(4), ["lshh"])
    assert bert.config._attn_implementation == "eager"


def test_heads_are_chosen_from_the_one_that_loses_most_to_the_middle(bert):
    found = head_maps(bert, tokens(30), [WINDOW])
    ranked = sorted(found, key=lambda each: each.recall)
    places = [(each.layer, each.head) for each in ranked]
    assert choose_heads(found, 1) == [places[4]]
    assert choose_heads(found, 2) == [places[0], places[4]]
    assert len(set(choose_heads(found, 99))) == 8
    with pytest.raises(ValueError, match="maps: heads must be at least 1 of 8, got 0"):
        choose_heads(found, 0)


def test_a_figure_has_a_row_a_head_and_tokens_on_its_axes(bert):
    found = head_maps(bert, tokens(5), [WINDOW])[:2]
    figure = compare_figure([(found[0], list("abcde")), (found[1], None)])
    assert len(figure.axes) == 2 * 3 + 2
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == list("abcde")
    assert f"keeps {found[1].recall:.0%}" in figure.axes[4].get_title(loc="left")


def test_models_are_drawn_below_each_other(tmp_path, monkeypatch, bert, llama):
    class Letters:
        def __call__(self, sentence):
            return {"input_ids": [ord(letter) % 50 for letter in sentence]}

        def decode(self, ids):
            return chr(97 + ids[0] % 26)

    bodies = {"a-bert": bert, "a-llama": llama}
    monkeypatch.setattr(maps, "load", lambda name, head: (bodies[name], Letters()))
    drawn = []
    whole = maps.compare_figure
    monkeypatch.setattr(maps, "compare_figure", lambda rows: drawn.append(rows) or whole(rows))
    paths = maps.draw_model_maps([WINDOW, "full"], models=tuple(bodies), sentence="abcdefgh", heads=1, out=tmp_path)
    assert [path.name for path in paths[::2]] == ["maps-sliding_window_left_3_right_1.png", "maps-full.png"]
    assert [[each.model for each, _ in rows] for rows in drawn] == [["a-bert", "a-llama"]] * 2
    with pytest.raises(ValueError, match="maps: the text must have at most 512 tokens, the positions of 'a-bert'"):
        maps.draw_model_maps([WINDOW], models=("a-bert",), sentence="x" * 513, out=tmp_path)


def test_patterns_need_no_model(tmp_path):
    first = draw_patterns(["full", "lsh(bucket_size=8)", WINDOW], seq_len=70, out=tmp_path / "a")
    second = draw_patterns(["full", "lsh(bucket_size=8)", WINDOW], seq_len=70, out=tmp_path / "b")
    assert [path.name for path in first] == ["patterns.png", "patterns.pdf"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    with pytest.raises(ValueError, match="maps: needs at least one backend"):
        draw_patterns([], out=tmp_path)


@pytest.mark.parametrize("block", [1, 3, 40])
def test_pooled_patterns_count_pairs(block):
    mask = Causal() & Window(4, 0)
    pooled = maps._pooled(mask, 20, block)
    dense = mask.dense(1, 1, 20, 20, 0)[0, 0].float()
    assert float(pooled.sum()) == float(dense.sum())
    assert float(pooled[0, 0]) == float(dense[:block, :block].sum())


def test_backends_without_a_pattern_are_refused(bert):
    @dataclass(frozen=True)
    class Opaque(effattn.Backend):
        name = "opaque"
        capabilities = effattn.Capabilities(pattern=False)

    with pytest.raises(effattn.UnsupportedError, match="requested attention weights; supported the output only"):
        head_maps(bert, tokens(4), [Opaque()])

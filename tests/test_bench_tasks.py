"""Facts, pairs and masked tokens: what is asked is as it should be, and is scored as it should be."""

import io
import math
import random
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
import yaml
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import effattn
from effattn.bench import answer_report, tasks
from effattn.bench.capture import CaptureSource
from effattn.bench.evaluate import Reader, evaluate
from effattn.bench.figures import styles
from effattn.bench.records import read
from effattn.bench.served import Served
from effattn.bench.tasks import Loss, Masked, Needle, Recall, Sample, Scores, wilson
from effattn.cli import main

SPECIALS = {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]", "pad_token": "[PAD]"}
WINDOW = "sliding_window(left=15, right=0)"
BLIND = "sliding_window(left=0, right=0)"
ALPHABET = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(scope="module")
def tokenizer():
    """Every byte a token, and words enough for pairs; transformers puts nothing before or after a text."""
    words = [f"Ġ{a}{b}{c}" for a in ALPHABET[:6] for b in ALPHABET for c in ALPHABET[:6]]
    vocabulary = [*SPECIALS.values(), *sorted(pre_tokenizers.ByteLevel.alphabet()), *words]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(vocabulary)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIALS)


@pytest.fixture(scope="module")
def sizes(tokenizer):
    return {
        "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 600,
    }  # fmt: skip


@pytest.fixture(scope="module")
def llama(tokenizer, sizes, tmp_path_factory):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, initializer_range=0.3))
    return saved(model, tokenizer, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def bert(tokenizer, sizes, text, tmp_path_factory):
    """An encoder that has learned that a masked letter is most likely one of those around it."""
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(
        transformers.BertConfig(**sizes, initializer_range=0.2, hidden_dropout_prob=0.0)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    letters = torch.tensor(tokenizer(Path(text).read_text())["input_ids"])
    for _ in range(60):
        tokens = torch.stack([letters[start : start + 32] for start in torch.randint(len(letters) - 32, (16,))])
        hidden = torch.rand(tokens.shape) < 0.15
        labels = tokens.where(hidden, torch.tensor(-100))
        loss = model(tokens.masked_fill(hidden, tokenizer.mask_token_id), labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return saved(model, tokenizer, tmp_path_factory.mktemp("bert"))


def saved(model, tokenizer, folder):
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(60 * letter for letter in ALPHABET), encoding="utf-8")
    return str(path)


@pytest.fixture
def run(llama, text, tmp_path):
    def run(backends, **options):
        """Evaluate; gives the records by backend and length, and what was printed."""
        console = Console(width=120, record=True, file=io.StringIO())
        defaults = {"model": llama, "text": text, "seq_lens": (300,), "samples": 2}
        folder = evaluate(backends, **defaults | options, out=tmp_path, machine_label="here", console=console)
        records = read(folder / "records.jsonl").values()
        return {(record["backend"], record["seq_len"]): record for record in records}, console.export_text(), folder

    return run


def haystack(length):
    return torch.randint(4, 200, (length,), generator=torch.Generator().manual_seed(0))


# What is asked ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", [Needle(3), Recall(3)], ids=lambda task: task.name)
@pytest.mark.parametrize("seq_len", [300, 1024, 1803])
def test_each_answer_stands_after_its_question_and_once_more_at_its_distance(task, seq_len, tokenizer):
    samples = task.samples(tokenizer, haystack(task.text_tokens(seq_len)), seq_len)
    assert len(samples) == 3
    for sample in samples:
        assert sample.tokens.shape == (1, seq_len)
        tokens = sample.tokens[0]
        assert torch.equal(tokens[sample.positions + 1], sample.targets)
        assert len(sample.sizes) == len(sample.distances) > 1
        back = torch.tensor(sample.distances).repeat_interleave(torch.tensor(sample.sizes))
        assert torch.equal(tokens[sample.positions + 1 - back], sample.targets)


def test_a_question_is_the_line_of_its_fact(tokenizer):
    (sample,) = Needle(1).samples(tokenizer, haystack(1024), 1024)
    stops = sample.positions[torch.tensor(sample.sizes).cumsum(0) - 1] + 2
    asked = set()
    for stop, distance in zip(stops.tolist(), sample.distances, strict=True):
        question, fact = (
            tokenizer.decode(sample.tokens[0, max(end - 40, 0) : end]).rpartition("\n")[2]
            for end in (stop, stop - distance)
        )
        assert question == fact
        assert re.fullmatch(r"pass key of [A-Z][a-z]+: \d{5}", question)
        asked.add(question)
    assert len(asked) == len(sample.sizes) == 1024 // 80


def test_distances_spread_evenly_on_a_log_scale(tokenizer):
    distances = [
        distance for sample in Recall(4).samples(tokenizer, haystack(0), 1800) for distance in sample.distances
    ]
    octaves = Counter(int(math.log2(distance)) for distance in distances)
    assert min(octaves) == 2  # the next line
    assert max(octaves) == 10
    inner = [octaves[octave] for octave in range(2, 10)]
    assert min(inner) > 0.9 * max(inner)
    near = [sample.distances for sample in Needle(4).samples(tokenizer, haystack(4 * 4096), 4096)]
    for of_sample in near:
        assert of_sample[0] < 100
        assert of_sample[-1] > 0.6 * 4096
        assert list(of_sample) == sorted(of_sample)


def test_no_word_of_recall_stands_for_two_things(tokenizer):
    (sample,) = Recall(1).samples(tokenizer, haystack(0), 1024)
    lines = sample.tokens[0].view(-1, 4)
    values = {}
    for key, _, value, _ in lines.tolist():
        assert values.setdefault(key, value) == value
    assert len(set(values) | set(values.values())) == 2 * len(values)
    assert len(lines) - len(values) == len(sample.targets) > 0.3 * len(lines)


def test_15_percent_of_the_words_are_masked(tokenizer):
    words = haystack(3 * 512)
    samples = Masked(3).samples(tokenizer, words, 512)
    assert len(samples) == 3
    for i, sample in enumerate(samples):
        tokens, stretch = sample.tokens[0].clone(), words[i * 510 : (i + 1) * 510]
        assert tokens[0] == tokenizer.cls_token_id
        assert tokens[-1] == tokenizer.sep_token_id
        assert len(tokens) == 512
        masked = (tokens == tokenizer.mask_token_id).nonzero()[:, 0]
        assert torch.equal(masked, sample.positions)
        assert len(masked) == round(0.15 * 510)
        tokens[sample.positions] = sample.targets
        assert torch.equal(tokens[1:-1], stretch)


@pytest.mark.parametrize("kind", [Needle, Recall, Masked])
def test_what_is_drawn_depends_on_the_seed_alone(kind, tokenizer):
    before, torch_before = random.getstate(), torch.get_rng_state()

    def drawn(seed):
        return [each.tokens.tolist() for each in kind(2, seed).samples(tokenizer, haystack(1200), 600)]

    assert drawn(0) == drawn(0)
    assert drawn(0) != drawn(1)
    assert drawn(0)[0] != drawn(0)[1]
    assert random.getstate() == before
    assert torch.equal(torch.get_rng_state(), torch_before)


def test_masked_samples_of_two_seeds_share_nothing(tokenizer):
    places = [
        tuple(sample.positions.tolist())
        for seed in range(3)
        for sample in Masked(3, seed).samples(tokenizer, haystack(300), 100)
    ]
    assert len(set(places)) == 9


def test_a_token_for_the_beginning_comes_first_and_the_length_is_kept(tokenizer):
    class Beginning:
        """A tokenizer that begins every text with a token of its own."""

        def __call__(self, text, add_special_tokens=True):
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            return {"input_ids": [3, *ids] if add_special_tokens else ids}

        def __len__(self):
            return len(tokenizer)

        def __getattr__(self, name):
            return getattr(tokenizer, name)

    for task in (Needle(2), Recall(2)):
        for sample in task.samples(Beginning(), haystack(1200), 600):
            assert sample.tokens.shape == (1, 600)
            assert int(sample.tokens[0, 0]) == 3
            assert torch.equal(sample.tokens[0][sample.positions + 1], sample.targets)


@pytest.mark.parametrize(
    ("task", "seq_len", "message"),
    [
        (Needle(1), 40, r"needle: seq_lens must be at least \d+ for 1 facts and their questions"),
        (Recall(1), 6, "recall: seq_lens must be 8 to 1872 tokens for a tokenizer with 936 words of one token, got 6"),
        (Recall(1), 1880, "recall: seq_lens must be 8 to 1872"),
        (Masked(1), 2, "masked: seq_lens must leave room for words beside 2 special tokens"),
        (Masked(3), 500, "masked: seq_lens must leave room .*, and 3 samples have the text that they need, got 500"),
    ],
)
def test_lengths_that_cannot_be_filled_are_refused(task, seq_len, message, tokenizer):
    with pytest.raises(ValueError, match=message):
        task.samples(tokenizer, haystack(1000), seq_len)


def test_the_least_length_of_needle_is_the_one_that_it_names(tokenizer):
    with pytest.raises(ValueError, match="needle") as refused:
        Needle(1).samples(tokenizer, haystack(1000), 40)
    least = int(str(refused.value).split("at least ")[1].split()[0])
    assert Needle(1).samples(tokenizer, haystack(1000), least)[0].tokens.shape == (1, least)


def test_a_tokenizer_without_a_mask_token_is_refused(tokenizer):
    bare = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(ValueError, match="masked: the tokenizer must have a mask token"):
        Masked(1).samples(bare, haystack(100), 20)


@pytest.mark.parametrize(
    ("name", "num_samples", "message"),
    [
        ("needles", 1, "evaluate: task must be one of loss, needle, recall, masked, got 'needles'"),
        ("needle", 0, "samples must be at least 1, got 0"),
    ],
)
def test_tasks_by_name(name, num_samples, message):
    assert tasks.get("recall", 3, 7) == Recall(3, 7)
    assert tasks.get("loss", 3, 7) == Loss()
    assert [tasks.get(each).name for each in tasks.NAMES] == list(tasks.NAMES)
    with pytest.raises(ValueError, match=message):
        tasks.get(name, num_samples)


# How it is scored -------------------------------------------------------------------------------------------


def test_an_answer_is_right_where_each_of_its_tokens_is():
    right = torch.tensor([1.0, 1, 1, 0, 1, 1, 1])
    loss = torch.tensor([1.0, 2, 3, 4, 5, 6, 7], dtype=torch.float64)
    samples = [sample_of((2, 2), (20, 70)), sample_of((2, 1), (100, 120))]
    scores = Scores(loss, loss / 2, right, torch.ones(7), right, torch.zeros(7))
    record = Needle(2).summarize(samples, scores, None)
    assert (record["answers"], record["accuracy"], record["full_accuracy"]) == (4, 0.75, 1)
    assert (record["accuracy_low"], record["accuracy_high"]) == wilson(3, 4)
    assert record["answer_log_prob_nats"] == -28 / 4
    assert record["loss_nats"] == 28 / 7
    assert record["excess_loss_nats"] == 2
    assert record["agreement"] == pytest.approx(6 / 7)
    assert record["distance_bins"] == [16, 64]
    assert record["answers_by_distance"] == [1, 3]
    assert record["correct_by_distance"] == [1, 2]
    assert record["full_correct_by_distance"] == [1, 3]
    assert record["answer_log_prob_nats_by_distance"] == [-3, -25 / 3]


def sample_of(sizes, distances):
    count = sum(sizes)
    return Sample(torch.zeros(1, 9, dtype=torch.int64), torch.arange(count), torch.arange(count), sizes, distances)


@pytest.mark.parametrize(
    ("successes", "trials", "interval"),
    [
        (0, 10, (0, 0.2775)),
        (5, 10, (0.2366, 0.7634)),
        (10, 10, (0.7225, 1)),
        (1, 1, (0.2065, 1)),
        (90, 100, (0.8256, 0.9448)),
    ],
)
def test_wilson_agrees_with_the_tables(successes, trials, interval):
    assert wilson(successes, trials) == pytest.approx(interval, abs=1e-4)


@pytest.mark.parametrize("task", ["needle", "recall"])
def test_answers_are_those_of_the_whole_logits(run, llama, text, task):
    records, printed, folder = run([WINDOW, "sdpa"], task=task)
    record = records[WINDOW, 300]
    reader = Reader.load(
        CaptureSource(llama, text), 300, dtype="float32", device="cpu", layers=None, task=tasks.get(task, 2)
    )
    losses, right = [], []
    for sample in reader.samples(300):
        with torch.inference_mode(), effattn.swap.swap(reader.model, WINDOW):
            logits = reader.model(sample.tokens).logits[0, sample.positions].double()
        losses.append(torch.nn.functional.cross_entropy(logits, sample.targets, reduction="none"))
        hits = (logits.argmax(-1) == sample.targets).split(list(sample.sizes))
        right += [bool(hit.all()) for hit in hits]
    assert record["loss_nats"] == pytest.approx(float(torch.cat(losses).mean()), rel=1e-5)
    assert record["answers"] == len(right) == sum(record["answers_by_distance"])
    assert record["accuracy"] == sum(right) / len(right)
    assert record["answer_log_prob_nats"] == pytest.approx(-float(torch.cat(losses).sum()) / len(right), rel=1e-5)
    assert records["sdpa", 300]["excess_loss_nats"] == pytest.approx(0, abs=1e-5)
    assert records["sdpa", 300]["agreement"] == 1
    assert records["sdpa", 300]["density"] == 1
    assert 0 < record["density"] < 0.2
    assert 0 < record["attention_ms"] < record["forward_ms"]
    assert (record["task"], record["samples"], record["seed"]) == (task, 2, 0)
    assert record["text"] == (None if task == "recall" else "text.txt")
    assert "answers right (full attention" in printed
    made = {path.name for path in folder.rglob("*") if path.suffix in (".csv", ".png")}
    assert made == {f"{task}_summary.csv", f"{task}_budgets.csv", f"{task}_accuracy_vs_distance.png"}


def test_a_task_resumes_beside_others_in_the_same_file(run):
    run(["sdpa"])
    run(["sdpa"], task="needle")
    _, printed, folder = run(["sdpa"], task="needle")
    assert "1 cells have been measured before" in printed
    assert [record["task"] for record in read(folder / "records.jsonl").values()] == ["loss", "needle"]
    assert (folder / "summary.csv").exists()


def test_every_task_seed_and_number_of_samples_is_a_cell_of_its_own(llama, text):
    loaded = Reader.load(CaptureSource(llama, text), 300, dtype="float32", device="cpu", layers=None, task=Needle(2))
    asked = [Loss(), Needle(2), Needle(3), Recall(2), Recall(3), Recall(2, 1)]
    cells = [replace(loaded, task=task, _samples={}).cell("sdpa", 300) for task in asked]
    assert len({cell.key for cell in cells}) == len(asked)
    assert replace(loaded, _samples={}).cell("sdpa", 300) == cells[1]
    assert [cell.identity["task"] for cell in cells[:2]] == ["loss", "needle"]


def test_a_text_too_short_for_all_samples_says_how_much_they_need(run):
    with pytest.raises(ValueError, match=r"9 samples of 300 tokens need 2700 of the text: .* at most 1560"):
        run(["sdpa"], task="needle", samples=9)


def test_the_command_line_hands_on_what_is_asked(monkeypatch):
    seen = {}
    monkeypatch.setattr("effattn.bench.evaluate.evaluate", lambda backends, **asked: seen.update(asked, specs=backends))
    main(["evaluate", "lsh", "a.yaml", "--task", "needle", "--samples", "2", "--seed", "3"])
    assert seen["specs"] == ("lsh", "a.yaml")
    assert (seen["task"], seen["samples"], seen["seed"]) == ("needle", 2, 3)
    main(["evaluate"])
    assert (seen["task"], seen["samples"]) == ("loss", tasks.SAMPLES)


# Masked tokens ----------------------------------------------------------------------------------------------


def test_an_encoder_needs_its_neighbours(run, bert):
    records, printed, folder = run(
        ["sdpa", BLIND, "sliding_window(left=40, right=40)"], task="masked", model=bert, seq_lens=(32, 48), samples=16
    )
    exact, blind, near = (records[name, 48] for name in ("sdpa", BLIND, "sliding_window(left=40, right=40)"))
    assert exact["accuracy"] == exact["full_accuracy"] > 0.5
    assert exact["agreement"] == 1
    assert blind["accuracy_high"] < exact["accuracy_low"]
    assert blind["excess_loss_nats"] > 1
    assert near["density"] > 0.95
    assert blind["density"] == pytest.approx(1 / 48)
    assert exact["answers"] == 16 * round(0.15 * 46)
    assert "distance_bins" not in exact
    assert (folder / "figures" / "masked_accuracy_vs_length.pdf").exists()
    assert printed.index("What answers as well") < printed.index("the model as loaded")


def test_masked_scores_are_those_of_the_whole_logits(run, bert, text):
    (record,) = run([BLIND], task="masked", model=bert, seq_lens=(48,))[0].values()
    reader = Reader.load(CaptureSource(bert, text), 48, dtype="float32", device="cpu", layers=None, task=Masked(2))
    losses = []
    for sample in reader.samples(48):
        with torch.inference_mode(), effattn.swap.swap(reader.model, BLIND):
            logits = reader.model(sample.tokens).logits[0, sample.positions].double()
        losses.append(torch.nn.functional.cross_entropy(logits, sample.targets, reduction="none"))
    assert record["loss_nats"] == pytest.approx(float(torch.cat(losses).mean()), rel=1e-5)


def test_a_model_of_the_wrong_kind_says_which_task_it_needs(run, bert, llama):
    with pytest.raises(
        ValueError, match=r"BertForMaskedLM\) fills in masked tokens, .* 'masked' \(--task masked\), got 'loss'"
    ):
        run(["sdpa"], model=bert)
    with pytest.raises(
        ValueError, match=r"must have a head for masked tokens for the task 'masked', .* is LlamaForCausalLM"
    ):
        run(["sdpa"], model=llama, task="masked")


def test_a_head_without_weights_is_refused(run, sizes, tokenizer, tmp_path):
    config = transformers.BertConfig(**sizes)
    folder = saved(transformers.BertModel(config), tokenizer, tmp_path / "headless")
    with pytest.raises(ValueError, match="is BertModel"):
        run(["sdpa"], model=folder, task="masked")
    config.architectures = ["BertForMaskedLM"]
    config.save_pretrained(folder)
    with pytest.raises(
        ValueError, match=r"must have all weights of a model for masked tokens, .* lacks cls\.predictions"
    ):
        run(["sdpa"], model=folder, task="masked")


# Backends by layer ------------------------------------------------------------------------------------------


def test_a_file_serves_each_layer_by_its_own_backend(run, llama, tmp_path):
    path = tmp_path / "tuned.yaml"
    path.write_text(yaml.safe_dump({"backends": {0: WINDOW, 1: "sdpa"}, "budget": 0.1}))
    records, _, _ = run([str(path), WINDOW, "sdpa"], task="loss")
    (label,) = {backend for backend, _ in records} - {WINDOW, "sdpa"}
    assert label.startswith("tuned@")
    tuned, window, exact = (records[name, 300] for name in (label, WINDOW, "sdpa"))
    assert tuned["density"] == pytest.approx((window["density"] + exact["density"]) / 2)
    assert exact["loss_nats"] != pytest.approx(tuned["loss_nats"], rel=1e-4)
    assert window["loss_nats"] != pytest.approx(tuned["loss_nats"], rel=1e-4)
    assert tuned["impl"] == f"{window['impl']}; {exact['impl']}"
    reader = Reader.load(
        CaptureSource(llama, str(tmp_path)), 300, dtype="float32", device="cpu", layers=None, task=Recall(1)
    )
    tokens = reader.samples(300)[0].tokens
    with torch.inference_mode():
        with effattn.swap.swap(reader.model, Served.parse(str(path)).backends):
            by_layer = reader.model(tokens).logits
        with effattn.swap.swap(reader.model, {0: WINDOW, 1: "sdpa"}):
            assert torch.equal(reader.model(tokens).logits, by_layer)


def test_a_file_is_known_by_its_name_and_its_mapping(tmp_path):
    def label(name, content):
        (tmp_path / name).write_text(yaml.safe_dump(content))
        return Served.parse(str(tmp_path / name)).label

    first = label("a.yaml", {"backends": {1: "sdpa", 0: "lsh"}, "commit": "1"})
    assert first == label("a.yaml", {"backends": {0: "lsh()", 1: "sdpa"}, "commit": "2"})
    assert first != label("a.yaml", {"backends": {0: "lsh", 1: "full"}})
    assert first.partition("@")[2] == label("b.yaml", {"backends": {0: "lsh", 1: "sdpa"}}).partition("@")[2]
    one = Served.parse(str(tmp_path / "a.yaml"))
    assert one.is_by_layer
    assert label("c.yaml", {"backend": "lsh(num_hashes=2)"}).startswith("c@")
    assert Served.parse(str(tmp_path / "c.yaml")).backends == effattn.get("lsh(num_hashes=2)")
    assert Served.parse("sdpa()") == Served("sdpa", effattn.get("sdpa"))


@pytest.mark.parametrize("content", ["", "- 1", "backends: {}", "backends: {a: sdpa}", "backends: [sdpa]", "a: 1", "{"])
def test_a_file_that_maps_no_layers_is_refused(content, tmp_path):
    (tmp_path / "bad.yaml").write_text(content)
    with pytest.raises(ValueError, match=r"swap: .*bad\.yaml (must|is not YAML)"):
        Served.parse(str(tmp_path / "bad.yaml"))


def test_what_is_wrong_with_a_file_is_said_before_the_model_is_loaded(run, tmp_path):
    (tmp_path / "a.yaml").write_text("backends: {0: sdpa}")
    with pytest.raises(ValueError, match=r"evaluate: layers must be None for a@\w{8}, which names them, got \(1,\)"):
        run([str(tmp_path / "a.yaml")], layers=(1,), model="not a model")
    with pytest.raises(FileNotFoundError):
        run([str(tmp_path / "gone.yaml")], model="not a model")
    (tmp_path / "a.yaml").write_text("backends: {7: sdpa}")
    with pytest.raises(ValueError, match="layers names 7"):
        run([str(tmp_path / "a.yaml")])


# Tables and figures -----------------------------------------------------------------------------------------


def a_record(backend, seq_len, right, density, attention_ms, **more):
    bins, asked = [16, 32, 64, 256], [10, 10, 10, 10]
    low, high = wilson(sum(right), 40)
    return {
        "task": "needle", "model": "m", "text": "t", "layers": None, "dtype": "float32", "device": "cpu",
        "machine": "here", "backend": backend, "seq_len": seq_len, "status": "ok", "reason": None, "impl": "x",
        "answers": 40, "accuracy": sum(right) / 40, "accuracy_low": low, "accuracy_high": high,
        "full_accuracy": 0.9, "full_accuracy_low": wilson(36, 40)[0], "full_accuracy_high": wilson(36, 40)[1],
        "answer_log_prob_nats": -1.5, "full_answer_log_prob_nats": -0.5, "loss_nats": 0.3, "full_loss_nats": 0.1,
        "excess_loss_nats": 0.2, "agreement": 0.9, "kl_nats": 0.1, "density": density, "attention_ms": attention_ms,
        "forward_ms": attention_ms, "distance_bins": bins, "answers_by_distance": asked,
        "correct_by_distance": right, "full_correct_by_distance": [10, 9, 9, 8],
    } | more  # fmt: skip


RECORDS = pd.DataFrame(
    [
        a_record("sdpa", 512, [10, 9, 9, 8], 1.0, 100.0),
        a_record("sliding_window", 512, [10, 9, 9, 0], 0.2, 20.0),
        a_record("lsh", 512, [10, 9, 8, 7], 0.1, 50.0),
        a_record("low_rank", 512, [9, 9, 9, 7], None, 10.0),
        a_record("sliding_window", 2048, [10, 0, 0, 0], 0.1, 40.0),
    ]
)


def printed_tables(records):
    console = Console(width=120, record=True, file=io.StringIO())
    answer_report.print_tables(records, console)
    return [line.split() for line in console.export_text().splitlines()]


def test_the_first_lines_say_what_answers_as_well():
    table = answer_report.budget_table(RECORDS).set_index("seq_len")
    assert table.loc[512, "fastest_backend"] == "low_rank"
    assert table.loc[512, "sparsest_backend"] == "lsh"  # low_rank has no pattern to count
    assert table.loc[512, "sparsest_accuracy"] == 34 / 40
    assert table.loc[2048, ["fastest_backend", "sparsest_backend"]].isna().all()
    lines = printed_tables(RECORDS)
    first = next(i for i, line in enumerate(lines) if line[:1] == ["512"])
    assert lines[first][:4] == ["512", "90.0%", "low_rank", "10"]
    assert lines[first + 1][:3] == ["2k", "90.0%", "none"]


def test_the_table_has_accuracy_by_distance():
    lines = printed_tables(RECORDS)
    assert [word for line in lines for word in line if word.endswith("+")] == ["16+", "64+", "256+"]
    (row,) = (line for line in lines if line[:2] == ["lsh", "85.0%"])
    assert row[2:] == ["71\N{EN DASH}93%", "-1.50", "95%", "80%", "70%", "0.100", "50", "ms"]


def test_what_failed_is_listed_and_left_out_of_the_figure(tmp_path):
    empty = dict.fromkeys(
        field for field in a_record("lsh", 512, [0] * 4, 0, 0) if field.endswith(("distance", "bins"))
    )
    failed = dict.fromkeys(("accuracy", "accuracy_low", "accuracy_high", "full_accuracy"))
    bad = a_record("xformers", 512, [0] * 4, None, None) | empty | failed | {"status": "unsupported", "reason": "cpu"}
    records = pd.concat([RECORDS, pd.DataFrame([bad])])
    assert ["xformers", "unsupported", "at", "512:", "cpu"] in printed_tables(records)
    assert answer_report.draw_all(records, tmp_path)
    assert answer_report.draw_all(pd.DataFrame([bad]), tmp_path) == []
    assert ["512", "none"] in printed_tables(pd.DataFrame([bad]))


def test_backends_stand_side_by_side_and_full_attention_between_them():
    rows = RECORDS[RECORDS["seq_len"] == 512]
    (ax,) = answer_report._distance_figure(rows, styles(rows["backend"])).axes
    by_color = {line.get_color(): line.get_xdata()[0] for line in ax.lines}
    assert by_color.pop("#000000") == pytest.approx(16 * 2**0.5)
    shifts = np.log2([x / (16 * 2**0.5) for x in by_color.values()])
    assert shifts == pytest.approx([-0.1875, -0.0625, 0.0625, 0.1875])
    first, *_ = ax.collections[0].get_segments()  # full attention's
    assert first[:, 1] == pytest.approx(wilson(10, 10))


def test_figures_are_drawn_the_same_each_time(tmp_path):
    first, second = (answer_report.draw_all(RECORDS, tmp_path / name) for name in "ab")
    assert [path.name for path in first] == ["needle_accuracy_vs_distance.png", "needle_accuracy_vs_distance.pdf"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]

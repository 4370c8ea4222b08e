import subprocess
import sys

import pytest

from effattn.cli import main


@pytest.fixture
def run(capsys):
    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err

    return run


@pytest.fixture
def study(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text("name: tiny\nseq_lens: [16]\ninputs: [gaussian]\nnum_heads: 2\nhead_dim: 8\n")
    return path


def test_help_names_every_command(run):
    code, out, _ = run("--help")
    assert code == 0
    for command in ("sweep", "compare", "plot", "evaluate", "maps", "recommend", "list"):
        assert command in out


def test_help_of_a_sweep_names_every_field_of_a_study(run):
    code, out, _ = run("sweep", "--help")
    assert code == 0
    for option in ("--seq-lens", "--backends", "--quick", "--retry", "--fresh", "--machine-label", "--timeout-s"):
        assert option in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--seq-lens", "-1"), "effattn: study: seq_lens must be greater than 0, got -1\n"),
        (("--backends", "ful"), "effattn: backend: unknown name 'ful'; did you mean 'full'?"),
        (("--masks", "casual"), "effattn: study: masks must look like"),
        (("--num-kv-heads", "3"), "effattn: study: num_heads must be a multiple of num_kv_heads, 3, got 2\n"),
        (("--machine-label", "a/b"), "effattn: machine_label: must be of letters"),
        (("--plugins", "nowhere"), "effattn: No module named 'nowhere'"),
    ],
)
def test_what_the_user_got_wrong_is_one_line(run, study, tmp_path, arguments, message):
    code, _, err = run("sweep", str(study), "--out", str(tmp_path / "out"), *arguments)
    assert code == 2
    assert err.startswith(message)
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_study_that_is_not_there_is_one_line(run, tmp_path):
    code, _, err = run("sweep", str(tmp_path / "gone.yaml"))
    assert code == 2
    assert err.startswith("effattn: ")
    assert "gone.yaml" in err
    assert err.count("\n") == 1


def test_an_unknown_option_suggests_the_nearest(run, study):
    code, out, err = run("sweep", str(study), "--seq-len", "16")
    assert code == 2
    assert "--seq-lens" in out + err


def test_a_folder_without_results_cannot_be_plotted(run, tmp_path):
    code, _, err = run("plot", str(tmp_path))
    assert code == 2
    assert err == f"effattn: plot: {tmp_path} must be a folder of results, with study.yaml and records.jsonl\n"


def test_list_shows_every_backend_and_why_one_does_not_run(capsys):
    main(["list", "--device", "cpu"])
    out = capsys.readouterr().out
    for name in ("full", "sdpa", "chunked", "sliding_window", "lsh", "flex", "xformers"):
        assert name in out
    assert "num_hashes" in out


def test_a_study_is_swept_and_plotted_from_the_command_line(study, tmp_path, capsys):
    out, here = ("--out", str(tmp_path)), ("--machine-label", "here")
    main(["sweep", str(study), *out, *here, "--backends", "full", "--passes", "decode", "--quick"])
    folder = tmp_path / "tiny-quick" / "here"
    assert (folder / "report.html").exists()
    assert "[1/1] full 16 decode" in capsys.readouterr().out
    (folder / "summary.csv").unlink()
    main(["plot", str(folder)])
    assert (folder / "summary.csv").exists()
    assert str(folder / "report.html") in capsys.readouterr().out


def test_backends_are_compared_without_a_study(tmp_path, capsys):
    size = ("--inputs", "gaussian", "--seq-lens", "16", "--num-heads", "2", "--head-dim", "8", "--passes", "forward")
    main(["compare", "full", "sdpa", *size, "--out", str(tmp_path), "--machine-label", "here"])
    out = capsys.readouterr().out
    assert "[1/2] full 16 forward" in out
    assert "[2/2] sdpa 16 forward" in out


def test_an_interrupted_sweep_says_how_to_go_on(run, study, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("effattn.bench.runner.sweep", interrupt)
    code, _, err = run("sweep", str(study))
    assert code == 130
    assert err == "effattn: interrupted; the same command goes on from here\n"


def test_an_interrupted_tuning_keeps_nothing_and_says_so(run, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("effattn.bench.tune_report.run", interrupt)
    code, _, err = run("tune", "sliding_window", "--max-error", "0.1")
    assert (code, err) == (130, "effattn: interrupted\n")


def test_help_imports_nothing_heavy_but_torch():
    code = "import sys; import effattn.cli; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"transformers", "xformers", "pandas", "matplotlib", "seaborn", "pebble"} & set(modules)


@pytest.mark.parametrize(("outcome", "code"), [("holds", None), ("refused", None), ("broken: off by 3", 1)])
def test_check_says_whether_the_contract_holds(monkeypatch, capsys, outcome, code):
    monkeypatch.setattr("effattn.testing.check_backend", lambda spec, device: {"rows": "holds", "causal": outcome})
    if code is None:
        main(["check", "full"])
    else:
        with pytest.raises(SystemExit) as ended:
            main(["check", "full"])
        assert ended.value.code == code
    out = capsys.readouterr().out
    assert f"causal: {outcome}" in out
    assert ("1 broken" in out) == (code == 1)


def test_the_cheapest_backend_is_recommended_from_the_records_of_a_sweep(study, tmp_path, capsys):
    main(["sweep", str(study), "--out", str(tmp_path), "--machine-label", "here", "--backends", "full", "--quick"])
    capsys.readouterr()
    asked = ["recommend", "--seq-len", "16", "--records", str(tmp_path), "--device", "cpu"]
    main([*asked, "--figure", str(tmp_path / "pareto.png")])
    assert "full  least time with a relative L2 error of at most 0.05 at 16 tokens" in capsys.readouterr().out
    assert (tmp_path / "pareto.png").exists()


@pytest.mark.parametrize("end", [0, 1])
def test_recommend_ends_with_1_where_nothing_qualifies(run, tmp_path, monkeypatch, end):
    class Answer:
        backend = None if end else "sdpa"

    monkeypatch.setattr("effattn.bench.recommend.load_records", lambda paths: paths)
    monkeypatch.setattr("effattn.bench.recommend.recommend", lambda records, **asked: [Answer()])
    monkeypatch.setattr("effattn.bench.recommend.print_recommendation", lambda answer, console: None)
    if end:
        assert run("recommend", "--seq-len", "16")[0] == 1
    else:
        main(["recommend", "--seq-len", "16"])


def test_the_records_of_another_machine_may_name_a_device_that_is_not_here(run, tmp_path):
    code, _, err = run("recommend", "--seq-len", "16", "--device", "cuda", "--records", str(tmp_path))
    assert code == 2
    assert err.startswith("effattn: recommend: records must hold those of a sweep")


def test_patterns_are_drawn_from_the_command_line(run, tmp_path, capsys):
    main(["maps", "lsh(bucket_size=8)", "full", "--pattern", "--seq-len", "48", "--out", str(tmp_path)])
    assert capsys.readouterr().out.split() == [str(tmp_path / f"patterns.{kind}") for kind in ("png", "pdf")]
    code, _, err = run("maps", "--sentence", "a", "--text", "stdlib")
    assert (code, err) == (2, "effattn: maps: sentence and text cannot both be given\n")


def test_evaluate_hands_on_what_it_is_asked(monkeypatch):
    seen = {}
    monkeypatch.setattr("effattn.bench.evaluate.evaluate", lambda backends, **asked: seen.update(asked, specs=backends))
    main(["evaluate", "--seq-lens", "16", "32", "--layers", "3", "--text", "a.txt", "--retry"])
    assert seen["specs"][0] == "sdpa"
    assert (seen["seq_lens"], seen["layers"], seen["text"], seen["retry"]) == ((16, 32), (3,), "a.txt", True)
    main(["evaluate", "lsh", "flex"])
    assert seen["specs"] == ("lsh", "flex")

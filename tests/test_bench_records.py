import json

import pytest

from effattn.bench.records import RecordWriter, read


def test_what_was_appended_is_read_and_the_last_of_a_cell_counts(tmp_path):
    path = tmp_path / "records.jsonl"
    with RecordWriter(path) as writer:
        writer.append({"cell": "a", "status": "timeout"})
        writer.append({"cell": "b", "status": "ok"})
    with RecordWriter(path) as writer:
        writer.append({"cell": "a", "status": "ok"})
    assert read(path) == {"a": {"cell": "a", "status": "ok"}, "b": {"cell": "b", "status": "ok"}}
    assert len(path.read_text().splitlines()) == 3


def test_a_record_is_on_the_disk_at_once(tmp_path):
    path = tmp_path / "records.jsonl"
    with RecordWriter(path) as writer:
        writer.append({"cell": "a"})
        assert read(path) == {"a": {"cell": "a"}}


def test_no_file_is_no_records(tmp_path):
    assert read(tmp_path / "records.jsonl") == {}


@pytest.mark.parametrize("torn", ['{"cell": "b", "sta', '{"cell": "b"}', "\x00\x00"])
def test_a_torn_end_is_left_out_and_cut_off(tmp_path, torn):
    path = tmp_path / "records.jsonl"
    path.write_text('{"cell": "a"}\n' + torn)
    assert read(path) == {"a": {"cell": "a"}}
    with RecordWriter(path) as writer:
        writer.append({"cell": "c"})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"cell": "a"}, {"cell": "c"}]


@pytest.mark.parametrize("line", ["{", "[]", '{"status": "ok"}', "null"])
def test_anything_else_that_is_no_record_is_an_error_that_names_the_line(tmp_path, line):
    path = tmp_path / "records.jsonl"
    path.write_text('{"cell": "a"}\n' + line + '\n{"cell": "b"}\n')
    with pytest.raises(ValueError, match=r"records: line 2 of .*records\.jsonl is no record"):
        read(path)


def test_two_sweeps_cannot_write_to_one_file(tmp_path):
    path = tmp_path / "records.jsonl"
    with RecordWriter(path), pytest.raises(ValueError, match="another sweep is writing"):
        RecordWriter(path)
    RecordWriter(path).__exit__(None, None, None)


def test_a_value_that_is_not_json_is_refused(tmp_path):
    with RecordWriter(tmp_path / "records.jsonl") as writer, pytest.raises(ValueError, match="not JSON compliant"):
        writer.append({"cell": "a", "forward_ms_median": float("nan")})
    assert read(tmp_path / "records.jsonl") == {}

"""CSV and JSON lines: what is read, and the file and line that an error names."""

import pytest

from tests.text.helpers import rows, write_csv, write_jsonl, write_text
from vit_prune.text.data.files import read_file


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_json_lines_plain_and_gzipped(tmp_path, name):
    read = read_file(write_jsonl(tmp_path / name, rows(2)), ("text",), "label")
    assert read.labels == ["animals", "plants", "tools"] * 2
    assert read.parts[:2] == [("cat",), ("oak",)]


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
def test_a_csv_without_a_header_is_read_by_numbers_from_1(tmp_path, name):
    text = '"3","Title","A ""quoted"" text,\nof two lines"\n"1","Other",""\n'
    read = read_file(write_text(tmp_path / name, text), ("2", "3"), "1")
    assert read.labels == ["3", "1"]
    assert read.parts == [("Title", 'A "quoted" text,\nof two lines'), ("Other", "")]


def test_a_csv_with_a_header_is_read_by_its_names_in_any_order(tmp_path):
    path = write_csv(tmp_path / "a.csv", [["id", "label", "text"], [7, "good", "NA"], [8, "bad", "null"]])
    read = read_file(path, ("text",), "label")
    assert read.labels == ["good", "bad"]
    assert read.parts == [("NA",), ("null",)]  # words, not missing values


def test_space_around_a_label_is_none_of_its_name(tmp_path):
    csv = read_file(write_csv(tmp_path / "a.csv", [["label", "text"], [" good", "a"], ["good ", "b"]]), ("text",), "label")
    lines = read_file(write_jsonl(tmp_path / "a.jsonl", [{"label": " good", "text": "a"}, {"label": "good", "text": "b"}]), ("text",), "label")
    assert csv.labels == lines.labels == ["good", "good"]


def test_rows_that_nobody_labelled_are_left_out_and_counted(tmp_path):
    values = [{"premise": "a", "hypothesis": "b", "label": label} for label in (0, -1, 2, -1)]
    read = read_file(write_jsonl(tmp_path / "a.jsonl", values), ("premise", "hypothesis"), "label", skip_label="-1")
    assert (read.labels, read.skipped, read.parts) == (["0", "2"], 2, [("a", "b")] * 2)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "label,text\n1,a\n2\n", r"a\.csv line 3: 1 columns, the first line has 2"),
        ("a.csv", "label,txet\n1,a\n", r"a\.csv: unknown column 'text'; did you mean txet\?"),
        ("a.csv", 'label,text\n1,"a\n', r"a\.csv line 2: unexpected end of data"),
        ("a.csv", "label,text\n,a\n", r"a\.csv line 2: the label is '', expected a name or a whole number"),
        ("a.csv", "label,text\n", r"a\.csv holds no rows with labels"),
        ("a.jsonl", '{"text": "a", "label": 1}\n{"text": "a"\n', r"a\.jsonl line 2: Expecting"),
        ("a.jsonl", '{"text": "a", "lable": 1}\n', r"a\.jsonl line 1: unknown column 'label'; did you mean lable\?"),
        ("a.jsonl", '{"text": null, "label": 1}\n', r"a\.jsonl line 1: text 1 is None, expected text"),
        ("a.jsonl", '{"text": "a", "label": 0.5}\n', r"a\.jsonl line 1: the label is 0\.5, expected a name or a whole number"),
        ("a.jsonl", "[1]\n", r"a\.jsonl line 1: expected one object per line, got list"),
        ("a.txt", "a\n", r"a\.txt must end in \.csv or \.jsonl, with \.gz or without"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 8 else "",
)
def test_what_cannot_be_read_is_named_with_file_and_line(tmp_path, name, text, message):
    with pytest.raises(ValueError, match=message):
        read_file(write_text(tmp_path / name, text), ("text",), "label")


def test_a_column_number_that_is_not_there_is_named_with_those_that_are(tmp_path):
    with pytest.raises(ValueError, match=r"a\.csv: unknown column '4'; there are 1, 2, 3"):
        read_file(write_csv(tmp_path / "a.csv", [[1, "a", "b"]]), ("4",), "1")


def test_a_file_that_is_cut_short_or_no_text_is_named(tmp_path):
    whole = write_jsonl(tmp_path / "a.jsonl.gz", rows(50))
    whole.write_bytes(whole.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz is no whole gzip file"):
        read_file(whole, ("text",), "label")
    (tmp_path / "b.csv").write_bytes(b"label,text\n1,\xff\xfe\n")
    with pytest.raises(ValueError, match=r"b\.csv is no text in UTF-8"):
        read_file(tmp_path / "b.csv", ("text",), "label")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        read_file(tmp_path / "nowhere.csv", ("text",), "label")

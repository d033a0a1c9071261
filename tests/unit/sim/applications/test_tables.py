import pytest

from pollux.core import InvalidInput
from pollux.sim.applications.tables import number, read_rows, text, whole


@pytest.fixture
def rows(tmp_path):
    def read(content, fields=("name", "value")):
        path = tmp_path / "table.csv"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return list(read_rows(path, fields))

    return read


def test_rows_know_their_values_and_lines(rows):
    first, second = rows("name,value,other\na,1,x\nb,2.5,y\n")
    assert (text(first, "name"), number(first, "value"), first.line) == ("a", 1.0, 2)
    assert (text(second, "name"), number(second, "value"), second.line) == ("b", 2.5, 3)


def test_spaces_quotes_and_a_byte_order_mark_are_no_trouble(rows):
    (row,) = rows(b'\xef\xbb\xbfname,value\r\n"a, b" , 3 \r\n')
    assert (text(row, "name"), whole(row, "value")) == ("a, b", 3)


def test_no_rows_is_not_an_error_here(rows):
    assert rows("name,value\n") == []


def test_a_missing_column_is_named_with_the_header(rows):
    with pytest.raises(InvalidInput, match=r"table.csv, line 1, field 'value': column is missing.*'name,other'"):
        rows("name,other\na,b\n")


@pytest.mark.parametrize("content", ["", "\n"])
def test_an_empty_file_lacks_its_columns(rows, content):
    with pytest.raises(InvalidInput, match="field 'name': column is missing"):
        rows(content)


def test_files_that_are_not_there_or_not_text(tmp_path, rows):
    with pytest.raises(InvalidInput, match=r"nowhere.csv: no such file"):
        list(read_rows(tmp_path / "nowhere.csv", ("name",)))
    with pytest.raises(InvalidInput, match="is a folder"):
        list(read_rows(tmp_path, ("name",)))
    with pytest.raises(InvalidInput, match="cannot be read as CSV"):
        rows(b"name,value\n\xff\xfe\xfa,1\n")


@pytest.mark.parametrize(
    ("raw", "minimum", "above"),
    [("", 0, False), ("x", 0, False), ("-1", 0, False), ("nan", 0, False), ("inf", 0, False), ("0", 0, True)],
)
def test_numbers_that_will_not_do(rows, raw, minimum, above):
    (row,) = rows(f"name,value\na,{raw}\n")
    with pytest.raises(InvalidInput, match=r"line 2, field 'value': .*finite number"):
        number(row, "value", minimum=minimum, above=above)


@pytest.mark.parametrize("raw", ["", "1.5", "x", "0", "-3", "inf", "nan"])
def test_whole_numbers_that_will_not_do(rows, raw):
    (row,) = rows(f"name,value\na,{raw}\n")
    with pytest.raises(InvalidInput, match=r"line 2, field 'value': .*whole number, 1 or more"):
        whole(row, "value", minimum=1)


def test_whole_numbers_in_other_spellings(rows):
    (row,) = rows("name,value\na,4.0\n")
    assert whole(row, "value") == 4
    assert isinstance(whole(row, "value"), int)


def test_a_row_that_ends_early_misses_its_value(rows):
    (row,) = rows("name,value\na\n")
    with pytest.raises(InvalidInput, match="field 'value': '': is missing"):
        number(row, "value")


def test_a_word_must_not_be_blank(rows):
    (row,) = rows("name,value\n  ,1\n")
    with pytest.raises(InvalidInput, match="field 'name'"):
        text(row, "name")

"""What the codec's tables have beside the rules of one use; `test_codec` and the codecs of others test the rest."""

import enum
from dataclasses import dataclass

import pytest

from pollux.core.errors import InvalidInput
from pollux.wire.dataclass_codec import SCALAR_READERS, Misfit, ValueReader, ValueWriter, as_it_is, instead_of


class Colour(enum.StrEnum):
    RED = "red"
    GREEN = "green"


@dataclass(frozen=True)
class Pair:
    numbers: tuple[int, str]
    colour: Colour = Colour.RED
    secret: str = ""

    def __post_init__(self):
        if self.numbers[0] < 0:
            raise InvalidInput("a pair is negative")


UNWRITTEN = {Pair: ("secret",)}
read = ValueReader(SCALAR_READERS, max_items=3, unwritten=UNWRITTEN)
write = ValueWriter({str: as_it_is, int: as_it_is}, max_items=3, unwritten=UNWRITTEN)


def refused(work, *arguments):
    with pytest.raises(Misfit) as caught:
        work(*arguments)
    return caught.value.message("it")


def test_a_field_that_is_not_written_is_not_read():
    assert write(Pair((1, "a"), secret="x")) == {"numbers": [1, "a"], "colour": "red"}
    assert read(Pair, {"numbers": [1, "a"]}) == Pair((1, "a"))
    assert "secret is not known" in refused(read, Pair, {"numbers": [1, "a"], "secret": "x"})


def test_words_of_an_enumeration_are_read_as_its_members():
    assert read(Pair, {"numbers": [1, "a"], "colour": "green"}).colour is Colour.GREEN
    assert refused(read, Colour, "gren") == "it is 'gren': did you mean 'green'? known: green, red"


def test_a_tuple_of_fixed_length_names_the_item():
    assert refused(read, Pair, {"numbers": [1, 2]}) == "it: numbers[1] is 2: give a string"
    assert refused(read, Pair, {"numbers": [1]}) == "it: numbers is a list: give a list of 2"


def test_what_a_dataclass_refuses_is_refused_at_its_path():
    assert refused(read, tuple[Pair, ...], [{"numbers": [-1, ""]}]) == "it: [0] does not fit: a pair is negative"


def test_more_items_than_allowed_are_refused_in_both_directions():
    assert "has 4 items: give at most 3" in refused(read, list[int], [1, 2, 3, 4])
    assert "has 4 items: give at most 3" in refused(write, [1, 2, 3, 4])


def test_a_subclass_is_written_by_the_rule_of_its_base():
    assert write([True, Colour.RED]) == [True, "red"]
    assert refused(write, [1.5]) == (
        "it: [0] is 1.5: give what JSON has: a mapping, list, string, number, boolean or null"
    )


def test_a_rule_may_refuse_anything():
    def no(value):
        raise instead_of(value, "nothing")

    assert refused(ValueReader({int: no}), int, 3) == "it is 3: give nothing"

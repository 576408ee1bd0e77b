"""The dispatcher table: names as in the arguments, classes that exist, a miss that lists the valid names."""

from __future__ import annotations

import importlib

import pytest

from hf_fsdpturbo.arguments import DISPATCHER_NAMES
from hf_fsdpturbo.dispatch.dispatcher import DISPATCHERS, Dispatcher, get_dispatcher


def test_names_are_those_of_the_arguments():
    """``auto`` is a choice among the others, not one of them."""
    assert {*DISPATCHERS, "auto"} == set(DISPATCHER_NAMES)


@pytest.mark.parametrize("name", DISPATCHERS)
def test_each_name_gives_a_dispatcher(name: str):
    found = get_dispatcher(name)
    assert isinstance(found, type)
    assert issubclass(found, Dispatcher)
    assert not getattr(found, "__abstractmethods__", None)
    module, _, attribute = DISPATCHERS[name].partition(":")
    assert getattr(importlib.import_module(module), attribute) is found


def test_each_file_once():
    assert len(set(DISPATCHERS.values())) == len(DISPATCHERS)


def test_a_miss_lists_the_valid_names():
    with pytest.raises(ValueError, match="telepathy") as caught:
        get_dispatcher("telepathy")
    for name in DISPATCHERS:
        assert name in str(caught.value)

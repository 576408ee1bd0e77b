"""YAML and JSON from others: a bad text is one ValueError that names file and line, at once; good ones are read."""

from __future__ import annotations

import os
import time

import pytest

from hf_fsdpturbo.bounded import check_path, cut, parse_json, parse_yaml, read_text

BOMB = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)
BAD_YAML = {
    "aliases": (BOMB, ("line 5", "a4", "comes to more than")),
    "brackets": ("[" * 20_000, ("line 1", "deep")),
    "self-reference": ("a: 1\nb: &b [*b]", ("line 2", "b[0]", "holds itself")),
    "list as key": ("{[a]: 1}", ("line 1", "key")),
    "key twice": ("a: 1\nb:\n  c: 1\n  c: 2\n", ("line 4", "b", "['c']", "more than once")),
    "no bool": ("a:\n  b: !!bool maybe", ("line 2", "a.b", "'maybe' is no bool")),
    "octal": ("ep_size: 010", ("line 1", "ep_size", "'010' as 8")),
    "sexagesimal": ("t: 1:30", ("line 1", "'1:30' as 90")),
    "underscore": ("t: 1_0", ("line 1", "'1_0' as 10")),
    "huge": ("a: " + "9" * 5000, ("line 1", "a:", "(5002 characters)")),
    "object": ("a: !!python/object/apply:os.system ['true']", ("line 1", "constructor")),
    "two documents": ("a: 1\n---\nb: 2", ("another document",)),
    "half": ("a: 'x", ("line 1",)),
    "control": ("a: \x01", ("not valid YAML",)),
}


@pytest.mark.parametrize("case", BAD_YAML)
def test_bad_yaml_names_file_and_line_at_once(case: str):
    text, words = BAD_YAML[case]
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"^file\.yaml") as caught:
        parse_yaml(text, "file.yaml")
    assert time.monotonic() - start < 5
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert len(message) < 500


def test_good_yaml_is_read_as_ever():
    text = "a: &a {x: 1, y: [1.5, true, null, '010', 0x10]}\nb: {<<: *a, z: 1e-5}\nc: *a\n"
    import yaml

    assert parse_yaml(text, "f") == yaml.safe_load(text)
    assert parse_yaml("", "f") is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1,\n "b": 2,\n "a": 3}', ("line 3", "['a']")),
        ("[" * 100_000, ("too deep",)),
        ("[" + "9" * 5000 + "]", ("not valid JSON",)),
        ("{", ("line 1",)),
    ],
)
def test_bad_json_names_the_file(text: str, words: tuple[str, ...]):
    with pytest.raises(ValueError, match=r"^file\.json") as caught:
        parse_json(text, "file.json")
    assert all(word in str(caught.value) for word in words), caught.value
    assert len(str(caught.value)) < 500


def test_files_that_are_none(tmp_path):
    (tmp_path / "latin").write_bytes(b"a: 1\nb: \xe9")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b" " * 300_000)
    for name, words in {"latin": "line 2: not UTF-8", "pipe": "is not a file", "large": "more than"}.items():
        with pytest.raises(ValueError, match=words) as caught:
            read_text(str(tmp_path / name))
        assert str(tmp_path / name) in str(caught.value)


@pytest.mark.parametrize("path", ["", "  ", "a\0b", "a\ud800"])
def test_paths_that_no_file_has(path: str):
    with pytest.raises(ValueError, match="^field"):
        check_path("field", path)


def test_values_are_cut_and_printable():
    assert len(cut("x" * 5000)) < 200
    assert cut("a\ud800") == repr("a\ud800")
    endless: list = []
    endless.append(endless)
    assert "[...]" in cut(endless)
    assert "too large" in cut(10**5000)

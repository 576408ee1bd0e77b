"""Cases from a seed: what is spoilt, how, and what a run may do with it.

A case is made from its number and the seed alone, so one that failed can be run again by itself. Ranks are given paths
and plain values; the folders are made once, before they start.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.fuzz.values import ACCELERATE, DIST, EVIL, IN_ACCELERATE, SETTINGS, YAML_PARTS

KINDS = ("model", "model", "settings", "settings", "text", "rows", "output", "checkpoint")


@dataclass
class Case:
    """One bad input.

    Attributes:
        kind: one of :data:`KINDS`.
        what: in words.
        names: a refusal has one of these in its message.
        must_refuse: accepting it is wrong, whatever comes out.
        same_weights: accepted, it must have loaded the very weights of the whole checkpoint.
        data_bits: a bit of a tensor in a released checkpoint is changed, which nothing can tell: counted apart.
        model, checkpoint: paths; empty: the good ones.
        args: training arguments over the usual.
        text: (reader, text) for ``text``.
        rows: columns of the data set.
    """

    number: int
    kind: str
    what: str = ""
    names: list[str] = field(default_factory=list)
    must_refuse: bool = False
    same_weights: bool = False
    data_bits: bool = False
    model: str = ""
    checkpoint: str = ""
    args: dict[str, Any] = field(default_factory=dict)
    text: tuple[str, str] = ("", "")
    rows: dict[str, list[Any]] | None = None


def draw(number: int, seed: int, folder: str, good: dict[str, str], kind: str | None = None) -> Case:
    """Case ``number``.

    Args:
        number: of the case.
        seed: of the whole run.
        folder: empty, for the case's files.
        good: paths of whole inputs: ``single`` and ``pieces`` (models), ``checkpoint``, ``outside`` (a folder that
            nothing may touch).
        kind: one of :data:`KINDS`; None draws it.
    """
    rng = random.Random(f"{seed}/{number}")
    case = Case(number, kind or rng.choice(KINDS))
    os.makedirs(folder, exist_ok=True)
    _MAKERS[case.kind](case, rng, folder, good)
    return case


def _model(case: Case, rng: random.Random, folder: str, good: dict[str, str]) -> None:
    source = rng.choice(("single", "pieces"))
    case.model = os.path.join(folder, "model")
    shutil.copytree(good[source], case.model)
    case.names = [case.model]
    case.same_weights = True
    weights = sorted(name for name in os.listdir(case.model) if name.endswith(".safetensors"))
    path = os.path.join(case.model, rng.choice(weights))
    choice = rng.choice(("header",) * 3 + ("data", "cut", "config", "config", "flip", "index", "swap", "file"))
    case.what = f"{choice} of {source}"
    if choice in ("header", "data"):
        _flip_weights(case, rng, path, in_header=choice == "header")
    elif choice == "cut":
        os.truncate(path, rng.randrange(os.path.getsize(path)))
    elif choice == "config":
        case.same_weights = False
        config = os.path.join(case.model, "config.json")
        content = json.loads(read(config))
        key = rng.choice(sorted(content))
        value = rng.choice([value for value in EVIL if not isinstance(value, bytes)])
        content[key] = value
        case.what += f": {key}={str(value)[:40]!r}"
        case.names.append(key)
        write(config, json.dumps(content).encode())
    elif choice == "flip":
        case.same_weights = False
        _flip(rng, os.path.join(case.model, "config.json"))
    elif choice == "index" and source == "pieces":
        _index(case, rng, os.path.join(case.model, "model.safetensors.index.json"))
    elif choice == "swap" and len(weights) > 1:
        first, second = rng.sample([os.path.join(case.model, name) for name in weights], 2)
        os.rename(first, first + "~")
        os.rename(second, first)
        os.rename(first + "~", second)
        case.must_refuse = True
    else:
        _replace(case, rng, path, good)


def _flip_weights(case: Case, rng: random.Random, path: str, in_header: bool) -> None:
    content = bytearray(read(path))
    end = 8 + int.from_bytes(content[:8], "little")
    place = rng.randrange(0, end) if in_header else rng.randrange(end, len(content))
    bit = rng.randrange(8)
    content[place] ^= 1 << bit
    case.data_bits = not in_header
    case.what += f": bit {bit} of byte {place}"
    write(path, bytes(content))


def _index(case: Case, rng: random.Random, path: str) -> None:
    content = json.loads(read(path))
    key = rng.choice(sorted(content["weight_map"]))
    value = rng.choice(["../x", "/etc/passwd", "", None, 5, ["x"], "a\0", "missing.safetensors", "config.json", key])
    content["weight_map"][key] = value
    if rng.random() < 0.3:
        content = rng.choice([[], None, {"weight_map": None}, {"weight_map": []}, {}, "x"])
    case.what += f": {key} in {str(value)[:40]!r}"
    case.must_refuse = True
    write(path, json.dumps(content).encode())


def _replace(case: Case, rng: random.Random, path: str, good: dict[str, str]) -> None:
    """Something else where a file was."""
    os.rename(path, path + "~")
    choice = rng.choice(("gone", "folder", "link out", "loop", "pipe", "empty", "pickle"))
    case.what += f": {choice}"
    case.must_refuse = True
    if choice == "folder":
        os.makedirs(path)
    elif choice == "link out":
        os.symlink(os.path.join(good["outside"], "canary.safetensors"), path)
    elif choice == "loop":
        os.symlink(os.path.basename(path), path)
    elif choice == "pipe":
        os.mkfifo(path)
    elif choice == "empty":
        write(path, b"")
    elif choice == "pickle":
        write(path, marker(good))


def marker(good: dict[str, str]) -> bytes:
    """A pickle that leaves a file in ``outside`` when it is run."""
    target = os.path.join(good["outside"], "ran").encode()
    return b"cos\nmkdir\n(V" + target + b"\ntR."


def _settings(case: Case, rng: random.Random, folder: str, good: dict[str, str]) -> None:
    value = rng.choice(EVIL)
    if rng.random() < 0.5:
        name = rng.choice(SETTINGS)
        case.args = {name: value}
    else:
        name = rng.choice(DIST)
        case.args = {"dist_config": {name: value}}
        case.names.append("dist_config")
    case.names += [name, "ep_size"]
    case.what = f"{case.args!r}"[:90]


def _text(case: Case, rng: random.Random, folder: str, good: dict[str, str]) -> None:
    lines = rng.choices(YAML_PARTS, k=rng.randint(1, 4))
    text = "\n".join(lines)
    reader = rng.choice(("yaml", "json", "dist_config", "recipe", "accelerate"))
    if reader == "accelerate":
        text = f"{ACCELERATE}{rng.choice(IN_ACCELERATE)}\n{text}"
    if reader == "json":
        text = json.dumps({"a": [1, {"b": 2}], "ep_size": 2})
        text = rng.choice((text, "[" * rng.randrange(2000), text * 2, '{"a": 1, "a": 2}'))
    if rng.random() < 0.5 and text:
        place = rng.randrange(len(text))
        text = text[:place] + chr(rng.randrange(1, 300)) + text[place + 1 :]
    case.text, case.names, case.what = (reader, text), ["the text"], f"{reader}: {text[:60]!r}"


def _rows(case: Case, rng: random.Random, folder: str, good: dict[str, str]) -> None:
    odd = rng.choice([None, 1, 2.5, "", "x" * 20_000, "\ud7ff", ["a"], True, "\0", {"a": 1}])
    text = "some text that is long enough"
    column = rng.choice(("text", "text", "prompt", "completion", "messages", "other"))
    rows: list[Any] = [text, text, text, text]
    choice = rng.choice(("one odd", "all odd", "none", "ids"))
    if choice == "ids":
        ids = rng.choice([[384], [-1], [10**12], [5, 6, 2**31], [], [1.5]])
        case.rows, case.names = {"input_ids": [ids] * 4}, ["input_ids", "data"]
        case.what = f"input_ids {ids}"
        case.must_refuse = bool(ids) and not all(isinstance(i, int) and 0 <= i < 384 for i in ids)
        return
    if choice == "one odd" and (odd is None or isinstance(odd, str)):  # Arrow takes no other mixtures
        rows[rng.randrange(4)] = odd
    elif choice != "none":
        rows = [odd] * 4
    else:
        rows = []
    case.rows, case.names = {column: rows}, ["train_dataset", "data set", column, "text"]
    case.what = f"{choice}: {column} {str(odd)[:20]!r}"


def _output(case: Case, rng: random.Random, folder: str, good: dict[str, str]) -> None:
    file, link, loop = (os.path.join(folder, name) for name in ("file", "link", "loop"))
    write(file, b"x")
    os.symlink(os.path.join(folder, "nowhere", "x"), link)
    os.symlink("loop", loop)
    values = {
        "a file": file, "inside a file": os.path.join(file, "x"), "dangling": os.path.join(link, "x"), "loop": loop,
        "empty": "", "NUL": folder + "/a\0b", "long": os.path.join(folder, "y" * 300), "spaces": "   ",
        "a pipe": os.path.join(folder, "pipe"), "surrogate": folder + "/a\ud800",
    }  # fmt: skip
    os.mkfifo(values["a pipe"])
    case.what = rng.choice(sorted(values))
    case.args, case.names, case.must_refuse = {"output_dir": values[case.what]}, ["output_dir"], True


def _checkpoint(case: Case, rng: random.Random, folder: str, good: dict[str, str]) -> None:
    case.checkpoint = os.path.join(folder, "checkpoint-2")
    shutil.copytree(good["checkpoint"], case.checkpoint)
    case.names, case.same_weights = [case.checkpoint], True
    files = sorted(os.path.join(top, name) for top, _, names in os.walk(case.checkpoint) for name in names)
    path = rng.choice(files)
    choice = rng.choice(("flip", "cut", "field", "scaler", "replace"))
    case.what = f"{choice} of {os.path.basename(path)}"
    if choice == "flip":
        _flip(rng, path)
    elif choice == "cut":
        os.truncate(path, rng.randrange(os.path.getsize(path)))
    elif choice == "field":
        path = os.path.join(case.checkpoint, rng.choice(READ_AT_RESUME))
        content = json.loads(read(path))
        key = rng.choice(sorted(content))
        content[key] = rng.choice([value for value in EVIL if not isinstance(value, bytes)])
        case.what = f"{key} of {os.path.basename(path)} = {str(content[key])[:40]!r}"
        case.args = {"verify_checkpoint": rng.random() < 0.5}  # without checksums, what is read is judged
        write(path, json.dumps(content).encode())
    elif choice == "scaler":
        write(os.path.join(case.checkpoint, "scaler.pt"), rng.choice((b"", b"x", marker(good))))
        case.must_refuse = True
    else:
        _replace(case, rng, path, good)
        case.must_refuse = not path.endswith(".json") or os.path.basename(path) in READ_AT_RESUME


READ_AT_RESUME = ("trainer_state.json", "topology.json", "COMPLETE.json", "optimizer.json")

_MAKERS: dict[str, Callable[[Case, random.Random, str, dict[str, str]], None]] = {
    "model": _model,
    "settings": _settings,
    "text": _text,
    "rows": _rows,
    "output": _output,
    "checkpoint": _checkpoint,
}


def _flip(rng: random.Random, path: str) -> None:
    content = bytearray(read(path))
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    write(path, bytes(content))


def read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def write(path: str, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)

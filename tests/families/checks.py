"""What is asked of a family, one small function a question; each says what it found in a line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.families import door, nearness
from tests.families.listing import Family
from tests.families.plain import load_plain, named_tensors, recall, release
from tests.families.training import Trained, distances, train, whole

TOLERANCE, BF16_TOLERANCE, ILL_CONDITIONED = 1e-5, 1e-3, 10.0
RIGHT, WRONG, REFUSED, CRASH, NOT_RUN = "right", "wrong", "refused", "crash", "not run"


@dataclass(frozen=True)
class Verdict:
    """One of the five words, and why."""

    kind: str
    detail: str = ""


def check_load(family: Family, folder: Path, layout: str) -> Verdict:
    """Every parameter and buffer after loading by path, bit for bit as plain loading has it."""
    expected = recall(folder)["tensors"]
    model = door.load(release(folder), layout)
    found = {name: whole(tensor) for name, tensor in named_tensors(model).items()}
    missing = sorted(found.keys() ^ expected.keys())
    if missing:
        return Verdict(WRONG, f"{len(missing)} names differ, {missing[0]} among them")
    return _same_bits(found, expected, "loaded")


def _same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: str) -> Verdict:
    from tests.support.compare import distance

    differ = {
        name: distance(tensor, expected[name])
        for name, tensor in found.items()
        if tensor.dtype != expected[name].dtype or not torch.equal(tensor, expected[name])
    }
    if not differ:
        return Verdict(RIGHT, f"{len(found)} tensors")
    worst = max(differ, key=lambda name: differ[name])
    off = differ[worst]
    return Verdict(WRONG, f"{len(differ)} of {len(found)} tensors {what} differ: {worst} is {off:.0%} off")


def check_train(family: Family, folder: Path, layout: str) -> Verdict:
    """Loss, every gradient and the weights after two steps, loaded by path."""
    return _trained(door.load(release(folder), layout), folder, layout)


def check_object(family: Family, folder: Path, layout: str) -> Verdict:
    """The same, given as a model object."""
    return _trained(door.shard(load_plain(family, release(folder)), layout), folder, layout)


def _trained(model: Any, folder: Path, layout: str) -> Verdict:
    plain = recall(folder)
    found = distances(train(model, door.data_place(layout), settle=door.settle), plain["truth"])
    return _close(found, plain["condition"])


def _close(found: dict[str, float], condition: dict[str, float]) -> Verdict:
    allowed = {name: max(TOLERANCE, ILL_CONDITIONED * condition.get(name, 0.0)) for name in found}
    bad = [name for name, off in found.items() if not off <= allowed[name]]
    worst = max(bad or found, key=lambda name: found[name] / allowed[name])
    text = f"{worst} {found[worst]:.1e} off (allowed {allowed[worst]:.0e})"
    return Verdict(WRONG, f"{len(bad)} of {len(found)}: {text}") if bad else Verdict(RIGHT, text)


def check_bf16(family: Family, folder: Path, layout: str) -> Verdict:
    """Loaded in bf16, computed in bf16: runs, and both losses are near those of plain bf16."""
    return _near_bf16(door.load(release(folder), layout, dtype="bfloat16"), folder, layout)


def check_bf16_object(family: Family, folder: Path, layout: str) -> Verdict:
    """The same, given as a model object in bf16."""
    return _near_bf16(door.shard(load_plain(family, release(folder), torch.bfloat16), layout), folder, layout)


def _near_bf16(model: Any, folder: Path, layout: str) -> Verdict:
    plain = recall(folder)["bf16"]
    losses = train(model, door.data_place(layout), settle=door.settle).losses
    off = max(abs(a - b) / abs(b) for a, b in zip(losses, plain, strict=True))
    return Verdict(RIGHT if off <= BF16_TOLERANCE else WRONG, f"losses {off:.1e} from plain bf16")


def check_near(family: Family, folder: Path, layout: str) -> Verdict:
    """No gradient of a bf16 run further from float32 than 1.5 times plain's: stored in float32, and in bf16."""
    if family.name in nearness.NO_CHOICE:
        return Verdict(NOT_RUN, nearness.NO_CHOICE[family.name])
    texts, worst, far = [], [], []
    for stored in nearness.STORED:
        model = door.load(release(folder), layout, dtype=stored, bf16=True)
        left = nearness.recall_nearness(folder)
        forced = left[stored]["truth"].choices
        mine = nearness.gradients(model, door.data_place(layout), forced=forced, settle=door.settle)
        table = nearness.compare(mine, left[stored])
        far += [f"{row.ratio:.2f} {row.name} (stored in {stored})" for row in table if not row.is_near]
        over = sum(row.is_near and row.sure > nearness.BOUND for row in table)
        most = max(row.sure for row in table)
        worst.append(f"{most:.2f}" + (f" ({over} tensors: plain's experts are float32)" if over else ""))
        flips = f"top-k rows that would differ: {mine.flipped} on this rank, {left[stored]['flipped']} in plain"
        texts += [f"{family.name}, stored in {stored}; {flips}", nearness.HEAD, *map(str, table), ""]
    if dist.get_rank() == 0:
        (folder / DISTANCES).write_text("\n".join(texts), encoding="utf-8")
    if far:
        return Verdict(WRONG, f"{len(far)} gradients further from float32 than {nearness.BOUND} x plain's: {far[0]}")
    return Verdict(RIGHT, f"at most {worst[0]} of plain's distance from float32, stored in bf16 {worst[1]}")


DISTANCES = "distances.txt"
"""The whole table that :func:`check_near` saw, in the family's folder."""


def check_cp(family: Family, folder: Path, layout: str) -> Verdict:
    """Context parallel over two ranks: exact."""
    return check_object(family, folder, layout)


def check_save(family: Family, folder: Path, layout: str) -> Verdict:
    """``save_model`` of a model object: keys, bits and config as the plain trainer writes them."""
    return _saved(load_plain(family, release(folder)), family, folder)


def check_save_path(family: Family, folder: Path, layout: str) -> Verdict:
    """The same, of a model loaded by path."""
    if not family.generates:
        return Verdict(NOT_RUN, f"no trainer takes {family.architecture} by path")
    return _saved(release(folder), family, folder)


def _saved(model: Any, family: Family, folder: Path) -> Verdict:
    target = folder / "saved_by_ranks"
    if dist.get_rank() == 0:
        shutil.rmtree(target, ignore_errors=True)
    dist.barrier()
    door.save(model, str(target), generates=family.generates)
    dist.barrier()
    found, expected = _file_tensors(target), _file_tensors(folder / "saved")
    keys = sorted(found.keys() ^ expected.keys())
    if keys:
        return Verdict(WRONG, f"{len(keys)} keys differ, {keys[0]} among them")
    bits = _same_bits(found, expected, "saved")
    return bits if bits.kind == WRONG else _same_config(target, folder / "saved", bits)


def _file_tensors(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {key: t for file in sorted(directory.glob("*.safetensors")) for key, t in load_file(file).items()}


def _same_config(target: Path, expected: Path, bits: Verdict) -> Verdict:
    ours, theirs = (json.loads((folder / "config.json").read_text()) for folder in (target, expected))
    differing = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
    if not differing:
        return bits
    key = differing[0]
    return Verdict(WRONG, f"config differs in {differing}: {ours.get(key)!r:.60} for {theirs.get(key)!r:.60}")


@dataclass(frozen=True)
class Check:
    """A question, in which layout and on how many ranks it is asked."""

    ask: Callable[[Family, Path, str], Verdict]
    layout: str
    world: int
    column: str
    after: str | None = None
    """A preparation, of one plain process, that it needs beside the usual one."""


NEARNESS = "prepare nearness"

CHECKS: dict[str, Check] = {
    "load": Check(check_load, "ep2", 2, "load"),
    "train": Check(check_train, "ep2", 2, "train"),
    "object": Check(check_object, "ep2", 2, "train"),
    "bf16": Check(check_bf16, "ep2", 2, "bf16"),
    "bf16_object": Check(check_bf16_object, "ep2", 2, "bf16"),
    "near": Check(check_near, "ep2", 2, "bf16", NEARNESS),
    "cp": Check(check_cp, "cp2", 2, "cp"),
    "save": Check(check_save, "ep2", 2, "save"),
    "save_path": Check(check_save_path, "ep2", 2, "save"),
    "load4": Check(check_load, "ep2_efsdp2", 4, "load"),
    "load_hsdp": Check(check_load, "ep2_hsdp2", 4, "load"),
    "train4": Check(check_train, "ep2_efsdp2", 4, "train"),
}

__all__ = ["CHECKS", "Check", "Trained", "Verdict"]

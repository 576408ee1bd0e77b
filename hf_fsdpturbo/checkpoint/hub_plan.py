"""What a Hub export will write, known before a byte is written: names, shapes, who writes what, and in which file.

Names come from Transformers itself (``revert_weight_conversion``), asked on tensors without memory.
Shapes: E experts of a module.

Note [how names are found]: Transformers numbers experts from 0 in whatever stack it is given, so a rank's own stack
would get the names of the first experts. So a stack is shown whole, filled with its expert ids and expanded (no
memory): each output then holds the id of its expert. Experts are converted one at a time, and their outputs take the
names of their own id, in order. Outputs that still hold all ids are stacked formats (gpt_oss) and are written as they
are.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

logger = logging.getLogger(__name__)

_UNIT = re.compile(r"^(.*?\.\d+)\.")


@dataclass(frozen=True)
class Output:
    """One tensor of the exported checkpoint."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        size = self.dtype.itemsize
        for dim in self.shape:
            size *= dim
        return size


@dataclass
class Job:
    """One step of the export: some sources are brought to the writer, converted together, and written.

    Attributes:
        sources: names in the model.
        outputs: what comes out, in order.
        unit: decoder layer (or ``""``); jobs of one unit have one writer where nothing else decides.
        row: expert id; only that row of the sources is converted. None: the whole sources.
        verbatim: one source, written as it is, a few rows at a time.
        writer: rank that writes it.
    """

    sources: tuple[str, ...]
    outputs: tuple[Output, ...]
    unit: str
    row: int | None = None
    verbatim: bool = False
    writer: int = 0


@dataclass
class File:
    """One safetensors file: tensors in file order, and the rank that writes it."""

    writer: int
    outputs: list[Output] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data."""
        return sum(output.nbytes for output in self.outputs)


def _output(name: str, tensor: Tensor) -> Output:
    return Output(name, tensor.dtype, tuple(tensor.shape))


def _meta(tensors: dict[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    return {name: torch.empty(tensors[name].shape, dtype=tensors[name].dtype, device="meta") for name in names}


def _verbatim(model: PreTrainedModel, probes: dict[str, Tensor]) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Outputs that are one of the probes itself (output name -> source name), and the outputs made by a conversion."""
    source_of = {id(tensor): name for name, tensor in probes.items()}
    outputs = revert_weight_conversion(model, dict(probes))
    same = {name: source_of[id(tensor)] for name, tensor in outputs.items() if id(tensor) in source_of}
    return same, {name: tensor for name, tensor in outputs.items() if name not in same}


def _verbatim_jobs(same: dict[str, str], tensors: dict[str, Tensor], unit: str) -> list[Job]:
    return [Job((s,), (_output(name, tensors[s]),), unit, verbatim=True) for name, s in same.items()]


def _unit(name: str) -> str:
    match = _UNIT.match(name)
    return match[1] if match else ""


def expert_jobs(model: PreTrainedModel, tensors: dict[str, Tensor], names: list[str]) -> list[Job]:
    """Jobs of one experts module: one an expert, or its tensors as they are, or (a conversion over experts) one.

    Args:
        names: the module's tensors, each stacked ``[E, ...]``.
    """
    unit = _unit(names[0])
    same, made = _verbatim(model, _meta(tensors, names))
    jobs = _verbatim_jobs(same, tensors, unit)
    sources = [name for name in names if name not in same.values()]
    if not sources:
        return jobs
    whole = Job(tuple(sources), tuple(_output(name, tensor) for name, tensor in made.items()), unit)
    num_experts = tensors[sources[0]].shape[0]
    if num_experts == 1 or len(made) % num_experts:
        return [*jobs, whole]
    ids = torch.arange(num_experts)
    probes = {
        name: ids.view(-1, *[1] * (tensors[name].ndim - 1)).expand(tensors[name].shape) for name in sources
    }
    named: dict[int, list[str]] = {}
    for name, tensor in revert_weight_conversion(model, dict(probes)).items():
        first, last = int(tensor[(0,) * tensor.ndim]), int(tensor[(-1,) * tensor.ndim])
        if first != last:
            return [*jobs, whole]
        named.setdefault(first, []).append(name)
    one = list(revert_weight_conversion(model, {n: t[:1] for n, t in _meta(tensors, sources).items()}).values())
    if any(len(named.get(expert, ())) != len(one) for expert in range(num_experts)):
        return [*jobs, whole]
    for expert in range(num_experts):
        outputs = tuple(_output(name, tensor) for name, tensor in zip(named[expert], one, strict=True))
        jobs.append(Job(tuple(sources), outputs, unit, row=expert))
    return jobs


def make_jobs(model: PreTrainedModel, tensors: dict[str, Tensor], expert_modules: Iterable[str]) -> list[Job]:
    """All jobs of a model; their outputs are exactly the names that Transformers would save.

    Args:
        tensors: what is to be saved, by name in the model (sharded, whole or meta: only shapes and dtypes are read).
        expert_modules: names of modules whose tensors are stacked over experts.
    """
    jobs: list[Job] = []
    taken: set[str] = set()
    for module in expert_modules:
        names = [name for name in tensors if name.startswith(f"{module}.")]
        if names and len({tensors[name].shape[:1] for name in names}) == 1 and tensors[names[0]].ndim > 1:
            jobs += expert_jobs(model, tensors, names)
            taken.update(names)
    units: dict[str, list[str]] = {}
    for name in tensors:
        if name not in taken:
            units.setdefault(_unit(name), []).append(name)
    for unit, names in units.items():
        same, made = _verbatim(model, _meta(tensors, names))
        jobs += _verbatim_jobs(same, tensors, unit)
        rest = tuple(name for name in names if name not in same.values())
        if rest:
            jobs.append(Job(rest, tuple(_output(name, tensor) for name, tensor in made.items()), unit))
    return _checked(model, tensors, jobs)


def _checked(model: PreTrainedModel, tensors: dict[str, Tensor], jobs: list[Job]) -> list[Job]:
    """Compare with one conversion of the whole model; a conversion that crosses layers is done whole, and said."""
    whole = tuple(_output(n, t) for n, t in revert_weight_conversion(model, _meta(tensors, tensors)).items())
    written = sorted((output.name, output.dtype, output.shape) for job in jobs for output in job.outputs)
    if written == sorted((output.name, output.dtype, output.shape) for output in whole):
        return jobs
    logger.warning(
        "The names of %s cannot be made layer by layer: its weights are gathered on one rank for this export.",
        type(model).__name__,
    )
    return [Job(tuple(tensors), whole, "")]


def lay_out(jobs: list[Job], max_file_bytes: int) -> list[File]:
    """Files of each writer, filled in order up to ``max_file_bytes`` (a larger tensor has a file of its own)."""
    files: list[File] = []
    for writer in sorted({job.writer for job in jobs}):
        current = File(writer)
        for output in (output for job in jobs if job.writer == writer for output in job.outputs):
            if current.outputs and current.nbytes + output.nbytes > max_file_bytes:
                files.append(current)
                current = File(writer)
            current.outputs.append(output)
        files.append(current)
    for file in files:  # widest elements first, so that each tensor is aligned to its element size
        file.outputs.sort(key=lambda output: -output.dtype.itemsize)
    return files


def assign_writers(jobs: list[Job], owners: dict[int, list[int]], world_size: int) -> None:
    """Give every job a writer: a rank that owns its rows, the one with the least to write so far; else by unit.

    Args:
        owners: for each index of ``jobs``, ranks that hold everything the job reads; missing or empty: nobody does.
    """
    load = [0] * world_size
    unit_writer: dict[str, int] = {}
    feature_sharded = 0
    for index, job in enumerate(jobs):
        size = sum(output.nbytes for output in job.outputs)
        candidates = owners.get(index) or []
        if job.row is not None and not candidates:
            candidates = [feature_sharded % world_size]
            feature_sharded += 1
        if job.row is None:
            if job.unit not in unit_writer:
                unit_writer[job.unit] = load.index(min(load))
            candidates = [unit_writer[job.unit]]
        job.writer = min(candidates, key=lambda candidate: load[candidate])
        load[job.writer] += size

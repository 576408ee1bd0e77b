"""What a Hub export will write, known before a byte is written: names, shapes, who writes what, and in which file.

Names and shapes come from Transformers itself (``revert_weight_conversion``), asked once about the whole model on
meta; which tensors belong to which names, see ``conversion_groups.py``.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from hf_fsdpturbo.checkpoint.conversion_groups import Group, RowProof, find_groups, rules_kept
from hf_fsdpturbo.checkpoint.unused import Carried

logger = logging.getLogger(__name__)

_CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
_UNIT = re.compile(r"^(.*?\.\d+)\.")


@dataclass(frozen=True, slots=True)
class Output:
    """One tensor of the exported checkpoint."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numel * self.itemsize

    @property
    def code(self) -> str:
        """Its dtype as safetensors names it."""
        return _CODES[self.dtype]


@dataclass(slots=True)
class Job:
    """One step of the export: some sources are brought to the writer, converted together, and written.

    Attributes:
        sources: names in the model.
        outputs: what comes out, in order.
        unit: decoder layer (or ``""``); jobs of one unit have one writer where nothing else decides.
        row: expert id; only that row of the sources is converted. None: the whole sources.
        verbatim: one source, written as it is, a few rows at a time.
        carried: no sources in the model, the output's bytes lie in a file; rank 0 copies it.
        stacked: the outputs are stacks again, row after row: converted and written a few rows at a time.
        writer: rank that writes it.
    """

    sources: tuple[str, ...]
    outputs: tuple[Output | Carried, ...]
    unit: str
    row: int | None = None
    verbatim: bool = False
    stacked: bool = False
    carried: bool = False
    writer: int = 0

    @property
    def whole(self) -> bool:
        """All sources are brought to the writer whole and converted at once."""
        return self.row is None and not (self.verbatim or self.stacked or self.carried)


@dataclass
class File:
    """One safetensors file: tensors in file order, and the rank that writes it."""

    writer: int
    outputs: list[Output | Carried] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data."""
        return sum(output.nbytes for output in self.outputs)


def _output(name: str, tensor: Tensor) -> Output:
    return Output(name, tensor.dtype, tuple(tensor.shape))


def _meta(tensors: dict[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    return {name: torch.empty(tensors[name].shape, dtype=tensors[name].dtype, device="meta") for name in names}


def _unit(name: str) -> str:
    match = _UNIT.match(name)
    return match[1] if match else ""


def make_jobs(model: PreTrainedModel, tensors: dict[str, Tensor]) -> list[Job]:
    """All jobs of a model; their outputs are exactly the names that Transformers would save.

    Args:
        tensors: what is to be saved, by name in the model (sharded, whole or meta: only shapes and dtypes are read).
    """
    meta = _meta(tensors, tensors)
    source_of = {id(tensor): name for name, tensor in meta.items()}
    with rules_kept(model) as rules:
        whole = revert_weight_conversion(model, dict(meta))
        same = {name: source_of[id(tensor)] for name, tensor in whole.items() if id(tensor) in source_of}
        made = {name: _output(name, tensor) for name, tensor in whole.items() if name not in same}
        del whole  # tens of thousands of tensors, on meta too
        jobs = [Job((s,), (_output(name, tensors[s]),), _unit(s), verbatim=True) for name, s in same.items()]
        written = set(same.values())
        rest = [name for name in tensors if name not in written]
        proof = RowProof(model)
        converted = [job for group in find_groups(rules, rest) for job in _group_jobs(model, meta, group, proof)]
    return jobs + _checked(model, rest, made, converted)


def carried_jobs(tensors: list[Carried], jobs: list[Job]) -> list[Job]:
    """Jobs that copy what the model class does not use; a name that the model writes itself is the model's."""
    taken = {output.name for job in jobs for output in job.outputs}
    return [Job((), (tensor,), "", carried=True) for tensor in tensors if tensor.name not in taken]


def _group_jobs(model: PreTrainedModel, meta: dict[str, Tensor], group: Group, proof: RowProof) -> list[Job]:
    """Jobs of one conversion: one an expert, or (where it does not go row by row) one."""
    made = revert_weight_conversion(model, {name: meta[name] for name in group.sources})
    outputs = [_output(name, tensor) for name, tensor in made.items()]
    unit = _unit(group.sources[0])
    row_wise = proof.of(group, meta, len(outputs))
    if row_wise is None or row_wise.place is None:
        return [Job(group.sources, tuple(outputs), unit, stacked=row_wise is not None)]
    of_row: dict[int, dict[int, Output]] = {}
    for (row, place), output in zip(row_wise.place, outputs, strict=True):
        of_row.setdefault(row, {})[place] = output
    return [
        Job(group.sources, tuple(of_row[row][place] for place in sorted(of_row[row])), unit, row=row)
        for row in sorted(of_row)
    ]


def _checked(model: PreTrainedModel, sources: list[str], made: dict[str, Output], jobs: list[Job]) -> list[Job]:
    """Compare with the conversion of the whole model; one that crosses groups is done whole, and said."""
    outputs = [output for job in jobs for output in job.outputs]
    if len(outputs) == len(made) and all(made.get(output.name) == output for output in outputs):
        return jobs
    logger.warning(
        "The names of %s cannot be made conversion by conversion: %d weights are gathered on one rank for this.",
        type(model).__name__,
        len(sources),
    )
    return [Job(tuple(sources), tuple(made.values()), "")]


def lay_out(jobs: list[Job], max_file_bytes: int) -> list[File]:
    """Files of each writer, filled in order up to ``max_file_bytes`` (a larger tensor has a file of its own)."""
    of_writer: dict[int, list[File]] = {}
    filled: dict[int, int] = {}
    for job in jobs:
        own = of_writer.setdefault(job.writer, [File(job.writer)])
        for output in job.outputs:
            size = filled.get(job.writer, 0)
            if size and size + output.nbytes > max_file_bytes:
                own.append(File(job.writer))
                size = 0
            own[-1].outputs.append(output)
            filled[job.writer] = size + output.nbytes
    files = [file for writer in sorted(of_writer) for file in of_writer[writer]]
    for file in files:  # widest elements first, so that each tensor is aligned to its element size
        file.outputs.sort(key=lambda output: -output.itemsize)
    return files


def assign_writers(jobs: list[Job], owners: dict[int, list[int]], world_size: int) -> None:
    """Give every job a writer: one of its owners, the one with the least to write so far; else by unit.

    Args:
        owners: for each index of a job of one expert, ranks that hold what it reads.
    """
    load = [0] * world_size
    load[0] = sum(output.nbytes for job in jobs if job.carried for output in job.outputs)
    unit_writer: dict[str, int] = {}
    for index, job in enumerate(jobs):
        if job.carried:
            continue
        if job.row is None:
            if job.unit not in unit_writer:
                unit_writer[job.unit] = load.index(min(load))
            job.writer = unit_writer[job.unit]
        else:
            job.writer = min(owners[index], key=lambda candidate: load[candidate])
        load[job.writer] += sum(output.nbytes for output in job.outputs)

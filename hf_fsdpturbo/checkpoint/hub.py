"""Hub export without gathering: every rank writes the tensors it owns, under the names the checkpoint came with.

At most a chunk of one tensor (:data:`CHUNK_BYTES`), or the sources of one conversion, is in memory beside the model. A
tensor is written by exactly one rank, a file too, so nothing but plain writes is asked of the file system.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from hf_fsdpturbo.checkpoint import unused
from hf_fsdpturbo.checkpoint.commit import wait_visible
from hf_fsdpturbo.checkpoint.conversion_groups import rules_kept
from hf_fsdpturbo.checkpoint.hub_plan import File, Job, Output, assign_writers, carried_jobs, lay_out, make_jobs
from hf_fsdpturbo.checkpoint.rank_tensors import RankTensors
from hf_fsdpturbo.checkpoint.unused import Carried, header_bytes
from hf_fsdpturbo.ranks import FAILURES, agree, from_rank0, rank, together, world_size
from hf_fsdpturbo.sharding.outer_fsdp import reshard

CHUNK_BYTES = 64 * 2**20
STAGING = "_saving-model"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_WEIGHT_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


class TensorSource(Protocol):
    """Where an export reads from: ranks (:class:`RankTensors`) or a DCP checkpoint on disk."""

    tensors: dict[str, Tensor]

    def begin(self, names: tuple[str, ...]) -> None:
        """The next rows asked for are of these tensors."""
        ...

    def rows(self, name: str, start: int, stop: int, writer: int) -> Tensor | None:
        """Rows ``[start, stop)`` on the CPU of ``writer``."""
        ...

    def owner_of_rows(self, name: str, start: int, stop: int) -> list[int]:
        """Ranks that hold all of them."""
        ...

    def sharers_of_rows(self, name: str, start: int, stop: int) -> list[int]:
        """Ranks that hold some of them."""
        ...


def saved_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """What ``save_pretrained`` would save, by name in the model: without tied copies and keys the model leaves out."""
    reshard(model)
    tensors = cast(dict[str, Tensor], get_model_state_dict(model))
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tied = {
        copy
        for copy, original in (getattr(model, "all_tied_weights_keys", None) or {}).items()
        if copy in parameters and original in tensors and parameters[copy] is parameters.get(original)
    }
    return {name: tensor for name, tensor in tensors.items() if name not in ignored | tied}


def export_model(
    model: PreTrainedModel, directory: str, max_file_bytes: int, one_disk: bool = True
) -> list[str]:
    """Write the weights of a (sharded or whole) model as safetensors files with an index; collective.

    Args:
        model: whose weights are written.
        directory: exists on every rank; weight files already there are replaced.
        max_file_bytes: size at which a new file is begun. A model no larger than that is one ``model.safetensors``.
        one_disk: all ranks see the directory, and share the writing. Else rank 0 writes, on its own disk.

    Returns:
        Names of the files.

    Raises:
        CheckpointError: on every rank, if a rank could not write.
    """
    return export_tensors(model, RankTensors(saved_tensors(model)), directory, max_file_bytes, one_disk)


def export_tensors(
    model: PreTrainedModel, source: TensorSource, directory: str, max_file_bytes: int, one_disk: bool = True
) -> list[str]:
    """:func:`export_model` from any source; ``model`` gives names only and may be on meta."""
    extra = from_rank0(unused.readable(model) if rank() == 0 else None)
    with together("planning the export"):
        jobs = make_jobs(model, source.tensors)
        jobs += carried_jobs(extra, jobs)
        total = sum(output.nbytes for job in jobs for output in job.outputs)
        if world_size() > 1 and one_disk and total > max_file_bytes:
            assign_writers(jobs, _owners(jobs, source), world_size())
        files = lay_out(jobs, max_file_bytes)
    staging = os.path.join(directory, STAGING)
    with together(f"making {staging}"):
        if rank() == 0:
            shutil.rmtree(staging, ignore_errors=True)
            os.makedirs(staging)
    with together(f"finding {staging}"):
        if one_disk or rank() == 0:
            wait_visible(staging)
    names = _file_names(len(files))
    with rules_kept(model):
        error = _Writer(model, source, files, [os.path.join(staging, name) for name in names]).run(jobs)
    agree(error, f"writing the weights to {directory}")
    with together(f"publishing the weights in {directory}"):
        if rank() == 0:
            publish(staging, directory, names, files)
            unused.settle(model, [os.path.join(directory, name) for name in names])
    return names


def _owners(jobs: list[Job], source: TensorSource) -> dict[int, list[int]]:
    """For each job of one expert, ranks that hold all it reads, else those that hold some: fewest messages."""
    owners: dict[int, list[int]] = {}
    for index, job in enumerate(jobs):
        if job.row is not None:
            held = [source.owner_of_rows(name, job.row, job.row + 1) for name in job.sources]
            whole = held[0] if all(ranks == held[0] for ranks in held) else sorted(set.intersection(*map(set, held)))
            owners[index] = whole or source.sharers_of_rows(job.sources[0], job.row, job.row + 1)
    return owners


def _file_names(count: int) -> list[str]:
    return [SINGLE] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]


def publish(staging: str, directory: str, names: list[str], files: list[File]) -> None:
    """Move finished files into place, the index last: without it (or a single file) a directory is no checkpoint."""
    for old in os.listdir(directory):
        if old == INDEX or (_WEIGHT_FILE.fullmatch(old) and old not in names):
            os.remove(os.path.join(directory, old))
    for name in names:
        os.replace(os.path.join(staging, name), os.path.join(directory, name))
    if len(names) > 1:
        outputs = [output for file in files for output in file.outputs]
        index = {
            "metadata": {
                "total_parameters": sum(output.numel for output in outputs),
                "total_size": sum(output.nbytes for output in outputs),
            },
            "weight_map": {o.name: name for name, file in zip(names, files, strict=True) for o in file.outputs},
        }
        path = os.path.join(staging, INDEX)
        with open(path, "w", encoding="utf-8") as file:
            file.write(json.dumps(index, indent=2, sort_keys=True) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(path, os.path.join(directory, INDEX))
    shutil.rmtree(staging, ignore_errors=True)


class _Writer:
    """This rank's part of one export. A rank that cannot write keeps serving the others and reports at the end."""

    def __init__(self, model: PreTrainedModel, source: TensorSource, files: list[File], paths: list[str]) -> None:
        self.model, self.source = model, source
        self.error: BaseException | None = None
        self.place: dict[str, tuple[int, int]] = {}  # output name -> (file descriptor, byte offset)
        self.descriptors: list[int] = []
        for file, path in zip(files, paths, strict=True):
            if file.writer == rank():
                try:
                    self._open(file, path)
                except FAILURES as error:
                    self.error = error

    def _open(self, file: File, path: str) -> None:
        header = header_bytes(file.outputs)
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
        self.descriptors.append(descriptor)
        os.ftruncate(descriptor, len(header) + file.nbytes)
        _write_all(descriptor, memoryview(header), 0)
        offset = len(header)
        for output in file.outputs:
            self.place[output.name] = (descriptor, offset)
            offset += output.nbytes

    def run(self, jobs: list[Job]) -> BaseException | None:
        """All jobs in order, the same on every rank; returns what went wrong here."""
        try:
            for job in jobs:
                self._run_job(job)
            if self.error is None:
                for descriptor in self.descriptors:
                    os.fsync(descriptor)
        except OSError as error:
            self.error = error
        finally:
            for descriptor in self.descriptors:
                os.close(descriptor)
        return self.error

    def _run_job(self, job: Job) -> None:
        if job.carried:
            self._copy(cast(Carried, job.outputs[0]), job.writer)
            return
        self.source.begin(job.sources)
        tensors = [self.source.tensors[name] for name in job.sources]
        if job.row is not None:
            self._run_rows(job, [(job.row, job.row + 1)] * len(tensors))
        elif job.whole:
            self._run_rows(job, [(0, tensor.shape[0] if tensor.ndim else 1) for tensor in tensors])
        else:
            for span in _chunks(tensors):
                self._run_rows(job, [span] * len(tensors), at_row=span[0])

    def _run_rows(self, job: Job, spans: list[tuple[int, int]], at_row: int = 0) -> None:
        """Bring rows of each source to the writer, convert them and write them from row ``at_row`` of the outputs."""
        parts: dict[str, Tensor] = {}
        for name, (start, stop) in zip(job.sources, spans, strict=True):
            part = self.source.rows(name, start, stop, job.writer)
            if part is not None:
                parts[name] = part
        if job.writer != rank() or self.error is not None:
            return
        try:
            made = parts if job.verbatim else revert_weight_conversion(self.model, parts)
        except FAILURES as error:
            self.error = error
            return
        # what comes of some rows is named by its place among them
        ordered = [made[output.name] for output in job.outputs] if job.whole else list(made.values())
        for output, tensor in zip(job.outputs, ordered, strict=True):
            row_bytes = output.nbytes // output.shape[0] if output.shape else 0
            self._write(output, tensor, at_row * row_bytes)

    def _copy(self, tensor: Carried, writer: int) -> None:
        if writer != rank() or self.error is not None:
            return
        descriptor, start = self.place[tensor.name]
        try:
            for offset, piece in tensor.chunks():
                _write_all(descriptor, memoryview(piece), start + offset)
        except OSError as error:
            self.error = error

    def _write(self, output: Output | Carried, tensor: Tensor, offset: int) -> None:
        if self.error is not None:
            return
        descriptor, start = self.place[output.name]
        try:
            flat = tensor.detach().contiguous().reshape(-1)
            if flat.numel():
                _write_all(descriptor, memoryview(cast(Any, flat.view(torch.uint8).numpy())), start + offset)
        except OSError as error:
            self.error = error


def _chunks(tensors: list[Tensor]) -> list[tuple[int, int]]:
    """Row ranges of at most :data:`CHUNK_BYTES` of all tensors together (at least one row)."""
    if tensors[0].ndim == 0:
        return [(0, 1)]
    rows = tensors[0].shape[0]
    row_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors) // max(rows, 1)
    if not row_bytes:
        return []
    step = max(CHUNK_BYTES // row_bytes, 1)
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data[: 2**30], offset)
        data, offset = data[written:], offset + written

"""QLoRA runs against one plain process of PEFT on the dequantised weights, which bitsandbytes itself makes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.adapter_runs import as_peft, batch, in_peft_layout, logits_of, lora
from tests.support.records import Record, Run
from tests.support.reference_run import (
    build_trainer,
    forget_accelerate,
    merge_batches,
    run_references,
    run_turbo,
    whole_parameters,
)

SIZES = {"kind": "qwen3_moe", "hidden_size": 64, "moe_intermediate_size": 64, "head_dim": 16}
"""Rows of whole blocks of 64."""
IN_FULL = ("embed_tokens", "lm_head", "gate.weight", "router", "norm", "_bias")


def four_bits(**changes: Any) -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_4bit=True, **{"bnb_4bit_quant_type": "nf4", **changes})


def dequantised(weight: Tensor, quant_type: str = "nf4", nested: bool = False) -> Tensor:
    """What bitsandbytes makes of a matrix, or of each matrix of a stack."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    def one(matrix: Tensor) -> Tensor:
        packed, state = quantize_4bit(matrix.contiguous(), quant_type=quant_type, compress_statistics=nested)
        return dequantize_4bit(packed, state)

    return torch.stack([one(matrix) for matrix in weight]) if weight.ndim == 3 else one(weight)


def dequantise_model(
    model: nn.Module, quant_type: str = "nf4", nested: bool = False, kept: tuple[str, ...] = ()
) -> None:
    """All matrices in place but those that stay in full."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and not any(part in name for part in (*IN_FULL, *kept)):
                parameter.copy_(dequantised(parameter, quant_type, nested))


def save_dequantised(
    path: str,
    folder: str,
    quant_type: str = "nf4",
    nested: bool = False,
    kept: tuple[str, ...] = (),
    dtype: str = "float32",
) -> str:
    """A checkpoint beside ``path`` that holds the dequantised weights, in full."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    dequantise_model(model, quant_type, nested, kept)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(path).save_pretrained(folder)
    return folder


def trained_only(record: Record) -> Record:
    """Adapters in PEFT's layout, without frozen weights (which are bytes on one side)."""
    names = set(record.trainable)
    for field in ("weights", "start_weights"):
        setattr(record, field, {name: t for name, t in getattr(record, field).items() if name in names})
    return as_peft(record)


def run_each(runs: list[Run]) -> list[Record]:
    """Rank function: several runs one after another, each with meshes of its own."""
    from hf_fsdpturbo import parallel_state

    found = []
    for run in runs:
        parallel_state._STATE = None
        found.append(run_turbo(run))
    return found


def against_dequantised(
    runs: dict[str, tuple[Run, str]], world_size: int, timeout: float = 200
) -> dict[str, tuple[Record, Record]]:
    """All runs in one spawn (or one plain process), and each in one plain process on the dequantised weights beside
    it."""
    from tests.support.spawn import run_plain_jobs, run_ranks

    if world_size == 1:
        by_rank = [run_plain_jobs(run_each, [run for run, _ in runs.values()], timeout=timeout)]
    else:
        by_rank = run_ranks(run_each, world_size, [run for run, _ in runs.values()], timeout=timeout)
    jobs = []
    for index, (run, plain) in enumerate(runs.values()):
        kwargs = {name: value for name, value in run.trainer_kwargs.items() if name != "quantization_config"}
        cp_size = run.turbo.get("cp_size", 1)
        batches = merge_batches([records[index] for records in by_rank][::cp_size])
        run = replace(run, model=plain, trainer_kwargs=kwargs, after_train=None)
        jobs.append((run, world_size // cp_size, batches))
    references = run_plain_jobs(run_references, jobs, timeout=timeout)
    found = {}
    for index, name in enumerate(runs):
        by_rank[0][index].extra["ranks"] = [records[index].extra for records in by_rank]
        found[name] = trained_only(by_rank[0][index]), trained_only(references[index])
    return found


def held(trainer: Any) -> dict[str, int]:
    """What a rank holds between steps: bytes of storages by dtype, of all parameters and buffers. With
    ``save_quantized`` it is saved, too."""
    from hf_fsdpturbo.shards import local_tensor

    if trainer.args.save_quantized:
        trainer.save_model()
        trainer.save_merged_model(f"{trainer.args.output_dir}/merged")

    found: dict[str, int] = {}
    tensors = [*trainer.model.parameters(), *trainer.model.buffers()]
    storages = {}
    for tensor in tensors:
        local = local_tensor(tensor.detach())
        storages[local.untyped_storage().data_ptr()] = str(local.dtype), local.untyped_storage().nbytes()
    for dtype, size in storages.values():
        found[dtype] = found.get(dtype, 0) + size
    return found


def each(function: Any, jobs: list[tuple[Any, ...]]) -> list[Any]:
    """Rank function: a function of several runs, one after another, each with meshes of its own."""
    from hf_fsdpturbo import parallel_state

    found = []
    for job in jobs:
        parallel_state._STATE = None
        found.append(function(*job))
    return found


def train_and_save(run: Run, folder: str) -> dict[str, Any]:
    """Rank function: train, save the adapter and the merged model; adapters, logits, and what a checkpoint holds."""
    forget_accelerate()
    trainer = build_trainer(run, turbo=True)
    trainer.train()
    trainer.save_model(f"{folder}/adapter")
    trainer.save_merged_model(f"{folder}/merged")
    return {"adapters": _adapters(trainer.model), "logits": logits_of(trainer.model)}


def resume_and_take(run: Run, checkpoint: str, source: str, folder: str) -> dict[str, Any]:
    """Rank function: go on from a checkpoint; then take an adapter written by plain PEFT, and save it again."""
    forget_accelerate()
    trainer = build_trainer(run, turbo=True)
    trainer.train(resume_from_checkpoint=checkpoint)
    adapters = _adapters(trainer.model)
    trainer.load_adapter(source)
    trainer.save_model(folder)
    return {"adapters": adapters, "logits": logits_of(trainer.model)}


def _adapters(model: Any) -> dict[str, Tensor]:
    weights = in_peft_layout(whole_parameters(model))
    return {name: tensor for name, tensor in weights.items() if "lora_" in name}


def small_model(device: str = "cpu") -> Any:
    """A float32 model whose rows are whole blocks."""
    from tests.support.tiny_models import tiny_model

    return tiny_model(**SIZES).to(device)


def adapted(model: nn.Module, packed: bool, dispatcher: str = "fused", **bits: Any) -> Any:
    """The model with adapters on attention and experts that are not zero, in one process: with our expert block on
    weights in 4 bits, or stock PEFT on the dequantised ones."""
    from peft import get_peft_model

    from hf_fsdpturbo.parallelize.adapter_of_load import Adapter
    from hf_fsdpturbo.parallelize.quantise import route_packed_alone
    from hf_fsdpturbo.quantised.asked import FourBit
    from hf_fsdpturbo.quantised.filling import Filling

    if packed:
        device = next(model.parameters()).device
        adapter = Adapter(lora(), filling=Filling(FourBit(**bits), device))
        made = adapter.finish(adapter.alone(model), device)
        assert len(route_packed_alone(model, dispatcher, None)) == 2
    else:
        dequantise_model(model, bits.get("quant_type", "nf4"), bits.get("nested", False))
        made = get_peft_model(model, lora())
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return made.train()


def step(model: Any, between: Any = None) -> dict[str, Tensor]:
    """Gradients of one step by name, and the loss; ``between`` is called after the forward."""
    ids = batch()["input_ids"].to(next(model.parameters()).device)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    if between is not None:
        between()
    loss.backward()
    found = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return {"loss": loss.detach().cpu(), **found}

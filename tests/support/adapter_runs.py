"""LoRA runs: records in PEFT's layout, and what ranks and a plain process do with adapter files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_fsdpturbo.verify.runs import as_peft, in_peft_layout  # noqa: F401
from tests.support.reference_run import Run, build_trainer, forget_accelerate, whole_parameters

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def lora(**changes: Any) -> Any:
    from peft import LoraConfig

    fields = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": ["q_proj", "v_proj"]}
    return LoraConfig(**{**fields, "target_parameters": EXPERTS, **changes})


def batch() -> dict[str, Tensor]:
    ids = torch.randint(3, 384, (2, 24), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(**batch(), use_cache=False).logits.float()


def train_and_save(run: Run, folder: str) -> dict[str, Any]:
    """Rank function: train, save the adapter and the merged model; whole weights and logits."""
    forget_accelerate()
    trainer = build_trainer(run, turbo=True)
    trainer.train()
    trainer.save_model(f"{folder}/adapter")
    trainer.save_merged_model(f"{folder}/merged")
    return {"weights": in_peft_layout(whole_parameters(trainer.model)), "logits": logits_of(trainer.model)}


def load_and_save(run: Run, source: str, folder: str, fault: bool = False) -> Tensor:
    """Rank function: take an adapter written by plain PEFT, save it again; logits. The fault reads lora_B wrongly."""
    from hf_fsdpturbo.lora import adapter_files

    if fault:
        right = adapter_files.to_expert_first
        adapter_files.to_expert_first = lambda factor, weight, n: (  # type: ignore[assignment]
            right(factor, weight, n)
            if factor == "lora_A"
            else weight.reshape(weight.shape[0], n, -1).permute(1, 0, 2)
        )
    forget_accelerate()
    trainer = build_trainer(run, turbo=True)
    trainer.load_adapter(source)
    trainer.save_model(folder)
    return logits_of(trainer.model)


def plain_adapter(path: str, folder: str) -> None:
    """A plain PEFT adapter with a lora_B that is not zero."""
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(5)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), lora())
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)


def plain_logits(path: str, adapter: str | None) -> Tensor:
    """Logits of plain Transformers, with plain PEFT where there is an adapter."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return logits_of(model if adapter is None else PeftModel.from_pretrained(model, adapter))


def train_and_stop(run: Run, resume: str | None) -> dict[str, Tensor]:
    """Rank function: train to max_steps, from a checkpoint or from the start; whole trainable weights."""
    forget_accelerate()
    trainer = build_trainer(run, turbo=True)
    trainer.train(resume_from_checkpoint=resume)
    weights = in_peft_layout(whole_parameters(trainer.model))
    return {name: tensor for name, tensor in weights.items() if "lora_" in name}


def adapter_tensors(folder: str) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(str(Path(folder) / "adapter_model.safetensors"))

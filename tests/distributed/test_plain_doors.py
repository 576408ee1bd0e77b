"""Issue 14, item 5: what TRL and Transformers accept in one process is accepted by our classes, and does the same."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.records import DEFAULT_ARGS
from tests.support.spawn import run_plain
from tests.support.tiny_models import texts

ARGS = {**DEFAULT_ARGS, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}


class Line(nn.Module):
    """A plain module without a config, as Transformers' own trainer tests have it."""

    def __init__(self) -> None:
        super().__init__()
        self.slope, self.offset = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        y = self.slope * x + self.offset
        return ((y - labels) ** 2).mean(), y


def points() -> list[dict[str, Tensor]]:
    return [{"x": torch.tensor(i / 8), "labels": torch.tensor(i / 4 + 3)} for i in range(16)]


def dense() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=384, **sizes))


def adapted() -> Any:
    """Two adapters of their own names: PEFT writes each into a folder."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=["q_proj"])
    model = get_peft_model(dense(), config, "one")
    model.add_adapter("two", config)
    return model


def outcome(trainer: Any, resume: str | None = None) -> dict[str, Any]:
    trainer.train(resume_from_checkpoint=resume)
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    return {"losses": losses, "weights": {name: p.detach().clone() for name, p in trainer.model.named_parameters()}}


def doors(turbo: bool, moe: str, folder: str) -> dict[str, Any]:
    """In one plain process: every door, through our classes or through the stock ones."""
    import transformers
    import trl
    from datasets import Dataset
    from peft import PromptTuningConfig

    import hf_fsdpturbo
    from tests.support.reference_run import forget_accelerate

    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(moe)
    trainer_class = hf_fsdpturbo.FSDPTurboTrainer if turbo else transformers.Trainer
    sft_class = hf_fsdpturbo.FSDPTurboSFTTrainer if turbo else trl.SFTTrainer
    text = Dataset.from_dict({"text": texts(16)})
    found: dict[str, Any] = {}

    def line(name: str, resume: str | None = None, **args: Any) -> Any:
        forget_accelerate()
        stock = transformers.TrainingArguments(**{**ARGS, "output_dir": f"{folder}/{name}", **args})
        model = {} if name == "model_init" else {"model": Line()}
        maker = {"model_init": lambda: Line()} if name == "model_init" else {}
        trainer = trainer_class(**model, args=stock, train_dataset=points(), **maker)
        found[name] = outcome(trainer, resume)
        return trainer

    def sft(name: str, model: Any, resume: str | None = None, adapter: Any = None, **args: Any) -> None:
        forget_accelerate()
        stock = trl.SFTConfig(**{**ARGS, "max_length": 48, "output_dir": f"{folder}/{name}", **args})
        trainer = sft_class(model, args=stock, train_dataset=text, processing_class=tokenizer, peft_config=adapter)
        found[name] = outcome(trainer, resume)

    plain = line("plain module")
    plain.save_model(f"{folder}/saved")
    line("plain module resumed", f"{folder}/plain module/checkpoint-2")
    line("model_init")
    line("auto_find_batch_size", auto_find_batch_size=True)
    sft("use_reentrant", dense(), gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True})
    sft("SFTConfig", dense(), optim="adafactor")
    sft("torch_compile", dense(), torch_compile=True, torch_compile_backend="eager", max_steps=2)
    prompt = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    sft("prompt tuning", dense(), adapter=prompt)
    sft("prompt tuning resumed", dense(), f"{folder}/prompt tuning/checkpoint-2", adapter=prompt)
    sft("stacked experts", moe)
    sft("stacked experts resumed", moe, f"{folder}/stacked experts/checkpoint-2")
    sft("two adapters", adapted())
    sft("two adapters resumed", adapted(), f"{folder}/two adapters/checkpoint-2")
    os.chdir(folder)
    forget_accelerate()
    found["no args"] = trainer_class(Line(), train_dataset=points()).args.output_dir
    folders = ("plain module/checkpoint-2", "saved", "SFTConfig/checkpoint-2")
    found["files"] = {name: sorted(os.listdir(f"{folder}/{name}")) for name in folders}
    return found


@pytest.fixture(scope="module")
def both(tiny, tmp_path_factory) -> tuple[dict[str, Any], dict[str, Any]]:
    moe = tiny("qwen3_moe")
    ours, stock = (str(tmp_path_factory.mktemp(name)) for name in ("ours", "stock"))
    return run_plain(doors, True, moe, ours, timeout=90), run_plain(doors, False, moe, stock, timeout=90)


DOORS = ["plain module", "plain module resumed", "model_init", "auto_find_batch_size", "use_reentrant", "SFTConfig"]
DOORS += ["torch_compile", "stacked experts", "prompt tuning", "prompt tuning resumed"]
DOORS += ["two adapters", "two adapters resumed"]


@pytest.mark.parametrize("door", DOORS)
def test_item_5_does_what_plain_does(both, door: str):
    ours, stock = both[0][door], both[1][door]
    assert len(ours["losses"]) == (2 if door == "torch_compile" else 4)
    assert ours["losses"] == stock["losses"]
    assert not [name for name, weight in stock["weights"].items() if not torch.equal(ours["weights"][name], weight)]


def test_s12_a_plain_module_saves_its_tensors_and_resumes(both):
    ours = both[0]
    assert ours["plain module"]["losses"] == ours["plain module resumed"]["losses"]
    assert torch.equal(*(ours[name]["weights"]["slope"] for name in ("plain module", "plain module resumed")))
    assert "model.safetensors" in ours["files"]["saved"]


def test_item_7_one_process_writes_plain_trainers_files(both):
    for name, files in both[0]["files"].items():
        assert [file for file in files if file != "COMPLETE.json"] == both[1]["files"][name]


def test_stacked_experts_resume_from_plain_files_where_stock_trainer_forgets_them(both):
    """Transformers 5.24 reads a checkpoint's files by the model's names, and per-expert keys are others."""
    ours, stock = both
    assert ours["stacked experts"]["losses"] == ours["stacked experts resumed"]["losses"]
    weights = [ours[name]["weights"] for name in ("stacked experts", "stacked experts resumed")]
    assert not [name for name in weights[0] if not torch.equal(weights[0][name], weights[1][name])]
    assert stock["stacked experts"]["losses"] != stock["stacked experts resumed"]["losses"], "upstream has mended it"


def test_item_5_no_args(both):
    assert both[0]["no args"] == both[1]["no args"] == "tmp_trainer"

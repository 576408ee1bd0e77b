"""The mixin put by a user in front of a TRL trainer that has no class of ours: KTO, reference sharded as in DPO."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import Any

import pytest
from torch.distributed.tensor import DTensor

from tests.support.preference_runs import pairs, values
from tests.support.reference_run import DEFAULT_ARGS, forget_accelerate
from tests.support.spawn import RankError, run_ranks


def rows() -> dict[str, list[Any]]:
    data = pairs(24)
    texts = [text for pair in zip(data["chosen"], data["rejected"], strict=True) for text in pair]
    prompts = [prompt for prompt in data["prompt"] for _ in range(2)]
    return {"prompt": prompts, "completion": texts, "label": [True, False] * 24}


def classes(turbo: bool) -> tuple[type, type]:
    """What a user writes."""
    from trl import KTOConfig, KTOTrainer

    if not turbo:
        return KTOTrainer, KTOConfig
    from hf_fsdpturbo import FSDPTurboArguments, FSDPTurboTrainerMixin

    @dataclass
    class MyKTOConfig(FSDPTurboArguments, KTOConfig):
        pass

    class MyKTOTrainer(FSDPTurboTrainerMixin, KTOTrainer):
        pass

    return MyKTOTrainer, MyKTOConfig


def build(path: str, folder: str, turbo: dict[str, Any], args: dict[str, Any], lora: bool = False) -> Any:
    from datasets import Dataset

    from tests.support.adapter_runs import lora as lora_config
    from tests.support.tiny_models import tiny_tokenizer

    forget_accelerate()
    trainer_class, config_class = classes(bool(turbo))
    own = turbo or {"ddp_find_unused_parameters": True}
    config = config_class(output_dir=tempfile.mkdtemp(), **{**DEFAULT_ARGS, "max_length": 48, **own, **args})
    return trainer_class(
        model=path,
        args=config,
        train_dataset=Dataset.load_from_disk(folder),
        processing_class=tiny_tokenizer(),
        peft_config=lora_config() if lora else None,
    )


def train(path: str, folder: str, turbo: dict[str, Any], jobs: list[dict[str, Any]]) -> list[Any]:
    """Rank function: for each job the logs, and elements of policy and reference on this rank."""

    def local(model: Any) -> int:
        return sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in model.parameters())

    result = []
    for job in jobs:
        trainer = build(path, folder, turbo, **job)
        trainer.train()
        sizes = None if trainer.ref_model is None else (local(trainer.model), local(trainer.ref_model))
        result.append((trainer.state.log_history, sizes))
    return result


JOBS: dict[str, dict[str, Any]] = {
    "kto": {"args": {"gradient_accumulation_steps": 2}},
    "apo": {"args": {"loss_type": "apo_zero_unpaired"}},
    "precomputed": {"args": {"precompute_ref_log_probs": True}},
    "lora": {"args": {}, "lora": True},
}


@pytest.fixture(scope="module")
def logs(tiny, tmp_path_factory):
    from datasets import Dataset

    path, folder = tiny("qwen3_moe"), str(tmp_path_factory.mktemp("kto"))
    Dataset.from_dict(rows()).save_to_disk(folder)
    jobs = list(JOBS.values())
    turbo = {"ep_size": 2, "fsdpturbo_metrics": False}  # off, a log line is TRL's
    ours = run_ranks(train, 2, path, folder, turbo, jobs, timeout=150)
    stock = run_ranks(train, 2, path, folder, {}, jobs, timeout=150)[0]
    return dict(zip(JOBS, zip(ours[0], stock, strict=True), strict=True))


@pytest.mark.parametrize("name", JOBS)
def test_logs_are_stock(logs, name):
    """Loss, gradient norm, rewards, KL over three steps as stock TRL logs them on the same ranks."""
    (ours, sizes), (stock, whole) = logs[name]
    ours, stock = values(ours), values(stock)
    assert [sorted(log) for log in ours] == [sorted(log) for log in stock]
    assert len([log for log in ours if "loss" in log]) == 3
    for log, other in zip(ours, stock, strict=True):
        for key, value in log.items():
            assert value == pytest.approx(other[key], rel=1e-4, abs=5e-6), key
    if name in ("kto", "apo"):
        assert sizes[0] == sizes[1] < whole[1]


def grpo(path: str) -> None:
    """Rank function."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from hf_fsdpturbo import FSDPTurboArguments, FSDPTurboTrainerMixin
    from tests.support.tiny_models import tiny_tokenizer

    @dataclass
    class MyConfig(FSDPTurboArguments, GRPOConfig):
        pass

    class MyTrainer(FSDPTurboTrainerMixin, GRPOTrainer):
        pass

    config = MyConfig(output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, report_to="none", ep_size=2, beta=0.1)
    data = Dataset.from_dict({"prompt": ["one", "two"]})
    MyTrainer(
        model=path,
        args=config,
        reward_funcs=lambda completions, **kwargs: [0.0] * len(completions),
        train_dataset=data,
        processing_class=tiny_tokenizer(),
    )


def test_trainers_that_load_a_reference_of_their_own_are_refused(tiny):
    """GRPO would load a whole reference on every rank, and generates; it is not built."""
    with pytest.raises(RankError) as caught:
        run_ranks(grpo, 2, tiny("qwen3_moe"), timeout=60)
    assert caught.value.kind == "ValueError"
    assert "GRPOTrainer" in caught.value.text

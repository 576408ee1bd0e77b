"""Model objects, optimizers and trainers of the user's own: sharded as a path would be, or refused on every rank."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch

from tests.support.records import DEFAULT_ARGS
from tests.support.spawn import run_plain, run_ranks
from tests.support.tiny_models import tiny_config

ROWS = [{"input_ids": list(range(5 + i, 25 + i)), "labels": list(range(5 + i, 25 + i))} for i in range(8)]
FAMILIES = ("qwen3_moe", "deepseek_v3", "qwen3_5_moe")  # the second keeps a router bias (a buffer) in float32


def arguments(**fields: Any) -> Any:
    from hf_fsdpturbo import FSDPTurboTrainingArguments
    from tests.support.reference_run import forget_accelerate

    forget_accelerate()
    return FSDPTurboTrainingArguments(**{**DEFAULT_ARGS, "output_dir": tempfile.mkdtemp(), **fields})


def loaded(path: str, **kwargs: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, **kwargs)


def said_by(attempt: Any) -> tuple[str, str]:
    try:
        attempt()
        return "", "no error"
    except Exception as error:  # noqa: BLE001  (the test says which class it has to be)
        return type(error).__name__, str(error)


# Storage


def stored(paths: dict[str, str]) -> dict:
    """Rank function: dtypes of all parameters and buffers, and the rotary frequencies, of path, object and PEFT."""
    from hf_fsdpturbo import FSDPTurboTrainer

    result = {}
    for family, path in paths.items():
        for storage in ("bfloat16", "float32"):
            for kind in ("path", "object"):
                source = path if kind == "path" else loaded(path, dtype=torch.float32)
                args = arguments(dist_config={"param_storage_dtype": storage})
                model = FSDPTurboTrainer(source, args=args, train_dataset=ROWS).model
                tensors = (*model.named_parameters(), *model.named_buffers())
                frequencies = [b.clone() for name, b in model.named_buffers() if "inv_freq" in name]
                result[family, storage, kind] = ({name: str(t.dtype) for name, t in tensors}, frequencies)
    return result


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_object_is_stored_as_a_path_is(tiny, world_size: int):
    paths = {family: tiny(family) for family in FAMILIES}
    found = run_plain(stored, paths) if world_size == 1 else run_ranks(stored, 2, paths)[0]
    for family in FAMILIES:
        for storage in ("bfloat16", "float32"):
            dtypes, frequencies = found[family, storage, "object"]
            expected, exact = found[family, storage, "path"]
            assert dtypes == expected, family
            assert dtypes["model.embed_tokens.weight"] == f"torch.{storage}"
            assert exact
            assert all(torch.equal(a, b) for a, b in zip(frequencies, exact, strict=True))


# Other objects on other ranks


def differing_objects() -> dict[str, tuple[str, str]]:
    """Rank function."""
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    from hf_fsdpturbo import FSDPTurboTrainer

    result = {}
    for name in ("same", "other seed", "one buffer", "one shape"):
        args = arguments(ep_size=1)
        odd = dist.get_rank() == 1
        torch.manual_seed(1 if odd and name == "other seed" else 0)
        model = AutoModelForCausalLM.from_config(tiny_config("deepseek_v3"))
        if odd and name == "one shape":
            model.model.norm.weight = torch.nn.Parameter(torch.ones(33))
        if odd and name == "one buffer":
            model.model.layers[1].mlp.gate.e_score_correction_bias += 0.5
        result[name] = said_by(lambda: FSDPTurboTrainer(model, args=args, train_dataset=ROWS))  # noqa: B023
    return result


def test_other_weights_on_another_rank_are_refused_on_both():
    first, second = run_ranks(differing_objects, 2)
    assert first == second
    assert first.pop("same")[0] == ""
    named = {
        "other seed": "model.embed_tokens.weight",
        "one buffer": "model.layers.1.mlp.gate.e_score_correction_bias",
        "one shape": "model.norm.weight",
    }
    for name, (kind, message) in first.items():
        assert kind == "ValueError", (name, message)
        assert "on rank 1 than on rank 0" in message
        assert named[name] in message
        assert "same seed" in message


# Optimizers


def given_optimizers(path: str) -> dict[str, tuple[str, str]]:
    """Rank function, or in one process."""
    from hf_fsdpturbo import FSDPTurboSFTConfig, FSDPTurboSFTTrainer, FSDPTurboTrainer
    from tests.support.reference_run import forget_accelerate
    from tests.support.tiny_models import text_dataset, tiny_tokenizer

    def pair(model: Any) -> tuple[Any, Any]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

    def plain(choose: Any) -> Any:
        model = loaded(path)
        optimizers = choose(*pair(model))
        return FSDPTurboTrainer(model, args=arguments(), train_dataset=ROWS, optimizers=optimizers)

    def sft() -> Any:
        forget_accelerate()
        args = FSDPTurboSFTConfig(**{**DEFAULT_ARGS, "output_dir": tempfile.mkdtemp()})
        model = loaded(path)
        own = {"train_dataset": text_dataset(4), "processing_class": tiny_tokenizer()}
        return FSDPTurboSFTTrainer(model, args=args, optimizers=(pair(model)[0], None), **own)

    def groups() -> Any:
        model = loaded(path)
        own = {"params": [{"params": list(model.parameters()), "lr": 1e-2}]}
        return FSDPTurboTrainer(
            model, args=arguments(), train_dataset=ROWS, optimizer_cls_and_kwargs=(torch.optim.AdamW, own)
        )

    return {
        "groups": said_by(lambda: groups().train()),
        "none": said_by(lambda: plain(lambda optimizer, scheduler: (None, None)).train()),
        "optimizer": said_by(lambda: plain(lambda optimizer, scheduler: (optimizer, None)).train()),
        "scheduler": said_by(lambda: plain(lambda optimizer, scheduler: (None, scheduler))),
        "both": said_by(lambda: plain(lambda optimizer, scheduler: (optimizer, scheduler)).train()),
        "sft": said_by(sft),
    }


def test_an_optimizer_of_unsharded_parameters_is_refused(tiny):
    """S4 (``groups``): parameters of the model object that was given train nothing."""
    for rank in run_ranks(given_optimizers, 2, tiny("qwen3_moe")):
        assert rank.pop("none")[0] == ""
        kind, message = rank.pop("groups")
        assert kind == "ValueError"
        assert "25 parameters" in message
        assert "create_optimizer" in message
        for name, (kind, message) in rank.items():
            assert kind == "ValueError", (name, message)
            for part in ("optimizers", "optimizer_cls_and_kwargs", "create_optimizer"):
                assert part in message, name


def test_one_process_takes_an_optimizer(tiny):
    assert {kind for kind, _ in run_plain(given_optimizers, tiny("qwen3_moe")).values()} == {""}


# Trainers of the user's own


def own_trainers(path: str) -> dict[str, Any]:
    """Rank function: what each trainer says, and how its experts are stored."""
    from transformers import Trainer

    from hf_fsdpturbo import FSDPTurboTrainerMixin

    class Anything(Trainer):
        def __init__(self, *args: Any, alpha: float = 1.0, **kw: Any) -> None:
            super().__init__(*args, **kw)

    class Keywords(Trainer):
        def __init__(self, args: Any = None, train_dataset: Any = None, **kw: Any) -> None:
            super().__init__(args=args, train_dataset=train_dataset, **kw)

    class Maker(Trainer):
        def __init__(self, args: Any = None, train_dataset: Any = None) -> None:
            super().__init__(loaded(path), args=args, train_dataset=train_dataset)

    class Replacer(Trainer):
        def __init__(self, model: Any = None, args: Any = None, train_dataset: Any = None) -> None:
            super().__init__(loaded(path), args=args, train_dataset=train_dataset)

    def build(base: type, *args: Any, **kwargs: Any) -> Any:
        return type("Own", (FSDPTurboTrainerMixin, base), {})(*args, train_dataset=ROWS, **kwargs)

    def config() -> Any:
        return arguments(ep_size=2)

    result: dict[str, Any] = {}
    for base in (Anything, Keywords):
        for source in (path, loaded(path)):
            trainer = build(base, model=source, args=config())
            trainer.train()
            experts = trainer.model.model.layers[0].mlp.experts.gate_up_proj
            name = f"{base.__name__} {type(source).__name__}"
            result[name] = (tuple(experts.shape), tuple(experts.to_local().shape), experts.device_mesh.size())
    result["model_init"] = said_by(lambda: build(Keywords, args=config(), model_init=lambda: loaded(path)))
    result["positional"] = said_by(lambda: build(Anything, path, config()))
    result["maker"] = said_by(lambda: build(Maker, args=config()))
    result["replacer"] = said_by(lambda: build(Replacer, model=path, args=config()))
    return result


def test_trainers_that_pass_keywords_on(tiny):
    for rank in run_ranks(own_trainers, 2, tiny("qwen3_moe")):
        parts = {"model_init": "model_init", "positional": "by keyword"}
        parts |= {"maker": "not sharded", "replacer": "not sharded"}
        for name, part in parts.items():
            kind, message = rank.pop(name)
            assert kind == "ValueError", (name, message)
            assert part in message
        assert len(rank) == 4
        for whole, local, size in rank.values():
            assert (whole[0], local[0], size) == (8, 4, 2)


# What is said in the summary


def notes(path: str) -> dict[str, Any]:
    """Rank function."""
    from torch.distributed.tensor import DTensor

    from hf_fsdpturbo import FSDPTurboTrainer

    def of(source: Any, **fields: Any) -> Any:
        return FSDPTurboTrainer(source, args=arguments(ep_size=2, **fields), train_dataset=ROWS)

    half = of(loaded(path, dtype=torch.bfloat16))
    policies = reduce_dtypes(half.model)
    half.train()
    full = of(loaded(path, dtype=torch.float32))
    experts = {"fsdp_ignored_modules": ["model.layers.{*}.mlp.experts"]}
    return {
        "half": half.sharding_report.notes,
        "policies": policies,
        "gradients": {str(p.dtype) for p in half.model.parameters() if isinstance(p, DTensor)},
        "full": full.sharding_report.notes,
        "full policies": reduce_dtypes(full.model),
        "init": of(loaded(path), init_config={"name": "init_on_rank0"}).sharding_report.notes,
        "only experts": said_by(lambda: of(path, dist_config=experts)),
    }


def reduce_dtypes(model: Any) -> set[str]:
    from torch.distributed.fsdp import FSDPModule

    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    return {str(unit._get_fsdp_state()._mp_policy.reduce_dtype) for unit in units}


def test_what_has_no_effect_or_is_unusual_is_said(tiny):
    for rank in run_ranks(notes, 2, tiny("qwen3_moe")):
        assert any("bf16=False" in note and "torch.bfloat16" in note for note in rank["half"])
        assert rank["policies"] == {"torch.float32"}
        assert rank["full"] == []
        assert rank["full policies"] == {"None"}
        assert any("init_on_rank0 has no effect" in note for note in rank["init"])
        kind, message = rank["only experts"]
        assert kind == "ValueError"
        assert "names only experts" in message

"""What our trainer class overrides exists upstream under that name with those arguments; what is ours does not.

A hook that upstream renames is dead code here, and a method that upstream adds under one of our names would be
replaced by ours: both in silence. Neither table below has an exception for a name that is missing.
"""

from __future__ import annotations

import ast
import inspect
import textwrap

import pytest
from transformers import Trainer
from trl import DPOTrainer, KTOTrainer, RewardTrainer, SFTTrainer

import hf_fsdpturbo

UPSTREAM = (Trainer, SFTTrainer, DPOTrainer, KTOTrainer, RewardTrainer)

# Every override, with the arguments upstream gives it. `__init__` takes whatever the parent takes, by signature.
OVERRIDES = {
    "_clip_grad_norm": "self model",
    "_get_dataloader": "self dataset description batch_size sampler_fn is_training dataloader_key",
    "_get_grad_norm": "self model grad_norm",
    "_get_num_items_in_batch": "self batch_samples device",
    "_get_output_dir": "self trial",
    "_init_training_state": "self max_steps num_update_steps_per_epoch num_train_epochs resume_from_checkpoint trial",
    "_load_best_model": "self",
    "_load_from_checkpoint": "self resume_from_checkpoint model",
    "_load_optimizer_and_scheduler": "self checkpoint",
    "_load_rng_state": "self checkpoint",
    "_load_scaler": "self checkpoint",
    "_move_model_to_device": "self model device",
    "_prepare_inputs": "self inputs",
    "_push_from_checkpoint": "self checkpoint_folder",
    "_save_checkpoint": "self model trial",
    "_save_optimizer_and_scheduler": "self output_dir",
    "_save_rng_state": "self output_dir",
    "_save_scaler": "self output_dir",
    "_track_num_input_tokens": "self inputs",
    "call_model_init": "self trial",
    "compute_loss": "self model inputs return_outputs num_items_in_batch",
    "create_accelerator_and_postprocess": "self",
    "create_optimizer": "self model",
    "get_batch_samples": "self epoch_iterator num_batches device",
    "log": "self logs start_time",
    "evaluation_loop": "self dataloader description prediction_loss_only ignore_keys metric_key_prefix",
    "get_tp_size": "self",
    "hyperparameter_search": "self hp_space compute_objective n_trials direction backend hp_name kwargs",
    "init_hf_repo": "self token private",
    "prediction_step": "self model inputs prediction_loss_only ignore_keys",
    "save_model": "self output_dir _internal_call",
    "training_step": "self model inputs num_items_in_batch",
    "train": "self resume_from_checkpoint trial ignore_keys_for_eval",
}

# Upstream's methods that we call without overriding them.
CALLED = {
    "_save": "self output_dir state_dict",
    "get_cp_size": "self",
}

HANDS_ON = ["self", "args", "kwargs"]  # TRL's override passes on what it gets

# Attributes of upstream's trainers that ours sets on purpose.
SET_ON_PURPOSE = {"gather_function", "optimizer"}


def arguments(function) -> list[str]:
    return list(inspect.signature(function).parameters)


def our_classes() -> list[type]:
    """Classes of this package among the bases of its trainers, without those that upstream's names live in."""
    from hf_fsdpturbo import trl

    doors = [hf_fsdpturbo.FSDPTurboTrainer, hf_fsdpturbo.FSDPTurboTrainerMixin]
    doors += [value for name, value in vars(trl).items() if name.startswith("FSDPTurbo") and name.endswith("Trainer")]
    bases = dict.fromkeys(base for door in doors for base in inspect.getmro(door))
    return [base for base in bases if base.__module__.startswith("hf_fsdpturbo")]


def is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def set_on_self(owner: type) -> set[str]:
    """Attributes that a class assigns on ``self`` anywhere in its source."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def names_of(owner: type) -> set[str]:
    """Methods, class attributes and attributes set on ``self``, of a class and its bases."""
    own = {base for base in inspect.getmro(owner) if base is not object and not is_builtin(base)}
    return {name for name in dir(owner) if not is_special(name)} | {x for base in own for x in set_on_self(base)}


def is_builtin(owner: type) -> bool:
    return owner.__module__ in ("builtins", "typing", "abc")


def our_names() -> set[str]:
    """All names that our classes define or set on the trainer."""
    defined = {name for owner in our_classes() for name in vars(owner) if not is_special(name)}
    return defined | {name for owner in our_classes() for name in set_on_self(owner)}


def missing_upstream(trainer: type) -> list[str]:
    """What the tables promise and ``trainer`` does not have, or has with other arguments."""
    faults = []
    for name, expected in {**OVERRIDES, **CALLED}.items():
        theirs = getattr(trainer, name, None)
        if theirs is None:
            faults.append(f"{trainer.__name__} has no {name}: our override is dead code")
        elif arguments(theirs) not in (expected.split(), HANDS_ON):
            faults.append(f"{trainer.__name__}.{name}{arguments(theirs)} was {expected.split()}")
    return faults


def taken_upstream(trainer: type) -> list[str]:
    """Names of ours, overrides apart, that ``trainer`` has too."""
    return sorted((our_names() - OVERRIDES.keys() - SET_ON_PURPOSE) & names_of(trainer))


@pytest.mark.parametrize("trainer", UPSTREAM, ids=lambda trainer: trainer.__name__)
def test_every_override_exists_upstream(trainer):
    assert missing_upstream(trainer) == []


@pytest.mark.parametrize("hook", sorted(OVERRIDES))
def test_a_hook_renamed_upstream_is_seen(hook: str):
    hooks = {name: getattr(Trainer, name) for name in (*OVERRIDES, *CALLED)}
    hooks[f"{hook}_v2"] = hooks.pop(hook)
    (fault,) = missing_upstream(type("Renamed", (), hooks))
    assert fault.startswith(f"Renamed has no {hook}:")


def test_a_hook_with_other_arguments_is_seen():
    class Changed(Trainer):
        def _save_scaler(self, output_dir, step):
            pass

    (fault,) = missing_upstream(Changed)
    assert "Changed._save_scaler" in fault


def test_the_table_is_what_we_override():
    """Both ways: a row without a method of ours is stale, an override without a row is not watched."""
    defined = {name for owner in our_classes() for name in vars(owner)}
    assert sorted(OVERRIDES.keys() - defined) == []
    upstream = {name for trainer in UPSTREAM for name in dir(trainer)}
    assert sorted(name for name in defined & upstream if not is_special(name)) == sorted(OVERRIDES)


def test_one_class_holds_every_override():
    """The others are doors: they put it in front of a trainer, and say what kind of scalars that one gathers."""
    for owner in our_classes():
        if owner is not hf_fsdpturbo.FSDPTurboTrainerMixin:
            assert {name for name in vars(owner) if not is_special(name)} <= {"scalars_are_means"}, owner.__name__


def test_our_overrides_take_what_upstream_passes():
    """By position and by name: ours are upstream's first arguments, and all of them or the rest as ``*args``."""
    for owner in our_classes():
        for name in OVERRIDES.keys() & vars(owner).keys():
            ours = inspect.signature(vars(owner)[name]).parameters.values()
            named = [parameter.name for parameter in ours if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
            theirs = OVERRIDES[name].split()
            assert named == theirs[: len(named)], f"{owner.__name__}.{name}"
            rest = {parameter.kind for parameter in ours} >= {inspect.Parameter.VAR_POSITIONAL}
            assert rest or named == theirs, f"{owner.__name__}.{name} does not take {theirs[len(named) :]}"


@pytest.mark.parametrize("trainer", UPSTREAM, ids=lambda trainer: trainer.__name__)
def test_none_of_our_own_names_appears_upstream(trainer):
    assert len(our_names() - OVERRIDES.keys()) > 5, "the reading finds our names"
    assert taken_upstream(trainer) == []


def test_a_method_of_ours_that_appears_upstream_is_seen():
    own = sorted(name for owner in our_classes() for name in vars(owner) if not is_special(name))
    name = next(name for name in own if name not in OVERRIDES)
    assert taken_upstream(type("Newer", (), {name: lambda self: None, "__module__": "builtins"})) == [name]


def test_an_attribute_of_ours_that_appears_upstream_is_seen():
    class Newer(Trainer):
        def __init__(self):
            self.parallel_state = None

    assert taken_upstream(Newer) == ["parallel_state"]


def test_attributes_set_on_purpose_are_upstreams():
    assert names_of(Trainer) >= SET_ON_PURPOSE

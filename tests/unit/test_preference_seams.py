"""What our DPO, reward and LoRA code leans on in TRL, PEFT and Transformers: a new release fails here, not later."""

import inspect

import pytest
from transformers import PreTrainedModel
from trl.trainer import dpo_trainer, kto_trainer, reward_trainer, sft_trainer, utils

from hf_fsdpturbo import FSDPTurboDPOTrainer, FSDPTurboRewardTrainer, FSDPTurboSFTTrainer, FSDPTurboTrainerMixin
from hf_fsdpturbo.parallelize.trainer_family import ONLINE_TRAINERS
from hf_fsdpturbo.trainer.reference import trainer_functions_replaced


@pytest.mark.parametrize("module", [dpo_trainer, kto_trainer])
def test_the_reference_is_hashed_through_a_module_global(module):
    assert module.hash_module is utils.hash_module
    assert list(inspect.signature(utils.hash_module).parameters) == ["module"]


@pytest.mark.parametrize("module", [dpo_trainer, kto_trainer, reward_trainer, sft_trainer])
def test_adapters_are_made_through_a_module_global(module):
    peft = pytest.importorskip("peft")
    assert module.get_peft_model is peft.get_peft_model


def test_templates_are_cloned_through_a_module_global():
    from trl import chat_template_utils

    assert sft_trainer.clone_chat_template is chat_template_utils.clone_chat_template
    taken = list(inspect.signature(sft_trainer.clone_chat_template).parameters)
    assert taken[:3] == ["model", "tokenizer", "source_tokenizer_path"]
    source = inspect.getsource(sft_trainer.clone_chat_template)
    for name in ("chat_template", "eos_token", "eos_token_id"):
        assert f".{name} = " in source


@pytest.mark.parametrize("trainer", [dpo_trainer.DPOTrainer, reward_trainer.RewardTrainer, sft_trainer.SFTTrainer])
def test_data_sets_are_prepared_by_a_method_of_that_name(trainer):
    assert trainer._prepare_dataset.__module__.startswith("trl.")


@pytest.mark.parametrize("module", [dpo_trainer, kto_trainer, reward_trainer, sft_trainer])
def test_data_is_prepared_through_a_module_global(module):
    assert module.global_then_local_main_first is utils.global_then_local_main_first
    assert not inspect.signature(utils.global_then_local_main_first).parameters
    assert "with global_then_local_main_first():" in inspect.getsource(module)


def test_functions_are_replaced_for_the_length_of_the_context_only():
    def ours(*args, **kwargs):
        raise AssertionError

    own = dpo_trainer.hash_module, dpo_trainer.get_peft_model, reward_trainer.get_peft_model
    with trainer_functions_replaced(FSDPTurboDPOTrainer, hash_module=ours, get_peft_model=ours):
        assert dpo_trainer.hash_module is ours
        assert dpo_trainer.get_peft_model is ours
        assert reward_trainer.get_peft_model is own[2]
    assert (dpo_trainer.hash_module, dpo_trainer.get_peft_model, reward_trainer.get_peft_model) == own
    with trainer_functions_replaced(FSDPTurboRewardTrainer, hash_module=ours):
        assert not hasattr(reward_trainer, "hash_module")


def test_trainers_that_are_refused_exist_under_their_names():
    import trl

    assert all(hasattr(trl, name) for name in ONLINE_TRAINERS)


@pytest.mark.parametrize("trainer", [FSDPTurboDPOTrainer, FSDPTurboRewardTrainer, FSDPTurboSFTTrainer])
def test_our_overrides_come_first(trainer):
    names = [cls.__name__ for cls in trainer.__mro__]
    assert names.index("FSDPTurboTrainerMixin") < names.index("Trainer")
    assert trainer.evaluation_loop is FSDPTurboTrainerMixin.evaluation_loop


def test_evaluation_hooks_have_the_arguments_we_pass():
    from transformers import Trainer

    step = list(inspect.signature(Trainer.prediction_step).parameters)
    assert step == ["self", "model", "inputs", "prediction_loss_only", "ignore_keys"]
    assert "self.gather_function(losses.repeat(batch_size))" in inspect.getsource(Trainer.evaluation_loop)


def test_a_missing_head_is_drawn_through_the_instance():
    assert "self._init_weights(module)" in inspect.getsource(PreTrainedModel._initialize_weights)


def test_peft_keeps_what_expert_lora_reads():
    pytest.importorskip("peft")
    from peft.tuners.lora.layer import LoraLayer, ParamWrapper
    from peft.tuners.tuners_utils import BaseTuner

    assert list(inspect.signature(LoraLayer.reset_lora_parameters).parameters) == [
        "self", "adapter_name", "init_lora_weights",
    ]  # fmt: skip
    assert "baddbmm" in inspect.getsource(inspect.getmodule(ParamWrapper))
    assert "self.model(*args" in inspect.getsource(BaseTuner.forward), "calls must pass through FSDP's root hooks"


def test_names_of_peft_that_lora_reads():
    """lora/adapter.py finds PEFT's wrappers by class, and what they wrap by attribute."""
    peft = pytest.importorskip("peft")
    import torch
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    base = torch.nn.ModuleDict({"first": torch.nn.Linear(2, 2), "second": torch.nn.Linear(2, 2)})
    first, second = base["first"], base["second"]
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["first"], modules_to_save=["second"]), base)
    assert isinstance(base["first"], BaseTunerLayer)
    assert base["first"].get_base_layer() is first
    assert issubclass(peft.utils.ModulesToSaveWrapper, AuxiliaryTrainingWrapper)
    wrapper = peft.utils.ModulesToSaveWrapper(second, "default")
    assert wrapper.original_module is second
    assert list(wrapper.modules_to_save) == ["default"]


def test_trl_keeps_a_reference_adapter_in_a_peft_model():
    """It adds an adapter ``ref`` and copies the trained one into it; for the reference it calls ``set_adapter``."""
    from peft import PeftModel
    from trl.trainer.utils import use_adapter

    text = inspect.getsource(dpo_trainer.DPOTrainer.__init__)
    assert 'model.add_adapter("ref", default_config)' in text
    assert 'name.replace(".default.", ".ref.")' in text
    assert "model.set_adapter(adapter_name)" in inspect.getsource(use_adapter)
    assert list(inspect.signature(PeftModel.add_adapter).parameters)[:3] == ["self", "adapter_name", "peft_config"]

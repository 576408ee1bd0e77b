"""Names of accelerate that we lean on, most of them in evaluation: a new release fails here, by name."""

from __future__ import annotations

import inspect

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader


def arguments(function) -> list[str]:
    return list(inspect.signature(function).parameters)


def source(function) -> str:
    return inspect.getsource(function)


# Models, loaders, run (trainer/mixin.py, parallel_state.py)



def test_prepared_models_pass_through():
    text = source(Accelerator.prepare_model)
    assert "evaluation_mode" in arguments(Accelerator.prepare_model)
    assert "_is_accelerate_prepared" in source(Accelerator.prepare) + text + source(Accelerator._prepare_one)


def test_loader_reads_axis_names_of_the_state_mesh():
    from accelerate import data_loader

    text = source(data_loader.prepare_data_loader)
    assert "torch_device_mesh" in arguments(data_loader.prepare_data_loader)
    for axis in ('"dp_shard"', '"cp"', '"tp"'):
        assert axis in text or axis.replace('"', "'") in text, axis
    assert "state.device_mesh" in source(Accelerator.prepare_data_loader) or "torch_device_mesh" in source(Accelerator)


def test_distributed_type_names():
    from accelerate.utils import DistributedType

    names = {member.name for member in DistributedType}
    assert {"FSDP", "DEEPSPEED", "MEGATRON_LM", "MULTI_GPU", "MULTI_CPU", "MULTI_NPU"} <= names


# Gathering (trainer/batches.py, trainer/evaluation.py): replaced on the accelerator itself


@pytest.fixture
def accelerator():
    return Accelerator(cpu=True)


def test_arguments_of_gather():
    assert arguments(Accelerator.gather) == ["self", "tensor"]
    assert arguments(Accelerator.gather_for_metrics) == ["self", "input_data", "use_gather_object"]


def test_gather_for_metrics_gathers_through_the_instance(accelerator):
    """So a ``gather`` that drops copies acts inside of it, before repeats are cut at the end."""
    seen = []
    gather = accelerator.gather
    accelerator.gather = lambda data: seen.append(data) or gather(data)
    rows = torch.arange(3)
    assert torch.equal(accelerator.gather_for_metrics({"rows": rows})["rows"], rows)
    assert [list(data) for data in seen] == [["rows"]]


def test_callers_look_gather_up_on_the_accelerator():
    """Trainer keeps one bound function, ``gather_function``, which is why that is set too; TRL keeps none."""
    from transformers import Trainer
    from trl import DPOTrainer, KTOTrainer, RewardTrainer, SFTTrainer

    text = source(Trainer.create_accelerator_and_postprocess)
    assert "self.gather_function = self.accelerator.gather_for_metrics" in text
    assert "use_gather_object=self.args.eval_use_gather_object" in text
    assert "self.gather_function = self.accelerator.gather_for_metrics" in source(Trainer.evaluation_loop)
    for trainer in (SFTTrainer, DPOTrainer, KTOTrainer, RewardTrainer):
        assert "self.accelerator.gather" in source(trainer), trainer.__name__
        assert "= self.accelerator.gather\n" not in source(trainer), f"{trainer.__name__} keeps a bound gather"


def test_gradient_state_knows_the_repeats_of_the_last_batch(accelerator):
    """5 samples by 2: in the last batch, and only there, ``remainder`` is 1 real sample."""
    loader = accelerator.prepare(DataLoader(torch.arange(5), batch_size=2))
    state = accelerator.gradient_state
    seen = [(state.end_of_dataloader, state.remainder, state.active_dataloader.total_batch_size) for _ in loader]
    assert seen == [(False, 1, 2), (False, 1, 2), (True, 1, 2)]
    assert (state.end_of_dataloader, state.remainder) == (False, -1), "outside a loader nothing is known"


def test_the_batch_size_of_a_loader_counts_all_ranks():
    from accelerate.data_loader import prepare_data_loader

    loader = prepare_data_loader(
        DataLoader(torch.arange(8), batch_size=2), num_processes=2, process_index=1, put_on_device=False
    )
    assert loader.total_batch_size == 4


def test_gather_for_metrics_cuts_the_repeats_at_the_end(accelerator):
    """Which is why copies of cp ranks leave before: it keeps the first ``remainder`` rows of what it gathered."""
    loader = accelerator.prepare(DataLoader(torch.arange(5), batch_size=2))
    accelerator.gather = lambda rows: torch.cat([rows, rows + 100])  # as two ranks would give
    found = [accelerator.gather_for_metrics(rows).tolist() for rows in loader]
    assert found == [[0, 1, 100, 101], [2, 3, 102, 103], [4]]


def test_recursively_apply_reaches_nested_tensors_and_takes_more_arguments():
    from accelerate.utils import recursively_apply

    nested = {"a": [torch.ones(1)], "b": (torch.ones(1), None)}
    found = recursively_apply(lambda tensor, factor: tensor * factor, nested, 3)
    assert (found["a"][0].item(), found["b"][0].item(), found["b"][1]) == (3.0, 3.0, None)


def test_state_dicts_are_asked_of_the_instance():
    assert arguments(Accelerator.get_state_dict) == ["self", "model", "unwrap"]


def test_streams_are_dispatched_unless_the_configuration_says_no(accelerator):
    from accelerate import data_loader

    assert accelerator.dispatch_batches is None
    accelerator.dataloader_config.dispatch_batches = False
    assert accelerator.dispatch_batches is False
    assert "isinstance(dataloader.dataset, IterableDataset)" in source(data_loader.prepare_data_loader)
    shard = data_loader.IterableDatasetShard([1, 2, 3], batch_size=2, num_processes=2)
    assert (shard.batch_size, shard.dataset) == (2, [1, 2, 3])
    assert "self.remainder = observed_batch_size" in source(data_loader.DataLoaderDispatcher.__iter__)


@pytest.mark.parametrize("wanted", [False, True])
def test_batches_are_copied_as_the_configuration_says(wanted):
    """Set on the configuration after the accelerator is made, ``non_blocking`` reaches the prepared loader."""
    accelerator = Accelerator(cpu=True)
    accelerator.dataloader_config.non_blocking = wanted
    assert accelerator.prepare_data_loader(DataLoader([1, 2, 3]))._non_blocking is wanted

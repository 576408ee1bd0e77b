"""What the trainer counts once: gathered metrics without the copies of cp ranks."""

import pytest
import torch

from hf_fsdpturbo import FSDPTurboTrainerMixin
from hf_fsdpturbo.trainer.batches import SharedBatches
from hf_fsdpturbo.trainer.evaluation import GatheredRows
from hf_fsdpturbo.trainer.loss_scale import LossScale

WORLD, CP, REMAINDER = 6, 2, 3  # three data ranks of two rows each, the last batch has three real rows


class Accelerator:
    """Six ranks in one: gathers what rank r would send, and cuts as accelerate does."""

    num_processes = WORLD

    def __init__(self, process_index=0):
        self.process_index = process_index
        self.seen = None

    def gather(self, data):
        """Data rank d holds rows 2d and 2d + 1, each cp rank the same."""
        ranks = [2 * (rank // CP) for rank in range(WORLD)]
        if isinstance(data, dict):
            return {name: Accelerator.gather(self, value) for name, value in data.items()}
        if data.ndim == 0:
            return torch.tensor([start // 2 for start in ranks])
        return torch.cat([data + start for start in ranks])

    def gather_for_metrics(self, data, use_gather_object=False):
        if use_gather_object:
            self.seen = data
            return data
        gathered = self.gather(data)
        return {n: v[:REMAINDER] for n, v in gathered.items()} if isinstance(gathered, dict) else gathered[:REMAINDER]


def once(process_index=0):
    accelerator = Accelerator(process_index)
    rows = GatheredRows(accelerator, CP)
    rows.install()
    return accelerator, rows


def test_copies_go_before_the_cut():
    rows = torch.tensor([0, 1])
    assert Accelerator().gather_for_metrics(rows).tolist() == [0, 1, 0]  # the fault: a copy instead of the third row
    accelerator, _ = once()
    gather = accelerator.gather_for_metrics
    assert gather(rows).tolist() == [0, 1, 2]
    assert gather({"a": rows})["a"].tolist() == [0, 1, 2]
    assert gather(torch.tensor(0)).tolist() == [0, 1, 2]
    assert accelerator.gather(rows).tolist() == [0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5]  # put back: token counts need all


@pytest.mark.parametrize(("process_index", "sent"), [(0, ["x"]), (1, []), (2, ["x"]), (5, [])])
def test_objects_are_sent_by_one_rank_of_a_group(process_index, sent):
    accelerator, _ = once(process_index)
    gather = accelerator.gather_for_metrics
    gather(["x"], use_gather_object=True)
    assert accelerator.seen == sent
    gather([{"text": "x"}])
    assert accelerator.seen == ([{"text": "x"}] if sent else [])


def test_nothing_changes_without_context_parallelism():
    class Parent:
        def get_tp_size(self):
            return 7

    class Trainer(FSDPTurboTrainerMixin, Parent):
        def __init__(self, cp_size):
            self._batches, self._scale = SharedBatches(cp_size), LossScale(self, 1)

    assert Trainer(1).get_tp_size() == 7
    assert Trainer(CP).get_tp_size() == CP
    assert Trainer.cp_sharded_loss is False

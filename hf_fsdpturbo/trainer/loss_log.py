"""``LossLog``: what ``logging_nan_inf_filter`` does to the logged loss, on the device instead of on the host.

Note [The loss that is waited for]. Trainer asks after every micro-batch whether the loss is finite, in an ``if``: on
an accelerator the host waits there until the backward has ended, and clip and optimizer step reach an idle device (3
to 5 ms a step of 220 on an H200). The same number is added without waiting: the flag is off while Trainer asks, which
is between ``training_step`` and ``_track_num_input_tokens``, and what is added is chosen by ``torch.where``. Where
the copy of a batch makes the host wait (memory that is not pinned), the waiting stays here: there it would be taken
for the rank's own time (``telemetry/own_time.py``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class LossLog:
    """One trainer's.

    Args:
        trainer: read for its arguments and what it has added up; its ``logging_nan_inf_filter`` is off for moments.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.is_filtered = False

    def filtered(self, loss: Tensor) -> Tensor:
        """What Trainer shall add up: the loss, or the mean of those since the last log line if it is not finite."""
        args, added = self.trainer.args, self.trainer._tr_loss
        beside = args.device.type == "cpu" or self.trainer.accelerator.non_blocking
        if not (args.logging_nan_inf_filter and beside and added.device == loss.device):
            return loss
        args.logging_nan_inf_filter, self.is_filtered = False, True
        mean = added / (1 + self.trainer.state.global_step - self.trainer._globalstep_last_logged)
        return torch.where(torch.isfinite(loss), loss, mean)

    def added(self) -> None:
        """Trainer has added it: the flag is as the user set it."""
        if self.is_filtered:
            self.trainer.args.logging_nan_inf_filter, self.is_filtered = True, False

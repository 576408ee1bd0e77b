"""``Telemetry``: what a trainer's log lines say beside the loss: speed, memory, norms, waiting, expert load.

    a step          hooks add to tensors on the device (tokens, keys, counts, entropy); the host times the data
    a logging step  one all-reduce of one flat tensor (``gathered.py``), then arithmetic on the host
    the end         rank 0 writes expert_load.npz and draws expert_load.png

Names and meanings: docs/telemetry.md. Nothing waits for the device between logging steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from hf_fsdpturbo.dispatch.traffic import TRAFFIC
from hf_fsdpturbo.ranks import rank, world_size
from hf_fsdpturbo.telemetry.clock import Clock
from hf_fsdpturbo.telemetry.device_memory import memory_bytes
from hf_fsdpturbo.telemetry.expert_counts import ExpertCounts, counted_modules
from hf_fsdpturbo.telemetry.flops import model_flops, peak_of
from hf_fsdpturbo.telemetry.gathered import gather_window
from hf_fsdpturbo.telemetry.image_tokens import ImageLoad
from hf_fsdpturbo.telemetry.load_picture import draw_load
from hf_fsdpturbo.telemetry.load_record import LoadRecord, read_load
from hf_fsdpturbo.telemetry.own_time import SLOW, OwnTime, slowest
from hf_fsdpturbo.telemetry.real_tokens import RealTokens
from hf_fsdpturbo.telemetry.router_entropy import SCALE, RouterEntropy

logger = logging.getLogger(__name__)

GIB = 2**30
WRITE_EVERY = 300.0
"""Seconds between writes of the record while a run goes on; saving and the end write it too."""


class Telemetry(TrainerCallback):
    """One trainer's; it measures while ``train()`` runs.

    Args:
        trainer: read for its model, state, norms and arguments.
        wanted: ``fsdpturbo_metrics``; None measures sharded runs only.
    """

    def __init__(self, trainer: Any, wanted: bool | None) -> None:
        self.trainer = trainer
        self.is_on = world_size() > 1 if wanted is None else wanted
        self.clock = Clock()
        self.own = OwnTime(computes_on_host=False)
        self._named: int | None = None  # the slowest rank that a line was printed about
        self.record: LoadRecord | None = None  # rank 0's, of a model with experts
        self._handles: list[Any] = []
        self._written = 0.0

    # What the trainer hands on

    def batches(self, source: Iterator[Any]) -> Iterator[Any]:
        """The batches of a step, timed."""
        return self.clock.batches(self.own.batches(source)) if self._handles else source

    def extend(self, logs: dict[str, float], start_time: float | None) -> dict[str, float]:
        """``logs`` with what was measured since the last line, if it is a training step's line. Collective then.

        Only the training loop logs a loss with its start time, on all ranks together.
        """
        if self._handles and start_time is not None and "loss" in logs:
            logs.update(self._window(logs["loss"]))
            self.clock.mark()
            self.own.begins()
        return logs

    @property
    def expert_counts(self) -> ExpertCounts | None:
        """The counter that runs now, for others who read it; None while nothing is measured."""
        return self.counts if self._handles else None

    # Callbacks

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Watch the model from now on, and say once on rank 0 what MFU is measured against."""
        self._detach()
        model, device = self.trainer.model, args.device
        if not self.is_on or not hasattr(model, "get_input_embeddings"):  # one process trains any module
            return
        peak = peak_of(device) if _computes_in_bf16(args, model) else None
        self._peak = None if peak is None else peak[0]
        self.flops = None if peak is None else model_flops(model, counted_modules(model))
        self.tokens = RealTokens(device, None if self.flops is None else self.flops.window)
        self.counts = ExpertCounts(model, self.tokens, device)
        self.entropy = RouterEntropy(model, self.tokens, device)
        self._handles = [*self.tokens.attach(model), *self.counts.attach(), *self.entropy.attach()]
        self.images = ImageLoad.of(model, device)
        self._handles += [] if self.images is None else self.images.attach(model)
        self.clock, self._reader = Clock(), self.counts.reader()
        self.own = OwnTime(computes_on_host=device.type == "cpu")
        self._before = torch.zeros(5, dtype=torch.int64, device=device)
        TRAFFIC.bytes, TRAFFIC.seconds, self._written = 0, 0.0, time.monotonic()
        if rank() == 0:
            if peak is not None and self.flops is not None:
                said = f"{peak[0] / 1e12:.0f} TFLOP/s a device ({peak[2]}: {peak[1]})"
                print(f"[hf_fsdpturbo] mfu is a share of {said}", flush=True)
            self.record = self._begin_record(args.output_dir, state.global_step) if self.counts.layers else None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Exchanges of a step are counted, those of an evaluation are not."""
        TRAFFIC.is_on = bool(self._handles)
        self.own.step_begins()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """What follows until the next step's batches is this rank's own time."""
        self.own.stepped()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """What the device has waited so far is read, where it has passed."""
        TRAFFIC.is_on = False
        if control.should_log or control.should_evaluate or control.should_save:
            self.own.stops()
        if self._handles:
            TRAFFIC.collect()
            self.clock.mark()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """It took no training time."""
        self.clock.was_away()
        self.own.begins()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Beside a checkpoint, the record up to it."""
        self._write(args.output_dir)
        self.clock.was_away()
        self.own.begins()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Rank 0 writes the record and draws it."""
        if self._handles and self._write(args.output_dir):
            assert self.record is not None
            try:
                draw_load(self.record, args.output_dir)
            except (ImportError, OSError) as error:  # one rank's, and no reason to end a run that is done
                print(f"[hf_fsdpturbo] {error}", flush=True)
        self._detach()

    # The window

    def _window(self, loss: float) -> dict[str, float]:
        """Metrics since the last line. Collective."""
        TRAFFIC.collect()
        now = torch.cat([self.tokens.totals, self.entropy.sums])
        since, self._before = now - self._before, now
        seconds, waited = self.clock.window()
        peak, reserved = memory_bytes(self.trainer.args.device)
        times = seconds, waited, TRAFFIC.seconds, self.own.take()
        own = [peak, reserved, TRAFFIC.bytes, *(round(1e6 * time) for time in times)]
        TRAFFIC.bytes, TRAFFIC.seconds = 0, 0.0
        of_images = [] if self.images is None else [self.images.local()]
        (counts_N, sums, *of_images_N), by_rank = gather_window([self._reader.local(), since, *of_images], own)
        peaks, reserves, sent, all_seconds, waits, exchange_waits, owns = zip(*by_rank, strict=True)
        tokens, keys, near_keys, entropy, pairs = sums
        seconds = max(max(all_seconds), 1) / 1e6
        counts = {name: count.numpy() for name, count in self.counts.by_layer(torch.tensor(counts_N)).items()}
        found = {
            "tokens_per_second": tokens / seconds,
            "tokens_per_second_per_device": tokens / seconds / len(by_rank),
            "memory_peak_gib": max(peaks) / GIB,
            "memory_reserved_gib": max(reserves) / GIB,
            "data_wait_seconds": max(waits) / 1e6,
        }
        if self._peak is not None and self.flops is not None:
            routed = [int(count.sum()) for count in counts.values()]
            flops = self.flops.of(tokens, routed, keys, near_keys)
            found["mfu"] = flops / seconds / len(by_rank) / self._peak
        found |= self._norms() | _expert_metrics(counts)
        if self.images is not None:
            found |= self.images.metrics(of_images_N[0], counts, tokens)
        if pairs:
            found["experts/router_entropy"] = entropy / SCALE / pairs
        if any(sent):
            found["experts/exchanged_gib"] = sum(sent) / GIB
            found["experts/exchange_wait_seconds"] = max(exchange_waits) / 1e6
        if len(by_rank) > 1:
            found |= self._straggler(owns, exchange_waits, seconds)
        self._keep(counts, loss, found["tokens_per_second"])
        return found

    def _straggler(self, owns: Sequence[int], exchange_waits: Sequence[int], seconds: float) -> dict[str, float]:
        """The slowest rank of a window, also in a line where others wait long for another one than before."""
        waited = [0] * len(owns) if self.own.computes_on_host else exchange_waits
        who, share = slowest([(own - wait) / 1e6 for own, wait in zip(owns, waited, strict=True)], seconds)
        if share >= SLOW and who != self._named and rank() == 0:
            self._named = who
            print(
                f"[hf_fsdpturbo] rank {who} is the slowest: of the last {seconds:.2f} s others wait up to "
                f"{100 * share:.0f} % for it (docs/watching.md).",
                flush=True,
            )
        return {"straggler_rank": float(who), "straggler_share": share}

    def _norms(self) -> dict[str, float]:
        """Norms before the clip, of the last step: Trainer has ``grad_norm``, these are its parts."""
        norms = {name: n for name, n in (self.trainer.last_group_norms or {}).items() if name in ("dense", "expert")}
        values = torch.stack(list(norms.values())).tolist() if norms else []
        return {f"grad_norm_{name}": value for name, value in zip(norms, values, strict=True)}

    # The record, on rank 0

    def _begin_record(self, folder: str, step: int) -> LoadRecord:
        """Empty, or what a resumed run finds of itself in its folder."""
        record = LoadRecord(self.counts.layers)
        try:
            found = read_load(folder) if step else record
        except FileNotFoundError:
            return record
        except (ValueError, OSError) as error:  # nothing that a run depends on
            logger.warning("%s The record of expert load begins anew at step %d.", error, step)
            return record
        if found.layers != record.layers:
            logger.warning("expert_load.npz in %s is of another model: the record begins anew.", folder)
            return record
        found.forget_after(step)
        return found

    def _keep(self, counts: dict[str, np.ndarray], loss: float, rate: float) -> None:
        if self.record is None:
            return
        most = self.record.most_experts
        rows = np.stack([np.pad(count, (0, most - len(count))) for count in counts.values()])
        self.record.add(self.trainer.state.global_step, rows, loss, rate)
        if time.monotonic() - self._written > WRITE_EVERY:
            self._write(self.trainer.args.output_dir)

    def _write(self, folder: str) -> bool:
        """Whether there is something, and it was written."""
        if self.record is None or not self.record.steps or not self._handles:
            return False
        self._written = time.monotonic()
        try:
            self.record.write(folder)
        except OSError as error:  # rank 0's alone, and no reason to end a run
            logger.warning("expert_load.npz could not be written to %s: %s", folder, error)
            return False
        return True

    def _detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, TRAFFIC.is_on = [], False


def _expert_metrics(counts: dict[str, np.ndarray]) -> dict[str, float]:
    """Largest load over mean (of the worst layer, and on average), and experts that got no token, over all layers."""
    worst = [count.max() * len(count) / count.sum() for count in counts.values() if count.sum()]
    if not worst:
        return {}
    return {
        "experts/load_max_over_mean": float(max(worst)),
        "experts/load_max_over_mean_average": float(np.mean(worst)),
        "experts/unused": float(sum(int((count == 0).sum()) for count in counts.values())),
    }


def _computes_in_bf16(args: Any, model: Any) -> bool:
    return bool(getattr(args, "bf16", False)) or next(model.parameters()).dtype == torch.bfloat16

"""Routers that learn at a rate of their own: their parameters in optimizer groups beside those of the others."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn


def split_groups(optimizer: torch.optim.Optimizer, routers: set[nn.Parameter], scale: float) -> None:
    """Take router parameters out of their groups, in place, into groups with ``lr * scale``, all else alike.

    Schedulers made after that multiply every group's own rate, so the ratio stays. New groups come last: what is
    logged as the learning rate is that of the first.

    Raises:
        ValueError: no router parameter trains.
    """
    found = [group for group in optimizer.param_groups if any(parameter in routers for parameter in group["params"])]
    for group in found:
        mine = [parameter for parameter in group["params"] if parameter in routers]
        group["params"] = [parameter for parameter in group["params"] if parameter not in routers]
        optimizer.add_param_group({**group, "params": mine, "lr": group["lr"] * scale})
    emptied = {id(group) for group in found if not group["params"]}
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if id(group) not in emptied]
    if not found:
        raise ValueError(
            f"router_lr_scale={scale:g}: no parameter of a router trains (they are frozen, or the model has none). "
            "Leave router_lr_scale out."
        )


def ratio(optimizer: Any, routers: set[nn.Parameter]) -> float | None:
    """Routers' rate over the others' at the start of the schedule, as an optimizer has it; None: it has several."""
    rates: dict[bool, set[float]] = {True: set(), False: set()}
    for group in optimizer.param_groups:
        if group["params"]:
            rates[group["params"][0] in routers].add(float(group.get("initial_lr", group["lr"])))
    if any(len(found) != 1 for found in rates.values()) or 0.0 in rates[False]:
        return None
    return rates[True].pop() / rates[False].pop()


def refuse_other_ratio(optimizer: Any, routers: set[nn.Parameter], scale: float) -> None:
    """After a resume: rates are the checkpoint's, as all of Trainer's, so another scale would have no effect.

    Raises:
        ValueError: the checkpoint was trained with another ratio.
    """
    found = ratio(optimizer, routers)
    if found is not None and not math.isclose(found, scale, rel_tol=1e-6):
        raise ValueError(
            f"router_lr_scale={scale:g}, but the checkpoint was trained with {found:g}, and a resumed run goes on "
            "with the rates of its checkpoint. Give the same, or start a new run from its weights."
        )

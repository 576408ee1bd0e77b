"""``BiasUpdate``: balancing without a loss: experts with fewer tokens than the mean are chosen a little more often.

    bias_e += rate * sign(mean load - load_e)

once a step, with the load over all micro-batches and ranks (Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing
Strategy for Mixture-of-Experts"; DeepSeek-V3). E experts.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hf_fsdpturbo.routers.found import find_biases
from hf_fsdpturbo.shards import local_box, local_tensor


class BiasUpdate:
    """The correction biases of one model.

    Args:
        model: as it trains.
        layers: number of experts by name of the experts module, over all ranks.
        rate: of an update, in units of the router's scores.

    Attributes:
        biases: by name of the experts module; buffers or frozen parameters, whole or sharded.

    Raises:
        ValueError: no layer has a bias, or one does not fit its experts; alike on all ranks.
    """

    def __init__(self, model: nn.Module, layers: Mapping[str, int], rate: float) -> None:
        self.rate = rate
        self.biases = find_biases(model, layers)
        family = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        if not layers:
            raise ValueError(
                f"router_bias_update_rate={rate:g}: nobody counts what the experts of {family} get here (one process "
                "counts only experts of Transformers' own interface). Leave it out, or train on several ranks."
            )
        for name, bias in self.biases.items():
            if bias.numel() != layers[name]:
                raise ValueError(
                    f"router_bias_update_rate={rate:g}: the correction bias beside {name} has {bias.numel()} entries "
                    f"for {layers[name]} experts ({family} also chooses experts that compute nothing, whose load is "
                    "not theirs to balance). Leave router_bias_update_rate out."
                )
        if not self.biases:
            raise ValueError(
                f"router_bias_update_rate={rate:g}: {family} has no correction bias to update. Leave it out; a family "
                "without one balances its experts by a loss (router_aux_loss_coef), if at all."
            )
        self._exact: dict[str, Tensor] = {}

    def begin(self) -> None:
        """Biases may have been loaded: what is stored in half precision is summed in float32 from here on."""
        self._exact = {
            name: local_tensor(bias.detach()).float()
            for name, bias in self.biases.items()
            if bias.dtype != torch.float32
        }

    @torch.no_grad()
    def apply(self, loads: Mapping[str, Tensor]) -> None:
        """One update.

        Args:
            loads: tokens of the step by experts module, int64 ``[E]``, over all ranks: then all ranks end with the
                same bits.
        """
        for name, bias in self.biases.items():
            load_E = loads[name]
            # The sign of mean - load, in whole numbers: E * mean is their sum.
            direction = torch.sign(load_E.sum() - load_E * load_E.numel()).view(bias.shape)
            mine, own = local_tensor(bias), direction[local_box(bias).slices]
            exact = self._exact.get(name, mine)
            exact.add_(own.to(exact.device, exact.dtype), alpha=self.rate)
            if exact is not mine:
                mine.copy_(exact)

"""One frozen weight in 4 bits: two parameters of its module where one was, and its values when they are needed.

E experts, O rows, B blocks of 64 columns. What was ``name [E, O, 64 B]`` (or ``[O, 64 B]``) is

    name           uint8 [E, O, B, 32]   two elements a byte; a frozen parameter that FSDP shards and gathers as bytes
    name_absmax    uint8 [E, O, B, 4]    the blocks' largest values, float32 by their bytes; sharded alike

With double quantisation the largest values are buffers of one byte each, whole on every rank of the shard axis: an
eighth of a bit an element beside four, and each matrix's are quantised with its own mean, which takes all of them.

Rows and whole blocks can be cut anywhere, so EP, EFSDP and outer FSDP2 cut these as they cut the float weight.
Stacks that stay as their release packs them are a subclass of this: released_weight.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_fsdpturbo.quantised.asked import FourBit
from hf_fsdpturbo.quantised.four_bit import BLOCK, nest, pack, unnest, unpack_
from hf_fsdpturbo.shards import like, local_box, local_tensor, whole_tensor

LARGEST = "absmax"
"""Ends the name of the second parameter, and is in those of the buffers that stand for it."""
EXPONENTS = "e8m0"
"""Ends the name of the second parameter of what stays as it is released."""
WIDEST = 0.18
"""Of a block's largest value: a little more than half of the widest step between two of the 16 values."""
_BUFFERS = ("bytes", "scale", "mean")


def packed_weight(model: nn.Module, name: str) -> PackedWeight | None:
    """The quantised weight of that full name, if it is one."""
    path, _, last = name.rpartition(".")
    try:
        return packed_weights(model.get_submodule(path)).get(last)
    except AttributeError:
        return None


def is_statistic(name: str) -> bool:
    """Whether a parameter belongs to a quantised weight and is no weight itself."""
    return name.endswith((f"_{LARGEST}", f"_{EXPONENTS}"))


def packed_weights(module: nn.Module) -> dict[str, PackedWeight]:
    """The quantised weights of a module itself, by name."""
    found: dict[str, PackedWeight] = vars(module).get("packed_weights", {})
    return found


class PackedWeight:
    """A weight of ``module`` called ``name``; with values (not on meta) it is quantised at once.

    Attributes:
        shape: of the whole weight. dtype: it was stored in, and its values are rounded to.
        quantised_on: device.
    """

    def __init__(self, module: nn.Module, name: str, asked: FourBit, device: torch.device) -> None:
        weight = self._take_place(module, name, LARGEST)
        self.asked, self.quantised_on = asked, device
        lead, blocks = self.shape[:-1], self.shape[-1] // BLOCK
        if weight.is_meta:
            data = torch.empty((*lead, blocks, BLOCK // 2), dtype=torch.uint8, device="meta")
            largest = torch.empty((*lead, blocks), device="meta")
        else:
            packed = pack(weight.detach().to(device), asked.quant_type)
            data, largest = (part.to(weight.device) for part in packed)
        self._set(data, largest)

    def _take_place(self, module: nn.Module, name: str, statistic: str) -> nn.Parameter:
        """Become the module's quantised weight of that name; returns the weight."""
        weight = module._parameters[name]
        assert weight is not None
        self.module, self.name, self.largest_name = module, name, f"{name}_{statistic}"
        self.shape, self.dtype = tuple(weight.shape), weight.dtype
        self._waiting: Tensor | None = None  # largest values that are to be nested, until `settle`
        self._statistic: nn.Parameter | None = None  # while it is hidden
        module.__dict__.setdefault("packed_weights", {})[name] = self
        return weight

    def _set(self, data: Tensor, largest: Tensor) -> None:
        self.module._parameters[self.name] = frozen(data)
        if self.asked.nested:
            self._waiting = largest
        else:
            self.module._parameters[self.largest_name] = frozen(_as_bytes(largest))

    # -- while weights are read ----------------------------------------------------------------------------------

    def hide(self) -> nn.Parameter:
        """Until values come, show the loader a weight in full, on meta, sharded as the bytes are; returns it."""
        self._statistic = self.module._parameters.pop(self.largest_name, None)
        self._packed = self.module._parameters[self.name]
        assert self._packed is not None
        shown = nn.Parameter(self.in_full(self._packed, None), requires_grad=False)
        self.module._parameters[self.name] = shown
        return shown

    def in_full(self, packed: Tensor, local: Tensor | None) -> Tensor:
        """``local`` (None: nothing, on meta) as this rank's part of the whole weight, cut as ``packed`` is."""
        if local is None:
            local = torch.empty(self._shape_of(local_tensor(packed)), dtype=self.dtype, device="meta")
        if not isinstance(packed, DTensor):
            return local
        whole = torch.empty(self.shape, dtype=self.dtype, device="meta")
        described = DTensor.from_local(
            torch.empty(local.shape, dtype=self.dtype, device="meta"), packed.device_mesh, self._places(packed),
            run_check=False, shape=whole.shape, stride=whole.stride(),
        )  # fmt: skip
        return like(described, local)

    def _shape_of(self, packed: Tensor) -> tuple[int, ...]:
        """Shape of the values of a local part."""
        return (*packed.shape[:-2], packed.shape[-2] * BLOCK)

    def _places(self, packed: DTensor) -> Any:
        """How the values are placed where the bytes are placed so."""
        return packed.placements

    def shown(self) -> Tensor:
        """The weight in full, on meta, sharded as the bytes are."""
        return self.in_full(self._parameter(), None)

    def fill(self, local: Tensor) -> None:
        """Quantise this rank's part, which goes; the bytes take their place in the module."""
        data, largest = pack(local.detach().to(self.quantised_on), self.asked.quant_type)
        packed = self._packed
        assert packed is not None
        self.module._parameters[self.name] = frozen(like(packed, data))
        if self._statistic is None:
            self._waiting = largest
        else:
            self._statistic = frozen(like(self._statistic, _as_bytes(largest)))

    def settle(self) -> None:
        """After values came to all ranks: the second parameter is back, or the largest values are nested.

        Collective with double quantisation.

        Raises:
            ValueError: no values came.
        """
        packed = self.module._parameters[self.name]
        assert packed is not None
        if packed.is_meta or packed.dtype != torch.uint8:
            raise ValueError(f"{self.name}: no values were loaded for it, so it cannot be quantised.")
        if self._statistic is not None:
            self.module._parameters[self.largest_name], self._statistic = self._statistic, None
        if self._waiting is not None:
            largest, self._waiting = _own_experts(packed, self._waiting, len(self.shape) == 3), None
            matrices = len(largest) if largest.ndim == 3 else 1
            for part, value in zip(_BUFFERS, nest(largest.reshape(matrices, -1)), strict=True):
                self.module.register_buffer(f"{self.largest_name}_{part}", value, persistent=False)

    # -- values ---------------------------------------------------------------------------------------------------

    def local_shape(self) -> tuple[int, ...]:
        """Shape of the values that are here now: gathered inside a forward, this rank's part elsewhere."""
        return self._shape_of(local_tensor(self._parameter()))

    def device(self) -> torch.device:
        return self._parameter().device

    def write(self, out: Tensor) -> None:
        """Write the values that are here now into ``out``, rounded to ``dtype`` and then to that of ``out``."""
        with torch.no_grad():
            packed = local_tensor(self._parameter())
            target = out
            if torch.promote_types(self.dtype, out.dtype) != self.dtype:  # out is the wider one
                target = torch.empty(out.shape, dtype=self.dtype, device=out.device)
            self._unpack_(target, packed)
            if target is not out:
                out.copy_(target)

    def _unpack_(self, out: Tensor, packed: Tensor) -> None:
        unpack_(out, packed, self._largest(packed), self.asked.quant_type)

    def values(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values that are here now, in a new tensor of ``dtype`` (None: the dtype they were stored in)."""
        out = torch.empty(self.local_shape(), dtype=dtype or self.dtype, device=self.device())
        self.write(out)
        return out

    def _parameter(self) -> Tensor:
        found = self.module._parameters[self.name]
        assert found is not None
        return found

    def _largest(self, packed: Tensor) -> Tensor:
        """``[..., B]`` float32 for the blocks of ``packed``."""
        statistic = self.module._parameters.get(self.largest_name, self._statistic)
        if statistic is not None:
            return local_tensor(statistic).view(torch.float32).squeeze(-1)
        if self._waiting is not None:
            return self._waiting
        stored, scale, mean = (self.module._buffers[f"{self.largest_name}_{part}"] for part in _BUFFERS)
        assert stored is not None
        assert scale is not None
        assert mean is not None
        rows, blocks = self.shape[-2], self.shape[-1] // BLOCK
        largest = unnest(stored, scale, mean, rows * blocks).view(-1, rows, blocks)
        if len(self.shape) == 2:
            largest = largest[0]
        if largest.shape == packed.shape[:-1]:
            return largest
        box = local_box(self._parameter())
        first = box.offset[0] // max(len(largest), 1) * len(largest) if len(self.shape) == 3 else 0
        start = (box.offset[0] - first, *box.offset[1:-1])
        return largest[tuple(slice(o, o + size) for o, size in zip(start, box.shape[:-1], strict=True))]

    def is_near(self, expected: Tensor, index: tuple[slice, ...]) -> bool:
        """Whether values at ``index`` of this rank's part are as near to ``expected`` (on the CPU) as 4 bits can be.

        Those of another row, or of another expert, would not be.
        """
        rows, columns = index[:-1], index[-1]
        packed = local_tensor(self._parameter())
        largest, packed = self._largest(packed)[rows], packed[rows]
        found = torch.empty((*packed.shape[:-2], packed.shape[-2] * BLOCK), device=packed.device)
        unpack_(found, packed, largest, self.asked.quant_type)
        allowed = (WIDEST * largest).repeat_interleave(BLOCK, dim=-1)
        found, allowed = found[..., columns].cpu(), allowed[..., columns].cpu()
        return found.shape == expected.shape and bool(((found - expected.float()).abs() <= allowed).all())

    def bytes_held(self) -> int:
        """Bytes of this rank's part, quantised."""
        parts = [self._parameter(), self.module._parameters.get(self.largest_name)]
        parts += [self.module._buffers.get(f"{self.largest_name}_{part}") for part in _BUFFERS]
        local = [local_tensor(part.detach()) for part in parts if part is not None]
        return sum(part.numel() * part.element_size() for part in local)

    def bytes_in_full(self) -> int:
        """Bytes that this rank's part would have in full."""
        return local_tensor(self._parameter().detach()).numel() * 2 * self.dtype.itemsize


def _as_bytes(largest: Tensor) -> Tensor:
    return largest.contiguous().unsqueeze(-1).view(torch.uint8)


def frozen(tensor: Tensor) -> nn.Parameter:
    """A parameter that is not trained, of any dtype."""
    parameter: Any = nn.Parameter(tensor, requires_grad=False)
    parameter._is_hf_initialized = True  # Transformers must not draw it
    return parameter


def _own_experts(packed: Tensor, largest: Tensor, stacked: bool) -> Tensor:
    """From this rank's part, or the whole, of ``[..., B]``: all of a dense weight, all of this ep rank's experts."""
    if not isinstance(packed, DTensor):
        return largest
    mesh = packed.device_mesh
    ep_size, ep_rank = (mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)) if stacked else (1, 0)
    if tuple(largest.shape) == tuple(local_tensor(packed).shape[:-1]):
        if mesh.size() == ep_size:
            return largest  # nobody else has a part of these experts
        described = torch.empty(packed.shape[:-1], device="meta")
        shards = DTensor.from_local(
            largest, mesh, packed.placements, run_check=False, shape=described.shape, stride=described.stride()
        )
        largest = whole_tensor(shards)
    if largest.shape[0] == packed.shape[0] and ep_size > 1:
        largest = largest.chunk(ep_size)[ep_rank].clone()
    return largest

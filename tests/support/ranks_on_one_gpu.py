"""A process group for several ranks on one GPU: every collective goes through host memory and gloo.

NCCL refuses two ranks on one device, and gloo has no all-to-all of CUDA tensors. Slow, but the code of a sharded run
on a GPU (kernels, dtypes, where tensors live) is the one of many GPUs; only the transport is not.

    python -m torch.distributed.run --nproc-per-node 2 -m tests.support.ranks_on_one_gpu MODULE ARGUMENT...
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ProcessGroupGloo


class _Done(dist.Work):
    """A collective that is over."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._future: Any = torch.futures.Future()
        self._future.set_result(result)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        return self._future


class _Pending(dist.Work):
    """A message that is under way; ``wait`` ends it, and moves what has come to where it belongs."""

    def __init__(self, call: Any, outputs: list[Tensor], staged: list[Tensor]) -> None:
        super().__init__()
        self._call, self._pairs = call, list(zip(outputs, staged, strict=True))

    def wait(self, timeout: Any = None) -> bool:
        self._call.wait()
        for output, tensor in self._pairs:
            output.copy_(tensor)
        self._pairs = []
        return True


class StagedGloo(ProcessGroup):
    """Copies to the host, calls gloo, copies back; each call returns when it is over."""

    def __init__(self, gloo: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.gloo, self._own_rank, self._own_size = gloo, rank, size

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        return "staged"

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._own_name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._own_name

    def _run(self, call: Any, outputs: list[Tensor], staged: list[Tensor]) -> dist.Work:
        call.wait()
        for output, tensor in zip(outputs, staged, strict=True):
            output.copy_(tensor)
        return _Done(outputs)

    def _scale(self, tensors: list[Tensor], options: Any) -> Any:
        """gloo has no average: sum, divided here."""
        average = options.reduceOp == dist.ReduceOp.AVG
        if average:
            options.reduceOp = dist.ReduceOp.SUM
        return average

    def allreduce(self, tensors: list[Tensor], options: Any) -> dist.Work:
        average, staged = self._scale(tensors, options), [t.detach().cpu() for t in tensors]
        self.gloo.allreduce(staged, options).wait()
        staged = [t / self._own_size if average else t for t in staged]
        return self._run(_Done(None), tensors, staged)

    def allreduce_coalesced(self, tensors: list[Tensor], options: Any) -> dist.Work:
        for tensor in tensors:
            self.allreduce([tensor], options)
        return _Done(tensors)

    def broadcast(self, tensors: list[Tensor], options: Any) -> dist.Work:
        staged = [t.detach().cpu() for t in tensors]
        return self._run(self.gloo.broadcast(staged, options), tensors, staged)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any = None) -> dist.Work:
        staged = [[t.detach().cpu() for t in one] for one in outputs]
        self.gloo.allgather(staged, [t.detach().cpu() for t in inputs]).wait()
        return self._run(_Done(None), sum(outputs, []), sum(staged, []))

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any = None) -> dist.Work:
        staged = [[t.detach().cpu() for t in one] for one in outputs]
        self.gloo.gather(staged, [t.detach().cpu() for t in inputs], options).wait()
        return self._run(_Done(None), sum(outputs, []), sum(staged, []))

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], options: Any = None) -> dist.Work:
        staged = [t.detach().cpu() for t in outputs]
        self.gloo.scatter(staged, [[t.detach().cpu() for t in one] for one in inputs], options).wait()
        return self._run(_Done(None), outputs, staged)

    def _allgather_base(self, output: Tensor, source: Tensor, options: Any = None) -> dist.Work:
        parts = [torch.empty_like(source, device="cpu") for _ in range(self._own_size)]
        self.gloo.allgather([parts], [source.detach().cpu().contiguous()]).wait()
        return self._run(_Done(None), [output.view(-1)], [torch.cat([p.reshape(-1) for p in parts])])

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], options: Any = None
    ) -> dist.Work:
        for output, source in zip(outputs, inputs, strict=True):
            self._allgather_base(output, source)
        return _Done(outputs)

    def _reduce_scatter_base(self, output: Tensor, source: Tensor, options: Any) -> dist.Work:
        whole = source.detach().cpu().contiguous().view(-1)
        options_all = dist.AllreduceOptions()
        options_all.reduceOp = options.reduceOp
        average = self._scale([whole], options_all)
        self.gloo.allreduce([whole], options_all).wait()
        part = whole.view(self._own_size, -1)[self._own_rank]
        return self._run(_Done(None), [output.view(-1)], [part / self._own_size if average else part])

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], options: Any) -> dist.Work:
        for output, source in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, source, options)
        return _Done(outputs)

    def alltoall_base(
        self, output: Tensor, source: Tensor, output_splits: list[int], input_splits: list[int], options: Any = None
    ) -> dist.Work:
        staged = torch.empty_like(output, device="cpu")
        call = self.gloo.alltoall_base(
            staged, source.detach().cpu().contiguous(), output_splits, input_splits, dist.AllToAllOptions()
        )
        return self._run(call, [output], [staged])

    def send(self, tensors: list[Tensor], to: int, tag: int) -> dist.Work:
        staged = [t.detach().cpu() for t in tensors]
        return _Pending(self.gloo.send(staged, to, tag), staged, staged)  # which holds them until they are sent

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work:
        staged = [torch.empty_like(t, device="cpu") for t in tensors]
        return _Pending(self.gloo.recv(staged, source, tag), tensors, staged)

    # The names of torch 2.13 for the same calls.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    def set_timeout(self, timeout: Any) -> None:
        """Collectives here never wait for long."""

    def barrier(self, options: Any = None, opts: Any = None) -> dist.Work:
        self.gloo.barrier().wait()
        return _Done(None)


    _set_group_name = setGroupName  # which torch calls depends on its release
    group_name = property(getGroupName)


def _create(store: Any, rank: int, size: int, timeout: Any) -> ProcessGroup:
    return StagedGloo(ProcessGroupGloo(store, rank, size, timeout), rank, size)


def use_one_gpu() -> None:
    """All ranks of this launch on the first device, over :class:`StagedGloo`; call it before anything asks."""
    os.environ["LOCAL_RANK"] = "0"
    dist.Backend.register_backend("staged", _create, devices=["cpu", "cuda"])
    own = dist.init_process_group

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("device_id", None)
        own("staged", *args, **kwargs)

    dist.init_process_group = init_process_group


if __name__ == "__main__":
    use_one_gpu()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)

"""A stand-in for torch_npu: the MoE operators' names, argument rules and values, on CPU over gloo. Not the hardware.

Rules are those of the operators' schemas and published limits: host counts as lists of int, int64 group lists, weights
transposed only where asked.
"""

import types

import torch
import torch.distributed as dist

GROUPS = {}  # communicator name -> process group


class npu:  # noqa: N801  (the name torch_npu gives it)
    @staticmethod
    def get_device_name():
        return "Ascend910_9392"


def npu_moe_token_permute(tokens, indices, num_out_tokens=None, padded_mode=False):
    assert indices.dtype in (torch.int32, torch.int64)
    top_k = indices.shape[1]
    order = torch.argsort(indices.flatten(), stable=True)
    return tokens[order // top_k], torch.argsort(order).int()


def npu_moe_token_unpermute(permuted, sorted_indices, probs=None, padded_mode=False, restore_shape=None):
    top_k = 1 if probs is None else probs.shape[1]
    assert probs is None or probs.dtype == permuted.dtype
    rows = permuted[sorted_indices.long()].view(-1, top_k, permuted.shape[1])
    return rows.squeeze(1) if probs is None else (rows * probs.unsqueeze(-1)).sum(1)


def npu_grouped_matmul(x, weight, *, bias, group_list, split_item, group_type, group_list_type):
    assert group_list.dtype == torch.int64
    assert group_list_type == 1
    counts = group_list.tolist()
    if group_type == 0:
        assert split_item == 2
        parts = x[0].split(counts)
        return [torch.cat([part @ w for part, w in zip(parts, weight[0], strict=True)])]
    assert (group_type, split_item) == (2, 3)
    parts = zip(x[0].split(counts, 1), weight[0].split(counts), strict=True)
    return [torch.stack([left @ right for left, right in parts])]


def npu_swiglu(x, dim=-1):
    gate, up = x.float().chunk(2, dim)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def _check(counts, other, weights, ep_world_size):
    num_local = weights.shape[0]
    assert all(type(count) is int for count in (*counts, *other))
    assert len(counts) == len(other) == num_local * ep_world_size <= 256
    assert num_local <= 32
    return num_local


def _exchange(rows, outputs, inputs, group):
    received = rows.new_empty(sum(outputs), rows.shape[1])
    dist.all_to_all_single(received, rows.contiguous(), outputs, inputs, group=group)
    return received


def _per_rank(counts, ep):
    return torch.tensor(counts).view(ep, -1).sum(1).tolist()


def _by_expert(counts, ep):
    """Order that turns rows by (rank, expert) into rows by (expert, rank)."""
    expert = torch.arange(len(counts) // ep).repeat(ep).repeat_interleave(torch.tensor(counts))
    return torch.argsort(expert, stable=True)


def _multiply(rows, weights, counts, ep, transposed):
    sizes = torch.tensor(counts).view(ep, -1).sum(0).tolist()
    products = [part @ (w.T if transposed else w) for part, w in zip(rows.split(sizes), weights, strict=True)]
    return torch.cat(products)


def npu_alltoallv_gmm(
    gmm_x, gmm_weight, hcom, ep_world_size, send_counts, recv_counts, *, mm_x=None, mm_weight=None,
    trans_gmm_weight=False, trans_mm_weight=False, permute_out_flag=False,
):  # fmt: skip
    _check(send_counts, recv_counts, gmm_weight, ep_world_size)
    assert gmm_x.shape[0] == sum(send_counts)
    splits = _per_rank(recv_counts, ep_world_size), _per_rank(send_counts, ep_world_size)
    received = _exchange(gmm_x, *splits, GROUPS[hcom])[_by_expert(recv_counts, ep_world_size)]
    product = _multiply(received, gmm_weight, recv_counts, ep_world_size, trans_gmm_weight)
    return product, None, received if permute_out_flag else None


def npu_gmm_alltoallv(
    gmm_x, gmm_weight, hcom, ep_world_size, send_counts, recv_counts, *, mm_x=None, mm_weight=None,
    trans_gmm_weight=False, trans_mm_weight=False,
):  # fmt: skip
    _check(send_counts, recv_counts, gmm_weight, ep_world_size)
    assert gmm_x.shape[0] == sum(send_counts)
    product = _multiply(gmm_x, gmm_weight, send_counts, ep_world_size, trans_gmm_weight)
    home = torch.empty_like(product)
    home[_by_expert(send_counts, ep_world_size)] = product
    splits = _per_rank(recv_counts, ep_world_size), _per_rank(send_counts, ep_world_size)
    return _exchange(home, *splits, GROUPS[hcom]), None


def install(monkeypatch=None):
    """Make ``hf_fsdpturbo.ops.npu`` use this module (for one test, or for the life of a rank)."""
    import sys

    from hf_fsdpturbo.ops import npu as ours

    module = sys.modules[__name__]
    assert isinstance(module, types.ModuleType)
    put = monkeypatch.setattr if monkeypatch is not None else setattr

    def name(group):
        GROUPS["hcom"] = group
        return "hcom"

    put(ours, "load_torch_npu", lambda: module)
    put(ours, "hccl_name", name)

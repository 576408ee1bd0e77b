"""The gated delta rule in plain PyTorch: any device, exact, packed documents kept apart.

Shape legend: B batch, S sequence, Hk / Hv key / value heads, G = Hv // Hk, Dk / Dv key / value head size,
C chunk size, P number of chunks, M = B * Hv matrices, N documents of a flattened batch.

The recurrence, per value head, with state ``s`` [Dk, Dv] (Yang, Kautz, Hatamizadeh, "Gated Delta Networks", eq. 10):

    s_t = exp(g_t) s_{t-1} + k_t (x) beta_t (v_t - (exp(g_t) s_{t-1})^T k_t)        o_t = s_t^T q_t / sqrt(Dk)

is evaluated a chunk at a time (same paper, section 3.3): everything inside a chunk is a few matmuls and one small
triangular inverse over all chunks at once; only the state walks from chunk to chunk.

Note [linear backward]: indexing ``x[:, :, i]`` and writing ``out[:, :, i] =`` in that walk makes the backward allocate
one full-length zero tensor per chunk, so its time grows with the square of the length (Transformers 5.24 does this).
Here the chunk dim is first, taken apart once by ``unbind`` and put together once by ``stack``, whose backwards are
each other.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hf_fsdpturbo.kernels.causal_conv import runs_of
from hf_fsdpturbo.kernels.chunk_algebra import solved_by_inverse, unit_vectors
from hf_fsdpturbo.kernels.state_walk import walk
from hf_fsdpturbo.packing.documents import document_ids_from_cu_seqlens

# Arguments of FLA's rule that change the result and that this rule does not implement: refused, never dropped.
_UNSUPPORTED = (
    "scale", "gk", "gv", "A_log", "dt_bias", "cp_context", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel",
    "allow_neg_eigval", "state_v_first",
)  # fmt: skip


def chunk_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    chunk_size: int = 64,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    document_ids: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Same call as Transformers' ``torch_chunk_gated_delta_rule``, with documents.

    Everything is computed in float32 (float64 if query is float64), the state included. No document reads another;
    they are taken from the first given of ``document_ids``, ``seq_idx`` and ``cu_seqlens``.

    Args:
        query, key: ``[B, S, Hk, Dk]``; key head h serves value heads h*G to h*G + G - 1.
        value: ``[B, S, Hv, Dv]`` with Hv a multiple of Hk.
        g: ``[B, S, Hv]``, log decay (<= 0).
        beta: ``[B, S, Hv]``.
        chunk_size: C.
        initial_state: with ids ``[B, Hv, Dk, Dv]``, continues each row's first document; with ``cu_seqlens`` alone
            ``[N, Hv, Dk, Dv]``, one a document, as in FLA.
        output_final_state: return a state too.
        use_qk_l2norm_in_kernel: normalise queries and keys first.
        cu_seqlens: ``[N + 1]``, for B == 1.
        document_ids, seq_idx: ``[B, S]``, a new id starts a document, any B.
        **kwargs: ignored, except those that would change the result.

    Returns:
        ``out [B, S, Hv, Dv]`` in query's dtype, and the state or None: with ids that of each row's last document,
        with ``cu_seqlens`` alone one a document.

    Raises:
        ValueError: an unsupported keyword, sizes that do not fit, or ``cu_seqlens`` with B > 1.
    """
    _check_arguments(query, key, value, chunk_size, cu_seqlens, kwargs)
    ids = document_ids if document_ids is not None else seq_idx
    if ids is None and cu_seqlens is not None:
        if initial_state is not None or output_final_state:
            return _one_document_at_a_time(query, key, value, g, beta, cu_seqlens, chunk_size, initial_state,
                                           output_final_state, use_qk_l2norm_in_kernel)  # fmt: skip
        ids = document_ids_from_cu_seqlens(cu_seqlens, query.shape[1])
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    with torch.autocast(query.device.type, enabled=False):  # it would round the walked state to bf16 at every chunk
        q, k, v, log_decay, write = (_to_chunks(x, chunk_size, dtype) for x in (query, key, value, g, beta))
        scale = query.shape[-1] ** -0.5
        q, k = (unit_vectors(q, scale), unit_vectors(k)) if use_qk_l2norm_in_kernel else (q * scale, k)
        out, state = _chunked(q, k, v, log_decay, write, query.shape[1], initial_state, ids)
    return out.to(query.dtype), state if output_final_state else None


def _check_arguments(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, chunk_size: int,
    cu_seqlens: torch.Tensor | None, kwargs: dict[str, object],
) -> None:  # fmt: skip
    refused = [name for name in _UNSUPPORTED if kwargs.get(name) is not None and kwargs[name] is not False]
    if refused:
        raise ValueError(
            f"chunk_gated_delta_rule: {', '.join(refused)} would change the result and the PyTorch rule does not "
            "implement it; leave it out or use flash-linear-attention."
        )
    if chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size} must be positive.")
    if value.shape[2] % key.shape[2] or query.shape != key.shape:
        raise ValueError(
            f"query {tuple(query.shape)} and key {tuple(key.shape)} must have one shape and their heads must divide "
            f"the value heads ({value.shape[2]})."
        )
    if cu_seqlens is not None and query.shape[0] != 1:
        raise ValueError(f"cu_seqlens describes a flattened batch of 1 row, got {query.shape[0]}: pass document_ids.")


def _one_document_at_a_time(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    cu_seqlens: torch.Tensor, chunk_size: int, initial_state: torch.Tensor | None, output_final_state: bool,
    l2norm: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Per-document states in and out (inference): a loop over documents, never used in training."""
    outs: list[torch.Tensor] = []
    states: list[torch.Tensor] = []
    bounds = cu_seqlens.tolist()
    for n, (start, stop) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        q, k, v, decay, write = (x[:, start:stop] for x in (query, key, value, g, beta))
        out, state = chunk_gated_delta_rule(
            q, k, v, g=decay, beta=write, chunk_size=chunk_size, output_final_state=True,
            initial_state=None if initial_state is None else initial_state[n : n + 1], use_qk_l2norm_in_kernel=l2norm,
        )  # fmt: skip
        outs.append(out)
        if state is not None:
            states.append(state)
    return torch.cat(outs, 1), torch.cat(states) if output_final_state else None


def _to_chunks(x: torch.Tensor, chunk_size: int, dtype: torch.dtype) -> torch.Tensor:
    """``[B, S, H, ...]`` -> ``[P, B, H, C, ...]`` in ``dtype``, zero-padded at the end of S; one copy does it all."""
    missing = -x.shape[1] % chunk_size
    if missing:
        x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, missing))
    chunks = x.unflatten(1, (-1, chunk_size)).permute(1, 0, 3, 2, *range(4, x.ndim + 1))
    return chunks.to(dtype, memory_format=torch.contiguous_format)


def _chunked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, write: torch.Tensor,
    length: int, initial_state: torch.Tensor | None, document_ids: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The rule on prepared chunks, q scaled: ``out [B, S, Hv, Dv]``, and the last state ``[B, Hv, Dk, Dv]``."""
    num_chunks, batch, key_heads, chunk_size, key_dim = k.shape
    value_heads, value_dim = v.shape[2], v.shape[4]
    groups = value_heads // key_heads
    causal, reads, writes, keeps = _masks(document_ids, batch, num_chunks, chunk_size, length, q.device)

    q, k = (x.unsqueeze(3) for x in (q, k))  # [P, B, Hk, 1, C, Dk]
    v, log_decay, write = (x.unflatten(2, (key_heads, groups)) for x in (v, log_decay, write))  # [P, B, Hk, G, C...]
    total = log_decay.cumsum(-1)
    pairwise = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~causal, float("-inf")).exp()
    from_state = total.exp() * reads  # decay from the chunk's start; 0 where the state belongs to another document
    to_state = (total[..., -1:] - total).exp() * writes

    # (I + L) u = beta v and (I + L) w = beta exp(total) k: u the new values, w how they read the state.
    system = (k @ k.transpose(-1, -2)) * (pairwise * write.unsqueeze(-1))
    right = v * write.unsqueeze(-1), k * (write * from_state).unsqueeze(-1)

    # [P, B, Hk, G, ...] -> [P, M, ...]
    new_values, old_reads = (x.flatten(1, 3) for x in solved_by_inverse(system, *right))
    attention = ((q @ k.transpose(-1, -2)) * pairwise).flatten(1, 3)
    queries = (q * from_state.unsqueeze(-1)).flatten(1, 3)
    keys = (k * to_state.unsqueeze(-1)).flatten(1, 3)
    decays = (total[..., -1].exp() * keeps).flatten(1, 3)
    if initial_state is None:
        state = q.new_zeros(batch * value_heads, key_dim, value_dim)
    else:
        state = initial_state.to(q.dtype).flatten(0, 1)
    out, state = walk(new_values, old_reads, attention, queries, keys, decays, state)
    out = out.unflatten(1, (batch, value_heads)).permute(1, 0, 3, 2, 4)  # [B, P, C, Hv, Dv]
    return out.flatten(1, 2)[:, :length], state.unflatten(0, (batch, value_heads))


def _masks(
    document_ids: torch.Tensor | None, batch: int, num_chunks: int, chunk_size: int, length: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Who may see whom, broadcastable over ``[P, B, Hk, G, ...]``.

    Returns:
        ``causal [..., C, C]``, pairs inside a chunk; ``reads [..., C]``, positions whose document began before the
        chunk; ``writes [..., C]``, positions whose document is still open at the chunk's end; ``keeps [...]``, chunks
        inside one document.
    """
    causal = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=device).tril()
    if document_ids is None:
        one = torch.ones(1, dtype=torch.bool, device=device)
        return causal, one, one, one[0]
    if document_ids.shape != (batch, length):
        raise ValueError(f"document ids are {tuple(document_ids.shape)}, expected [B, S] = [{batch}, {length}].")
    runs = runs_of(document_ids.to(device))
    padding = runs[:, -1:].expand(batch, num_chunks * chunk_size - length)
    chunks = torch.cat((runs, padding), 1).reshape(batch, num_chunks, chunk_size).transpose(0, 1)  # [P, B, C]
    last = chunks[..., -1]
    before = torch.cat((torch.zeros_like(last[:1]), last[:-1]))  # run 0 owns the initial state
    same = (chunks.unsqueeze(-1) == chunks.unsqueeze(-2)) & causal
    masks = same, chunks == before.unsqueeze(-1), chunks == last.unsqueeze(-1), last == before
    causal, reads, writes, keeps = (mask[:, :, None, None] for mask in masks)
    return causal, reads, writes, keeps

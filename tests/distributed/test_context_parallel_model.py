"""Context parallelism of bare models: loss, logits and every gradient against one process, padded, packed and both.

A packed batch is compared with its documents run one by one: a plain process is no reference there (linear attention
and gpt_oss leak between documents packed by position_ids).
"""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from tests.support.compare import TOLERANCE, distance
from tests.support.spawn import init_gloo, run_plain, run_plain_jobs, run_ranks
from tests.support.tiny_models import VOCAB_SIZE, tiny_config, tiny_model

FAMILIES = {
    "qwen3_moe": {},
    "qwen3_moe window": {"sliding_window": 6, "use_sliding_window": True},
    "qwen3_moe one kv head": {"num_key_value_heads": 1},
    "deepseek_v3": {},
    "qwen3_5_moe": {"layers": 4},
    "qwen3_5_moe_vl": {"layers": 4},
    "qwen3_next": {"layers": 4},
    "gpt_oss": {"sliding_window": 6, "attn_implementation": "eager"},
}
DOCUMENTS = {"packed": [[7, 1, 12, 9]], "packed by lengths": [[3, 5, 17, 2]], "packed and padded": [[9, 8], [4, 1, 6]]}


def ids(rows, length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (rows, length), generator=generator)


def padded_batches():
    """name -> batch whose reference is one plain process on the same batch."""
    plain = ids(2, 24)
    odd, right = ids(3, 23, 1), torch.ones(3, 23, dtype=torch.long)
    right[0, 15:], right[2, 4:] = 0, 0
    left = right.flip(1)
    return {
        "whole rows": {"input_ids": plain},
        "padded right": {"input_ids": odd, "attention_mask": right},
        "padded left": {"input_ids": odd, "attention_mask": left},
        "shorter than cp": {"input_ids": ids(2, 3, 2)},
    }


def packed_batches():
    """name -> (batch, documents [L] each)."""
    result = {}
    for number, (name, rows) in enumerate(DOCUMENTS.items()):
        length = max(sum(row) for row in rows)
        tokens = ids(len(rows), length, 10 + number)
        positions = torch.zeros(len(rows), length, dtype=torch.long)
        documents = []
        for row, lengths in enumerate(rows):
            start = 0
            for size in lengths:
                positions[row, start : start + size] = torch.arange(size)
                documents.append(tokens[row, start : start + size])
                start += size
        batch = {"input_ids": tokens, "position_ids": positions}
        if name == "packed by lengths":  # what TRL's collator adds
            bounds = torch.tensor([0, *torch.tensor(rows[0]).cumsum(0).tolist()], dtype=torch.int32)
            batch |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 17, "max_length_k": 17}
            batch["seq_idx"] = torch.repeat_interleave(torch.arange(4, dtype=torch.int32), bounds.diff())[None]
        result[name] = batch, documents
    return result


def token_loss(logits, tokens, weight):
    """Sum over predicted tokens; ``weight`` is 0 where the next token is another document's or padding."""
    losses = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none")
    return (losses * weight[:, 1:].flatten()).sum()


def weights_of(batch):
    if "position_ids" in batch:
        return (batch["position_ids"] > 0).float()
    return batch.get("attention_mask", torch.ones_like(batch["input_ids"])).float()


def step(model, batch, aux):
    """(loss, logits, gradients) of one batch."""
    model.zero_grad()
    out = model(**batch, output_router_logits=aux, use_cache=False)
    loss = token_loss(out.logits, batch["input_ids"], weights_of(batch))
    if aux and getattr(out, "aux_loss", None) is not None:
        loss = loss + 10 * out.aux_loss
    loss.backward()
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    return loss.item(), out.logits.detach(), gradients


def make_model(kind, config):
    """A tiny model; "qwen3_5_moe_vl" is the vision-language class: embeddings are made outside its text model."""
    if kind == "qwen3_next":
        return qwen3_next(**config)
    if kind != "qwen3_5_moe_vl":
        return tiny_model(kind, **config)
    from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

    text = tiny_model("qwen3_5_moe", **config)
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    torch.manual_seed(0)
    model = Qwen3_5MoeForConditionalGeneration(
        Qwen3_5MoeConfig(text_config=text.config.to_dict(), vision_config=vision, tie_word_embeddings=False)
    )
    model.model.language_model.load_state_dict(text.model.state_dict())  # well-conditioned weights
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    return model


def qwen3_next(**config):
    """The other family with a gated delta rule: interleaved projections, positions of one axis."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    same = tiny_config("qwen3_5_moe", **config).to_dict()
    names = (
        "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim num_experts "
        "num_experts_per_tok moe_intermediate_size shared_expert_intermediate_size linear_key_head_dim "
        "linear_value_head_dim linear_num_key_heads linear_num_value_heads layer_types initializer_range pad_token_id"
    ).split()
    torch.manual_seed(0)
    model = Qwen3NextForCausalLM(Qwen3NextConfig(**{name: same[name] for name in names}))
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("A_log"):
                tensor.uniform_(0.05, 0.5).log_()  # as in tiny_model: else its gradient is rounding noise
            elif name.endswith("norm.weight"):
                tensor.add_(0.5)
    return model


def use_kernels(model):
    """Our linear attention, as the pipeline binds it before context parallelism."""
    from hf_fsdpturbo.kernels.linear_attention import Choice, apply_linear_attention
    from hf_fsdpturbo.kernels.rebinding import linear_attention_layers

    if any(True for _ in linear_attention_layers(model)):
        apply_linear_attention(model, Choice(frozenset(), frozenset(), 16))


def batches_of(names=None):
    every = {**padded_batches(), **{name: batch for name, (batch, _) in packed_batches().items()}}
    return {name: batch for name, batch in every.items() if names is None or name in names}


def run_cut(kind, config, cp_size, fault=None, names=None):
    """Rank function: batches through the cut model; gradients as FSDP leaves them (mean over all ranks)."""
    from hf_fsdpturbo.context_parallel.install import install

    init_gloo()
    mesh = init_device_mesh("cpu", (dist.get_world_size() // cp_size, cp_size), mesh_dim_names=("dp_shard", "cp"))
    model = make_model(kind, config)
    use_kernels(model)
    install(model, mesh["cp"])
    if fault is not None:
        fault()
    results = {}
    for name, batch in batches_of(names).items():
        loss, logits, gradients = step(model, batch, aux="position_ids" not in batch)
        for gradient in gradients.values():
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
        results[name] = loss, logits, gradients
    return results if dist.get_rank() == 0 else None


def run_whole(kind, config):
    """The same at cp_size 1, in one process, as the pipeline leaves a model there."""
    from hf_fsdpturbo.packing.prepared_masks import keep_documents_apart

    model = make_model(kind, config)
    use_kernels(model)
    keep_documents_apart(model)
    return {name: step(model, batch, aux="position_ids" not in batch) for name, batch in batches_of().items()}


def references(kind, config, ours=False):
    """Plain process: padded batches as they are, packed ones document by document; stock functions, or our kernels."""
    model = make_model(kind, config)
    if ours:
        use_kernels(model)
    results = {name: step(model, batch, aux=True) for name, batch in padded_batches().items()}
    for name, (_, documents) in packed_batches().items():
        total, sums = 0.0, {n: torch.zeros_like(p) for n, p in model.named_parameters()}
        for document in documents:
            loss, _, gradients = step(model, {"input_ids": document[None]}, aux=False)
            total += loss
            sums = {n: sums[n] + gradients[n] for n in sums}
        results[name] = total, None, sums
    return results


def references_of(jobs):
    """For plain processes."""
    return [references(*job) for job in jobs]


@functools.cache
def of_one_process(family):
    """(references, those with our kernels or None): the same for every cp_size, so computed once."""
    kind, config = model_kind(family), FAMILIES[family]
    linear = kind.startswith(("qwen3_5_moe", "qwen3_next"))
    stock, *ours = run_plain_jobs(references_of, [(kind, config)] + [(kind, config, True)] * linear)
    return stock, ours[0] if ours else None


def compare_all(found, expected, yardstick=None):
    """Print the worst tensor of every batch; names of what is out of tolerance.

    With a yardstick (the same one process with other kernels) a tensor may be ten times as far off as that is.
    """
    wrong = []
    for name, (loss, _, gradients) in expected.items():
        own_loss, _, own = found[name]
        off = abs(own_loss - loss) / abs(loss)
        rows = [(distance(own[n], g), 0.0 if yardstick is None else distance(yardstick[name][2][n], g), n)
                for n, g in gradients.items()]  # fmt: skip
        far, apart, tensor = max(rows)
        print(f"{name}: loss {off:.1e}, worst gradient {far:.1e} ({tensor}; one process apart {apart:.1e})")
        wrong += [f"{name}: loss {off:.1e}"] if off > TOLERANCE else []
        wrong += [f"{name}: {n} {d:.1e}" for d, a, n in rows if d > max(TOLERANCE, 10 * a)]
    return wrong


def model_kind(family):
    return family.split()[0]


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_cut_model_equals_one_process(family, cp_size):
    kind, config = model_kind(family), FAMILIES[family]
    if cp_size == 1:
        found = run_plain(run_whole, kind, config)
    else:
        found = run_ranks(run_cut, cp_size, kind, config, cp_size)[0]
    expected, yardstick = of_one_process(family)
    print(f"\n{family} cp{cp_size}")
    assert not compare_all(found, expected, yardstick)


# Faults: each must be seen.


def no_columns_before():
    from hf_fsdpturbo.context_parallel import delta_rule

    delta_rule.columns_before = lambda x, width, group: torch.zeros_like(x[..., :width])


def rule_on_the_slice():
    from hf_fsdpturbo.context_parallel import delta_rule

    delta_rule._exchange = lambda tensors, plan: tensors
    delta_rule.heads_to_sequence = lambda out, group: out


def gradient_not_times_cp():
    from hf_fsdpturbo.context_parallel import collectives

    def backward(ctx, gradient):
        return gradient.chunk(ctx.size, dim=1)[ctx.rank], None

    collectives._GatherSequence.backward = staticmethod(backward)


def documents_lost():
    from hf_fsdpturbo.packing import sequence_plan

    sequence_plan.derive_documents = lambda *args, **kwargs: None


def padding_lost():
    from hf_fsdpturbo.context_parallel import boundary

    make_plan = boundary.make_plan
    boundary.make_plan = lambda *args, **kwargs: make_plan(*args, **{**kwargs, "attention_mask": None})


FAULTS = {
    "no columns before": (no_columns_before, "whole rows"),
    "rule on the slice": (rule_on_the_slice, "whole rows"),
    "gradient not times cp": (gradient_not_times_cp, "whole rows"),
    "documents lost": (documents_lost, "packed"),
    "padding lost": (padding_lost, "padded left"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_seen(name):
    fault, batch = FAULTS[name]
    expected = {batch: of_one_process("qwen3_5_moe")[0][batch]}
    found = run_ranks(run_cut, 2, "qwen3_5_moe", FAMILIES["qwen3_5_moe"], 2, fault, [batch])[0]
    wrong = compare_all(found, expected)
    assert any(float(line.split()[-1]) > 1e-3 for line in wrong), wrong


def saved_bytes(kind, config, cp_size):
    """Rank function: bytes that one forward of 512 tokens keeps for backward, parameters and LM head left out."""
    model = make_model(kind, config)
    use_kernels(model)
    if cp_size > 1:
        from hf_fsdpturbo.context_parallel.install import install

        init_gloo()
        install(model, init_device_mesh("cpu", (cp_size,), mesh_dim_names=("cp",)))
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = model.base_model(input_ids=ids(1, 512), use_cache=False)
    assert out.last_hidden_state.shape[1] == 512
    return sum(kept.values())


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe"])
def test_activation_memory_falls_with_cp_size(family):
    whole = run_plain(saved_bytes, family, FAMILIES[family], 1)
    for cp_size, at_most in ((2, 0.6), (4, 0.35)):
        part = max(run_ranks(saved_bytes, cp_size, family, FAMILIES[family], cp_size)) / whole
        print(f"{family} cp{cp_size}: {part:.2f} of {whole / 2**20:.1f} MiB")
        assert part < at_most


def hidden_states(kind, cp_size):
    """Rank function: every layer's hidden states and router logits."""
    model = make_model(kind, {})
    if cp_size > 1:
        from hf_fsdpturbo.context_parallel.install import install

        init_gloo()
        install(model, init_device_mesh("cpu", (cp_size,), mesh_dim_names=("cp",)))
    with torch.no_grad():
        out = model(input_ids=ids(2, 9), output_hidden_states=True, output_router_logits=True)
    return [*out.hidden_states, *out.router_logits, out.logits]


def test_everything_recorded_comes_back_whole():
    whole = run_plain(hidden_states, "qwen3_moe", 1)
    for tensors in run_ranks(hidden_states, 2, "qwen3_moe", 2):
        assert len(tensors) == len(whole)
        for mine, theirs in zip(tensors, whole, strict=True):
            assert mine.shape == theirs.shape
            assert distance(mine, theirs) < TOLERANCE


def refusals():
    """Rank function: what is refused at the first forward, with its message."""
    from hf_fsdpturbo.context_parallel.install import install

    init_gloo()
    model = make_model("qwen3_moe", {})
    install(model, init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)))
    tokens = ids(1, 8)
    tries = {
        "generate": lambda: model.generate(tokens, max_new_tokens=2),
        "prepared mask": lambda: model(tokens, attention_mask=torch.ones(1, 1, 8, 8)),
        "attention weights": lambda: model.base_model(tokens, output_attentions=True),
        "other batches": lambda: model(ids(1, 8, seed=dist.get_rank())),
        "other lengths": lambda: model(ids(1, 8 + dist.get_rank())),
    }
    messages = {}
    for name, attempt in tries.items():
        try:
            attempt()
        except ValueError as error:
            messages[name] = str(error)
    return messages


def test_refused_at_the_first_forward():
    for messages in run_ranks(refusals, 2):
        assert "cp_size=2: generation is not supported" in messages["generate"]
        assert "must be 2-D" in messages["prepared mask"]
        assert "output_attentions=True" in messages["attention weights"]
        for name in ("other batches", "other lengths"):
            assert "different batches" in messages[name]

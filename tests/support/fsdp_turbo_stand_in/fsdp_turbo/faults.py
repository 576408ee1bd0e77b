"""Which generation the stand-in plays and which of the published faults it has.

no_divide_factor   the library forgets the factor it was given
moe_block          EFSDP wraps the whole MoE block instead of the experts it was told to wrap
skip_size_one      EFSDP on a group of one rank does nothing
no_expert_ids      no expert id table (the real library: with one expert a rank)
garbage_ids        a wrong id table (the real library: on a model made on meta)
sync_collectives   torch.distributed is patched process-wide to wait for every handle
Always there, as upstream: frozen experts become trainable, the bf16 policy is fixed, dim 1 is sharded.
"""

GENERATION = "NEW"
FAULTS: set[str] = set()
COMPATIBLE_ACCELERATOR_CALLS = 0


def configure(generation: str = "NEW", faults: tuple[str, ...] = ()) -> None:
    global GENERATION
    GENERATION = generation
    FAULTS.clear()
    FAULTS.update(faults)

"""Sharding: experts over ep and efsdp, everything else under FSDP2.

    expert_parallel.py   experts Shard(0) on ep; expert_fsdp.py their parameters over (efsdp, expert_cp)
    outer_fsdp.py        decoder layers and the root; unit_dtypes.py which parameters share a group
    expert_lora.py       adapters on stacked experts; adapted_experts.py runs them
    expert_bias.py       biases whose gradients are summed in float32
    gradient_copy.py     large gradients into FSDP's buffer by copies
    fsdp_turbo.py        the upstream library as backend
"""

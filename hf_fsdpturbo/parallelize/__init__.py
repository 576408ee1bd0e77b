"""From a model to a sharded model: ``order.py`` knows the order, ``build.py`` the doors.

    build.py            from a path or a model object to a sharded model, through the doors of TRL and Transformers
    order.py            kernels, context parallelism, experts, EFSDP, outer FSDP2, in this order
    adapter_of_load.py  the adapter and the packed weights of one load
    quantise.py         where packed weights meet experts, routers and adapters
    routed_experts.py   where sharding and dispatch meet
    autocast.py         bf16 compute as plain Trainer has it
    trainer_family.py   which of TRL's trainers, and its loader
    ignored_modules.py  parameters that no FSDP unit manages
    scale_check.py      a known gradient through every mesh, before training
    same_model.py       a model object must be the same on every rank
    reload.py           filling a sharded model again from Hub files
"""

"""The trainer mixin and the plain objects it owns.

    mixin.py             the only class that overrides methods of Transformers' trainers
    set_up.py            what happens round the parent's ``__init__``
    given_models.py      the models a trainer was given, replaced by sharded ones
    training.py          what happens round one call of ``train()``
    saving.py            checkpoints and Hub files
    staged_checkpoint.py one ``checkpoint-N`` while it is written
    resumed_from.py      which checkpoint a run goes on from
    resuming.py          filling model, optimizer, scheduler from it
    batches.py           what to count once where cp ranks share a batch
    evaluation.py        each sample counts once; the only owner of accelerator.gather
    step_norm.py         the gradient norm of a step, and its clip
    given_arguments.py   the arguments a trainer was given, by name
    reference.py         the reference model of preference trainers
    refusals.py          what the trainer is given and cannot work
"""

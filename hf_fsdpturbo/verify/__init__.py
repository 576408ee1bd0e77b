"""A shrunken copy of a user's model, their layout and arguments, on local ranks against one plain process.

``commands/verify_door.py`` checks the words and reads the user's files (``users_config.py``) into ``to_prove.py``.
``proof.py`` has the order: ``small_model.py`` (with ``shrunk_config.py`` and ``random_weights.py``, which the family
sweep of the tests uses too) makes the model, ``few_ranks.py`` says on how many ranks, ``processes.py`` forks them or
starts them afresh (``fresh.py``) with work of ``jobs.py``, ``runs.py`` has each run by our trainer and by TRL's on
``made_data.py``, ``recording.py`` what it leaves behind, ``compared.py`` the distances (both used by the tests),
``verdicts.py`` rows and table. ``faults.py`` is what ``--inject`` breaks.
"""

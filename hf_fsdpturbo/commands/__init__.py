"""Commands: what ``hf-fsdpturbo`` runs; each checks its words before anything heavy is imported.

``launched.py`` checks a recipe's line and becomes ``accelerate launch``: ``launch_options.py`` knows processes and
machines, ``recipe_words.py`` the recipe's own arguments. The recipes are ``sft.py``, ``dpo.py``, ``reward.py``; they
share ``train.py``, ``recipe.py`` (arguments, data sets), ``data_file.py`` (one file) and ``one_error.py`` (one error a
failure). ``configs.py``, ``doctor_door.py``, ``export_door.py`` and ``verify_door.py`` are commands of their own.
``one_line.py`` is the parser of all: one line, exit status 2.
"""

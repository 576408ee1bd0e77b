"""A shrunken copy of a user's model, their layout and arguments, on local ranks against one plain process.

commands/verify_door.py   the words, checked early; what the user's files say
asked.py                  what is to be proven: model, sizes, arguments, fault
layouts.py                sizes by name; the user's layout on few ranks; another one to resume at
shrunk_config.py          any config with small sizes, one layer of each kind  (also of tests/families)
small_model.py            how small: heads as they are, experts above top-k; random weights, saved as released
runs.py                   each run, by our trainer on ranks and by TRL's in one process
recording.py, compared.py what a run leaves behind; distances  (also of tests/support)
faults.py                 what --inject breaks
proof.py                  the order of it all; verdicts.py rows and the table
"""

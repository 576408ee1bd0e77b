"""Commands: what the recipes share.

recipe.py      arguments parsed strictly, data sets by TRL's two ways, what was typed and cannot work
one_error.py   one error a failure, however many ranks meet it
"""

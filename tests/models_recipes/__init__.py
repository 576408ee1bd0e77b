"""The ready recipes of ``recipes/models``: from one table, written by plan, run with small models on CPU ranks.

    table.py     models, devices, kinds, and the settings of each kind
    written.py   the recipe of one row, by plan's search; the table of plan.md
    planned.py   a recipe's file as plan reads it
    run.py       two steps of a recipe on CPU ranks, its model shrunk at its layout
"""

"""Dispatchers: each brings tokens to the ranks that hold their experts and the results back.

    dispatcher.py     what a dispatcher is, and the table of those that exist
    eager.py          the reference; fused.py, domino.py, mc2.py, auto.py the others
    row_exchange.py   all-to-all of rows; flight.py and side_stream.py run it beside other work
    routing_plan.py   who sends what where; packed_rows.py the rows that fused sends
    over_nodes.py     fused in two stages where the ep group spans nodes; node_plan.py its plan
    recompute.py      activation checkpointing replays routing; kept_attention.py what it keeps of attention
"""

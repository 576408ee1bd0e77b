"""LoRA on sharded models: adapters go in before sharding and are drawn as in one process.

    adapter.py         making, hiding, drawing
    adapter_files.py   PEFT's files, both ways
    merged_export.py   the Hub checkpoint with the adapter merged
"""

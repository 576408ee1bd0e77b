"""``hf-fsdpturbo merge``: an adapter's files and its base's files become one model's files, a few rows at a time.

    adapter_config.py   what an adapter says of itself; refusals before anything heavy is imported
    adapter_plan.py     which file tensor does what to which parameter, by PEFT on meta
    base_model.py       the base's class on meta, with the adapter's vocabulary and head
    base_weights.py     the base's files as parameters of its model, rows at a time
    merged_rows.py      rows of the merged parameters, for the Hub export
    merged_files.py     the order of it all; config, tokenizer, chat template
"""

"""Packed documents, at any cp size: where they begin, what a layer may read, masks for models that do not look.

    documents.py        documents of a batch, handed to linear attention
    sequence_plan.py    what every layer needs to know of the whole sequence
    prepared_masks.py   masks for models that build theirs without positions
    text_models.py      the module that owns the decoder layers
"""

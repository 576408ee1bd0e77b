"""Loading: every rank reads its own slices of a checkpoint while ``from_pretrained`` builds the model.

    seam.py          the loader seam: shard on meta, then let Transformers read slices
    files.py         all files there and whole; headers.py compares them with the model
    open_files.py    files are opened by who needs a part of them
    conversions.py   what a conversion may do on slices; source_map.py which tensor goes where
    whole_sources.py all other conversions, one at a time; loading_check.py compares with the files
    packed_release.py  MXFP4 and FP8 as if they were stored in full
    unused_keys.py   what the model class does not use
    heads.py         task heads that a checkpoint lacks, drawn as in one process
    dtypes.py        what Transformers keeps in float32
    from_rank0.py    rank 0 reads and scatters; from_dcp.py reads a DCP directory
    host_memory.py   freed memory goes back at once
"""

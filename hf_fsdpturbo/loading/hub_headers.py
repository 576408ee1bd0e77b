"""Headers of a Hub id's weight files that are still to be downloaded: the Hub sends the first bytes of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hf_fsdpturbo.bounded import cut
from hf_fsdpturbo.checkpoint.hub import INDEX, SINGLE
from hf_fsdpturbo.checkpoint.inside import path_inside
from hf_fsdpturbo.loading.open_files import Headers
from hf_fsdpturbo.loading.small_files import weight_map
from hf_fsdpturbo.ranks import FAILURES

AT_ONCE = 8
"""Files that are asked for at the same time."""


def hub_headers(
    path: str, folder: str, from_pretrained_kwargs: Mapping[str, Any], fetch: Callable[[str], str | None]
) -> Headers:
    """Read them without the weights, at the revision and with the token of ``from_pretrained``.

    Args:
        path: Hub id.
        folder: of the snapshot, for the names in an index.
        from_pretrained_kwargs: ``revision``, ``token`` and ``subfolder`` are read.
        fetch: puts a small file into the cache and says where it is; None where the Hub has none.

    Returns:
        headers by file; none where the weights are in another format, or the Hub may not be asked.

    Raises:
        ValueError: the Hub does not send them; names the Hub id.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import EntryNotFoundError, OfflineModeIsEnabled

    api, kwargs = HfApi(token=from_pretrained_kwargs.get("token")), from_pretrained_kwargs
    inside = f"{kwargs['subfolder']}/" if kwargs.get("subfolder") else ""

    def header(name: str) -> dict[str, Any]:
        found = api.parse_safetensors_file_metadata(path, inside + name, revision=kwargs.get("revision"))
        return {key: {"dtype": entry.dtype, "shape": list(entry.shape)} for key, entry in found.tensors.items()}

    try:
        try:
            return {SINGLE: header(SINGLE)}
        except EntryNotFoundError:
            if (index := fetch(INDEX)) is None:
                return {}
        names = sorted(set(weight_map(index).values()))
        for name in names:
            path_inside(folder, name, index)
        with ThreadPoolExecutor(AT_ONCE) as threads:
            return dict(zip(names, threads.map(header, names), strict=True))
    except OfflineModeIsEnabled:
        return {}  # from_pretrained says that weights are missing
    except ValueError:
        raise
    except FAILURES as error:  # of the network, the Hub, or a header
        raise ValueError(f"The headers of {cut(path)}'s weight files cannot be read from the Hub: {error}") from error

"""Files of a safetensors checkpoint before they are read: all there, whole, with the keys that the index promises."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from hf_fsdpturbo.bounded import check_path, cut
from hf_fsdpturbo.checkpoint.commit import read_json
from hf_fsdpturbo.checkpoint.hub import INDEX, SINGLE
from hf_fsdpturbo.checkpoint.inside import check_link, check_links, path_inside
from hf_fsdpturbo.loading.config_values import CONFIG, asks_for_much, check_counts, raw_config
from hf_fsdpturbo.loading.hub_headers import hub_headers
from hf_fsdpturbo.loading.open_files import Headers
from hf_fsdpturbo.loading.small_files import check_small_files, weight_map
from hf_fsdpturbo.quantised.methods import packed_as
from hf_fsdpturbo.quantised.packed_pairs import paired
from hf_fsdpturbo.ranks import FAILURES, from_node_leader, node, rank

WHERE = ("revision", "subfolder", "cache_dir", "token")
"""Keywords of ``from_pretrained`` that say where its files are."""
OTHER_FORMATS = ("gguf_file", "variant", "state_dict", "transformers_weights")
"""Keywords with which it reads other files than these two; what is wrong with those is left to Transformers."""

DTYPES = frozenset(
    "BOOL U8 U16 U32 U64 I8 I16 I32 I64 F16 BF16 F32 F64 C64 F4 F6_E2M3 F6_E3M2 F8_E4M3 F8_E4M3FNUZ F8_E5M2 "
    "F8_E5M2FNUZ F8_E8M0".split()
)
"""What a safetensors header may say of a tensor's dtype."""

# Note [When a checkpoint's files are looked at]
# Before the model is built: a local directory, and the snapshot of a Hub id if all its files are in the cache. Which
# snapshot is meant is asked as Transformers asks: an old one says nothing about the one that will be read. What has to
# be downloaded is looked at after that, by each rank: it may take longer than ranks wait for each other. But where the
# config asks for more than released models have, the Hub is asked for the headers alone, and first.


def local_headers(path: str, from_pretrained_kwargs: Mapping[str, Any]) -> tuple[str, Headers] | None:
    """Folder and headers of a checkpoint on this machine; None for a Hub id whose files are still to be downloaded.

    Raises:
        ValueError: as :func:`checked_folder`.
    """
    folder = config_folder(path, from_pretrained_kwargs)
    if folder is None:
        return None
    is_local = os.path.isdir(base_of_adapter(path))
    if not _other_format(from_pretrained_kwargs) and (is_local or _is_whole(folder)):
        return folder, checked_folder(folder)
    if (config := raw_config(folder)) is not None:
        headers: Headers = {}
        if asks_for_much(config) and not is_local and not _other_format(from_pretrained_kwargs):
            headers = hub_headers(
                path, folder, from_pretrained_kwargs, lambda name: _cached_file(path, name, from_pretrained_kwargs)
            )
        check_counts(os.path.join(folder, CONFIG), config, headers)
    return (folder, {}) if is_local else None


def config_folder(path: str, from_pretrained_kwargs: Mapping[str, Any]) -> str | None:
    """Where the config of a checkpoint is: in its folder, or in the cache, where it is put if it is not yet there."""
    path = base_of_adapter(path)
    if os.path.isdir(path):
        return os.path.join(path, from_pretrained_kwargs.get("subfolder") or "")
    found = _cached_file(path, CONFIG, from_pretrained_kwargs)
    return None if found is None else os.path.dirname(found)


def _is_whole(snapshot: str) -> bool:
    """Whether no weight file is missing; one that the index names, but not as a name, is not missed."""
    if os.path.exists(os.path.join(snapshot, SINGLE)):
        return True
    if not os.path.exists(index := os.path.join(snapshot, INDEX)):
        return False
    check_link(snapshot, index)
    content = read_json(index)
    names = content.get("weight_map") if isinstance(content, dict) else None
    named = {name for name in names.values() if isinstance(name, str)} if isinstance(names, dict) else set()
    return all(os.path.exists(path_inside(snapshot, name, index)) for name in named)


def _cached_file(path: str, name: str, from_pretrained_kwargs: Mapping[str, Any], **more: Any) -> str | None:
    """A file of a Hub id in the cache, None where there is none; what is wrong is left to who needs the file."""
    from transformers.utils import cached_file

    where = {key: from_pretrained_kwargs[key] for key in WHERE if from_pretrained_kwargs.get(key)}
    quiet: dict[str, Any] = {
        "_raise_exceptions_for_gated_repo": False,
        "_raise_exceptions_for_missing_entries": False,
        "_raise_exceptions_for_connection_errors": False,
    }
    return cached_file(path, name, **more, **where, **quiet)


def headers_of_node(
    path: str, from_pretrained_kwargs: Mapping[str, Any]
) -> tuple[BaseException | None, tuple[str, Headers] | None]:
    """As :func:`local_headers`, read by one rank a node. Collective.

    Returns:
        what went wrong, to be raised where all ranks raise together; folder and headers.
    """
    fault: BaseException | None = None
    found: tuple[str, Headers] | None = None
    try:
        if node()[1][0] == rank():
            found = local_headers(path, from_pretrained_kwargs)
    except FAILURES as caught:
        fault = caught
    return from_node_leader((fault, found))


def cached_headers(path: str, from_pretrained_kwargs: Mapping[str, Any]) -> tuple[str, Headers]:
    """Folder and headers of what ``from_pretrained`` has just downloaded, or found in the cache; nothing is fetched.

    Raises:
        ValueError: as :func:`check_checkpoint_files`.
    """
    for name in () if _other_format(from_pretrained_kwargs) else (SINGLE, INDEX):
        found = _cached_file(path, name, from_pretrained_kwargs, local_files_only=True)
        if found is not None:
            return os.path.dirname(found), checked_folder(os.path.dirname(found))
    return path, {}


def refuse_impossible(path: str, from_pretrained_kwargs: Mapping[str, Any]) -> None:
    """Before anything is made of a model's folder: its files are plain ones, and its config asks for what they hold.

    Raises:
        ValueError: as :func:`local_headers` where the config asks for very much; as :func:`check_links`.
    """
    given = os.path.join(path, "")  # as config_folder writes it
    if os.path.isdir(given):
        check_links(given)
    folder = config_folder(path, from_pretrained_kwargs)
    for place in dict.fromkeys((given, folder)):  # of an adapter and its base, of a subfolder, of a snapshot
        if place is not None and os.path.isdir(place):
            if place != given:
                check_links(place)
            check_small_files(place)
    config = raw_config(folder) if folder is not None and os.path.isdir(folder) else None
    if config is not None and asks_for_much(config):
        local_headers(path, from_pretrained_kwargs)


ADAPTER_CONFIG = "adapter_config.json"


def base_of_adapter(path: str) -> str:
    """Where Transformers reads the weights of ``path``: a folder of adapter files alone names its base.

    Raises:
        ValueError: it names none; names the file.
    """
    check_path("model", path)
    described = os.path.join(path, ADAPTER_CONFIG)
    if os.path.exists(os.path.join(path, CONFIG)) or not os.path.isfile(described):
        return path
    check_link(path, described)
    content = read_json(described)
    base = content.get("base_model_name_or_path") if isinstance(content, dict) else None
    if not isinstance(base, str) or not base:
        raise ValueError(f"{described} names no base_model_name_or_path. Add it, or merge the adapter first.")
    check_path(f"{described}: base_model_name_or_path", base)
    return base


def refuse_trusted_base(path: str, trusted: bool, named: str | None = None) -> None:
    """``trust_remote_code`` is for the path that was given, not for another one that a file there names.

    Args:
        path: as it was given.
        trusted: ``trust_remote_code``.
        named: the base that will be loaded; None: that of :func:`base_of_adapter`.

    Raises:
        ValueError: the path is an adapter, whose base would be trusted as well.
    """
    base = named or base_of_adapter(path)
    if trusted and base != path:
        raise ValueError(
            f"trust_remote_code=True was given for {path}, an adapter whose {ADAPTER_CONFIG} names the base {base!r}: "
            "its code is not run on a file's word. Pass the base as model, and its adapter through load_adapter."
        )


def _other_format(from_pretrained_kwargs: Mapping[str, Any]) -> bool:
    named = any(from_pretrained_kwargs.get(name) is not None for name in OTHER_FORMATS)
    return named or from_pretrained_kwargs.get("use_safetensors") is False


def checked_folder(folder: str) -> Headers:
    """:func:`check_checkpoint_files`, and what ``config.json`` beside them says against what they hold.

    Of a packed release they are headers of what its weights are in full.

    Raises:
        ValueError: naming the file, and key or field.
    """
    headers, config = check_checkpoint_files(folder), raw_config(folder)
    if config is None:
        return headers
    check_counts(os.path.join(folder, CONFIG), config, headers)
    release = packed_as(config, f"The checkpoint {folder}")
    return headers if release is None else paired(folder, headers, release)


def check_checkpoint_files(folder: str) -> Headers:
    """Read the headers of a local safetensors checkpoint: every file of the index is there, whole, and has its keys.

    One file goes before an index, as in Transformers. Other formats give no headers.

    Raises:
        ValueError: naming the file, and the key where there is one.
    """
    if os.path.isfile(single := os.path.join(folder, SINGLE)):
        check_link(folder, single)
        return {SINGLE: safetensors_header(single)}
    if not os.path.isfile(index := os.path.join(folder, INDEX)):
        return {}
    check_link(folder, index)
    files = weight_map(index)
    names = sorted(set(files.values()))
    headers = {name: safetensors_header(path_inside(folder, name, index)) for name in names}
    for key, name in files.items():
        if key not in headers[name]:
            raise ValueError(f"{os.path.join(folder, name)} lacks the key {cut(key)} that the index promises.")
    return headers


def safetensors_header(path: str) -> dict[str, Any]:
    """Header of one safetensors file: key -> ``{dtype, shape}``; dtypes as the file names them (``BF16``).

    Raises:
        ValueError: the file is missing, is not safetensors, has a dtype nobody knows, or is shorter than its header
            says.
    """
    from safetensors import SafetensorError, safe_open

    if not os.path.isfile(path):
        raise ValueError(f"{path} is missing: the checkpoint's index names it. Copy the whole checkpoint.")
    try:
        with safe_open(path, framework="pt") as file:
            entries = ((key, file.get_slice(key)) for key in file.keys())  # noqa: SIM118  (not a dict)
            return {key: {"dtype": entry.get_dtype(), "shape": entry.get_shape()} for key, entry in entries}
    except (SafetensorError, OSError) as error:
        for key, dtype in _unknown_dtypes(path).items():
            raise ValueError(
                f"{path}: {cut(key)[1:-1]} has dtype {cut(dtype)}, but safetensors knows {sorted(DTYPES)}. Copy the "
                "file again, or convert the checkpoint."
            ) from error
        size = os.path.getsize(path)
        raise ValueError(
            f"{path} has no readable safetensors header or is truncated ({size} bytes; {error}). Copy the file again."
        ) from error


def _unknown_dtypes(path: str) -> dict[str, Any]:
    """Key -> dtype of what safetensors could not read for its dtype; empty where the header itself is broken."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > os.path.getsize(path):
            return {}
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError):
            return {}
    entries = header.items() if isinstance(header, dict) else ()
    named = {key: entry["dtype"] for key, entry in entries if isinstance(entry, dict) and "dtype" in entry}
    named.pop("__metadata__", None)
    return {key: dtype for key, dtype in named.items() if not isinstance(dtype, str) or dtype not in DTYPES}

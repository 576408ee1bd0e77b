"""A Hub id that is not in the cache: refused by its headers before it is built, against a small Hub of our own."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from huggingface_hub import constants

from hf_fsdpturbo.loading import seam
from hf_fsdpturbo.loading.files import local_headers, refuse_impossible

COMMITS = {"main": "1" * 40, "v2": "2" * 40}


class Hub(BaseHTTPRequestHandler):
    """``/somebody/moe/resolve/REVISION/FILE``: heads, and bytes of a range; what was sent is counted."""

    folders: ClassVar[dict[str, Path]] = {}
    sent: ClassVar[dict[str, int]] = {}
    tokens: ClassVar[set[str | None]] = set()

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        revision, _, name = self.path.partition("/resolve/")[2].partition("/")
        path = self.folders[revision] / name if revision in self.folders else Path("nowhere")
        if "/resolve/" in self.path:  # the library asks for lists of its own, too
            self.tokens.add(self.headers.get("authorization"))
        if not path.is_file():
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("X-Repo-Commit", COMMITS.get(revision, "3" * 40))
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        content = path.read_bytes()
        ranged = self.headers.get("range") if body else None
        if ranged:
            first, last = ranged.removeprefix("bytes=").split("-")
            content = content[int(first) : int(last) + 1]
        self.send_response(206 if ranged else 200)
        self.send_header("X-Repo-Commit", COMMITS[revision])
        self.send_header("ETag", f'"{abs(hash(path)):x}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)
            self.sent[name] = self.sent.get(name, 0) + len(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch) -> Iterator[type[Hub]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, address)
    for name, value in (
        ("HUGGINGFACE_CO_URL_TEMPLATE", template), ("ENDPOINT", address), ("HF_HUB_OFFLINE", False),
    ):  # fmt: skip
        monkeypatch.setattr(constants, name, value)
    Hub.sent, Hub.tokens, Hub.folders = {}, set(), {}
    yield Hub
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("pieces", [{}, {"max_shard_size": "20KB"}])
def test_a_hub_id_that_is_not_cached_is_refused_before_it_is_built(hub, tiny, tmp_path, pieces):
    """At the revision and in the subfolder that were asked for, with the token; no weights are fetched for it."""
    good = Path(tiny("qwen3_moe", **pieces))
    bad = tmp_path / "bad" / "inner"
    bad.mkdir(parents=True)
    for file in good.iterdir():
        (bad / file.name).write_bytes(file.read_bytes())
    config = json.loads((good / "config.json").read_text())
    (bad / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1000}))
    hub.folders = {"main": good, "v2": bad.parent}
    where = {"cache_dir": str(tmp_path / "cache"), "revision": "v2", "subfolder": "inner", "token": "hf_mine"}
    for attempt in (
        lambda: seam.load_whole("somebody/moe", lambda *args, **kwargs: pytest.fail("it was built"), **where),
        lambda: refuse_impossible("somebody/moe", where),
    ):
        with pytest.raises(ValueError, match=r"2/inner/config.json: num_hidden_layers=1000, but .* tensors in all"):
            attempt()
    assert hub.tokens == {"Bearer hf_mine"}
    assert all(size <= 2 * 100_001 for name, size in hub.sent.items() if name.endswith(".safetensors"))
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    assert local_headers("somebody/moe", {"cache_dir": str(tmp_path / "cache")}) is None  # an ordinary size: no look
    assert set(hub.sent) >= {"config.json"}
    assert not [name for name in hub.sent if "/" not in name and name.endswith("safetensors")]


def test_a_hub_that_does_not_answer_is_named(hub, tiny, tmp_path):
    """No headers, no thousand layers; in another format nobody can tell; offline from_pretrained says what lacks."""
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "num_hidden_layers": 1000}))
    hub.folders = {"main": bare}
    where = {"cache_dir": str(tmp_path / "cache")}
    assert local_headers("somebody/moe", where) is None
    (bare / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ValueError, match="The headers of 'somebody/moe'"):
        local_headers("somebody/moe", where)
    constants.HF_HUB_OFFLINE = True
    assert local_headers("somebody/moe", where) is None

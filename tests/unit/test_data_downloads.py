"""Data sets behind URLs: real HTTP servers on loopback, and the cache of what was downloaded."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import httpx
import pytest

from everroll.contracts.rollout import DatasetRef
from everroll.data.downloads import DownloadCache
from everroll.failures import ConfigurationError
from everroll.prompts import DatasetCache, load_dataset

BODY = b'{"text": "one"}\n{"text": "two"}\n'


@dataclass
class FileServer:
    """Serves files by path; counts what was asked for."""

    url: str
    files: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    cuts_off: bool = False
    """Close the connection in the middle of every answer."""


@contextlib.contextmanager
def serve_files() -> Iterator[FileServer]:
    server = FileServer("")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server.requests.append(self.path)
            body = server.files.get(self.path.partition("?")[0])
            self.send_response(404 if body is None else 200)
            body = body if body is not None else b"no such file"
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[:5] if server.cuts_off else body)
            self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        server.url = f"http://127.0.0.1:{http.server_port}"
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            http.shutdown()
            thread.join(10)


@pytest.fixture
def files() -> Iterator[FileServer]:
    with serve_files() as server:
        yield server


@pytest.fixture
def cache(tmp_path: Path) -> DownloadCache:
    return DownloadCache(tmp_path / "cache")


def refer(url: str, fingerprint: str) -> DatasetRef:
    return DatasetRef(path=url, fingerprint=fingerprint, num_prompts=2, seed=0, shuffle=False)


async def test_a_worker_takes_what_was_downloaded_before(files: FileServer, cache: DownloadCache) -> None:
    url = f"{files.url}/prompts.jsonl?version=1"
    files.files["/prompts.jsonl"] = BODY
    prepared = load_dataset(url, cache=cache)
    assert [prompt.messages[0]["content"] for prompt in prepared.prompts] == ["one", "two"]
    prompt = await DatasetCache(cache).find_prompt(refer(url, prepared.fingerprint), 1)
    assert prompt.messages[0]["content"] == "two"
    assert files.requests == ["/prompts.jsonl?version=1"]
    assert [path.name[0] for path in cache.root.iterdir()] != ["."], "nothing unfinished is left"


async def test_what_changed_behind_the_url_is_refused(files: FileServer, cache: DownloadCache, tmp_path: Path) -> None:
    url = f"{files.url}/prompts.jsonl"
    files.files["/prompts.jsonl"] = BODY
    before = load_dataset(url, cache=cache).fingerprint
    files.files["/prompts.jsonl"] = BODY + b'{"text": "three"}\n'
    after = load_dataset(url, cache=cache).fingerprint
    elsewhere = DatasetCache(DownloadCache(tmp_path / "another machine"))
    with pytest.raises(ConfigurationError) as caught:
        await elsewhere.find_prompt(refer(url, before), 0)
    assert before in str(caught.value)
    assert after in str(caught.value)
    # Where it had been downloaded in time, the run goes on with what it started with.
    assert (await DatasetCache(cache).find_prompt(refer(url, before), 1)).messages[0]["content"] == "two"


async def test_a_damaged_download_is_fetched_again(files: FileServer, cache: DownloadCache) -> None:
    url = f"{files.url}/prompts.jsonl"
    files.files["/prompts.jsonl"] = BODY
    fingerprint = load_dataset(url, cache=cache).fingerprint
    (copy,) = cache.root.glob("*/00000.jsonl")
    copy.write_bytes(BODY[:20])
    assert (await DatasetCache(cache).find_prompt(refer(url, fingerprint), 1)).messages[0]["content"] == "two"
    assert len(files.requests) == 2


def test_urls_and_local_files_may_be_mixed(files: FileServer, cache: DownloadCache, tmp_path: Path) -> None:
    local = tmp_path / "local.jsonl"
    local.write_bytes(b'{"text": "zero"}\n')
    files.files["/prompts.jsonl"] = BODY
    dataset = load_dataset([str(local), f"{files.url}/prompts.jsonl"], cache=cache)
    assert [prompt.messages[0]["content"] for prompt in dataset.prompts] == ["zero", "one", "two"]


def test_a_server_that_refuses_is_terminal_and_a_broken_connection_is_not(
    files: FileServer, cache: DownloadCache
) -> None:
    with pytest.raises(ConfigurationError, match=r"(?s)none\.jsonl cannot be downloaded.*404.*no such file"):
        load_dataset(f"{files.url}/none.jsonl", cache=cache)
    files.files["/prompts.jsonl"] = BODY
    files.cuts_off = True
    with pytest.raises(httpx.RemoteProtocolError):
        load_dataset(f"{files.url}/prompts.jsonl", cache=cache)
    assert list(cache.root.iterdir()) == []


def test_other_schemes_go_through_fsspec(cache: DownloadCache) -> None:
    with fsspec.open("memory://bucket/prompts.jsonl", "wb") as file:
        file.write(BODY)
    assert len(load_dataset("memory://bucket/prompts.jsonl", cache=cache)) == 2
    with pytest.raises(ConfigurationError, match="not found"):
        load_dataset("memory://bucket/none.jsonl", cache=cache)
    with pytest.raises(ConfigurationError, match=r"nosuch:// URLs are read through fsspec and its package"):
        load_dataset("nosuch://bucket/prompts.jsonl", cache=cache)

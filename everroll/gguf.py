"""GGUF files as a starting point: unpacked once into a checkpoint directory, which everything else then works on.

Quantised tensors are unpacked to floats, so the directory is larger than the file. The session server, the engines and
the trainer only ever see the directory. `python -m everroll.gguf FILE DIRECTORY` unpacks by hand, for engines that are
started by hand.

Which architectures can be unpacked is transformers' to say; the tokenizer and its chat template come from the file too.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SUFFIX = ".gguf"
UNPACKED_DIR = Path(".everroll") / "gguf"
_SCHEMA = 1
"""Part of the directory's name: raise it when files are to be unpacked anew."""


class GgufError(ValueError):
    """A GGUF file cannot be unpacked; the message says why."""


def name_unpacked(path: Path, parent: Path) -> Path:
    """Where a file is unpacked to: a file that changed (by size or time) goes elsewhere.

    Raises:
        GgufError: no such file.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise GgufError(f"{path} cannot be read: {error.strerror}") from error
    text = f"{_SCHEMA}\0{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}"
    return parent / f"{path.stem}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"


def unpack_gguf(path: Path, directory: Path) -> Path:
    """Make a checkpoint directory (float32) of a GGUF file, unless it is there; it appears whole or not at all.

    Several processes may ask at once: one works, the others wait for it.

    Raises:
        GgufError: unreadable, of an unknown architecture, or a package is missing.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _lock(directory.parent / f".{directory.name}.lock"):
        if directory.is_dir():
            return directory
        temporary = directory.parent / f".tmp-{directory.name}-{uuid.uuid4().hex}"
        try:
            _write_checkpoint(path, temporary)
            os.rename(temporary, directory)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return directory


def _write_checkpoint(path: Path, directory: Path) -> None:
    """The model without its mark of quantisation, which would keep it from being saved; and the tokenizer."""
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging as transformers_logging
    except ImportError as error:
        raise GgufError(f"{path}: unpacking needs the packages torch and transformers") from error
    transformers_logging.disable_progress_bar()
    try:
        where: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
        model = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **where)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, **where)
    except ImportError as error:
        raise GgufError(f"{path}: unpacking needs pip install 'everroll[gguf]' ({error})") from error
    except Exception as error:  # the tokenizers library raises plain Exception
        raise GgufError(f"{path} cannot be unpacked: {error}") from error
    finally:
        transformers_logging.enable_progress_bar()
    model.config.__dict__.pop("quantization_config", None)
    model.hf_quantizer = None
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        print("usage: python -m everroll.gguf FILE.gguf DIRECTORY", file=sys.stderr)
        return 2
    try:
        print(unpack_gguf(Path(arguments[0]), Path(arguments[1])))
    except GgufError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

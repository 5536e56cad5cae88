"""Signatures by SSH keys, as `ssh-keygen -Y` makes and checks them."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from nsa_tune._errors import NsaTuneError, StoreError, UsageError

NAMESPACE = "nsa-tune"
"""What a signature is for: one made for another purpose does not hold here."""
_TIMEOUT_S = 60.0
_MOST_SIGNERS = 16


def sign(data: bytes, key: Path) -> bytes:
    """The signature of `data` by the private key in the file `key`, or the public one of a key that
    the SSH agent holds.

    Raises:
        UsageError: when `key` cannot sign.
    """
    done = _ssh_keygen("sign", "-f", str(key), "-n", NAMESPACE, sent=data)
    if done.returncode:
        raise UsageError(f"{key} cannot sign: {_last_line(done)}")
    return done.stdout


def signer_of(data: bytes, signature: bytes, allowed: Path) -> str:
    """Whoever in the file `allowed` (the format of `ssh-keygen`'s allowed_signers) signed `data`.

    Raises:
        UsageError: when `allowed` is no file.
        StoreError: when nobody in it signed this.
    """
    if not allowed.is_file():
        raise UsageError(f"there is no file {allowed} of allowed signers")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "signature")
        path.write_bytes(signature)
        common = ("-f", str(allowed), "-s", str(path))
        found = _ssh_keygen("find-principals", *common)
        if found.returncode:
            raise StoreError(f"it is signed by nobody whom {allowed} allows ({_last_line(found)})")
        names = found.stdout.decode("utf-8", "replace").splitlines()[:_MOST_SIGNERS]
        for name in names:
            done = _ssh_keygen("verify", *common, "-I", name, "-n", NAMESPACE, sent=data)
            if done.returncode == 0:
                return name
    raise StoreError(f"its signature is not one of this content by {' or '.join(names)}")


def _ssh_keygen(act: str, *arguments: str, sent: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command: Sequence[str] = ("ssh-keygen", "-Y", act, *arguments)
    try:
        return subprocess.run(
            command, input=sent, capture_output=True, check=False, timeout=_TIMEOUT_S
        )
    except OSError as error:
        raise NsaTuneError(
            f"signatures need ssh-keygen of OpenSSH 8.1 or later: {error.strerror}"
        ) from error
    except subprocess.TimeoutExpired:
        raise NsaTuneError(f"ssh-keygen -Y {act} did not end within {_TIMEOUT_S:g} s") from None


def _last_line(done: subprocess.CompletedProcess[bytes]) -> str:
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else f"ssh-keygen ended with {done.returncode}"

"""Signs and verifies the hashes of receipts: DSSE envelopes of in-toto statements, signed with Ed25519.

A signature is not part of its receipt; it is in `signatures/RUN.dsse.json` of the state folder. The library
`cryptography` is loaded only if a key is used.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from backplane.contract import canonical
from backplane.contract.canonical import Json
from backplane.errors import ConfigError, install_hint
from backplane.receipts.database import ChainCheckpoint
from backplane.receipts.journal import disk_error, replace_file
from backplane.receipts.trace import read_plain

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

    from backplane.contract.receipt import Receipt

T = TypeVar("T")

PAYLOAD_TYPE: Final = "application/vnd.in-toto+json"
STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"
RECEIPT_TYPE: Final = "urn:abp:v0.1:receipt"
CHECKPOINT_TYPE: Final = "urn:abp:v0.1:checkpoint"
FOLDER: Final = "signatures"
SUFFIX: Final = ".dsse.json"
KEY_BYTES_MAX: Final = 16 * 1024
"""Maximum size of a key's file; a key in PEM has 120 bytes."""
ENVELOPE_BYTES_MAX: Final = 64 * 1024
"""Maximum size of an envelope; a usual one has 1 KiB, and one with several signatures a few KiB."""
_HEX: Final = re.compile(r"[0-9a-fA-F]{64}")


class Signature(msgspec.Struct, frozen=True):
    """One signature of an envelope."""

    sig: bytes
    keyid: str = ""
    """Name of the key, from `key_id`; only a hint, which verification ignores."""


class Envelope(msgspec.Struct, frozen=True):
    """A DSSE envelope (secure-systems-lab/dsse, v1); its bytes are written in base64."""

    payload: bytes
    """The in-toto statement."""
    payloadType: str
    signatures: tuple[Signature, ...]


class Subject(msgspec.Struct, frozen=True):
    """Subject of a statement."""

    digest: dict[str, str]
    """Name of the hash → its value in hex."""


class Statement(msgspec.Struct, frozen=True, rename={"type": "_type"}):
    """An in-toto statement."""

    type: str
    predicateType: str
    subject: tuple[Subject, ...]
    predicate: Json = None


class Signer:
    """Signs with one private key. Raises ConfigError, `config_invalid`: as `private_key`."""

    def __init__(self, key: str) -> None:
        self._key = private_key(key)
        self._id = key_id(self._key.public_key())

    def receipt(self, receipt: Receipt) -> bytes:
        """Sign a sealed receipt; return the envelope."""
        assert receipt.receipt_sha256 is not None, "the receipt is sealed"
        meta = receipt.meta
        about = {"run_id": meta.run_id, "contract_version": meta.contract_version, "outcome": receipt.outcome}
        return self._sign(_statement(RECEIPT_TYPE, f"receipt:{meta.run_id}", receipt.receipt_sha256, about))

    def checkpoint(self, head: ChainCheckpoint) -> bytes:
        """Sign the head of the chain; return the envelope."""
        return self._sign(_statement(CHECKPOINT_TYPE, "chain", head.link, msgspec.to_builtins(head)))

    def _sign(self, payload: bytes) -> bytes:
        signature = Signature(self._key.sign(signed_bytes(PAYLOAD_TYPE, payload)), self._id)
        return msgspec.json.encode(Envelope(payload, PAYLOAD_TYPE, (signature,))) + b"\n"


def _statement(kind: str, name: str, sha256: str, about: Json) -> bytes:
    """Encode an in-toto statement over one hash."""
    subject = [{"name": name, "digest": {"sha256": sha256}}]
    return canonical.encode({"_type": STATEMENT_TYPE, "subject": subject, "predicateType": kind, "predicate": about})


def signed_bytes(kind: str, payload: bytes) -> bytes:
    """Return the bytes that are signed for a payload: the pre-authentication encoding of DSSE."""
    return b"DSSEv1 %d %s %d %s" % (len(kind.encode()), kind.encode(), len(payload), payload)


def verified(data: bytes, key: Ed25519PublicKey, kind: str) -> Statement:
    """Verify an envelope; return its statement.

    Args:
        kind: predicate type that the statement must have.

    Raises:
        ValueError: no envelope, another kind of statement, or no signature by this key; with the reason.
    """
    envelope = msgspec.json.decode(data, type=Envelope)
    if envelope.payloadType != PAYLOAD_TYPE:
        raise ValueError(f"its payload is {envelope.payloadType[:80]!r}")
    signed = signed_bytes(PAYLOAD_TYPE, envelope.payload)
    if not any(_is_by(key, signature.sig, signed) for signature in envelope.signatures):
        raise ValueError("no signature of it is by this key")
    statement = msgspec.json.decode(envelope.payload, type=Statement)
    if (statement.type, statement.predicateType) != (STATEMENT_TYPE, kind):
        raise ValueError(f"its statement is none of the type {kind}")
    return statement


def _is_by(key: Ed25519PublicKey, signature: bytes, signed: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(signature, signed)
    except InvalidSignature:
        return False
    return True


def receipt_fault(data: bytes | None, key: Ed25519PublicKey, sha256: str | None) -> str | None:
    """Return why an envelope does not prove that this key signed a receipt with this hash; None if it does."""
    if data is None:
        return "it is not signed"
    try:
        statement = verified(data, key, RECEIPT_TYPE)
    except (ValueError, RecursionError) as error:
        return f"its signature does not hold: {error}"
    is_same = [one.digest.get("sha256") for one in statement.subject] == [sha256]
    return None if is_same else "its signature is over another receipt"


def read_checkpoint(data: bytes, key: Ed25519PublicKey | None) -> ChainCheckpoint:
    """Read a checkpoint of the chain, which must be signed if a key is given.

    Raises:
        ValueError: it is no checkpoint, it is signed and no key is given, or the signature is wrong.
    """
    if key is not None:
        return msgspec.convert(verified(data, key, CHECKPOINT_TYPE).predicate, ChainCheckpoint)
    if b'"payloadType"' in data:
        raise ValueError("it is signed: name the signer's public key with --key")
    return msgspec.json.decode(data, type=ChainCheckpoint)


# Keys -----------------------------------------------------------------------------------------------------------------


def private_key(key: str) -> Ed25519PrivateKey:
    """Load a private key.

    Args:
        key: path of a file, or the key itself, as PEM or as 64 hexadecimal digits of its seed.

    Raises:
        ConfigError: `config_invalid`: the library is missing, or this is no private Ed25519 key; the message does not
            contain the key.
    """
    ed25519, pem = _library()
    kind: type[Ed25519PrivateKey] = ed25519.Ed25519PrivateKey
    return _loaded(key, "private", kind, kind.from_private_bytes, lambda data: pem.load_pem_private_key(data, None))


def public_key(key: str) -> Ed25519PublicKey:
    """Load a public key, from PEM, 32 bytes or 64 hexadecimal digits. Raises as `private_key`."""
    ed25519, pem = _library()
    kind: type[Ed25519PublicKey] = ed25519.Ed25519PublicKey
    return _loaded(key, "public", kind, kind.from_public_bytes, pem.load_pem_public_key)


def _loaded(
    key: str, word: str, kind: type[T], from_bytes: Callable[[bytes], T], from_pem: Callable[[bytes], object]
) -> T:
    data, name = _key_bytes(key)
    cause: Exception | None = None
    try:
        made = from_bytes(data) if len(data) == 32 else from_pem(data)
        if isinstance(made, kind):
            return made
    except Exception as error:  # The library raises a dozen classes for a file that is no key.
        cause = error
    fact = f"{name} is no {word} Ed25519 key, in PEM without a password, or as 32 bytes"
    make = "openssl genpkey -algorithm ed25519 -out key.pem; openssl pkey -in key.pem -pubout -out key.pub"
    raise ConfigError("config_invalid", fact, hint=make) from cause


def key_id(key: Ed25519PublicKey) -> str:
    """Return the name of a key, as securesystemslib computes it: SHA-256 of the key as canonical JSON, in hex."""
    value = {"keytype": "ed25519", "scheme": "ed25519", "keyval": {"public": key.public_bytes_raw().hex()}}
    return canonical.sha256_hex(canonical.encode(value))


def _library() -> tuple[Any, Any]:
    """Load and return the modules for Ed25519 keys and for their files."""
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        fact = "signatures need the library `cryptography`"
        raise ConfigError("config_invalid", fact, hint=install_hint("sign")) from error
    return ed25519, serialization


def _key_bytes(key: str) -> tuple[bytes, str]:
    """Return a key's bytes, and its name for a message."""
    if key.lstrip().startswith("-----BEGIN"):
        return key.encode(), "the signing key"
    if _HEX.fullmatch(key):
        return bytes.fromhex(key), "the signing key"
    try:
        data = read_plain(Path(os.path.realpath(key)), KEY_BYTES_MAX)
    except (OSError, ValueError) as error:
        fact = f"the key {key[:200]!r} cannot be read: {getattr(error, 'strerror', None) or error}"
        raise ConfigError("config_invalid", fact, hint="name a file that you can read") from error
    text = data.strip().decode("ascii", "replace")
    return (bytes.fromhex(text) if _HEX.fullmatch(text) else data), f"{key[:200]!r}"


# Files ----------------------------------------------------------------------------------------------------------------


def path_of(home: Path, run_id: str) -> Path:
    """Return the path of a stored receipt's signature."""
    return home / FOLDER / f"{run_id}{SUFFIX}"


def keep(home: Path, run_id: str, envelope: bytes) -> None:
    """Write a signature's file atomically.

    Raises:
        StoreError: `receipt_store_failed`.
    """
    replace_file(path_of(home, run_id), envelope, durable=True)


def read(path: Path) -> bytes | None:
    """Read a signature's file; None if it does not exist. Raises StoreError, `receipt_store_failed`."""
    try:
        return read_plain(path, ENVELOPE_BYTES_MAX)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise disk_error(str(path), error) from error

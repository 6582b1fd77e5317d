"""Signed receipts: what a signature proves, whom it convinces, and every key and envelope that is none."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backplane import resources
from backplane.receipts import signatures
from tests.in_process import in_process

SECONDS_MAX = 60


def make_key(folder: Path, name: str = "key") -> tuple[Path, Path]:
    """A private and a public key in PEM, as the README says to make them."""
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    for words in (
        ["genpkey", "-algorithm", "ed25519", "-out", str(private)],
        ["pkey", "-in", str(private), "-pubout", "-out", str(public)],
    ):
        subprocess.run(["openssl", *words], check=True, capture_output=True, timeout=SECONDS_MAX)
    return private, public


pytestmark = pytest.mark.needs("openssl")


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    return make_key(tmp_path)


Cli = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    work = tmp_path / "work"
    work.mkdir()

    def call(*words: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
        return in_process(*words, cwd=work, env={**os.environ, **env})

    return call


def run_signed(cli: Cli, key: Path, task: str = "true") -> str:
    done = cli("run", "--backend", "shell", "--isolation", "off", "--json", task, BACKPLANE_SIGNING_KEY=str(key))
    assert done.returncode == 0, done.stderr
    final = json.loads(done.stdout.splitlines()[-1])
    return str(final["receipt"]["meta"]["run_id"])


def test_a_tool_that_is_not_ours_verifies_a_receipts_signature(
    cli: Cli, keys: tuple[Path, Path], backplane_home: Path, tmp_path: Path
) -> None:
    run_id = run_signed(cli, keys[0])
    envelope = json.loads((backplane_home / "signatures" / f"{run_id}.dsse.json").read_bytes())
    payload = base64.b64decode(envelope["payload"])
    assert envelope["payloadType"] == "application/vnd.in-toto+json"
    # The page's own recipe, by hand: nothing of ours says what was signed.
    signed, sig = tmp_path / "signed", tmp_path / "sig"
    signed.write_bytes(b"DSSEv1 28 application/vnd.in-toto+json %d " % len(payload) + payload)
    sig.write_bytes(base64.b64decode(envelope["signatures"][0]["sig"]))
    verify = ["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", str(keys[1]), "-rawin", "-in", str(signed)]
    done = subprocess.run(
        [*verify, "-sigfile", str(sig)], capture_output=True, text=True, timeout=SECONDS_MAX, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "Signature Verified Successfully")
    shown = json.loads(cli("receipts", "show", "--json", run_id).stdout)
    told = json.loads(payload)
    assert told["subject"] == [{"name": f"receipt:{run_id}", "digest": {"sha256": shown["receipt_sha256"]}}]
    assert told["_type"] == "https://in-toto.io/Statement/v1"


def test_verify_wants_a_signature_by_this_key_where_one_is_named(
    cli: Cli, keys: tuple[Path, Path], backplane_home: Path, tmp_path: Path
) -> None:
    run_id = run_signed(cli, keys[0])
    other = make_key(tmp_path, "other")
    assert cli("receipts", "verify", run_id, "--key", keys[1]).returncode == 0
    assert cli("receipts", "verify", "--key", keys[1]).returncode == 0
    assert cli("receipts", "verify", run_id, "--key", other[1]).returncode == 1
    cli("run", "--backend", "shell", "--isolation", "off", "true")
    assert cli("receipts", "verify", "--key", keys[1]).returncode == 1
    assert cli("receipts", "verify").returncode == 0


def test_a_signature_of_another_receipt_is_none_of_this_one(
    cli: Cli, keys: tuple[Path, Path], backplane_home: Path
) -> None:
    first, second = run_signed(cli, keys[0]), run_signed(cli, keys[0], "echo two")
    folder = backplane_home / "signatures"
    (folder / f"{second}.dsse.json").write_bytes((folder / f"{first}.dsse.json").read_bytes())
    assert cli("receipts", "verify", second, "--key", keys[1]).returncode == 1


def test_an_exported_receipt_carries_its_signature_to_another_store(
    cli: Cli, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    run_id = run_signed(cli, keys[0])
    folder = tmp_path / "bundle"
    assert cli("receipts", "export", run_id, "--to", folder).returncode == 0
    home = str(tmp_path / "elsewhere")
    (bundle,) = [path.parent for path in folder.rglob("receipt.json")]
    assert cli("receipts", "verify", bundle / "receipt.json", "--key", keys[1]).returncode == 0
    assert cli("receipts", "import", bundle, BACKPLANE_HOME=home).returncode == 0
    assert cli("receipts", "verify", run_id, "--key", keys[1], BACKPLANE_HOME=home).returncode == 0


def test_a_checkpoint_may_be_signed_and_is_believed_with_its_key_alone(
    cli: Cli, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    run_signed(cli, keys[0])
    done = cli("receipts", "verify", "--save-checkpoint", "head.json", BACKPLANE_SIGNING_KEY=str(keys[0]))
    assert done.returncode == 0, done.stderr
    file = tmp_path / "work" / "head.json"
    assert cli("receipts", "verify", "--checkpoint", file, "--key", keys[1]).returncode == 0
    assert cli("receipts", "verify", "--checkpoint", file).returncode == 2
    other = make_key(tmp_path, "other")[1]
    assert cli("receipts", "verify", "--checkpoint", file, "--key", other).returncode == 2


def test_every_way_to_give_a_key_signs_alike(keys: tuple[Path, Path], tmp_path: Path) -> None:
    seed = signatures.private_key(str(keys[0])).private_bytes_raw()
    raw = tmp_path / "raw"
    raw.write_bytes(seed)
    public = signatures.key_id(signatures.public_key(str(keys[1])))
    for given in (str(keys[0]), keys[0].read_text(), seed.hex(), str(raw)):
        assert signatures.key_id(signatures.private_key(given).public_key()) == public


def test_a_copy_of_a_receipt_has_its_signature_beside_it(cli: Cli, keys: tuple[Path, Path], tmp_path: Path) -> None:
    signed, plain = tmp_path / "signed.json", tmp_path / "plain.json"
    key = str(keys[0])
    done = cli("run", "--backend", "shell", "--receipt", signed, "true", BACKPLANE_SIGNING_KEY=key)
    assert done.returncode == 0
    assert cli("run", "--backend", "shell", "--receipt", plain, "true").returncode == 0
    assert {path.name for path in tmp_path.glob("*.dsse.json")} == {"signed.dsse.json"}
    assert [cli("receipts", "verify", path, "--key", keys[1]).returncode for path in (signed, plain)] == [0, 1]


@pytest.mark.parametrize("content", [None, b"-----BEGIN PRIVATE KEY-----\nMA==\n-----END PRIVATE KEY-----\n"])
def test_what_is_no_key_is_refused_before_anything_runs(content: bytes | None, cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "wrong.pem"
    if content is not None:
        path.write_bytes(content)
    done = cli("run", "--backend", "shell", "touch ran", BACKPLANE_SIGNING_KEY=str(path))
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert done.stderr.startswith("config_invalid: ")
    assert str(path) in done.stderr
    assert not (tmp_path / "work" / "ran").exists()


STATEMENT: dict[str, Any] = {"_type": signatures.STATEMENT_TYPE, "predicateType": signatures.RECEIPT_TYPE}


@pytest.mark.parametrize(
    "told",
    [
        None,
        b"",
        b'{"payload":"!","payloadType":"application/vnd.in-toto+json","signatures":[]}',
        {**STATEMENT, "subject": [{"digest": 3}]},
        {**STATEMENT, "predicateType": "urn:other", "subject": []},
        {**STATEMENT, "subject": [{"digest": {"sha256": "f" * 64}}] * 2},
    ],
)
def test_an_envelope_that_proves_nothing_has_a_fault(told: Any, keys: tuple[Path, Path]) -> None:
    signer, public = signatures.Signer(str(keys[0])), signatures.public_key(str(keys[1]))
    data = signer._sign(json.dumps(told).encode()) if isinstance(told, dict) else told
    assert signatures.receipt_fault(data, public, "f" * 64)


def test_a_killed_run_is_signed_when_the_next_start_seals_it(
    cli: Cli, keys: tuple[Path, Path], tmp_path: Path, backplane_home: Path
) -> None:
    command = [sys.executable, "-m", "backplane", "run", "--backend", "shell", "--isolation", "off", "sleep 60"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=tmp_path / "work")
    assert child.stdout is not None
    child.stdout.readline()
    child.kill()
    child.wait()
    child.stdout.close()
    run_signed(cli, keys[0])
    assert cli("receipts", "verify", "--key", keys[1]).returncode == 0
    assert len(list((backplane_home / "signatures").iterdir())) == 2


def test_the_vector_of_the_contract_is_what_we_sign_and_verify() -> None:
    vector = json.loads((resources.find("contracts") / "signature.json").read_bytes())
    signer = signatures.Signer(vector["seed"])
    envelope = signer._sign(vector["statement"].encode())
    assert json.loads(envelope) == vector["envelope"]
    assert signatures.signed_bytes(signatures.PAYLOAD_TYPE, vector["statement"].encode()).decode() == vector["signed"]
    public = signatures.public_key(vector["public_key"])
    assert signatures.receipt_fault(envelope, public, vector["receipt_sha256"]) is None


def test_a_key_has_the_id_that_securesystemslib_computes() -> None:
    # From `SSlibKey.from_crypto(key).keyid` of securesystemslib 1.3, for a seed of 32 zero bytes.
    signer = signatures.Signer("0" * 64)
    assert signer._id == "4cc3f338069d638e761ed397f5c53df4129a276face46a446c202617331ca1b3"


def test_an_exported_folder_is_verified(cli: Cli, keys: tuple[Path, Path], tmp_path: Path) -> None:
    run_id = run_signed(cli, keys[0], "echo x > made.txt")
    folder = tmp_path / "work" / "exported"
    assert cli("receipts", "export", run_id, "--to", folder).returncode == 0
    done = cli("receipts", "verify", "exported", "--key", keys[1])
    assert (done.returncode, "intact" in done.stdout) == (0, True)
    for changed in ("patch.diff", "receipt.dsse.json"):
        data = (folder / changed).read_bytes()
        (folder / changed).write_bytes(data.replace(b"made.txt", b"fake.txt", 1) if b"made" in data else data[:-9])
        done = cli("receipts", "verify", "exported", "--key", keys[1], "--json")
        assert done.returncode == 1
        assert [one["name"] for one in json.loads(done.stdout)["faults"]] == ["exported"]
        (folder / changed).write_bytes(data)

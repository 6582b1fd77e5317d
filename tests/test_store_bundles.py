"""Bundles: receipts go out and come in exactly, and nothing wrong comes in."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from backplane.contract.canonical import decode_inexact, sha256_hex
from backplane.contract.receipt import Receipt, Verification, verify_bytes
from backplane.errors import ConfigError, ContractError, StoreError
from backplane.receipts import bundle
from backplane.receipts.bundle import export, import_bundle
from backplane.receipts.pieces import canonical_chunks, seal
from backplane.receipts.store import Store
from tests.receipt_writer import delta, receipt_of, stored_run, whole


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "home") as opened:
        yield opened


def test_a_receipt_goes_out_and_comes_into_another_store_with_its_patch(store: Store, tmp_path: Path) -> None:
    diff = "diff --git a/a b/a\n"
    row = stored_run(store, ["a", "b"], verification=Verification(harness_ok=True, git_diff=diff))
    (store.folder(row.run_id) / "patch.diff").write_text(diff)
    folder = export(store, row.run_id[:8], tmp_path / "out" / "bundle")
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert names == ["journal/head.jsonl", "journal/trace.jsonl", "patch.diff", "receipt.json"]
    assert verify_bytes((folder / "receipt.json").read_bytes()) is None
    with Store.open(tmp_path / "other") as other:
        taken = import_bundle(other, folder)
        assert taken.sha256 == row.sha256
        assert other.load(row.run_id) == store.load(row.run_id)
        assert (other.folder(row.run_id) / "patch.diff").read_text() == diff
        whole(other, receipts=1)
        with pytest.raises(StoreError, match="stored already"):
            import_bundle(other, folder)
    with pytest.raises(ConfigError, match="not empty"):
        export(store, row.run_id, folder)


def test_a_receipt_of_another_maker_is_kept_exactly(store: Store, tmp_path: Path) -> None:
    receipt = seal(receipt_of([delta("a")], usage_raw={"trace": [], "f": 1e-7}))
    text = json.loads(b"".join(canonical_chunks(receipt)))
    del text["mode"], text["backend"]["adapter_version"]
    text["tool_calls"] = [1]
    text["meta"]["run_id"] = text["meta"]["run_id"].upper()
    path = tmp_path / "receipt.json"
    path.write_text(json.dumps(text, indent=2))
    row = import_bundle(store, path)
    assert b"".join(canonical_chunks(store.load(row.run_id))) == b"".join(canonical_chunks(receipt))
    whole(store, receipts=1)


def test_a_receipt_whose_maker_reads_long_fractions_inexactly_is_kept_as_it_was_hashed(
    store: Store, tmp_path: Path
) -> None:
    rng = random.Random(1)
    written = next(text for text in (repr(rng.random()) for _ in range(1_000)) if inexact(text) != float(text))
    from_parser = inexact(written)
    receipt = seal(receipt_of([], usage_raw={"score": from_parser}))
    data = b"".join(canonical_chunks(receipt)).replace(repr(from_parser).encode(), written.encode())
    path = tmp_path / "receipt.json"
    path.write_bytes(data)
    assert import_bundle(store, path).sha256 == receipt.receipt_sha256
    whole(store, receipts=1)


def inexact(text: str) -> float:
    """A fraction as the inexact parser reads it."""
    return float(decode_inexact(text.encode()))


def bad_bundles() -> dict[str, tuple[type[Exception], str, Callable[[bytes], bytes]]]:
    return {
        "other content": (StoreError, "receipt_hash_mismatch", lambda data: data.replace(b'"complete"', b'"partial"')),
        "no hash": (
            StoreError,
            "receipt_hash_mismatch.*no hash",
            lambda data: data[: data.index(b'"receipt_sha256":') + 17] + b"null" + data[data.index(b',"trace"') :],
        ),
        "a key twice": (
            ContractError,
            "contract_invalid_receipt.*'outcome' stands twice",
            lambda data: data.replace(b'"outcome"', b'"outcome":"failed","outcome"', 1),
        ),
        "no receipt": (ContractError, "contract_invalid_receipt", lambda _: b"{}"),
        "no JSON": (ContractError, "contract_invalid_receipt", lambda data: data[:-1]),
        "too deep": (ContractError, "contract_invalid_receipt", lambda _: b"[" * 100_000 + b"]" * 100_000),
    }


@pytest.mark.parametrize("name", bad_bundles())
def test_nothing_of_a_wrong_receipt_is_imported(store: Store, tmp_path: Path, name: str) -> None:
    kind, text, change = bad_bundles()[name]
    path = tmp_path / "receipt.json"
    path.write_bytes(change(b"".join(canonical_chunks(seal(receipt_of([delta("a")]))))))
    with pytest.raises(kind, match=text):
        import_bundle(store, path)
    assert store.rows() == []
    assert not (store.home / "runs").exists()


def test_a_receipt_that_is_too_large_is_not_read(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "receipt.json"
    path.write_bytes(b"".join(canonical_chunks(seal(receipt_of([])))))
    monkeypatch.setattr(bundle, "RECEIPT_BYTES_MAX", path.stat().st_size)
    import_bundle(store, path)
    monkeypatch.setattr(bundle, "RECEIPT_BYTES_MAX", path.stat().st_size - 1)
    with pytest.raises(ConfigError, match="is over"):
        import_bundle(store, path)


@pytest.mark.parametrize("git_diff", [None, "another patch"])
def test_a_patch_that_the_receipt_does_not_vouch_for_is_not_imported(
    store: Store, tmp_path: Path, git_diff: str | None
) -> None:
    verification = Verification(harness_ok=True, git_diff=git_diff)
    folder = tmp_path / "bundle"
    folder.mkdir()
    receipt = seal(receipt_of([delta("a")], verification=verification))
    (folder / "receipt.json").write_bytes(b"".join(canonical_chunks(receipt)))
    (folder / "patch.diff").write_text("a patch")
    with pytest.raises(StoreError, match="receipt_hash_mismatch"):
        import_bundle(store, folder)
    assert store.rows() == []


def claiming(diff: str | None, sha256: str) -> Receipt:
    patch = {"bytes": 7, "sha256": sha256}
    return receipt_of(
        [], usage_raw={"backplane": {"patch": patch}}, verification=Verification(harness_ok=True, git_diff=diff)
    )


def test_a_receipt_alone_brings_its_patch_along_when_it_holds_it(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "receipt.json"
    whole_patch, elsewhere = claiming("a patch", sha256_hex(b"a patch")), claiming(None, sha256_hex(b"a large one"))
    for number, receipt in enumerate((whole_patch, elsewhere)):
        path.write_bytes(b"".join(canonical_chunks(seal(receipt))))
        row = import_bundle(store, path)
        patch = store.patch(row)
        assert (patch.read_text() if patch else None) == ("a patch", None)[number]
    whole(store, receipts=2)
    patch = store.patch(store.find(whole_patch.meta.run_id))
    assert patch is not None
    patch.unlink()
    assert "the patch cannot be read" in store.verify(whole_patch.meta.run_id)[0].fact


def test_a_bundle_without_the_patch_that_its_receipt_names_is_not_imported(store: Store, tmp_path: Path) -> None:
    (tmp_path / "receipt.json").write_bytes(b"".join(canonical_chunks(seal(claiming(None, sha256_hex(b"a patch"))))))
    with pytest.raises(StoreError, match=r"receipt_hash_mismatch.*cannot be read"):
        import_bundle(store, tmp_path)


def test_a_run_that_changed_nothing_needs_no_patch_file(store: Store) -> None:
    row = stored_run(store, ["a"], usage_raw={"backplane": {"patch": {"bytes": 0, "sha256": sha256_hex(b"")}}})
    assert store.verify(row.run_id) == []


def test_a_bundle_that_is_not_there_and_a_folder_that_cannot_be_made_are_named(store: Store, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        import_bundle(store, tmp_path / "nowhere")
    row = stored_run(store, ["a"])
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="receipt_store_failed"):
        export(store, row.run_id, tmp_path / "file" / "bundle")


@pytest.mark.parametrize("name", ["receipt.json", "patch.diff"])
@pytest.mark.parametrize("kind", ["a link", "a pipe", "a folder"])
def test_only_files_of_a_foreign_folder_are_read(store: Store, tmp_path: Path, name: str, kind: str) -> None:
    folder, place = tmp_path / "bundle", tmp_path / "bundle" / name
    folder.mkdir()
    (folder / "receipt.json").write_bytes(b"".join(canonical_chunks(seal(claiming(None, sha256_hex(b"a patch"))))))
    (folder / "patch.diff").write_text("a patch")
    place.rename(tmp_path / "elsewhere")
    if kind == "a link":
        place.symlink_to(tmp_path / "elsewhere")
    elif kind == "a pipe":
        os.mkfifo(place)
    else:
        place.mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        import_bundle(store, folder)
    assert store.rows() == []

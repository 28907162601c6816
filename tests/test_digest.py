"""Digests of contents: the specification, by an implementation of its own; layouts, formats, manifests, faults."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import lazyckpt
from lazyckpt.core import merkle
from lazyckpt.core.merkle import hash_of
from lazyckpt.errors import CorruptError, DataError, FormatError, MissingFileError, TensorNotFoundError
from lazyckpt.inspect import digest as engine
from lazyckpt.inspect import small as columns
from lazyckpt.inspect.files import statement
from lazyckpt.testing.oracle import as_ints

from .conftest import need
from .processes import run
from .writers import Case

MIB = 1 << 20


def tree(leaves: Sequence[bytes]) -> bytes:
    """MTH of RFC 6962, section 2.1, by its recursion."""
    if not leaves:
        return hashlib.sha256().digest()
    if len(leaves) == 1:
        return hashlib.sha256(b"\0" + leaves[0]).digest()
    k = 1
    while 2 * k < len(leaves):
        k *= 2
    return hashlib.sha256(b"\1" + tree(leaves[:k]) + tree(leaves[k:])).digest()


def of(tensor: torch.Tensor, run_: int = MIB) -> str:
    data = as_ints(tensor.contiguous()).numpy().tobytes()
    top = data if len(data) <= run_ else tree([data[at : at + run_] for at in range(0, len(data), run_)])
    head = f"lazyckpt tensor 2\n{str(tensor.dtype).removeprefix('torch.')}\n{','.join(map(str, tensor.shape))}\n"
    return hashlib.sha256(head.encode() + top).hexdigest()


def of_state(tensors: Mapping[str, torch.Tensor], title: str = "lazyckpt state 2") -> str:
    lines = [f"{of(tensors[name])} {json.dumps(name)}\n" for name in sorted(tensors, key=str.encode)]
    return hashlib.sha256(f"{title}\n{''.join(lines)}".encode()).hexdigest()


def _state() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return {
        "large": torch.randn(1700, 333, generator=g),
        "large.half": torch.randn(3 * MIB + 5, generator=g).bfloat16(),
        "rows": torch.randn(3, MIB // 4, generator=g),
        "x/y": torch.randn(5, 4, 3, generator=g).half(),
        "ünïcode": torch.randn(33, 17, generator=g).to(torch.float8_e4m3fn),
        "bool": torch.rand(9, generator=g) > 0.5,
        "c": torch.randn(6, dtype=torch.complex64, generator=g),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        **{f"small.{n}": torch.full((n,), n) for n in range(30)},
    }


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 7, 8, 9, 31, 33, 100])
def test_the_tree_is_that_of_rfc_6962(count: int) -> None:
    leaves = [bytes([n]) * n for n in range(count)]
    hashed = [hashlib.sha256(b"\0" + leaf).digest() for leaf in leaves]
    assert merkle.root(hashed, hashlib.sha256) == tree(leaves)


def test_as_specified(tmp_path: Path) -> None:
    state = _state()
    torch.save(state, tmp_path / "x.pt")
    found = lazyckpt.open(tmp_path / "x.pt").digest()
    for name, tensor in state.items():
        assert found[name].digest == of(tensor), name
        assert found[name].shape == tensor.shape and f"torch.{found[name].dtype}" == str(tensor.dtype)
    assert found.root_of("weights") == of_state(state)
    whole = f'lazyckpt checkpoint 2\n{of_state(state)} "weights"\n'
    assert found.root == str(found) == hashlib.sha256(whole.encode()).hexdigest()
    assert lazyckpt.digest(tmp_path / "x.pt") == found and hash(lazyckpt.digest(tmp_path / "x.pt")) == hash(found)
    assert found != lazyckpt.open(tmp_path / "x.pt").select("small.*").digest()
    assert repr(found).startswith(f"<Digest sha256 {found.root}") and "weights: 39 tensors" in repr(found)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_cuts_give_the_same_digest(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Small runs and tasks, so that runs cross the ends of rows, tasks and fragments."""
    run_, task, small = (data.draw(st.sampled_from(sizes)) for sizes in ((16, 32, 64), (64, 192, 256), (0, 24, 100)))
    task = -(-task // run_) * run_
    shape = data.draw(st.lists(st.integers(1, 7), max_size=3))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.int64]))
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    path = tmp_path_factory.mktemp("d") / "x.pt"
    kept = tensor.transpose(0, -1).contiguous().transpose(0, -1) if data.draw(st.booleans()) and shape else tensor
    torch.save({"w": kept, "v": tensor.clone()}, path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merkle, "RUN", run_)
        patch.setattr(engine, "_TASK", task)
        patch.setattr(columns, "SMALL", small)
        found = lazyckpt.open(path, cache=False).digest(progress=False)
    assert found["w"].digest == found["v"].digest == of(tensor, run_)


def test_formats_and_executors_agree(tmp_path: Path) -> None:
    state = _state() | {"l.0.q": torch.randn(64, 32), "l.0.k": torch.randn(64, 32)}
    torch.save(state, tmp_path / "x.pt")
    view = lazyckpt.open(tmp_path / "x.pt")
    view.to_safetensors(tmp_path / "a.safetensors")
    view.to_safetensors(tmp_path / "hf", max_shard_size="1MiB")
    view.to_dcp(tmp_path / "dcp")
    view.to_zarr(tmp_path / "a.zarr", codec="zstd")
    view.to_zarr(tmp_path / "b.zarr", pack=True, shard=True)
    view.to_torch(tmp_path / "b.pt")
    want = of_state(state)
    for name in ("x.pt", "a.safetensors", "hf", "dcp", "a.zarr", "b.zarr", "b.pt"):
        assert lazyckpt.digest(tmp_path / name).root_of("weights") == want, name
    with ProcessPoolExecutor(2) as processes, ThreadPoolExecutor(3) as threads:
        for executor in (processes, threads):
            assert lazyckpt.digest(tmp_path / "hf", executor=executor, memory="64MiB").root_of("weights") == want


def test_all_states_of_a_partitioned_checkpoint(zero_cases: Mapping[str, Case], tmp_path: Path) -> None:
    """The moments of ZeRO and of its conversion, whose states both formats have."""
    source = lazyckpt.open(zero_cases["zero3_sub_groups"].path)
    source.to_zarr(tmp_path / "a.zarr")
    mine, theirs = source.digest(), lazyckpt.digest(tmp_path / "a.zarr")
    assert list(mine.states) == list(source.states) and mine == theirs
    for state, part in source.states.items():
        assert mine.root_of(state) == of_state({name: t[...] for name, t in part.items()})
        assert part.digest().root_of(state) == mine.root_of(state)
    only = source.digest(states=["exp_avg"])
    assert list(only.states) == ["exp_avg"] and only.root_of("exp_avg") == mine.root_of("exp_avg")
    with pytest.raises(TensorNotFoundError, match="nothing"):
        source.digest(states=["nothing"])
    with pytest.raises(DataError, match="states"):
        source.digest(states=[])


def test_tied_names_have_a_digest_each(tmp_path: Path) -> None:
    w = torch.randn(8, 8)
    torch.save({"a": w, "b": w}, tmp_path / "tied.pt")
    torch.save({"a": w, "b": w.clone()}, tmp_path / "copies.pt")
    tied, copies = (lazyckpt.digest(tmp_path / f"{name}.pt") for name in ("tied", "copies"))
    assert tied == copies and list(tied) == ["a", "b"]
    assert lazyckpt.Digest.from_json(tied.to_json()).states["weights"].aliases == {"b": "a"}


def test_one_flipped_bit_in_any_tensor(tmp_path: Path) -> None:
    state = {f"l.{n}": torch.randn(7, n) for n in range(6)}
    save_file(state, tmp_path / "x.safetensors")
    data = bytearray((tmp_path / "x.safetensors").read_bytes())
    before = lazyckpt.digest(tmp_path / "x.safetensors")
    start = 8 + int.from_bytes(data[:8], "little")
    for at in range(start, len(data), 37):
        data[at] ^= 1 << at % 8
        (tmp_path / "y.safetensors").write_bytes(data)
        after = lazyckpt.digest(tmp_path / "y.safetensors")
        assert after != before and [m.kind for m in after.mismatches(before)] == ["values"]
        data[at] ^= 1 << at % 8


# -- manifests


def _manifest(tmp_path: Path) -> lazyckpt.Digest:
    torch.save(_state(), tmp_path / "x.pt")
    return lazyckpt.digest(tmp_path / "x.pt")


def test_a_manifest_is_read_again(tmp_path: Path) -> None:
    found = _manifest(tmp_path)
    again = lazyckpt.Digest.from_json(found.to_json())
    assert again == found and again.to_json() == found.to_json()
    assert dict(again.states["weights"]) == dict(found.states["weights"]) and not found.mismatches(again)
    assert lazyckpt.Digest.from_json(found.to_json().encode()) == found


def test_what_differs_is_named(tmp_path: Path) -> None:
    wanted = _manifest(tmp_path)
    state = _state()
    state["large"][1699, 332] += 1
    state["rows"] = state["rows"].reshape(-1)
    state["scalar"] = state["scalar"].double()
    del state["bool"]
    state["new"] = torch.ones(2)
    torch.save(state, tmp_path / "y.pt")
    found = lazyckpt.digest(tmp_path / "y.pt").mismatches(wanted)
    assert {m.name: m.kind for m in found} == {
        "large": "values", "rows": "shape", "scalar": "dtype", "bool": "only there", "new": "only here",
    }  # fmt: skip
    assert "weights: bool: the checkpoint lacks it" in map(str, found)


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ('"lazyckpt_manifest": 2', '"lazyckpt_manifest": 3', FormatError),
        ('"lazyckpt_manifest": 2', '"lazyckpt_manifest": 1', FormatError),
        ('"lazyckpt_manifest": 2', '"lazyckpt_manifest": "2"', FormatError),
        ('"sha256"', '"md5"', FormatError),
        ('"states"', '"status"', FormatError),
        ('"tensors"', '"tensor"', FormatError),
        ('"shape": [300]', '"shape": [-300]', FormatError),
        ('"shape": [300]', '"shape": [301]', None),
        ('"digest": "', '"digest": "g', FormatError),
        ('"root": "', '"root": "0', CorruptError),
        ("{", "[", FormatError),
    ],
)
def test_damaged_manifests(tmp_path: Path, old: str, new: str, error: type[Exception] | None) -> None:
    save_file({"w": torch.zeros(300)}, tmp_path / "x.safetensors")
    text = lazyckpt.digest(tmp_path / "x.safetensors").to_json()
    assert old in text
    damaged = text.replace(old, new, 1)
    if error is None:  # the digest covers the shape
        found = lazyckpt.digest(tmp_path / "x.safetensors").mismatches(lazyckpt.Digest.from_json(damaged))
        assert [m.kind for m in found] == ["shape"]
        return
    with pytest.raises(error, match="manifest") as raised:
        lazyckpt.Digest.from_json(damaged)
    assert len(str(raised.value).splitlines()) <= 3


def test_an_edited_digest_contradicts_the_root(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(300)}, tmp_path / "x.safetensors")
    text = lazyckpt.digest(tmp_path / "x.safetensors").to_json()
    digest = re.findall(r'"digest": "(\w+)"', text)[0]
    with pytest.raises(CorruptError, match="contradicts"):
        lazyckpt.Digest.from_json(text.replace(digest, "0" * 64))


# -- what cannot be read


def test_unreadable_tensors_are_named(tmp_path: Path) -> None:
    state = {f"l.{n}.w": torch.randn(300, 300) for n in range(6)} | {f"l.{n}.b": torch.randn(9) for n in range(6)}
    lazyckpt_view = tmp_path / "x.pt"
    torch.save(state, lazyckpt_view)
    lazyckpt.open(lazyckpt_view).to_safetensors(tmp_path / "hf", max_shard_size="500KB")
    gone = sorted((tmp_path / "hf").glob("*.safetensors"))[1]
    gone.unlink()
    found = lazyckpt.digest(tmp_path / "hf")
    assert found.root is None and found.root_of("weights") is None and found.errors
    for (state_name, name), why in found.errors.items():
        assert state_name == "weights" and gone.name in why and found[name].digest is None
    for name, one in found.items():
        assert one.digest is None or one.digest == of(state[name])
    manifest = lazyckpt.Digest.from_json(found.to_json())
    assert manifest.errors == found.errors
    kinds = {m.kind for m in found.mismatches(lazyckpt.digest(lazyckpt_view))}
    assert kinds == {"unreadable"}


def test_a_chunk_that_cannot_be_read_among_small_ones(tmp_path: Path) -> None:
    torch.save({f"s.{n}": torch.full((10,), n) for n in range(9)}, tmp_path / "x.pt")
    lazyckpt.open(tmp_path / "x.pt").to_zarr(tmp_path / "x.zarr", codec="zstd")
    chunk = tmp_path / "x.zarr/weights/s/4/c/0"
    chunk.write_bytes(b"nothing")
    found = lazyckpt.digest(tmp_path / "x.zarr")
    assert [name for _, name in found.errors] == ["s.4"]
    assert found["s.5"].digest == of(torch.full((10,), 5))


def test_unknown_algorithms(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "x.pt")
    with pytest.raises(DataError, match="md5"):
        lazyckpt.digest(tmp_path / "x.pt", algorithm="md5")
    need("blake3")
    blake = importlib.import_module("blake3")
    found = lazyckpt.digest(tmp_path / "x.pt", algorithm="blake3")
    data = torch.ones(2).numpy().tobytes()
    assert found["w"].digest == blake.blake3(b"lazyckpt tensor 2\nfloat32\n2\n" + data).hexdigest()
    with pytest.raises(FormatError, match="blake3"):
        lazyckpt.digest(tmp_path / "x.pt").mismatches(found)
    assert hash_of("blake3") is blake.blake3


# -- the command


def _cli(*arguments: object) -> Any:
    return run("-m", "lazyckpt", "digest", *map(str, arguments))


def test_the_command(tmp_path: Path) -> None:
    wanted = _manifest(tmp_path)
    printed = _cli(tmp_path / "x.pt")
    assert printed.returncode == 0 and lazyckpt.Digest.from_json(printed.stdout) == wanted
    assert _cli(tmp_path / "x.pt", "--root").stdout.split() == [wanted.root]
    lines = _cli(tmp_path / "x.pt", "--lines").stdout.splitlines()
    assert f"sha256 {wanted['large'].digest} large" in lines and len(lines) == len(wanted)
    bad = _cli(tmp_path / "x.pt", "--algorithm", "md5")
    assert bad.returncode == 2 and "sha256 or blake3" in bad.stderr and not bad.stdout
    assert _cli(tmp_path / "nothing.pt").returncode == 2


def test_the_command_with_a_file_that_is_missing(tmp_path: Path) -> None:
    state = {f"l.{n}.w": torch.randn(300, 300) for n in range(4)}
    torch.save(state, tmp_path / "x.pt")
    lazyckpt.open(tmp_path / "x.pt").to_safetensors(tmp_path / "hf", max_shard_size="500KB")
    sorted((tmp_path / "hf").glob("*.safetensors"))[0].unlink()
    for option in ("--lines", "--root"):
        found = _cli(tmp_path / "hf", option)
        assert found.returncode == 1 and "cannot be read" in found.stderr
        assert (" - l." in found.stdout) == (option == "--lines")


# -- files


def _folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "sub" / "deeper").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD").write_text("ref")
    (folder / ".gitignore").write_text("x")
    save_file({"w": torch.randn(300, 5000)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    (folder / "empty").write_bytes(b"")
    (folder / "sub" / "a").write_text("a")
    (folder / "sub-b").write_text("b")
    (folder / "sub" / "deeper" / "ü").write_text("c")
    return folder


def test_the_statement_about_files(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    printed = _cli(folder, "--files")
    assert printed.returncode == 0, printed.stderr
    about = json.loads(printed.stdout)
    resources = about["predicate"]["resources"]
    assert [one["name"] for one in resources] == [
        "config.json", "empty", "model.safetensors", "sub-b", "sub/a", "sub/deeper/ü",
    ]  # fmt: skip
    for one in resources:
        assert one["digest"] == hashlib.sha256((folder / one["name"]).read_bytes()).hexdigest()
    joined = b"".join(bytes.fromhex(one["digest"]) for one in resources)
    assert about["subject"] == [{"name": "model", "digest": {"sha256": hashlib.sha256(joined).hexdigest()}}]
    (folder / "link").symlink_to("config.json")
    with pytest.raises(FormatError, match="link"):
        statement(str(folder))
    with pytest.raises(MissingFileError):
        statement(str(tmp_path / "nothing"))
    with pytest.raises(FormatError, match="local"):
        statement("s3://bucket/model")
    assert _cli(folder, "--files", "--lines").returncode == 2


def test_model_signing_signs_and_verifies_it(tmp_path: Path) -> None:
    """The statement has the manifest that model-signing computes itself; signed with a key, it is verified."""
    need("model_signing", "OpenSSL")
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from model_signing import hashing, verifying
    from model_signing._signing import sign_ec_key, signing

    folder = _folder(tmp_path)
    about = json.loads(statement(str(folder)))
    manifest = signing.dsse_payload_to_manifest(about)
    assert manifest == hashing.Config().set_ignored_paths(paths=[]).hash(folder)
    key = ec.generate_private_key(ec.SECP256R1())
    secret, public = tmp_path / "key.pem", tmp_path / "key.pub"
    secret.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    public.write_bytes(
        key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    sign_ec_key.Signer(secret).sign(signing.Payload(manifest)).write(tmp_path / "model.sig")
    check = verifying.Config().use_elliptic_key_verifier(public_key=public)
    check.verify(folder, tmp_path / "model.sig")
    (folder / "config.json").write_text("{ }")
    with pytest.raises(ValueError, match=r"config\.json|mismatch"):
        check.verify(folder, tmp_path / "model.sig")

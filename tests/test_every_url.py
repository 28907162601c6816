"""Every command, at every kind of URL and in archives there, compared with the same command for the local folder."""

from __future__ import annotations

import re
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import lazyckpt
from lazyckpt import DestinationError, cli

from .fuzz.targets.sources import golden
from .servers.fixtures import ACCOUNT, SECRET, Cloud, cloud_of, need_obstore
from .servers.hub import Hub

SOURCES = {  # checkpoints of ranks, a folder of Hugging Face, the steps of a run
    "ranks": golden("deepspeed_zero", "zero3_fp32_dp2"),
    "dcp": golden("dcp", "fsdp2_uneven"),
    "model": golden("huggingface", "llama_sharded"),
    "run": golden("trainers", "trainer_gpt2"),
}
WHERE = {kind: f"at {kind}" for kind in ("s3", "gs", "az", "http", "hf", "local")} | {"az": "azurite"}
PACKED = ("", ".tar", ".zip")
WRITABLE = ("s3", "gs", "az")
Done = tuple[int, str]
# seconds, and the digest of the states of the files, to which their times belong
_PASSING = re.compile(r'[\d.]+ s(?=\))|(?<="seconds": )[\d.]+|(?<="files": ")[0-9a-f]{64}')


@dataclass(frozen=True)
class Site:
    """A server, or a local folder, with the sources as folders and as archives. ``cloud`` is the bucket."""

    kind: str
    start: str
    packed: str
    cloud: Cloud | None = field(default=None, compare=False)

    def __getitem__(self, source: str) -> str:
        """The URL or the path of a source."""
        if self.kind == "hf" and not self.packed:
            return f"{self.start}/{source}"
        return f"{self.start}{'/archives' if self.kind == 'hf' else ''}/{source}{self.packed}"


def pack(folder: Path, source: str) -> None:
    with tarfile.open(folder / f"{source}.tar", "w") as archive:
        archive.add(SOURCES[source], source)
    with zipfile.ZipFile(folder / f"{source}.zip", "w") as packed:
        for path in sorted(SOURCES[source].rglob("*")):
            packed.write(path, Path(source) / path.relative_to(SOURCES[source]))


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sources as archives, which is also the local site."""
    folder = tmp_path_factory.mktemp("archives")
    for source in SOURCES:
        pack(folder, source)
    return folder


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Settings as a user makes them: the command line has no options for credentials."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "HF_HUB_OFFLINE"):
            patch.delenv(name, raising=False)
        for name, value in values.items():
            patch.setenv(name, value)
        yield


@contextmanager
def served(kind: str, azurite: str | None, folder: Path) -> Iterator[tuple[str, Cloud | None]]:
    """Serve the sources and their archives by one kind of server; yield where they are."""
    if kind == "hf":
        constants = pytest.importorskip("huggingface_hub.constants")
        with Hub() as hub, environment(HF_ENDPOINT=hub.endpoint), pytest.MonkeyPatch.context() as patch:
            patch.setattr(constants, "HF_HUB_CACHE", str(folder / "no-cache"))
            patch.setattr(constants, "HF_TOKEN_PATH", str(folder / "no-token"))
            for source, path in SOURCES.items():
                hub.push(f"org/{source}", path)
            hub.push("org/archives", folder)
            yield "hf://org", None
        return
    need_obstore()
    with ExitStack() as stack:
        cloud = stack.enter_context(cloud_of(kind, azurite=azurite, **({} if kind == "az" else {"pages": True})))
        for path in (*SOURCES.values(), *folder.glob("*.*")):
            source = next((name for name, known in SOURCES.items() if known == path), "")
            if source:
                cloud.put_folder(path, source)
            else:
                cloud.put(path.name, path.read_bytes())
        settings = {
            "s3": {
                "AWS_ENDPOINT_URL": cloud.server.endpoint,
                "AWS_REGION": "us-east-1",
                "AWS_ACCESS_KEY_ID": "somebody",
                "AWS_SECRET_ACCESS_KEY": "something",
                "AWS_EC2_METADATA_DISABLED": "true",
                "AWS_CONFIG_FILE": str(folder / "no-config"),
                "AWS_SHARED_CREDENTIALS_FILE": str(folder / "no-credentials"),
            },
            "gs": {"STORAGE_EMULATOR_HOST": cloud.server.endpoint},
            "az": {
                "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
                "AZURE_STORAGE_ACCOUNT_KEY": SECRET,
                "AZURE_STORAGE_ENDPOINT": f"{cloud.server.endpoint}/{ACCOUNT}",
            },
        }
        stack.enter_context(environment(**settings.get(kind, {})))
        yield cloud.url, cloud


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(kind, marks=[pytest.mark.slow, pytest.mark.xdist_group(group)]) for kind, group in WHERE.items()
    ],
)
def place(request: pytest.FixtureRequest, archives: Path) -> Iterator[tuple[str, str, Cloud | None]]:
    """Each kind of server, and local archives."""
    if request.param == "local":
        yield "local", str(archives), None
        return
    azurite = request.getfixturevalue("azurite") if request.param == "az" else None
    with served(request.param, azurite, archives) as (start, cloud):
        yield request.param, start, cloud


@pytest.fixture(params=PACKED)
def site(request: pytest.FixtureRequest, place: tuple[str, str, Cloud | None]) -> Site:
    kind, start, cloud = place
    if kind == "local" and not request.param:
        pytest.skip("the local folders are what everything is compared with")
    if request.param == ".zip" and kind not in ("s3", "local"):
        pytest.skip("archives are read above the stores: a tar is enough at the other kinds")
    return Site(kind, start, request.param, cloud)


# -- commands


def words(command: str, path: str) -> list[str]:
    return [path if word == "PATH" else word for word in command.split()]


def call(command: str, path: str) -> Done:
    done = CliRunner().invoke(cli.app, words(command, path), env={"COLUMNS": "200"})
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, plain(done.output, path)


@cache
def expected(command: str, source: str) -> Done:
    """What a command does with the local folder."""
    return call(command, str(SOURCES[source]))


def plain(text: str, path: str) -> str:
    """Replace the path of the source, with the folder in an archive and the commit, by one word."""
    name = path.rpartition("/")[2].partition(".")[0]
    start = (
        re.escape(path) if "archives" not in path else re.escape(path).replace("archives", "archives(?:@[0-9a-f]{40})?")
    )
    inside = rf"(?:/{name})?" if path.endswith((".tar", ".zip")) else ""
    text = re.sub(rf"{start}(?:@[0-9a-f]{{40}})?{inside}", "SOURCE", text)
    return _PASSING.sub("_", text)


COMMANDS = {
    "ranks": (
        "ls PATH", "ls PATH --all --json", "info PATH", "info PATH --json", "stats PATH --json", "digest PATH",
        "verify PATH", "verify PATH --quick --json", "scan PATH --json", "scan PATH -v",
        "show PATH fc1.weight[0:2]", "show PATH fc1.weight --explain",
    ),
    "dcp": ("ls PATH", "info PATH --json", "stats PATH --json", "digest PATH --root", "verify PATH", "scan PATH"),
    "model": (
        "ls PATH model.layers.0", "ls PATH --json", "info PATH", "stats PATH *norm*", "digest PATH --root",
        "verify PATH --json", "verify PATH --full", "scan PATH", "show PATH model.norm.weight", "show PATH nothing",
    ),
    "run": (
        "ls PATH", "info PATH --json", "stats PATH --tag checkpoint-2 --csv", "digest PATH --run", "verify PATH --run",
        "verify PATH --run --json", "scan PATH --json",
    ),
}  # fmt: skip


def is_page(site: Site) -> bool:
    return site.kind == "http" and not site.packed


@pytest.mark.parametrize("source", COMMANDS)
def test_commands_print_what_they_print_locally(source: str, site: Site) -> None:
    for command in COMMANDS[source]:
        if not (is_page(site) and command.startswith("scan")):
            assert call(command, site[source]) == expected(command, source)


@pytest.mark.parametrize("source", SOURCES)
def test_scan_of_a_page_says_that_it_may_hide_files(source: str, site: Site) -> None:
    found, known = lazyckpt.scan(site[source]), lazyckpt.scan(SOURCES[source])
    assert found.facts["files"] == known.facts["files"] and found.facts["names"] == known.facts["names"]
    # the page of DCP's folder leaves .metadata out, but it is tried
    more = {str(one) for one in found} - {str(one) for one in known}
    assert len(more) == (is_page(site) and source != "dcp")
    assert all("begins with a dot" in one for one in more)


def test_scan_takes_few_requests() -> None:
    need_obstore()
    with cloud_of("s3") as cloud:
        url = cloud.put_folder(SOURCES["dcp"], "dcp")
        cloud.server.reset()
        lazyckpt.scan(url, storage_options=cloud.options)
        files = list(SOURCES["dcp"].iterdir())
        assert cloud.server.counts().requests <= 2 + sum(2 + path.stat().st_size // (64 << 10) for path in files)


def test_scan_without_the_permission_to_list_is_refused() -> None:
    need_obstore()
    with cloud_of("s3") as cloud:
        url = cloud.put_folder(SOURCES["model"], "model")
        cloud.server.set_fault("status", what="list", status=403, error="AccessDenied")
        with pytest.raises(lazyckpt.LazyckptError, match="does not list folders"):
            lazyckpt.scan(url, storage_options=cloud.options)


def test_diff(site: Site) -> None:
    for source in ("ranks", "model"):
        done = CliRunner().invoke(cli.app, ["diff", str(SOURCES[source]), site[source], "--all-states"])
        assert done.exit_code == 0, done.output
    changed = CliRunner().invoke(cli.app, ["diff", site["ranks"], site["model"]])
    assert changed.exit_code == 1, changed.output


@pytest.mark.parametrize(("source", "to"), [("ranks", "dcp"), ("model", "safetensors"), ("dcp", "torch")])
def test_convert(source: str, to: str, site: Site, tmp_path: Path) -> None:
    for start, dest in ((str(SOURCES[source]), "a"), (site[source], "b")):
        done = CliRunner().invoke(cli.app, ["convert", start, str(tmp_path / dest), "--to", to, "--quiet"])
        assert done.exit_code == 0, done.output
    with lazyckpt.open(tmp_path / "a") as a, lazyckpt.open(tmp_path / "b") as b:
        assert a.digest() == b.digest()
    if site.kind in WRITABLE and not site.packed:
        url = f"{site.start}/converted-{source}"
        done = CliRunner().invoke(cli.app, ["convert", site[source], url, "--to", to, "--quiet"])
        assert done.exit_code == 0, done.output
        assert CliRunner().invoke(cli.app, ["diff", str(tmp_path / "a"), url]).exit_code == 0
    else:
        done = CliRunner().invoke(cli.app, ["convert", site[source], f"{site[source]}/new", "--to", to, "--quiet"])
        assert done.exit_code == 2 and "is only read" in done.output, done.output


def test_a_run(site: Site) -> None:
    with lazyckpt.open_run(SOURCES["run"]) as known, lazyckpt.open_run(site["run"]) as run:
        assert run.steps == known.steps == (2, 4)
        assert list(run) == list(known)
        assert [str(one) for one in run.problems] == [str(one) for one in known.problems]
        for name in list(run)[:3]:
            assert torch.equal(run[name][...], known[name][...])
        with run.at(2) as one, lazyckpt.open(SOURCES["run"], tag="checkpoint-2") as other:
            assert one.digest() == other.digest()


def test_xarray(site: Site) -> None:
    xarray = pytest.importorskip("xarray")
    for source in ("ranks", "model"):
        with (
            xarray.open_datatree(site[source], engine="lazyckpt") as found,
            xarray.open_datatree(SOURCES[source], engine="lazyckpt") as known,
        ):
            xarray.testing.assert_identical(found.load(), known.load())


def test_browse(site: Site) -> None:
    pytest.importorskip("textual")
    if site.packed == ".zip" or (site.packed and site.kind not in ("s3", "local")):
        pytest.skip("what the browser reads it reads by a view, as the other commands do")
    from .test_browse import Browser, drive, press, screen

    def look(path: str) -> list[str]:
        seen: list[str] = []

        async def do(app: Browser, pilot: Any) -> None:
            await press(app, pilot, "right", "down", "down", "enter")
            seen.extend(screen(app))

        drive(path, do)
        return seen[1:30]  # above and below are paths

    assert look(site["model"]) == look(str(SOURCES["model"]))


def test_prune(site: Site) -> None:
    if site.kind in WRITABLE and not site.packed:
        known, planned = lazyckpt.prune(SOURCES["run"], 1), lazyckpt.prune(site["run"], 1)
        assert (planned.remove, planned.keep) == (known.remove, known.keep)
        assert site.cloud is not None
        url = site.cloud.put_folder(SOURCES["run"], "pruned")
        done = CliRunner().invoke(cli.app, ["prune", url, "--keep", "1", "--delete"])
        assert done.exit_code == 0, done.output
        assert lazyckpt.open_run(url).steps == (4,)
        return
    for delete in (False, True):
        with pytest.raises(DestinationError, match="only read"):
            lazyckpt.prune(site["run"], 1, delete=delete)

"""Faults of servers and networks: a read returns the right bytes, perhaps after retries, or raises one clear error."""

from __future__ import annotations

import logging
import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import lazyckpt
from lazyckpt.errors import LazyckptError

from .remote_faults import FAULTS, FINE, OPERATIONS, PAGE, RETRIED, Fault, page
from .servers.fixtures import SECRET, Cloud, cloud_of, need_obstore
from .writers import Case

pytestmark = pytest.mark.slow

TENSORS = {
    "a": torch.arange(60_000, dtype=torch.float32).reshape(60, 1000),
    "b": torch.arange(90_000, dtype=torch.float32).reshape(90, 1000).flip(0),
}
SECRETS = ("the-secret-token", "the-secret-key", "the-secret-user", "the-secret-signature", SECRET)
Policy = dict[str, float]


def policy_for(fault: Fault) -> Policy:
    """The options of requests: what fails for ever is given up soon, and only answers that do not come are asked for
    again, so that a busy machine changes nothing."""
    waits = fault.kind == "hang"
    deadline = 30.0 if fault.outcome in (FINE, RETRIED) else 4.0 if waits else 1.0
    return {"timeout": 1.0 if waits else 20.0, "deadline": deadline, "largest": 100_000, "smallest": 50_000}


def secret_options(cloud: Cloud, policy: Policy) -> dict[str, Any]:
    """The options of a cloud with credentials where its server takes any."""
    options = {**cloud.options, "requests": policy}
    if cloud.kind == "s3":
        del options["skip_signature"]
        options |= {"access_key_id": "the-secret-user", "secret_access_key": "the-secret-key"}
        options |= {"session_token": "the-secret-token"}
    elif cloud.kind == "http":
        options["headers"] = {"Authorization": "Bearer the-secret-token"}
    elif cloud.kind == "gs":
        client = {**cloud.options["client_options"], "default_headers": {"Authorization": "Bearer the-secret-token"}}
        options["client_options"] = client
    return options


@pytest.fixture(scope="module")
def clouds(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Cloud]]:
    """A function that returns the server of a kind, with the checkpoint "run"."""
    need_obstore()
    started: dict[str, Cloud] = {}
    with ExitStack() as stack:

        def of(kind: str) -> Cloud:
            if kind not in started:
                azurite = request.getfixturevalue("azurite") if kind == "az" else None
                started[kind] = stack.enter_context(cloud_of(kind, azurite=azurite))
            return started[kind]

        yield of


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint, as files."""
    folder = tmp_path_factory.mktemp("run")
    for name, tensor in TENSORS.items():
        save_file({name: tensor}, folder / f"{name}.safetensors")
    weights = '{"metadata": {}, "weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}'
    (folder / "model.safetensors.index.json").write_text(weights)
    return folder


def opened(cloud: Cloud, policy: Policy) -> lazyckpt.CheckpointView:
    return lazyckpt.open(cloud.at("run"), storage_options=secret_options(cloud, policy), cache=False)


class Outcome:
    """What an operation ended with: tensors that are to be right, or messages."""

    def __init__(self, operation: str, cloud: Cloud, provoke: Callable[[], None], folder: Path, policy: Policy) -> None:
        self.error: LazyckptError | None = None
        self.messages: list[str] = []
        self.retries: int | None = None
        view = None if operation in ("open", "verify") else opened(cloud, policy)
        before = 0 if view is None else view.io.retries
        provoke()
        try:
            if operation == "verify":
                found = lazyckpt.verify(cloud.at("run"), storage_options=secret_options(cloud, policy), progress=False)
                self.messages = [str(finding) for finding in found if finding.code != "no-checksums"]
            else:
                if view is None:
                    view = opened(cloud, policy)
                    self.messages = [str(problem) for problem in view.problems]
                if not self.messages:
                    self._read(operation, view, folder)
                self.retries = view.io.retries - before
        except LazyckptError as e:
            self.error = e
            self.messages = [str(e)]

    def _read(self, operation: str, view: lazyckpt.CheckpointView, folder: Path) -> None:
        if operation == "slice":
            assert torch.equal(view["b"][3:5, 10:20], TENSORS["b"][3:5, 10:20])
        elif operation == "whole":
            found = {name: view[name][:] for name in view}
            assert found.keys() == TENSORS.keys() and all(torch.equal(found[n], t) for n, t in TENSORS.items())
        elif operation == "convert":
            view.to_safetensors(folder / "out.safetensors")
            found = load_file(folder / "out.safetensors")
            assert all(torch.equal(found[n], t) for n, t in TENSORS.items())


def told(fault: Fault, cloud: Cloud) -> dict[str, Any]:
    options: dict[str, Any] = {"path": "{folder}/run/*", "what": "object", **fault.options}
    names = {"{folder}": cloud.folder, "{server}": cloud.server.endpoint}
    for name, value in options.items():
        if isinstance(value, str):
            for old, new in names.items():
                value = value.replace(old, new)
            options[name] = value
    return options


CASES = [
    pytest.param(
        fault,
        kind,
        operation,
        id=f"{fault.id}-{kind}-{operation}",
        marks=[pytest.mark.xdist_group("azurite")] if kind == "az" else [],
    )
    for fault in FAULTS
    for kind in fault.stores
    for operation in fault.operations
]


@pytest.mark.product
@pytest.mark.parametrize(("fault", "kind", "operation"), CASES)
def test_fault(
    fault: Fault,
    kind: str,
    operation: str,
    clouds: Callable[[str], Cloud],
    run: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    right = fault.outcome in (FINE, RETRIED)
    cloud = clouds(kind)
    cloud.server.clear_faults()
    cloud.put_folder(run, "run")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        provoke = partial(cloud.server.set_fault, fault.kind, **told(fault, cloud))
        outcome = Outcome(operation, cloud, provoke, tmp_path, policy_for(fault))
    assert bool(outcome.messages) != right, outcome.messages
    probed = kind == "http" and operation == "open"  # the faults may happen to names that are only tried
    if fault.outcome == RETRIED and outcome.retries is not None and not probed:
        assert outcome.retries >= 1
    if outcome.error is not None:
        assert type(outcome.error).__name__ in fault.outcome.split("|"), outcome.messages
    for message in outcome.messages:
        assert len(message.splitlines()) <= 3, message
    assert right or any(re.search(fault.says, message) for message in outcome.messages), outcome.messages
    # a credential is nowhere: neither in messages, with their causes, nor in logs and warnings
    texts = [*outcome.messages, caplog.text, *(str(warning.message) for warning in warned)]
    if outcome.error is not None:
        texts += [repr(outcome.error), "".join(traceback.format_exception(outcome.error))]
    assert not [secret for secret in SECRETS for text in texts if secret in text]


def test_the_table() -> None:
    assert len({fault.id for fault in FAULTS}) == len(FAULTS)
    assert all(set(fault.operations) <= set(OPERATIONS) for fault in FAULTS)


def test_the_page_has_the_table() -> None:
    assert PAGE.read_text("utf-8").endswith(page(FAULTS)), "python -m tests.remote_faults writes the page"


def test_formats_over_a_bad_network(case: Case, s3: Cloud) -> None:
    """Every format reads right while connections break, servers are busy and answers are cut, again and again."""
    source = case.path if case.path.is_dir() else case.path.parent
    url = s3.put_folder(source, "run")
    if case.path.is_file():
        url += f"/{case.path.name}"
    bad: list[tuple[str, dict[str, Any]]] = [
        ("drop", {}),
        ("cut", {"after": 7, "method": "GET"}),
        ("status", {"status": 503}),
        ("short", {"by": 3, "method": "GET"}),
        ("other_range", {"by": 4, "method": "GET"}),
        ("status", {"status": 429, "headers": {"Retry-After": "1"}}),
    ]
    for round in range(6):
        for n, (kind, options) in enumerate(bad):
            s3.server.set_fault(kind, skip=2 + 18 * round + 3 * n, times=1, what="object", **options)
    view = lazyckpt.open(url, storage_options={**s3.options, "requests": {"deadline": 60}}, cache=False)
    for state, tensors in case.truth.items():
        for name, tensor in tensors.items():
            assert torch.equal(view.states[state][name][...], tensor), (state, name)
    assert view.io.retries >= 3

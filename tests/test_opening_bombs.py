"""Small folders whose names or indexes describe something huge: opening them takes seconds and little memory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from . import processes

pytestmark = pytest.mark.slow

TENSORS = {"w": torch.ones(4, 4), "b": torch.ones(4)}

_CHILD = """
import json, os, resource, signal, sys, time, traceback
import torch, lazyckpt
from lazyckpt import LazyckptError
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))

def measure(path, ways):
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    for open_it in ways:
        try:
            view = open_it(path)
            repr(view), view.explain(), len(view.problems)
            for t in view.values():
                try:
                    t[...]
                except LazyckptError as e:
                    assert len(str(e)) < 2000
        except LazyckptError as e:
            assert len(str(e)) < 1000, str(e)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return [path, time.process_time() - start, used / 1024]

for path, as_run in json.loads(sys.argv[1]):
    child = os.fork()
    if child == 0:
        signal.alarm(120)
        try:
            print(json.dumps(measure(path, (lazyckpt.open, lazyckpt.open_run)[: 1 + as_run])), flush=True)
        except BaseException:
            print(path, traceback.format_exc(), file=sys.stderr, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def opened(folders: Mapping[Path, bool]) -> dict[Path, tuple[float, float]]:
    """A folder -> (seconds, MiB) of opening it (True: as a run, too) and reading all of it.

    One process imports what is needed, and forks for each folder.
    """
    asked = json.dumps([(str(folder), as_run) for folder, as_run in folders.items()])
    done = processes.run("-c", _CHILD, asked, timeout=600)
    found = {Path(path): (seconds, used) for path, seconds, used in map(json.loads, done.stdout.splitlines())}
    assert not done.returncode and not folders.keys() - found.keys(), done.stderr[-2000:]
    return found


def _saved(*names: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            save_file(TENSORS, folder / name) if name.endswith(".safetensors") else torch.save(TENSORS, folder / name)

    return write


def _deepspeed(*names: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        shapes = [{name: t.shape for name, t in TENSORS.items()}]
        for name in ("mp_rank_00_model_states.pt", *names):
            torch.save({"module": TENSORS, "param_shapes": shapes, "ds_version": "0.15"}, folder / name)

    return write


def _megatron(folder: Path) -> None:
    for name in ("mp_rank_00", "mp_rank_99999999"):
        (folder / "iter_0000001" / name).mkdir(parents=True)
        torch.save({"model": TENSORS, "iteration": 1}, folder / "iter_0000001" / name / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("1")


def _links(pattern: str, count: int) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        for n in range(count):
            os.symlink(".", folder / pattern.format(n))

    return write


def _linked_run(folder: Path) -> None:
    _saved("step_5.pt", "step_6.pt")(folder)
    _links("l{}", 30)(folder)


def _steps(folder: Path) -> None:
    for n in range(2000):
        (folder / f"checkpoint-{n}").mkdir()
        (folder / f"checkpoint-{n}" / "notes.txt").touch()


BOMBS: dict[str, Callable[[Path], None]] = {
    "llama's rank 1,000,000": _saved("consolidated.1000000.pth"),
    "llama's rank of 200 digits": _saved(f"consolidated.{'9' * 200}.pth"),
    "a world of a million": _saved("model_world_size_1000000_rank_0.pt"),
    "rank 9,999,999": _saved("model_rank_0.pt", "model_rank_9999999.pt"),
    "one of 99,999 shards": _saved("model-00001-of-99999.safetensors"),
    "one of 99,999 ranks": _saved("shard-99999-model-00001-of-99999.safetensors"),
    "a data-parallel rank": _deepspeed("zero_pp_rank_999999999_mp_rank_00_optim_states.pt"),
    "a model-parallel rank": _deepspeed("mp_rank_99999999_model_states.pt"),
    "a layer": _deepspeed("layer_00-model_00-model_states.pt", "layer_99999999-model_00-model_states.pt"),
    "an expert": _deepspeed("layer_99999999_expert_99999999_mp_rank_00_model_states.pt"),
    "megatron's rank": _megatron,
    "an optimizer's number": _saved("random_states_0.pkl", "optimizer_99999999.bin", "model_99999999.bin"),
    "links to itself": _links("l{}", 100),
    "checkpoints that are links to the folder": _links("checkpoint-{}", 30),
    "a run with links to itself": _linked_run,
    "two thousand checkpoints that are none": _steps,
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[float, float]]:
    folders = {name: tmp_path_factory.mktemp("bomb") for name in BOMBS}
    for name, folder in folders.items():
        BOMBS[name](folder)
    found = opened({folder: BOMBS[name] is _linked_run for name, folder in folders.items()})
    return {name: found[folder] for name, folder in folders.items()}


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_folder_opens_in_little_time_and_memory(measured: dict[str, tuple[float, float]], name: str) -> None:
    seconds, used = measured[name]
    assert seconds < 20 and used < 200


def test_an_index_of_many_files_takes_time_in_proportion(tmp_path: Path) -> None:
    folders = []
    for count in (2000, 4000):
        folder = tmp_path / str(count)
        folder.mkdir()
        weights = {f"n{n}": f"f{n % count}.safetensors" for n in range(10 * count)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
        save_file(TENSORS, folder / "f0.safetensors")
        folders.append(folder)
    found = opened(dict.fromkeys(folders, False))
    small, large = (found[folder][0] for folder in folders)
    assert large < 3 * small + 0.5

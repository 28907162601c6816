"""The checkpoints of a run in the order of their steps, opened on demand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from typing import Any

from ..core.index import Index
from ..core.names import natural
from ..errors import FormatError, LazyckptError, MissingFileError, Problem, only_one, sentences, some
from ..formats.catalog import OPENERS, Found, recorded_step, unfinished
from ..formats.links import lost
from ..formats.orbax.steps import temporary
from ..formats.reader import Source
from ..formats.shared.announce import listing
from ..io.storage.base import Store, closed_error
from ..io.storage.joined import Joined
from ..namespace import plain_meta
from ..view import CheckpointView, within
from .stacking import Checkpoint, at, stacked


class Line:
    """The checkpoints of a run, opened on demand. ``given``: the steps that the user passed, by name."""

    def __init__(
        self, store: Store, found: tuple[Found, ...], given: dict[str, int], options: Mapping[str, Any] | None
    ) -> None:
        self.store, self.found, self.given = store, found, given
        self.options = store.options if store.is_remote else options
        self._opened: dict[str, CheckpointView | LazyckptError] = {}
        self.closed = False

    def path(self, found: Found) -> str:
        return f"{self.store.root}/{found.name}" if found.name else self.store.root

    def close(self) -> None:
        self.closed = True
        self.store.close()
        if "pinned" in self.__dict__:
            self.pinned.close()
        for view in self._opened.values():
            if isinstance(view, CheckpointView):
                view.close()

    def open(self, found: Found) -> CheckpointView:
        if self.closed:
            raise closed_error(self.store.root)
        view = self._opened.get(found.name)
        if view is None:
            try:
                # the files of a run beside it must not be taken for more of it
                form = "huggingface" if found.here else None
                where = self.store.address(found.name)
                view = CheckpointView(where, format=form, cache=False, storage_options=self.options)
                view = within(view, self.store)
            except LazyckptError as e:
                view = e
            self._opened[found.name] = view
        if isinstance(view, LazyckptError):
            raise view.with_traceback(None)
        return view

    def at(self, step: int) -> CheckpointView:
        """Return the view of a step: the first checkpoint of it that can be opened."""
        found = self.table.get(step)
        if found is None:
            raise MissingFileError(f"{self.store.root} has no step {step}; there are: {some(self.table, 5)}")
        for one in found[:-1]:
            with suppress(LazyckptError):
                return self.open(one)
        return self.open(found[-1])

    def _open_all(self, found: Sequence[Found]) -> None:
        def quietly(one: Found) -> None:
            with suppress(LazyckptError):  # `open` keeps the error, which becomes a problem later
                self.open(one)

        with ThreadPoolExecutor(max(OPENERS, self.store.width)) as pool:
            list(pool.map(quietly, found))

    @cached_property
    def table(self) -> Mapping[int, list[Found]]:
        """Step, ascending -> its checkpoints, in the order in which reading tries them."""
        return self._ordered[0]

    @cached_property
    def _ordered(self) -> tuple[dict[int, list[Found]], list[Problem]]:
        """The table of steps, and the problems of checkpoints that are not in it."""
        self._open_all([f for f in self.found if not f.sure and not f.side and (f.name or ".") not in self.given])
        table: dict[int, list[Found]] = {}
        problems = [
            Problem("unused-rule", f"steps[{name!r}]: there is no such checkpoint: it has no effect", name)
            for name in self.given
            if name not in {f.name or "." for f in self.found}
        ]
        for found in sorted(self.found, key=lambda f: (not f.sure, not f.is_dir, natural(f.name))):
            name, step, why = found.name or ".", found.number, "nothing tells its step"
            if name in self.given:
                step = self.given[name]
            elif not found.sure and not found.side:
                try:
                    recorded = recorded_step(plain_meta(self.open(found)))
                    step = found.number if recorded is None else recorded
                except LazyckptError as e:
                    why = f"it cannot be read: {e}"
            if step is None:
                line = f"{name} is left out: {why} (open_run(..., steps={{{name!r}: ...}}) gives it one)"
                problems.append(Problem("skipped-checkpoint", line, name))
            elif not found.side:  # an optimizer's state in a file of its own is not a checkpoint of the model
                table.setdefault(step, []).append(found)
        return dict(sorted(table.items())), problems

    @cached_property
    def opened(self) -> tuple[list[Checkpoint], tuple[Problem, ...]]:
        """The readable checkpoint of every step, and all problems."""
        table, problems = self.table, list(self._ordered[1])
        self._open_all([found[0] for found in table.values()])
        late = unfinished(self.store, self.found)
        here = listing(self.store)
        problems += [*temporary(here, {"step": max(table, default=-1)}), *lost(Source(self.store, listings={"": here}))]
        checkpoints: list[Checkpoint] = []
        notes: dict[Problem, list[int]] = {}
        for step, found in table.items():
            for n, one in enumerate(found):
                try:
                    view = self.open(one)
                except LazyckptError as e:
                    line = f"step {step}: {one.name} cannot be read: {e}"
                    problems.append(Problem("skipped-checkpoint", line, one.name))
                    continue
                name = one.name or "."
                if isinstance(view._store, Joined):
                    line = (
                        f"step {step}: {name} is a delta over a checkpoint outside of the run, run.at({step}) reads it"
                    )
                    problems.append(Problem("skipped-checkpoint", line, one.name))
                    break
                self.store.io.include(view.io)
                checkpoints.append(Checkpoint(step, name, view.root[len(self.store.root) :].lstrip("/"), view))
                others = [other.name or "." for other in found[n + 1 :]]
                if others:
                    line = f"step {step}: {name} is read; of the same step there is also {some(others)}"
                    problems.append(Problem("other-checkpoint", line, only_one(others)))
                if one.name in late:
                    line = f"step {step}: the save of {name} was not finished: {late[one.name]}"
                    problems.append(Problem("unfinished-save", line, name))
                recorded = recorded_step(plain_meta(view))
                if recorded not in (None, step) and name not in self.given:
                    line = f"step {step}: {name} says of itself that it is of step {recorded}"
                    problems.append(Problem("step-mismatch", line, name))
                for problem in view.problems:
                    notes.setdefault(problem, []).append(step)
                break
        problems += [problem.prefixed(at(steps)) for problem, steps in notes.items()]
        return checkpoints, tuple(problems)

    @cached_property
    def index(self) -> Index:
        checkpoints, problems = self.opened
        if not checkpoints:
            raise FormatError(f"{self.store.root}: none of its checkpoints can be read. {sentences(problems, 5)}")
        return stacked(checkpoints, problems)

    @cached_property
    def pinned(self) -> Store:
        store = self.store.pinned(self.index.files)
        store.guards = {
            f"{c.folder}/{path}" if c.folder else path: guard
            for c in self.opened[0]
            for path, guard in c.view._store.guards.items()
        }
        return store

    def __reduce__(self) -> tuple[Any, ...]:
        # options may hold credentials, which pickles of stores leave out
        options = None if self.store.is_remote else self.options
        return Line, (self.store, self.found, self.given, options), {"opened": self.opened, "table": self.table}

    def __setstate__(self, known: Mapping[str, Any]) -> None:
        self.__dict__.update(known)
        self._opened = {c.name if c.name != "." else "": c.view for c in self.opened[0]}

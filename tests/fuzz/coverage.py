"""The engine of atheris: inputs are kept and mutated again if they reach new code.

atheris is not among the packages of the tests: ``pip install atheris`` (CPython up to 3.13, Linux and macOS).
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from .contract import SIZE, Target, attempt
from .drive import Crashers
from .mutate import GRAMMARS


def guided(target: Target, minutes: float, out: Path, seed: int) -> int:
    """Run one target for some minutes; the mutators of its grammar change what the corpus holds."""
    try:
        import atheris
    except ImportError:
        print("atheris is not installed: pip install atheris, or use --engine own", file=sys.stderr)
        return 2
    corpus = out / "corpus" / target.name
    corpus.mkdir(parents=True, exist_ok=True)
    for n, data in enumerate(target.seeds()):
        (corpus / f"seed-{n}").write_bytes(data)
    crashers = Crashers(out)

    def once(data: bytes) -> None:
        crash = attempt(target, data)
        if crash is not None and (path := crashers.add(target, data, crash)) is not None:
            print(f"{target.name}: {crash.kind} in {crash.place}: {path}", flush=True)

    def mutated(data: bytes, most: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < 0.3:
            return bytes(atheris.Mutate(data, most))
        return GRAMMARS[target.grammar](rng, [data] if data else target.seeds())[:most]

    for name in [name for name in sys.modules if name.startswith("lazyckpt.")]:
        module = sys.modules[name]
        for value in list(vars(module).values()):
            if callable(value) and getattr(value, "__module__", "") == name and hasattr(value, "__code__"):
                atheris.instrument_func(value)
    options = [sys.argv[0], str(corpus), f"-max_total_time={int(minutes * 60)}", f"-max_len={SIZE}", f"-seed={seed}"]
    atheris.Setup(options, once, custom_mutator=mutated)
    atheris.Fuzz()  # ends the process
    return int(bool(crashers.seen))

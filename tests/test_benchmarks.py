"""The benchmarks' harness: rows, contests, tables, history, plots and pages. Nothing here measures lazyckpt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as program
from benchmarks import page, plots, report, suite
from benchmarks.case import Area, Case, Goal, Settings
from benchmarks.contest import Contest, Skipped, Sweep, exponent
from benchmarks.host import LAZYCKPT, Fresh, close
from benchmarks.row import Row, Spread, show
from benchmarks.sample import Sample, Sampler, Timed

ROOT = Path(__file__).parents[1]


def constant(seconds: float, **counts: float) -> Sampler:
    return lambda calls: Sample(seconds, counts)


def rows_of(case: Case) -> list[Row]:
    return case.rows("an area", 0, 3)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(tmp_path, quick=True)


# -- rows


def test_a_spread_has_median_and_quartiles() -> None:
    assert Spread.of([3.0, 1.0, 2.0, 5.0, 4.0]) == (3.0, 2.0, 4.0, 5)
    assert Spread.of([7.0]) == (7.0, 7.0, 7.0, 1)


def test_a_goal_is_met_or_missed_by_the_median_ratio() -> None:
    ratio = Spread(0.9, 0.8, 1.2, 5)
    assert Row("a", "b", ratio=ratio, goal=0.9).met is True
    assert Row("a", "b", ratio=ratio, goal=0.89).met is False
    assert Row("a", "b", ratio=ratio).met is None
    assert Row("a", "b", goal=1.0, skipped="no GPU").met is None
    assert Row("a", "b", goal=1.0, failed="it broke").met is False


def test_a_row_survives_json() -> None:
    one = Spread(1.5, 1.0, 2.0, 3)
    row = Row("a", "b", "peak", one, "the peer", one, "cp", one, one, 1.0, counts={"bytes": 5.0}, points=[(1.0, 2.0)])
    assert Row.from_dict(json.loads(json.dumps(row.to_dict()))) == row
    assert Row.from_dict(Row("a", "b", skipped="no GPU").to_dict()) == Row("a", "b", skipped="no GPU", points=[])


def test_figures_have_units() -> None:
    assert [show(value, "s") for value in (2e-6, 0.5, 90)] == ["2.0 us", "500.0 ms", "90.00 s"]
    assert [show(value, "B") for value in (12, 3 << 10, 5 << 30)] == ["12 B", "3.0 KiB", "5.0 GiB"]


# -- contests and cases


def test_pairs_alternate_and_each_is_prepared() -> None:
    called: list[str] = []

    def sampler(name: str) -> Sampler:
        def call(calls: int) -> Sample:
            called.append(name)
            return Sample(1.0, {})

        return call

    contest = Contest(
        sampler("ours"), ("them", sampler("peer")), calls=1, rehearse=False, before=lambda: called.append("before")
    )
    contest.run(0, 3)
    assert called[::2] == ["before"] * 6
    assert called[1::2] == ["ours", "peer", "peer", "ours", "ours", "peer"]


def test_short_calls_are_repeated() -> None:
    calls = []
    contest = Contest(lambda n: (calls.append(n), Sample(1e-5, {}))[1], ("them", constant(2e-5)))  # type: ignore[func-returns-value]
    contest.run(0, 1)
    assert calls == [1, 3, 100]


def test_what_was_written_is_removed_after_an_error() -> None:
    def fails(calls: int) -> Sample:
        raise OSError("the disk is full")

    done: list[bool] = []
    with pytest.raises(OSError, match="full"):
        Contest(fails, calls=1, done=lambda: done.append(True)).run(0, 1)
    assert done == [True]


def test_ratios_are_those_of_pairs() -> None:
    seconds = iter([1.0, 4.0, 9.0])
    peers = iter([1.0, 2.0, 3.0])
    contest = Contest(
        lambda calls: Sample(next(seconds), {}), ("them", lambda calls: Sample(next(peers), {})),
        calls=1, rehearse=False,
    )  # fmt: skip
    row, fastest = rows_of(Case("a", lambda: contest, [Goal(2.0), Goal(0.9, label="fastest", fastest=True)]))
    assert row.ratio is not None and row.ratio.median == 2.0 and row.met
    assert fastest.ratio is not None and fastest.ratio.median == 1.0 and not fastest.met


def test_goals_compare_with_the_peer_the_limit_or_a_constant() -> None:
    contest = Contest(
        constant(2.0, peak=30.0), ("them", constant(4.0)), ("cp", constant(1.0)), calls=1,
        once=[constant(0.0, held=5.0)], count=lambda: {"requests": 7.0},
    )  # fmt: skip
    goals = [
        Goal(1.0), Goal(1.0, against="limit", label="cp"), Goal(1.0, "peak", 60.0, "peak memory", "60 B"),
        Goal(None, "held", 10.0),
    ]  # fmt: skip
    rows = rows_of(Case("a", lambda: contest, goals))
    assert [row.what for row in rows] == ["a", "a: cp", "a: peak memory", "a"]
    assert [row.ratio.median for row in rows if row.ratio] == [0.5, 2.0, 0.5, 0.5]
    assert [row.met for row in rows] == [True, False, True, None]
    assert rows[0].counts["requests"] == 7.0 and rows[0].limit == "cp"


def test_a_skipped_row_says_why() -> None:
    def make() -> Contest:
        raise Skipped("not measured: no GPU")

    (row,) = rows_of(Case("a", make))
    assert row.skipped == "not measured: no GPU" and row.met is None


def test_growth_is_fitted() -> None:
    assert exponent([(10, 5), (100, 500)]) == pytest.approx(2)
    sweep = Sweep("ranks", [(n, constant(n**1.5, peak=3.0 * n)) for n in (1, 10, 100)])
    time, memory = rows_of(Case("open", lambda: sweep, [Goal(1.05, label="time"), Goal(1.05, "peak", label="memory")]))
    assert time.ours is not None and memory.ours is not None
    assert time.ours.median == pytest.approx(1.5) and not time.met
    assert memory.ours.median == pytest.approx(1.0) and memory.met
    assert list(memory.points) == [(1, 3.0), (10, 30.0), (100, 300.0)]


def test_a_call_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(1 << 20))
    sample = Timed(path.read_bytes)(1)
    assert sample.seconds > 0
    if "bytes" in sample.counts:
        assert sample.counts["bytes"] >= 1 << 20 and sample.counts["read calls"] >= 1


@pytest.mark.slow
def test_a_fresh_process_is_measured() -> None:
    try:
        sample = Fresh(
            LAZYCKPT,
            "b = bytearray(b'x') * (32 << 20); counts = {'found': n}",
            "n = 5; a = bytearray(b'x') * (64 << 20)",
        )(1)
        assert 30 << 20 < sample.counts["peak"] < 60 << 20
        assert sample.counts["found"] == 5
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            Fresh(LAZYCKPT, "1 / 0")(1)
        with pytest.raises(RuntimeError, match="NameError"):
            Fresh(LAZYCKPT, "a")(1)
    finally:
        close()


# -- the suite


def test_a_quick_run_covers_every_area(settings: Settings) -> None:
    for area in suite.areas():
        assert suite.cases(area, settings), area.name


def test_rows_have_texts_of_their_own(tmp_path: Path) -> None:
    for quick in (False, True):
        settings = Settings(tmp_path, quick)
        for area in suite.areas():
            texts = [text for case in suite.cases(area, settings) for text in case.texts()]
            assert len(set(texts)) == len(texts), area.name


def test_rows_are_listed_without_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--list", "--folder", str(tmp_path), "slices", "--only", "16 columns"]) == 0
    listed = capsys.readouterr().out
    assert "16 columns, warm, peer torch  [<= 1]" in listed and "one row" not in listed
    assert not list(tmp_path.iterdir())


def test_an_unknown_area_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program.main(["slides", "--folder", str(tmp_path)])
    assert "slides" in capsys.readouterr().err


def measured(monkeypatch: pytest.MonkeyPatch, *cases: Case) -> None:
    area = Area("slices", "Slices", "", lambda settings: list(cases))
    monkeypatch.setattr(suite, "areas", lambda names=(): [area])


def test_a_run_writes_json_and_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured(monkeypatch, Case("a", lambda: Contest(constant(1.0), ("them", constant(2.0)), calls=1)))
    result, history = tmp_path / "result.json", tmp_path / "history.jsonl"
    options = ["--folder", str(tmp_path), "--json", str(result), "--history", str(history)]
    assert program.main(options) == program.main(options) == 0
    out = capsys.readouterr().out
    assert "| a | 1.00 s | 2.00 s | them |  | 0.50 | <= 1 | met |" in out and "1 of 1 goals met" in out
    first, second = report.runs(history)
    assert first["rows"] == second["rows"] == report.runs(result)[0]["rows"]
    assert {"commit", "date", "quick", "machine"} <= set(first)
    assert str(tmp_path) not in history.read_text("utf-8")
    assert [row.ratio for row in report.newest([first, second])] == [Spread(0.5, 0.5, 0.5, 101)]


def test_a_missed_goal_and_a_failure_are_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = Case("slow", lambda: Contest(constant(3.0), ("them", constant(2.0)), calls=1))
    broken = Case("broken", lambda: Contest(Timed(lambda: 1 / 0), calls=1))
    for case in (slow, broken):
        measured(monkeypatch, case)
        assert program.main(["--folder", str(tmp_path)]) == 1
    assert "failed: ZeroDivisionError" in capsys.readouterr().out


def test_the_newest_figure_of_each_row_counts() -> None:
    def run(quick: bool, **figures: float) -> dict[str, Any]:
        return report.result([Row("slices", what, ratio=Spread.of([r])) for what, r in figures.items()], {}, {}, quick)

    found = report.newest([run(False, a=1.0, b=2.0), run(False, a=3.0), run(True, a=9.0, c=9.0)])
    assert {row.what: row.ratio and row.ratio.median for row in found} == {"a": 3.0, "b": 2.0}
    assert [row.what for row in report.newest([run(True, c=9.0)])] == ["c"]
    of = [run(False, a=1.0), run(False, b=2.0), run(False, a=3.0), run(True, a=9.0)]
    assert report.used(of) == of[1:3]
    assert report.only_quick([run(True, c=9.0)], "slices")
    assert not report.only_quick([run(True, c=9.0), run(False, a=1.0)], "slices")


def test_rows_that_the_suite_no_longer_has_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch, Case("a", lambda: Contest(constant(1.0), calls=1)))
    rows = [Row("slices", what, ratio=Spread.of([1.0])) for what in "ab"]
    report.append(tmp_path / "history.jsonl", report.result(rows, {}, {}, False))
    (found,) = suite.history(tmp_path / "history.jsonl")
    assert [row["what"] for row in found["rows"]] == ["a"]


# -- the documentation


def test_plots_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    one = Spread(0.5, 0.4, 0.6, 5)
    rows = [
        Row("slices", "met", ours=one, ratio=one, goal=1.0),
        Row("slices", "missed", ours=one, ratio=one, goal=0.1),
        Row("scaling", "open", "exponent", ours=one, ratio=one, goal=1.0, against="seconds against ranks",
            points=[(1, 0.1), (10, 0.5)]),
        Row("scaling", "open", "exponent", ours=one, ratio=one, goal=1.0, against="peak against ranks",
            points=[(1, 1e6), (10, 2e6)]),
        Row("accelerator", "to", skipped="no GPU"),
    ]  # fmt: skip
    paths = plots.draw(rows, tmp_path)
    assert [path.name for path in paths] == ["slices.svg", "scaling.svg"]
    assert "(missed)" in paths[0].read_text("utf-8") and "exponent 0.50" in paths[1].read_text("utf-8")
    before = [path.read_bytes() for path in paths]
    assert [path.read_bytes() for path in plots.draw(rows, tmp_path)] == before


def test_tables_of_a_page_are_filled_again_and_again() -> None:
    row = Row("slices", "a", ours=Spread.of([1.0]), ratio=Spread.of([0.5]), goal=1.0)
    runs = [report.result([row], {}, {"date": "2026-01-01", "commit": "abc"}, False)]
    text = "before\n<!-- benchmarks: slices -->\n<!-- end -->\nafter"
    once = page.fill(text, runs)
    assert "| a | 1.00 s |" in once and once.startswith("before\n") and once.endswith("\nafter")
    assert page.fill(once, runs) == once
    with pytest.raises(ValueError, match="slides"):
        page.fill("<!-- benchmarks: slides -->\n<!-- end -->", runs)


def test_the_page_has_a_table_for_each_area() -> None:
    text = (ROOT / "docs" / "explanation" / "speed.md").read_text("utf-8")
    for name in [*suite.NAMES, "machine", "missed"]:
        assert f"<!-- benchmarks: {name} -->\n" in text, name
    notes = (ROOT / "benchmarks" / "NOTES.md").read_text("utf-8")
    for name in suite.NAMES:
        assert f"\n## {name}\n" in notes, name

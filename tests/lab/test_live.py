"""The table of a sweep that goes on, as it is read from the folders."""

import io
import time

import pytest

from prospr.lab import live
from prospr.lab.experiment import Experiment, Training
from prospr.lab.grid import changed, grid
from prospr.lab.live import Seen, States, live_table
from prospr.lab.run import run, run_many
from prospr.lab.runs.files import locked
from prospr.lab.runs.folder import RunFolder

SMALL = Experiment(method="snip", settings={"width": 4}, training=Training(epochs=2, batch_size=512))


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_where_runs_stand(tmp_path):
    done, failed, under_way, waiting, failed_before = (
        SMALL,
        changed(SMALL, method="magnitude", sparsity=0.999),
        changed(SMALL, seed=1),
        changed(SMALL, seed=2),
        changed(SMALL, method="magnitude", sparsity=0.9999),
    )
    run_many([failed_before], tmp_path, "cpu")
    wanted = [done, failed, under_way, waiting, failed_before]
    states = States(wanted, tmp_path)
    assert {one.state for one in states.look().values()} == {"waiting"}
    result, _ = run_many([done, failed], tmp_path, "cpu")
    place = RunFolder(under_way, tmp_path)
    place.path.mkdir()
    (place.path / "metrics.jsonl").write_text('{"epoch": 1, "loss": 1.0}\n')
    with locked(place.lock):
        seen = states.look()
    assert [seen[one.identity] for one in wanted] == [
        Seen("done", 1.0, result.figure), Seen("failed"), Seen("under way", 0.5), Seen("waiting"), Seen("waiting"),
    ]  # fmt: skip
    assert states.look()[under_way.identity] == Seen("waiting", 0.5)
    run_many([failed_before], tmp_path, "cpu")  # it is tried again, and fails again
    assert states.look()[failed_before.identity] == Seen("failed")


def test_two_hundred_runs_are_looked_at_quickly(tmp_path):
    wanted = grid(SMALL, seed=range(200))
    for one in wanted[:4]:
        RunFolder(one, tmp_path).path.mkdir()
        RunFolder(one, tmp_path).lock.touch()
    states = States(wanted, tmp_path)
    start = time.perf_counter()
    assert len(states.look()) == 200
    assert time.perf_counter() - start < 0.5  # measured: 11 ms on two busy cores


@pytest.mark.parametrize("height", [40, 7])
def test_the_table(tmp_path, height, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", str(height))
    wanted = grid(changed(SMALL, epochs=1), method=["dense", "snip"], sparsity=[0.5, 0.8], seed=range(2))
    wanted.append(changed(SMALL, method="magnitude", sparsity=0.999))
    out = Terminal()
    with live_table(wanted, tmp_path, out) as progress:
        results = run_many(wanted[:5], tmp_path, "cpu", progress)
        run_many(wanted[-1:], tmp_path, "cpu", progress)
    text = out.getvalue().splitlines()
    mean = 50 * (results[0].figure + results[1].figure)
    last = "\n".join(text[-8:])
    assert "5 done, 0 under way, 1 failed, 1 waiting" in last
    assert "0/1 1!" in last
    if height == 40:
        assert f"{mean:.2f} 2/2" in last  # dense
        assert f"{100 * results[4].figure:.2f} 1/2" in last  # snip at 80 %
    assert "7 runs" in out.getvalue()


def test_without_a_terminal_there_are_plain_lines(tmp_path):
    out = io.StringIO()
    with live_table([SMALL], tmp_path, out) as progress:
        run_many([SMALL], tmp_path, "cpu", progress)
    assert out.getvalue().startswith("[1/1] small_convnet, digits, snip 90 %, seed 0: accuracy ")


def test_looking_takes_a_small_share_of_the_time(tmp_path, monkeypatch):
    run(SMALL, tmp_path, "cpu")
    table = live._Table([SMALL], tmp_path)
    looks = []
    monkeypatch.setattr(table._states, "look", lambda: looks.append(time.sleep(0.05)) or {})
    table.look(at_once=True)
    table.look()
    assert len(looks) == 1
    assert table._next - time.monotonic() > 1.5  # fifty times what a look took

"""The live page: what is served and what is not, when it is made anew, and in a browser that it keeps its place."""

import html as htmllib
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest
from fake_runs import fake_run, grid

from prospr.cli import main
from prospr.lab.experiment import Experiment, Training
from prospr.lab.report import serve
from prospr.lab.report.serve import LivePage, make_server

SHORT = Training(epochs=6)
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@contextmanager
def served(page):
    with make_server(page, port=0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def ask(port, path, method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), answer.headers
    finally:
        connection.close()


@pytest.fixture
def runs(tmp_path):
    for one in grid(("snip", "random"), (0.9, 0.98), (0, 1), training=SHORT):
        fake_run(one, tmp_path / "runs")
    return tmp_path / "runs"


def more(folder, seed=7):
    return fake_run(Experiment(dataset="cifar10", method="snip", sparsity=0.9, seed=seed, training=SHORT), folder)


def test_the_page_and_its_state_are_served(runs):
    with served(LivePage([runs], "snip", "Two <ways>", every=0)) as port:
        status, page, headers = ask(port, "/")
        assert status == 200
        assert headers["Content-Type"] == "text/html; charset=utf-8"
        assert headers["Cache-Control"] == "no-store"
        assert "<title>Two &lt;ways&gt;</title>" in page
        assert "minus snip" in page
        assert "10 runs: 10 done." in page
        policy = htmllib.unescape(re.search(r'Content-Security-Policy" content="([^"]*)"', page).group(1))
        assert "default-src 'none'" in policy
        assert "connect-src 'self'" in policy
        _, stamp, _ = ask(port, "/state")
        assert f'data-live="{stamp}"' in page
        assert ask(port, "/", "HEAD")[:2] == (200, "")


def test_a_change_makes_the_page_anew_and_nothing_else_does(runs, monkeypatch):
    made = []
    real = serve.runs_page
    monkeypatch.setattr(serve, "runs_page", lambda *args, **more: made.append(1) or real(*args, **more))
    with served(LivePage([runs], every=0)) as port:
        _, before, _ = ask(port, "/state")
        for _ in range(3):
            assert ask(port, "/state")[1] == before
            ask(port, "/")
        assert made == [1]
        place = more(runs)
        _, after, _ = ask(port, "/state")
        assert after != before
        assert "11 runs: 11 done." in ask(port, "/")[1]
        assert made == [1, 1]
        (place.path / "result.json").unlink()  # as if it were run again
        assert "11 runs: 10 done, 1 unfinished." in ask(port, "/")[1]


def test_folders_are_not_looked_at_more_often_than_asked(runs):
    page = LivePage([runs], every=0.5)
    stamp, _ = page.now()
    more(runs)
    assert page.now()[0] == stamp
    page = LivePage([runs], every=0.01)
    start = time.monotonic()
    stamp, _ = page.now()
    took = time.monotonic() - start
    more(runs, seed=8)
    assert page.now()[0] == stamp  # to make it took a while, so the next is not made at once
    time.sleep(5.5 * took)
    assert page.now()[0] != stamp


@pytest.mark.parametrize(
    "path",
    ["/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/runs", "/state/..", "//etc/passwd", "/experiment.json", "/?a"],
)
def test_nothing_else_is_served(path, runs):
    with served(LivePage([runs], every=0)) as port:
        status, body, _ = ask(port, path)
        assert status == 404
        assert "root:" not in body
        assert ask(port, "/", "POST")[0] == 501
        assert ask(port, "/")[0] == 200


def test_another_name_that_leads_here_is_refused(runs):
    """A page from elsewhere whose name is made to lead to this machine could read the runs otherwise."""
    with served(LivePage([runs], every=0)) as port:
        assert ask(port, "/", Host="evil.example")[0] == 421
        assert ask(port, "/", Host=f"evil.example:{port}")[0] == 421
        assert ask(port, "/", Host=f"localhost:{port}")[0] == 200


def test_it_waits_for_the_first_run(tmp_path):
    with served(LivePage([tmp_path / "runs"], every=0)) as port:
        status, page, _ = ask(port, "/")
        assert status == 200
        assert "No run is there yet." in page
        _, before, _ = ask(port, "/state")
        more(tmp_path / "runs")
        assert ask(port, "/state")[1] != before
        assert "1 run: 1 done." in ask(port, "/")[1]


def test_many_ask_at_once_and_the_page_is_made_once(runs, monkeypatch):
    made, answers = [], []
    real = serve.runs_page
    monkeypatch.setattr(serve, "runs_page", lambda *args, **more: made.append(1) or real(*args, **more))
    with served(LivePage([runs], every=0)) as port:
        threads = [threading.Thread(target=lambda: answers.append(ask(port, "/")[0])) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == [200] * 8
    assert made == [1]


# The command


def test_the_command_serves_until_it_is_interrupted(runs, tmp_path):
    pytest.importorskip("tyro")
    words = [sys.executable, "-m", "prospr", "serve", str(runs), "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        # Tests that a shell runs in the background inherit that interrupts are ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        line = done.stdout.readline()
        port = int(re.fullmatch(rf"http://127\.0\.0\.1:(\d+)/ shows {re.escape(str(runs))}; .*\n", line).group(1))
        assert ask(port, "/")[0] == 200
        done.send_signal(signal.SIGINT)
        _, told = done.communicate(timeout=30)
        assert done.returncode == 130
        assert "interrupted" in told
        assert "Traceback" not in told
    finally:
        done.kill()
        done.wait()


def test_a_port_that_is_taken_is_told(runs, capsys):
    pytest.importorskip("tyro")
    with served(LivePage([runs], every=0)) as port:
        assert main(["serve", str(runs), "--port", str(port)]) == 1
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err


def test_a_file_asks_for_nothing(runs, tmp_path):
    from prospr.lab.report import report_runs

    page = report_runs([runs], tmp_path / "page.html").read_text(encoding="utf-8")
    assert "data-live" not in page
    assert "fetch(" not in page
    assert "connect-src" not in page


# In a browser

PROBE = """<script>
const said = [];
addEventListener("error", (event) => said.push(event.message));
addEventListener("securitypolicyviolation", (event) => said.push(event.violatedDirective));
addEventListener("load", () => {
  const one = (s) => document.querySelector(s), all = (s) => [...document.querySelectorAll(s)];
  const box = () => one(".filter input"), snip = () => one(".curves input[value=snip]");
  const lines = () => all(".curve").filter((line) => !line.classList.contains("off")).length;
  const head = () => one("#curves").getBoundingClientRect().top;
  box().value = "seed 7";
  box().dispatchEvent(new Event("input"));
  snip().click();
  one("#curves ~ details, #curves ~ * details").open = true;
  one("#curves").scrollIntoView();
  box().focus({ preventScroll: true });
  box().setSelectionRange(3, 3);
  const before = { lines: lines(), top: Math.round(head()), told: one(".filter output").textContent, y: scrollY };
  addEventListener("renewed", () => setTimeout(() => {
    document.title = JSON.stringify({
      before,
      after: { lines: lines(), top: Math.round(head()), told: one(".filter output").textContent, y: scrollY },
      typed: box().value, cursor: box().selectionStart, focused: document.activeElement === box(),
      ticked: snip().checked, open: one("#curves ~ details, #curves ~ * details").open,
      live: one(".live").textContent, said,
    });
  }, 100));
});
</script>"""


class Probed(LivePage):
    """A live page with a probe in it, to whose folder a run comes after the browser has asked for its state twice."""

    def __init__(self, folder):
        super().__init__([folder], every=0)
        self.folder, self.asked = folder, 0

    def now(self):
        self.asked += 1
        if self.asked == 3:  # the page; its state; its state again
            more(self.folder)
        stamp, page = super().now()
        return stamp, page.replace("</head>", f"{PROBE}</head>")


@pytest.mark.skipif(BROWSER is None, reason="needs chromium, and there is none here")
@pytest.mark.parametrize("size", ["1280,900", "500,900"])
def test_an_open_page_takes_in_what_is_new_and_keeps_its_place(runs, tmp_path, size):
    page = Probed(runs)
    with served(page) as port:
        words = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", f"--window-size={size}"]
        words += [f"--user-data-dir={tmp_path / 'browser'}", "--virtual-time-budget=12000", "--enable-logging=stderr"]
        address = f"http://127.0.0.1:{port}/"
        done = subprocess.run([*words, address], capture_output=True, text=True, timeout=120, check=True)
    seen = json.loads(htmllib.unescape(re.search(r"<title>(.*?)</title>", done.stdout).group(1)))
    before, after = seen.pop("before"), seen.pop("after")
    assert before["told"] == "0 of 10 runs"
    assert after["told"] == "1 of 11 runs"
    assert after["lines"] == before["lines"]  # the new run is of the method that is not ticked
    assert before["y"] > 0
    assert abs(after["top"] - before["top"]) <= 1
    assert seen == {
        "typed": "seed 7",
        "cursor": 3,
        "focused": True,
        "ticked": False,
        "open": True,
        "live": "live",
        "said": [],
    }
    assert "11 runs: 11 done." in done.stdout
    assert "CONSOLE" not in done.stderr


@pytest.mark.skipif(BROWSER is None, reason="needs chromium, and there is none here")
def test_a_page_whose_server_is_gone_says_so(runs, tmp_path):
    class Leaving(LivePage):
        asked = 0

        def now(self):
            self.asked += 1
            if self.asked > 2:
                raise ConnectionError("gone")
            return super().now()

    with served(Leaving([runs], every=0)) as port:
        words = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", "--virtual-time-budget=8000"]
        words += [f"--user-data-dir={tmp_path / 'browser'}", f"http://127.0.0.1:{port}/"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    assert "the server does not answer; this is the page as it was" in done.stdout
    assert "10 runs: 10 done." in done.stdout


def test_a_run_whose_folder_is_named_by_hand(tmp_path):
    one = more(tmp_path / "runs")
    with served(LivePage([one.path], every=0)) as port:
        _, before, _ = ask(port, "/state")
        assert "1 run: 1 done." in ask(port, "/")[1]
        (one.path / "result.json").unlink()
        assert ask(port, "/state")[1] != before

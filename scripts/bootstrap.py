"""Make `.venv` and install the project into it, if that has not been done already.

Standard library only. A stamp, written last, says what the environment was made from. When nothing changed
the script returns at once; when the requirements changed they are installed again; when the interpreter or
the folder changed, or an earlier call was interrupted, the environment is made anew.

uv does the installing where it can, because it is quick; pip does where uv cannot. uv does not read pip's
configuration, so what pip is told about where packages come from (find-links, indexes, certificates) is
handed on. That also lets a local CPU build of torch win over the index's, which brings gigabytes of CUDA.
"""

import sys

if sys.version_info < (3, 10):  # noqa: UP036  the interpreter that runs this file may be any
    sys.exit("bootstrap: Python 3.10 or newer is needed. Name one: make PYTHON=/path/to/python3")

import hashlib
import os
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
PYTHON = BIN / ("python.exe" if os.name == "nt" else "python")
STAMP = VENV / ".prospr-stamp"
LOCK = ROOT / ".venv.lock"
CONSTRAINTS = ROOT / "constraints.txt"
EXTRAS = ("dev", "lab")  # each has all that those after it have


class SetupError(Exception):
    """A step failed; the message says what to do about it."""


def place() -> str:
    """What a virtual environment cannot survive a change of: the interpreter and the folder it stands in."""
    return f"{sys.implementation.cache_tag} {sys.version.split()[0]} {ROOT}"


def wanted(extra: str) -> str:
    """The stamp of an environment that is up to date and has this extra."""
    digest = hashlib.sha256()
    for path in (ROOT / "pyproject.toml", CONSTRAINTS):
        digest.update(path.read_bytes() + b"\0")
    return f"{place()}\n{digest.hexdigest()}\n{extra}\n"


def enough(stamp: str, extra: str) -> bool:
    """Whether an environment of this stamp has the extra, alone or with more."""
    return any(stamp == wanted(one) for one in EXTRAS[: EXTRAS.index(extra) + 1])


def stamped() -> str:
    """The stamp of the environment that is there; empty when there is none or it is unfinished."""
    try:
        return STAMP.read_text(encoding="utf-8") if PYTHON.exists() else ""
    except (OSError, UnicodeDecodeError):
        return ""


@contextmanager
def locked():
    """Only one call at a time; a second waits. Without fcntl (Windows) there is no lock."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with open(LOCK, "w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say("waiting for another call to finish")
            fcntl.flock(handle, fcntl.LOCK_EX)
        os.set_inheritable(handle.fileno(), True)  # if this process is killed, its installer keeps the lock
        yield


def say(message: str) -> None:
    print(f"bootstrap: {message}", file=sys.stderr, flush=True)


def call(command: list[str], env: dict[str, str] | None = None) -> tuple[bool, str]:
    """Run a command in the project's folder; whether it succeeded, and all it printed."""
    import subprocess

    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=env,
            close_fds=False,  # the lock is passed on
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except OSError as error:
        return False, str(error)
    return done.returncode == 0, done.stdout


def tail(output: str, lines: int = 15) -> str:
    return "\n".join("    " + line for line in output.strip().splitlines()[-lines:])


def make_venv() -> None:
    say(f"{'making .venv anew' if VENV.exists() else 'making .venv'} with Python {sys.version.split()[0]}")
    ok, output = call([sys.executable, "-m", "venv", "--clear", str(VENV)])
    if not ok:
        raise SetupError(
            f"'{sys.executable} -m venv' failed:\n{tail(output)}\n"
            "On Debian and Ubuntu the module is a package of its own: apt-get install python3-venv. "
            "Another interpreter can be named: make PYTHON=/path/to/python3"
        )


def pip_settings() -> dict[str, list[str]]:
    """pip's own settings, from its files and its environment variables: {"find-links": ["/a/folder"]}."""
    import ast

    ok, output = call([str(PYTHON), "-m", "pip", "config", "list"])
    settings: dict[str, list[str]] = {}
    sections = ("global.", "install.", ":env:.")  # a later one wins, as in pip
    for section in sections if ok else ():
        for line in output.splitlines():
            key, _, value = line.partition("=")
            if key.startswith(section) and value:
                settings[key[len(section) :]] = str(ast.literal_eval(value)).split()
    return settings


def uv_environment(settings: dict[str, list[str]]) -> dict[str, str]:
    """pip's settings as uv's environment variables. A variable that is set already is left as it is."""
    no_index = settings.get("no-index", ["no"])[0].lower() in ("1", "true", "yes", "on")
    handed_on = {
        "UV_FIND_LINKS": ",".join(settings.get("find-links", [])),
        "UV_DEFAULT_INDEX": " ".join(settings.get("index-url", [])),
        "UV_INDEX": " ".join(settings.get("extra-index-url", [])),
        "UV_NO_INDEX": "1" if no_index else "",
        "UV_INDEX_STRATEGY": "unsafe-best-match",  # as pip does: the best version from any index
        "SSL_CERT_FILE": " ".join(settings.get("cert", [])),
    }
    return {key: value for key, value in handed_on.items() if value} | dict(os.environ)


def find_uv() -> str | None:
    """uv from the PATH, from .venv, or installed into .venv now; None when it cannot be had."""
    import shutil

    uv = shutil.which("uv") or shutil.which("uv", path=str(BIN))
    if uv is None:
        call([str(PYTHON), "-m", "pip", "install", "-c", str(CONSTRAINTS), "uv"])
        uv = shutil.which("uv", path=str(BIN))
    return uv


def tell_torch(settings: dict[str, list[str]]) -> None:
    """Say which torch is about to be installed: the index's Linux build is a download of gigabytes."""
    pins = [line.strip() for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines()]
    version = next((pin.split("==")[1] for pin in pins if pin.startswith("torch==")), "")
    folders = [Path(link.removeprefix("file://")) for link in settings.get("find-links", [])]
    wheels = [wheel.name for folder in folders for wheel in sorted(folder.glob(f"torch-{version}[+-]*.whl"))]
    mine = [wheel for wheel in wheels if f"-cp{sys.version_info[0]}{sys.version_info[1]}-" in wheel]
    if mine:
        say(f"torch from a local file, {mine[0]}")
    elif sys.platform == "linux":
        others = f"; the local {', '.join(wheels)} is for another Python" if wheels else ""
        say(f"torch {version} from the package index, with CUDA: gigabytes to download{others}")


def install(extra: str) -> None:
    requirement = f".[{extra}]"
    settings = pip_settings()
    tell_torch(settings)
    uv = find_uv()
    if uv:
        say("installing with uv")
        command = [uv, "pip", "install", "--python", str(PYTHON), "--constraints", str(CONSTRAINTS)]
        command += ["--build-constraints", str(CONSTRAINTS), "--editable", requirement]
        ok, output = call(command, uv_environment(settings))
        if ok:
            return
        say(f"uv failed, trying pip. Its last lines:\n{tail(output, 5)}")
    else:
        say("uv cannot be had; installing with pip, which takes longer")
    ok, output = call([str(PYTHON), "-m", "pip", "install", "-c", str(CONSTRAINTS), "-e", requirement])
    if not ok:
        raise SetupError(f"the installation failed:\n{tail(output)}\n{advice(output)}")


def advice(output: str) -> str:
    if "No space left" in output:
        return "The disk is full: free some space and call again."
    unreachable = (
        "NewConnectionError",
        "Temporary failure",
        "timed out",
        "Max retries",
        "from versions: none",
    )
    if any(sign in output for sign in unreachable):
        return "The package index cannot be reached: check the network and 'pip config list'."
    if "No matching distribution" in output or "ResolutionImpossible" in output:
        return (
            f"A pin in {CONSTRAINTS.name} cannot be met here: check the network and 'pip config list', "
            "or name another Python: make PYTHON=/path/to/python3"
        )
    return "Call again to retry from scratch; 'pip config list' shows where packages are taken from."


def bootstrap(extra: str, force: bool) -> None:
    if not force and enough(stamped(), extra):
        return
    with locked():
        stamp, goal = stamped(), wanted(extra)
        if not force and enough(stamp, extra):  # another call did it while this one waited
            return
        import time

        if VENV.exists() and not VENV.is_dir():
            raise SetupError(f"{VENV} is not a folder. Move it away and call again.")
        start = time.monotonic()
        STAMP.unlink(missing_ok=True)
        if force or stamp.partition("\n")[0] != place():
            make_venv()
        install(extra)
        # prospr itself is only looked for: a mistake in its code is no fault of the environment
        probe = "import importlib.util as u, torch; assert u.find_spec('prospr'); print(torch.__version__)"
        ok, output = call([str(PYTHON), "-c", probe])
        if not ok:
            raise SetupError(f"the installed packages do not import:\n{tail(output)}")
        STAMP.write_text(goal, encoding="utf-8")
        say(f".venv is ready, torch {output.split()[-1]}, after {time.monotonic() - start:.0f} s")


def main(arguments: list[str]) -> int:
    extra, force = EXTRAS[0], False
    if arguments:  # argparse alone would double the time of the call that has nothing to do
        import argparse

        parser = argparse.ArgumentParser(prog="bootstrap.py", description=__doc__.partition("\n")[0])
        parser.add_argument("extra", nargs="?", choices=EXTRAS, default=extra, help="what .venv must have at least")
        parser.add_argument("--force", action="store_true", help="make .venv anew even if it is up to date")
        given = parser.parse_args(arguments)
        extra, force = given.extra, given.force
    try:
        bootstrap(extra, force)
    except SetupError as error:
        say(f"error: {error}")
        return 1
    except OSError as error:  # a folder that may not be written, a full disk
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted; the next call starts .venv afresh")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

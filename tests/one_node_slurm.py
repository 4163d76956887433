"""A Slurm of one node, for tests and for trying things: its own configuration, key, state and ports, all in one folder.

    python tests/one_node_slurm.py prospr sweep --executor slurm ...

runs a command with such a Slurm around it and stops it again. It needs Debian's slurmctld, slurmd, slurm-client and
munge (`make slurm`), and no rights but to run them.
"""

import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol")
CPUS = 4  # that Slurm is told of, however many there are

CONFIGURATION = """
ClusterName=prospr
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=6
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0,bf_interval=1
KillWait=1
MinJobAge=5
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory=4000 State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


class NoSlurmError(Exception):
    """It is not installed, or does not start here."""


def missing() -> list[str]:
    return [name for name in PROGRAMS if _which(name) is None]


def _which(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin:/sbin")


@contextmanager
def one_node_slurm(patience: float = 30.0):
    """Start it; the environment that Slurm's commands need. It ends with the context."""
    if missing():
        raise NoSlurmError(f"not installed: {', '.join(missing())}")
    folder = Path(tempfile.mkdtemp(prefix="prospr-slurm-"))  # short: it is in the name of a socket
    servers: list[subprocess.Popen] = []
    try:
        (folder / "state").mkdir()
        (folder / "spool").mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        folder.chmod(0o755)
        values = {"host": socket.gethostname().partition(".")[0], "user": getpass.getuser(), "folder": folder}
        values |= {"controller_port": _free_port(), "node_port": _free_port(), "cpus": CPUS}
        (folder / "slurm.conf").write_text(CONFIGURATION.format(**values))
        environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        munge = [f"--{name}={folder}/munge.{name.partition('-')[0]}" for name in ("socket", "key-file", "pid-file")]
        munge += [f"--seed-file={folder}/munge.seed", f"--log-file={folder}/munge.log", "--foreground", "--force"]
        for command in (["munged", *munge], ["slurmctld", "-D"], ["slurmd", "-D"]):
            with (folder / f"{command[0]}.out").open("w") as out:
                program = [_which(command[0]), *command[1:]]
                servers.append(
                    subprocess.Popen(
                        program, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
                    )
                )
        _wait(environment, servers, folder, patience)
        yield environment
    finally:
        _end_jobs(folder)
        for server in reversed(servers):
            server.terminate()
        for server in reversed(servers):
            with suppress(subprocess.TimeoutExpired):
                server.wait(10)
            server.kill()
            server.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _wait(environment, servers, folder, patience) -> None:
    """Until the node is idle."""
    end = time.monotonic() + patience
    while time.monotonic() < end and all(server.poll() is None for server in servers):
        seen = subprocess.run(["sinfo", "-h", "-o", "%T"], env=environment, capture_output=True, text=True)
        if seen.stdout.strip() == "idle":
            return
        time.sleep(0.2)
    said = "".join(path.read_text() for pattern in ("*.out", "*.log") for path in sorted(folder.glob(pattern)))
    raise NoSlurmError(f"it did not start:\n{said[-3000:]}")


def _end_jobs(folder: Path, patience: float = 10.0) -> None:
    """Jobs outlive the servers."""
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    quiet = {"env": environment, "capture_output": True, "timeout": patience}
    end = time.monotonic() + patience
    with suppress(subprocess.SubprocessError):
        subprocess.run(["scancel", "--signal=KILL", "--full", f"--user={getpass.getuser()}"], **quiet)
        subprocess.run(["scancel", f"--user={getpass.getuser()}"], **quiet)
        while time.monotonic() < end and subprocess.run(["squeue", "-h"], **quiet).stdout.strip():
            time.sleep(0.2)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def main(command: list[str]) -> int:
    if not command:
        print(__doc__)
        return 2
    try:
        with one_node_slurm() as environment:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command's to handle
            return subprocess.run(
                command, env=environment, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
            ).returncode
    except NoSlurmError as error:
        print(f"one_node_slurm: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

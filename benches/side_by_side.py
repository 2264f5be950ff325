"""What the measurements share: tools that run a command under a lock, taking turns so that all meet the same load."""

import json
import os
import shutil
import statistics
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

ROOT = Path(__file__).resolve().parent.parent
BIN = ROOT / "target/bench/bin"
# What the tools say while they are measured; a crowd has much to say.
LOG = ROOT / "target/bench/tools.log"
DLOCK = str(BIN / "dlock")
# Nothing of whoever calls us decides how dlock behaves.
ENV = {name: value for name, value in os.environ.items() if not name.startswith(("DLOCK_", "ETCDCTL_", "RUST_"))}
ENV["ETCDCTL_API"] = "3"
ENV["PATH"] = f"{BIN}:{ENV['PATH']}"


class Failed(Exception):
    """One figure could not be taken; the others can."""


@dataclass(frozen=True)
class Tool:
    """Something that runs a command under a lock."""

    name: str
    # What to type before the command, with NAME for the lock.
    before: tuple
    # Slow ones take part in every so many rounds.
    every: int = 1
    # How many wait for a lock. None: it asks again and again, so that its hand-over is its interval.
    waiting: Callable | None = None

    def argv(self, lock, *command):
        return [word.replace("NAME", lock) for word in self.before] + [str(word) for word in command]

    def start(self, lock, *command):
        with open(LOG, "a") as log:
            return subprocess.Popen(
                self.argv(lock, *command), env=ENV, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log
            )

    def run(self, lock, *command):
        if self.start(lock, *command).wait() != 0:
            raise Failed(f"{self.name} failed; see {LOG}")


def dlock_on(url, *options):
    def waiting(lock):
        status = subprocess.run([DLOCK, "status", "--backend", url, "--json", lock], env=ENV, capture_output=True)
        return len(json.loads(status.stdout)[0]["waiters"]) if status.returncode == 0 else 0

    # Hundreds that start at once may keep a server from answering the last of them in the usual 5 s.
    options = ("--connect-timeout", "1m", *options)
    return Tool("dlock", (DLOCK, "run", "--backend", url, *options, "--name", "NAME", "--"), waiting=waiting)


def freshen(tools):
    """Copies the programs among these, ours and others alike. What the kernel has dropped from memory and reads again when
    it runs lies there in small pieces, which take longer to map than those of a file that was just written."""
    for program in {Path(tool.before[0]) for tool in tools}:
        if program.parent not in (Path("."), BIN):
            continue
        content = Path(program if program.is_absolute() else shutil.which(program)).read_bytes()
        if content.startswith(b"\x7fELF"):
            fresh = BIN / f"{program.name}.fresh"
            fresh.write_bytes(content)
            fresh.chmod(0o755)
            fresh.replace(BIN / program.name)


def until(seen, what="a server to answer", within=120):
    """Looks again and again. Whatever takes so long will not come."""
    end = time.monotonic() + within
    while not seen():
        if time.monotonic() > end:
            raise Failed(f"waited {within} s for {what}")
        time.sleep(0.02)


def milliseconds_of(rounds, contestants):
    """The times of (every, argv) by timer.c, in order; the first round is not for counting."""
    words = []
    for every, argv in contestants:
        words += ["::", str(every), *argv]
    for count in 1, rounds:
        timer = subprocess.run([BIN / "timer", str(count), *words[1:]], env=ENV, stdout=subprocess.PIPE, check=True)
    return [[time / 1e6 for time in times] for times in json.loads(timer.stdout)]


def median(values):
    return statistics.median(values)


def p99(values):
    return sorted(values)[min(len(values) - 1, int(len(values) * 0.99))]

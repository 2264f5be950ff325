"""redlock_py.py PORT,PORT,… NAME TTL_MS CMD…: redlock-py's lock on a majority of Redis nodes around a command."""

import subprocess
import sys

from redlock import Redlock

nodes = Redlock([{"host": "127.0.0.1", "port": int(port)} for port in sys.argv[1].split(",")])
lock = False
while not lock:
    lock = nodes.lock(sys.argv[2], int(sys.argv[3]))
code = subprocess.call(sys.argv[4:])
nodes.unlock(lock)
sys.exit(code)

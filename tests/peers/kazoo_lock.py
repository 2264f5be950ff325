"""kazoo_lock.py PORT NAME TTL_MS CMD…: kazoo's Lock around a command."""

import subprocess
import sys

from kazoo.client import KazooClient

client = KazooClient(hosts=f"127.0.0.1:{sys.argv[1]}", timeout=int(sys.argv[3]) / 1000)
client.start()
with client.Lock(f"/peers/{sys.argv[2]}"):
    code = subprocess.call(sys.argv[4:])
sys.exit(code)

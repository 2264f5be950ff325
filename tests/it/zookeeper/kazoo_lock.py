"""A program that takes a dlock's lock by kazoo's own recipe.

kazoo_lock.py PORT PATH PATTERN hold STARTED GO   take the lock, create STARTED, wait for GO, release it
kazoo_lock.py PORT PATH PATTERN try               exit 0 if the lock could be had at once, else 75
kazoo_lock.py PORT PATH - absent                  exit 0 if there is no such node, else 1
kazoo_lock.py PORT PATH - parent                  exit 0 if there is a node below it, else 1
kazoo_lock.py PORT PATH - clear                   delete every contender, as a careless operator might
kazoo_lock.py PORT PATH - scrawl TEXT             overwrite what the node and all below it say
kazoo_lock.py PORT PATH - add                     create the node
kazoo_lock.py PORT PATH - remove                  delete it
kazoo_lock.py PORT PATH - behead                  delete the first of them
"""

import os
import sys
import time

from kazoo.client import KazooClient

port, path, pattern, what, *files = sys.argv[1:]
client = KazooClient(hosts=f"127.0.0.1:{port}", timeout=10)
client.start()
lock = client.Lock(path, "kazoo", extra_lock_patterns=[] if pattern == "-" else [pattern])
code = 0
if what == "hold":
    started, go = files
    with lock:
        open(started, "x").close()
        while not os.path.exists(go):
            time.sleep(0.01)
elif what == "try":
    if lock.acquire(blocking=False):
        lock.release()
    else:
        code = 75
elif what == "absent":
    code = 1 if client.exists(path) else 0
elif what == "parent":
    code = 0 if client.exists(path) and client.get_children(path) else 1
elif what == "clear":
    for child in client.get_children(path):
        client.delete(f"{path}/{child}")
elif what == "scrawl":
    nodes = [path] + [f"{path}/{child}" for child in client.get_children(path)] if client.exists(path) else []
    for node in nodes:
        client.set(node, os.fsencode(files[0]))
elif what == "add":
    client.create(path, makepath=True)
elif what == "remove":
    client.delete(path)
elif what == "behead":
    first = min(client.get_children(path), key=lambda child: child[-10:])
    client.delete(f"{path}/{first}")
client.stop()
sys.exit(code)

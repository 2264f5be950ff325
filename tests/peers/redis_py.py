"""redis_py.py PORT NAME TTL_MS CMD…: redis-py's Lock around a command, extended by a thread every third of its ttl."""

import subprocess
import sys
import threading

import redis

port, name, ttl = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]) / 1000
lock = redis.Redis(port=port).lock(name, timeout=ttl, thread_local=False)
lock.acquire()
done = threading.Event()


def extend():
    while not done.wait(ttl / 3):
        lock.reacquire()


threading.Thread(target=extend, daemon=True).start()
code = subprocess.call(sys.argv[4:])
done.set()
lock.release()
sys.exit(code)

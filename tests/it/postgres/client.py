"""A Python program that shares a lock with dlock: client.py URL NAME, with the binary in $DLOCK."""

import os
import subprocess
import sys
import uuid

import psycopg

url, name = sys.argv[1:]
owner = f"python-{uuid.uuid4()}"


def dlock():
    """Exit code of an attempt to run something under the same lock."""
    command = [os.environ["DLOCK"], "run", "--backend", url, "--name", name, "--no-wait", "--", "true"]
    return subprocess.run(command).returncode


with psycopg.connect(url, autocommit=True) as db:
    call = lambda sql, *args: db.execute(sql, args).fetchone()
    outcome, token = call("SELECT outcome, token FROM dlock.acquire(%s, %s, ttl => '20 s')", name, owner)
    assert outcome == "granted", outcome
    assert dlock() == 75
    assert call("SELECT outcome FROM dlock.renew(%s, %s, %s, ttl => '20 s')", name, owner, token) == ("held",)
    with db.transaction():
        call("SELECT dlock.fence(%s, %s)", name, token)
    assert call("SELECT dlock.release(%s, %s, %s)", name, owner, token) == (True,)
    assert dlock() == 0
    assert call("SELECT outcome FROM dlock.renew(%s, %s, %s)", name, owner, token) == ("lost",)

"""psycopg_lock.py PORT NAME TTL_MS CMD…: an advisory lock of PostgreSQL around a command."""

import subprocess
import sys

import psycopg

with psycopg.connect(host="127.0.0.1", port=sys.argv[1], user="postgres", dbname="postgres") as connection:
    connection.execute("SELECT pg_advisory_lock(hashtext(%s))", (sys.argv[2],))
    code = subprocess.call(sys.argv[4:])
sys.exit(code)

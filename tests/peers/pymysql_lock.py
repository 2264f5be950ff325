"""pymysql_lock.py PORT NAME TTL_MS CMD…: a user-level lock of MariaDB around a command."""

import subprocess
import sys

import pymysql

with pymysql.connect(host="127.0.0.1", port=int(sys.argv[1]), user="root") as connection:
    with connection.cursor() as cursor:
        cursor.execute("SELECT GET_LOCK(LEFT(SHA1(%s), 40), 1000000)", (sys.argv[2],))
    code = subprocess.call(sys.argv[4:])
sys.exit(code)

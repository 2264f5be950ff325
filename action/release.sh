#!/bin/sh
# Called by post.js when the job ends. Fails if the lock was not this job's any more: something may have run beside it.
set -eu
[ -n "${STATE_owner-}" ] || exit 0
[ -z "$INPUT_BACKEND" ] || export DLOCK_BACKEND="$INPUT_BACKEND"
"${STATE_dlock:?}" release --name "${STATE_name:?}" --owner "$STATE_owner"

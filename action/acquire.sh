#!/bin/sh
# Called by main.js: installs dlock if it is missing, takes the lock, and tells the later steps and release.sh about it.
set -eu
if ! command -v dlock >/dev/null; then
  if [ -z "$INPUT_ARCHIVE" ] || [ -z "$INPUT_SHA256" ]; then
    echo "::error::dlock is not installed; set the inputs archive and sha256, or install it in a step before"
    exit 1
  fi
  home=$(mktemp -d)
  curl -fsSL --retry 3 -o "$home/dlock.tar.gz" "$INPUT_ARCHIVE"
  echo "$INPUT_SHA256  $home/dlock.tar.gz" | sha256sum --quiet --check
  tar -xzf "$home/dlock.tar.gz" -C "$home" --strip-components=1
  echo "$home/bin" >>"$GITHUB_PATH"
  PATH=$home/bin:$PATH
fi
[ -z "$INPUT_BACKEND" ] || export DLOCK_BACKEND="$INPUT_BACKEND"
note=$GITHUB_SERVER_URL/$GITHUB_REPOSITORY/actions/runs/$GITHUB_RUN_ID
lock=$(dlock acquire --name "$INPUT_NAME" --ttl "$INPUT_TTL" --wait "$INPUT_WAIT" --note "$note")
# DLOCK_NAME, DLOCK_OWNER and DLOCK_FENCING_TOKEN, for the steps and for release.sh.
echo "$lock" >>"$GITHUB_ENV"
{
  echo "dlock=$(command -v dlock)"
  echo "name=$INPUT_NAME"
  echo "owner=$(echo "$lock" | sed -n 's/^DLOCK_OWNER=//p')"
} >>"$GITHUB_STATE"

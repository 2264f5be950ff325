-- The locks of dlock in MariaDB and MySQL, version 1: tables, and the procedures that are the whole protocol.
-- Any SQL client may take part, and is then excluded by and excludes every `dlock run`:
--
--   CALL dlock_acquire('nightly', 'me-1', 30);      -- outcome: granted | busy | ..., and the fencing token
--   CALL dlock_renew('nightly', 'me-1', 42, 30);    -- outcome: held | lost | revoked | force released
--   CALL dlock_release('nightly', 'me-1', 42);      -- outcome: done | not ours | force released
--   CALL dlock_fence('accounts', 42);               -- in the transaction that writes: refuses an older token
--
-- All but dlock_fence commit what the session has open, and are a transaction of their own. A lease of so many seconds
-- counts from the call: its holder must have stopped when it ends, so renew early. The owner is any text that is unique
-- among all contenders; asking again with the same one is safe after a lost answer.
--
-- Every step that can change who holds a lock writes the lock's row in dlock_locks first. On one server the others wait
-- for that row; in a Galera cluster only one of two such steps is certified, and the other fails with error 1213.

CREATE TABLE IF NOT EXISTS dlock_locks (
    name       NAME_TEXT NOT NULL PRIMARY KEY
               CHECK (name NOT REGEXP '[^A-Za-z0-9._:@+/-]|(^|/)[.]{0,2}(/|$)'),
    token      BIGINT NOT NULL, -- greater at every grant, whatever its mode; all other steps use some up
    last_owner OWNER_TEXT,      -- who released last, and what:
    last_token BIGINT           -- answers a repeated release
) ENGINE = InnoDB
//
CREATE TABLE IF NOT EXISTS dlock_contenders (
    name    NAME_TEXT NOT NULL,
    owner   OWNER_TEXT NOT NULL CHECK (owner <> ''),
    ticket  BIGINT NOT NULL,                 -- the order of the queue
    mode    VARCHAR(9) CHARACTER SET ascii COLLATE ascii_bin NOT NULL
            CHECK (mode IN ('exclusive', 'shared', 'slots')),
    slots   INT NOT NULL CHECK (slots BETWEEN 1 AND 100000),
    token   BIGINT,                          -- null: it waits
    slot    INT,
    since   DATETIME(3) NOT NULL,            -- when it was granted, or began to wait; for people
    ttl     BIGINT NOT NULL CHECK (ttl > 0), -- microseconds, as all below
    expires BIGINT NOT NULL,
    server  NAME_TEXT NOT NULL,              -- whose clock `expires` is on
    renewal BIGINT NOT NULL DEFAULT 0,       -- one more at every change of this row
    revoked TEXT CHARACTER SET utf8mb4,      -- why an operator wants it back
    kept    BOOLEAN NOT NULL DEFAULT FALSE,  -- released already, but kept from others until `expires`
    who     LONG_TEXT CHECK (LENGTH(who) < 100000),
    session BIGINT,                          -- the connection that last spoke for this contender
    described LONGTEXT CHARACTER SET utf8mb4 AS (JSON_OBJECT(
        'owner', owner, 'who', IF(JSON_VALID(who), JSON_EXTRACT(who, '$'), NULL), 'mode', mode, 'slots', slots,
        'fencing_token', token, 'slot', slot, 'since', CONCAT(REPLACE(CAST(since AS CHAR), ' ', 'T'), 'Z'),
        'ttl_ms', ttl DIV 1000, 'revoked', revoked)) VIRTUAL,
    PRIMARY KEY (name, owner),
    CHECK (mode = 'slots' OR slots = 1)
) ENGINE = InnoDB
//
-- When the lease of a contender ends here, if another server wrote it, or this one before it was restarted: a whole ttl
-- after it was first seen here as it is now. So no server relies on the clock of another.
CREATE TABLE IF NOT EXISTS dlock_sightings (
    name    NAME_TEXT NOT NULL,
    owner   OWNER_TEXT NOT NULL,
    server  NAME_TEXT NOT NULL,
    renewal BIGINT NOT NULL,
    expires BIGINT NOT NULL,
    PRIMARY KEY (name, owner, server)
) ENGINE = InnoDB
//
-- The last runs of a lock as JSON, one a line, newest first.
CREATE TABLE IF NOT EXISTS dlock_history (
    name         NAME_TEXT NOT NULL PRIMARY KEY,
    runs         LONG_TEXT NOT NULL,
    last_success DATETIME(3)
) ENGINE = InnoDB
//
-- The keys of `--once` with which a run has succeeded, hashed.
CREATE TABLE IF NOT EXISTS dlock_successes (
    name  NAME_TEXT NOT NULL,
    once  CHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    token BIGINT NOT NULL,
    PRIMARY KEY (name, once)
) ENGINE = InnoDB
//
-- Why an operator freed a lock without waiting for its holder: for that holder, until a day later.
CREATE TABLE IF NOT EXISTS dlock_force_released (
    name   NAME_TEXT NOT NULL,
    token  BIGINT NOT NULL,
    owner  OWNER_TEXT NOT NULL,
    reason TEXT CHARACTER SET utf8mb4 NOT NULL,
    at     DATETIME NOT NULL,
    PRIMARY KEY (name, token)
) ENGINE = InnoDB
//
CREATE TABLE IF NOT EXISTS dlock_fences (
    resource OWNER_TEXT NOT NULL PRIMARY KEY,
    token    BIGINT NOT NULL,
    passed   BIGINT NOT NULL DEFAULT 0 -- how often; so each that passes writes the row, and Galera certifies them in order
) ENGINE = InnoDB
//

-- The locks of dlock in PostgreSQL, version 5: tables, and the functions that are the whole protocol.
-- Any SQL client may take part, and is then excluded by and excludes every `dlock run`:
--
--   SELECT outcome, token FROM dlock.acquire('nightly', 'me-1', ttl => '30 s');   -- granted | busy | ...
--   SELECT outcome        FROM dlock.renew('nightly', 'me-1', 42, ttl => '30 s'); -- held | lost | revoked | ...
--   SELECT dlock.release('nightly', 'me-1', 42);                                  -- true: it was ours
--   SELECT dlock.fence('accounts', 42);      -- in the transaction that writes: refuses an older token
--
-- Call them in autocommit mode, or commit at once: until then everybody else waits for you. A lease
-- counts from the call: its holder must have stopped when it ends, so renew early. The owner is any
-- text that is unique among all contenders; asking again with the same one is safe after a lost answer.
--
-- Every step that can change who holds a lock enters the lock's row in dlock.locks first. The clock is
-- clock_timestamp(), read behind that row lock; now() would be the start of the transaction.

CREATE TABLE IF NOT EXISTS dlock.locks (
    name       text COLLATE "C" PRIMARY KEY
               CHECK (octet_length(name) BETWEEN 1 AND 200 AND name !~ '[^A-Za-z0-9._:@+/-]|(^|/)[.]{0,2}(/|$)'),
    token      bigint NOT NULL DEFAULT 0, -- greater at every grant, whatever its mode; busy answers use some up
    last_owner text,                      -- who released last, and what: answers a repeated release
    last_token bigint,
    last_run   json CHECK (octet_length(last_run::text) < 100000),
    earlier    json[] NOT NULL DEFAULT '{}', -- the runs before that one, newest first
    last_success timestamptz
) WITH (fillfactor = 50);

CREATE TABLE IF NOT EXISTS dlock.contenders (
    name    text COLLATE "C" NOT NULL,
    owner   text NOT NULL CHECK (octet_length(owner) BETWEEN 1 AND 200),
    ticket  bigint GENERATED ALWAYS AS IDENTITY, -- the order of the queue
    mode    text NOT NULL CHECK (mode IN ('exclusive', 'shared', 'slots')),
    slots   int NOT NULL CHECK (slots BETWEEN 1 AND 100000 AND (mode = 'slots') = (slots > 1)),
    token   bigint,                              -- null: it waits
    slot    int,
    since   timestamptz NOT NULL,                -- when it was granted, or began to wait
    ttl     interval NOT NULL CHECK (ttl > '0'),
    expires timestamptz NOT NULL,
    server  timestamptz NOT NULL,                -- whose clock `expires` is on: start of that postmaster
    revoked text,                                -- why an operator wants it back
    kept    boolean NOT NULL DEFAULT false,      -- released already, but kept from others until `expires`
    who     json CHECK (octet_length(who::text) < 100000),
    wake    text CHECK (octet_length(wake) BETWEEN 1 AND 63), -- channel to notify when the lock is revoked
    session int,                                 -- the server process that last spoke for this contender
    PRIMARY KEY (name, owner)
) WITH (fillfactor = 50);
CREATE INDEX IF NOT EXISTS contenders_in_order ON dlock.contenders (name, ticket);

-- The keys of `--once` with which a run has succeeded.
CREATE TABLE IF NOT EXISTS dlock.successes (
    name  text COLLATE "C" NOT NULL,
    key   text NOT NULL,
    token bigint NOT NULL,
    PRIMARY KEY (name, key)
);

-- Why an operator freed a lock without waiting for its holder: for that holder, until a day later.
CREATE TABLE IF NOT EXISTS dlock.force_released (
    name   text COLLATE "C" NOT NULL,
    token  bigint NOT NULL,
    owner  text NOT NULL,
    reason text NOT NULL,
    at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (name, token)
);

CREATE TABLE IF NOT EXISTS dlock.fences (
    resource text PRIMARY KEY,
    token    bigint NOT NULL
) WITH (fillfactor = 50);

CREATE OR REPLACE FUNCTION dlock.version() RETURNS int IMMUTABLE LANGUAGE sql AS 'SELECT 5';

-- Nobody changes contenders by hand: that could let a second holder in beside the first.
CREATE FUNCTION dlock.refuse_by_hand() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE 'who holds a lock is changed by dlock.revoke() and the other functions, not by hand';
END $$;
CREATE TRIGGER not_by_hand AFTER INSERT OR UPDATE OR DELETE ON dlock.contenders FOR EACH ROW
    WHEN (coalesce(current_setting('dlock.inside', true), '') = '') EXECUTE FUNCTION dlock.refuse_by_hand();
CREATE TRIGGER never_all BEFORE TRUNCATE ON dlock.contenders EXECUTE FUNCTION dlock.refuse_by_hand();
CREATE TRIGGER never_all BEFORE TRUNCATE ON dlock.successes EXECUTE FUNCTION dlock.refuse_by_hand();

CREATE FUNCTION dlock.refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE 'a fencing token in %.% never goes back, and its row never goes', TG_TABLE_SCHEMA, TG_TABLE_NAME;
END $$;
CREATE TRIGGER never_go BEFORE DELETE OR TRUNCATE ON dlock.locks EXECUTE FUNCTION dlock.refuse();
CREATE TRIGGER never_go BEFORE DELETE OR TRUNCATE ON dlock.fences EXECUTE FUNCTION dlock.refuse();
CREATE TRIGGER never_back BEFORE UPDATE ON dlock.locks FOR EACH ROW
    WHEN (NEW.token < OLD.token) EXECUTE FUNCTION dlock.refuse();
CREATE TRIGGER never_back BEFORE UPDATE ON dlock.fences FOR EACH ROW
    WHEN (NEW.token < OLD.token) EXECUTE FUNCTION dlock.refuse();

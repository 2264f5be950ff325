-- The locks of dlock in PostgreSQL, version 3: tables, and the functions that are the whole protocol.
-- Any SQL client may take part, and is then excluded by and excludes every `dlock run`:
--
--   SELECT outcome, token FROM dlock.acquire('nightly', 'me-1', ttl => '30 s');   -- granted | busy | ...
--   SELECT outcome        FROM dlock.renew('nightly', 'me-1', 42, ttl => '30 s'); -- held | lost | revoked
--   SELECT dlock.release('nightly', 'me-1', 42);                                  -- true: it was ours
--   SELECT dlock.fence('accounts', 42);      -- in the transaction that writes: refuses an older token
--
-- Call them in autocommit mode, or commit at once: until then everybody else waits for you. A lease
-- counts from the call: whoever holds one must have stopped by then, so renew early. The owner is any
-- text that is unique among all contenders; asking again with the same one is safe after a lost answer.
--
-- Every step that can change who holds a lock enters its row in dlock.locks first. The clock is
-- clock_timestamp(), read behind that row lock; now() would be the start of the transaction.

CREATE TABLE dlock.locks (
    name       text COLLATE "C" PRIMARY KEY
               CHECK (octet_length(name) BETWEEN 1 AND 200 AND name !~ '[^A-Za-z0-9._:@+/-]|(^|/)[.]{0,2}(/|$)'),
    token      bigint NOT NULL DEFAULT 0, -- of the latest grant, greater at every grant, whatever its mode
    crowd      int NOT NULL DEFAULT 2,    -- contenders: 0, none; 1, who holds it alone; 2, see dlock.contenders
    owner      text,                      -- if crowd is 1, this and the next are as in dlock.contenders
    since      timestamptz,
    ttl        interval,
    expires    timestamptz,
    server     timestamptz,
    who        json,
    wake       text,
    session    int,
    last_owner text,                      -- who let go last, and of what: answers a repeated release
    last_token bigint,
    last_run   json CHECK (octet_length(last_run::text) < 100000)
) WITH (fillfactor = 50);

CREATE TABLE dlock.contenders (
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
    kept    boolean NOT NULL DEFAULT false,      -- let go already, but kept from others until `expires`
    who     json CHECK (octet_length(who::text) < 100000),
    wake    text CHECK (octet_length(wake) BETWEEN 1 AND 63), -- channel to notify of others' changes to this row
    pass    boolean NOT NULL DEFAULT false,      -- whoever lets go may grant it the lock, and it will know
    session int,                                 -- the server process that last spoke for this contender
    PRIMARY KEY (name, owner)
) WITH (fillfactor = 50);
CREATE INDEX contenders_in_order ON dlock.contenders (name, ticket);

-- A lock that is held by one, whom nobody waits for, is one row.
CREATE VIEW dlock.everybody AS
    SELECT c.* FROM dlock.contenders c
    UNION ALL
    SELECT l.name, l.owner, 0, 'exclusive', 1, l.token, NULL, l.since, l.ttl, l.expires, l.server, NULL, false, l.who,
           l.wake, false, l.session
    FROM dlock.locks l WHERE l.crowd = 1;

CREATE TABLE dlock.successes (
    name  text COLLATE "C" NOT NULL,
    key   text NOT NULL,
    token bigint NOT NULL,
    PRIMARY KEY (name, key)
);

-- Why a lock was freed on the spot, for its holder, until a day later.
CREATE TABLE dlock.taken (
    name   text COLLATE "C" NOT NULL,
    token  bigint NOT NULL,
    owner  text NOT NULL,
    reason text NOT NULL,
    at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (name, token)
);

CREATE TABLE dlock.fences (
    resource text PRIMARY KEY,
    token    bigint NOT NULL
) WITH (fillfactor = 50);

CREATE FUNCTION dlock.version() RETURNS int IMMUTABLE LANGUAGE sql AS 'SELECT 3';

-- A grant or a renewal that a crash of the server could undo is worth nothing.
CREATE FUNCTION dlock.durably() RETURNS text LANGUAGE sql AS $$
    SELECT CASE WHEN current_setting('synchronous_commit') IN ('off', 'local')
                THEN set_config('synchronous_commit', 'on', true) END
$$;

-- Has a lock's row to ourselves until the end of the transaction. An update, not a mere lock: above READ
-- COMMITTED, whoever decides by an older picture of the contenders then fails, and asks again.
CREATE FUNCTION dlock.enter(name text) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    PERFORM set_config('dlock.inside', 'on', true);
    UPDATE dlock.locks l SET crowd = 2 WHERE l.name = enter.name;
    RETURN FOUND;
END $$;

-- Tells the first in the queue that it is worth asking again. It wakes the next itself, if both may hold.
CREATE FUNCTION dlock.wake_first(name text) RETURNS void LANGUAGE sql AS $$
    SELECT pg_notify(first.wake, '') FROM (
        SELECT c.wake, c.session FROM dlock.contenders c
        WHERE c.name = wake_first.name AND c.token IS NULL AND c.expires > clock_timestamp()
        ORDER BY c.ticket LIMIT 1
    ) first WHERE first.wake IS NOT NULL AND first.session <> pg_backend_pid()
$$;

-- Whoever changes somebody else's row wakes its owner, and says so if that grants it the lock: token, name, owner. Whoever
-- leaves others behind wakes the queue.
CREATE FUNCTION dlock.contender_changed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'DELETE' THEN
        PERFORM dlock.wake_first(OLD.name);
    END IF;
    IF OLD.wake IS NOT NULL AND OLD.session <> pg_backend_pid() THEN
        PERFORM pg_notify(OLD.wake, CASE
            WHEN TG_OP = 'UPDATE' AND OLD.token IS NULL THEN concat_ws(' ', NEW.token, NEW.name, NEW.owner) END);
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER contender_left AFTER DELETE ON dlock.contenders FOR EACH ROW
    WHEN (current_setting('dlock.inside', true) IS DISTINCT FROM 'alone') EXECUTE FUNCTION dlock.contender_changed();
CREATE TRIGGER contender_changed AFTER UPDATE ON dlock.contenders FOR EACH ROW
    WHEN (OLD.wake IS NOT NULL AND NEW.session <> pg_backend_pid()) EXECUTE FUNCTION dlock.contender_changed();

-- Whoever else wants something of a lock makes it a crowd, and the one in its row gets a row like everybody else.
CREATE FUNCTION dlock.make_room() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO dlock.contenders (name, owner, mode, slots, token, since, ttl, expires, server, who, wake, session)
    VALUES (OLD.name, OLD.owner, 'exclusive', 1, OLD.token, OLD.since, OLD.ttl, OLD.expires, OLD.server, OLD.who,
            OLD.wake, OLD.session);
    RETURN NULL;
END $$;
CREATE TRIGGER now_a_crowd AFTER UPDATE ON dlock.locks FOR EACH ROW
    WHEN (OLD.crowd = 1 AND NEW.crowd = 2) EXECUTE FUNCTION dlock.make_room();

-- Nobody changes who contends by hand: that could let a second holder in beside the first.
CREATE FUNCTION dlock.refuse_by_hand() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_TABLE_NAME = 'locks' THEN
        IF (NEW.crowd, NEW.owner, NEW.expires) IS NOT DISTINCT FROM (OLD.crowd, OLD.owner, OLD.expires) THEN
            RETURN NEW;
        END IF;
    END IF;
    RAISE 'who holds a lock is changed by dlock.revoke() and the other functions, not by hand';
END $$;
CREATE TRIGGER not_by_hand AFTER INSERT OR UPDATE OR DELETE ON dlock.contenders FOR EACH ROW
    WHEN (coalesce(current_setting('dlock.inside', true), '') = '') EXECUTE FUNCTION dlock.refuse_by_hand();
CREATE TRIGGER not_by_hand BEFORE UPDATE ON dlock.locks FOR EACH ROW
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

-- Then, for each role that is to take part:
--   GRANT USAGE ON SCHEMA dlock TO role;
--   GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA dlock TO role;
BEGIN;
CREATE SCHEMA dlock;

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

-- The functions that are the whole protocol; tables.sql says how to use them.

-- A contender as `dlock status --json` shows it. After a restart or a failover its lease counts anew,
-- since `expires` is on the clock of a server that is gone; dlock.acquire makes that so.
CREATE FUNCTION dlock.describe(c dlock.contenders) RETURNS json STABLE LANGUAGE sql AS $$
    SELECT json_build_object(
        'owner', c.owner,
        'who', c.who,
        'mode', c.mode,
        'slots', c.slots,
        'fencing_token', c.token,
        'slot', c.slot,
        'since', to_char(c.since AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"'),
        'ttl_ms', (extract(epoch FROM c.ttl) * 1000)::bigint,
        'expires_in_ms', (extract(epoch FROM
            CASE WHEN c.server = pg_postmaster_start_time() THEN c.expires - clock_timestamp() ELSE c.ttl END
        ) * 1000)::bigint,
        'revoked', c.revoked)
$$;

-- A session that is nobody's but a contender's has a bell: an advisory lock on its ticket, which falls when the contender
-- lets go or the session ends. It is raised when the contender takes its place in the queue or, if it had the lock at once,
-- when it renews with ring => true. Whoever is next waits for that; so each that leaves wakes one, however many wait, which a
-- notification does not. It is an alarm clock, and nothing is decided by it. True, if the bell is up from here on.
CREATE FUNCTION dlock.raise_bell(ticket bigint, backend int) RETURNS boolean LANGUAGE sql AS $$
    SELECT CASE WHEN backend = pg_backend_pid()
        THEN pg_try_advisory_lock('dlock.contenders'::regclass::int, (ticket & 2147483647)::int)
    END
$$;

-- It falls with the commit, so that whoever is woken sees what we did.
CREATE FUNCTION dlock.drop_bell(ticket bigint) RETURNS boolean LANGUAGE sql AS $$
    SELECT pg_try_advisory_xact_lock('dlock.contenders'::regclass::int, (ticket & 2147483647)::int)
       AND pg_advisory_unlock('dlock.contenders'::regclass::int, (ticket & 2147483647)::int)
$$;

CREATE FUNCTION dlock.is_bell_up(ticket bigint) RETURNS boolean LANGUAGE sql AS $$
    SELECT CASE WHEN pg_try_advisory_lock_shared('dlock.contenders'::regclass::int, (ticket & 2147483647)::int)
        THEN NOT pg_advisory_unlock_shared('dlock.contenders'::regclass::int, (ticket & 2147483647)::int)
        ELSE ticket IS NOT NULL
    END
$$;

-- Who has to be gone before one with this ticket can have the lock alone, and has a bell to say so: the one in front of
-- it in the queue, or the holder.
CREATE FUNCTION dlock.behind(name text, ticket bigint) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    here constant timestamptz := pg_postmaster_start_time();
    at constant timestamptz := clock_timestamp();
    nearest bigint;
BEGIN
    SELECT c.ticket INTO nearest FROM dlock.contenders c
    WHERE c.name = behind.name AND c.server = here AND c.expires > at
      AND c.token IS NULL AND (behind.ticket IS NULL OR c.ticket < behind.ticket)
    ORDER BY c.ticket DESC LIMIT 1;
    IF nearest IS NULL THEN
        SELECT c.ticket INTO nearest FROM dlock.contenders c
        WHERE c.name = behind.name AND c.server = here AND c.expires > at AND c.token IS NOT NULL
        ORDER BY c.ticket LIMIT 1;
    END IF;
    RETURN CASE WHEN dlock.is_bell_up(nearest) THEN nearest END;
END $$;

-- Extends the place of one that waits for the lock alone, without having the lock's row to itself: as long as somebody
-- lives who is before it, that changes nothing about who holds the lock. Otherwise holder is null.
CREATE FUNCTION dlock.keep_place(
    name text, owner text, wake text, backend int,
    OUT ahead bigint, OUT next_end interval, OUT holder json, OUT behind bigint
) LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    here constant timestamptz := pg_postmaster_start_time();
    at constant timestamptz := clock_timestamp();
    self dlock.contenders;
BEGIN
    SELECT * INTO self FROM dlock.contenders c
    WHERE c.name = keep_place.name AND c.owner = keep_place.owner AND c.token IS NULL;
    SELECT count(*) FILTER (WHERE c.token IS NULL), min(c.expires) - at INTO ahead, next_end
    FROM dlock.contenders c
    WHERE c.name = keep_place.name AND c.owner <> keep_place.owner AND c.server = here AND c.expires > at
      AND (c.token IS NOT NULL OR c.ticket < self.ticket);
    SELECT dlock.describe(c) INTO holder FROM dlock.contenders c
    WHERE c.name = keep_place.name AND c.owner <> keep_place.owner AND c.server = here AND c.expires > at
      AND (c.token IS NOT NULL OR c.ticket < self.ticket)
    ORDER BY c.token IS NULL, c.ticket LIMIT 1;
    IF holder IS NOT NULL AND backend = pg_backend_pid() THEN
        behind := dlock.behind(name, self.ticket);
        IF self.session <> backend THEN
            PERFORM dlock.raise_bell(self.ticket, backend);
        END IF;
    END IF;
    -- Last, and only if that was all: nobody who waits for a lock's row has the row of a contender to itself.
    IF holder IS NOT NULL THEN
        UPDATE dlock.contenders c
        SET expires = at + c.ttl, wake = CASE WHEN keep_place.behind IS NULL THEN keep_place.wake END,
            pass = coalesce(keep_place.wake, keep_place.behind::text) IS NOT NULL, session = pg_backend_pid()
        WHERE c.name = keep_place.name AND c.owner = keep_place.owner AND c.token IS NULL
          AND c.server = here AND c.expires > at;
        IF NOT FOUND THEN
            holder := NULL;
        END IF;
    END IF;
END $$;

-- Takes the lock (granted), or says who has it (busy) and, with queue => true, takes a place in the
-- queue, which is lost unless asked again within the smaller of ttl and 10 s. Also: 'other terms' if the
-- lock is in use with another number of slots, 'already ran' if `once` is on record. Whoever has asked before and was
-- told to wait may say so with again => true: then it only keeps its place as long as somebody is before it, and a
-- thousand that do so do not wait for each other.
-- A session that stays with the contender, and is no pooler's, may say so with backend => its process, as the server told
-- it when it connected: then it has a bell while it waits, and may be told to wait for that of `behind`.
CREATE FUNCTION dlock.acquire(
    name text, owner text, ttl interval DEFAULT '30 s', mode text DEFAULT 'exclusive', slots int DEFAULT 1,
    queue boolean DEFAULT false, once text DEFAULT NULL, who json DEFAULT NULL, wake text DEFAULT NULL,
    again boolean DEFAULT false, backend int DEFAULT NULL,
    OUT outcome text, OUT token bigint, OUT slot int,
    OUT ahead bigint,        -- waiters before us
    OUT next_end interval,   -- until the first lease before us ends
    OUT holder json,         -- one that is in the way
    OUT latest bigint,       -- if busy, the token of the latest grant: ours is still to come
    OUT room int,            -- so many waiters may stay connected
    OUT version int,         -- of this schema
    OUT behind bigint        -- if busy, for dlock.await
) LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '4s' AS $$
DECLARE
    here constant timestamptz := pg_postmaster_start_time();
    at timestamptz;
    self dlock.contenders;
    contended boolean;
    before bigint := 0;
    all_shared boolean;
    same_terms boolean;
    untouched constant boolean := txid_current_if_assigned() IS NULL; -- the commit is about nothing but us
    setting text := set_config('dlock.inside', 'on', true);
BEGIN
    -- Step by step as needed: what a session does for the first time has to be planned, which takes longer than to
    -- do it, and most sessions ask once.
    room := current_setting('max_connections')::int * 2 / 3;
    version := dlock.version();
    setting := dlock.durably();
    IF again AND queue AND mode = 'exclusive' AND once IS NULL THEN
        SELECT * INTO ahead, next_end, holder, behind FROM dlock.keep_place(name, owner, wake, backend);
        IF holder IS NOT NULL THEN
            SELECT l.token INTO latest FROM dlock.locks l WHERE l.name = acquire.name;
            setting := CASE WHEN untouched THEN set_config('synchronous_commit', 'off', true) END;
            outcome := 'busy';
            RETURN;
        END IF;
    END IF;
    -- Whoever is going to wait prepares for the end while nobody waits for it.
    IF NOT again AND queue AND mode = 'exclusive' AND backend = pg_backend_pid() THEN
        IF EXISTS (SELECT FROM dlock.locks l WHERE l.name = acquire.name AND l.crowd > 0) THEN
            PERFORM dlock.rehearse();
        END IF;
    END IF;
    UPDATE dlock.locks l SET crowd = 2 WHERE l.name = acquire.name RETURNING l.token INTO latest;
    IF NOT FOUND THEN
        INSERT INTO dlock.locks (name) VALUES (acquire.name) ON CONFLICT DO NOTHING;
        UPDATE dlock.locks l SET crowd = 2 WHERE l.name = acquire.name RETURNING l.token INTO latest;
    END IF;
    at := clock_timestamp();
    contended := EXISTS (SELECT FROM dlock.contenders c WHERE c.name = acquire.name);
    IF contended THEN
        SELECT * INTO self FROM dlock.contenders c WHERE c.name = acquire.name AND c.owner = acquire.owner;
    END IF;

    IF self.kept OR self.revoked IS NOT NULL THEN -- ours, but not to go on with
        IF self.server <> here THEN
            UPDATE dlock.contenders c SET server = here, expires = at + c.ttl
            WHERE c.name = acquire.name AND c.owner = acquire.owner RETURNING c.* INTO self;
        END IF;
        IF self.expires > at THEN
            outcome := 'busy';
            ahead := 0;
            next_end := self.expires - at;
            holder := dlock.describe(self);
            RETURN;
        END IF;
        DELETE FROM dlock.contenders c WHERE c.name = acquire.name AND c.owner = acquire.owner;
        self := NULL;
    END IF;
    IF self.token IS NOT NULL THEN -- granted before; the answer was lost
        UPDATE dlock.contenders c
        SET ttl = acquire.ttl, expires = at + acquire.ttl, server = here,
            wake = acquire.wake, session = pg_backend_pid()
        WHERE c.name = acquire.name AND c.owner = acquire.owner;
        IF self.session <> backend THEN
            PERFORM dlock.raise_bell(self.ticket, backend);
        END IF;
        outcome := 'granted';
        token := self.token;
        slot := self.slot;
        RETURN;
    END IF;
    IF once IS NOT NULL AND EXISTS (
        SELECT FROM dlock.successes s WHERE s.name = acquire.name AND s.key = acquire.once
    ) THEN
        DELETE FROM dlock.contenders c WHERE c.name = acquire.name AND c.owner = acquire.owner;
        outcome := 'already ran';
        RETURN;
    END IF;

    IF contended THEN
        UPDATE dlock.contenders c SET server = here, expires = at + c.ttl
        WHERE c.name = acquire.name AND c.owner <> acquire.owner AND c.server <> here;
        DELETE FROM dlock.contenders c
        WHERE c.name = acquire.name AND c.owner <> acquire.owner AND c.expires <= at;

        SELECT count(*), count(*) FILTER (WHERE c.token IS NULL), coalesce(bool_and(c.mode = 'shared'), true),
               coalesce(bool_and(c.slots = acquire.slots), true), min(c.expires) - at
        INTO before, ahead, all_shared, same_terms, next_end
        FROM dlock.contenders c
        WHERE c.name = acquire.name AND c.owner <> acquire.owner
          AND (c.token IS NOT NULL OR self.ticket IS NULL OR c.ticket < self.ticket);
    END IF;

    outcome := CASE
        WHEN NOT same_terms THEN 'other terms'
        WHEN before = 0 OR (mode = 'shared' AND all_shared) OR (mode = 'slots' AND before < slots) THEN 'granted'
        ELSE 'busy'
    END;
    IF outcome = 'granted' THEN
        UPDATE dlock.locks l SET token = greatest(l.token + 1, (date_part('epoch', at) * 1e6::float8)::bigint)
        WHERE l.name = acquire.name RETURNING l.token INTO token;
        IF mode = 'slots' THEN
            SELECT min(n) INTO slot FROM generate_series(0, acquire.slots - 1) n
            WHERE NOT EXISTS (SELECT FROM dlock.contenders c WHERE c.name = acquire.name AND c.slot = n);
        END IF;
    ELSE
        SELECT dlock.describe(c) INTO holder FROM dlock.contenders c
        WHERE c.name = acquire.name AND c.owner <> acquire.owner
        ORDER BY c.slots = acquire.slots, c.token IS NULL, c.ticket LIMIT 1;
    END IF;
    IF outcome = 'granted' OR (outcome = 'busy' AND queue) THEN
        IF outcome = 'busy' AND mode = 'exclusive' AND backend = pg_backend_pid() THEN
            behind := dlock.behind(name, self.ticket);
        END IF;
        INSERT INTO dlock.contenders AS c
            (name, owner, mode, slots, token, slot, since, ttl, expires, server, who, wake, pass, session)
        SELECT acquire.name, acquire.owner, acquire.mode, acquire.slots, acquire.token, acquire.slot,
               at, lease, at + lease, here, acquire.who,
               CASE WHEN acquire.behind IS NULL THEN acquire.wake END,
               acquire.mode = 'exclusive' AND acquire.once IS NULL
                   AND coalesce(acquire.wake, acquire.behind::text) IS NOT NULL,
               pg_backend_pid()
        FROM (SELECT CASE outcome WHEN 'granted' THEN acquire.ttl ELSE least(acquire.ttl, '10 s') END) AS l (lease)
        ON CONFLICT ON CONSTRAINT contenders_pkey DO UPDATE
        SET token = excluded.token, slot = excluded.slot, ttl = excluded.ttl, expires = excluded.expires,
            since = CASE WHEN excluded.token IS NULL THEN c.since ELSE excluded.since END,
            server = excluded.server, wake = excluded.wake, pass = excluded.pass, session = excluded.session
        RETURNING c.ticket INTO self.ticket;
        IF mode = 'exclusive' AND (outcome = 'busy' OR self.owner IS NOT NULL)
            AND self.session IS DISTINCT FROM backend THEN
            PERFORM dlock.raise_bell(self.ticket, backend);
        END IF;
    END IF;
    IF outcome = 'granted' AND mode <> 'exclusive' THEN
        PERFORM dlock.wake_first(acquire.name);
    END IF;
END $$;

-- Takes a lock alone that nobody contends for, by what its row says of itself. Its snapshot may be older than the row, but
-- whoever waited for the row looks at its latest state, or above READ COMMITTED fails. Otherwise, or if dlock.contenders
-- would not have it, all is null and nothing has happened: dlock.acquire is to be asked. What a session does for the first
-- time has to be read and planned, which takes longer than to do it: so this touches as little as can be, and is in SQL, for
-- which plpgsql need not be loaded.
CREATE FUNCTION dlock.take(
    name text, owner text, ttl interval, who json, wake text, OUT token bigint, OUT version int
) LANGUAGE sql SET search_path = pg_catalog, pg_temp SET lock_timeout = '4s' AS $$
    SELECT set_config('dlock.inside', 'on', true), CASE current_setting('synchronous_commit') -- see dlock.durably
        WHEN 'off' THEN set_config('synchronous_commit', 'on', true)
        WHEN 'local' THEN set_config('synchronous_commit', 'on', true)
    END;
    UPDATE dlock.locks l
    SET token = greatest(l.token + 1, (date_part('epoch', clock_timestamp()) * 1e6::float8)::bigint), crowd = 1,
        owner = take.owner, since = clock_timestamp(), ttl = take.ttl, expires = clock_timestamp() + take.ttl,
        server = pg_postmaster_start_time(), who = take.who, wake = take.wake, session = pg_backend_pid()
    WHERE l.name = take.name AND l.crowd = 0 AND take.ttl > '0' AND octet_length(take.owner) BETWEEN 1 AND 200
      AND coalesce(octet_length(take.who::text), 0) < 100000 AND coalesce(octet_length(take.wake), 1) BETWEEN 1 AND 63
    RETURNING l.token, 3 -- as dlock.version says
$$;

-- For a session of our own, while nobody waits for it: what is done for the first time has to be planned, and to let go is
-- what others wait for. Plans are kept from the first time on, which PostgreSQL would not do before the sixth.
CREATE FUNCTION dlock.rehearse() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF current_setting('server_version_num')::int >= 120000 THEN
        PERFORM set_config('plan_cache_mode', 'force_generic_plan', false);
    END IF;
    PERFORM dlock.release('', '', 0);
END $$;

-- Waits, no longer than `patience`, until the bell of who is before us has fallen; says the token if we have been granted
-- the lock by then. Nothing is written before, so nobody waits for us. The server looks for a deadlock, and may log that we
-- wait, when somebody has waited for deadlock_timeout: each time we wait for less.
CREATE FUNCTION dlock.await(
    name text, owner text, behind bigint, patience interval, rehearse boolean DEFAULT false, OUT token bigint
) LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    allowed constant interval := current_setting('statement_timeout')::interval; -- zero: as long as it takes
    until constant timestamptz := clock_timestamp()
        + CASE WHEN allowed > '0' THEN least(patience, allowed * 0.8) ELSE patience END;
    longest constant interval := greatest(current_setting('deadlock_timeout')::interval * 0.9, '100 ms');
    rest interval;
    fallen boolean;
BEGIN
    IF rehearse THEN
        PERFORM dlock.rehearse();
    END IF;
    LOOP
        SELECT c.token INTO token FROM dlock.contenders c WHERE c.name = await.name AND c.owner = await.owner;
        rest := until - clock_timestamp();
        EXIT WHEN NOT FOUND OR token IS NOT NULL OR fallen OR rest < '1 ms';
        BEGIN
            PERFORM set_config('lock_timeout', ceil(extract(epoch FROM least(rest, longest)) * 1000)::text, true);
            PERFORM pg_advisory_xact_lock_shared('dlock.contenders'::regclass::int, (behind & 2147483647)::int);
            fallen := true;
        EXCEPTION WHEN lock_not_available THEN
            NULL;
        END;
    END LOOP;
END $$;

-- Extends the lease (held), or says that it is not ours any more (lost) or is wanted back (revoked: ours
-- until it ends, and not extended), and why.
CREATE FUNCTION dlock.renew(
    name text, owner text, token bigint, ttl interval DEFAULT '30 s', wake text DEFAULT NULL,
    backend int DEFAULT NULL, rehearse boolean DEFAULT false, ring boolean DEFAULT false,
    OUT outcome text, OUT reason text
) LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '4s' AS $$
DECLARE
    self dlock.contenders;
    setting text := dlock.durably();
BEGIN
    setting := set_config('dlock.inside', 'on', true);
    UPDATE dlock.locks l SET crowd = 2 WHERE l.name = renew.name AND l.crowd = 1;
    SELECT * INTO self FROM dlock.contenders c
    WHERE c.name = renew.name AND c.owner = renew.owner AND c.token = renew.token AND NOT c.kept FOR UPDATE;
    IF self.token IS NULL THEN
        outcome := 'lost';
        SELECT 'an operator took it away: ' || t.reason INTO reason
        FROM dlock.taken t WHERE t.name = renew.name AND t.token = renew.token AND t.owner = renew.owner;
        IF FOUND THEN
            RETURN;
        END IF;
        SELECT coalesce('it belongs to ' || max(c.owner), 'nobody holds it') INTO reason
        FROM dlock.contenders c WHERE c.name = renew.name AND c.token IS NOT NULL AND c.owner <> renew.owner;
        RETURN;
    END IF;
    outcome := CASE WHEN self.revoked IS NULL THEN 'held' ELSE 'revoked' END;
    reason := self.revoked;
    IF outcome = 'held' THEN
        UPDATE dlock.contenders c
        SET ttl = renew.ttl, expires = clock_timestamp() + renew.ttl, server = pg_postmaster_start_time(),
            wake = coalesce(renew.wake, c.wake), session = pg_backend_pid()
        WHERE c.name = renew.name AND c.owner = renew.owner;
        IF self.mode = 'exclusive' AND (ring OR self.session <> backend) THEN
            -- Whoever came before is being notified, and may wait for the bell from here on.
            IF dlock.raise_bell(self.ticket, backend) THEN
                PERFORM dlock.wake_first(renew.name);
            END IF;
        END IF;
    END IF;
    IF rehearse AND backend = pg_backend_pid() THEN
        PERFORM dlock.rehearse();
    END IF;
END $$;

-- Lets go, at once or after `keep`; true if it was ours, also if an earlier call has done it already.
-- The first of the queue need not ask: it is granted the lock here, if it can be told so and has lately shown that it
-- lives, for as long as its place was worth. So nobody waits longer for it, should it be dead after all. Not where a
-- commit waits for a standby: whether that has confirmed it is told to us, not to the one who is granted the lock.
-- Nobody need wait for the disk unless something is to be kept: undone by a crash, a release leaves a lease that runs
-- out, and the next grant, whose commit comes behind it or is the same, does wait.
-- What is kept can be ended earlier or later by dlock.rehold, with nothing but the owner.
-- No lock is called '': with that name all steps are gone through in vain, see dlock.rehearse.
CREATE FUNCTION dlock.release(
    name text, owner text, token bigint, last_run json DEFAULT NULL, once text DEFAULT NULL,
    keep interval DEFAULT NULL, backend int DEFAULT NULL
) RETURNS boolean LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '4s' AS $$
DECLARE
    here constant timestamptz := pg_postmaster_start_time();
    untouched constant boolean := txid_current_if_assigned() IS NULL;
    rehearsal constant boolean := name = '';
    at timestamptz;
    before dlock.locks;
    self dlock.contenders;
    first dlock.contenders;
    next_token bigint;
    setting text := set_config('dlock.inside', 'on', true);
BEGIN
    -- What is updated in the end is only locked so far: one version less of a row that everybody reads.
    SELECT * INTO before FROM dlock.locks l WHERE l.name = release.name FOR UPDATE;
    IF rehearsal OR before.crowd = 1 THEN
        UPDATE dlock.locks l SET crowd = 2 WHERE l.name = release.name;
    END IF;
    IF (before.last_owner, before.last_token) = (release.owner, release.token) THEN
        RETURN true;
    END IF;
    SELECT * INTO self FROM dlock.contenders c
    WHERE c.name = release.name AND c.owner = release.owner AND c.token = release.token;
    IF self.token IS NULL AND NOT rehearsal THEN
        RETURN false;
    END IF;
    at := clock_timestamp();
    IF keep > '0' THEN
        UPDATE dlock.contenders c
        SET kept = true, wake = NULL, session = pg_backend_pid(), ttl = keep, expires = at + keep, server = here
        WHERE c.name = release.name AND c.owner = release.owner;
    ELSE
        IF rehearsal OR (self.mode = 'exclusive' AND current_setting('synchronous_standby_names') = '') THEN
            -- Nobody waits before the one who holds it alone; but those who were there have left something to read past.
            SELECT * INTO first FROM dlock.contenders c
            WHERE c.name = release.name AND c.ticket > self.ticket AND c.token IS NULL
              AND (c.expires > at OR c.server <> here)
            ORDER BY c.ticket LIMIT 1;
        END IF;
        IF rehearsal OR (first.pass AND first.server = here AND first.expires - at > first.ttl / 2) THEN
            next_token := greatest(before.token + 1, (date_part('epoch', at) * 1e6::float8)::bigint);
            UPDATE dlock.contenders c SET token = next_token, since = at
            WHERE c.name = release.name AND c.owner = first.owner;
            setting := set_config('dlock.inside', 'alone', true);
        END IF;
        DELETE FROM dlock.contenders c WHERE c.name = release.name AND c.owner = release.owner;
    END IF;
    IF keep > '0' OR once IS NOT NULL OR next_token IS NOT NULL THEN
        setting := dlock.durably();
    ELSIF untouched THEN
        setting := set_config('synchronous_commit', 'off', true);
    END IF;
    UPDATE dlock.locks l
    SET token = coalesce(next_token, l.token), last_owner = release.owner, last_token = release.token,
        last_run = coalesce(release.last_run, l.last_run),
        crowd = CASE
            WHEN next_token IS NOT NULL OR EXISTS (SELECT FROM dlock.contenders c WHERE c.name = release.name) THEN 2
            ELSE 0
        END
    WHERE l.name = release.name;
    IF rehearsal OR (self.session = backend AND backend = pg_backend_pid()) THEN
        PERFORM dlock.drop_bell(self.ticket);
    END IF;
    IF once IS NOT NULL THEN
        INSERT INTO dlock.successes VALUES (release.name, release.once, release.token) ON CONFLICT DO NOTHING;
    END IF;
    RETURN true;
END $$;

-- Lets go of a lock that nobody else contends for. Otherwise null, and nothing has happened: dlock.release is to be asked.
CREATE FUNCTION dlock.let_go(name text, owner text, token bigint, last_run json) RETURNS boolean
LANGUAGE sql SET search_path = pg_catalog, pg_temp SET lock_timeout = '4s' AS $$
    SELECT set_config('dlock.inside', 'on', true),
        CASE WHEN txid_current_if_assigned() IS NULL THEN set_config('synchronous_commit', 'off', true) END;
    UPDATE dlock.locks l
    SET crowd = 0, last_owner = let_go.owner, last_token = let_go.token,
        last_run = coalesce(let_go.last_run, l.last_run)
    WHERE l.name = let_go.name AND l.crowd = 1 AND l.token = let_go.token AND l.owner = let_go.owner
    RETURNING true
$$;

-- Moves the end of what a release keeps to `ttl` from now, or with zero to now ('done'). 'not ours': it has
-- ended. 'running': it is not kept but held, and renewed. 'revoked': it ends when it was going to.
CREATE FUNCTION dlock.rehold(name text, owner text, ttl interval, OUT outcome text, OUT reason text)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '4s' AS $$
DECLARE
    here constant timestamptz := pg_postmaster_start_time();
    self dlock.contenders;
BEGIN
    PERFORM dlock.durably(), dlock.enter(name);
    SELECT * INTO self FROM dlock.contenders c
    WHERE c.name = rehold.name AND c.owner = rehold.owner AND c.token IS NOT NULL
      AND (c.expires > clock_timestamp() OR c.server <> here);
    outcome := CASE
        WHEN self.token IS NULL THEN 'not ours'
        WHEN NOT self.kept THEN 'running'
        WHEN ttl > '0' AND self.revoked IS NOT NULL THEN 'revoked'
        ELSE 'done'
    END;
    reason := self.revoked;
    IF outcome = 'done' AND ttl > '0' THEN
        UPDATE dlock.contenders c
        SET ttl = rehold.ttl, expires = clock_timestamp() + rehold.ttl, server = here, session = pg_backend_pid()
        WHERE c.name = rehold.name AND c.owner = rehold.owner;
    ELSIF outcome = 'done' THEN
        DELETE FROM dlock.contenders c WHERE c.name = rehold.name AND c.owner = rehold.owner;
    END IF;
END $$;

-- Gives up the place in the queue, and the lock if it was granted meanwhile.
CREATE FUNCTION dlock.withdraw(name text, owner text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '4s' AS $$
BEGIN
    PERFORM dlock.enter(name);
    DELETE FROM dlock.contenders c WHERE c.name = withdraw.name AND c.owner = withdraw.owner;
END $$;

-- Takes the lock away from exactly this holder: marks it for the holder to let go ('marked'), or, with now => true or
-- reason => NULL, frees it on the spot ('freed'); then last_run becomes the last run, unless that has ended already.
-- 'not held': too late.
CREATE FUNCTION dlock.revoke(
    name text, owner text, token bigint, reason text, now boolean DEFAULT false, last_run json DEFAULT NULL
) RETURNS text LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '4s' AS $$
DECLARE
    was_kept boolean;
BEGIN
    PERFORM dlock.enter(name);
    IF now OR reason IS NULL THEN
        DELETE FROM dlock.contenders c
        WHERE c.name = revoke.name AND c.owner = revoke.owner AND c.token = revoke.token RETURNING c.kept INTO was_kept;
        IF NOT FOUND THEN
            RETURN 'not held';
        END IF;
        UPDATE dlock.locks l SET last_run = revoke.last_run
        WHERE l.name = revoke.name AND revoke.last_run IS NOT NULL AND NOT was_kept;
        DELETE FROM dlock.taken t WHERE t.at < clock_timestamp() - interval '1 day';
        IF reason IS NOT NULL THEN
            INSERT INTO dlock.taken VALUES (revoke.name, revoke.token, revoke.owner, revoke.reason);
        END IF;
        RETURN 'freed';
    ELSE
        UPDATE dlock.contenders c SET revoked = revoke.reason
        WHERE c.name = revoke.name AND c.owner = revoke.owner AND c.token = revoke.token;
    END IF;
    RETURN CASE WHEN FOUND THEN 'marked' ELSE 'not held' END;
END $$;

-- One lock as JSON: its contenders in the order of the queue, and its last run. Null: never used.
CREATE FUNCTION dlock.status(name text) RETURNS json STABLE LANGUAGE sql AS $$
    SELECT json_build_object('name', l.name, 'last_run', l.last_run, 'contenders', (
        SELECT coalesce(json_agg(dlock.describe(ROW(c.*)::dlock.contenders) ORDER BY c.ticket), '[]')
        FROM dlock.everybody c
        WHERE c.name = l.name AND (c.expires > clock_timestamp() OR c.server <> pg_postmaster_start_time())))
    FROM dlock.locks l WHERE l.name = status.name
$$;

-- The resource's side of fencing. Called in the transaction that writes, it refuses that write if a newer
-- token was seen already, and makes writers with different tokens wait for each other's commit.
CREATE FUNCTION dlock.fence(resource text, token bigint) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    newest bigint;
BEGIN
    INSERT INTO dlock.fences AS f VALUES (fence.resource, fence.token)
    ON CONFLICT ON CONSTRAINT fences_pkey DO UPDATE SET token = greatest(f.token, excluded.token)
    RETURNING f.token INTO newest;
    IF fence.token < newest THEN
        RAISE 'stale fencing token % for %: % was seen already', fence.token, fence.resource, newest
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = 'The lock was lost, and someone else holds it: stop.';
    END IF;
    RETURN newest;
END $$;
COMMIT;

-- A contender as `dlock status --json` shows it. After a restart or a failover its lease counts anew, since `expires` is on
-- the clock of a server that is gone; dlock.acquire makes that so.
CREATE OR REPLACE FUNCTION dlock.describe(c dlock.contenders) RETURNS json VOLATILE LANGUAGE sql AS $$
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

-- Whether its lease lasts: one from before a restart or a failover counts anew from the first look at it.
CREATE FUNCTION dlock.lasts(c dlock.contenders) RETURNS boolean VOLATILE LANGUAGE sql AS $$
    SELECT c.expires > clock_timestamp() OR c.server <> pg_postmaster_start_time()
$$;

-- A grant or a renewal that a crash of the server could undo is worth nothing.
CREATE FUNCTION dlock.durably() RETURNS text LANGUAGE sql AS $$
    SELECT CASE WHEN current_setting('synchronous_commit') IN ('off', 'local')
                THEN set_config('synchronous_commit', 'on', true) END
$$;

-- A session that stays with its contender holds the contender's wake-up lock, an advisory lock on its ticket. The next
-- contender waits for it (dlock.await), so each that leaves wakes one, however many wait. It falls when the contender
-- releases, or when its session ends. It only says that it is worth asking again: nothing is decided by it.
CREATE FUNCTION dlock.hold_wake_up_lock(ticket bigint) RETURNS boolean LANGUAGE sql AS $$
    SELECT pg_try_advisory_lock('dlock.contenders'::regclass::int, (ticket & 2147483647)::int)
$$;

-- With the commit, so that whoever is woken sees what we did.
CREATE FUNCTION dlock.drop_wake_up_lock(ticket bigint) RETURNS boolean LANGUAGE sql AS $$
    SELECT pg_try_advisory_xact_lock('dlock.contenders'::regclass::int, (ticket & 2147483647)::int)
       AND pg_advisory_unlock('dlock.contenders'::regclass::int, (ticket & 2147483647)::int)
$$;

CREATE FUNCTION dlock.has_wake_up_lock(ticket bigint) RETURNS boolean LANGUAGE sql AS $$
    SELECT CASE WHEN pg_try_advisory_lock_shared('dlock.contenders'::regclass::int, (ticket & 2147483647)::int)
        THEN NOT pg_advisory_unlock_shared('dlock.contenders'::regclass::int, (ticket & 2147483647)::int)
        ELSE ticket IS NOT NULL
    END
$$;

-- Waits until the wake-up lock of `behind` has fallen (true), or `patience` is over (false). Nothing is written, so
-- nobody waits for us. When somebody has waited for deadlock_timeout, the server looks for a deadlock, and may log that:
-- each time we wait for less.
CREATE FUNCTION dlock.await(behind bigint, patience interval) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    allowed constant interval := nullif(current_setting('statement_timeout')::interval, '0') * 0.8;
    until constant timestamptz := clock_timestamp() + least(patience, allowed);
    longest constant interval := greatest(current_setting('deadlock_timeout')::interval * 0.9, '100 ms');
BEGIN
    WHILE clock_timestamp() < until LOOP
        BEGIN
            PERFORM set_config('lock_timeout', greatest(1, ceil(1000 * extract(
                epoch FROM least(until - clock_timestamp(), longest))))::text, true); -- zero would be for ever
            PERFORM pg_advisory_xact_lock_shared('dlock.contenders'::regclass::int, (behind & 2147483647)::int);
            RETURN true;
        EXCEPTION WHEN lock_not_available THEN
            NULL;
        END;
    END LOOP;
    RETURN false;
END $$;

-- A session whose client is gone should not sleep on: its place is lost already, and others wait for its wake-up lock.
-- PostgreSQL before 14, and some platforms, cannot look.
CREATE FUNCTION dlock.end_with_the_client() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM set_config('client_connection_check_interval', '500', false);
EXCEPTION WHEN OTHERS THEN
    NULL;
END $$;

-- Has a lock's row to ourselves until the end of the transaction; see dlock.acquire for why it is an update.
CREATE FUNCTION dlock.enter(name text) RETURNS void LANGUAGE sql AS $$
    SELECT set_config('dlock.inside', 'on', true);
    UPDATE dlock.locks l SET token = l.token WHERE l.name = enter.name
$$;

-- A holder whose lease has run out as a run of the history: its dlock died. No field is taken out of a JSON text here: in
-- a database of another encoding that fails where the text has a letter that the encoding has not.
CREATE FUNCTION dlock.vanished(c dlock.contenders) RETURNS json VOLATILE LANGUAGE sql AS $$
    SELECT json_build_object('vanished', dlock.describe(c),
        'ended_at', to_char(c.expires AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"'))
$$;

-- Makes a run the last one, and forgets those beyond so many.
CREATE FUNCTION dlock.remember(name text, run json, runs int, succeeded timestamptz DEFAULT NULL) RETURNS void
LANGUAGE sql AS $$
    UPDATE dlock.locks l
    SET last_run = run, last_success = coalesce(succeeded, l.last_success),
        earlier = CASE WHEN l.last_run IS NULL THEN l.earlier
                       ELSE (array_prepend(l.last_run, l.earlier))[1:greatest(runs, 1) - 1] END
    WHERE l.name = remember.name AND run IS NOT NULL
$$;

-- Takes the lock (granted), or says who has it (busy) and, with queue => true, takes a place in the
-- queue, which is lost unless asked again within the smaller of ttl and 10 s. Also: 'other slots' if the lock is in use
-- with another number of slots, 'already ran' if `once` is on record.
-- A session that stays with the contender, and is no pooler's, says so with session => its process, as the server told
-- it at the log-in: then it holds a wake-up lock, and may be told to wait for that of `behind`.
CREATE FUNCTION dlock.acquire(
    name text, owner text, ttl interval DEFAULT '30 s', mode text DEFAULT 'exclusive', slots int DEFAULT 1,
    queue boolean DEFAULT false, once text DEFAULT NULL, who json DEFAULT NULL, wake text DEFAULT NULL,
    session int DEFAULT NULL, again boolean DEFAULT false, -- `again` changes nothing: earlier dlocks say it
    OUT outcome text, OUT token bigint, OUT slot int,
    OUT ahead bigint,        -- waiters before us
    OUT next_end interval,   -- until the first lease before us ends
    OUT holder json,         -- one that is in the way
    OUT behind bigint,       -- if busy: for dlock.await
    OUT room int,            -- so many waiters may stay connected
    OUT version int          -- of this schema
) LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '4s' AS $$
DECLARE
    untouched constant boolean := txid_current_if_assigned() IS NULL; -- the commit is about nothing but us
    at timestamptz;
    next_token bigint;
    self dlock.contenders;
    front record;
BEGIN
    -- The first call in a session has to plan each statement that it reaches. So what only some need stands in a
    -- branch of its own.
    version := dlock.version();
    PERFORM dlock.durably(), set_config('dlock.inside', 'on', true);

    -- Whoever wants the lock, or gives it up, updates this row: above READ COMMITTED, whoever decides by an older
    -- picture of the contenders then fails, and asks again.
    LOOP
        UPDATE dlock.locks l
        SET token = greatest(l.token + 1, (date_part('epoch', clock_timestamp()) * 1e6::float8)::bigint)
        WHERE l.name = acquire.name RETURNING l.token, clock_timestamp() INTO next_token, at;
        EXIT WHEN FOUND;
        INSERT INTO dlock.locks (name) VALUES (acquire.name) ON CONFLICT DO NOTHING;
    END LOOP;
    outcome := 'granted';
    IF EXISTS (SELECT FROM dlock.contenders c WHERE c.name = acquire.name) THEN
        UPDATE dlock.contenders c SET server = pg_postmaster_start_time(), expires = at + c.ttl
        WHERE c.name = acquire.name AND c.server <> pg_postmaster_start_time();
        PERFORM dlock.remember(acquire.name, dlock.vanished(c), 20) FROM dlock.contenders c
        WHERE c.name = acquire.name AND c.expires <= at AND c.token IS NOT NULL AND NOT c.kept;
        DELETE FROM dlock.contenders c WHERE c.name = acquire.name AND c.expires <= at;
        SELECT * INTO self FROM dlock.contenders c WHERE c.name = acquire.name AND c.owner = acquire.owner;
        IF self.kept OR self.revoked IS NOT NULL THEN -- ours, but not to go on with
            outcome := 'busy';
            ahead := 0;
            next_end := self.expires - at;
            holder := dlock.describe(self);
            RETURN;
        END IF;
        mode := coalesce(self.mode, mode);
        slots := coalesce(self.slots, slots);
        -- Those who are served before us, and whether they keep us from the lock; `nearest` has to be gone first.
        SELECT CASE acquire.mode
                   WHEN 'shared' THEN bool_or(c.mode <> 'shared')
                   ELSE count(*) >= acquire.slots
               END AS blocks,
               bool_or(c.slots <> acquire.slots) AS other_slots,
               count(*) FILTER (WHERE c.token IS NULL) AS ahead,
               min(c.expires) - at AS next_end,
               max(c.ticket) FILTER (WHERE acquire.mode <> 'shared' OR c.mode <> 'shared') AS nearest
        INTO front FROM dlock.contenders c
        WHERE c.name = acquire.name AND c.owner <> acquire.owner
          AND (c.token IS NOT NULL OR (c.ticket < self.ticket) IS NOT FALSE);
        outcome := CASE
            WHEN self.token IS NOT NULL THEN 'granted' -- before; the answer was lost
            WHEN front.other_slots THEN 'other slots'
            WHEN front.blocks THEN 'busy'
            ELSE 'granted'
        END;
    END IF;
    IF once IS NOT NULL AND self.token IS NULL THEN
        IF EXISTS (SELECT FROM dlock.successes s WHERE s.name = acquire.name AND s.key = acquire.once) THEN
            DELETE FROM dlock.contenders c WHERE c.name = acquire.name AND c.owner = acquire.owner;
            outcome := 'already ran';
            RETURN;
        END IF;
    END IF;
    IF outcome = 'granted' THEN
        token := coalesce(self.token, next_token);
        slot := self.slot;
    ELSE
        ttl := least(ttl, '10 s');
    END IF;
    IF mode = 'slots' AND token = next_token THEN
        SELECT min(n) INTO slot FROM generate_series(0, acquire.slots - 1) n
        WHERE NOT EXISTS (SELECT FROM dlock.contenders c WHERE c.name = acquire.name AND c.slot = n);
    END IF;
    IF token IS NOT NULL OR outcome = 'busy' AND queue THEN
        INSERT INTO dlock.contenders AS c
            (name, owner, mode, slots, token, slot, since, ttl, expires, server, who, wake, session)
        VALUES (acquire.name, acquire.owner, acquire.mode, acquire.slots, acquire.token, acquire.slot, at, acquire.ttl,
                at + acquire.ttl, pg_postmaster_start_time(), acquire.who, acquire.wake, pg_backend_pid())
        ON CONFLICT ON CONSTRAINT contenders_pkey DO UPDATE
        SET token = excluded.token, slot = excluded.slot, ttl = excluded.ttl, expires = excluded.expires,
            wake = excluded.wake, session = excluded.session,
            since = CASE WHEN c.token IS NOT DISTINCT FROM excluded.token THEN c.since ELSE at END
        RETURNING c.ticket INTO self.ticket;
    END IF;
    PERFORM dlock.hold_wake_up_lock(self.ticket)
    WHERE session = pg_backend_pid() AND self.session IS DISTINCT FROM session;
    IF outcome = 'granted' THEN
        RETURN;
    END IF;

    ahead := front.ahead;
    next_end := front.next_end;
    room := current_setting('max_connections')::int * 2 / 3;
    SELECT dlock.describe(c) INTO holder FROM dlock.contenders c
    WHERE c.name = acquire.name AND c.owner <> acquire.owner
    ORDER BY c.slots = acquire.slots, c.token IS NULL, c.ticket LIMIT 1;
    IF queue AND session = pg_backend_pid() AND dlock.has_wake_up_lock(front.nearest) THEN
        behind := front.nearest;
        PERFORM dlock.end_with_the_client() WHERE self.session IS DISTINCT FROM session;
    END IF;
    PERFORM set_config('synchronous_commit', 'off', true) WHERE untouched;
END $$;

-- Extends the lease (held). Otherwise, and why: it is not ours any more (lost), an operator has freed it (force
-- released), or an operator wants it back (revoked: ours until it ends, and not extended).
CREATE FUNCTION dlock.renew(
    name text, owner text, token bigint, ttl interval DEFAULT '30 s', wake text DEFAULT NULL, session int DEFAULT NULL,
    boolean DEFAULT NULL, boolean DEFAULT NULL, -- from runs of version 3 that were under way at the upgrade
    OUT outcome text, OUT reason text
) LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '4s' AS $$
DECLARE
    self dlock.contenders;
BEGIN
    PERFORM dlock.durably(), set_config('dlock.inside', 'on', true);
    SELECT * INTO self FROM dlock.contenders c
    WHERE c.name = renew.name AND c.owner = renew.owner AND c.token = renew.token AND NOT c.kept FOR UPDATE;
    IF self.token IS NULL THEN
        SELECT 'force released', f.reason INTO outcome, reason FROM dlock.force_released f
        WHERE f.name = renew.name AND f.token = renew.token AND f.owner = renew.owner;
        IF NOT FOUND THEN
            SELECT 'lost', coalesce('it belongs to ' || max(c.owner), 'nobody holds it') INTO outcome, reason
            FROM dlock.contenders c WHERE c.name = renew.name AND c.token IS NOT NULL AND c.owner <> renew.owner;
        END IF;
    ELSIF self.revoked IS NOT NULL THEN
        outcome := 'revoked';
        reason := self.revoked;
    ELSE
        outcome := 'held';
        UPDATE dlock.contenders c
        SET ttl = renew.ttl, expires = clock_timestamp() + renew.ttl, server = pg_postmaster_start_time(),
            wake = coalesce(renew.wake, c.wake), session = pg_backend_pid()
        WHERE c.name = renew.name AND c.owner = renew.owner;
        PERFORM dlock.hold_wake_up_lock(self.ticket)
        WHERE session = pg_backend_pid() AND self.session IS DISTINCT FROM session;
    END IF;
END $$;

-- Releases the lock, at once or after `keep`; true if it was ours, also if an earlier call has done it already.
-- Nobody need wait for the disk unless something is to be kept: undone by a crash, a release leaves a lease that runs
-- out, and the next grant, whose commit comes behind it, does wait.
-- What is kept can be ended earlier or later by dlock.rehold, with nothing but the owner.
CREATE FUNCTION dlock.release(
    name text, owner text, token bigint, last_run json DEFAULT NULL, once text DEFAULT NULL,
    keep interval DEFAULT NULL, session int DEFAULT NULL, runs int DEFAULT 20, succeeded timestamptz DEFAULT NULL
) RETURNS boolean LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '4s' AS $$
DECLARE
    untouched constant boolean := txid_current_if_assigned() IS NULL;
    before dlock.locks;
    self dlock.contenders;
BEGIN
    PERFORM set_config('dlock.inside', 'on', true);
    SELECT * INTO before FROM dlock.locks l WHERE l.name = release.name FOR UPDATE;
    IF (before.last_owner, before.last_token) = (release.owner, release.token) THEN
        RETURN true;
    END IF;
    IF keep > '0' THEN
        UPDATE dlock.contenders c
        SET kept = true, wake = NULL, ttl = keep, expires = clock_timestamp() + keep,
            server = pg_postmaster_start_time()
        WHERE c.name = release.name AND c.owner = release.owner AND c.token = release.token RETURNING c.* INTO self;
    ELSE
        DELETE FROM dlock.contenders c
        WHERE c.name = release.name AND c.owner = release.owner AND c.token = release.token RETURNING c.* INTO self;
    END IF;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    IF keep > '0' OR once IS NOT NULL THEN
        PERFORM dlock.durably();
    ELSIF untouched THEN
        PERFORM set_config('synchronous_commit', 'off', true);
    END IF;
    UPDATE dlock.locks l SET last_owner = release.owner, last_token = release.token WHERE l.name = release.name;
    PERFORM dlock.remember(name, last_run, runs, succeeded);
    IF once IS NOT NULL THEN
        INSERT INTO dlock.successes VALUES (release.name, release.once, release.token) ON CONFLICT DO NOTHING;
    END IF;
    PERFORM dlock.drop_wake_up_lock(self.ticket) WHERE session = pg_backend_pid() AND self.session = session;
    RETURN true;
END $$;

-- Moves the end of what a release keeps to `ttl` from now, or with zero to now ('done'). 'not held': it has
-- ended, or an operator has freed it ('force released'). 'running': it is not kept but held, and renewed.
-- 'revoked': it ends when it was going to.
CREATE OR REPLACE FUNCTION dlock.rehold(name text, owner text, ttl interval, OUT outcome text, OUT reason text)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '4s' AS $$
DECLARE
    self dlock.contenders;
BEGIN
    PERFORM dlock.durably(), dlock.enter(name);
    outcome := 'done';
    SELECT * INTO self FROM dlock.contenders c
    WHERE c.name = rehold.name AND c.owner = rehold.owner AND c.token IS NOT NULL AND dlock.lasts(c);
    IF self.token IS NULL THEN
        SELECT 'force released', f.reason INTO outcome, reason FROM dlock.force_released f
        WHERE f.name = rehold.name AND f.owner = rehold.owner ORDER BY f.token DESC LIMIT 1;
        outcome := coalesce(outcome, 'not held');
    ELSIF NOT self.kept THEN
        outcome := 'running';
    ELSIF ttl <= '0' THEN
        DELETE FROM dlock.contenders c WHERE c.name = rehold.name AND c.owner = rehold.owner;
    ELSIF self.revoked IS NOT NULL THEN
        outcome := 'revoked';
        reason := self.revoked;
    ELSE
        UPDATE dlock.contenders c
        SET ttl = rehold.ttl, expires = clock_timestamp() + rehold.ttl, server = pg_postmaster_start_time(),
            session = pg_backend_pid()
        WHERE c.name = rehold.name AND c.owner = rehold.owner;
    END IF;
END $$;

-- Gives up the place in the queue, and the lock if it was granted meanwhile.
CREATE OR REPLACE FUNCTION dlock.withdraw(name text, owner text) RETURNS void LANGUAGE sql
SET search_path = pg_catalog, pg_temp SET lock_timeout = '4s' AS $$
    SELECT dlock.enter(name);
    DELETE FROM dlock.contenders c WHERE c.name = withdraw.name AND c.owner = withdraw.owner
$$;

-- Takes the lock away from exactly this holder: marks it for the holder to release ('marked'), or, with now => true or
-- reason => NULL, frees it without waiting for the holder ('freed'). 'not held': too late. The holder is notified. last_run
-- becomes the last run, unless the holder has recorded how its run ended, or is there to do so.
CREATE OR REPLACE FUNCTION dlock.revoke(
    name text, owner text, token bigint, reason text, now boolean DEFAULT false, last_run json DEFAULT NULL
) RETURNS text LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '4s' AS $$
DECLARE
    outcome constant text := CASE WHEN now OR reason IS NULL THEN 'freed' ELSE 'marked' END;
    self dlock.contenders;
BEGIN
    PERFORM dlock.enter(name);
    UPDATE dlock.contenders c SET revoked = revoke.reason
    WHERE c.name = revoke.name AND c.owner = revoke.owner AND c.token = revoke.token RETURNING c.* INTO self;
    IF NOT FOUND THEN
        RETURN 'not held';
    END IF;
    -- What is only kept after a run takes nothing away from how that ended.
    PERFORM dlock.remember(name, last_run, 20) WHERE outcome = 'freed' AND NOT self.kept OR self.kept AND NOT EXISTS (
        SELECT FROM dlock.locks l
        WHERE l.name = revoke.name AND strpos(l.last_run::text, '"owner":"' || self.owner || '"') > 0);
    IF outcome = 'freed' THEN
        DELETE FROM dlock.contenders c WHERE c.name = revoke.name AND c.owner = revoke.owner;
        DELETE FROM dlock.force_released f WHERE f.at < clock_timestamp() - interval '1 day';
        INSERT INTO dlock.force_released
        SELECT revoke.name, revoke.token, revoke.owner, revoke.reason WHERE revoke.reason IS NOT NULL;
    END IF;
    PERFORM pg_notify(self.wake, '') WHERE self.wake IS NOT NULL;
    RETURN outcome;
END $$;

-- One lock as JSON: its contenders in the order of the queue, and its last run. Null: never used.
CREATE OR REPLACE FUNCTION dlock.status(name text) RETURNS json STABLE LANGUAGE sql AS $$
    SELECT json_build_object('name', l.name, 'last_run', l.last_run, 'earlier', to_json(l.earlier),
        'last_success_at', to_char(l.last_success AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"'),
        'contenders', (
            SELECT coalesce(json_agg(dlock.describe(c) ORDER BY c.ticket), '[]') FROM dlock.contenders c
            WHERE c.name = l.name AND dlock.lasts(c)),
        'vanished', (
            SELECT coalesce(json_agg(dlock.vanished(c) ORDER BY c.token DESC), '[]') FROM dlock.contenders c
            WHERE c.name = l.name AND NOT dlock.lasts(c) AND c.token IS NOT NULL AND NOT c.kept))
    FROM dlock.locks l WHERE l.name = status.name
$$;

-- Removes what is on record of a lock, but for its token: all of it ('done', or 'in use' while somebody holds it or waits),
-- or with `once` only that key. 'nothing': there was none.
CREATE FUNCTION dlock.forget(name text, once text DEFAULT NULL) RETURNS text LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp SET lock_timeout = '4s' AS $$
BEGIN
    PERFORM dlock.durably(), dlock.enter(name);
    IF once IS NOT NULL THEN
        DELETE FROM dlock.successes s WHERE s.name = forget.name AND s.key = forget.once;
    ELSIF EXISTS (SELECT FROM dlock.contenders c WHERE c.name = forget.name AND dlock.lasts(c)) THEN
        RETURN 'in use';
    ELSE
        DELETE FROM dlock.successes s WHERE s.name = forget.name;
        DELETE FROM dlock.contenders c WHERE c.name = forget.name;
        UPDATE dlock.locks l SET last_run = NULL, earlier = '{}', last_success = NULL WHERE l.name = forget.name;
    END IF;
    RETURN CASE WHEN FOUND THEN 'done' ELSE 'nothing' END;
END $$;

-- The resource's side of fencing. Called in the transaction that writes, it refuses that write if a newer
-- token was seen already, and makes writers with different tokens wait for each other's commit.
CREATE OR REPLACE FUNCTION dlock.fence(resource text, token bigint) RETURNS bigint
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
                  HINT = 'The lock was lost, and somebody else holds it: stop.';
    END IF;
    RETURN newest;
END $$;

-- To plan a statement takes longer than to do it, and few sessions ask often: one plan for all times.
DO $$
BEGIN
    IF current_setting('server_version_num')::int >= 120000 THEN
        ALTER FUNCTION dlock.acquire SET plan_cache_mode = 'force_generic_plan';
        ALTER FUNCTION dlock.release SET plan_cache_mode = 'force_generic_plan';
    END IF;
END $$;

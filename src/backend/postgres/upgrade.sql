-- From version 3, where a lock that nobody waited for had its holder in its own row. Leases and tokens stay as they are.
-- Calls of version 3 that are under way end first; later ones find no function, or a column that is gone, and change nothing.
DO $$
BEGIN
    IF to_regprocedure('dlock.version()') IS NULL THEN
        RETURN; -- nothing is there yet
    END IF;
    IF dlock.version() <> 3 THEN
        RAISE 'the schema is of version %; this upgrades version 3 to 5', dlock.version();
    END IF;
    LOCK TABLE dlock.locks, dlock.contenders IN ACCESS EXCLUSIVE MODE;
    DROP VIEW dlock.everybody;
    DROP FUNCTION dlock.refuse(), dlock.refuse_by_hand(), dlock.contender_changed(), dlock.make_room() CASCADE;
    DROP FUNCTION dlock.durably(), dlock.enter(text), dlock.wake_first(text), dlock.rehearse(),
        dlock.raise_bell(bigint, int), dlock.drop_bell(bigint), dlock.is_bell_up(bigint), dlock.behind(text, bigint),
        dlock.keep_place(text, text, text, int), dlock.take(text, text, interval, json, text),
        dlock.let_go(text, text, bigint, json), dlock.await(text, text, bigint, interval, boolean),
        dlock.acquire(text, text, interval, text, int, boolean, text, json, text, boolean, int),
        dlock.renew(text, text, bigint, interval, text, int, boolean, boolean),
        dlock.release(text, text, bigint, json, text, interval, int);
    INSERT INTO dlock.contenders (name, owner, mode, slots, token, since, ttl, expires, server, who, wake, session)
    SELECT l.name, l.owner, 'exclusive', 1, l.token, l.since, l.ttl, l.expires, l.server, l.who, l.wake, l.session
    FROM dlock.locks l WHERE l.crowd = 1;
    ALTER TABLE dlock.locks DROP crowd, DROP owner, DROP since, DROP ttl, DROP expires, DROP server, DROP who, DROP wake,
        DROP session, ADD earlier json[] NOT NULL DEFAULT '{}', ADD last_success timestamptz;
    ALTER TABLE dlock.contenders DROP pass;
    ALTER TABLE dlock.taken RENAME TO force_released;
END $$;

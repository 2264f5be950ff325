-- Some words stand for more (schema.rs): those for types, and ALL_OR_NOTHING, which every procedure with a transaction of
-- its own begins with (frame.sql).
--
-- What is read here is read by SELECT ... INTO alone: that takes no locks. A subquery in IF or SET would take them on the
-- rows and the gaps between them, and contenders for different locks would be in each other's way.
--
-- Time here is what UUID() has of it: in MariaDB a clock that only goes forward, whatever is done to the machine's date
-- or by SET timestamp, since the server started; in MySQL the machine's date. The rest of a UUID says whose clock it is:
-- it changes when the server is restarted, and in MySQL also when the date was set back.
CREATE PROCEDURE dlock_clock(OUT at BIGINT, OUT server NAME_TEXT)
BEGIN
    DECLARE id CHAR(36) CHARACTER SET ascii DEFAULT UUID();
    SET at = CONV(CONCAT(SUBSTR(id, 16, 3), SUBSTR(id, 10, 4), SUBSTR(id, 1, 8)), 16, 10) DIV 10 - 12219292800000000;
    SET server = CONCAT(LEFT(@@hostname, 100), ':', @@port, ' ', @@server_id, ' ', RIGHT(id, 17));
END
//
-- Whether a commit is to wait for a replica (semi-synchronous replication). If it waits in vain, the server goes on without
-- a word: so whoever is granted something then asks the server for its Rpl_semi_sync_…_status. Servers call it by two
-- names, and refuse the one that they do not know.
CREATE PROCEDURE dlock_semi_sync(OUT semi_sync BOOLEAN)
BEGIN
    DECLARE CONTINUE HANDLER FOR SQLEXCEPTION BEGIN END;
    SET @dlock_semi_sync = NULL;
    PREPARE dlock_ask_name FROM 'SET @dlock_semi_sync = @@global.rpl_semi_sync_master_enabled';
    EXECUTE dlock_ask_name;
    IF @dlock_semi_sync IS NULL THEN
        PREPARE dlock_ask_name FROM 'SET @dlock_semi_sync = @@global.rpl_semi_sync_source_enabled';
        EXECUTE dlock_ask_name;
    END IF;
    DEALLOCATE PREPARE dlock_ask_name;
    SET semi_sync = COALESCE(@dlock_semi_sync, FALSE);
END
//
-- A session that stays with its contender holds the contender's wake-up lock, a user-level lock on its ticket. The next
-- contender waits for it (dlock_await), so each that leaves wakes one, however many wait. It falls when the contender
-- releases, or when its session ends. It only says that it is worth asking again: nothing is decided by it.
CREATE PROCEDURE dlock_wake_up_lock(
    IN p_name NAME_TEXT, IN p_ticket BIGINT, IN p_what WORD_TEXT, IN p_patience DOUBLE, OUT answer INT
)
BEGIN
    DECLARE lock_name VARCHAR(64) DEFAULT
        CONCAT('dlock:', LEFT(SHA2(CONCAT(DATABASE(), '.dlock_.', p_name), 256), 20), ':', p_ticket);
    DECLARE CONTINUE HANDLER FOR SQLEXCEPTION BEGIN END; -- some proxies and clusters forbid user-level locks
    IF p_what = 'hold' THEN
        SET answer = GET_LOCK(lock_name, 0);
    ELSEIF p_what = 'drop' THEN
        SET answer = RELEASE_LOCK(lock_name);
    ELSEIF p_what = 'is held' THEN
        SET answer = IS_FREE_LOCK(lock_name) = 0;
    ELSE
        SET answer = GET_LOCK(lock_name, p_patience);
        DO RELEASE_LOCK(lock_name);
    END IF;
END
//
-- Waits until the wake-up lock of `behind` has fallen (1), or so many seconds are over (0). Null: it cannot wait.
-- Where 32 sessions wait for each other in a row, the server takes that for a deadlock, and refuses the last of them. It
-- waits for one nearer to the front instead, and asks again when that has gone (2).
CREATE PROCEDURE dlock_await(IN p_name NAME_TEXT, IN p_behind BIGINT, IN p_patience DOUBLE)
BEGIN
    DECLARE woken, v_held INT;
    DECLARE v_instead BIGINT;
    CALL dlock_wake_up_lock(p_name, p_behind, 'await', p_patience, woken);
    IF woken IS NULL THEN
        SELECT ticket INTO v_instead FROM dlock_contenders
        WHERE name = p_name AND ticket < p_behind ORDER BY token IS NULL, ticket LIMIT 15, 1;
        CALL dlock_wake_up_lock(p_name, v_instead, 'is held', 0, v_held);
        IF v_held THEN
            CALL dlock_wake_up_lock(p_name, v_instead, 'await', p_patience, woken);
            SET woken = woken * 2;
        END IF;
    END IF;
    SELECT woken;
END
//
-- Those who are served before a contender, and whether they keep it from the lock.
CREATE PROCEDURE dlock_in_front(
    IN p_name NAME_TEXT, IN p_owner OWNER_TEXT, IN p_mode WORD_TEXT, IN p_slots INT, IN p_ticket BIGINT,
    IN p_at BIGINT, IN p_server NAME_TEXT,
    OUT blocks BOOLEAN, OUT same_slots BOOLEAN,
    OUT ahead BIGINT,    -- waiters
    OUT next_end BIGINT, -- until the first lease ends
    OUT nearest BIGINT   -- the one that has to be gone first, by its ticket
)
BEGIN
    SELECT IF(p_mode = 'shared', COALESCE(SUM(c.mode <> 'shared'), 0) > 0, COUNT(*) >= p_slots),
           COALESCE(SUM(c.slots <> p_slots), 0) = 0,
           COALESCE(SUM(c.token IS NULL), 0),
           MIN(IF(c.server = p_server, c.expires, COALESCE(s.expires, p_at + c.ttl))) - p_at,
           MAX(IF(p_mode <> 'shared' OR c.mode <> 'shared', c.ticket, NULL))
    INTO blocks, same_slots, ahead, next_end, nearest
    FROM dlock_contenders c LEFT JOIN dlock_sightings s
      ON s.name = c.name AND s.owner = c.owner AND s.server = p_server AND s.renewal = c.renewal AND c.server <> p_server
    WHERE c.name = p_name AND c.owner <> p_owner AND (c.token IS NOT NULL OR p_ticket IS NULL OR c.ticket < p_ticket)
      AND IF(c.server = p_server, c.expires, COALESCE(s.expires, p_at + c.ttl)) > p_at;
END
//
-- Notes when this server first saw a contender of another one as it is now: one at each call.
CREATE PROCEDURE dlock_sight(IN p_name NAME_TEXT, IN p_at BIGINT, IN p_server NAME_TEXT)
BEGIN
    DECLARE v_owner OWNER_TEXT;
    DECLARE v_renewal, v_expires BIGINT;
    SELECT c.owner, c.renewal, p_at + c.ttl INTO v_owner, v_renewal, v_expires
    FROM dlock_contenders c LEFT JOIN dlock_sightings s
      ON s.name = c.name AND s.owner = c.owner AND s.server = p_server AND s.renewal = c.renewal
    WHERE c.name = p_name AND c.server <> p_server AND s.name IS NULL
    ORDER BY c.token IS NULL, c.ticket LIMIT 1;
    IF v_owner IS NOT NULL THEN
        INSERT INTO dlock_sightings (name, owner, server, renewal, expires)
        VALUES (p_name, v_owner, p_server, v_renewal, v_expires)
        ON DUPLICATE KEY UPDATE renewal = v_renewal, expires = v_expires;
    END IF;
END
//
-- Removes a contender. Whoever does so by hand, and so lets a second holder in beside the first, is refused: see
-- dlock_contenders_stay.
CREATE PROCEDURE dlock_remove(IN p_name NAME_TEXT, IN p_owner OWNER_TEXT, IN p_renewal BIGINT)
BEGIN
    DECLARE v_count INT;
    UPDATE dlock_contenders SET expires = 0, renewal = renewal + 1
    WHERE name = p_name AND owner = p_owner AND renewal = COALESCE(p_renewal, renewal);
    IF ROW_COUNT() = 1 THEN
        DELETE FROM dlock_contenders WHERE name = p_name AND owner = p_owner;
        SELECT COUNT(*) INTO v_count FROM dlock_sightings WHERE name = p_name AND owner = p_owner;
        IF v_count > 0 THEN
            DELETE FROM dlock_sightings WHERE name = p_name AND owner = p_owner;
        END IF;
    END IF;
END
//
-- Makes a run the last one, and forgets those beyond so many.
CREATE PROCEDURE dlock_remember(IN p_name NAME_TEXT, IN p_run LONG_TEXT, IN p_runs INT, IN p_succeeded DATETIME(3))
BEGIN
    SET p_run = REPLACE(p_run, CHAR(10), ' ');
    IF p_run IS NOT NULL THEN
        INSERT INTO dlock_history (name, runs, last_success) VALUES (p_name, p_run, p_succeeded)
        ON DUPLICATE KEY UPDATE
            runs = SUBSTRING_INDEX(CONCAT_WS(CHAR(10), p_run, NULLIF(runs, '')), CHAR(10), GREATEST(p_runs, 1)),
            last_success = COALESCE(p_succeeded, last_success);
    END IF;
END
//
-- Removes whose lease is over, with a record of the runs that have vanished so.
CREATE PROCEDURE dlock_tidy(IN p_name NAME_TEXT, IN p_at BIGINT, IN p_server NAME_TEXT)
BEGIN
    DECLARE v_owner OWNER_TEXT;
    DECLARE v_ticket BIGINT DEFAULT -1;
    DECLARE v_renewal BIGINT;
    DECLARE v_run LONG_TEXT;
    CALL dlock_sight(p_name, p_at, p_server);
    sweep: LOOP
        SET v_owner = NULL;
        SELECT c.owner, c.ticket, c.renewal, IF(c.token IS NULL OR c.kept, NULL, JSON_OBJECT(
                   'vanished', JSON_EXTRACT(c.described, '$'), 'ended_at', CONCAT(REPLACE(CAST(UTC_TIMESTAMP(3)
                   - INTERVAL p_at - IF(c.server = p_server, c.expires, s.expires) MICROSECOND AS CHAR), ' ', 'T'), 'Z')))
        INTO v_owner, v_ticket, v_renewal, v_run
        FROM dlock_contenders c LEFT JOIN dlock_sightings s
          ON s.name = c.name AND s.owner = c.owner AND s.server = p_server AND s.renewal = c.renewal
        WHERE c.name = p_name AND c.ticket > v_ticket
          AND IF(c.server = p_server, c.expires, COALESCE(s.expires, p_at + 1)) <= p_at
        ORDER BY c.ticket LIMIT 1;
        IF v_owner IS NULL THEN
            LEAVE sweep;
        END IF;
        CALL dlock_remember(p_name, v_run, 20, NULL);
        CALL dlock_remove(p_name, v_owner, v_renewal);
    END LOOP;
END
//
-- Takes the lock (granted), or says who has it (busy) and, with p_queue, takes a place in the queue, which is lost
-- unless asked again within the smaller of ttl and 10 s; whoever does so says so with p_again. Also: 'other slots' if the
-- lock is in use with another number of slots, 'already ran' if p_once is on record.
-- A session that stays with the contender, and is no proxy's, says so with p_session, its number, as the server told it
-- at the log-in: then it holds a wake-up lock, and may be told to wait for that of `behind`.
CREATE PROCEDURE dlock_ask(
    IN p_name NAME_TEXT, IN p_owner OWNER_TEXT, IN p_ttl BIGINT, IN p_mode WORD_TEXT, IN p_slots INT,
    IN p_queue BOOLEAN, IN p_once TEXT CHARACTER SET utf8mb4, IN p_who LONG_TEXT, IN p_session BIGINT,
    IN p_again BOOLEAN
)
BEGIN
    DECLARE v_server NAME_TEXT;
    DECLARE v_at, v_next, v_ticket, v_token, v_session, v_granted, v_ahead, v_next_end, v_nearest, v_behind BIGINT;
    DECLARE v_mode WORD_TEXT;
    DECLARE v_slots, v_slot, v_held, v_count INT;
    DECLARE v_stopped, v_blocks, v_same_slots, v_semi_sync BOOLEAN;
    DECLARE v_outcome WORD_TEXT;
    ALL_OR_NOTHING;

    -- As long as a waiter is blocked, it changes nothing but its own row. So a thousand that ask again do not wait for
    -- each other.
    IF p_again AND p_queue THEN
        CALL dlock_clock(v_at, v_server);
        START TRANSACTION;
        SELECT mode, slots, ticket, session INTO v_mode, v_slots, v_ticket, v_session FROM dlock_contenders
        WHERE name = p_name AND owner = p_owner AND token IS NULL AND server = v_server AND expires > v_at;
        IF v_ticket IS NOT NULL THEN
            CALL dlock_in_front(p_name, p_owner, v_mode, v_slots, v_ticket, v_at, v_server,
                v_blocks, v_same_slots, v_ahead, v_next_end, v_nearest);
            IF v_blocks THEN
                UPDATE dlock_contenders SET expires = v_at + ttl, renewal = renewal + 1, session = CONNECTION_ID()
                WHERE name = p_name AND owner = p_owner AND token IS NULL;
                SET v_outcome = IF(ROW_COUNT() = 1, 'busy', NULL);
                CALL dlock_sight(p_name, v_at, v_server);
            END IF;
        END IF;
    END IF;

    IF v_outcome IS NULL THEN
        SET v_ticket = NULL, v_session = NULL;
        CALL dlock_clock(v_at, v_server);
        START TRANSACTION;
        INSERT INTO dlock_locks (name, token) VALUES (p_name, v_at)
        ON DUPLICATE KEY UPDATE token = GREATEST(token + 1, v_at);
        CALL dlock_clock(v_at, v_server); -- whoever had the row may have kept us waiting
        SELECT token INTO v_next FROM dlock_locks WHERE name = p_name;
        SET v_outcome = 'granted';
        SELECT COUNT(*) INTO v_count FROM dlock_contenders WHERE name = p_name;
        IF v_count > 0 THEN
            CALL dlock_tidy(p_name, v_at, v_server);
            SELECT mode, slots, ticket, token, slot, session, kept OR revoked IS NOT NULL,
                   IF(server = v_server, expires - v_at, ttl)
            INTO v_mode, v_slots, v_ticket, v_token, v_slot, v_session, v_stopped, v_next_end
            FROM dlock_contenders WHERE name = p_name AND owner = p_owner;
            IF v_stopped THEN -- ours, but not to go on with
                SET v_outcome = 'busy', v_ahead = 0, p_queue = FALSE;
            ELSE
                CALL dlock_in_front(p_name, p_owner, COALESCE(v_mode, p_mode), COALESCE(v_slots, p_slots), v_ticket,
                    v_at, v_server, v_blocks, v_same_slots, v_ahead, v_next_end, v_nearest);
                SET v_outcome = CASE
                    WHEN v_token IS NOT NULL THEN 'granted' -- before; the answer was lost
                    WHEN NOT v_same_slots THEN 'other slots'
                    WHEN v_blocks THEN 'busy'
                    ELSE 'granted'
                END;
            END IF;
        END IF;
        IF p_once IS NOT NULL AND v_token IS NULL THEN
            SELECT COUNT(*) INTO v_count FROM dlock_successes WHERE name = p_name AND once = SHA2(p_once, 256);
            IF v_count > 0 THEN
                SET v_outcome = 'already ran';
                CALL dlock_remove(p_name, p_owner, NULL);
            END IF;
        END IF;
        IF v_outcome = 'granted' THEN
            SET v_granted = COALESCE(v_token, v_next);
            IF p_mode = 'slots' AND v_slot IS NULL THEN
                SET v_slot = -1;
                REPEAT
                    SET v_slot = v_slot + 1;
                    SELECT COUNT(*) INTO v_count FROM dlock_contenders WHERE name = p_name AND slot = v_slot;
                UNTIL v_count = 0 END REPEAT;
            END IF;
        ELSE
            SET p_ttl = LEAST(p_ttl, 10000000);
        END IF;
        IF v_outcome = 'granted' OR v_outcome = 'busy' AND p_queue THEN
            SET v_ticket = COALESCE(v_ticket, v_next);
            INSERT INTO dlock_contenders
                (name, owner, ticket, mode, slots, token, slot, since, ttl, expires, server, who, session)
            VALUES (p_name, p_owner, v_ticket, p_mode, p_slots, v_granted, v_slot, UTC_TIMESTAMP(3), p_ttl,
                    v_at + p_ttl, v_server, p_who, CONNECTION_ID())
            ON DUPLICATE KEY UPDATE
                since = IF(token <=> v_granted, since, UTC_TIMESTAMP(3)), token = v_granted, slot = v_slot, ttl = p_ttl,
                expires = v_at + p_ttl, server = v_server, renewal = renewal + 1, session = CONNECTION_ID();
        END IF;
    END IF;
    -- Before others can see the ticket: one that came next, and found that nobody can wake it, would sleep through its turn.
    IF p_session = CONNECTION_ID() AND v_ticket IS NOT NULL AND NOT v_session <=> p_session THEN
        CALL dlock_wake_up_lock(p_name, v_ticket, 'hold', 0, v_held);
    END IF;
    COMMIT; -- in a Galera cluster, this is where we learn whether it was certified

    SET innodb_lock_wait_timeout = v_patience;
    IF v_outcome = 'busy' AND p_queue AND p_session = CONNECTION_ID() AND v_nearest IS NOT NULL THEN
        CALL dlock_wake_up_lock(p_name, v_nearest, 'is held', 0, v_held);
        SET v_behind = IF(v_held, v_nearest, NULL);
    END IF;
    IF v_outcome = 'granted' THEN
        CALL dlock_semi_sync(v_semi_sync);
        SELECT v_outcome AS outcome, v_granted AS token, v_slot AS slot, 1 AS version, v_semi_sync AS semi_sync;
    ELSE
        SELECT v_outcome AS outcome, NULL AS token, NULL AS slot, 1 AS version, v_ahead AS ahead, v_next_end AS next_end,
            v_behind AS behind, @@max_connections * 2 DIV 3 AS room, (
                SELECT described FROM dlock_contenders
                WHERE name = p_name AND (owner <> p_owner OR v_stopped)
                ORDER BY slots = p_slots, token IS NULL, ticket LIMIT 1) AS holder;
    END IF;
END
//
-- Extends the lease (held). Otherwise, and why: it is not ours any more (lost), an operator has freed it (force
-- released), or an operator wants it back (revoked: ours until it ends, and not extended).
CREATE PROCEDURE dlock_extend(
    IN p_name NAME_TEXT, IN p_owner OWNER_TEXT, IN p_token BIGINT, IN p_ttl BIGINT, IN p_session BIGINT
)
BEGIN
    DECLARE v_server NAME_TEXT;
    DECLARE v_at, v_ticket, v_session BIGINT;
    DECLARE v_held INT;
    DECLARE v_semi_sync BOOLEAN;
    DECLARE v_outcome WORD_TEXT;
    DECLARE v_reason TEXT CHARACTER SET utf8mb4;
    ALL_OR_NOTHING;
    START TRANSACTION;
    UPDATE dlock_locks SET token = token + 1 WHERE name = p_name;
    SELECT ticket, session, revoked INTO v_ticket, v_session, v_reason FROM dlock_contenders
    WHERE name = p_name AND owner = p_owner AND token = p_token AND NOT kept;
    IF v_ticket IS NULL THEN
        SELECT 'force released', reason INTO v_outcome, v_reason FROM dlock_force_released
        WHERE name = p_name AND token = p_token AND owner = p_owner;
        IF v_outcome IS NULL THEN
            SELECT 'lost', COALESCE(CONCAT('it belongs to ', MAX(owner)), 'nobody holds it') INTO v_outcome, v_reason
            FROM dlock_contenders WHERE name = p_name AND token IS NOT NULL AND owner <> p_owner;
        END IF;
    ELSEIF v_reason IS NOT NULL THEN
        SET v_outcome = 'revoked';
    ELSE
        SET v_outcome = 'held';
        CALL dlock_clock(v_at, v_server);
        UPDATE dlock_contenders
        SET ttl = p_ttl, expires = v_at + p_ttl, server = v_server, renewal = renewal + 1, session = CONNECTION_ID()
        WHERE name = p_name AND owner = p_owner;
    END IF;
    COMMIT;
    SET innodb_lock_wait_timeout = v_patience;
    IF p_session = CONNECTION_ID() AND v_outcome = 'held' AND NOT v_session <=> p_session THEN
        CALL dlock_wake_up_lock(p_name, v_ticket, 'hold', 0, v_held);
    END IF;
    CALL dlock_semi_sync(v_semi_sync);
    SELECT v_outcome AS outcome, v_reason AS reason, v_semi_sync AS semi_sync;
END
//
-- Whether a holder has reason to renew now: its row is gone, or an operator wants the lock back.
CREATE PROCEDURE dlock_watch(IN p_name NAME_TEXT, IN p_owner OWNER_TEXT, IN p_token BIGINT)
    SELECT NOT EXISTS (SELECT 1 FROM dlock_contenders
        WHERE name = p_name AND owner = p_owner AND token = p_token AND revoked IS NULL) AS changed
//
-- Releases the lock, at once or after so many microseconds ('done', also if an earlier call has done it already).
-- What is kept can be ended earlier or later by dlock_rehold, with nothing but the owner.
CREATE PROCEDURE dlock_end(
    IN p_name NAME_TEXT, IN p_owner OWNER_TEXT, IN p_token BIGINT, IN p_keep BIGINT, IN p_run LONG_TEXT,
    IN p_once TEXT CHARACTER SET utf8mb4, IN p_runs INT, IN p_succeeded DATETIME(3), IN p_session BIGINT
)
BEGIN
    DECLARE v_server NAME_TEXT;
    DECLARE v_at, v_ticket, v_session BIGINT;
    DECLARE v_done, v_semi_sync BOOLEAN;
    DECLARE v_held INT;
    DECLARE v_outcome WORD_TEXT DEFAULT 'not ours';
    DECLARE v_reason TEXT CHARACTER SET utf8mb4;
    ALL_OR_NOTHING;
    START TRANSACTION;
    SELECT last_owner <=> p_owner AND last_token <=> p_token INTO v_done FROM dlock_locks
    WHERE name = p_name FOR UPDATE;
    SELECT ticket, session INTO v_ticket, v_session FROM dlock_contenders
    WHERE name = p_name AND owner = p_owner AND token = p_token;
    IF v_done THEN
        SET v_outcome = 'done';
    ELSEIF v_ticket IS NULL THEN
        SELECT 'force released', reason INTO v_outcome, v_reason FROM dlock_force_released
        WHERE name = p_name AND token = p_token AND owner = p_owner;
    ELSE
        SET v_outcome = 'done';
        UPDATE dlock_locks SET token = token + 1, last_owner = p_owner, last_token = p_token WHERE name = p_name;
        IF p_keep > 0 THEN
            CALL dlock_clock(v_at, v_server);
            UPDATE dlock_contenders
            SET kept = TRUE, ttl = p_keep, expires = v_at + p_keep, server = v_server, renewal = renewal + 1
            WHERE name = p_name AND owner = p_owner;
        ELSE
            CALL dlock_remove(p_name, p_owner, NULL);
        END IF;
        CALL dlock_remember(p_name, p_run, p_runs, p_succeeded);
        IF p_once IS NOT NULL THEN
            INSERT INTO dlock_successes (name, once, token) VALUES (p_name, SHA2(p_once, 256), p_token)
            ON DUPLICATE KEY UPDATE token = p_token;
        END IF;
    END IF;
    COMMIT;
    SET innodb_lock_wait_timeout = v_patience;
    IF p_session = CONNECTION_ID() AND v_session = p_session THEN
        CALL dlock_wake_up_lock(p_name, v_ticket, 'drop', 0, v_held);
    END IF;
    -- Nobody need wait for a replica unless something is to be kept: undone by a failover, a release leaves a lease that
    -- runs out.
    IF p_keep > 0 OR p_once IS NOT NULL THEN
        CALL dlock_semi_sync(v_semi_sync);
    END IF;
    SELECT v_outcome AS outcome, v_reason AS reason, v_semi_sync AS semi_sync;
END
//
-- Moves the end of what a release keeps to so many microseconds from now, or with zero to now ('done'). 'not held': it
-- has ended, or an operator has freed it ('force released'). 'running': it is not kept but held, and renewed.
-- 'revoked': it ends when it was going to.
CREATE PROCEDURE dlock_rehold(IN p_name NAME_TEXT, IN p_owner OWNER_TEXT, IN p_ttl BIGINT)
BEGIN
    DECLARE v_server NAME_TEXT;
    DECLARE v_at BIGINT;
    DECLARE v_kept BOOLEAN;
    DECLARE v_outcome WORD_TEXT DEFAULT 'not held';
    DECLARE v_reason TEXT CHARACTER SET utf8mb4;
    ALL_OR_NOTHING;
    START TRANSACTION;
    UPDATE dlock_locks SET token = token + 1 WHERE name = p_name;
    CALL dlock_clock(v_at, v_server);
    SELECT kept, revoked INTO v_kept, v_reason FROM dlock_contenders
    WHERE name = p_name AND owner = p_owner AND token IS NOT NULL AND (expires > v_at OR server <> v_server);
    IF v_kept IS NULL THEN
        SELECT 'force released', reason INTO v_outcome, v_reason FROM dlock_force_released
        WHERE name = p_name AND owner = p_owner ORDER BY token DESC LIMIT 1;
    ELSEIF NOT v_kept THEN
        SET v_outcome = 'running', v_reason = NULL;
    ELSEIF p_ttl > 0 AND v_reason IS NOT NULL THEN
        SET v_outcome = 'revoked';
    ELSE
        SET v_outcome = 'done', v_reason = NULL;
        IF p_ttl > 0 THEN
            UPDATE dlock_contenders
            SET ttl = p_ttl, expires = v_at + p_ttl, server = v_server, renewal = renewal + 1
            WHERE name = p_name AND owner = p_owner;
        ELSE
            CALL dlock_remove(p_name, p_owner, NULL);
        END IF;
    END IF;
    COMMIT;
    SET innodb_lock_wait_timeout = v_patience;
    SELECT v_outcome AS outcome, v_reason AS reason;
END
//
-- Gives up the place in the queue, and the lock if it was granted meanwhile.
CREATE PROCEDURE dlock_withdraw(IN p_name NAME_TEXT, IN p_owner OWNER_TEXT)
BEGIN
    ALL_OR_NOTHING;
    START TRANSACTION;
    UPDATE dlock_locks SET token = token + 1 WHERE name = p_name;
    CALL dlock_remove(p_name, p_owner, NULL);
    COMMIT;
    SET innodb_lock_wait_timeout = v_patience;
    SELECT 'done' AS outcome;
END
//
-- Takes the lock away from exactly this holder: marks it for the holder to release ('marked'), or, with p_now, frees it
-- without waiting for the holder ('freed'). 'not held': too late. p_run becomes the last run, unless the holder has
-- recorded how its run ended, or is there to do so.
CREATE PROCEDURE dlock_revoke(
    IN p_name NAME_TEXT, IN p_owner OWNER_TEXT, IN p_token BIGINT, IN p_reason TEXT CHARACTER SET utf8mb4,
    IN p_now BOOLEAN, IN p_run LONG_TEXT
)
BEGIN
    DECLARE v_kept, v_recorded BOOLEAN;
    DECLARE v_outcome WORD_TEXT DEFAULT 'not held';
    ALL_OR_NOTHING;
    START TRANSACTION;
    UPDATE dlock_locks SET token = token + 1 WHERE name = p_name;
    SELECT kept INTO v_kept FROM dlock_contenders WHERE name = p_name AND owner = p_owner AND token = p_token;
    IF v_kept IS NOT NULL THEN
        SET v_outcome = IF(p_now, 'freed', 'marked');
        -- What is only kept after a run takes nothing away from how that ended.
        SELECT INSTR(SUBSTRING_INDEX(runs, CHAR(10), 1), CONCAT('"owner":"', p_owner, '"')) > 0 INTO v_recorded
        FROM dlock_history WHERE name = p_name;
        IF p_now AND NOT v_kept OR v_kept AND NOT COALESCE(v_recorded, FALSE) THEN
            CALL dlock_remember(p_name, p_run, 20, NULL);
        END IF;
        IF p_now THEN
            CALL dlock_remove(p_name, p_owner, NULL);
            DELETE FROM dlock_force_released WHERE at < UTC_TIMESTAMP() - INTERVAL 1 DAY;
            INSERT INTO dlock_force_released (name, token, owner, reason, at)
            VALUES (p_name, p_token, p_owner, COALESCE(p_reason, ''), UTC_TIMESTAMP())
            ON DUPLICATE KEY UPDATE reason = COALESCE(p_reason, '');
        ELSE
            UPDATE dlock_contenders SET revoked = COALESCE(p_reason, ''), renewal = renewal + 1
            WHERE name = p_name AND owner = p_owner;
        END IF;
    END IF;
    COMMIT;
    SET innodb_lock_wait_timeout = v_patience;
    SELECT v_outcome AS outcome;
END
//
-- Removes what is on record of a lock, but for its token: all of it ('done', or 'in use' while somebody holds it or
-- waits), or with p_once only that key. 'nothing': there was none.
CREATE PROCEDURE dlock_forget(IN p_name NAME_TEXT, IN p_once TEXT CHARACTER SET utf8mb4)
BEGIN
    DECLARE v_server NAME_TEXT;
    DECLARE v_at, v_count BIGINT;
    DECLARE v_outcome WORD_TEXT DEFAULT 'nothing';
    ALL_OR_NOTHING;
    START TRANSACTION;
    UPDATE dlock_locks SET token = token + 1 WHERE name = p_name;
    IF p_once IS NOT NULL THEN
        DELETE FROM dlock_successes WHERE name = p_name AND once = SHA2(p_once, 256);
        SET v_outcome = IF(ROW_COUNT() > 0, 'done', 'nothing');
    ELSEIF ROW_COUNT() > 0 THEN
        CALL dlock_clock(v_at, v_server);
        CALL dlock_tidy(p_name, v_at, v_server);
        SELECT COUNT(*) INTO v_count FROM dlock_contenders WHERE name = p_name;
        IF v_count > 0 THEN
            SET v_outcome = 'in use';
        ELSE
            SET v_outcome = 'done';
            DELETE FROM dlock_successes WHERE name = p_name;
            DELETE FROM dlock_history WHERE name = p_name;
        END IF;
    END IF;
    COMMIT;
    SET innodb_lock_wait_timeout = v_patience;
    SELECT v_outcome AS outcome;
END
//
-- One lock, or with p_name null the next so many after p_after: what is on record of them; then their contenders in the
-- order of the queue, each with how many microseconds its lease has left.
CREATE PROCEDURE dlock_status(IN p_name NAME_TEXT, IN p_after NAME_TEXT, IN p_count INT)
BEGIN
    DECLARE v_server, v_first, v_last NAME_TEXT;
    DECLARE v_at BIGINT;
    CALL dlock_clock(v_at, v_server);
    SELECT COALESCE(p_name, MIN(name)), COALESCE(p_name, MAX(name)) INTO v_first, v_last
    FROM (SELECT name FROM dlock_locks WHERE name > COALESCE(p_after, '') ORDER BY name LIMIT p_count) AS page;
    SELECT l.name, h.runs, CONCAT(REPLACE(CAST(h.last_success AS CHAR), ' ', 'T'), 'Z') AS last_success
    FROM dlock_locks l LEFT JOIN dlock_history h ON h.name = l.name
    WHERE l.name BETWEEN v_first AND v_last ORDER BY l.name;
    SELECT c.name, c.described, c.kept,
        IF(c.server = v_server, c.expires, COALESCE(s.expires, v_at + c.ttl)) - v_at AS expires_in
    FROM dlock_contenders c LEFT JOIN dlock_sightings s
      ON s.name = c.name AND s.owner = c.owner AND s.server = v_server AND s.renewal = c.renewal AND c.server <> v_server
    WHERE c.name BETWEEN v_first AND v_last ORDER BY c.name, c.ticket;
END
//
-- The resource's side of fencing. Called in the transaction that writes, it refuses that write if a newer token was seen
-- already, and makes writers with different tokens wait for each other's commit.
CREATE PROCEDURE dlock_fence(IN p_resource OWNER_TEXT, IN p_token BIGINT)
BEGIN
    DECLARE v_newest BIGINT;
    DECLARE v_message VARCHAR(128) CHARACTER SET utf8mb4;
    INSERT INTO dlock_fences (resource, token) VALUES (p_resource, p_token)
    ON DUPLICATE KEY UPDATE token = GREATEST(token, p_token), passed = passed + 1;
    SELECT token INTO v_newest FROM dlock_fences WHERE resource = p_resource FOR UPDATE;
    IF COALESCE(p_token < v_newest, TRUE) THEN
        SET v_message = CONCAT('stale fencing token ', COALESCE(p_token, 'NULL'), ' for ', LEFT(p_resource, 40), ': ',
            v_newest, ' was seen already; stop');
        SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = v_message;
    END IF;
END
//
-- For SQL clients, in seconds.
CREATE PROCEDURE dlock_acquire(IN p_name NAME_TEXT, IN p_owner OWNER_TEXT, IN p_ttl DECIMAL(12, 3)
)
    CALL dlock_ask(p_name, p_owner, p_ttl * 1000000, 'exclusive', 1, FALSE, NULL, NULL, NULL, FALSE)
//
CREATE PROCEDURE dlock_renew(IN p_name NAME_TEXT, IN p_owner OWNER_TEXT, IN p_token BIGINT, IN p_ttl DECIMAL(12, 3)
)
    CALL dlock_extend(p_name, p_owner, p_token, p_ttl * 1000000, NULL)
//
CREATE PROCEDURE dlock_release(IN p_name NAME_TEXT, IN p_owner OWNER_TEXT, IN p_token BIGINT)
    CALL dlock_end(p_name, p_owner, p_token, 0, NULL, NULL, 20, NULL, NULL)
//

DECLARE v_patience INT DEFAULT @@innodb_lock_wait_timeout;
    DECLARE EXIT HANDLER FOR SQLEXCEPTION
    BEGIN
        ROLLBACK;
        SET innodb_lock_wait_timeout = v_patience;
        RESIGNAL;
    END;
    -- Users with many privileges may write to a replica, but a lock on it is none on the primary.
    IF CAST(@@global.read_only AS CHAR) NOT IN ('0', 'OFF') THEN
        SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = 1290, MESSAGE_TEXT = 'the server is read-only';
    END IF;
    SET innodb_lock_wait_timeout = 4;

-- What nobody should do by hand: that could let a second holder in beside the first, or let a token go back. What the
-- procedures do tells itself apart by the row alone, so that a replica that repeats it agrees.
CREATE TRIGGER dlock_contenders_stay BEFORE DELETE ON dlock_contenders FOR EACH ROW
BEGIN
    IF OLD.token IS NOT NULL AND OLD.expires <> 0 THEN
        SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT =
            'who holds a lock is changed by dlock_revoke() and the other procedures, not by hand';
    END IF;
END
//
CREATE TRIGGER dlock_contenders_renew BEFORE UPDATE ON dlock_contenders FOR EACH ROW
BEGIN
    IF NEW.renewal <= OLD.renewal THEN
        SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT =
            'who holds a lock is changed by dlock_revoke() and the other procedures, not by hand';
    END IF;
END
//
CREATE TRIGGER dlock_locks_stay BEFORE DELETE ON dlock_locks FOR EACH ROW
    SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'a fencing token never goes back, and its row never goes'
//
CREATE TRIGGER dlock_locks_grow BEFORE UPDATE ON dlock_locks FOR EACH ROW
BEGIN
    IF NEW.token < OLD.token THEN
        SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'a fencing token never goes back, and its row never goes';
    END IF;
END
//
CREATE TRIGGER dlock_fences_stay BEFORE DELETE ON dlock_fences FOR EACH ROW
    SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'a fencing token never goes back, and its row never goes'
//
CREATE TRIGGER dlock_fences_grow BEFORE UPDATE ON dlock_fences FOR EACH ROW
BEGIN
    IF NEW.token < OLD.token THEN
        SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'a fencing token never goes back, and its row never goes';
    END IF;
END
//

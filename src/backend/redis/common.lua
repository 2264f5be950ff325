-- What all verbs share, after prelude.lua.
--
-- lock     string  the lock itself: its one holder's owner id, or =MODE where several hold it together
-- holders  zset    owner -> when its lease ends (ms)
-- lingering  set  those of the holders that nobody keeps alive: what a release has left behind; its key is `held`
-- queue    zset    owner -> ticket, for those who wait
-- places   zset    owner -> when it loses its place unless it asks again (ms)
-- details  hash    owner -> "MODE TTL SINCE TOKEN SLOT IDENTITY", for holders and waiters
-- counter  string  the last token given out
-- agreed_slots  string  the number of slots that holders and waiters agree on
-- last     string  the last run as JSON
-- once     set     keys of successful runs
-- notes..owner     string  a note to one contender, who watches it: "turn", "revoked REASON"; or what became
--                  of it, for requests that arrive late or twice: "released", "gone", "withdrawn", "taken REASON"
local lock, holders, lingering, queue, places, details, counter, agreed_slots, last, once, notes = unpack(KEYS)

-- A waiter that was told that it is its turn and does not ask within this time (ms) is passed over. It keeps its
-- place: if it lives, it is first again as soon as it asks.
local COMES_WITHIN = 1000
-- How long a waiter's note says "turn" (ms).
local TURN = 5000

local function together(value)
  return value and value:sub(1, 1) == '='
end

local function forget(owner)
  redis.call('ZREM', holders, owner)
  redis.call('SREM', lingering, owner)
  redis.call('ZREM', queue, owner)
  redis.call('ZREM', places, owner)
  redis.call('HDEL', details, owner)
  redis.call('DEL', notes .. owner)
end

-- Forgets everybody whose time is over and returns the value of the lock. Only whom the lock names holds
-- it; but a holder whose lock was deleted or overwritten may still be ending its command, and nobody
-- else gets the lock before that holder says so or its lease has ended.
local function settle()
  local value = redis.call('GET', lock)
  for _, owner in ipairs(redis.call('ZRANGEBYSCORE', holders, '-inf', now)) do
    if owner ~= value then forget(owner) end
  end
  for _, owner in ipairs(redis.call('ZRANGEBYSCORE', places, '-inf', now)) do
    forget(owner)
  end
  -- A server short of memory may have evicted all places: nobody could be found dead without them.
  if redis.call('ZCARD', queue) ~= redis.call('ZCARD', places) then
    for _, owner in ipairs(redis.call('ZRANGE', queue, 0, -1)) do
      if not redis.call('ZSCORE', places, owner) then forget(owner) end
    end
  end
  return value
end

local function holds(value, owner)
  return value == owner or (together(value) and redis.call('ZSCORE', holders, owner) ~= false)
end

-- Whether the key was deleted or evicted while it was held.
local function has_lost_its_key(value)
  return not value and redis.call('ZCARD', holders) > 0
end

local function detail(owner, n)
  local text = redis.call('HGET', details, owner)
  if not text then return nil end
  for word in text:gmatch('%S+') do
    n = n - 1
    if n == 0 then return word end
  end
end

local function mode_of(owner)
  return detail(owner, 1) or 'exclusive'
end

-- Whether this owner is known to hold the lock no more.
local function has_left(owner)
  local note = ask('GET', notes .. owner)
  return note and (note == 'released' or note == 'gone' or note:sub(1, 9) == 'withdrawn' or reason_in(note, 'taken'))
end

-- Lets the lease of a holder end ms from now.
local function lease(value, owner, ms)
  redis.call('ZADD', holders, now + ms, owner)
  if together(value) then
    local latest = redis.call('ZRANGE', holders, -1, -1, 'WITHSCORES')
    redis.call('SET', lock, value, 'PX', string.format('%.0f', latest[2] - now))
  else
    redis.call('SET', lock, owner, 'PX', ms)
  end
  outlast(ms, holders, details)
end

-- The same for a holder that stays, also on a server without memory to spare. Such a one refuses what may need more,
-- but only as the first write of a script; and where the lock names its one holder, its expiry says all.
local function extend(value, owner, ms)
  if together(value) then
    redis.call('PEXPIRE', lock, math.max(redis.call('PTTL', lock), ms))
    lease(value, owner, ms)
  else
    redis.call('PEXPIRE', lock, ms)
    redis.pcall('ZADD', holders, now + ms, owner)
    outlast(ms, holders, details)
  end
end

-- Takes a holder out, and the lock away with the last of them.
local function let_go(value, owner)
  forget(owner)
  local latest = redis.call('ZRANGE', holders, -1, -1, 'WITHSCORES')
  if together(value) and latest[2] then
    redis.call('PEXPIREAT', lock, latest[2])
  else
    redis.call('DEL', lock)
  end
end

-- Should it fail, the waiter asks some time by itself, and what else is to be done here goes on.
local function tell_turn(owner)
  redis.pcall('SET', notes .. owner, 'turn', 'NX', 'PX', TURN)
end

-- How long ago (ms) a waiter was told that it is its turn, if it has not asked since.
local function told_ago(owner)
  if not owner or ask('GET', notes .. owner) ~= 'turn' then return nil end
  return TURN - redis.call('PTTL', notes .. owner)
end

local function at_rank(n)
  return redis.call('ZRANGE', queue, n, n)[1]
end

-- How many at the head of the queue are passed over.
local function passed_over()
  local n = 0
  while (told_ago(at_rank(n)) or 0) >= COMES_WITHIN do n = n + 1 end
  return n
end

-- Whoever is first in the queue watches the lock itself, so it must learn that it is.
local function tell_first()
  local first = at_rank(passed_over())
  if first then tell_turn(first) end
end

-- Tells the waiters who may hold the lock now that it is their turn: one, or as many as fit together.
local function wake()
  local passed = passed_over()
  local first = at_rank(passed)
  if not first then return end
  local value, mode = redis.call('GET', lock), mode_of(first)
  if has_lost_its_key(value) or (value and value ~= '=' .. mode) then return end
  if mode == 'exclusive' then
    tell_turn(first)
  elseif mode == 'shared' then
    for _, owner in ipairs(redis.call('ZRANGE', queue, passed, -1)) do
      if mode_of(owner) ~= 'shared' then break end
      tell_turn(owner)
    end
  else
    local room = tonumber(mode:match('%d+')) - redis.call('ZCARD', holders)
    if room > 0 then
      for _, owner in ipairs(redis.call('ZRANGE', queue, passed, passed + room - 1)) do tell_turn(owner) end
    end
  end
end

-- What the verbs of a single Redis share, after prelude.lua.
--
-- agreed_slots  string  the number of slots that holders and waiters agree on
-- notes              "turn", "revoked REASON"; or what became of it, for requests that arrive late or twice: "released",
--                    "gone", "withdrawn", "taken REASON"
local agreed_slots = KEYS[13]

-- A waiter that was told that it is its turn and does not ask within this time (ms) is passed over. It keeps its
-- place: if it lives, it is first again as soon as it asks.
local COMES_WITHIN = 1000
-- How long a waiter's note says "turn" (ms).
local TURN = 5000

local function forget(owner)
  for _, key in ipairs({ holders, queue, places }) do redis.call('ZREM', key, owner) end
  redis.call('SREM', lingering, owner)
  redis.call('HDEL', details, owner)
  redis.call('DEL', notes .. owner)
end

local function lingers(owner)
  return redis.call('SISMEMBER', lingering, owner) == 1
end

-- Forgets everybody whose time is over. Only whom the lock names holds it; but a holder whose lock was deleted or
-- overwritten may still be ending its command, and nobody else gets the lock before that holder says so or its lease
-- has ended.
local function settle()
  for _, owner in ipairs(redis.call('ZRANGEBYSCORE', holders, '-inf', now)) do
    if owner ~= value then
      if not lingers(owner) then note_vanished(owner) end
      forget(owner)
    end
  end
  forget_late_waiters(forget)
end

local function mode_of(owner)
  return detail(owner, 1) or 'exclusive'
end

-- The rule of `lock::may_hold`: whether one of this mode fits in with the holders and so many waiters before it, which
-- must be shared ones if it is one. A lock without a value that has holders was deleted or evicted while it was held.
local function fits(mode, ahead)
  local present = redis.call('ZCARD', holders)
  local free = not value and present == 0
  if not free and value ~= '=' .. mode then return false end
  return mode == 'shared' or present + ahead < tonumber(mode:match('%d+') or 1)
end

-- When the last of the leases ends (ms).
local function latest_end()
  return redis.call('ZRANGE', holders, -1, -1, 'WITHSCORES')[2]
end

-- Lets the lease of a holder end ms from now, and the lock with the last of them.
local function lease(owner, ms)
  redis.call('ZADD', holders, now + ms, owner)
  redis.call('SET', lock, value, 'PX', together() and whole(latest_end() - now) or ms)
  outlast(ms, holders, details)
end

-- Extends the lease of a holder, also on a full server: that refuses what may need memory, but only as the first write of a
-- script. Where the lock names its one holder, its expiry says all.
local function extend(owner, ms)
  if together() then
    redis.call('PEXPIRE', lock, math.max(redis.call('PTTL', lock), ms))
    lease(owner, ms)
  else
    redis.call('PEXPIRE', lock, ms)
    redis.pcall('ZADD', holders, now + ms, owner)
    outlast(ms, holders, details)
  end
end

-- Takes a holder out, and the lock away with the last of them.
local function let_go(owner)
  forget(owner)
  local latest = together() and latest_end()
  if latest then
    redis.call('PEXPIREAT', lock, latest)
  else
    redis.call('DEL', lock)
    value = false
  end
end

-- If that fails, the waiter asks later by itself, and the script goes on.
local function tell_turn(owner)
  redis.pcall('SET', notes .. owner, 'turn', 'NX', 'PX', TURN)
end

-- How long ago (ms) a waiter was told that it is its turn, if it has not asked since.
local function told_ago(owner)
  return owner and note_to(owner) == 'turn' and TURN - redis.call('PTTL', notes .. owner)
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
  local passed, ahead = passed_over(), 0
  local owner = at_rank(passed)
  local mode = owner and mode_of(owner)
  while owner and mode_of(owner) == mode and fits(mode, ahead) do
    tell_turn(owner)
    ahead = ahead + 1
    owner = at_rank(passed + ahead)
  end
end

-- What all verbs of a node share, after prelude.lua.
--
-- taken      string  "OWNER N": by which request of its owner the lock was last taken or kept, for older ones that
--                    arrive late
-- notes              to the holder: "revoked REASON", "taken REASON" once this node was taken from it; or, once it has let
--                    go and watches no more, "released", for a release that arrives twice
-- turns..owner  string  tells a waiter, who watches it, that it is the first here: since when (ms)
-- lates..owner  string  its requests up to this number are given up, should they arrive late
local taken, turns, lates = KEYS[13], KEYS[14], KEYS[15]

-- A waiter that was told that it is its turn and does not ask within this time (ms) is passed over. If it lives, it has
-- its place back as soon as it asks.
local COMES_WITHIN = 500

-- Only whom the lock names holds it, and only `sweep` looks for those whose time is over.
local function settle() end

local function lingers(owner)
  return ask('GET', lingering) == owner
end

local function describe(owner, ttl, token, who, since)
  since = since or whole(now)
  ask('HSET', details, owner, table.concat({ 'exclusive', ttl, since, token, '-', who }, ' '))
  outlast(ttl, details)
end

-- The number of the owner's last request that took or kept the lock here; zero if it was somebody else's.
local function taken_by(owner)
  local by, n = (ask('GET', taken) or ''):match('^(%S+) (%d+)$')
  return by == owner and tonumber(n) or 0
end

local function taken_as(owner, n)
  return owner .. ' ' .. whole(math.max(n, taken_by(owner)))
end

local function take(owner, n, ttl)
  redis.call('SET', lock, owner, 'PX', ttl)
  redis.call('SET', taken, taken_as(owner, n))
  value = owner
end

-- Lets the lock end ms from now, and not before it what is known of its holder.
local function extend(_, ms)
  redis.call('PEXPIRE', lock, ms)
  outlast(ms, details)
end

local function leave_queue(owner)
  ask('ZREM', places, owner)
  ask('ZREM', queue, owner)
  ask('DEL', turns .. owner)
end

local function forget(owner)
  leave_queue(owner)
  ask('HDEL', details, owner)
end

-- Forgets waiters that have not asked for long, and holders that are none any more; says how many wait. Looks at
-- all of them only if their numbers do not fit: with a thousand waiters that is too much work for every request.
local function sweep()
  forget_late_waiters(forget)
  local waiting = ask('ZCARD', places) or 0
  if (ask('HLEN', details) or 0) > waiting + 1 then
    for _, owner in ipairs(ask('HKEYS', details) or {}) do
      if owner ~= value and not ask('ZSCORE', places, owner) then
        if not lingers(owner) then note_vanished(owner) end
        ask('HDEL', details, owner)
      end
    end
  end
  return waiting
end

local function first()
  return (ask('ZRANGE', queue, 0, 0) or {})[1]
end

-- Whoever is first watches the lock itself and may take it, so it must learn that it is. It alone is woken. If that
-- fails, the waiter asks later by itself, and the script goes on.
local function tell_first(but)
  local owner = first()
  if owner and owner ~= but then
    redis.pcall('SET', turns .. owner, whole(now), 'NX', 'PX', 60000)
  end
end
local wake = tell_first

-- Where a waiter belongs in the queue. It began to wait at since (µs) by its own clock, which is the same for
-- all nodes, and has waited for so long (ms), which counts if that clock is half a minute off: less may be due to a
-- request that took long.
local function order(since, waited)
  local here = (now - waited) * 1000
  return math.abs(since - here) < 30000000 and since or whole(here)
end

-- Takes or keeps a place in the queue; says how many are before it, and within how many ms it has to ask again:
-- those who have long to wait need not ask often. The next ones after the first ask more often than it takes to keep
-- their places, to notice soon that the first does not come.
local function wait(owner, since, waited, ttl, who)
  local place = order(since, waited)
  ask('ZADD', queue, place, owner)
  local ahead = ask('ZRANK', queue, owner) or 0
  local every = math.min(2000 + 20 * ahead, 20000)
  ask('ZADD', places, now + 2 * every + 2000, owner)
  if ask('HEXISTS', details, owner) == 0 then describe(owner, ttl, '-', who, whole(place / 1000)) end
  outlast(2 * every + 2000, queue, places, details)
  return ahead, ahead > 0 and math.min(500 * ahead, every) or every
end

-- Whether this request, the nth of its owner, arrived after the owner had given it up.
local function is_late(owner, n)
  local given_up = tonumber(ask('GET', lates .. owner) or '')
  return given_up and tonumber(n) <= given_up
end

-- What is given up stays so: a request that names a lower number may be late itself. If that fails, the script goes on.
local function give_up(owner, n)
  if n ~= '' and not is_late(owner, n) then redis.pcall('SET', lates .. owner, n, 'PX', 600000) end
end

local function let_go(owner)
  redis.call('DEL', lock, lingering, taken)
  ask('HDEL', details, owner)
  value = false
end

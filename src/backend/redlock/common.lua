-- What all verbs of a node share, after prelude.lua.
--
-- lock     string  the lock itself: its holder's owner id
-- lingering  string  its holder again, once nobody keeps it alive: what a release has left behind; its key is `held`
-- taken    string  "OWNER N": by which request of its owner the lock was last taken or kept, for older ones that
--                  arrive late
-- counter  string  the greatest token this node has heard of
-- details  hash    owner -> "MODE TTL SINCE TOKEN SLOT IDENTITY", for the holder and waiters
-- queue    zset    owner -> since when it waits (µs), by its own clock, so that all nodes have the same order
-- places   zset    owner -> when a waiter is forgotten unless it asks again (ms)
-- last     string  the last run as JSON
-- once     set     keys of successful runs
-- notes..owner     string  a note to the holder, who watches it: "revoked REASON", "taken REASON" once this node was taken
--                  from it; or, once it has let go and watches no more, "released", for a release that arrives twice
-- turns..owner     string  tells a waiter, who watches it, that it is the first here: since when (ms)
-- lates..owner     string  its requests up to this number are given up, should they arrive late
local lock, lingering, taken, counter, details, queue, places, last, once, notes, turns, lates = unpack(KEYS)

-- Who is told that it is its turn and does not come for so long (ms) is passed over. If it lives, it asks
-- again some time, and has its place back.
local COMES_WITHIN = 500

local function describe(owner, ttl, token, who, since)
  since = since or string.format('%.0f', now)
  ask('HSET', details, owner, table.concat({ 'exclusive', ttl, since, token, '-', who }, ' '))
  outlast(ttl, details)
end

-- The number of the owner's last request that took or kept the lock here; zero if it was somebody else's.
local function taken_by(owner)
  local by, n = (ask('GET', taken) or ''):match('^(%S+) (%d+)$')
  return by == owner and tonumber(n) or 0
end

local function taken_as(owner, n)
  return owner .. ' ' .. string.format('%.0f', math.max(n, taken_by(owner)))
end

local function take(owner, n, ttl)
  redis.call('SET', lock, owner, 'PX', ttl)
  redis.call('SET', taken, taken_as(owner, n))
end

-- Lets the lock end ms from now, and not before it what is known of its holder.
local function extend(ms)
  redis.call('PEXPIRE', lock, ms)
  outlast(ms, details)
end

local function leave_queue(owner)
  if ask('ZREM', places, owner) ~= 0 then
    ask('ZREM', queue, owner)
    ask('DEL', turns .. owner)
  end
end

local function forget(owner)
  leave_queue(owner)
  ask('HDEL', details, owner)
end

-- Forgets waiters that have not asked for long, and holders that are none any more; says how many wait. Looks at
-- all of them only if their numbers do not fit: with a thousand waiters that is too much work for every request.
local function sweep(holder)
  local waiting = ask('ZCARD', places) or 0
  if waiting > 0 then
    for _, owner in ipairs(ask('ZRANGEBYSCORE', places, '-inf', now) or {}) do forget(owner) end
    waiting = ask('ZCARD', places) or 0
  end
  if (ask('HLEN', details) or 0) > waiting + 1 then
    for _, owner in ipairs(ask('HKEYS', details) or {}) do
      if owner ~= holder and not ask('ZSCORE', places, owner) then ask('HDEL', details, owner) end
    end
  end
  if ask('ZCARD', queue) ~= waiting then
    for _, owner in ipairs(ask('ZRANGE', queue, 0, -1) or {}) do
      if not ask('ZSCORE', places, owner) then ask('ZREM', queue, owner) end
    end
  end
  return waiting
end

local function first()
  return (ask('ZRANGE', queue, 0, 0) or {})[1]
end

-- Whoever is first watches the lock itself and may take it, so it must learn that it is. It alone is woken. Should
-- that fail, it asks some time by itself, and what else is to be done here goes on.
local function tell_first(but)
  local owner = first()
  if owner and owner ~= but then
    redis.pcall('SET', turns .. owner, string.format('%.0f', now), 'NX', 'PX', 60000)
  end
end

-- Where a waiter belongs in the queue. It began to wait at since (µs) by its own clock, which is the same for
-- all nodes, and has waited for so long (ms), which counts if that clock is half a minute off: less may be due to a
-- request that took long.
local function order(since, waited)
  local here = (now - waited) * 1000
  return math.abs(since - here) < 30000000 and since or string.format('%.0f', here)
end

-- Takes or keeps a place in the queue; says how many are before it, and within how many ms it has to ask again:
-- those who have long to wait need not ask often. The next ones after the first ask more often than it takes to keep
-- their places, to notice soon that the first does not come.
local function wait(owner, since, waited, ttl, who)
  local place = order(since, waited)
  ask('ZADD', queue, place, owner)
  local ahead = ask('ZRANK', queue, owner) or 0
  local beat = math.min(2000 + 20 * ahead, 20000)
  ask('ZADD', places, now + 2 * beat + 2000, owner)
  if ask('HEXISTS', details, owner) == 0 then describe(owner, ttl, '-', who, string.format('%.0f', place / 1000)) end
  outlast(2 * beat + 2000, queue, places, details)
  return ahead, ahead > 0 and math.min(500 * ahead, beat) or beat
end

-- Whether this request, the nth of its owner, arrived after the owner had given it up.
local function is_late(owner, n)
  local given_up = tonumber(ask('GET', lates .. owner) or '')
  return given_up and tonumber(n) <= given_up
end

-- What is given up stays so: word of less may be late itself. Should it fail, what else is to be done here goes on.
local function give_up(owner, n)
  if n ~= '' and not is_late(owner, n) then redis.pcall('SET', lates .. owner, n, 'PX', 600000) end
end

local function let_go(owner)
  redis.call('DEL', lock, lingering, taken)
  ask('HDEL', details, owner)
end

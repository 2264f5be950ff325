-- What all verbs of a node share. Prepended to each of them.
--
-- lock     string  the lock itself: its holder's owner id
-- held     string  its holder again, once nobody keeps it alive: what a release has left behind
-- counter  string  the greatest token this node has heard of
-- details  hash    owner -> "MODE TTL SINCE TOKEN SLOT IDENTITY", for the holder and waiters
-- places   zset    owner -> when a waiter is forgotten unless it asks again (ms); for people, not for order
-- last     string  the last run as JSON
-- once     set     keys of successful runs
-- notes..owner     string  a note to one contender: "revoked REASON"; or what became of it, for requests that
--                  arrive late or twice: "released", "withdrawn N": its requests up to the Nth
local lock, held, counter, details, places, last, once, notes = unpack(KEYS)

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

-- For keys that no lock hangs on. Somebody may have put anything there: one of another type says nothing.
local function ask(...)
  local answer = redis.pcall(...)
  if type(answer) ~= 'table' or not answer.err then return answer end
  return not answer.err:find('WRONGTYPE') and redis.call(...)
end

-- Zero if the counter makes no sense; Lua's numbers are exact up to 2^53.
local function highest_token()
  local token = tonumber(ask('GET', counter) or '')
  return token and token >= 0 and token < 9007199254740992 and token or 0
end

local function describe(owner, ttl, token, who)
  local since = string.format('%.0f', now)
  ask('HSET', details, owner, table.concat({ 'exclusive', ttl, since, token, '-', who }, ' '))
end

-- Forgets waiters that have not asked for long, and holders that are none any more.
local function sweep(holder)
  ask('ZREMRANGEBYSCORE', places, '-inf', now)
  for _, owner in ipairs(ask('HKEYS', details) or {}) do
    if owner ~= holder and not ask('ZSCORE', places, owner) then ask('HDEL', details, owner) end
  end
end

-- Whether this request, the nth of its owner, arrived after the owner had given it up.
local function is_late(owner, n)
  local note = ask('GET', notes .. owner)
  local last_given_up = note and note:match('^withdrawn (%d+)')
  return last_given_up and tonumber(n) <= tonumber(last_given_up)
end

local function let_go(owner)
  redis.call('DEL', lock, held)
  ask('HDEL', details, owner)
end

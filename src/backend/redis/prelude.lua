--!df flags=allow-undeclared-keys
-- The line above is for Dragonfly: which notes a script writes depends on who waits.
--
-- What the scripts of a single Redis and those of a node of a Redlock share. It stands before all of them.
--
-- lock       string  the lock itself: its holder's owner id; on a single Redis also =MODE, where several hold it together
-- lingering  set     holders that nobody keeps alive: what a release has left behind; on a node a string, one owner; its
--                    key is `held`
-- queue      zset    owner -> its place among those who wait: a ticket; on a node, since when it waits (µs), by its own
--                    clock, so that all nodes have the same order
-- places     zset    owner -> when it loses its place unless it asks again (ms)
-- details    hash    owner -> "MODE TTL SINCE TOKEN SLOT IDENTITY", for holders and waiters
-- counter    string  the last token given out, or heard of
-- last       string  the last run as JSON
-- earlier    list    the runs before it, newest first; of one that vanished "vanished DETAILS"
-- success    string  when a run last succeeded (ms)
-- once       set     keys of successful runs
-- notes..owner  string  a note to one contender, who watches it
-- holders    zset    owner -> when its lease ends (ms); a node has only the lock's own expiry
local lock, lingering, queue, places, details, counter, last, once, notes, earlier, success, holders = unpack(KEYS)
-- What the lock holds, kept up to date by whatever changes it.
local value = redis.call('GET', lock)
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

-- As a whole number, which tostring would round.
local function whole(number)
  return string.format('%.0f', number)
end

-- For keys that no lock hangs on. Somebody may have put anything there: one of another type says nothing.
local function ask(...)
  local answer = redis.pcall(...)
  if type(answer) ~= 'table' or not answer.err then return answer end
  return not answer.err:find('WRONGTYPE') and redis.call(...)
end

-- Zero if the counter makes no sense; Lua's numbers are exact up to 2^53.
local function last_token()
  local token = tonumber(ask('GET', counter) or '')
  return token and token >= 0 and token < 9007199254740992 and token or 0
end

-- The least that the next token may be: it grows even over the loss of all data, as long as the clock does.
local function next_token()
  return whole(math.max(last_token() + 1, time[1] * 1000000 + time[2]))
end

-- Word n of what is known of a contender.
local function detail(owner, n)
  for word in (ask('HGET', details, owner) or ''):gmatch('%S+') do
    n = n - 1
    if n == 0 then return word end
  end
end

local function note_to(owner)
  return ask('GET', notes .. owner)
end

-- If that fails, the script goes on.
local function leave_note(owner, note, ms)
  redis.pcall('SET', notes .. owner, note, 'PX', ms)
end

-- Makes a run the last one, and forgets those beyond so many. If that fails, the script goes on.
local function remember(run, runs, succeeded)
  local before = ask('GET', last)
  if not run or run == '' or run == before then return end
  if before then redis.pcall('LPUSH', earlier, before) end
  redis.pcall('LTRIM', earlier, 0, math.max(runs, 1) - 2)
  if tonumber(runs) < 2 then redis.pcall('DEL', earlier) end
  redis.pcall('SET', last, run)
  if succeeded ~= '' then redis.pcall('SET', success, succeeded) end
end

-- The run of a holder whose lease ran out because its dlock died; nothing for a waiter, which has no token.
local function vanished_run(owner)
  local known = ask('HGET', details, owner)
  return known and known:find('^%S+ %S+ %S+ %d+ ') and 'vanished ' .. known
end

local function note_vanished(owner)
  local run = vanished_run(owner)
  if run then
    redis.pcall('LPUSH', earlier, run)
    redis.pcall('LTRIM', earlier, 0, 98)
  end
end

-- An operator's note to a contender, "WORD REASON", as an answer, if it has this word.
local function told(owner, word)
  local reason = (note_to(owner) or ''):match('^' .. word .. ' (.*)')
  return reason and { word, reason }
end

-- Whether several hold the lock.
local function together()
  return value and value:sub(1, 1) == '='
end

local function holds(owner)
  return value == owner or (together() and redis.call('ZSCORE', holders, owner) ~= false)
end

-- How long the lease of a holder lasts from now (ms); -1 if for ever.
local function lease_left(owner)
  if value == owner then return redis.call('PTTL', lock) end
  return math.max((ask('ZSCORE', holders, owner) or 0) - now, 0)
end

-- Forgets the waiters that have not asked for long. A server short of memory may have evicted all places: nobody could be
-- found dead without them.
local function forget_late_waiters(forget)
  for _, owner in ipairs(ask('ZRANGEBYSCORE', places, '-inf', now) or {}) do forget(owner) end
  if ask('ZCARD', queue) ~= ask('ZCARD', places) then
    for _, owner in ipairs(ask('ZRANGE', queue, 0, -1) or {}) do
      if not ask('ZSCORE', places, owner) then forget(owner) end
    end
  end
end

-- Lets a key be there for ms from now and an hour more, and yet be gone in the end if nobody ever asks again.
local function outlast(ms, ...)
  for _, key in ipairs({ ... }) do
    if redis.call('PTTL', key) < ms + 3600000 then redis.call('PEXPIRE', key, ms + 86400000) end
  end
end


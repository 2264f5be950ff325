--!df flags=allow-undeclared-keys
-- The line above is for Dragonfly: which notes a script writes depends on who waits.
--
-- What the scripts of a single Redis and those of a Redlock node share. It stands before all of them.
--
-- lock       string  the lock itself: its holder's owner id; on a single Redis also =MODE, where several hold it together
-- lingering          those of the holders that nobody keeps alive: what a release has left behind; its key is `held`
-- queue      zset    owner -> its place among those who wait
-- places     zset    owner -> when it loses its place unless it asks again (ms)
-- details    hash    owner -> "MODE TTL SINCE TOKEN SLOT IDENTITY", for holders and waiters
-- counter    string  the last token given out, or heard of
-- last       string  the last run as JSON
-- earlier    list    the runs before it, newest first; of one that vanished "vanished DETAILS"
-- success    string  when a run last succeeded (ms)
-- once       set     keys of successful runs
-- notes..owner  string  a note to one contender, who watches it
local lock, lingering, queue, places, details, counter, last, once, notes, earlier, success = unpack(KEYS)
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local micros = time[1] * 1000000 + time[2]

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

-- The reason in a note "WORD REASON", if it has this word.
local function reason_in(note, word)
  return note and note:sub(1, #word + 1) == word .. ' ' and note:sub(#word + 2)
end

-- Lets a key be there for ms from now and an hour more, and yet be gone in the end if nobody ever asks again.
local function outlast(ms, ...)
  for _, key in ipairs({ ... }) do
    if redis.call('PTTL', key) < ms + 3600000 then redis.call('PEXPIRE', key, ms + 86400000) end
  end
end


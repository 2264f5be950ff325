-- What the scripts of a single Redis and those of a Redlock node have in common. Prepended to all of them.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local micros = time[1] * 1000000 + time[2]

-- For keys that no lock hangs on. Somebody may have put anything there: one of another type says nothing.
local function ask(...)
  local answer = redis.pcall(...)
  if type(answer) ~= 'table' or not answer.err then return answer end
  return not answer.err:find('WRONGTYPE') and redis.call(...)
end

-- Zero if the counter makes no sense; Lua's numbers are exact up to 2^53.
local function token_in(counter)
  local token = tonumber(ask('GET', counter) or '')
  return token and token >= 0 and token < 9007199254740992 and token or 0
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


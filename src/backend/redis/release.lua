-- Lets go of the lock and records how the run ended. Asked again it says what it said before.
-- unanswered: an acquire of ours got no answer; should it arrive later, it must find that we left.
local owner, token, hold, run, key, unanswered = unpack(ARGV)
local value = settle()
local note = ask('GET', notes .. owner)
local answer, why = 'gone', reason_in(note, 'taken')
if holds(value, owner) then
  answer = 'released'
  -- A holder has no place in the queue; but a server without memory to spare refuses only the first write of a script.
  redis.call('ZREM', places, owner)
  -- Before anything is let go: if it cannot be recorded, the next one must not run.
  if key ~= '' then redis.call('SADD', once, key) end
  if run ~= '' then redis.pcall('SET', last, run) end
  if tonumber(hold) > 0 then
    extend(value, owner, hold)
    redis.pcall('SADD', lingering, owner)
    tell_first()
  else
    let_go(value, owner)
    wake()
  end
elseif why then
  -- How the run ended is on record already, and why; the note stays, should this be asked again.
  answer = 'taken'
elseif note and note:sub(-8) == 'released' then
  answer = 'released'
else
  if run ~= '' and ask('GET', counter) == token then redis.pcall('SET', last, run) end
  forget(owner)
  wake()
end
if unanswered == '1' then
  local word = answer == 'released' and answer or 'gone'
  redis.pcall('SET', notes .. owner, 'withdrawn ' .. word, 'PX', 600000)
elseif answer == 'released' or answer == 'gone' then
  redis.pcall('SET', notes .. owner, answer, 'PX', 60000)
end
return { answer, answer == 'taken' and why or nil }

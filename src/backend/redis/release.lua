-- Lets go of the lock, or of a place in the queue, and records how the run ended, if there was one. Asked again it says
-- what it said before. unanswered: an acquire of ours got no answer; should it arrive later, it must find that we left.
local owner, token, hold, run, key, unanswered, runs, succeeded = unpack(ARGV)
settle()
local note, taken = note_to(owner) or '', told(owner, 'taken')
local answer = 'gone'
if holds(owner) then
  answer = 'released'
  -- A holder has no place in the queue; but a server without memory to spare refuses only the first write of a script.
  redis.call('ZREM', places, owner)
  -- Before anything is let go: if it cannot be recorded, the next one must not run.
  if key ~= '' then redis.call('SADD', once, key) end
  remember(run, runs, succeeded)
  if tonumber(hold) > 0 then
    extend(owner, hold)
    redis.pcall('SADD', lingering, owner)
    tell_first()
  else
    let_go(owner)
    wake()
  end
elseif taken then
  -- How the run ended is on record already, and why; the note stays, should this be asked again.
  answer = 'taken'
elseif note:sub(-8) == 'released' then
  answer = 'released'
else
  if ask('GET', counter) == token then remember(run, runs, succeeded) end
  forget(owner)
  wake()
  tell_first()
end
if unanswered == '1' then
  leave_note(owner, 'withdrawn ' .. (answer == 'released' and answer or 'gone'), 600000)
elseif answer ~= 'taken' then
  leave_note(owner, answer, 60000)
end
return answer == 'taken' and taken or { answer }

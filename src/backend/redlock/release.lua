-- Lets go of this node and records how the run ended. Asked again it says what it said before.
-- given_up: as in give_back.lua.
local owner, token, hold, run, key, given_up, runs, succeeded = unpack(ARGV)
local answer, freed = 'gone', told(owner, 'taken')
leave_queue(owner)
-- Before anything is let go: if it cannot be recorded, the next one must not run.
if key ~= '' then redis.call('SADD', once, key) end
if holds(owner) then
  answer = 'released'
  if tonumber(hold) > 0 then
    extend(owner, hold)
    redis.pcall('SET', lingering, owner)
  else
    let_go(owner)
  end
  tell_first()
elseif note_to(owner) == 'released' then
  answer = 'released'
elseif freed then
  answer = 'taken'
end
-- A node that came back empty learns of the run too, unless it knows of a later one, or better.
if not freed and last_token() <= tonumber(token) then remember(run, runs, succeeded) end
give_up(owner, given_up)
if answer == 'released' then leave_note(owner, answer, 60000) end
return answer == 'taken' and freed or { answer }

-- Lets go of the lock and records how the run ended. Asked again it says what it said before.
-- forsake: an acquire of ours is still unanswered; should it arrive later, it must find that we left.
local owner, token, hold, run, key, forsake = unpack(ARGV)
local value = settle()
local note = ask('GET', notes .. owner)
local answer = 'gone'
if holds(value, owner) then
  answer = 'released'
  if run ~= '' then redis.call('SET', last, run) end
  if key ~= '' then redis.call('SADD', once, key) end
  if tonumber(hold) > 0 then
    lease(value, owner, hold)
    redis.call('SADD', held, owner)
    tell_first()
  else
    let_go(value, owner)
    wake()
  end
elseif note and note:sub(-8) == 'released' then
  answer = 'released'
else
  if run ~= '' and ask('GET', counter) == token then redis.call('SET', last, run) end
  forget(owner)
  wake()
end
if forsake == '1' then
  redis.call('SET', notes .. owner, 'withdrawn ' .. answer, 'PX', 600000)
elseif answer == 'released' then
  redis.call('SET', notes .. owner, 'released', 'PX', 60000)
end
return answer
